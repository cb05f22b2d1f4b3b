"""b-bit ∞-norm quantiser: levels of the largest magnitude, in b bits that really are b (Liu et al. 2021, arXiv 2007.00232)."""

import math
from dataclasses import dataclass

from torch import Tensor

from .codes import Codes, checked
from .payload import checked_rows
from .qsgd import QSGD, quantised
from .tiles import check_bucket


@dataclass(frozen=True)
class LInf:
    """C(x) = (‖x‖_∞ / s) · sign(x) · ⌊s |x| / ‖x‖_∞ + u⌋, s = 2^(b−1) − 1, u uniform in (0, 1).

    Unbiased: E‖C(x) − x‖² ≤ d ‖x‖_∞² / (4 s²), and ≤ ω ‖x‖² with ω = (√(1 + (d − 1)/s²) − 1) / 2. A message is b bits a
    coordinate and one norm per bucket. LEAD's paper has 2^(b−1) levels a side instead, which are 2^b + 1 codes and do not
    fit into b bits: that quantiser is `QSGD(levels=2 ** (b - 1), norm="linf")`.

    Args:
        bits: b from 2 to 8.
        bucket: how many coordinates share a norm, a multiple of 8; None for the whole message.

    >>> import torch
    >>> from gossip import rng
    >>> LInf(bits=3)(torch.tensor([[3.0, -2.0, 0.0, 1.0]]), rng.key(0, "doc", torch.arange(1))).dense().round()
    tensor([[ 3., -2.,  0.,  1.]])
    """

    bits: int = 4
    bucket: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise ValueError(f"bits={self.bits!r} is not a whole number from 2 to 8: with one bit use Sign or OneBit")
        check_bucket(self.bucket)

    @property
    def levels(self) -> int:
        """s = 2^(b−1) − 1."""
        return 2 ** (self.bits - 1) - 1

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        return quantised(x, checked(key, x, "LInf"), self.levels, math.inf, self.bucket)

    @property
    def gamma(self) -> float:
        """Start value of γ from 4 bits on. On Gaussian rows a ring of 25 stands up to 1.3 (d = 2,000)."""
        if self.bits < 4:
            raise AttributeError(f"LInf of {self.bits} bits is no contraction in general, and has no start value of γ")
        return 0.7

    def omega(self, d: int) -> float:
        """ω = (√(1 + (d − 1)/s²) − 1) / 2, d at most the bucket."""
        return QSGD(self.levels, "linf", self.bucket).omega(d)

    def delta(self, d: int) -> float:
        """1 − ω, which may be negative."""
        return 1 - self.omega(d)
