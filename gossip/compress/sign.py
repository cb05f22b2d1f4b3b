"""Sign with L1 scale: one bit a coordinate (Bernstein et al. 2018, arXiv 1802.04434; scaled as by Karimireddy et al. 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import Codes, Form, signs
from .measure import measured, returned, working
from .payload import checked_rows


@dataclass(frozen=True)
class Sign:
    """C(x) = (‖x‖₁ / d) · sign(x), with sign(0) = +1.

    A contraction: ‖C(x) − x‖² = (1 − ‖x‖₁² / (d ‖x‖₂²)) ‖x‖², so δ ≥ 1/d, and 2/π for Gaussian rows. A message is
    ⌈d/8⌉ bytes of signs and one scale. (arXiv 1901.09847, for the scale.)

    >>> Sign()(torch.tensor([[-1.0, 0.0, 2.0]])).dense()
    tensor([[-1.,  1.,  1.]])
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        d, packed = x.shape[1], []

        def measure(y: Tensor) -> Tensor:
            total = torch.zeros(len(y), 1, dtype=torch.float64, device=y.device)
            packed[:] = [signs(y, total=total)]
            return total

        x, size, lift = measured(x, measure)
        scale = (size / max(1, d)).to(working(x.dtype))
        return Codes(packed[0], returned(scale, lift), None, Form(d, 2, 1, 2, dtype=x.dtype))

    gamma = 0.5

    def delta(self, d: int) -> float:
        """δ = 1/d, reached by a row with one non-zero."""
        return 1 / d
