"""Curves of many runs in one figure: readable in print and by the colour-blind, without a display or pyplot's state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito without its yellow; the dashes tell the curves apart without colour.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


class Curve(NamedTuple):
    """A group's mean over its runs: the mean x of each round, the mean of y there and its standard error."""

    x: list[float]
    y: list[float]
    error: list[float]


def draw(
    curves: Mapping[str, Mapping[tuple[str, str], Curve]],
    xs: Sequence[str],
    ys: Sequence[str],
    title: str = "",
    target: float | None = None,
    xscale: str = "auto",
    yscale: str = "auto",
    looks: Mapping[str, tuple[str, str]] | None = None,
) -> "Figure":
    """One panel for each y (rows) and x (columns): means as lines, ± one standard error as bands, the target as a rule.

    A logarithmic axis is chosen where y spans more than two decades, or where the curves' last x differ eightfold.
    Zeros of y are then drawn at its lower end, points at x = 0 are left out, and the panel says so.
    ``looks`` maps a label to what its colour and what its dash stand for, such as an algorithm and a topology.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(1.2 + 5.2 * len(xs), 0.8 + 3.2 * len(ys) + 0.2 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    styles = _styles(list(curves), looks or {})
    panels = figure.subplots(len(ys), len(xs), squeeze=False, sharey="row")
    for row, y in zip(panels, ys):
        for panel, x in zip(row, xs):
            shown = {label: c[x, y] for label, c in curves.items()}
            ends = [c.x[-1] for c in shown.values() if c.x]
            every_x, every_y = (_finite(v for c in shown.values() for v in getattr(c, axis)) for axis in "xy")
            left = _floor(every_x, xscale, min(ends, default=0) > 0 and max(ends) > 8 * min(ends))
            low = _floor(every_y, yscale, not metrics.higher_is_better(y) and _decades(every_y) > 2)
            for label, curve in shown.items():
                color, dash = styles[label]
                at = [v if left is None or v > 0 else math.nan for v in curve.x]
                panel.plot(at, _lifted(curve.y, low), color=color, linestyle=dash, linewidth=1.8, label=label)
                if any(map(math.isfinite, curve.error)):
                    lower = _lifted([m - e for m, e in zip(curve.y, curve.error)], low)
                    upper = _lifted([m + e for m, e in zip(curve.y, curve.error)], low)
                    panel.fill_between(at, lower, upper, color=color, alpha=0.18, linewidth=0)
            remarks = []
            if left is not None:
                panel.set_xscale("log")
                if _decades(every_x) < 2.5:  # where matplotlib writes 2 × 10⁻¹, 3 × 10⁻¹, … over each other
                    panel.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
                    panel.xaxis.set_minor_formatter("{x:g}")
                    panel.xaxis.set_major_formatter("{x:g}")
                remarks += ["without 0"] if min(every_x) < left else []
            if low is not None:
                panel.set_yscale("log")
                remarks += ["zeros at the lower edge"] if min(every_y) < low else []
            if target is not None and y == ys[0]:
                panel.axhline(target, color="0.4", linewidth=0.8, linestyle=(0, (2, 3)))
                remarks.append(f"dotted: {target:g}")
            panel.set_xlabel(_title(x) + (f"   ({'; '.join(remarks)})" if remarks else ""))
            panel.grid(True, color="0.9", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(_title(y))
    handles, labels = panels[0][0].get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() * 11 / (max(map(len, labels)) + 9)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    figure.suptitle(title, fontsize="small", color="0.35")
    return figure


def _styles(labels: Sequence[str], looks: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, Any]]:
    """A colour and a dash for each label: by its `looks` where they are few enough to be told apart, else in turn."""
    first, second = (list(dict.fromkeys(words)) for words in zip(*(looks.get(v, (v, "")) for v in labels)))
    if 1 < len(second) <= len(_DASHES) and 1 < len(first) <= len(_COLORS):
        hues, lines = dict(zip(first, _COLORS)), dict(zip(second, _DASHES))
        return {label: (hues[looks[label][0]], lines[looks[label][1]]) for label in labels}
    return {label: (_COLORS[k % len(_COLORS)], _DASHES[k % len(_DASHES)]) for k, label in enumerate(labels)}


def _finite(values: Iterable[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _floor(values: Sequence[float], scale: str, wanted: bool) -> float | None:
    """Where a logarithmic axis draws its zeros: half of the least positive value; None for a linear axis."""
    if scale not in ("auto", "linear", "log"):
        raise ValueError(f"scale {scale!r} is not one of auto, linear, log")
    positive = [v for v in values if v > 0]
    if scale == "linear" or not positive or (scale == "auto" and not wanted):
        return None
    return min(positive) / 2


def _lifted(values: Sequence[float], floor: float | None) -> list[float]:
    """Values as they can be drawn: what diverged is a gap, and nothing lies below the floor."""
    drawn = [v if math.isfinite(v) else math.nan for v in values]
    return drawn if floor is None else [v if math.isnan(v) else max(v, floor) for v in drawn]


def _decades(values: Sequence[float]) -> float:
    positive = [v for v in values if v > 0]
    return math.log10(max(positive) / min(positive)) if positive else 0.0


def _title(key: str) -> str:
    units = {"bits": "bits sent per worker", "megabytes": "MB sent per worker"}
    units |= {"seconds": "seconds of training", "simulated": "simulated seconds"}
    return units.get(key, key.removeprefix("eval/").replace("/", " "))
