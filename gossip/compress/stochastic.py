"""Stochastic rounding to k bits: 2^k levels between a row's extremes (Suresh et al. 2017, arXiv 1611.00429)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .codes import Codes, Form, at_random, checked
from .measure import bounded, measured, returned, working
from .payload import checked_rows
from .tiles import buckets, check_bucket, tiles


@dataclass(frozen=True)
class StochasticRounding:
    """C(x) = l + Δ ⌊(x − l) / Δ + u⌋, Δ = (h − l) / (2^k − 1), l and h the extremes, u uniform in (0, 1).

    Unbiased, |C(x)_c − x_c| < Δ, E‖C(x) − x‖² ≤ d Δ² / 4 ≤ ω ‖x‖² with ω = d / (2 (2^k − 1)²), as (h − l)² ≤ 2 ‖x‖². Rows
    of equal numbers and of one number are exact. Good where numbers share an offset, bad for sparse rows, whose zeros are
    no level. A message is k bits a coordinate, l and Δ. (The "k-level quantization" of the paper.)

    Args:
        bits: k from 1 to 8.
        bucket: how many coordinates share their extremes, a multiple of 8; None for the whole message.

    >>> from gossip import rng
    >>> StochasticRounding(bits=2)(torch.tensor([[5.0, 6.0, 7.0, 8.0]]), rng.key(0, "doc", torch.arange(1))).dense()
    tensor([[5.0000, 6.0000, 7.0000, 8.0000]])
    """

    bits: int = 8
    bucket: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"bits={self.bits!r} is not a whole number from 1 to 8")
        check_bucket(self.bucket)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        key, d = checked(key, x, "StochasticRounding"), x.shape[1]
        bucket = None if self.bucket is None or self.bucket >= d else self.bucket
        x, size, lift = measured(x, partial(_extremes, bucket=bucket))
        kind, count = working(x.dtype), 2**self.bits
        high, low = size[:, : buckets(d, bucket)], -size[:, buckets(d, bucket) :]
        unit = ((high - low) * ((1 + 4 * torch.finfo(kind).eps) / (count - 1))).to(kind)
        low, form = low.to(kind), Form(d, count, 0, bucket=bucket, dtype=x.dtype)
        packed = at_random(x, key, form, unit, low)
        return bounded(Codes(packed, returned(unit, lift), returned(low, lift), form), size, lift)

    @property
    def gamma(self) -> float:
        """Start value of γ from 4 bits on. On Gaussian rows a ring of 25 stands up to 1.3 (d = 2,000)."""
        if self.bits < 4:
            raise AttributeError(
                f"StochasticRounding of {self.bits} bits is no contraction in general, and has no start value of γ"
            )
        return 0.7

    def omega(self, d: int) -> float:
        """ω = d / (2 (2^k − 1)²), d at most the bucket; 0 for d = 1."""
        d = min(d, self.bucket or d)
        return d / (2 * (2**self.bits - 1) ** 2) if d > 1 else 0.0

    def delta(self, d: int) -> float:
        """1 − ω, which may be negative."""
        return 1 - self.omega(d)


def _extremes(x: Tensor, bucket: int | None) -> Tensor:
    """(m, 2 · buckets) float64: the largest numbers, then minus the smallest ones."""
    m, d = x.shape
    many = buckets(d, bucket)
    found = torch.full((m, 2 * many), -torch.inf if d else 0.0, dtype=torch.float64, device=x.device)
    for tile in tiles(m, d, bucket):
        part = tile.of(x)
        for extreme, side in ((part.amax(-1), 0), (-part.amin(-1), many)):
            into = found[tile.rows, side + tile.first : side + tile.last]
            torch.maximum(into, extreme.double().view(into.shape), out=into)
    return found
