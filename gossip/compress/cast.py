"""Casts: the rows in a smaller floating-point type, scaled by a power of two so that nothing over- or underflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .measure import ldexp, reach, refuse_infinite, working
from .payload import Payload, checked_rows, refuse_non_finite
from .tiles import TILE, InTiles, Room, Tile, buckets, fresh, is_long, reused, tiles


class Format(NamedTuple):
    """A wire type: bits of mantissa, the exponent to which a norm is brought and which norm, the smallest number's exponent."""

    dtype: torch.dtype
    mantissa: int
    top: int
    bottom: int
    norm: float = 2


FORMATS = {
    "float16": Format(torch.float16, 10, 15, -24),
    "bfloat16": Format(torch.bfloat16, 7, 0, -133),
    "float8_e4m3fn": Format(torch.float8_e4m3fn, 3, 8, -9, math.inf),
    "float8_e5m2": Format(torch.float8_e5m2, 2, 15, -16),
}


@dataclass(frozen=True)
class Cast:
    """C(x) = 2^e · cast(2^−e x), rounded to nearest; e brings the largest of each bucket near the top of the type's range.

    Deterministic; each coordinate is off by at most 2^−(p+1) of itself (p bits of mantissa) or, where the type has only
    denormals left, 2^(bottom − top) of the largest: ‖C(x) − x‖² ≤ (4^−(p+1) + (d − 1) 4^(bottom − top)) ‖x‖² = (1 − δ) ‖x‖².
    Multiplying by a power of two is exact, so in bfloat16 the result is the plain cast. A message is 16 or 8 bits a
    coordinate and 2^e for each bucket: a tile that fits the cache, so the rows are read once, and layers of other
    magnitudes keep their digits.

    | dtype | p | largest | smallest | relative to the largest |
    |---|---|---|---|---|
    | float16 | 10 | 65504 | 2^−24 | 2^−39 |
    | bfloat16 | 7 | 2^128 | 2^−133 | 2^−133 |
    | float8_e4m3fn | 3 | 448 | 2^−9 | 2^−17 |
    | float8_e5m2 | 2 | 57344 | 2^−16 | 2^−31 |

    Args:
        dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        bucket: how many coordinates share e, a multiple of 8 up to 81,920.

    Raises:
        ValueError: a row holds NaN or an infinity, or a number that would be rounded to infinity.

    >>> q = Cast("float16")(torch.tensor([[2.0**-12, 0.25, -70000.0]]))
    >>> [f"{v:.3g}" for v in q.dense()[0].tolist()], q.bits
    (['0.000244', '0.25', '-7e+04'], 80)
    """

    dtype: str = "bfloat16"
    bucket: int = TILE

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f'dtype={self.dtype!r} is not one of {", ".join(FORMATS)}, by name: Cast("bfloat16")')
        if self.bucket not in range(8, TILE + 1, 8):
            raise ValueError(
                f"bucket={self.bucket!r} is not a multiple of 8 up to {TILE:,}: it is how many numbers share a power of two"
            )

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Narrow:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        if self.dtype == "bfloat16" and working(x.dtype) == torch.float32:
            return self._plainly(x)
        (m, d), kind, form = x.shape, working(x.dtype), FORMATS[self.dtype]
        bucket = self.bucket if self.bucket < d else None
        data = fresh(m, d, form.dtype, x.device)
        if is_long(d) and 2 * self.bucket > TILE:
            size = torch.tensor([self._long(*pair) for pair in zip(x, data)], dtype=torch.float64, device=x.device)
        else:
            size = torch.zeros(m, buckets(d, bucket), dtype=torch.float64, device=x.device)
            for tile in tiles(m, d, bucket):
                part = tile.of(x)
                found = torch.linalg.vector_norm(part, form.norm, dim=-1, dtype=torch.float64)
                size[tile.rows, tile.first : tile.last] = found.view(len(part), -1)
                tile.of(data).copy_(ldexp(part.to(kind), (form.top - torch.frexp(found).exponent)[..., None]))
        scale = torch.exp2((torch.frexp(size).exponent - form.top).double()).to(kind)
        sent = Narrow(data if form.dtype.itemsize > 1 else data.view(torch.uint8), scale, self.dtype, x.dtype, bucket)
        most = float(size.max()) if size.numel() else 0.0
        if not math.isfinite(most):
            refuse_non_finite(size.isfinite().all(1))
        return refuse_infinite(sent) if most > torch.finfo(x.dtype).max / 2 else sent

    def _long(self, row: Tensor, into: Tensor) -> list[float]:
        """One row (d,), bucket by bucket with few calls; returns their norms."""
        form, kind, found = FORMATS[self.dtype], working(row.dtype), []
        (scratch,) = reused(Room, self.bucket, row.device, kind)(self.bucket)
        for part, out in zip(row.split(self.bucket), into.split(self.bucket)):
            found.append(_size(part, form.norm))
            e = math.frexp(found[-1])[1] - form.top if math.isfinite(found[-1]) else 0
            half = e // 2 if abs(e) > 100 else e  # 2^e may be no float32
            scaled = torch.mul(part, 2.0**-half, out=scratch if len(part) == self.bucket else scratch[: len(part)])
            out.copy_(scaled if half == e else scaled.mul_(2.0 ** (half - e)))
        return found

    def _plainly(self, x: Tensor) -> Narrow:
        """bfloat16 has the range of float32: nothing to scale, and a norm that is finite says that all is."""
        m, d = x.shape
        data, far = fresh(m, d, torch.bfloat16, x.device), x.dtype == torch.float16
        for part, out in zip(x.reshape(-1).split(TILE), data.view(-1).split(TILE)):
            out.copy_(part)
            far = far or not math.isfinite(torch.linalg.vector_norm(part, dtype=torch.float32))
        sent = Narrow(data, torch.ones(m, 1, device=x.device), self.dtype, x.dtype, None)
        if far:
            refuse_non_finite(x.isfinite().all(1))
        return refuse_infinite(sent) if far else sent

    gamma = 1.0  # on Gaussian rows a ring of 25 stands up to 1.3

    def delta(self, d: int) -> float:
        """δ = 1 − 4^−(p+1) − (d − 1) 4^(bottom − top), d at most the bucket."""
        form, d = FORMATS[self.dtype], min(d, self.bucket)
        return 1 - 4.0 ** -(form.mantissa + 1) - (d - 1) * 4.0 ** (form.bottom - form.top)


