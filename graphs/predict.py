"""What a mixing matrix will do before a step is run: consensus curves, mixing times, effective neighbours, return times."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs import cayley
from graphs.properties import Incompatible, checked, csr, offence, solid
from graphs.schedules import as_schedule
from graphs.spectral import DENSE, gap, recurrent, slem, spectrum, stochastic
from graphs.topology import whole

__all__ = [
    "consensus_bound",
    "contraction",
    "effective_neighbours",
    "kemeny_constant",
    "mixing_time",
    "predict_consensus",
    "return_times",
    "stationary",
]


def predict_consensus(W: Any, x0: Any, rounds: int) -> Tensor:
    """The consensus distance (1/n) Σ_i ‖x_i − x̄‖² after 0, 1, …, `rounds` rounds from this start: (rounds + 1,) float64.

    Exact: the start itself is mixed, its mean taken out at every round so that small distances keep their digits.

    Args:
        W: a matrix or a schedule; x̄ is the current mean, also where rounds do not preserve it.
        x0: (n,) or (n, d), a row per worker.
        rounds: how far.

    >>> from graphs import metropolis, ring
    >>> curve = predict_consensus(metropolis(ring(16)), torch.arange(16.0), 100)
    >>> [round(float(curve[t]), 9) for t in (0, 1, 10)]
    [21.25, 14.805555556, 4.680283131]
    """
    schedule, rounds = as_schedule(W), whole("rounds", rounds, 0)
    x = torch.as_tensor(x0, dtype=torch.float64)
    if x.shape[:1] != (schedule.n,):
        raise ValueError(f"x0 has shape {tuple(x.shape)}; it needs one row per worker, ({schedule.n}, …).")
    x = x.reshape(schedule.n, -1)
    curve = torch.empty(rounds + 1, dtype=torch.float64)
    for k in range(rounds + 1):
        x = x - x.mean(0)
        curve[k] = (x * x).sum() / schedule.n
        if k < rounds:
            x = schedule(k) @ x
    return curve


def consensus_bound(W: Any, x0: Any, rounds: int) -> Tensor:
    """The bound SLEM^{2t} · (1/n) Σ_i ‖x_i(0) − x̄‖² on `predict_consensus` for a symmetric (or normal) doubly stochastic W.

    >>> from graphs import metropolis, ring
    >>> W, x0 = metropolis(ring(8)), torch.arange(8.0)
    >>> bool((consensus_bound(W, x0, 50) >= predict_consensus(W, x0, 50) - 1e-12).all())
    True
    """
    start, rounds = predict_consensus(W, x0, 0)[0], whole("rounds", rounds, 0)
    return start * slem(W) ** (2 * torch.arange(rounds + 1, dtype=torch.float64))


def mixing_time(W: Any, eps: float = 1e-3) -> float:
    """The fewest rounds t with ‖Wᵗ − 1πᵀ‖₂ ≤ eps: from any start the disagreement falls to eps of what it was.

    π is uniform for a doubly stochastic W. A symmetric or normal W needs ⌈ln(1/eps) / ln(1/SLEM)⌉; any other is raised
    to powers (refused beyond 1,500 workers, `ValueError`). Infinite when the gap is 0; 0 for one worker.

    >>> from graphs import complete, metropolis, ring
    >>> mixing_time(metropolis(ring(16)), 1e-3), mixing_time(metropolis(complete(4)), 1e-3)
    (133, 1)
    """
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps!r}; it must lie strictly between 0 and 1.")
    W = checked(W)
    n, by_rows = W.shape[0], stochastic(W)
    if n == 1:
        return 0
    share = gap(W)
    if share <= 0:
        return math.inf
    if offence(W, "symmetric") is None or cayley.group(W) is not None:
        return max(1, math.ceil(math.log(eps) / math.log1p(-share) - 1e-9)) if share < 1 - 1e-12 else 1
    if n > DENSE:
        raise ValueError(
            f"the mixing time of a W on {n} workers that is not symmetric takes dense powers; n ≤ {DENSE}."
        )
    A = (W if by_rows else W.t()).to_dense().numpy()
    limit = np.outer(np.ones(n), stationary(W).numpy())
    powers = [A - limit]  # (W − 1πᵀ)ᵗ = Wᵗ − 1πᵀ
    while np.linalg.norm(powers[-1], 2) > eps:
        powers.append(powers[-1] @ powers[-1])
    rounds, at = 0, np.eye(n)
    for k in reversed(range(len(powers) - 1)):
        further = at @ powers[k]
        if np.linalg.norm(further, 2) > eps:
            rounds, at = rounds + 2**k, further
    return rounds + 1


def contraction(schedule: Any) -> float:
    """The factor per round by which disagreement ‖x − x̄‖ shrinks in the long run.

    A schedule with a period: (second largest modulus of the product over one period)^(1/period), the SLEM if static, 0
    if the product averages exactly. A random schedule: √ρ where E‖x − x̄‖² shrinks by ρ = λ_max(E[Wᵀ(I − J)W]) per
    round, from the schedule's closed form where it has one, else from its first `horizon` rounds, an estimate. So
    squares are per round `contraction(s)**2`, the literature's ρ.

    >>> from graphs import one_peer_exponential, metropolis, ring
    >>> contraction(one_peer_exponential(8)), round(contraction(metropolis(ring(16))), 6)
    (0.0, 0.949253)
    >>> round(contraction(one_peer_exponential(6)), 4)
    0.6005
    """
    schedule = as_schedule(schedule)
    if schedule.n == 1 or (schedule.period is not None and schedule.exact_after is not None):
        return 0.0
    if schedule.period == 1:
        return slem(schedule(0))
    if schedule.period is not None:
        return slem(schedule.product()) ** (1 / schedule.period)
    n = schedule.n
    if schedule.moment is not None:
        M = schedule.moment()
    else:
        M = torch.zeros(n, n, dtype=torch.float64)
        for k in schedule.rounds:
            W = schedule(k).to_dense()
            C = W - W.mean(0)
            M += C.T @ C / len(schedule.rounds)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(centre @ M.to_dense() @ centre)[-1])))


def effective_neighbours(W: Any, gamma: float) -> float:
    """n_W(γ): how many workers' noise one worker averages in x ← W(√γ x + noise), relative to working alone.

    n_W(γ) = [1/(1−γ)] / mean(diag C), C = γ W C Wᵀ + W Wᵀ; for a normal W the mean is (1/n) Σ_k |λ_k|²/(1 − γ|λ_k|²).
    From 1/mean|λ|² at γ = 0 (d + 1 on a d-regular graph) to n as γ → 1: a graph's worth at the time scale 1/(1−γ).

    Args:
        W: (n, n), rows summing to one, symmetric or not (Lyapunov equation, n ≤ 1,500).
        gamma: in [0, 1).

    Source: Vogels et al. 2022, arXiv 2206.03093.

    >>> from graphs import metropolis, ring
    >>> W = metropolis(ring(32))
    >>> [round(effective_neighbours(W, g), 4) for g in (0, 0.5, 0.9)]
    [3.0, 3.7197, 6.6321]
    """
    if not 0 <= gamma < 1:
        raise ValueError(
            f"gamma is {gamma!r}; it must lie in [0, 1). At 1 the number is n where the graph is connected."
        )
    W = checked(W)
    if not stochastic(W):
        raise Incompatible(f"{offence(W, 'row_stochastic')}: effective_neighbours needs rows that sum to one.")
    if offence(W, "symmetric") is None or cayley.group(W) is not None:
        square = spectrum(W).abs().numpy() ** 2
        if gamma * square.max() > 1:
            return 0.0  # W's negative weights let the noise grow without bound
        spread = float(np.mean(square / (1 - gamma * np.minimum(square, 1))))
    else:
        from scipy.linalg import solve_discrete_lyapunov

        if W.shape[0] > DENSE:
            raise ValueError(f"a W on {W.shape[0]} workers that is not symmetric needs a dense equation; n ≤ {DENSE}.")
        A = W.to_dense().numpy()
        spread = float(np.mean(np.diag(solve_discrete_lyapunov(math.sqrt(gamma) * A, A @ A.T))))
    return 1 / ((1 - gamma) * spread)


def stationary(W: Any) -> Tensor:
    """π with πᵀW = πᵀ, summing to one, (n,): the weight of each worker's start in what all agree upon.

    Uniform for a doubly stochastic W; (d_i + 1)/Σ for uniform weights on an undirected graph: there a hub counts more.
    Of a column stochastic W, the right eigenvector (push-sum's weights / n). `Incompatible` when it is not unique.

    >>> from graphs import star, uniform
    >>> [round(p, 3) for p in stationary(uniform(star(5))).tolist()]
    [0.385, 0.154, 0.154, 0.154, 0.154]
    """
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import spsolve

    W = checked(W)
    n, by_rows = W.shape[0], stochastic(W)
    walk = csr(W) if by_rows else csr(W).T.tocsr()
    chain = solid(walk)
    if offence(W, "nonnegative") is None and recurrent(chain) > 1 and _closed_classes(chain) > 1:
        raise Incompatible("several closed groups of workers: each agrees on its own, and no common weights exist.")
    if offence(W, "doubly_stochastic") is None:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    # πᵀ(I − W) = 0 with one equation replaced by Σπ = 1
    A = (eye_array(n) - walk).T.tolil()
    A[0] = 1.0
    right = np.zeros(n)
    right[0] = 1
    pi = spsolve(A.tocsc(), right)
    return torch.from_numpy(pi / pi.sum())


def _closed_classes(walk: Any) -> int:
    from scipy.sparse.csgraph import connected_components

    count, label = connected_components(walk, directed=True, connection="strong")
    rows, columns = walk.tocoo().coords
    across = label[rows] != label[columns]
    return count - len(np.unique(label[rows[across]]))


def return_times(W: Any) -> Tensor:
    """(n,) the mean number of rounds until a random walk that follows W returns to its worker: 1/π_i, n if doubly stochastic.

    >>> from graphs import metropolis, star
    >>> return_times(metropolis(star(4))).tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    return 1 / stationary(W)


def kemeny_constant(W: Any) -> float:
    """K = Σ_{k≥2} 1/(1 − λ_k): the mean rounds for a random walk to reach a worker drawn from π, whatever its start.

    (networkx's convention: the worker itself is reached in 0 rounds.) Infinite when the walk has several closed classes.

    >>> from graphs import complete, metropolis, ring
    >>> round(kemeny_constant(metropolis(complete(5))), 9), round(kemeny_constant(metropolis(ring(5))), 9)
    (4.0, 6.0)
    """
    W = checked(W)
    by_rows = stochastic(W)
    if W.shape[0] == 1:
        return 0.0
    shape = cayley.group(W) if by_rows else None
    mu = cayley.deficits(W, shape) if shape is not None else 1 - spectrum(W).numpy()
    mu = np.delete(mu, 0 if shape is not None else int(np.abs(mu).argmin()))
    walk = solid(csr(W) if by_rows else csr(W).T.tocsr())
    if offence(W, "nonnegative") is None and _closed_classes(walk) > 1:
        return math.inf
    return float((1 / mu).sum().real)
