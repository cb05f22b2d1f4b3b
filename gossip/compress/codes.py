"""The payload of quantisers: packed codes and a scale per row or bucket; and how codes are rounded at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from .index import pack_bits
from .measure import magnitudes, reach, working
from .pack import Packer, octets
from .payload import Payload
from .tiles import InTiles, Room, Tile, array, fresh, height, is_long, reused, tiles, width


class Form(NamedTuple):
    """What sender and receiver agree upon: value = low + scale · (step · code − zero), codes below `base`."""

    d: int
    base: int
    zero: int
    step: int = 1
    bucket: int | None = None
    dtype: torch.dtype = torch.float32
    cyclic: bool = False  # codes are taken modulo `base`, a power of two


@dataclass(frozen=True)
class Codes(InTiles, Payload):
    """`packed` (m, bytes), and `scale` and perhaps `low` (m, buckets)."""

    packed: Tensor
    scale: Tensor
    low: Tensor | None
    form: Form

    def parts(self) -> tuple[Tensor, ...]:
        return (self.packed, self.scale) if self.low is None else (self.packed, self.scale, self.low)

    def like(self, parts: tuple[Tensor, ...]) -> Codes:
        return Codes(parts[0], parts[1], parts[2] if len(parts) > 2 else None, self.form)

    def codes(self) -> Tensor:
        """(m, d): the codes themselves, uint8."""
        m, d = self.rows, self.d
        return Packer(m, d, self.form.base, self.device).read(self.packed, 0, d, d)

    @property
    def rows(self) -> int:
        return len(self.packed)

    @property
    def d(self) -> int:
        return self.form.d

    @property
    def bucket(self) -> int | None:
        return self.form.bucket

    @property
    def dtype(self) -> torch.dtype:
        return self.form.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def reader(self, most: int) -> Callable[[Tile], tuple[Tensor, float]]:
        m, form = self.rows, self.form
        kind = working(form.dtype)
        packer = reused(Packer, m, most, form.base, self.device, form.zero, form.step, kind)
        room = reused(Room, m * most, self.device, kind)
        single = float(self.scale) if self.low is None and self.scale.numel() == 1 else None

        def read(tile: Tile) -> tuple[Tensor, float]:
            count, many = tile.stop - tile.start, tile.last - tile.first
            values = packer.read(self.packed, tile.start, count, form.d)
            if values.dtype != kind:
                values = room(m, count)[0].copy_(values)
            if single is not None:
                return values, single
            split = values.unflatten(1, (many, -1)) if many > 1 else values
            split.mul_(tile.each(self.scale))
            if self.low is not None:
                split.add_(tile.each(self.low))
            return values, 1.0

        return read


def signs(x: Tensor, count: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """(m, d) to (m, ⌈d/8⌉) bytes: 1 where x ≥ 0; how many are is added to `count` (m,), and ‖x‖₁ to `total` (m, 1)."""
    m, d = x.shape
    kind, size, cpu = working(x.dtype), height(m, d) * width(m, d), x.device.type == "cpu"
    flags = reused(np.empty, size if cpu else 0, bool)
    packed = fresh(m, octets(2, d), torch.uint8, x.device)
    into = array(packed)
    for tile in tiles(m, d):
        part = tile.of(x)
        if x.dtype != kind:
            part = reused(Room, size, x.device, kind)(*part.shape)[0].copy_(part)
        here = tile.rows, slice(tile.start // 8, -(-tile.stop // 8))
        if cpu:  # torch takes ten times as long
            above = np.greater_equal(part.numpy(), 0, out=flags[: part.numel()].reshape(part.shape))
            into[here] = np.packbits(above, axis=1, bitorder="little")
        else:
            above = part >= 0
            into[here] = pack_bits(above)
        if count is not None:
            array(count)[tile.rows] += above.sum(1)
        if total is not None:  # here, where the tile is in the cache
            array(total)[tile.rows] += magnitudes(part, tile.start if is_long(d) else None)
    return packed


def at_random(x: Tensor, key: Tensor, form: Form, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Packed codes ⌊(x − low) / scale + zero + u⌋, u uniform in (0, 1): E (code − zero) = (x − low) / scale.

    u is an odd multiple of 2^−16, one of 2^15 that are symmetric about ½, so a code's mean is off by at most 2^−16: far
    below the rounding itself, whose standard deviation is up to ½. A whole number is never moved. A scale of 0 gives `zero`.
    """
    m, d = x.shape
    kind, rows, most = working(x.dtype), height(m, d), width(m, d)
    dither, packer = rng.Bits(key, most, rows), reused(Packer, rows, most, form.base, x.device)
    room = reused(Room, rows * most, x.device, kind, kind)
    packed = fresh(m, octets(form.base, d), torch.uint8, x.device)
    inverse = scale.reciprocal().masked_fill_(scale * reach(x.dtype) < 1, 0)
    factors = inverse.tolist() if is_long(d) and low is None and x.dtype == kind else None
    middle = torch.tensor(form.zero + 0.5, dtype=kind, device=x.device)
    for tile in tiles(m, d, form.bucket):
        part, count, many = tile.of(x), tile.stop - tile.start, tile.last - tile.first
        (y, u) = room(len(part), count)
        z = y.unflatten(1, (many, -1)) if many > 1 else y
        if low is not None:
            torch.sub(part, tile.each(low), out=z)
            z.mul_(tile.each(inverse)).add_(middle)
        elif factors and many == 1:
            torch.add(middle, part, alpha=factors[tile.rows.start][tile.first], out=z)
        elif x.dtype == kind:
            torch.mul(part, tile.each(inverse), out=z).add_(middle)
        else:
            z.copy_(part).mul_(tile.each(inverse)).add_(middle)
        if form.cyclic:
            y.remainder_(form.base)
        y.add_(u.copy_(dither(tile.rows, tile.start, count)), alpha=2.0**-16)
        codes = packer.room(len(part), count)
        if x.device.type == "cpu":  # twice as fast as torch from float to uint8
            np.copyto(codes.numpy(), y.numpy(), casting="unsafe")
        else:
            codes.copy_(y)
        if form.cyclic:
            codes.bitwise_and_(form.base - 1)
        packer.pack(tile.among(packed), tile.start, count, d)
    return packed


def checked(key: Tensor | None, x: Tensor, name: str) -> Tensor:
    """The keys, one a row of x, which a compressor that draws at random cannot do without."""
    if key is None or key.shape != x.shape[:1]:
        found = "None" if key is None else f"{tuple(key.shape)} keys for {len(x)} rows"
        raise ValueError(
            f"{name} draws at random and got key={found}: pass one int64 key per row, gossip.rng.key(seed, …)"
        )
    return key
