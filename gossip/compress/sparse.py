"""The payload of sparsifiers: k values a row and where they belong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Block
from .index import pack, packed_bytes, unpack
from .payload import Payload, Placed


def index_dtype(d: int) -> torch.dtype:
    """The integer type in which plain indices below d travel: never a float, which would lose indices above 2**24."""
    return torch.int32 if d <= 2**31 else torch.int64


def sparse(values: Tensor, index: Tensor, d: int, indices: str = "auto") -> Sparse | Packed:
    """Values (m, k) at ascending indices (m, k) int64, in the index format of that name; "auto" is the smaller one."""
    dtype = index_dtype(d)
    if indices == "packed" or indices == "auto" and packed_bytes(d, index.shape[1]) < index.shape[1] * dtype.itemsize:
        return Packed(values, pack(index, d), d)
    return Sparse(values, index.to(dtype), d)


def check_indices(indices: str) -> None:
    """The formats in which indices travel."""
    if indices not in ("auto", "plain", "packed"):
        raise ValueError(
            f'indices={indices!r} is not "plain" (int32, or int64 above 2**31), "packed" (2 + log2(d/k) bits each) or '
            '"auto" (the smaller of both)'
        )


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
        row = into.stride(0)  # more than d where `into` is a layer's columns of longer rows
        flat = into.as_strided(((len(into) - 1) * row + self.d,), (1,))
        place = self.index[block.src] + (block.dst * row)[:, None]
        weight = (block.weight * scale).to(self.values)[:, None]
        flat.index_add_(0, place.view(-1), (self.values[block.src] * weight).view(-1))

    def add_to(self, into: Tensor) -> None:
        into.scatter_add_(1, self.index.long(), self.values)


@dataclass(frozen=True)
class Packed(Placed, Payload):
    """The same with its indices packed, see `gossip.compress.index`: 2 + log₂(d/k) bits each, in place of 32."""

    values: Tensor
    packed: Tensor
    d: int

    def parts(self) -> tuple[Tensor, ...]:
        return self.values, self.packed

    def like(self, parts: tuple[Tensor, ...]) -> Packed:
        return Packed(*parts, d=self.d)

    @property
    def index(self) -> Tensor:
        """(m, k) int64, unpacked."""
        return unpack(self.packed, self.d, self.values.shape[1])

    def placed(self) -> Sparse:
        """The same with its indices unpacked."""
        return Sparse(self.values, self.index, self.d)
