"""Measure two sides in turn, A B A B …, so that a drift of the machine's speed cancels in their ratio."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table. `ratio` is compared with `goal` in the stated direction."""

    figure: str
    against: str
    ratio: float
    goal: str
    met: bool
    detail: str = ""


def seconds(f: Callable[[], object], repeat: int) -> float:
    """Mean seconds of one call over `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        f()
    return (time.perf_counter() - start) / repeat


def side_by_side(a: Callable[[], object], b: Callable[[], object], pairs: int = 7, at_least: float = 0.2) -> tuple:
    """(median of time(b) / time(a), median time of a, median time of b): above 1 when a is faster."""
    repeats = []
    for f in (a, b):
        f()
        repeats.append(max(1, round(at_least / max(1e-9, seconds(f, 1)))))
    times = [(seconds(a, repeats[0]), seconds(b, repeats[1])) for _ in range(pairs)]
    return median(tb / ta for ta, tb in times), median(t for t, _ in times), median(t for _, t in times)


def at_least(figure: str, against: str, ratio: float, goal: float, detail: str = "") -> Row:
    """A row whose ratio should be `goal` or more."""
    return Row(figure, against, ratio, f"≥ {goal:g}", ratio >= goal, detail)


def at_most(figure: str, against: str, ratio: float, goal: float, detail: str = "") -> Row:
    """A row whose ratio should be `goal` or less."""
    return Row(figure, against, ratio, f"≤ {goal:g}", ratio <= goal, detail)


def reported(figure: str, against: str, ratio: float, detail: str = "") -> Row:
    """A row that is stated as it is, without a goal."""
    return Row(figure, against, ratio, "", True, detail)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'figure':<58} {'measured against':<44} {'ratio':>7} {'goal':>7}  {'':4} detail"]
    for r in rows:
        verdict = "" if not r.goal else "met" if r.met else "MISS"
        lines.append(f"{r.figure:<58} {r.against:<44} {r.ratio:>7.3g} {r.goal:>7}  {verdict:4} {r.detail}")
    return "\n".join(lines)
