"""Schedules drawn anew every round, the same on every worker: matchings, pairs, MATCHA, epidemics, EquiDyn, phone calls.

Round k is drawn from NumPy's frozen `RandomState([seed, k])`, so any worker can compute any round, in any order, and all
agree. `contraction` reads the exact second moment where a closed form exists.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphs.laplacian import laplacian
from graphs.properties import matrix
from graphs.schedules import Schedule
from graphs.seeded import random_regular, stream
from graphs.topology import Topology, sized, undirected, whole
from graphs.weights import uniform

__all__ = ["Matcha", "epidemic", "equidyn", "matcha", "matcha_plan", "matchings", "pairwise"]


def _pairs(n: int, pairs: np.ndarray, weight: float = 0.5) -> Tensor:
    """W = I − weight·Σ L_e over disjoint pairs (E, 2)."""
    i, j, own = torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy()), torch.arange(n)
    keep = torch.ones(n, dtype=torch.float64)
    keep[i] -= weight
    keep[j] -= weight
    off = torch.full((len(pairs),), weight, dtype=torch.float64)
    return matrix(torch.cat([i, j, own]), torch.cat([j, i, own]), torch.cat([off, off, keep]), n)


def _edges(topology: Topology) -> np.ndarray:
    i, j = topology.edge_index.numpy()
    return np.stack([i, j], 1)[i < j]


def _draw(seed: int, k: int) -> np.random.RandomState:
    return stream(seed, k % 2**32, k >> 32)


def _centred(M: Tensor) -> Tensor:
    return M - 1 / M.shape[0]


def matchings(topology: Topology, seed: int = 0) -> Schedule:
    """Every round a random maximal matching of the graph; matched workers average in pairs, the others rest.

    At most one message per worker and round. Symmetric, doubly stochastic.

    >>> from graphs import ring
    >>> s = matchings(ring(6), seed=1)
    >>> s.contractive, s.symmetric, s.period
    (True, True, None)
    """
    undirected(topology, "matchings")
    return Schedule(topology.n, partial(_matching, topology.n, _edges(topology), seed), None)


def _matching(n: int, edges: np.ndarray, seed: int, k: int) -> Tensor:
    priority = _draw(seed, k).permutation(len(edges))
    left, chosen = np.arange(len(edges)), []
    while len(left):
        # an edge that comes before all that touch it is taken, with them out of the way
        best = np.full(n, len(edges))
        np.minimum.at(best, edges[left, 0], priority[left])
        np.minimum.at(best, edges[left, 1], priority[left])
        take = (best[edges[left, 0]] == priority[left]) & (best[edges[left, 1]] == priority[left])
        chosen.append(left[take])
        busy = np.zeros(n, dtype=bool)
        busy[edges[left[take]].ravel()] = True
        left = left[~(busy[edges[left, 0]] | busy[edges[left, 1]])]
    return _pairs(n, edges[np.concatenate(chosen)] if chosen else edges[:0])


def pairwise(topology: Topology, seed: int = 0) -> Schedule:
    """Every round one edge, drawn uniformly, averages its two ends: randomized gossip, the clock tick of AD-PSGD.

    E‖x − x̄‖² shrinks by ρ = 1 − λ₂(L)/(2m) per round on m edges. Source: Boyd et al. 2006.

    >>> from graphs import contraction, ring
    >>> round(contraction(pairwise(ring(16))) ** 2, 5)
    0.99524
    """
    undirected(topology, "pairwise")
    edges = _edges(topology)
    # a round touches one edge: the properties need many rounds to see them all
    horizon = max(64, math.ceil(len(edges) * (math.log(len(edges) + 1) + 5)))
    return Schedule(topology.n, partial(_pair, topology.n, edges, seed), None, horizon, partial(_pair_moment, topology))


def _pair(n: int, edges: np.ndarray, seed: int, k: int) -> Tensor:
    return _pairs(n, edges[[_draw(seed, k).randint(len(edges))]] if len(edges) else edges)


def _pair_moment(topology: Topology) -> Tensor:
    eye = torch.eye(topology.n, dtype=torch.float64)
    return _centred(eye - laplacian(topology).to_dense() / max(1, topology.messages))


class Matcha(NamedTuple):
    """What MATCHA decides beforehand: the matchings (E, 2), their probabilities p, the step α, and the contraction ρ."""

    matchings: list[np.ndarray]
    p: np.ndarray
    alpha: float
    rho: float


def matcha_plan(topology: Topology, budget: float) -> Matcha:
    """MATCHA's matchings, activation probabilities p (maximal λ₂(Σ p_j L_j) under Σ p_j ≤ budget·M), α and ρ.

    ρ = ‖I − 2αL̄ + α²(L̄² + 2L̃) − J‖₂ with L̄ = Σ p_j L_j, L̃ = Σ p_j(1 − p_j)L_j, minimal in α; E‖x − x̄‖² shrinks by
    it per round. Source: Wang et al. 2019, arXiv 1905.09435.

    >>> from graphs import ring
    >>> plan = matcha_plan(ring(8), 0.5)
    >>> len(plan.matchings), round(plan.alpha, 3), round(plan.rho, 4)
    (2, 0.607, 0.7839)
    """
    from scipy.optimize import minimize, minimize_scalar

    undirected(topology, "matcha")
    if not 0 < budget <= 1:
        raise ValueError(
            f"budget is {budget!r}; it is the share of links used, in (0, 1]. 1 uses every link every round."
        )
    if not topology.connected:
        raise ValueError(f"{len(topology.components)} components: MATCHA needs a connected graph.")
    n = topology.n
    groups = _coloured(topology)
    if not groups:
        return Matcha([], np.empty(0), 0.0, 0.0)
    L, count = _laplacians(groups, n), len(groups)

    def smoothed(p: np.ndarray, beta: float) -> tuple[float, np.ndarray]:
        values, V = np.linalg.eigh(np.tensordot(p, L, 1))
        share = np.exp(-beta * (values[1:] - values[1]))
        value = values[1] - math.log(share.sum()) / beta
        G = (V[:, 1:] * (share / share.sum())) @ V[:, 1:].T
        return -value, -np.einsum("cij,ij->c", L, G)

    p = best_p = np.full(count, budget)
    if budget < 1:
        total = {"type": "ineq", "fun": lambda p: budget * count - p.sum(), "jac": lambda p: -np.ones(count)}
        for beta in (10.0, 100.0, 1000.0):
            found: Any = minimize(
                smoothed, p, args=(beta,), jac=True, method="SLSQP", bounds=[(0, 1)] * count, constraints=[total]
            )
            p = np.clip(found.x, 0, 1)
            best_p = max(best_p, p, key=lambda p: np.linalg.eigvalsh(np.tensordot(p, L, 1))[1])
        p = best_p.round(6)  # so that machines whose eigensolvers round otherwise draw the same matchings
    mean, spread = np.tensordot(p, L, 1), np.tensordot(p * (1 - p), L, 1)
    J = np.full((n, n), 1 / n)

    def rho(alpha: float) -> float:
        return float(np.linalg.eigvalsh(_second(mean, spread, alpha) - J).max())

    top = float(np.linalg.eigvalsh(mean)[-1])
    best: Any = minimize_scalar(rho, bounds=(0, 2 / top), method="bounded", options={"xatol": 1e-10})
    alpha = round(float(best.x), 6)
    return Matcha(groups, p, alpha, rho(alpha))


def _laplacians(groups: list[np.ndarray], n: int) -> np.ndarray:
    L = np.zeros((len(groups), n, n))
    for c, pairs in enumerate(groups):
        i, j = pairs.T
        L[c, i, j] = L[c, j, i] = -1
        L[c, i, i] = L[c, j, j] = 1
    return L


def _second(mean: np.ndarray, spread: np.ndarray, alpha: float) -> np.ndarray:
    return np.eye(len(mean)) - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread)


def _coloured(topology: Topology) -> list[np.ndarray]:
    """Edges split into matchings by colouring the line graph, most constrained edge first."""
    import networkx as nx

    edges = [tuple(edge) for edge in _edges(topology).tolist()]
    line = nx.Graph()
    line.add_nodes_from(edges)
    at: dict[int, list[tuple[int, int]]] = {}
    for edge in edges:
        for end in edge:
            line.add_edges_from((edge, other) for other in at.get(end, ()))
            at.setdefault(end, []).append(edge)
    colour = nx.greedy_color(line, strategy="DSATUR")
    groups = [[e for e in edges if colour[e] == c] for c in range(1 + max(colour.values(), default=-1))]
    return [np.array(group, dtype=np.int64) for group in groups]


def matcha(topology: Topology, budget: float = 0.5, seed: int = 0) -> Schedule:
    """MATCHA: every round each matching is active with its probability, W = I − α Σ_active L_j. Symmetric.

    On average `budget` of the links are used, the important ones more often; see `matcha_plan`. Doubly stochastic. W
    changes every round, so CHOCO's running sum does not apply.

    >>> from graphs import contraction, ring
    >>> round(contraction(matcha(ring(8), 0.25)) ** 2, 4)
    0.9111
    """
    plan, n = matcha_plan(topology, budget), topology.n
    return Schedule(n, partial(_active, n, plan, seed), None, 64, partial(_matcha_moment, n, plan))


def _active(n: int, plan: Matcha, seed: int, k: int) -> Tensor:
    active = _draw(seed, k).random_sample(len(plan.p)) < plan.p
    chosen = [pairs for pairs, on in zip(plan.matchings, active) if on]
    total = torch.zeros(n, dtype=torch.float64)
    pairs = np.concatenate(chosen) if chosen else np.empty((0, 2), dtype=np.int64)
    i, j, own = torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy()), torch.arange(n)
    off = torch.full((len(pairs),), plan.alpha, dtype=torch.float64)
    total.index_add_(0, i, off).index_add_(0, j, off)
    return matrix(torch.cat([i, j, own]), torch.cat([j, i, own]), torch.cat([off, off, 1 - total]), n)


def _matcha_moment(n: int, plan: Matcha) -> Tensor:
    L = _laplacians(plan.matchings, n)
    second = _second(np.tensordot(plan.p, L, 1), np.tensordot(plan.p * (1 - plan.p), L, 1), plan.alpha)
    return _centred(torch.from_numpy(second))


def epidemic(n: int, s: int, seed: int = 0, local: bool = False) -> Schedule:
    """Epidemic Learning: every round a fresh random graph of s messages per worker.

    Oracle (default): a random s-regular undirected graph, weights 1/(s+1), symmetric; E‖x − x̄‖² shrinks by
    (1/(s+1))(1 − s/(n−1)) per round. Local: every worker sends to s others of its own choice, receivers average all that
    they got with their own model: row stochastic only, the mean drifts; the distance to the mean before the round
    shrinks by (1/s)(1 − (1 − s/(n−1))ⁿ) − 1/(n−1). Source: de Vos et al. 2023, arXiv 2310.01972.

    Args:
        n: workers.
        s: messages per worker, below n; n·s even for the oracle.
        seed: shared by all workers.
        local: the variant without a coordinator.

    >>> from graphs import contraction
    >>> round(contraction(epidemic(32, 7)) ** 2, 5), round(contraction(epidemic(16, 2, local=True)) ** 2, 5)
    (0.09677, 0.38268)
    """
    n, s = sized(n), whole("s", s, 0 if n == 1 else 1)
    if s >= n and n > 1:
        raise ValueError(f"s is {s} and n is {n}; a worker sends to at most {n - 1} others.")
    if not local and n * s % 2:
        raise ValueError(
            f"n is {n} and s is {s}: no {s}-regular graph has an odd n·s; choose s={s + 1 if s + 1 < n else s - 1}."
        )
    return Schedule(n, partial(_infected, n, s, seed, local), None, 64, partial(_epidemic_moment, n, s, local))


def _infected(n: int, s: int, seed: int, local: bool, k: int) -> Tensor:
    i = torch.arange(n)
    random = _draw(seed, k)
    if not local or n == 1:
        return uniform(random_regular(n, s if n > 1 else 0, int(random.randint(2**31)), allow_disconnected=True))
    # s distinct others each: ranks of random numbers, oneself last
    keys = random.random_sample((n, n))
    np.fill_diagonal(keys, 2.0)
    target = torch.from_numpy(np.argpartition(keys, s - 1, axis=1)[:, :s].astype(np.int64)).flatten()
    rows, columns = torch.cat([target, i]), torch.cat([i.repeat_interleave(s), i])
    share = 1 / torch.bincount(rows, minlength=n).double()
    return matrix(rows, columns, share[rows], n)


def _epidemic_moment(n: int, s: int, local: bool) -> Tensor:
    if n == 1:
        return torch.zeros(1, 1, dtype=torch.float64)
    q = s / (n - 1)
    beta = (1 - (1 - q) ** n) / s - 1 / (n - 1) if local else (1 - q) / (s + 1)
    return beta * _centred(torch.eye(n, dtype=torch.float64))


def equidyn(n: int, eta: float = 0.5, seed: int = 0, directed: bool = True) -> Schedule:
    """EquiDyn: one message per worker and round along a fresh random offset a, W = (1 − η)I + ηW^(a).

    Directed (OD): i hears i + a with weight η(n−1)/n; E‖x − x̄‖² shrinks by A² + B² − 2AB/(n−1), A = 1 − η + η/n,
    B = η(n−1)/n. Undirected (OU): i and i + a are matched greedily from a random start, the unmatched rest. Both doubly
    stochastic. Source: Song et al. 2022, arXiv 2210.07881.

    >>> from graphs import contraction
    >>> round(contraction(equidyn(8, 0.5)) ** 2, 6), round(contraction(equidyn(50, 1.0)) ** 2, 6)
    (0.4375, 0.96)
    """
    n = sized(n)
    if not 0 < eta <= 1:
        raise ValueError(f"eta is {eta!r}; the step lies in (0, 1], 1/2 mixes fastest.")
    one, other = 1 - eta + eta / n, eta * (n - 1) / n
    moment = partial(_along_moment, n, one, other) if directed and n > 1 else None
    return Schedule(n, partial(_along, n, one, other, seed, directed), None, 64, moment)


def _along(n: int, one: float, other: float, seed: int, directed: bool, k: int) -> Tensor:
    i = torch.arange(n)
    if n == 1:
        return matrix(i, i, torch.ones(1), 1)
    random = _draw(seed, k)
    a = int(random.randint(1, n))
    if directed:
        values = torch.tensor([one, other], dtype=torch.float64).repeat_interleave(n)
        return matrix(torch.cat([i, i]), torch.cat([i, (i + a) % n]), values, n)
    start, free, pairs = int(random.randint(n)), [True] * n, []
    for step in range(n):
        u, v = (start + step) % n, (start + step + a) % n
        if u != v and free[u] and free[v]:
            free[u] = free[v] = False
            pairs.append((u, v))
    return _pairs(n, np.array(pairs, dtype=np.int64).reshape(-1, 2), other)


def _along_moment(n: int, one: float, other: float) -> Tensor:
    eye = torch.eye(n, dtype=torch.float64)
    around = (torch.ones_like(eye) - eye) / max(1, n - 1)
    return _centred((one**2 + other**2) * eye + 2 * one * other * around)
