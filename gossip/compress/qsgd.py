"""QSGD: each coordinate rounded at random to one of s levels of the norm (Alistarh et al. 2017, arXiv 1610.02132)."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .codes import Codes, Form, at_random, checked
from .measure import bounded, measured, norms, returned, working
from .payload import checked_rows
from .tiles import check_bucket


def quantised(x: Tensor, key: Tensor, levels: int, p: float, bucket: int | None = None, shrink: float = 1.0) -> Codes:
    """‖x‖_p / s · sign(x) ⌊s |x| / ‖x‖_p + u⌋ as signed codes −s … s, divided by `shrink`.

    ⌊y + u⌋ of the signed y has the law of sign(y) ⌊|y| + u⌋, and needs no sign apart.
    """
    d = x.shape[1]
    bucket = None if bucket is None or bucket >= d else bucket
    x, size, lift = measured(x, partial(norms, p=p, bucket=bucket))
    kind = working(x.dtype)
    unit = (size * ((1 + 4 * torch.finfo(kind).eps) / levels)).to(kind)  # so that no |x| / unit is rounded to above s
    # s = 1 goes five to a byte, but not in buckets, which start at whole bytes
    form = Form(d, 2 * levels + 1 if levels > 1 or bucket is None else 4, levels, bucket=bucket, dtype=x.dtype)
    packed = at_random(x, key, form, unit)
    return bounded(Codes(packed, returned(unit.div_(shrink), lift), None, form), size, lift)


@dataclass(frozen=True)
class QSGD:
    """C(x) = (‖x‖ / s) · sign(x) · ξ(x), ξ = ⌊s |x| / ‖x‖ + u⌋, u uniform in (0, 1).

    Unbiased, with E‖C(x) − x‖² ≤ ω ‖x‖². For the 2-norm ω = √d / s − 1 if √d ≥ 2 s, else d / (4 s²), attained by rows of
    equal magnitudes (the paper's bound, min(d/s², √d/s), is up to 4 times as large); for the ∞-norm
    ω = (√(1 + (d − 1)/s²) − 1) / 2, attained by one large and d − 1 equal coordinates. `rescaled` sends C(x) / (1 + ω), a
    contraction with δ = 1/(1 + ω). With buckets d is the bucket's size.

    A message is ⌈log₂(2s + 1)⌉ bits a coordinate (1.6 for s = 1 without buckets) and one norm per bucket: s = 2^(b−1) − 1
    makes full use of b bits. The dither u has 2^15 values: a mean is off by at most 2^−16 of a level, so E C(x) by
    2^−16 √d ‖x‖ / s; at d = 10⁸ in one bucket that is 0.15 ‖x‖ / s, and the standard deviation up to 100 ‖x‖ / √s.

    Args:
        levels: s ≥ 1, the levels on either side of zero, at most 127.
        norm: "l2" or "linf".
        bucket: how many coordinates share a norm, a multiple of 8; None for the whole message.
        rescaled: divide by 1 + ω; for CHOCO-SGD and error feedback, which need a contraction.

    >>> from gossip import rng
    >>> q = QSGD(levels=7)(torch.ones(1, 49), rng.key(0, "doc", torch.arange(1)))  # seven levels a side: 4 bits
    >>> q.dense().unique().round(decimals=4).tolist(), q.bits, QSGD(levels=7).omega(49)
    ([1.0], 232, 0.25)
    """

    levels: int = 7
    norm: str = "l2"
    bucket: int | None = None
    rescaled: bool = False

    def __post_init__(self) -> None:
        if self.levels not in range(1, 128):
            raise ValueError(
                f"levels={self.levels!r} is not a whole number from 1 to 127: it is s, the levels on either side of zero; "
                "7 takes 4 bits a coordinate, 127 takes 8"
            )
        if self.norm not in ("l2", "linf"):
            raise ValueError(f"norm={self.norm!r} is neither 'l2' nor 'linf'")
        check_bucket(self.bucket)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        key, shrink = checked(key, x, "QSGD"), 1 + self.omega(x.shape[1]) if self.rescaled else 1.0
        return quantised(x, key, self.levels, 2 if self.norm == "l2" else math.inf, self.bucket, shrink)

    @property
    def gamma(self) -> float:
        """Start value of γ, of the rescaled form: δ of a bucket; Gaussian rows stand about twice as much on a torus.

        Without buckets the 2-norm's limit falls as 1/√d, so there is none; the ∞-norm stands 1 on Gaussian rows.
        """
        if not self.rescaled:
            raise AttributeError("without rescaled=True QSGD is no contraction in general, and has no start value of γ")
        if self.norm == "linf":
            return 0.7
        if self.bucket is None:
            raise AttributeError(
                "without a bucket QSGD's γ depends on d: take bucket=512, pass gamma, or let auto find it"
            )
        return min(0.7, self.delta(self.bucket))

    def omega(self, d: int) -> float:
        """ω of the unbiased form."""
        d, s = min(d, self.bucket or d), self.levels
        if self.norm == "linf":
            return (math.sqrt(1 + (d - 1) / s**2) - 1) / 2
        return math.sqrt(d) / s - 1 if math.sqrt(d) >= 2 * s else d / (4 * s**2)

    def delta(self, d: int) -> float:
        """δ = 1/(1 + ω) if `rescaled`; else 1 − ω, which may be negative."""
        return 1 / (1 + self.omega(d)) if self.rescaled else 1 - self.omega(d)
