"""Casts: the rows in a smaller floating-point type, scaled by a power of two so that nothing over- or underflows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .payload import Payload, refuse_non_finite
from .tiles import InTiles, Room, Tile, height, kept, ldexp, measured, norms, reach, tiles, width, working


class Format(NamedTuple):
    """A wire type: bits of mantissa, the exponent to which the largest number is brought, the smallest number's exponent."""

    dtype: torch.dtype
    mantissa: int
    top: int
    bottom: int


FORMATS = {
    "float16": Format(torch.float16, 10, 15, -24),
    "bfloat16": Format(torch.bfloat16, 7, 0, -133),
    "float8_e4m3fn": Format(torch.float8_e4m3fn, 3, 8, -9),
    "float8_e5m2": Format(torch.float8_e5m2, 2, 15, -16),
}


@dataclass(frozen=True)
class Cast:
    """C(x) = 2^e · cast(2^−e x), rounded to nearest; e brings the largest magnitude near the top of the type's range.

    Deterministic; each coordinate is off by at most 2^−(p+1) of itself (p bits of mantissa) or, where the type has only
    denormals left, 2^(bottom − top) of the largest: ‖C(x) − x‖² ≤ (4^−(p+1) + (d − 1) 4^(bottom − top)) ‖x‖² = (1 − δ) ‖x‖².
    Multiplying by a power of two is exact, so in bfloat16 the result is the plain cast. A message is 16 or 8 bits a
    coordinate and 2^e.

    | dtype | p | largest | smallest | relative to the largest |
    |---|---|---|---|---|
    | float16 | 10 | 65504 | 2^−24 | 2^−39 |
    | bfloat16 | 7 | 2^128 | 2^−133 | 2^−133 |
    | float8_e4m3fn | 3 | 448 | 2^−9 | 2^−17 |
    | float8_e5m2 | 2 | 57344 | 2^−16 | 2^−31 |

    Args:
        dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".

    >>> q = Cast("float16")(torch.tensor([[2.0**-12, 0.25, -70000.0]]))
    >>> [f"{v:.3g}" for v in q.dense()[0].tolist()], q.bits
    (['0.000244', '0.25', '-7e+04'], 80)
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f'dtype={self.dtype!r} is not one of {", ".join(FORMATS)}, by name: Cast("bfloat16")')

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Narrow:
        """Compress each row of (m, d)."""
        (m, d), kind, form = x.shape, working(x.dtype), FORMATS[self.dtype]
        if self.dtype == "bfloat16" and kind == torch.float32:
            return self._plainly(x)
        x, size, lift = measured(x, partial(norms, p=torch.inf if self.dtype == "float8_e4m3fn" else 2))
        e = torch.frexp(size).exponent - form.top
        factor = torch.exp2(-e.double()).to(kind).masked_fill_(size * reach(x.dtype) < 1, 0)
        data = torch.empty(m, d, dtype=form.dtype, device=x.device)
        room = kept(Room, height(m, d) * width(m, d), x.device, kind)
        for tile in tiles(m, d):
            part = tile.of(x)
            (scratch,) = room(*part.shape)
            tile.of(data).copy_(torch.mul(part, tile.each(factor), out=scratch))
        e = e if lift is None else e + lift[:, None]
        return Narrow(data if form.dtype.itemsize > 1 else data.view(torch.uint8), _power(e, kind), self.dtype, x.dtype)

    def _plainly(self, x: Tensor) -> Narrow:
        """bfloat16 has the range of float32: nothing to measure, and a sum tells whether all is finite."""
        m, d = x.shape
        data, total = torch.empty(m, d, dtype=torch.bfloat16, device=x.device), torch.zeros(m, 1, device=x.device)
        for tile in tiles(m, d):
            part = tile.of(x)
            tile.of(data).copy_(part)
            tile.among(total).add_(part.sum(1, keepdim=True, dtype=torch.float32))
        if not total.isfinite().all():  # or it has overflown
            refuse_non_finite(data.isfinite().all(1))
        return Narrow(data, torch.ones(m, 1, device=x.device), self.dtype, x.dtype)

    gamma = 1.0  # on Gaussian rows a ring of 25 stands up to 1.3

    def delta(self, d: int) -> float:
        """δ = 1 − 4^−(p+1) − (d − 1) 4^(bottom − top)."""
        form = FORMATS[self.dtype]
        return 1 - 4.0 ** -(form.mantissa + 1) - (d - 1) * 4.0 ** (form.bottom - form.top)


@dataclass(frozen=True)
class Narrow(InTiles, Payload):
    """`data` (m, d) in the wire type, eight-bit types as bytes, and `scale` (m, 1), a power of two."""

    data: Tensor
    scale: Tensor
    kind: str
    dtype: torch.dtype

    bucket = None

    def parts(self) -> tuple[Tensor, ...]:
        return self.data, self.scale

    def like(self, parts: tuple[Tensor, ...]) -> Narrow:
        return Narrow(parts[0], parts[1], self.kind, self.dtype)

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def d(self) -> int:
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        return self.data.device

    def reader(self, most: int) -> Callable[[Tile], tuple[Tensor, float]]:
        m = self.rows
        room, wide = (kept(Room, m * most, self.device, kind) for kind in (working(self.dtype), torch.int16))
        scale = self.scale * (256.0 if self.kind == "float8_e4m3fn" else 1.0)
        single = float(scale) if m == 1 else None

        def read(tile: Tile) -> tuple[Tensor, float]:
            part = tile.of(self.data)
            (values,), (h,) = room(*part.shape), wide(*part.shape)
            if self.kind == "float8_e5m2":  # the upper byte of a float16
                part = h.copy_(part).bitwise_left_shift_(8).view(torch.float16)
            elif self.kind == "float8_e4m3fn":  # its exponent is 8 less than a float16's, and bit 14 is no part of it
                h.copy_(part.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
                part = h.view(torch.float16)
            values.copy_(part)
            return (values, single) if single is not None else (values.mul_(scale), 1.0)

        return read


def _power(e: Tensor, dtype: torch.dtype) -> Tensor:
    return ldexp(torch.ones(e.shape, dtype=dtype, device=e.device), e)
