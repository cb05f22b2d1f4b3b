"""When a run has diverged: its models are not finite, or their disagreement or loss has exploded."""

import math
from collections.abc import Mapping

GROWTH = 1e6  # times the largest early value
_EARLY = 3  # evaluations
_FLOOR = {"consensus/distance": 1e-9, "train/loss": 1e-3}  # growth from less than that may be healthy


class Divergence:
    """Looks at the rows of metrics of a run, one after the other.

    >>> watch = Divergence()
    >>> [watch({"round": r, "consensus/distance": d}) for r, d in ((0, 0.0), (25, 0.1), (50, 0.2))]
    [None, None, None]
    >>> watch({"round": 75, "consensus/distance": 3e5})
    'consensus/distance is 3e+05 at round 75, over 1e+06 times the largest early value, 0.2'
    """

    def __init__(self) -> None:
        self._early: dict[str, list[float]] = {name: [] for name in _FLOOR}

    def __call__(self, row: Mapping[str, float]) -> str | None:
        """What is wrong, or None."""
        if not math.isfinite(row["consensus/distance"]):
            return f"the models are not finite at round {row['round']}"
        for name, early in self._early.items():
            value = row.get(name, math.nan)
            if not math.isfinite(value):
                continue
            most = max(early, default=0.0)
            if early and abs(value) > GROWTH * max(most, _FLOOR[name]):
                when = f"{name} is {value:.3g} at round {row['round']}"
                return f"{when}, over {GROWTH:.0e} times the largest early value, {most:.3g}"
            if len(early) < _EARLY and value:
                early.append(abs(value))
        return None
