"""Moniqua: models modulo a constant, in few bits and without memory of the neighbours (Lu and De Sa 2020, arXiv 2002.11787)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import Codes, Form, at_random, checked
from .measure import norms, working
from .payload import checked_rows, refuse_non_finite


@dataclass(frozen=True)
class Moniqua:
    """q = ⌊2^k x / B + u⌋ mod 2^k, B = 2 θ / (1 − 2 δ), δ = 2^−k, u uniform in (0, 1); read as mod(B q / 2^k − y, B) + y.

    If every |x_c − y_c| < θ, x the sender's model and y the receiver's, the reading is unbiased and off by less than δ B.
    `near(payload, y)` reads; `dense()` reads near 0, so is right for |x_c| < θ, and a common offset of the models costs
    nothing. mod(a, B) lies in [−B/2, B/2). No contraction, so not for CHOCO-SGD, but for `MoniquaSGD`, which notices what
    is silent here: if θ is too small, values are wrong by multiples of B. Equal keys for all rows share the noise, which
    halves the consensus error. A message is k bits a coordinate and B / 2^k. (The paper's grid has 2^k − 1 steps, so
    δ = 1/(2^k − 1); here its ends, which are the same point of the circle, are not both sent.)

    Args:
        theta: θ > 0, more than any two models differ in any coordinate.
        bits: k from 2 to 8.

    >>> from gossip import rng
    >>> x, y = torch.tensor([[100.3]], dtype=torch.float64), torch.tensor([[100.0]], dtype=torch.float64)
    >>> moniqua = Moniqua(theta=0.5, bits=8)
    >>> round(float(moniqua.near(moniqua(x, rng.key(0, "doc", torch.arange(1))), y)), 1)
    100.3
    """

    theta: float = 1.0
    bits: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.theta < float("inf"):
            raise ValueError(
                f"theta={self.theta!r} is not a positive number: it is more than any two models differ in any coordinate"
            )
        if self.bits not in range(2, 9):
            raise ValueError(f"bits={self.bits!r} is not a whole number from 2 to 8")

    @property
    def modulus(self) -> float:
        """B."""
        return 2 * self.theta / (1 - 2 ** (1 - self.bits))

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        key = checked(key, x, "Moniqua")
        refuse_non_finite(norms(x, math.inf)[:, 0].isfinite())
        count = 2**self.bits
        form = Form(x.shape[1], count, count // 2, dtype=x.dtype, cyclic=True)
        unit = torch.full((len(x), 1), self.modulus / count, dtype=working(x.dtype), device=x.device)
        return Codes(at_random(x, key, form, unit), unit, None, form)

    def near(self, payload: Codes, y: Tensor) -> Tensor:
        """(m, d): the rows that were sent, read by receivers whose own rows are y (m, d) or (1, d)."""
        return torch.remainder(payload.dense() - y + self.modulus / 2, self.modulus) - self.modulus / 2 + y
