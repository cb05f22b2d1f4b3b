"""The graph's own Laplacian L = D − A: algebraic connectivity and the Fiedler vector, whatever the weights."""

import numpy as np
import torch
from torch import Tensor

from graphs import cayley
from graphs.properties import csr, matrix
from graphs.solvers import second_vector
from graphs.spectral import DENSE, deficits_at_the_ends
from graphs.topology import Topology, undirected

__all__ = ["algebraic_connectivity", "fiedler_vector", "laplacian"]


def laplacian(topology: Topology) -> Tensor:
    """L = D − A of an undirected graph, (n, n) sparse COO float64; an isolated worker's row is zero.

    >>> from graphs import path
    >>> laplacian(path(3)).to_dense().int().tolist()
    [[1, -1, 0], [-1, 2, -1], [0, -1, 1]]
    """
    return _shifted(undirected(topology, "the Laplacian"), 0.0, -1.0)


def _shifted(topology: Topology, own: float, step: float) -> Tensor:
    i, ones = torch.arange(topology.n), torch.ones(topology.messages, dtype=torch.float64)
    rows, columns = torch.cat([topology.target, i]), torch.cat([topology.source, i])
    return matrix(rows, columns, torch.cat([step * ones, own - step * topology.degree.double()]), topology.n)


def algebraic_connectivity(topology: Topology) -> float:
    """λ₂(L), the second smallest Laplacian eigenvalue: 0 exactly when the graph is disconnected. Unweighted.

    `Incompatible` for a directed graph. One worker has no second eigenvalue: 0, as for networkx.

    >>> from graphs import ring
    >>> round(algebraic_connectivity(ring(200)), 8)
    0.00098688
    """
    undirected(topology, "the algebraic connectivity")
    if topology.n == 1 or not topology.connected:
        return 0.0
    return laplacian_ends(topology)[0]


def laplacian_ends(topology: Topology) -> tuple[float, float]:
    """λ₂(L) and λ_max(L) of an undirected connected graph on at least two workers."""
    # W = I − L/c has the same order of eigenvalues, and the solvers know W
    c = 2.0 * float(topology.degree.max())
    W = _shifted(topology, 1.0, 1 / c)
    shape = cayley.group(W)
    if shape is None:
        low, high = deficits_at_the_ends(W, csr(W))
    else:
        mu = cayley.deficits(W, shape)[1:].real
        low, high = float(mu.min()), float(mu.max())
    return c * low, c * high


def fiedler_vector(topology: Topology) -> Tensor:
    """The unit eigenvector of λ₂(L), (n,): its signs split the graph along its bottleneck.

    Where λ₂ is multiple (rings, tori) every basis is as good: this is the eigenspace's vector that is largest at worker
    0, or at the first worker where the eigenspace does not vanish; positive there. So two runs agree. Beyond 1,500
    workers λ₂ is taken as simple, and the largest entry is positive.

    Errors: `ValueError` when the graph is disconnected or has one worker, `Incompatible` when it is directed.

    >>> from graphs import path
    >>> fiedler_vector(path(3)).round(decimals=4).tolist()[::2]
    [0.7071, -0.7071]
    """
    undirected(topology, "the Fiedler vector")
    if topology.n == 1 or not topology.connected:
        raise ValueError(
            f"{len(topology.components)} components of {topology.n} workers: the Fiedler vector needs a connected graph of "
            "at least two; topology.components already splits this one."
        )
    if topology.n > DENSE:
        return torch.from_numpy(second_vector(csr(_shifted(topology, 1.0, 0.5 / float(topology.degree.max())))))
    values, vectors = np.linalg.eigh(laplacian(topology).to_dense().numpy())
    space = vectors[:, 1:][:, values[1:] < values[1] + 1e-9 * max(1.0, values[-1])]
    weight = np.linalg.norm(space, axis=1)
    worker = int(np.flatnonzero(weight > 1e-6 * weight.max())[0])
    v = space @ space[worker]
    return torch.from_numpy(v / np.linalg.norm(v))
