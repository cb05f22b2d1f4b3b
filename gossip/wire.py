"""What travels: a header and some columns of a few rows in one persistent byte buffer; a large message is several of them."""

import math
import struct
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

HEADER = 64  # bytes, of which five int64 are used; the rest keeps what follows aligned for vector instructions
CHUNK = 4 << 20  # bytes; larger dense messages are cut, so that a receiver never holds a whole row per neighbour
_FIELDS = struct.Struct("=5q")  # round, sender, sequence number within the round, number of the packet, length

Spec = tuple[torch.dtype, tuple[int, ...]]  # of a part: dtype and the shape of one row


def spec(parts: tuple[Tensor, ...]) -> tuple[Spec, ...]:
    """Dtype and row shape of each part."""
    return tuple((p.dtype, tuple(p.shape[1:])) for p in parts)


def row_bits(specs: tuple[Spec, ...]) -> int:
    """Bits of one worker's message: its parts as they travel, without the header.

    >>> row_bits(((torch.float32, (10,)), (torch.int32, (10,))))
    640
    """
    return 8 * sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)


class Piece(NamedTuple):
    """Columns `start` to `stop` − 1 of a part, flattened to (rows, columns); `whole` if that is all of it."""

    part: int
    start: int
    stop: int
    whole: bool

    def of(self, parts: tuple[Tensor, ...]) -> Tensor:
        """These columns of these parts, as a view."""
        part = parts[self.part]
        return part if self.whole else part.view(len(part), -1)[:, self.start : self.stop]


def cut(specs: tuple[Spec, ...], rows: int, limit: float = math.inf) -> list[tuple[Piece, ...]]:
    """Which columns travel together: consecutive ones, in packets of at most `limit` bytes (at least 16 columns each).

    >>> for packet in cut(((torch.float32, (50,)), (torch.float32, (1,))), rows=1, limit=128):
    ...     print([tuple(piece) for piece in packet])
    [(0, 0, 32, False)]
    [(0, 32, 50, False), (1, 0, 1, True)]
    """
    packets: list[tuple[Piece, ...]] = []
    packet: list[Piece] = []
    room = limit
    for part, (dtype, shape) in enumerate(specs):
        column, size, start = rows * dtype.itemsize, math.prod(shape), 0
        while True:
            stop = size if (size - start) * column <= room else start + int(room) // column // 16 * 16
            if stop == start < size and not packet:
                stop = min(size, start + 16)
            if stop > start or start == size:
                packet.append(Piece(part, start, stop, stop - start == size))
                room = max(0, room - (stop - start) * column)
            if stop == size:
                break
            packets.append(tuple(packet))
            packet, room, start = [], limit, stop
    return [*packets, tuple(packet)]


