"""Sign with L1 scale: one bit a coordinate (Bernstein et al. 2018, arXiv 1802.04434; scaled as by Karimireddy et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .payload import Payload


@dataclass(frozen=True)
class Sign:
    """C(x) = (‖x‖₁ / d) · sign(x), with sign(0) = +1.

    A contraction: ‖C(x) − x‖² = (1 − ‖x‖₁² / (d ‖x‖₂²)) ‖x‖², so δ ≥ 1/d, and 2/π for Gaussian rows. A message is
    ⌈d/8⌉ bytes of signs and one scale. (arXiv 1901.09847, for the scale.)

    >>> Sign()(torch.tensor([[-1.0, 0.0, 2.0]])).dense()
    tensor([[-1.,  1.,  1.]])
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Signs:
        """Compress each row of (m, d)."""
        return Signs(_pack(x >= 0), x.abs().mean(1, keepdim=True), x.shape[1])

    gamma = 0.5

    def delta(self, d: int) -> float:
        """δ = 1/d, reached by a row with one non-zero."""
        return 1 / d


@dataclass(frozen=True)
class Signs(Payload):
    """Eight signs a byte (lowest bit first, 1 for +), and the scale of each row."""

    packed: Tensor
    scale: Tensor
    d: int

    def parts(self) -> tuple[Tensor, ...]:
        return self.packed, self.scale

    def like(self, parts: tuple[Tensor, ...]) -> Signs:
        return Signs(*parts, d=self.d)

    def dense(self) -> Tensor:
        return _unpack(self.packed, self.d).to(self.scale.dtype).mul_(2 * self.scale).sub_(self.scale)


def _pack(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    octets = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def _unpack(packed: Tensor, d: int) -> Tensor:
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=d, bitorder="little"))
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(1)[:, :d]
