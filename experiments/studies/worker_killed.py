"""A worker killed in the middle: what it costs, with like and with unlike data, simulated and for real.

Eight workers on a ring; worker 1 dies at half time. Accuracy is the mean of those who are alive. With like data the others
have all there is to know; with unlike data what only the dead worker had is forgotten, unless it comes back.

python -m experiments.studies.worker_killed [overrides of all runs, for example rounds=100]
"""

import sys
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from experiments import records, schema, train

CONF = Path(__file__).parents[1] / "conf"
SEEDS = (0, 1)
ACCURACY = "eval/mean/accuracy"
DATA = {"like data": ["partition=iid"], "unlike data": ["partition=dirichlet", "partition.alpha=0.1"]}


def runs(rounds: int) -> dict[str, list[str]]:
    """The overrides of each way a run may go."""
    die = ["faults=kill", f"faults.round={rounds // 2}"]
    back = ["faults=rejoin", f"faults.round={rounds // 2}", f"faults.back={3 * rounds // 4}"]
    return {
        "nobody dies": [],
        "killed": die,
        "killed, real processes": [*die, "launch=workers"],
        "killed, live clock": [*die, "launch=workers", "clock=live"],
        "killed, restarted later": back,
    }


def sweep(folder: Path, overrides: list[str]) -> dict[str, dict[str, list[list[tuple[int, float]]]]]:
    """Data → way → for each seed the accuracy by round; real processes with the first seed only."""
    found: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        rounds = compose("train", ["study=worker_killed", *overrides]).rounds
        for data, split in DATA.items():
            for way, more in runs(rounds).items():
                for seed in SEEDS if "launch=workers" not in more else SEEDS[:1]:
                    chosen = ["study=worker_killed", f"seed={seed}", *split, *more, *overrides]
                    place = folder / data / way / str(seed)
                    train.run(schema.resolved(compose("train", chosen)), place)
                    rows = records.read(place).rows
                    found.setdefault(data, {}).setdefault(way, []).append([(r["round"], r[ACCURACY]) for r in rows])
    return found


def table(found: dict[str, dict[str, list[list[tuple[int, float]]]]]) -> str:
    """The last accuracies, mean over seeds, in percent."""
    lines = [f"{'accuracy at the end, %':26}" + "".join(f"{data:>14}" for data in found)]
    for way in next(iter(found.values())):
        ends = [torch.tensor([curve[-1][1] for curve in ways[way]]).mean() for ways in found.values()]
        lines.append(f"{way:26}" + "".join(f"{100 * float(end):14.1f}" for end in ends))
    return "\n".join(lines)


def draw(found: dict[str, dict[str, list[list[tuple[int, float]]]]], path: Path) -> None:
    """A panel for each kind of data."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(11, 4), sharey=True, layout="constrained")
    for panel, (data, ways) in zip(panels, found.items()):
        for way, curves in ways.items():
            common = sorted(set.intersection(*({round for round, _ in curve} for curve in curves)))
            mean = [sum(dict(curve)[round] for curve in curves) / len(curves) for round in common]
            panel.plot(common, mean, label=way, linestyle="--" if len(curves) == 1 else "-")
        panel.set(title=data, xlabel="round", ylabel="accuracy, mean of those alive")
        panel.grid(alpha=0.3)
    panels[-1].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(overrides: list[str]) -> None:
    """Run, print the table, draw the figure."""
    torch.set_num_threads(1)
    folder = Path("runs/worker_killed") / time.strftime("%Y-%m-%d_%H-%M-%S")
    found = sweep(folder, overrides)
    print(table(found))
    draw(found, folder / "worker_killed.png")
    print(f"figure: {folder / 'worker_killed.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
