"""What travels: a header with a message's small parts in one persistent byte buffer, then its large parts in chunks."""

import math
import struct
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

HEADER = 64  # bytes, of which four int64 are used; the rest keeps what follows aligned for vector instructions
CHUNK = 4 << 20  # bytes; larger dense parts are cut, so that a receiver never holds a whole row per neighbour
_FIELDS = struct.Struct("=4q")  # round, sender, sequence number within the round, length of the whole message

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


def cut(specs: tuple[Spec, ...], rows: int, limit: float = math.inf) -> tuple[list[Piece], list[Piece]]:
    """(the small parts, which travel with the header; the chunks of the others).

    A part is small if its rows take at most limit / 16 bytes. A chunk has at most `limit` bytes, or 16 columns.

    >>> small, chunks = cut(((torch.float32, (50,)), (torch.float32, (1,))), rows=1, limit=128)
    >>> [tuple(piece) for piece in small], [tuple(piece) for piece in chunks]
    ([(1, 0, 1, True)], [(0, 0, 32, False), (0, 32, 50, False)])
    """
    small, chunks = [], []
    for part, (dtype, shape) in enumerate(specs):
        column, size = rows * dtype.itemsize, math.prod(shape)
        if 16 * column * size <= limit:
            small.append(Piece(part, 0, size, True))
            continue
        width = size if column * size <= limit else max(16, int(limit) // column // 16 * 16)
        chunks += [Piece(part, i, min(i + width, size), width >= size) for i in range(0, size, width)]
    return small, chunks


class Packet:
    """A header and `rows` rows of some parts in one byte buffer, which is allocated once and used every round.

    Args:
        specs: dtype and row shape of each part.
        rows: how many rows.
        device: where the buffer lies.
        more: bytes that follow in other buffers; the header states the sum.

    >>> packet = Packet(((torch.float32, (3,)), (torch.int32, (1,))), rows=2)
    >>> packet.buffer.numel(), [tuple(p.shape) for p in packet.parts]
    (96, [(2, 3), (2, 1)])
    """

    def __init__(self, specs: tuple[Spec, ...], rows: int, device: torch.device | str = "cpu", more: int = 0) -> None:
        starts = [HEADER]
        for dtype, shape in specs:
            size = rows * dtype.itemsize * math.prod(shape)
            starts.append(starts[-1] + -(-size // 8) * 8)  # a view needs its offset aligned to the dtype
        self.length, self.varies = starts[-1] + more, False
        self._last = starts[-2] if specs else HEADER
        self.buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self.parts = tuple(
            self.buffer[start : start + rows * dtype.itemsize * math.prod(shape)].view(dtype).view(rows, *shape)
            for start, (dtype, shape) in zip(starts, specs)
        )
        self.header = self.buffer[: _FIELDS.size]
        self._bytes = memoryview(cast(Any, self.header.numpy())) if self.buffer.device.type == "cpu" else None

    def pack(self, last: Tensor, used: Tensor) -> None:
        """Fill the last part with the bytes of `last` (rows, capacity) that are `used` (rows,), without gaps, and end there."""
        stop = self._last
        for row, size in zip(last, used.tolist()):
            self.buffer[stop : stop + size].copy_(row[:size])
            stop += size
        self.length, self.varies = stop, True

    def spread(self, used: Tensor) -> Tensor:
        """The last part as it was before `pack`, in new memory if it has several rows."""
        part, start = self.parts[-1], self._last
        if len(part) == 1:
            return part
        spread = torch.zeros_like(part)
        for row, size in zip(spread, used.tolist()):
            row[:size].copy_(self.buffer[start : start + size])
            start += size
        return spread

    def seal(self, round: int, sender: int, sequence: int) -> None:
        """Write the header."""
        if self._bytes is not None:
            _FIELDS.pack_into(self._bytes, 0, round, sender, sequence, self.length)
        else:
            self.header.view(torch.int64).copy_(torch.tensor((round, sender, sequence, self.length)))

    def check(self, round: int, sender: int, sequence: int) -> None:
        """Refuse a packet of another round, sender, place in the round, or length; of varying length, of more than fits."""
        got = _FIELDS.unpack(self._bytes if self._bytes is not None else bytes(self.header.tolist()))
        varied = self.varies and self._last <= got[3] <= self.length
        want = (round, sender, sequence, got[3] if varied else self.length)
        if got != want:
            raise RuntimeError(
                f"a message from rank {sender} is out of step: expected (round, sender, sequence, bytes) = "
                f"{want}, got {got}; every rank must run the same algorithm and schedule from the same round, and step several "
                "optimizers in the same order (the second that was wrapped counts from 1000)"
            )


class Message:
    """`rows` rows of some parts: the header with the small parts, and chunks of the others, of at most `limit` bytes.

    Args:
        specs: dtype and row shape of each part.
        rows: how many rows.
        limit: bytes of a chunk, about; infinite for a message in one piece.
        rooms: how many buffers the chunks share in turn; one for each if None.
        device: where the buffers lie.
        over: contiguous parts whose own memory the chunks shall be, so that only the small parts are copied.

    Attributes:
        lead: the packet that goes first.
        small, pieces: what the lead holds, and what is in each of `chunks`.

    >>> arriving = Message(((torch.float32, (64,)),), rows=2, limit=128, rooms=2)
    >>> len(arriving.chunks), arriving.nbytes
    (4, 320)
    """

    def __init__(
        self,
        specs: tuple[Spec, ...],
        rows: int,
        limit: float = math.inf,
        rooms: int | None = None,
        device: torch.device | str = "cpu",
        over: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.specs, self.rows = specs, rows
        self.small, self.pieces = cut(specs, rows, limit)
        sizes = [rows * (p.stop - p.start) * specs[p.part][0].itemsize for p in self.pieces]
        self.lead = Packet(tuple(specs[p.part] for p in self.small), rows, device, sum(sizes))
        if over is not None:
            self.chunks, self.nbytes = [p.of(over) for p in self.pieces], self.lead.buffer.numel()
            return
        rooms = min(rooms or len(sizes), len(sizes))
        shared = [torch.zeros(max(sizes[i::rooms]), dtype=torch.uint8, device=device) for i in range(rooms)]
        self.chunks = [
            shared[i % rooms][:size].view(specs[p.part][0]).view(rows, *(specs[p.part][1] if p.whole else (-1,)))
            for i, (p, size) in enumerate(zip(self.pieces, sizes))
        ]
        self.nbytes = self.lead.buffer.numel() + sum(room.numel() for room in shared)

    @property
    def steps(self) -> int:
        """A message crosses in so many steps: the lead with the first chunk, then a chunk each."""
        return max(1, len(self.chunks))

    def buffers(self, step: int) -> list[Tensor]:
        """The bytes that cross in a step."""
        chunk = [c.view(-1).view(torch.uint8) for c in self.chunks[step : step + 1]]
        return [self.lead.buffer, *chunk] if step == 0 else chunk

    def at(self, step: int) -> list[tuple[Piece, Tensor]]:
        """What has crossed with a step: which columns, and where they lie."""
        chunk = list(zip(self.pieces[step : step + 1], self.chunks[step : step + 1]))
        return [*zip(self.small, self.lead.parts), *chunk] if step == 0 else chunk

    def fill(self, parts: tuple[Tensor, ...], rows: Tensor | None = None, used: Tensor | None = None) -> None:
        """Copy these parts in; only the given rows of them if `rows` is not None.

        Of a payload of variable length, so much of the last part as is `used` (of all rows, before the choice).
        """
        if used is not None:
            parts, last = parts[:-1], parts[-1]
            self.lead.pack(last if rows is None else last[rows], used if rows is None else used[rows])
        if len(self.chunks) > 1:
            parts = tuple(p if p.ndim < 3 else p.contiguous() for p in parts)  # `Piece.of` flattens them
        for step in range(self.steps):
            for piece, place in self.at(step)[: len(parts)]:
                source = piece.of(parts)
                if rows is None:
                    place.copy_(source)
                else:
                    torch.index_select(source, 0, rows, out=place)

    def read(self) -> tuple[Tensor, ...]:
        """The parts; those that travel in several chunks put together in new memory."""
        columns: list[list[Tensor]] = [[] for _ in self.specs]
        for step in range(self.steps):
            for piece, place in self.at(step):
                columns[piece.part].append(place)
        return tuple(
            c[0] if len(c) == 1 else torch.cat([p.view(self.rows, -1) for p in c], 1).view(self.rows, *shape)
            for c, (_, shape) in zip(columns, self.specs)
        )
