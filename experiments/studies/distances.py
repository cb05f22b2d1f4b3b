"""Gossip over real distances: the ARPANET of 1969 and GÉANT of 2012, accuracy against simulated seconds.

The all-reduce goes round the hosts in the order of the file, over the shortest ways. Learning rates and γ are the recipes',
tuned on 16 workers.

python -m experiments.studies.distances [overrides of both sweeps, for example seed=0 rounds=100]
"""

import sys
from pathlib import Path

from experiments.compare import compare
from experiments.studies import sweep

TARGET = 0.9
STUDIES = ("arpanet_1969", "geant_2012")


def table(study: str, folder: Path) -> None:
    """Table and figure of one network."""
    comparison = compare(
        folder,
        x=["simulated", "megabytes"],
        y=["eval/mean/accuracy", "eval/average/accuracy", "idle/mean"],
        by="recipe",
        target=TARGET,
        plot="eval/mean/accuracy",
        xscale="log",
    )
    print(f"\n{study}\n{comparison.table()}")
    print("\n".join(comparison.notes))
    path = folder / f"{study}.png"
    assert comparison.figure is not None
    comparison.figure.savefig(path, dpi=150)
    print(f"figure: {path}\n", flush=True)


def main(overrides: list[str]) -> None:
    """Sweep and compare, one network after the other."""
    for study in STUDIES:
        table(study, sweep(study, overrides))


if __name__ == "__main__":
    main(sys.argv[1:])
