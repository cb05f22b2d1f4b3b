"""Stragglers: one worker of 16 is 2, 10 or 100 times slower; D-PSGD in rounds against AD-PSGD, accuracy against seconds.

Messages take no time, so that the speed-up in gradients is s (n − 1 + 1/s)/n (Lian et al. 2018, arXiv 1710.06952): 1.94, 9.4
and 94 at n = 16. What is left of it in accuracy is what stale gradients and the slow worker's rarer steps cost.

python -m experiments.studies.stragglers [overrides of the sweep, for example seed=0]
"""

import sys
from pathlib import Path

from experiments.compare import compare
from experiments.studies import sweep

TARGET, STUDY = 0.9, "stragglers"


def table(folder: Path) -> None:
    """Table and figure."""
    comparison = compare(
        folder,
        x="simulated",
        y=["eval/average/accuracy", "eval/mean/accuracy", "idle/mean", "idle/worst"],
        by=["clock", "cost.work.factor"],
        target=TARGET,
        plot="eval/average/accuracy",
        xscale="log",
    )
    print(f"\n{comparison.table()}")
    print("\n".join(comparison.notes))
    path = folder / f"{STUDY}.png"
    assert comparison.figure is not None
    comparison.figure.savefig(path, dpi=150)
    print(f"figure: {path}", flush=True)


def main(overrides: list[str]) -> None:
    """Sweep and compare."""
    folder = sweep(STUDY, overrides)
    table(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