@dataclass(frozen=True)
class Narrow(InTiles, Payload):
    """`data` (m, d) in the wire type, eight-bit types as bytes, and `scale` (m, buckets), powers of two."""

    data: Tensor
    scale: Tensor
    kind: str
    dtype: torch.dtype
    bucket: int | None

    def parts(self) -> tuple[Tensor, ...]:
        return self.data, self.scale

    def like(self, parts: tuple[Tensor, ...]) -> Narrow:
        return Narrow(parts[0], parts[1], self.kind, self.dtype, self.bucket)

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
        room, wide = (reused(Room, m * most, self.device, kind) for kind in (working(self.dtype), torch.int16))
        eight = 256.0 if self.kind == "float8_e4m3fn" else 1.0
        factors = (self.scale[0].double() * eight).tolist() if m == 1 else None

        def read(tile: Tile) -> tuple[Tensor, float]:
            part, many = tile.across(self.data), tile.last - tile.first
            (values,) = room(*part.shape)
            if self.kind == "float8_e5m2":  # the upper byte of a float16
                part = _times(part, 256, *wide(*part.shape)).view(torch.float16)
            elif self.kind == "float8_e4m3fn":  # its exponent is 8 less than a float16's, and bit 14 is no part of it
                part = (
                    _times(part.view(torch.int8), 128, *wide(*part.shape)).bitwise_and_(~(1 << 14)).view(torch.float16)
                )
            values.copy_(part)
            if factors and many == 1:
                return values, factors[tile.first]
            split = values.unflatten(1, (many, -1)) if many > 1 else values
            split.mul_(tile.each(self.scale))
            return values, eight

        return read


def _times(part: Tensor, factor: int, out: Tensor) -> Tensor:
    """Bytes times a power of two, as int16; NumPy does both at once."""
    if part.device.type == "cpu":
        np.multiply(part.numpy(), np.int16(factor), out=out.numpy())
        return out
    return out.copy_(part).mul_(factor)


def _size(part: Tensor, p: float) -> float:
    """The p-norm of (n,), p = 2 or ∞, and ∞ where squares vanish or overflow; NaN if there is one."""
    if p == 2 and part.dtype == working(part.dtype):
        found = float(torch.linalg.vector_norm(part))
        if 1 / reach(part.dtype) < found < reach(part.dtype):
            return found
    high, low = float(part.amax()), float(part.amin())
    return max(high, -low) if high == high else high
