"""Threshold: every coordinate that is large against the row, up to a cap (Sahu et al. 2021, arXiv 2108.00951)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Block
from .index import pack, packed_bytes, unpack
from .measure import norms
from .payload import Payload, check_ratio, checked_rows, kept, refuse_non_finite
from .sparse import Sparse
from .topk import above


@dataclass(frozen=True)
class Threshold:
    """Keep the coordinates with |x_c| ≥ threshold · ‖x‖_∞, unscaled; of more than k = max(1, round(ratio · d)) the k largest.

    A contraction with δ ≥ 1/d, since the largest is among them; on a plateau of equal magnitudes δ = k/d. With
    `relative=False` it is |x_c| ≥ threshold, the total error's best answer for a given number of them, and no contraction:
    of small rows nothing is sent. A message is a count, and that many values and packed indices: its length varies.

    Args:
        threshold: in (0, 1] of the largest magnitude; or > 0 itself.
        ratio: the cap, the fraction of coordinates that is kept at most, in (0, 1].
        relative: to the largest magnitude of the row.

    Raises:
        ValueError: a row holds NaN or an infinity; the message names it.

    >>> q = Threshold(0.5, ratio=1.0)(torch.tensor([[-9.0, 1.0, 5.0, -7.0], [0.0, 1.0, 0.0, 0.0]]))
    >>> q.dense(), q.used.tolist()           # 3 and 1 values in float32, with a byte of indices
    (tensor([[-9.,  0.,  5., -7.],
            [ 0.,  1.,  0.,  0.]]), [13, 5])
    """

    threshold: float = 0.5
    ratio: float = 0.1
    relative: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 0 < self.threshold < float("inf") or self.relative and self.threshold > 1:
            rule, share = ("in (0, 1]", " times the largest magnitude") if self.relative else ("positive", "")
            raise ValueError(f"threshold={self.threshold!r} is not {rule}: what is smaller than it{share} is not sent")

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Kept:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        m, d = x.shape
        cap, peak = kept(self.ratio, d), norms(x, math.inf)[:, 0]
        refuse_non_finite(peak.isfinite())
        floor = peak.to(x.dtype) * self.threshold if self.relative else x.new_full((m,), self.threshold)
        blob = x.new_zeros((m, capacity(d, cap, x.element_size())), dtype=torch.uint8)
        count = torch.zeros(m, 1, dtype=torch.int32)
        for i in range(m):
            index, values = above(x[i : i + 1], floor[i], cap)
            count[i] = len(index)
            if len(index):
                row = torch.cat((_bytes(values), pack(index[None], d)[0]))
                blob[i, : len(row)] = row
        return Kept(count.to(x.device), blob, d, x.dtype)

    @property
    def gamma(self) -> float:
        """Start value of γ: 4 · ratio · (1 − threshold), half of what Gaussian rows on a ring of 25 stand at the defaults."""
        return min(1.0, max(1e-3, 4 * self.ratio * (1 - self.threshold)))

    def delta(self, d: int) -> float:
        """δ = 1/d; 0 if not `relative`."""
        return 1 / d if self.relative else 0.0


def capacity(d: int, cap: int, itemsize: int) -> int:
    """Bytes that `cap` values and their indices take."""
    return cap * itemsize + packed_bytes(d, cap)


@dataclass(frozen=True)
class Kept(Payload):
    """`count` (m, 1) values a row and their packed indices, in the first bytes of `blob` (m, capacity)."""

    count: Tensor
    blob: Tensor
    d: int
    dtype: torch.dtype

    def parts(self) -> tuple[Tensor, ...]:
        return self.count, self.blob

    def like(self, parts: tuple[Tensor, ...]) -> Kept:
        return Kept(*parts, d=self.d, dtype=self.dtype)

    @property
    def used(self) -> Tensor:
        sizes = [c and capacity(self.d, c, self.dtype.itemsize) for c in self.count[:, 0].tolist()]
        return torch.tensor(sizes, dtype=torch.int64)

    def row(self, i: int) -> Sparse:
        """Row i, (1, count) values and indices."""
        count = int(self.count[i])
        split = count * self.dtype.itemsize
        values = self.blob[i, :split].clone().view(self.dtype)[None]
        if count == 0:
            return Sparse(values, torch.empty((1, 0), dtype=torch.int64, device=values.device), self.d)
        packed = self.blob[i, split : split + packed_bytes(self.d, count)][None]
        return Sparse(values, unpack(packed, self.d, count), self.d)

    def dense(self) -> Tensor:
        zeros = self.blob.new_zeros((len(self.blob), self.d), dtype=self.dtype)
        self.add_to(zeros)
        return zeros

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        for j in block.src.unique().tolist():
            mine, row = block.src == j, self.row(j)
            for i, weight in zip(block.dst[mine].tolist(), block.weight[mine].tolist()):
                into[i].index_add_(0, row.index[0], row.values[0], alpha=weight * scale)

    def add_to(self, into: Tensor) -> None:
        for i in range(len(into)):
            self.row(i).add_to(into[i : i + 1])


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
