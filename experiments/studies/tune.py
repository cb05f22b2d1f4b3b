"""Tune a recipe's learning rate, and γ where it has one, on seeds that no reported run uses.

    python -m experiments.studies.tune recipe=choco_topk [other overrides]

Every point of the grid runs on both of the demo's graphs with two seeds of its own; the score is the mean over workers'
accuracy at the end. The best point is then written into `conf/recipe/` by hand, with this table as its proof.
"""

import itertools
import sys
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from tqdm import tqdm

from experiments import schema, train  # noqa: F401  train registers the resolvers
from experiments.trainer import build
from experiments.trainer import train as run

RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
GAMMAS = (0.05, 0.1, 0.2, 0.4, 0.8)
GRAPHS, SEEDS = ("ring", "torus"), (100, 101)


def score(overrides: list[str]) -> float:
    """Mean over workers' accuracy after the last round."""
    config = schema.resolved(compose("train", ["study=demo", "evaluate_every=100000", *overrides]))
    rows: list[dict[str, float]] = []
    run(config, build(config), rows.append)
    return rows[-1]["eval/mean/accuracy"]


def main(overrides: list[str]) -> None:
    """Print the grid, best first."""
    torch.set_num_threads(1)
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        tuned = "gamma" in compose("train", overrides).algorithm
        grid = list(itertools.product(RATES, GAMMAS if tuned else (None,)))
        table = []
        for lr, gamma in tqdm(grid, unit="point"):
            point = [f"optimizer.lr={lr}"] + ([f"algorithm.gamma={gamma}"] if gamma is not None else [])
            scores = [
                score([*overrides, *point, f"topology={graph}", f"seed={seed}"]) for graph in GRAPHS for seed in SEEDS
            ]
            table.append((sum(scores) / len(scores), min(scores), lr, gamma))
    print(f"{'mean':>8} {'worst':>8} {'lr':>6} {'gamma':>6}   {' '.join(overrides)}")
    for mean, worst, lr, gamma in sorted(table, reverse=True):
        print(f"{mean:8.4f} {worst:8.4f} {lr:6g} {gamma if gamma is not None else '-':>6}")


if __name__ == "__main__":
    main(sys.argv[1:])
