"""Numbers on a circle, read near those that the receiver has, with a sum by which a wrong reading shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..plan import Block
from .codes import Codes
from .moniqua import Moniqua
from .payload import Payload
from .tiles import TILE, tiles, width


@dataclass(frozen=True)
class Laps(Payload):
    """What a worker with rows y reads of q_j ∈ [−B/2, B/2): q_j + B l, l = ⌊(y_i − q_j) / B⌉ the laps of each coordinate.

    A message also has Σ_c l (2 l + 1) of the sender's own reading, which differs for every l, is 0 for l = 0, and above 0
    else, where Σ_c l would not see one coordinate go up and another down. If a receiver finds another sum, some coordinate
    of the two models is θ or more apart. If it finds the same, all is right, but for coincidences of numbers beyond ±B/2.

    Args:
        codes: of the rows that are sent.
        told: (m, 1) float64, the sums.
        moniqua: the quantiser, which knows B.
        near: (m, d), the rows y of those who receive here.
        workers: (m,), their ids.
        round: the number of this exchange.
    """

    codes: Codes
    told: Tensor
    moniqua: Moniqua
    near: Tensor
    workers: Tensor
    round: int

    @classmethod
    def of(cls, moniqua: Moniqua, y: Tensor, key: Tensor, workers: Tensor, round: int) -> Laps:
        """The message of the hosted rows y (m, d), which the same rows are to read near y; `key` (m,) as at all who read it."""
        codes, (m, d) = moniqua(y, key), y.shape
        told, read = y.new_zeros(m, 1, dtype=torch.float64), codes.reader(width(m, d, True))
        for tile in tiles(m, d, None, True):
            q, factor = read(tile)
            told += _sum(_laps(tile.across(y), q.mul_(factor), moniqua.modulus))
        return cls(codes, told, moniqua, y, workers, round)

    def parts(self) -> tuple[Tensor, ...]:
        return *self.codes.parts(), self.told

    def like(self, parts: tuple[Tensor, ...]) -> Laps:
        return replace(self, codes=self.codes.like(parts[:-1]), told=parts[-1])

    def dense(self) -> Tensor:
        """(m, d): read near 0."""
        return self.codes.dense()

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        """into_i += scale · Σ_j block_ij (x̂_ij − y_i), x̂_ij = q_j + B l.

        Raises:
            ValueError: a sum is not the sender's.
        """
        B, (m, d) = self.moniqua.modulus, (self.codes.rows, self.codes.d)
        read, wrong = self.codes.reader(width(m, d, True)), self.told.to(self.near.device)[block.src]
        for tile in tiles(m, d, None, True):
            part, factor = read(tile)
            y, q, at = tile.across(self.near), part.mul_(factor).to(self.near), tile.across(into)
            for e in torch.arange(len(block.src)).split(max(1, TILE // q.shape[1])):
                dst, src = block.dst[e], block.src[e]
                laps = _laps(y[dst], q[src], B)
                wrong[e] -= _sum(laps)
                apart = laps.mul_(B).add_(q[src]).sub_(y[dst])
                for i, weight, row in zip(dst.tolist(), (scale * block.weight[e]).tolist(), apart):
                    at[i].add_(row, alpha=weight)
        if wrong.any():
            first = int(wrong[:, 0].nonzero()[0])
            self._refuse(int(block.dst[first]), self.codes.dense().to(self.near)[block.src[first]])

    def _refuse(self, i: int, q: Tensor) -> None:
        moniqua, y = self.moniqua, self.near[i]
        read = _laps(y, q, moniqua.modulus).mul_(moniqua.modulus).add_(q)
        raise ValueError(
            f"worker {int(self.workers[i])} cannot read a neighbour's model in round {self.round}: some coordinate of the two is "
            f"theta={moniqua.theta:g} or more apart, so read wrong by a multiple of B={moniqua.modulus:g} (the farthest that it "
            f"reads is {float((read - y).abs().max()):.4g}); take a larger theta, a smaller learning rate or gamma, or more bits "
            f"than {moniqua.bits}"
        )


def _laps(y: Tensor, q: Tensor, B: float) -> Tensor:
    return torch.sub(y, q).div_(B).round_()


def _sum(laps: Tensor) -> Tensor:
    """(m, d) to (m, 1): exact, as all are whole numbers."""
    return (laps * (2 * laps + 1)).sum(1, keepdim=True, dtype=torch.float64)
