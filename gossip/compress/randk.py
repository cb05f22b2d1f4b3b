"""Random-k: k coordinates drawn at random; the seed travels, not the indices (Stich et al. 2018, arXiv 1809.07599)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import rng
from .codes import checked
from .payload import Payload, Placed, check_ratio, checked_rows, kept, refuse_in
from .sparse import Sparse


@dataclass(frozen=True)
class RandK:
    """Keep k = max(1, round(ratio · d)) coordinates chosen uniformly without replacement.

    Unscaled it is a contraction with δ = k/d, exactly in expectation; `unbiased` scales by d/k, so that E C(x) = x with
    E‖C(x) − x‖² = ω ‖x‖², ω = d/k − 1. A message is k values and one 64-bit key, from which the receiver draws the indices.

    Args:
        ratio: the fraction of coordinates that is *kept*, in (0, 1].
        unbiased: scale by d/k; not a contraction unless k > d/2, so not for CHOCO-SGD.

    Raises:
        ValueError: no key; or a kept value is NaN or an infinity, and the message names the row.

    >>> import torch
    >>> q = RandK(0.5)(torch.ones(1, 4), rng.key(0, "doc", torch.arange(1)))
    >>> float(q.dense().sum()), q.bits
    (2.0, 128)
    """

    ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Keyed:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        key = checked(key, x, "RandK")
        d = x.shape[1]
        k = self.kept(d)
        values = x.gather(1, rng.sample(key, d, k))
        if self.unbiased:
            values.mul_(d / k)
        refuse_in(values)
        return Keyed(values, key[:, None], d)

    @property
    def gamma(self) -> float:
        """Start value of γ, of the unscaled form: k/d. On Gaussian rows a ring of 25 stands up to about 1.5 k/d."""
        if self.unbiased:
            raise AttributeError("with unbiased=True RandK is no contraction in general, and has no start value of γ")
        return self.ratio

    def kept(self, d: int) -> int:
        """How many values of a row of d travel."""
        return kept(self.ratio, d)

    def omega(self, d: int) -> float:
        """ω = d/k − 1, of the unbiased form."""
        return d / self.kept(d) - 1

    def delta(self, d: int) -> float:
        """δ = k/d; with `unbiased`, 1 − ω, which may be negative."""
        return 1 - self.omega(d) if self.unbiased else self.kept(d) / d


@dataclass(frozen=True)
class Keyed(Placed, Payload):
    """Values whose coordinates are drawn from the key beside them."""

    values: Tensor
    key: Tensor
    d: int

    def parts(self) -> tuple[Tensor, ...]:
        return self.values, self.key

    def like(self, parts: tuple[Tensor, ...]) -> Keyed:
        return Keyed(*parts, d=self.d)

    def placed(self) -> Sparse:
        """The same with its indices drawn."""
        return Sparse(self.values, rng.sample(self.key[:, 0], self.d, self.values.shape[1]), self.d)
