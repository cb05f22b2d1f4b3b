"""Where gossip wins: D-PSGD on a ring and one-peer against an all-reduce, as a map over bandwidth and latency.

python -m experiments.studies.where_gossip_wins [overrides of the sweep, for example seed=0]

A round costs an all-reduce 2(n−1)ℓ + 2(n−1)/n M/B, a ring ℓ + 2M/B and one-peer ℓ + M/B (algorithms measured between hosts
obey this: `make bench`), but gossip needs more of them. So there are two maps: of a round, and of the way to the target,
for which the rounds are those of real runs on data split unevenly.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.compare import find
from experiments.studies import sweep
from gossip import cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET, KEY = 0.9, "eval/average/accuracy"
WORK = 0.01  # seconds of a local step
LATENCIES, RATES = np.logspace(-5, 0, 101), np.logspace(4, 10, 121)  # seconds; bytes per second
PLACES = {"data centre": (2e-5, 1.25e9), "LAN": (1e-4, 1.25e8), "WAN": (2e-2, 1.25e7), "radio": (5e-2, 1e5)}
METHODS = ("ring", "one-peer", "all-reduce")


def needed(folder: Path) -> tuple[dict[str, float], int, float]:
    """Mean rounds to the target of each method, n, and the bytes of a model.

    Raises ValueError if a run never gets there.
    """
    rounds: dict[str, list[float]] = {name: [] for name in METHODS}
    n, bytes = 0, 0.0
    for run in find(folder)[0]:
        n = run.config["n"]
        if run.config["algorithm"]["_target_"] == "gossip.AllReduce":
            name = "all-reduce"
        else:
            name = "one-peer" if "one_peer" in run.config["schedule"]["_target_"] else "ring"
            bytes = run.rows[-1]["bits"] / 8 / run.rows[-1]["round"] / (1 if name == "one-peer" else 2)
        reached = next((row["round"] for row in run.rows if row[KEY] >= TARGET), None)
        if reached is None:
            raise ValueError(f"{run.folder}: {name} has not reached {KEY}={TARGET:g} by its end: give it more rounds")
        rounds[name].append(reached)
    return {name: sum(r) / len(r) for name, r in rounds.items()}, n, bytes


def seconds(n: int, bytes: float) -> dict[str, np.ndarray]:
    """Seconds of a round of each method, (latencies, rates)."""
    formulas = {
        "ring": lambda l, B: cost.gossip_seconds(2, bytes, l, B),
        "one-peer": lambda l, B: cost.gossip_seconds(1, bytes, l, B),
        "all-reduce": lambda l, B: cost.all_reduce_seconds(n, bytes, l, B),
    }
    return {name: np.array([[WORK + f(l, B) for B in RATES] for l in LATENCIES]) for name, f in formulas.items()}


def figure(per_round: Mapping[str, np.ndarray], rounds: Mapping[str, float], n: int, bytes: float) -> "Figure":
    """Two rows (a round; to the target) of two maps (ring, one-peer): how many times faster than the all-reduce."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10.5, 8.2), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, 2, sharex=True, sharey=True)
    image = None
    for row, whole in zip(panels, (False, True)):
        for panel, name in zip(row, ("ring", "one-peer")):
            factor = rounds["all-reduce"] / rounds[name] if whole else 1.0
            gain = np.log2(per_round["all-reduce"] / per_round[name] * factor)
            image = panel.pcolormesh(
                RATES,
                1e3 * LATENCIES,
                gain,
                cmap="RdBu",
                norm=TwoSlopeNorm(0, -5, 5),
                shading="nearest",
                rasterized=True,
            )
            lines = panel.contour(
                RATES,
                1e3 * LATENCIES,
                gain,
                levels=[-1, 0, 1, 2, 3, 4],
                colors="black",
                linewidths=[0.6, 1.8] + [0.6] * 4,
            )
            panel.clabel(lines, fmt=lambda v: f"×{2**v:g}", fontsize=8)
            for place, (latency, rate) in PLACES.items():
                panel.plot(rate, 1e3 * latency, "o", color="black", markersize=4)
                panel.annotate(
                    place, (rate, 1e3 * latency), xytext=(0, 5), textcoords="offset points", fontsize=8, ha="center"
                )
            what = (
                f"to {TARGET:.0%}: {rounds[name]:.0f} rounds against {rounds['all-reduce']:.0f}" if whole else "a round"
            )
            panel.set_title(f"D-PSGD, {name}: {what}", fontsize="medium")
            panel.set_xscale("log")
            panel.set_yscale("log")
        row[0].set_ylabel("latency, ms one way")
    for panel in panels[1]:
        panel.set_xlabel("bytes per second of a host's card")
    assert image is not None
    bar = drawn.colorbar(image, ax=panels, ticks=range(-5, 6), shrink=0.8)
    bar.ax.set_yticklabels([f"{2.0**v:.3g}" for v in range(-5, 6)])
    bar.set_label("seconds of the all-reduce / seconds of gossip (blue: gossip wins)")
    drawn.suptitle(
        f"{n} workers, a model of {bytes / 1e3:.0f} kB, a local step of {WORK * 1e3:g} ms", fontsize="medium"
    )
    return drawn


def table(per_round: Mapping[str, np.ndarray], rounds: Mapping[str, float]) -> str:
    """Seconds of a round and to the target, at the places that the maps name."""
    lines = [f"{'':14}" + "".join(f"{name:>24}" for name in METHODS)]
    lines.append(f"{'rounds':14}" + "".join(f"{rounds[name]:>24.0f}" for name in METHODS))
    for place, (latency, rate) in PLACES.items():
        at = int(np.abs(np.log(LATENCIES / latency)).argmin()), int(np.abs(np.log(RATES / rate)).argmin())
        cells = (f"{1e3 * per_round[m][at]:.3g} ms, {rounds[m] * per_round[m][at]:.3g} s" for m in METHODS)
        lines.append(f"{place:14}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def main(overrides: list[str]) -> None:
    """Sweep, and draw the maps."""
    folder = sweep("where_gossip_wins", overrides)
    rounds, n, bytes = needed(folder)
    per_round = seconds(n, bytes)
    print(f"\na round, and to {TARGET:.0%} of the average model's accuracy\n{table(per_round, rounds)}")
    path = folder / "where_gossip_wins.png"
    figure(per_round, rounds, n, bytes).savefig(path, dpi=150)
    print(f"figure: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
