"""Weight rules turn a topology into a mixing matrix W: float64, sparse COO, W[i, j] the weight of j's message at i."""

import torch
from torch import Tensor

from graphs.properties import Incompatible, matrix
from graphs.topology import Topology

__all__ = ["metropolis", "uniform"]


def undirected(topology: Topology, rule: str) -> Topology:
    """The topology itself, or `Incompatible` when it is directed."""
    if topology.directed:
        present = set((topology.source * topology.n + topology.target).tolist())
        i, j = next((i, j) for i, j in topology.edge_index.T.tolist() if j * topology.n + i not in present)
        raise Incompatible(
            f"{rule} needs an undirected graph, and the edge {i} → {j} has no reverse; use graphs.push (column "
            "stochastic, for push-sum) or graphs.pull, or graphs.uniform on a regular directed graph."
        )
    return topology


def with_self(topology: Topology, off: Tensor) -> Tensor:
    """W with off[e] on message e and, on the diagonal, what each row lacks to sum to one."""
    own = 1 - torch.zeros(topology.n, dtype=torch.float64).index_add_(0, topology.target, off)
    i = torch.arange(topology.n)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
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
    n, share = topology.n, 1 / (topology.in_degree + 1).double()
    i = torch.arange(n)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
    return matrix(rows, columns, share[rows], n)
