"""The payload of quantisers: packed codes and a scale per row or bucket; and how codes are rounded at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import rng
from .pack import Packer, octets
from .payload import Payload
from .tiles import InTiles, Room, Tile, height, is_long, reach, tiles, width, working


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
        packer = Packer(m, most, form.base, self.device, form.step, form.zero)
        room = Room(m * most, working(form.dtype), device=self.device)
        single = float(self.scale) if self.low is None and self.scale.numel() == 1 else None

        def read(tile: Tile) -> tuple[Tensor, float]:
            count, many = tile.stop - tile.start, tile.last - tile.first
            (values,) = room(m, count)
            values.copy_(packer.read(self.packed, tile.start, count, form.d))
            if single is not None:
                return values, single
            (split,) = room(m, many, count // many) if many > 1 else (values,)
            split.mul_(tile.each(self.scale))
            if self.low is not None:
                split.add_(tile.each(self.low))
            return values, 1.0

        return read


def signs(x: Tensor, count: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """(m, d) to (m, ⌈d/8⌉) bytes: 1 where x ≥ 0; how many are is added to `count` (m,), and ‖x‖₁ to `total` (m, 1)."""
    m, d = x.shape
    room = Room(height(m, d) * width(m, d) if total is not None else 0, working(x.dtype), device=x.device)
    packer = Packer(height(m, d), width(m, d), 2, x.device)
    packed = torch.empty(m, octets(2, d), dtype=torch.uint8, device=x.device)
    for tile in tiles(m, d):
        part, n = tile.of(x), tile.stop - tile.start
        above = packer.room(len(part), n)
        if x.device.type == "cpu" and x.dtype != torch.bfloat16:  # torch.ge into bool takes ten times as long
            np.greater_equal(part.numpy(), 0, out=above.numpy().view(np.bool_))
        else:
            above.copy_(part >= 0)
        if count is not None:
            count[tile.rows] += above.sum(1)
        if total is not None:  # here, where the tile is in the cache
            (scratch,) = room(*part.shape)
            part = torch.abs(part, out=scratch) if x.dtype == scratch.dtype else scratch.copy_(part).abs_()
            tile.among(total).add_(part.sum(1, keepdim=True))
        packer.pack(tile.among(packed), tile.start, n, d)
    return packed


def at_random(x: Tensor, key: Tensor, form: Form, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Packed codes ⌊(x − low) / scale + zero + u⌋, u uniform in (0, 1): E (code − zero) = (x − low) / scale.

    u is an odd multiple of 2^−16, one of 2^15 that are symmetric about ½, so a code's mean is off by at most 2^−16: far
    below the rounding itself, whose standard deviation is up to ½. A whole number is never moved. A scale of 0 gives `zero`.
    """
    m, d = x.shape
    kind, rows, most = working(x.dtype), height(m, d), width(m, d)
    bits, packer = rng.Bits(key, most, rows), Packer(rows, most, form.base, x.device)
    room = Room(rows * most, kind, kind, device=x.device)
    packed = torch.empty(m, octets(form.base, d), dtype=torch.uint8, device=x.device)
    inverse = scale.reciprocal().masked_fill_(scale * reach(x.dtype) < 1, 0)
    middle = torch.tensor(form.zero + 0.5, dtype=kind, device=x.device)
    for tile in tiles(m, d, form.bucket):
        part, count = tile.of(x), tile.stop - tile.start
        (y, _), (flat, u) = room(*part.shape), room(len(part), count)
        if low is not None:
            torch.sub(part, tile.each(low), out=y)
            y.mul_(tile.each(inverse)).add_(middle)
        elif is_long(d) and part.ndim == 2 and x.dtype == kind:
            torch.add(middle, part, alpha=float(inverse[tile.rows, tile.first]), out=y)
        elif x.dtype == kind:
            torch.mul(part, tile.each(inverse), out=y).add_(middle)
        else:
            y.copy_(part).mul_(tile.each(inverse)).add_(middle)
        if form.cyclic:
            y.remainder_(form.base)
        flat.add_(u.copy_(bits(tile.rows, tile.start, count)), alpha=2.0**-16)
        codes = packer.room(len(part), count)
        if x.device.type == "cpu":  # twice as fast as torch from float to uint8
            np.copyto(codes.numpy(), flat.numpy(), casting="unsafe")
        else:
            codes.copy_(flat)
        if form.cyclic:
            codes.bitwise_and_(form.base - 1)
        packer.pack(tile.among(packed), tile.start, count, d)
    return packed


def checked(key: Tensor | None, name: str) -> Tensor:
    """The key, which a compressor that rounds at random cannot do without."""
    if key is None:
        raise ValueError(
            f"{name} rounds at random and got key=None: pass one int64 key per row, gossip.rng.key(seed, …)"
        )
    return key
