"""Small numbers side by side in bytes, by vector operations alone, so on every device and without a table of bits.

Codes below 2^b travel in planes of 8, 4, 2 and 1 bits, as b is a sum of such (5 = 4 + 1); codes below 3 five to a byte
(3⁵ = 243), which is 1.6 bits instead of log₂ 3 = 1.585. Within a plane the order is that of the coordinates, lowest bits
first. w-bit codes are gathered from whole bytes in log₂(8/w) steps ``v | v >> s``, of 2, 4 or 8 bytes at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tiles import Room

_WIDE = {4: torch.int16, 2: torch.int32, 1: torch.int64}  # 8/w bytes, which hold one byte of w-bit codes


def _mask(w: int, step: int) -> int:
    """2^step codes side by side in the lowest bits of every 2^step bytes of a wide number."""
    return sum(((1 << (w << step)) - 1) << place for place in range(0, 64 // w, 8 << step))


_MASKS = {w: [(step, _mask(w, step)) for step in reversed(range((8 // w).bit_length() - 1))] for w in _WIDE}


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
    """A packer's buffers in one shape: codes, the same padded, as int8, one plane, and wide integers (numpy's on a CPU)."""

    codes: Tensor
    full: Tensor
    signed: Tensor
    plane: Tensor
    wide_plane: dict[int, Any]
    wide_scratch: dict[int, Any]
    wide_codes: dict[int, Any]


class Packer:
    """Packs and unpacks tiles of at most `rows` × `most` codes below `base`; its buffers are allocated once.

    What is read of a code is step · code − zero, which is signed unless zero = 0.

    >>> packer, packed = Packer(1, 6, 16), torch.zeros(1, 3, dtype=torch.uint8)
    >>> packer.room(1, 6).copy_(torch.tensor([[1, 2, 3, 4, 5, 15]])) is not None
    True
    >>> packer.pack(packed, 0, 6, 6)
    >>> [hex(b) for b in packed[0].tolist()], packer.read(packed, 0, 6, 6).tolist()
    (['0x21', '0x43', '0xf5'], [[1, 2, 3, 4, 5, 15]])
    """

    def __init__(
        self, rows: int, most: int, base: int, device: torch.device | str = "cpu", step: int = 1, zero: int = 0
    ) -> None:
        self.base, self.step, self.zero = base, step, zero
        self.unit = 5 if base == 3 else 8  # codes are padded to a multiple of it
        self.planes = planes(base)
        size = rows * -(-most // self.unit) * self.unit
        size += -size % 8
        self._room = Room(size, torch.uint8 if base <= 256 else torch.int16, device=device)
        self._bytes = Room(size, torch.uint8, torch.uint8, device=device)
        self._views: dict[tuple[int, int], Views] = {}
        self._table = None
        if base <= 3:
            digits = torch.arange(base**self.unit)[:, None] // base ** torch.arange(self.unit) % base
            self._table = (digits * step - zero).to(torch.int8).to(device)

    def room(self, rows: int, count: int) -> Tensor:
        """(rows, count): where the codes are to be written."""
        return self._of(rows, count).codes

    def pack(self, packed: Tensor, start: int, count: int, d: int) -> None:
        """Write the codes in `room(rows, count)`, coordinates `start` and on of d, into packed (rows, octets(base, d))."""
        views = self._of(len(packed), count)
        if views.full is not views.codes:
            views.full[:, count:] = 0
        if self.base == 3:
            five, into = views.full.unflatten(1, (-1, 5)), packed[:, start // 5 : -(-(start + count) // 5)]
            into.copy_(five[:, :, 4])
            for place in (3, 2, 1, 0):
                into.mul_(3).add_(five[:, :, place])
            return
        shift, begin = 0, 0
        for w in self.planes:
            into = packed[:, begin + start * w // 8 : begin + -(-(start + count) * w // 8)]
            plane = views.full
            if len(self.planes) > 1:
                plane = views.plane.copy_(views.full >> shift if shift else views.full).bitwise_and_((1 << w) - 1)
            if w == 1 and into.device.type == "cpu":
                into.numpy()[...] = np.packbits(plane.numpy().view(np.bool_), axis=1, bitorder="little")[
                    :, : into.shape[1]
                ]
            else:
                self._gather(plane, w, into, views)
            shift, begin = shift + w, begin + -(-d * w // 8)

    def read(self, packed: Tensor, start: int, count: int, d: int) -> Tensor:
        """(rows, count): step · code − zero of coordinates `start` and on, in a buffer that the next call overwrites."""
        views = self._of(len(packed), count)
        if self._table is not None:
            part = packed[:, start // self.unit : -(-(start + count) // self.unit)]
            if self.unit == 8 and packed.device.type == "cpu":
                table = self._table.view(torch.int64)[:, 0].numpy()
                np.take(table, part.numpy(), out=views.full.view(torch.int64).numpy(), mode="clip")
            else:
                out = views.full.view(torch.int8).view(-1, self.unit)
                torch.index_select(self._table, 0, part.flatten().int(), out=out)
            return views.signed if self.zero else views.codes
        shift, begin = 0, 0
        for w in self.planes:
            part = packed[:, begin + start * w // 8 : begin + -(-(start + count) * w // 8)]
            if len(self.planes) == 1:
                self._spread(part, w, views.full, views)
            else:
                self._spread(part, w, views.plane, views)
                if shift:
                    views.full.bitwise_or_(views.plane.to(views.full.dtype) << shift)
                else:
                    views.full.copy_(views.plane)
            shift, begin = shift + w, begin + -(-d * w // 8)
        if self.step != 1:
            views.full.mul_(self.step)
        if self.zero:
            views.full.sub_(self.zero)
            return views.signed
        return views.codes

    def _of(self, rows: int, count: int) -> Views:
        if (rows, count) not in self._views:
            full = -(-count // self.unit) * self.unit
            (codes,), (plane, scratch) = self._room(rows, full), self._bytes(rows, full)
            exact = codes if full == count else codes[:, :count]
            signed = exact.view(torch.int8) if codes.dtype == torch.uint8 else exact
            wide = [
                {w: part.view(kind) for w, kind in _WIDE.items() if self.unit == 8 and part.dtype == torch.uint8}
                for part in (plane, scratch, codes)
            ]
            if codes.device.type == "cpu":
                wide = [{w: part.numpy() for w, part in of.items()} for of in wide]
            self._views[rows, count] = Views(exact, codes, signed, plane, *wide)
        return self._views[rows, count]

    def _gather(self, plane: Tensor, w: int, into: Tensor, views: Views) -> None:
        """Bytes (rows, n) of w-bit codes to packed bytes; overwrites them."""
        if w == 8:
            into.copy_(plane[:, : into.shape[1]])
            return
        v = (views.wide_codes if plane is views.full else views.wide_plane)[w]
        t = views.wide_scratch[w]
        if isinstance(t, np.ndarray):  # fewer microseconds per call than torch
            np.bitwise_or(v, np.right_shift(v, 8 - w, out=t), out=t)
            for step in range(1, (8 // w).bit_length() - 1):
                np.bitwise_or(t, np.right_shift(t, (8 - w) << step, out=v), out=t)
            np.copyto(into.numpy(), t[:, : into.shape[1]], casting="unsafe")  # the lowest byte of each
            return
        torch.bitwise_right_shift(v, 8 - w, out=t).bitwise_or_(v)
        for step in range(1, (8 // w).bit_length() - 1):
            torch.bitwise_right_shift(t, (8 - w) << step, out=v)
            t.bitwise_or_(v)
        into.copy_(t[:, : into.shape[1]])

    def _spread(self, part: Tensor, w: int, plane: Tensor, views: Views) -> None:
        """The inverse, into bytes (rows, n)."""
        if w == 8:
            plane[:, : part.shape[1]].copy_(part)
            return
        t = (views.wide_codes if plane is views.full else views.wide_plane)[w]
        s, n = views.wide_scratch[w], part.shape[1]
        if n < t.shape[1]:
            t[:, n:] = 0
        if isinstance(t, np.ndarray):
            np.copyto(t[:, :n], part.numpy())
            for step, mask in _MASKS[w]:
                np.bitwise_and(np.bitwise_or(t, np.left_shift(t, (8 - w) << step, out=s), out=t), mask, out=t)
            return
        t[:, :n].copy_(part)
        for step, mask in _MASKS[w]:
            torch.bitwise_left_shift(t, (8 - w) << step, out=s)
            t.bitwise_or_(s).bitwise_and_(mask)
