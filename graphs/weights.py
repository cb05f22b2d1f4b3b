"""Weight rules turn a topology into a mixing matrix W: float64, sparse COO, W[i, j] the weight of j's message at i."""

import reprlib
from typing import Any

import torch
from torch import Tensor

from graphs.laplacian import laplacian_ends
from graphs.properties import Incompatible, checked, entries, matrix
from graphs.topology import Topology, proper, undirected

__all__ = [
    "best_constant",
    "by_samples",
    "lazy",
    "max_degree",
    "metropolis",
    "over_relaxed",
    "pull",
    "push",
    "sinkhorn",
    "uniform",
]


def with_self(topology: Topology, off: Tensor, symmetric: bool = True) -> Tensor:
    """W with off[e] on message e and, on the diagonal, what each row lacks to sum to one.

    Where both directions weigh the same, the edges are taken by source, in which order they are sorted already.
    """
    receiver, sender = topology.edge_index if symmetric else topology.edge_index.flip(0)
    own = 1 - torch.zeros(topology.n, dtype=torch.float64).index_add_(0, receiver, off)
    i = torch.arange(topology.n)
    rows, columns = torch.cat([receiver, i]), torch.cat([sender, i])
    return matrix(rows, columns, torch.cat([off, own]), topology.n)


def metropolis(topology: Topology, *, self_term: bool = True) -> Tensor:
    """Metropolis–Hastings: W_ij = 1/(1 + max(d_i, d_j)) on edges, W_ii = 1 − Σ_j W_ij. Symmetric, doubly stochastic.

    Local knowledge suffices (one's own and one's neighbours' degrees). Every self weight is at least 1/(1 + d_i), so
    W is aperiodic, and it contracts exactly when the graph is connected.

    Args:
        topology: undirected (`Incompatible` otherwise).
        self_term: False drops the 1 from the denominator, 1/max(d_i, d_j), as ChocoSGD's social graph does: mixes a
            little faster, but on a bipartite graph λₙ may come near or reach −1 (a ring of four: SLEM 1).

    Source: Xiao, Boyd 2004, "Fast linear iterations for distributed averaging".

    >>> from graphs import path
    >>> metropolis(path(3)).to_dense()
    tensor([[0.6667, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.6667]], dtype=torch.float64)
    """
    undirected(topology, "metropolis")
    degree = topology.degree
    larger = torch.maximum(degree[topology.source], degree[topology.target]).double()
    return with_self(topology, 1 / (larger + (1 if self_term else 0)))


def uniform(topology: Topology) -> Tensor:
    """Each worker takes the plain mean of its own model and all that it hears: W_ij = 1/(d_i + 1), d the in-degree.

    Always row stochastic. Doubly stochastic when the graph is regular; on an irregular one the average is *not*
    preserved (on a star of five the hub's data count 2.5 times too much), and algorithms that need it refuse this W:
    use `metropolis` there, or `push` with a push-sum algorithm.

    >>> from graphs import ring
    >>> uniform(ring(4, directed=True)).to_dense()[0].tolist()
    [0.5, 0.0, 0.0, 0.5]
    """
    n, share = proper(topology, "uniform").n, 1 / (topology.in_degree + 1).double()
    i = torch.arange(n)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
    return matrix(rows, columns, share[rows], n)


def max_degree(topology: Topology) -> Tensor:
    """W = I − L/(d_max + 1): the same weight on every edge. Symmetric, doubly stochastic; metropolis on regular graphs.

    >>> from graphs import grid, slem
    >>> round(slem(max_degree(grid(4, 4))), 6)
    0.882843
    """
    undirected(topology, "max_degree")
    share = 1 / (float(topology.degree.max()) + 1)
    return with_self(topology, torch.full((topology.messages,), share, dtype=torch.float64))


def best_constant(topology: Topology) -> Tensor:
    """W = I − αL with the best single α = 2/(λ₂(L) + λ_max(L)): SLEM (λ_max − λ₂)/(λ_max + λ₂). Symmetric.

    Self weights may be negative (a star's hub). On edge-transitive graphs no symmetric W is faster. Needs a connected
    graph (`ValueError`). Source: Xiao, Boyd 2004.

    >>> from graphs import grid, slem
    >>> round(slem(best_constant(grid(4, 4))), 6)
    0.841983
    """
    undirected(topology, "best_constant")
    if not topology.connected:
        raise ValueError(f"{len(topology.components)} components: no constant weight is best on a disconnected graph.")
    if topology.n == 1:
        return metropolis(topology)
    alpha = 2 / sum(laplacian_ends(topology))
    return with_self(topology, torch.full((topology.messages,), alpha, dtype=torch.float64))


def _blend(W: Tensor, omega: float) -> Tensor:
    n, i = W.shape[0], torch.arange(W.shape[0])
    rows, columns, values = entries(W)
    own = torch.full((n,), 1 - omega, dtype=torch.float64)
    return matrix(torch.cat([rows, i]), torch.cat([columns, i]), torch.cat([omega * values, own]), n)


