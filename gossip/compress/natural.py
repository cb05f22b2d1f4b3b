"""Natural compression: sign and exponent travel, the mantissa is rounded at random (Horváth et al. 2019, arXiv 1905.10988)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from .codes import checked
from .measure import norms, working
from .pack import Packer, octets
from .payload import Payload, checked_rows, refuse_non_finite
from .tiles import InTiles, Room, Tile, fresh, height, reused, tiles, width

_MANTISSA = {torch.float32: 23, torch.float64: 52}


@dataclass(frozen=True)
class Natural:
    """C(x) = sign(x) 2^⌊log₂|x|⌋, or twice that with probability |x| / 2^⌊log₂|x|⌋ − 1.

    Unbiased with ω = 1/8, attained by |x| = 4/3 · 2^k; so a contraction with δ = 7/8, although it is unbiased. A message is
    9 bits a coordinate (12 in float64) and nothing else: no norm, so no coordinate touches another. Denormal numbers become 0
    or the smallest normal number, unbiased too, but not within ω. The probability is right to 2^−16.

    >>> from gossip import rng
    >>> q = Natural()(torch.tensor([[1.5, -4.0, 0.0]]), rng.key(0, "doc", torch.arange(1)))
    >>> float(q.dense()[0, 0]) in (1.0, 2.0), q.dense()[0, 1:].tolist()
    (True, [-4.0, 0.0])
    >>> Natural()(torch.ones(1, 8000), rng.key(0, "doc", torch.arange(1))).bits
    72000
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Exponents:
        """Compress each row of (m, d); `key` (m,) is required."""
        x = checked_rows(x)
        key, (m, d), kind = checked(key, x, "Natural"), x.shape, working(x.dtype)
        peak = norms(x, math.inf)[:, 0]
        refuse_non_finite(peak.isfinite())
        limit = 2.0 ** (math.frexp(torch.finfo(x.dtype).max)[1] - 1)
        if (peak > limit).any():
            raise ValueError(
                f"a number of magnitude {float(peak.max()):.3g} is above {limit:.3g}, and would be rounded to infinity: scale "
                "the rows down"
            )
        mantissa = _MANTISSA[kind]
        whole = torch.int32 if kind == torch.float32 else torch.int64
        base = 2 ** (8 * whole.itemsize - mantissa)
        rows, most = height(m, d), width(m, d)
        bits, packer = rng.Bits(key, most, rows), reused(Packer, rows, most, base, x.device)
        packed = fresh(m, octets(base, d), torch.uint8, x.device)
        room = reused(Room, rows * most, x.device, whole, whole)
        for tile in tiles(m, d):
            part, count = tile.of(x), tile.stop - tile.start
            v, u = room(*part.shape)
            v.view(kind).copy_(part)
            u.copy_(bits(tile.rows, tile.start, count)).bitwise_and_(0xFFFF).bitwise_left_shift_(mantissa - 16)
            v.add_(u)  # carries into the exponent as often as the mantissa says
            packer.room(len(part), count).copy_(v.bitwise_right_shift_(mantissa))
            packer.pack(tile.among(packed), tile.start, count, d)
        return Exponents(packed, d, x.dtype)

    gamma = 0.9  # on Gaussian rows a ring of 25 stands up to 1.3

    def omega(self, d: int) -> float:
        """ω = 1/8."""
        return 1 / 8

    def delta(self, d: int) -> float:
        """δ = 7/8."""
        return 7 / 8


@dataclass(frozen=True)
class Exponents(InTiles, Payload):
    """Sign and exponent of each coordinate, as the number's uppermost 9 (12) bits."""

    packed: Tensor
    d: int
    dtype: torch.dtype

    bucket = None

    def parts(self) -> tuple[Tensor, ...]:
        return (self.packed,)

    def like(self, parts: tuple[Tensor, ...]) -> Exponents:
        return Exponents(parts[0], self.d, self.dtype)

    @property
    def rows(self) -> int:
        return len(self.packed)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def reader(self, most: int) -> Callable[[Tile], tuple[Tensor, float]]:
        kind, m = working(self.dtype), self.rows
        whole = torch.int32 if kind == torch.float32 else torch.int64
        packer = reused(Packer, m, most, 2 ** (8 * whole.itemsize - _MANTISSA[kind]), self.device)
        room = reused(Room, m * most, self.device, whole)

        def read(tile: Tile) -> tuple[Tensor, float]:
            count = tile.stop - tile.start
            (v,) = room(m, count)
            v.copy_(packer.read(self.packed, tile.start, count, self.d)).bitwise_left_shift_(_MANTISSA[kind])
            return v.view(kind), 1.0

        return read
