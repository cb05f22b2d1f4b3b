"""Fastest distributed linear averaging: the symmetric weights with the smallest SLEM on a graph (Xiao, Boyd 2004)."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.topology import Topology, undirected
from graphs.weights import best_constant, metropolis, with_self

__all__ = ["fdla"]

LARGEST = 1000


def fdla(topology: Topology, method: str = "smooth") -> Tensor:
    """W = I − Σ_e w_e L_e with max(λ₂, −λₙ) minimal over all edge weights w, negative ones included. Doubly stochastic.

    Args:
        topology: undirected, connected (`ValueError` otherwise), at most 1,000 workers.
        method: "smooth", torch's L-BFGS on (1/β) ln Σ_k (e^{βλ_k} + e^{−βλ_k}) with β rising, within 5e-4 of the
            optimum; or "exact", the semidefinite program by Clarabel, which must be installed.

    On edge-transitive graphs (rings, hypercubes, complete graphs) `best_constant` is the answer, and on a path all
    edges weigh 1/2: SLEM cos(π/n).

    >>> from graphs import grid, path, slem
    >>> round(slem(fdla(path(8))), 3), slem(fdla(grid(3, 3))) < slem(best_constant(grid(3, 3)))
    (0.924, True)
    """
    undirected(topology, "fdla")
    n = topology.n
    if n > LARGEST or not topology.connected:
        why = f"n is {n}, beyond {LARGEST}" if n > LARGEST else f"{len(topology.components)} components"
        raise ValueError(f"{why}: fdla needs a connected graph of moderate size; graphs.metropolis takes any.")
    if n <= 2:
        return metropolis(topology)
    i, j = topology.edge_index[:, topology.source < topology.target]
    if method == "smooth":
        w = _smooth(topology, i, j)
    elif method == "exact":
        w = _exact(n, i.numpy(), j.numpy())
    else:
        raise ValueError(f"method is {method!r}; it must be 'smooth' or 'exact'.")
    both = torch.zeros(n, n, dtype=torch.float64)
    both[i, j] = both[j, i] = w
    return with_self(topology, both[topology.target, topology.source])


def _smooth(topology: Topology, i: Tensor, j: Tensor) -> Tensor:
    n = topology.n
    eye, J = torch.eye(n, dtype=torch.float64), torch.full((n, n), 1 / n, dtype=torch.float64)
    best_value, best_w = np.inf, torch.zeros(len(i), dtype=torch.float64)

    def spectral(w: Tensor) -> tuple[Tensor, Tensor]:
        L = torch.zeros(n, n, dtype=torch.float64)
        L[i, j] = L[j, i] = -w
        L.diagonal().copy_(-L.sum(1))
        return torch.linalg.eigh(eye - L - J)

    starts = [rule(topology).to_dense()[i, j].clone() for rule in (metropolis, best_constant)]
    w = min(starts, key=lambda start: float(spectral(start)[0].abs().max())).requires_grad_(True)
    for beta in (30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4):
        optimizer = torch.optim.LBFGS(
            [w], max_iter=60, history_size=30, line_search_fn="strong_wolfe", tolerance_grad=1e-9
        )

        def closure(beta: float = beta, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            nonlocal best_value, best_w
            values, V = spectral(w.detach())
            top = float(values.abs().max())
            if top < best_value:
                best_value, best_w = top, w.detach().clone()
            up, down = torch.exp(beta * (values - top)), torch.exp(beta * (-values - top))
            total = up.sum() + down.sum()
            # the gradient of a smooth spectral function needs no distinct eigenvalues
            G = (V * ((up - down) / total)) @ V.T
            w.grad = -(G[i, i] + G[j, j] - 2 * G[i, j])
            return top + total.log() / beta

        optimizer.step(closure)
        w.data.copy_(best_w)
    return best_w


def _exact(n: int, i: np.ndarray, j: np.ndarray) -> Tensor:
    """min s such that s·I ± (I − J − Σ w_e L_e) are positive semidefinite, by an interior-point method."""
    if find_spec("clarabel") is None:
        raise ValueError("fdla(method='exact') needs the package clarabel; pip install clarabel, or method='smooth'.")
    from scipy.sparse import csc_array, hstack, vstack

    clarabel: Any = import_module("clarabel")

    rows, columns = np.triu_indices(n)
    order = np.lexsort((rows, columns))  # Clarabel stacks the upper triangle by columns
    rows, columns = rows[order], columns[order]
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    place = np.zeros((n, n), dtype=np.int64)
    place[rows, columns] = np.arange(len(rows))
    m, size = len(i), len(rows)
    low, high = np.minimum(i, j), np.maximum(i, j)
    # svec(L_e) by columns of w; svec(I) for s
    r = np.concatenate([place[i, i], place[j, j], place[low, high]])
    c = np.concatenate([np.arange(m)] * 3)
    v = np.concatenate([np.ones(2 * m), np.full(m, -np.sqrt(2.0))])
    L = csc_array((v, (r, c)), shape=(size, m))
    unit = csc_array(((rows == columns) * 1.0)[:, None])
    centre = ((rows == columns) - 1.0 / n) * scale
    b = np.concatenate([centre, -centre])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    cost = np.append(np.zeros(m), 1.0)
    cones = [clarabel.PSDTriangleConeT(n), clarabel.PSDTriangleConeT(n)]
    # A x + slack = b, slack ∈ cone: the first block says s·I + centre − Σ w L ⪰ 0
    A = vstack([hstack([L, -unit]), hstack([-L, -unit])], format="csc")
    solution = clarabel.DefaultSolver(csc_array((m + 1, m + 1)), cost, A, b, cones, settings).solve()
    return torch.tensor(np.array(solution.x)[:m])
