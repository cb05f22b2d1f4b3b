"""Studies: fixed questions with their commands, tables and figures."""

import subprocess
import sys
import time
from pathlib import Path


def sweep(study: str, overrides: list[str]) -> Path:
    """Run the sweep that `study=…` defines, with these overrides; its folder under runs/."""
    folder = Path("runs") / study / time.strftime("%Y-%m-%d_%H-%M-%S")
    command = ["-m", "experiments.train", "-m", f"study={study}", f"hydra.sweep.dir={folder}", *overrides]
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], check=True)
    return folder
