"""Compressors as the probe of γ runs them: on short rows, what they do to long ones, and nothing is packed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import rng
from .compress import QSGD, LInf, StochasticRounding, TernGrad, Threshold
from .compress.identity import Dense
from .compress.payload import kept, refuse_non_finite

NORMED = QSGD | LInf | TernGrad | StochasticRounding


@dataclass(frozen=True)
class Shortened:
    """C(x) = Δ (⌊x/Δ + φ + u⌋ − φ) / shrink, Δ = step · ‖x‖, u uniform in (0, 1); nothing is packed.

    A quantiser whose Δ is a share of the norm of d numbers rounds the coarser, the more there are: E‖C(x) − x‖² is
    Δ ‖x‖₁ − ‖x‖² where Δ is above all of them, and ‖x‖₁ ‖x‖₂ grows as √d ‖x‖². `of` makes `step` so much larger that Δ is
    the same multiple of the mean square of Gaussian rows as for rows of d.

    Args:
        step: Δ as a multiple of the row's norm.
        p: which norm, 2 or ∞.
        shrink: 1 + ω(d) of a rescaled form.
        phase: φ, 1/2 where no level is zero.

    >>> Shortened.of(QSGD(7, rescaled=True), 9_800, 200)  # as one level of 200 numbers: √200 / 1 = √9800 / 7
    Shortened(step=1.0, p=2, shrink=14.142135623730951, phase=0.0)
    """

    step: float
    p: float
    shrink: float = 1.0
    phase: float = 0.0

    @staticmethod
    def of(quantiser: Any, d: int, size: int) -> Shortened:
        """What does to Gaussian rows of `size` numbers what the quantiser does to those of d."""
        d = min(d, getattr(quantiser, "bucket", None) or d)
        p = 2 if getattr(quantiser, "norm", "linf") == "l2" else math.inf
        even = isinstance(quantiser, StochasticRounding)  # Δ from the smallest to the largest, two extremes
        growth = math.sqrt(d / size) if p == 2 else extreme(max(1, d // 2) if even else d) / extreme(size)
        levels = (2**quantiser.bits - 1) / 2 if even else getattr(quantiser, "levels", 1)
        shrink = 1 + quantiser.omega(d) if getattr(quantiser, "rescaled", False) else 1.0
        return Shortened(growth / levels, p, shrink, 0.5 if even else 0.0)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Dense:
        """Compress each row of (m, d); `key` (m,) is required."""
        refuse_non_finite(x.isfinite().all(1))
        unit = torch.linalg.vector_norm(x, self.p, 1, keepdim=True).mul_(self.step)
        unit.clamp_(min=torch.finfo(x.dtype).tiny)
        u = rng.uniform(torch.as_tensor(key), x.shape[1]).to(x.dtype)
        codes = (x / unit).add_(u).add_(self.phase).floor_().sub_(self.phase)
        return Dense(codes.mul_(unit / self.shrink))


@dataclass(frozen=True)
class DenseThreshold:
    """What `Threshold` keeps, as dense rows.

    >>> DenseThreshold(Threshold(0.5, ratio=1.0))(torch.tensor([[-9.0, 1.0, 5.0, -7.0]])).x
    tensor([[-9.,  0.,  5., -7.]])
    """

    threshold: Threshold

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Dense:
        """Compress each row of (m, d)."""
        refuse_non_finite(x.isfinite().all(1))
        size = x.abs()
        top = size.topk(kept(self.threshold.ratio, x.shape[1]), 1).values
        floor = self.threshold.threshold * (top[:, :1] if self.threshold.relative else 1)
        return Dense(x * (size >= torch.maximum(top[:, -1:], torch.as_tensor(floor, dtype=x.dtype))))


def extreme(d: int) -> float:
    """The median of the largest magnitude of d normal numbers, in standard deviations.

    >>> round(extreme(400), 2), round(extreme(10**7), 2)
    (3.13, 5.39)
    """
    tail = -math.expm1(-math.log(2) / d) / 2  # P(z > a) with (1 − 2 P)^d = 1/2
    return -float(torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
