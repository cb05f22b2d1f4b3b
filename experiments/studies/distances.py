"""Gossip over real distances: the ARPANET of 1969 and GÉANT of 2012, accuracy against simulated seconds.

The all-reduce goes round the hosts in the order of the file, over the shortest ways. Learning rates and γ are the recipes',
tuned on 16 workers.

python -m experiments.studies.distances [overrides of both sweeps, for example seed=0 rounds=100]
"""

import sys

from experiments.studies import compared, sweep

TARGET = 0.9
STUDIES = ("arpanet_1969", "geant_2012")


def main(overrides: list[str]) -> None:
    """Sweep and compare, one network after the other."""
    for study in STUDIES:
        compared(
            study,
            sweep(study, overrides),
            x=["simulated", "megabytes"],
            y=["eval/mean/accuracy", "eval/average/accuracy", "idle/mean"],
            by="recipe",
            target=TARGET,
            plot="eval/mean/accuracy",
            xscale="log",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