class Packet:
    """A header and `rows` rows of some parts in one byte buffer, which is allocated once and used every round.

    Args:
        specs: dtype and row shape of each part.
        rows: how many rows.
        device: where the buffer lies.
        room: a buffer to use the beginning of, instead of one of its own.

    >>> packet = Packet(((torch.float32, (3,)), (torch.int32, (1,))), rows=2)
    >>> packet.buffer.numel(), [tuple(p.shape) for p in packet.parts]
    (96, [(2, 3), (2, 1)])
    """

    def __init__(
        self, specs: tuple[Spec, ...], rows: int, device: torch.device | str = "cpu", room: Tensor | None = None
    ) -> None:
        starts = self._starts(specs, rows)
        self.length = starts[-1]
        if room is None:
            room = torch.zeros(self.length, dtype=torch.uint8, device=device)
        self.buffer = room[: self.length]
        self.parts = tuple(
            self.buffer[start : start + rows * dtype.itemsize * math.prod(shape)].view(dtype).view(rows, *shape)
            for start, (dtype, shape) in zip(starts, specs)
        )
        self.header = self.buffer[: _FIELDS.size]
        self._bytes = memoryview(cast(Any, self.header.numpy())) if self.buffer.device.type == "cpu" else None

    @staticmethod
    def _starts(specs: tuple[Spec, ...], rows: int) -> list[int]:
        starts = [HEADER]
        for dtype, shape in specs:
            size = rows * dtype.itemsize * math.prod(shape)
            starts.append(starts[-1] + -(-size // 8) * 8)  # a view needs its offset aligned to the dtype
        return starts

    @classmethod
    def size(cls, specs: tuple[Spec, ...], rows: int) -> int:
        """Bytes of such a packet."""
        return cls._starts(specs, rows)[-1]

    def seal(self, round: int, sender: int, sequence: int, number: int = 0) -> None:
        """Write the header."""
        if self._bytes is not None:
            _FIELDS.pack_into(self._bytes, 0, round, sender, sequence, number, self.length)
        else:
            self.header.view(torch.int64).copy_(torch.tensor((round, sender, sequence, number, self.length)))

    def check(self, round: int, sender: int, sequence: int, number: int = 0) -> None:
        """Refuse a packet of another round, sender, place in the round, place in its message, or length."""
        want = (round, sender, sequence, number, self.length)
        got = _FIELDS.unpack(self._bytes if self._bytes is not None else bytes(self.header.tolist()))
        if got != want:
            raise RuntimeError(
                f"a message from rank {sender} is out of step: expected (round, sender, sequence, packet, bytes) = "
                f"{want}, got {got}; every rank must run the same algorithm and schedule from the same round"
            )


class Message:
    """`rows` rows of some parts, in packets of at most `limit` bytes.

    Args:
        specs: dtype and row shape of each part.
        rows: how many rows.
        limit: bytes of a packet, about.
        rooms: how many buffers the packets share in turn; one for each packet if None.
        device: where the buffers lie.

    >>> arriving = Message(((torch.float32, (64,)),), rows=2, limit=128, rooms=2)
    >>> len(arriving.packets), arriving.nbytes
    (4, 384)
    """

    def __init__(
        self,
        specs: tuple[Spec, ...],
        rows: int,
        limit: float = math.inf,
        rooms: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs, self.rows = specs, rows
        self.pieces = cut(specs, rows, limit)
        inner = [
            tuple((specs[p.part][0], specs[p.part][1] if p.whole else (p.stop - p.start,)) for p in pieces)
            for pieces in self.pieces
        ]
        rooms = min(rooms or len(inner), len(inner))
        shared = [
            torch.zeros(max(Packet.size(s, rows) for s in inner[place::rooms]), dtype=torch.uint8, device=device)
            for place in range(rooms)
        ]
        self.packets = [Packet(s, rows, room=shared[i % rooms]) for i, s in enumerate(inner)]
        self.nbytes = sum(room.numel() for room in shared)

    def fill(self, parts: tuple[Tensor, ...], rows: Tensor | None = None) -> None:
        """Copy these parts in; only the given rows of them if `rows` is not None."""
        if len(self.packets) > 1:
            parts = tuple(p if p.ndim < 3 else p.contiguous() for p in parts)  # `Piece.of` flattens them
        for pieces, packet in zip(self.pieces, self.packets):
            for piece, place in zip(pieces, packet.parts):
                source = piece.of(parts)
                if rows is None:
                    place.copy_(source)
                else:
                    torch.index_select(source, 0, rows, out=place)

    def read(self) -> tuple[Tensor, ...]:
        """The parts; if they travel in several packets, put together in new memory."""
        if len(self.packets) == 1:
            return self.packets[0].parts
        columns: list[list[Tensor]] = [[] for _ in self.specs]
        for pieces, packet in zip(self.pieces, self.packets):
            for piece, place in zip(pieces, packet.parts):
                columns[piece.part].append(place.view(self.rows, piece.stop - piece.start))
        return tuple(torch.cat(c, 1).view(self.rows, *shape) for c, (_, shape) in zip(columns, self.specs))
