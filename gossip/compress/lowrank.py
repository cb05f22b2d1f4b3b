"""Low rank: a matrix by r of its directions, found by one power iteration (Vogels et al. 2019, PowerSGD, arXiv 1905.13727)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..plan import Block
from .payload import Payload, checked_rows, refuse_non_finite


@dataclass(frozen=True)
class LowRank:
    """C(M) = P Qᵀ, P = orth(M Q₀), Q = Mᵀ P, of the row as a matrix M (a × b); the projection on r directions.

    ‖C(M) − M‖² = ‖M‖² − ‖Pᵀ M‖². From a Gaussian start Q₀ a contraction with δ = min(1, r / min(a, b)) on average, attained
    when all singular values are equal. The start of the next message is this one's Q (its memory, a leaf of the algorithm's
    state), by which P tends to the leading singular directions if M changes slowly; where a direction has died out the start
    is drawn anew. A message is r (a + b) numbers. Use it inside `PerLayer`, which gives each weight its shape and sends
    vectors as they are; alone, the row is folded into a square.

    Args:
        rank: r ≥ 1.
        shape: (a, b), a · b the length of the row; None folds it.

    Raises:
        ValueError: a row holds NaN or an infinity, and the message names it; or neither key nor memory to start from.

    >>> M = torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 5)).view(1, 12)
    >>> q = LowRank(1, shape=(3, 4))(M, rng.key(0, "doc", torch.arange(1)))
    >>> torch.allclose(q.dense(), M), q.bits
    (True, 224)
    """

    rank: int = 2
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(
                f"rank={self.rank!r} is not a whole number of at least 1: it is how many directions of a matrix are sent"
            )

    def matrix(self, d: int) -> tuple[int, int, int]:
        """(a, b, r) for rows of d numbers."""
        a, b = self.shape or (math.isqrt(d - 1) + 1 if d else 0, -(-d // (math.isqrt(d - 1) + 1)) if d else 0)
        if self.shape and a * b != d:
            raise ValueError(f"shape={self.shape} does not hold a row of {d} numbers: {a} · {b} = {a * b}")
        return a, b, min(self.rank, a, b)

    def memory(self, x: Tensor) -> Tensor:
        """The start (m, b, r) of the next message; zero means that it is to be drawn."""
        _, b, r = self.matrix(x.shape[1])
        return x.new_zeros((len(x), b, r), dtype=_working(x))

    def __call__(self, x: Tensor, key: Tensor | None = None, memory: Tensor | None = None) -> Factors:
        """Compress each row of (m, d); `key` (m,) draws the start where there is none."""
        x = checked_rows(x)
        m, d = x.shape
        a, b, r = self.matrix(d)
        M = x.to(_working(x))
        if a * b > d:
            M = torch.nn.functional.pad(M, (0, a * b - d))
        M = M.reshape(m, a, b)
        Q = self.memory(x) if memory is None else memory
        dead = Q.square().sum(1, keepdim=True) == 0
        if dead.any():
            if key is None:
                raise ValueError(
                    "LowRank draws its start at random and got key=None: pass one int64 key per row, gossip.rng.key(seed, …)"
                )
            Q = torch.where(dead, rng.normal(key, b * r, M.dtype).view(m, b, r), Q)
        P = orthonormal(M @ Q)
        Q = M.mT @ P
        sent = Q.to(x.dtype)
        refuse_non_finite(sent.isfinite().flatten(1).all(1))
        if memory is not None:
            memory.copy_(_unit(Q))
        return Factors(P.to(x.dtype), sent, d)

    @property
    def gamma(self) -> float:
        """Start value of γ: 0.02 r, for sides of up to 128. On Gaussian rows a ring of 25 stands about 3 r / min(a, b)."""
        return min(1.0, 0.02 * self.rank)

    def delta(self, d: int) -> float:
        """δ = r / min(a, b), of a Gaussian start."""
        a, b, r = self.matrix(d)
        return r / min(a, b)


def orthonormal(P: Tensor) -> Tensor:
    """(m, a, r) to orthonormal columns of the same span, by Gram and Schmidt twice over; dependent ones become zero.

    >>> P = orthonormal(torch.tensor([[[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]]))
    >>> P[0].T.tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    P = _unit(P)
    for i in range(P.shape[2]):
        p, before = P[:, :, i : i + 1], P[:, :, :i]
        for _ in range(2 if i else 0):
            p = p - before @ (before.mT @ p)
        norm = torch.linalg.vector_norm(p, dim=1, keepdim=True)
        P[:, :, i : i + 1] = torch.where(norm > 8 * torch.finfo(P.dtype).eps, p / norm.clamp(min=1e-30), 0)
    return P


def _unit(P: Tensor) -> Tensor:
    """Columns divided by their norms, whatever the scale; zero and NaN stay."""
    P = P / P.abs().amax(1, keepdim=True).masked_fill_(P.abs().amax(1, keepdim=True) == 0, 1)
    return P / torch.linalg.vector_norm(P, dim=1, keepdim=True).clamp_(min=1e-30)


def _working(x: Tensor) -> torch.dtype:
    return torch.float32 if x.element_size() < 4 else x.dtype


@dataclass(frozen=True)
class Factors(Payload):
    """P (m, a, r) and Q (m, b, r); a row is P Qᵀ, of which the first d numbers count."""

    P: Tensor
    Q: Tensor
    d: int

    def parts(self) -> tuple[Tensor, ...]:
        return self.P, self.Q

    def like(self, parts: tuple[Tensor, ...]) -> Factors:
        return Factors(*parts, d=self.d)

    def dense(self) -> Tensor:
        return (self.P @ self.Q.mT).flatten(1)[:, : self.d].contiguous()

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        for i, j, weight in zip(block.dst.tolist(), block.src.tolist(), block.weight.tolist()):
            self._add(into[i], j, weight * scale)

    def add_to(self, into: Tensor) -> None:
        for i in range(len(into)):
            self._add(into[i], i, 1.0)

    def _add(self, row: Tensor, j: int, weight: float) -> None:
        """row += weight · P_j Q_jᵀ, straight into its memory; the last line of the matrix may be a part of one."""
        P, Q = self.P[j], self.Q[j]
        whole, rest = divmod(self.d, len(Q))
        row[: self.d - rest].view(whole, len(Q)).addmm_(P[:whole], Q.T, alpha=weight)
        if rest:
            row[self.d - rest :].addmv_(Q[:rest], P[whole], alpha=weight)
