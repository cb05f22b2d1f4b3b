"""The spectral gap of large graphs, relabelled at random so that no closed form applies, against scipy and networkx."""

import math
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

import graphs
from graphs.properties import csr
from graphs.solvers import constant_free_ends
from graphs.topology import Topology, join

from .harness import Row, at_least, at_most

N = 100_000


def relabelled(topology: Topology) -> Topology:
    """The same graph under other numbers."""
    order = np.random.RandomState(0).permutation(topology.n)
    return join(topology.n, order[topology.source.numpy()], order[topology.target.numpy()], directed=True)


def clocked(f: Callable[[], Any]) -> tuple[Any, float]:
    """The result of one call and its seconds."""
    start = time.perf_counter()
    result = f()
    return result, time.perf_counter() - start


def deflated(W: Any) -> tuple[float, float]:
    """1 − λ₂ and 1 − λₙ by scipy's eigsh with the constant taken out: the best of the general methods."""
    make: Any = LinearOperator
    operator = make(W.shape, matvec=lambda x: W @ x - x.mean(), dtype=np.float64)
    start = np.random.RandomState(1).standard_normal(W.shape[0])
    try:
        ends = [float(eigsh(operator, k=1, which=which, v0=start, maxiter=400)[0][0]) for which in ("LA", "SA")]
    except ArpackNoConvergence:
        return math.nan, math.nan
    return 1 - ends[0], 1 - ends[1]


def rows() -> Iterator[Row]:
    """Both ends at 10⁵ workers against eigsh, λ₂ against networkx at 10³, and 10⁶ workers against the clock."""
    side = math.isqrt(N)
    cases = {
        "ring": (graphs.ring(N), 4 / 3 * math.sin(math.pi / N) ** 2),
        "torus": (graphs.torus(side, side), 4 / 5 * math.sin(math.pi / side) ** 2),
        "4-regular": (graphs.random_regular(N, 4), None),
        "Erdős–Rényi, degree 12": (graphs.erdos_renyi(N, 12 / N, allow_disconnected=True), None),
    }
    for name, (topology, truth) in cases.items():
        if topology.isolated:
            keep = topology.component_of == topology.component_of.bincount().argmax()
            number = keep.long().cumsum(0) - 1
            inside = keep[topology.source]
            source, target = (number[end[inside]] for end in (topology.source, topology.target))
            topology = join(int(keep.sum()), source, target, directed=True)
        W = csr(graphs.metropolis(relabelled(topology)))
        alone = name == "ring"  # Lanczos does not end there; shift and invert does, for λ₂ alone
        (gap, _), ours = clocked(lambda W=W, alone=alone: constant_free_ends(W, far=not alone))
        if alone:
            values, theirs = clocked(lambda W=W: eigsh(W.tocsc(), k=2, sigma=1 + 1e-12, which="LM")[0])
            other = 1 - float(values.min())
        else:
            (other, _), theirs = clocked(lambda W=W: deflated(W))
        error = abs(gap / (truth or other) - 1)
        detail = f"{ours:.2f} s, gap {gap:.6g}, relative error {error:.1e}, theirs {theirs:.2f} s"
        yield at_least(
            f"{'λ₂' if alone else 'λ₂ and λₙ'}, {name}, n = {N:,}", "eigsh, its best mode", theirs / ours, 1, detail
        )
        if truth:
            yield at_most(f"relative error of the gap, {name}", "closed form", error, 1e-3)
    small = graphs.random_regular(1000, 4)
    value, ours = clocked(lambda: graphs.algebraic_connectivity(small))
    theirs_value, theirs = clocked(lambda: nx.algebraic_connectivity(small.to_networkx(), method="tracemin_lu"))
    detail = f"{value:.6g} and {theirs_value:.6g}"
    yield at_least("algebraic connectivity, 4-regular, n = 1,000", "networkx, tracemin_lu", theirs / ours, 1, detail)
    million = 10**6
    for name, make in {"ring": graphs.ring, "torus": lambda n: graphs.torus(n=n)}.items():
        W, built = clocked(lambda make=make: graphs.metropolis(make(million)))
        gap, taken = clocked(lambda W=W: graphs.gap(W))
        yield at_most(f"W of a {name}, n = 10⁶", "5 s", built / 5, 1, f"{built:.2f} s")
        yield at_most(f"gap of a {name}, n = 10⁶", "10 s", taken / 10, 1, f"{taken:.2f} s, {gap:.6g}")
    W = graphs.metropolis(graphs.random_regular(million, 4))
    gap, taken = clocked(lambda: graphs.gap(W))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    yield at_most("gap of a random 4-regular graph, n = 10⁶", "60 s", taken / 60, 1, f"{taken:.1f} s, {gap:.6g}")
    yield at_most("memory of all that", "4 GB", memory / 4, 1, f"{memory:.2f} GB")