def lazy(W: Any) -> Any:
    """(W + I)/2: eigenvalues (1 + λ)/2, all above zero for a symmetric W, at about half the speed.

    Makes a periodic walk aperiodic, and D² stable. Sparse, like every rule's result. Of a schedule, every round of it.

    >>> from graphs import ring, slem
    >>> round(slem(lazy(metropolis(ring(4), self_term=False))), 6)
    0.5
    """
    return W.map(lazy) if hasattr(W, "map") else _blend(checked(W), 0.5)


def over_relaxed(W: Any, omega: float | None = None) -> Tensor:
    """(1 − ω)I + ωW; ω > 1 steps further than W. Default: the best ω = 2/((1 − λ₂) + (1 − λₙ)) for a symmetric W.

    >>> from graphs import ring, slem
    >>> round(slem(over_relaxed(metropolis(ring(8)))), 6), round(2 / (1 - 0.804738 + 1 + 1 / 3), 4)
    (0.744521, 1.3084)
    """
    W = checked(W)
    if omega is None:
        from graphs.spectral import extremes

        ends = extremes(W)
        total = 2 - ends.second - ends.last
        if ends.second >= 1:
            raise ValueError(f"λ₂ is {ends.second:.6g}: no omega makes this W contract; the graph must be connected.")
        omega = 2 / total if W.shape[0] > 1 else 1.0
    if not omega > 0:
        raise ValueError(
            f"omega is {omega!r}; it must be positive, 1 leaves W as it is and the best is a little above."
        )
    return _blend(W, omega)


def push(topology: Topology) -> Tensor:
    """Column stochastic: each sender splits its mass equally, W_ij = 1/(out-degree(j) + 1). For push-sum (SGP).

    >>> from graphs import star
    >>> push(star(3)).to_dense().sum(0).tolist()
    [1.0, 1.0, 1.0]
    """
    n, share = proper(topology, "push").n, 1 / (topology.out_degree + 1).double()
    i = torch.arange(n)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
    return matrix(rows, columns, share[columns], n)


def pull(topology: Topology) -> Tensor:
    """Row stochastic: each receiver averages what it hears and itself; the name that goes with `push`. Same as `uniform`."""
    return uniform(topology)


def by_samples(topology: Topology, counts: Any) -> Tensor:
    """Row stochastic weights under which all agree on the mean weighted by sample counts, Σ m_i x_i / Σ m_i.

    W_ij = min(1/(d_i + 1), (m_j/m_i)/(d_j + 1)): the Metropolis–Hastings chain with stationary distribution m/Σm;
    equal counts give `metropolis`. Not doubly stochastic unless they are equal.

    Args:
        topology: undirected.
        counts: (n,) positive numbers m.

    >>> from graphs import path, stationary
    >>> stationary(by_samples(path(3), [10, 20, 70])).round(decimals=6).tolist()
    [0.1, 0.2, 0.7]
    """
    undirected(topology, "by_samples")
    m = torch.as_tensor(counts, dtype=torch.float64)
    if m.shape != (topology.n,) or not bool(((m > 0) & m.isfinite()).all()):
        raise ValueError(
            f"counts are {reprlib.repr(m.tolist())} of shape {tuple(m.shape)}: give one positive count for each of the "
            f"{topology.n} workers."
        )
    i, j, d = topology.target, topology.source, topology.degree.double()
    return with_self(topology, torch.minimum(1 / (d[i] + 1), m[j] / m[i] / (d[j] + 1)), symmetric=False)


def sinkhorn(topology: Topology) -> Tensor:
    """The doubly stochastic W = diag(r) (A + I) diag(c), by Sinkhorn–Knopp: also for directed graphs. Symmetric if A is.

    Among doubly stochastic matrices on these edges, the one of greatest entropy. A directed graph must be strongly
    connected in each of its pieces (every edge on a cycle), else no such matrix keeps all edges: `Incompatible`.

    >>> from graphs import from_edges
    >>> from graphs.properties import offence
    >>> W = sinkhorn(from_edges([(0, 1), (1, 2), (2, 0), (0, 2)], directed=True))
    >>> offence(W, "doubly_stochastic") is None
    True
    """
    across = proper(topology, "sinkhorn").component_of[topology.source] != topology.component_of[topology.target]
    if bool(across.any()):
        i, j = topology.edge_index[:, across][:, 0].tolist()
        raise Incompatible(
            f"the edge {i} → {j} lies on no cycle, so its weight tends to zero; use graphs.push or pull."
        )
    n, i = topology.n, torch.arange(topology.n)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
    A = matrix(rows, columns, torch.ones(len(rows)), n)
    At = A.t().coalesce()
    r = c = torch.ones(n, dtype=torch.float64)
    for _ in range(100_000):
        r = 1 / (A @ c)
        c = 1 / (At @ r)
        if float((r * (A @ c) - 1).abs().max()) < 1e-13:
            break
    else:
        raise ValueError(f"Sinkhorn's scaling has not converged in 100000 rounds on this graph of {n} workers.")
    if not topology.directed:
        r = c = (r * c).sqrt()
    return matrix(rows, columns, r[rows] * c[columns], n)
