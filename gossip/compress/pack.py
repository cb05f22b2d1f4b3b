"""Small numbers side by side in bytes, by vector operations alone, so on every device and without a table of bits.

Codes below 2^b travel in planes of 8, 4, 2 and 1 bits, as b is a sum of such (5 = 4 + 1); codes below 3 five to a byte
(3⁵ = 243), which is 1.6 bits instead of log₂ 3 = 1.585. Within a plane the order is that of the coordinates, lowest bits
first. w-bit codes are gathered from whole bytes in log₂(8/w) steps ``v | v >> s``, of 2, 4 or 8 bytes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tiles import Room, array


def _mask(w: int, step: int) -> int:
    """2^step codes side by side in the lowest bits of every 2^step bytes of a wide number."""
    return sum(((1 << (w << step)) - 1) << place for place in range(0, 64 // w, 8 << step))


_MASKS = {w: [(step, _mask(w, step)) for step in reversed(range((8 // w).bit_length() - 1))] for w in (4, 2, 1)}


class _Operations(NamedTuple):
    """What packing takes, every one with `out`: NumPy's cost fewer microseconds a call, torch's run on every device."""

    right: Callable
    left: Callable
    either: Callable
    both: Callable
    put: Callable[[Any, Any], Any]
    wide: dict[int, Any]  # w: the type of 8/w bytes, which hold one byte of w-bit codes


_NUMPY = _Operations(
    np.right_shift,
    np.left_shift,
    np.bitwise_or,
    np.bitwise_and,
    lambda out, v: np.copyto(out, v, casting="unsafe"),
    {4: np.int16, 2: np.int32, 1: np.int64},
)
_TORCH = _Operations(
    torch.bitwise_right_shift,
    torch.bitwise_left_shift,
    torch.bitwise_or,
    torch.bitwise_and,
    lambda out, v: out.copy_(v),
    {4: torch.int16, 2: torch.int32, 1: torch.int64},
)


def planes(base: int) -> list[int]:
    """The widths of the planes for codes below `base`, up to 2^15.

    >>> planes(2), planes(33), planes(512)
    ([1], [4, 2], [8, 1])
    """
    bits = (base - 1).bit_length()
    return [w for w in (8, 4, 2, 1) if bits & w]


def octets(base: int, d: int) -> int:
    """Bytes of d codes below `base`.

    >>> octets(2, 9), octets(3, 9), octets(16, 9)
    (2, 2, 5)
    """
    return -(-d // 5) if base == 3 else sum(-(-d * w // 8) for w in planes(base))


class Views(NamedTuple):
    """A packer's buffers in one shape: codes, the same as int8, and arrays: codes padded, a plane of theirs, and scratch."""

    codes: Tensor
    signed: Tensor
    full: Any
    plane: Any
    scratch: Any


