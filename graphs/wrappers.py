"""Schedules made from schedules: communicate only every few rounds, lose messages at random."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphs.properties import entries, matrix
from graphs.schedules import Schedule, as_schedule
from graphs.seeded import stream
from graphs.topology import whole

__all__ = ["drop", "every"]


def every(rounds: int, schedule: Any) -> Schedule:
    """Mix in the last of every `rounds` rounds only, W = I in the others: periodic gossip, local SGD with τ = rounds.

    >>> from graphs import contraction, one_peer_exponential
    >>> s = every(4, one_peer_exponential(8))
    >>> s.period, s.exact_after, s(0).to_dense().equal(torch.eye(8, dtype=torch.float64))
    (12, 12, True)
    """
    tau, inner = whole("rounds", rounds, 1), as_schedule(schedule)
    period = None if inner.period is None else tau * inner.period
    return Schedule(inner.n, partial(_last_of, tau, inner, _still(inner.n)), period, tau * inner.horizon)


def _still(n: int) -> Tensor:
    i = torch.arange(n)
    return matrix(i, i, torch.ones(n), n)


def _last_of(tau: int, inner: Schedule, still: Tensor, k: int) -> Tensor:
    return inner(k // tau) if k % tau == tau - 1 else still


def drop(p: float, schedule: Any, seed: int = 0) -> Schedule:
    """Every message is lost with probability p, independently by round; what it weighed stays at home.

    Where W is symmetric a link fails in both directions at once and W stays doubly stochastic. Otherwise the receiver
    keeps its own model for a lost message (rows still sum to one, columns do not), or, where only columns sum to one,
    the sender keeps its mass. The properties are computed from what results.

    >>> from graphs import metropolis, ring
    >>> s = drop(0.1, metropolis(ring(8)), seed=0)
    >>> s.doubly_stochastic, s.symmetric, s.contractive, s.static
    (True, True, True, False)
    """
    if not 0 <= p < 1:
        raise ValueError(f"p is {p!r}; the probability of a loss lies in [0, 1).")
    inner = as_schedule(schedule)
    known = inner.period == 1 and inner.symmetric and inner.doubly_stochastic
    moment = partial(_lossy_moment, p, inner) if known else None
    return Schedule(inner.n, partial(_lossy, p, inner, seed), None, inner.horizon, moment)


def _lossy(p: float, inner: Schedule, seed: int, k: int) -> Tensor:
    W = inner(k)
    rows, columns, values = (part.clone() for part in entries(W))
    random = stream(seed, k % 2**32, k >> 32, 1)  # 1: not the draws of a random schedule of the same seed
    paired = inner.symmetric
    off = rows != columns
    key = torch.minimum(rows, columns) * inner.n + torch.maximum(rows, columns) if paired else rows * inner.n + columns
    _, link = torch.unique(key, return_inverse=True)
    lost = torch.from_numpy(random.random_sample(int(link.max()) + 1) < p)[link] & off
    home = rows if inner.row_stochastic else columns
    rows, columns = torch.where(lost, home, rows), torch.where(lost, home, columns)
    return matrix(rows, columns, values, inner.n)


def _lossy_moment(p: float, inner: Schedule) -> Tensor:
    n = inner.n
    W = inner(0).to_dense()
    eye = torch.eye(n, dtype=torch.float64)
    square = (W - torch.diag(W.diagonal())) ** 2
    L = eye - W
    # E[(Σ b_e w_e L_e)²] with L_e² = 2 L_e
    spread = torch.diag(square.sum(1)) - square
    return eye - 2 * (1 - p) * L + (1 - p) ** 2 * (L @ L) + 2 * p * (1 - p) * spread - 1 / n
