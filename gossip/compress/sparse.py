"""The payload of sparsifiers: k values a row and where they belong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Block
from .payload import Payload


def index_dtype(d: int) -> torch.dtype:
    """The integer type in which indices below d travel: never a float, which would lose indices above 2**24."""
    return torch.int32 if d <= 2**31 else torch.int64


@dataclass(frozen=True)
class Sparse(Payload):
    """`values[i, :]` at the coordinates `index[i, :]` of a row of d numbers; all else zero."""

    values: Tensor
    index: Tensor
    d: int

    def parts(self) -> tuple[Tensor, ...]:
        return self.values, self.index

    def like(self, parts: tuple[Tensor, ...]) -> Sparse:
        return Sparse(*parts, d=self.d)

    def dense(self) -> Tensor:
        return self.values.new_zeros(len(self.values), self.d).scatter_(1, self.index.long(), self.values)

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        place = self.index[block.src] + (block.dst * self.d)[:, None]
        weight = (block.weight * scale).to(self.values)[:, None]
        into.view(-1).index_add_(0, place.view(-1), (self.values[block.src] * weight).view(-1))

    def add_to(self, into: Tensor) -> None:
        into.scatter_add_(1, self.index.long(), self.values)
