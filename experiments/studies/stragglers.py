"""Stragglers: one worker of 16 is 2, 10 or 100 times slower; D-PSGD in rounds against AD-PSGD, accuracy against seconds.

Messages take no time, so that the speed-up in gradients is s (n − 1 + 1/s)/n (Lian et al. 2018, arXiv 1710.06952): 1.94, 9.4
and 94 at n = 16. What is left of it in accuracy is what stale gradients and the slow worker's rarer steps cost.

python -m experiments.studies.stragglers [overrides of the sweep, for example seed=0]
"""

import sys

from experiments.studies import compared, sweep

TARGET, STUDY = 0.9, "stragglers"


def main(overrides: list[str]) -> None:
    """Sweep and compare."""
    compared(
        STUDY,
        sweep(STUDY, overrides),
        x="simulated",
        y=["eval/average/accuracy", "eval/mean/accuracy", "idle/mean", "idle/worst"],
        by=["clock", "cost.work.factor"],
        target=TARGET,
        plot="eval/average/accuracy",
        xscale="log",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
