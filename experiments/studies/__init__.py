"""Studies: fixed questions with their commands, tables and figures."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.compare import compare


def sweep(study: str, overrides: list[str]) -> Path:
    """Run the sweep that `study=…` defines, with these overrides; its folder under runs/."""
    folder = Path("runs") / study / time.strftime("%Y-%m-%d_%H-%M-%S")
    command = ["-m", "experiments.train", "-m", f"study={study}", f"hydra.sweep.dir={folder}", *overrides]
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], check=True)
    return folder


def compared(study: str, folder: Path, **options: Any) -> None:
    """Print the table of a sweep's records and draw its figure beside them; the options are those of `compare`."""
    comparison = compare(folder, **options)
    print(f"\n{study}\n{comparison.table()}")
    print("\n".join(comparison.notes))
    path = folder / f"{study}.png"
    assert comparison.figure is not None
    comparison.figure.savefig(path, dpi=150)
    print(f"figure: {path}\n", flush=True)
