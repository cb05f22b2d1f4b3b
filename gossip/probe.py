"""The probe: which consensus step sizes γ are stable, found by gossip alone on the actual W and compressor."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from graphs import Schedule, Topology, as_schedule

from . import rng
from .algorithm import Algorithm
from .compress import Compose, LowRank, PerLayer, RangeCoded, Threshold, WarmUp
from .compress.payload import NotFinite
from .layout import Layout
from .network import Network
from .optimizer import sgd
from .shortened import NORMED, DenseThreshold, Shortened

log = logging.getLogger(__name__)

CAP = 4 / 3  # no larger γ is tried; with the identity 2 / (1 − λ_n) is the limit
SAFETY = 0.75
_SIZE, _ROUNDS = 400, 1600


class Probe(NamedTuple):
    """gamma: a step size to run with, 3/4 of the limit and at most 1; limit: the largest that was stable, at most 4/3."""

    gamma: float
    limit: float


def probe(algorithm: Algorithm, mixing: Schedule | Tensor | Topology, d: int) -> Probe:
    """Find the stability limit of γ for models of d numbers by bisection, to 8 %.

    Each trial is gossip from Gaussian rows of a few hundred numbers (as many as the compressor needs to keep the same share
    of them), without gradients. A γ is unstable if in the last rounds the compression error has not shrunk against the middle
    of the trial, or grows against the disagreement. Theory's γ is 10³ to 10⁵ times smaller than what is stable (arXiv
    1902.00340). Gradients whose noise dominates ask for no other γ. Deterministic; takes some seconds.

    >>> import graphs, gossip
    >>> probe(gossip.Choco(compressor=gossip.TopK(0.2)), graphs.ring(8), 50)
    Probe(gamma=0.47, limit=0.63)
    """
    schedule, algorithm = as_schedule(mixing), _plain(algorithm)
    if schedule.n == 1:  # nobody to agree with
        return Probe(1.0, CAP)
    given = cast(Any, algorithm).compressor
    compressor, size = small(given, d)
    algorithm = dataclasses.replace(cast(Any, algorithm), compressor=compressor, gamma="auto")

    def stands(gamma: float) -> bool:
        return stable(dataclasses.replace(cast(Any, algorithm), gamma=gamma), schedule, size)

    low = min(CAP, max(1e-4, getattr(given, "gamma", min(0.1, 1.5 / getattr(compressor, "shrink", 1.0)))))
    if stands(low):
        high = low
        while low < CAP and (high := min(CAP, 1.6 * low)) and stands(high):
            low = high
    else:
        high = low
        while not stands(low := low / 1.6):
            high = low
            if low < 1e-5:
                raise ValueError(
                    f"no consensus step size above {low:.0e} is stable with {given}: it is no contraction; use another "
                    "compressor, or its rescaled form"
                )
    while low < CAP and high / low > 1.08:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if stands(middle) else (low, middle)
    return Probe(float(f"{min(1.0, SAFETY * low):.2g}"), float(f"{low:.2g}"))


def drifts(algorithm: Algorithm, mixing: Schedule | Tensor | Topology, d: int) -> bool:
    """Whether gossip alone is unstable under the algorithm's γ with models of d numbers: one short trial of the probe.

    The command asks it before a run; `gossip.simulate` and `gossip.wrap` leave it to you, since it may take seconds.

    >>> import graphs, gossip
    >>> [drifts(gossip.Choco(compressor=gossip.QSGD(7, rescaled=True), gamma=0.3), graphs.ring(8), d) for d in (100, 10_000)]
    [False, True]
    """
    algorithm = _plain(algorithm)
    if as_schedule(mixing).n == 1:  # nobody to drift from
        return False
    gamma = cast(Any, algorithm).step
    compressor, size = small(cast(Any, algorithm).compressor, d)
    algorithm = dataclasses.replace(cast(Any, algorithm), compressor=compressor, gamma=gamma)
    cheap = isinstance(compressor, Shortened | DenseThreshold) or hasattr(compressor, "kept")
    return not stable(algorithm, mixing, size, min(_ROUNDS, _rounds(compressor, size)) // (1 if cheap else 4))


def stable(algorithm: Algorithm, mixing: Schedule | Tensor | Topology, d: int, rounds: int | None = None) -> bool:
    """Whether gossip from Gaussian rows of d numbers, without gradients, comes to rest under the algorithm's γ.

    In `rounds` rounds, by default enough for every number to be sent 16 times, and at least 1600; in fewer only what grows is
    told from what shrinks.

    >>> import graphs, gossip
    >>> [stable(gossip.Choco(compressor=gossip.TopK(0.2), gamma=gamma), graphs.ring(8), 50) for gamma in (0.3, 1.0)]
    [True, False]
    """
    schedule, algorithm = as_schedule(mixing), _plain(algorithm)
    net = Network(schedule, seed=0)
    x = rng.normal(rng.key(0, "probe", torch.arange(schedule.n)), d, torch.float32)
    x -= x.mean(0)
    state, start = algorithm.init(x), float(x.square().sum())
    enough = _rounds(cast(Any, algorithm).compressor, d)
    rounds = rounds or enough
    sums = torch.zeros(2, 2, dtype=torch.float64)  # disagreement and error, in the middle and at the end
    with torch.no_grad():
        for k in range(rounds):
            net.begin(k)
            try:
                state = algorithm.communicate(state, net)
            except NotFinite:
                return False
            if 10 * k % rounds > 0 and 10 * k // rounds not in (4, 9):
                continue
            error = state.e if hasattr(state, "e") else state.x - state.hat
            now = torch.stack((state.x.double().square().sum(), error.double().square().sum()))
            if not float(now.sum()) < 1e6 * start:
                return False
            if float(now.sum()) < 1e-10 * start:
                return True
            if 10 * k // rounds in (4, 9):
                sums[10 * k // rounds // 9] += now
    (apart, error), (apart_late, error_late) = sums.tolist()
    if rounds < enough:
        return error_late < error or error_late < 1e-9 * apart_late
    if error_late < 1e-9 * apart_late:  # nothing is lost
        return apart_late < apart
    return error_late < 0.95 * error and error_late / apart_late < max(0.05, 1.3 * error / apart)


def resolved(
    algorithm: Algorithm, mixing: Schedule | Tensor | Topology, d: int, layout: Layout | None = None
) -> Algorithm:
    """The algorithm for models of d numbers: `gamma="auto"` becomes a number, and a `PerLayer` gets the model's layout.

    >>> import graphs, gossip
    >>> gossip.resolved(gossip.Choco(compressor=gossip.TopK(0.2), gamma="auto"), graphs.ring(8), 50).gamma
    0.47
    """
    compressor = getattr(algorithm, "compressor", None)
    if layout is not None and hasattr(compressor, "bind"):
        algorithm = dataclasses.replace(cast(Any, algorithm), compressor=cast(Any, compressor).bind(layout))
    if getattr(algorithm, "gamma", None) == "auto":
        log.info("probing γ of %s with %s: some seconds", type(algorithm).__name__, compressor)
        algorithm = dataclasses.replace(cast(Any, algorithm), gamma=probe(algorithm, mixing, d).gamma)
    return algorithm


def small(compressor: Any, d: int) -> tuple[Any, int]:
    """A compressor and a length of row on which it does to Gaussian rows what the given one does to those of d numbers."""
    if isinstance(compressor, RangeCoded | WarmUp):
        return small(compressor.compressor, d)
    if isinstance(compressor, PerLayer):
        layers = [(c, size) for c, size in compressor.layers(d) if c != compressor.small] or [(compressor.small, d)]
        return small(*min(layers, key=lambda layer: layer[0].delta(layer[1])))
    if isinstance(compressor, LowRank):
        a, b, _ = compressor.matrix(d)
        side = min(128, a, b)
        if a * b > d:  # a folded row that leaves a part of the last line free, which stands less
            return compressor, d if max(a, b) <= side + 1 else side * side - side // 2
        return dataclasses.replace(compressor, shape=(side, side)), side * side
    if hasattr(compressor, "indices"):
        compressor = dataclasses.replace(compressor, indices="plain")  # packing costs time, and changes nothing else
    keeps = compressor.sparsifier if isinstance(compressor, Compose) else compressor
    size = min(d, _SIZE)
    if hasattr(keeps, "kept"):
        share = keeps.kept(d) / d
        while size < min(d, 1 << 14) and not 0.85 < keeps.kept(size) / size / share < 1.15:
            size = min(2 * size, d)
    if isinstance(compressor, Threshold):
        return DenseThreshold(compressor), size
    if isinstance(compressor, NORMED):
        if getattr(compressor, "norm", "linf") == "l2":  # rows of which some numbers are sent
            size = min(d, max(size, min(800, int(2 + 2 * compressor.omega(d)))))
        return Shortened.of(compressor, d, size), size
    if isinstance(compressor, Compose) and isinstance(compressor.quantiser, NORMED):
        k = keeps.kept(d), keeps.kept(size)
        compressor = dataclasses.replace(compressor, quantiser=Shortened.of(compressor.quantiser, *k))
    return compressor, size


def _rounds(compressor: Any, d: int) -> int:
    """Enough for every number to be sent 16 times; fewer of what is slow."""
    keeps = compressor.sparsifier if isinstance(compressor, Compose) else compressor
    often = d / keeps.kept(d) if hasattr(keeps, "kept") else getattr(keeps, "shrink", 1.0)
    most = 4 * _ROUNDS if hasattr(keeps, "kept") else 2 * _ROUNDS
    return _ROUNDS // 2 if isinstance(keeps, LowRank) else max(_ROUNDS, min(most, int(16 * often)))


def _plain(algorithm: Algorithm) -> Algorithm:
    if not (hasattr(algorithm, "gamma") and hasattr(algorithm, "compressor")):
        raise ValueError(
            f"{type(algorithm).__name__} has no consensus step size of a compressor to probe: use Choco, DeepSqueeze or EFDPSGD"
        )
    return dataclasses.replace(cast(Any, algorithm), optimizer=sgd)