class Packer:
    """Packs and unpacks tiles of at most `rows` × `most` codes below `base`; its buffers are allocated once.

    What is read of a code is step · code − zero (step = 1 from base 4 on); signed unless zero = 0, and in any dtype up to
    base 3, where a byte is looked up in a table.

    >>> packer, packed = Packer(1, 6, 16), torch.zeros(1, 3, dtype=torch.uint8)
    >>> packer.room(1, 6).copy_(torch.tensor([[1, 2, 3, 4, 5, 15]])) is not None
    True
    >>> packer.pack(packed, 0, 6, 6)
    >>> [hex(b) for b in packed[0].tolist()], packer.read(packed, 0, 6, 6).tolist()
    (['0x21', '0x43', '0xf5'], [[1, 2, 3, 4, 5, 15]])
    """

    def __init__(
        self,
        rows: int,
        most: int,
        base: int,
        device: torch.device | str = "cpu",
        zero: int = 0,
        step: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.base, self.zero = base, zero
        self.unit = 5 if base == 3 else 8  # codes are padded to a multiple of it
        self.planes = planes(base)
        size = rows * -(-most // self.unit) * self.unit
        size += -size % 8
        self._room = Room(size, device, torch.uint8 if base <= 256 else torch.int16)
        self._bytes = Room(size, device, torch.uint8, torch.uint8)
        self._views: dict[tuple[int, int], Views] = {}
        self._cpu = torch.device(device).type == "cpu"
        self._do = _NUMPY if self._cpu else _TORCH
        if base <= 3:
            kind = dtype or (torch.int8 if zero else torch.uint8)
            self._table = _table(base, zero, step, kind).to(device)
            self._looked = Room(size, device, kind)
            if self._cpu:  # a row of the table is one item
                self._item = np.dtype(f"V{self.unit * kind.itemsize}")
                self._items = self._table.numpy().view(self._item)[:, 0]

    def room(self, rows: int, count: int) -> Tensor:
        """(rows, count): where the codes are to be written."""
        return self._of(rows, count).codes

    def pack(self, packed: Tensor, start: int, count: int, d: int) -> None:
        """Write the codes in `room(rows, count)`, coordinates `start` and on of d, into packed (rows, octets(base, d))."""
        views, octets = self._of(len(packed), count), array(packed)
        if views.full.shape[1] > count:
            views.full[:, count:] = 0
        if self.base == 3:
            five = views.full.reshape(len(packed), -1, 5)
            into = octets[:, start // 5 : -(-(start + count) // 5)]
            self._do.put(into, five[:, :, 4])
            for place in (3, 2, 1, 0):
                into *= 3
                into += five[:, :, place]
            return
        full, plane = views.full, views.full if len(self.planes) == 1 else views.plane
        for w, into in self._cut(octets, start, count, d):
            if plane is not full:
                self._do.put(plane, full)
                plane &= (1 << w) - 1
                full >>= w
            if w == 1 and self._cpu:
                into[...] = np.packbits(plane.view(np.bool_), axis=1, bitorder="little")[:, : into.shape[1]]
            else:
                self._gather(plane, w, into, views.scratch)

    def read(self, packed: Tensor, start: int, count: int, d: int) -> Tensor:
        """(rows, count): step · code − zero of coordinates `start` and on, in a buffer that the next call overwrites."""
        if self.base <= 3:
            return self._look_up(packed, start, count)
        views, octets = self._of(len(packed), count), array(packed)
        full, plane = views.full, views.full if len(self.planes) == 1 else views.plane
        for place, (w, part) in enumerate(reversed(self._cut(octets, start, count, d))):
            self._spread(part, w, plane, views.scratch)
            if plane is not full and place == 0:
                self._do.put(full, plane)
            elif plane is not full:
                full <<= w
                full |= plane
        if not self.zero:
            return views.codes
        full -= self.zero
        return views.signed

    def _look_up(self, packed: Tensor, start: int, count: int) -> Tensor:
        part = packed[:, start // self.unit : -(-(start + count) // self.unit)]
        (out,) = self._looked(len(part), part.shape[1] * self.unit)
        if self._cpu:
            self._items.take(part.numpy(), out=out.numpy().view(self._item), mode="clip")
        else:
            torch.index_select(self._table, 0, part.flatten().int(), out=out.view(-1, self.unit))
        return out if out.shape[1] == count else out[:, :count]

    def _cut(self, octets: Any, start: int, count: int, d: int) -> list[tuple[int, Any]]:
        """Of each plane its width and the bytes of some coordinates."""
        found, begin = [], 0
        for w in self.planes:
            found.append((w, octets[:, begin + start * w // 8 : begin + -(-(start + count) * w // 8)]))
            begin += -(-d * w // 8)
        return found

    def _of(self, rows: int, count: int) -> Views:
        if (rows, count) not in self._views:
            full = -(-count // self.unit) * self.unit
            (codes,) = self._room(rows, full)
            exact = codes if full == count else codes[:, :count]
            signed = exact.view(torch.int8) if codes.dtype == torch.uint8 else exact
            arrays = (array(part) for part in (codes, *self._bytes(rows, full)))
            self._views[rows, count] = Views(exact, signed, *arrays)
        return self._views[rows, count]

    def _gather(self, plane: Any, w: int, into: Any, scratch: Any) -> None:
        """Bytes (rows, n) of w-bit codes to packed bytes; overwrites them."""
        if w == 8:
            self._do.put(into, plane[:, : into.shape[1]])
            return
        v, t = plane.view(self._do.wide[w]), scratch.view(self._do.wide[w])
        self._do.either(v, self._do.right(v, 8 - w, out=t), out=t)
        for step in range(1, (8 // w).bit_length() - 1):
            self._do.either(t, self._do.right(t, (8 - w) << step, out=v), out=t)
        self._do.put(into, t[:, : into.shape[1]])  # the lowest byte of each

    def _spread(self, part: Any, w: int, plane: Any, scratch: Any) -> None:
        """The inverse, into bytes (rows, n)."""
        n = part.shape[1]
        if w == 8:
            self._do.put(plane[:, :n], part)
            return
        t, s = plane.view(self._do.wide[w]), scratch.view(self._do.wide[w])
        if n < t.shape[1]:
            t[:, n:] = 0
        self._do.put(t[:, :n], part)
        for step, mask in _MASKS[w]:
            self._do.either(t, self._do.left(t, (8 - w) << step, out=s), out=t)
            self._do.both(t, mask, out=t)


@lru_cache(maxsize=32)
def _table(base: int, zero: int, step: int, dtype: torch.dtype) -> Tensor:
    """What each byte holds: (243, 5) numbers for base 3, (256, 8) for base 2."""
    unit = 5 if base == 3 else 8
    digits = torch.arange(base**unit)[:, None] // base ** torch.arange(unit) % base
    return (digits * step - zero).to(dtype)
