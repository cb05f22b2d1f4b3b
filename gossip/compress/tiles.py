"""Rows in tiles that stay in the cache: where a quantiser's passes cost a tenth of what they cost in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..plan import Block

T = TypeVar("T")

TILE = 5 << 14  # numbers; of each of the few buffers that a loop over tiles holds
_ALIGN = 40  # tiles start at multiples of it, so at whole bytes of every packing, and at whole words of keyed bits


class Tile(NamedTuple):
    """Columns `start` to `stop` − 1 of some rows: exactly the buckets `first` to `last` − 1, or a part of one."""

    rows: slice
    start: int
    stop: int
    first: int
    last: int

    def of(self, x: Tensor) -> Tensor:
        """The tile of x (m, d), a view: (r, numbers), or (r, buckets, numbers) if it has several."""
        part, many = self.across(self.among(x)), self.last - self.first
        return part if many == 1 else part.unflatten(1, (many, -1))

    def across(self, x: Tensor) -> Tensor:
        """The tile's columns of all rows of x (m, d)."""
        return x.narrow(1, self.start, self.stop - self.start)

    def among(self, x: Tensor) -> Tensor:
        """The tile's rows of x (m, …)."""
        return x if self.rows.stop - self.rows.start == len(x) else x[self.rows]

    def each(self, scale: Tensor) -> Tensor:
        """The tile of a number per bucket (m, buckets), to be broadcast along `of`."""
        part = self.among(scale).narrow(1, self.first, self.last - self.first)
        return part if self.last - self.first == 1 else part[:, :, None]


class Room:
    """Buffers of one size that are allocated once, and their views of each shape, which are made once too.

    >>> room = Room(6, "cpu", torch.float32, torch.int16)
    >>> [tuple(part.shape) for part in room(2, 3)]
    [(2, 3), (2, 3)]
    """

    def __init__(self, size: int, device: torch.device | str, *dtypes: torch.dtype) -> None:
        self._flat = [torch.empty(size, dtype=dtype, device=device) for dtype in dtypes]
        self._views: dict[tuple[int, ...], list[Tensor]] = {}

    def __call__(self, *shape: int) -> list[Tensor]:
        if shape not in self._views:
            self._views[shape] = [flat[: math.prod(shape)].view(shape) for flat in self._flat]
        return self._views[shape]


class _Reused(threading.local):
    """What `reused` has made in this thread, the last few."""

    def __init__(self) -> None:
        self.made = lru_cache(maxsize=16)(lambda inference, make, *args: make(*args))


_reused = _Reused()


def reused(make: Callable[..., T], *args: Any) -> T:
    """`make(*args)`, or what that was the last time in this thread: buffers for one loop over tiles at a time.

    >>> reused(Room, 6, "cpu", torch.float32) is reused(Room, 6, "cpu", torch.float32)
    True
    """
    return _reused.made(torch.is_inference_mode_enabled(), make, *args)  # whose tensors are good nowhere else


def fresh(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(m, n) of a new message, not yet written; on a CPU in huge pages if it is large, whose first touch costs a tenth."""
    if device.type != "cpu":
        return torch.empty(m, n, dtype=dtype, device=device)
    return torch.from_numpy(np.empty((m, n), f"i{dtype.itemsize}")).view(dtype)


def array(x: Tensor) -> Any:
    """The same memory as a NumPy array, whose calls and views cost a fraction of a tensor's, where it is a CPU's."""
    return x.numpy() if x.device.type == "cpu" else x


class Readable(Protocol):
    """A payload that can be read in tiles."""

    @property
    def rows(self) -> int:
        """How many rows."""
        ...

    @property
    def d(self) -> int:
        """Numbers per row."""
        ...

    @property
    def bucket(self) -> int | None:
        """Numbers per bucket."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the dense rows."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the parts lie."""
        ...

    def reader(self, most: int) -> Callable[[Tile], tuple[Tensor, float]]:
        """A function from a tile of all rows, at most `most` columns, to (m, n) numbers and a factor still to be applied."""
        ...


def buckets(d: int, bucket: int | None) -> int:
    """How many buckets a row of d numbers has, at least one."""
    return max(1, -(-d // bucket)) if bucket else 1


def check_bucket(bucket: int | None) -> None:
    """A bucket starts at a whole byte of every packing."""
    if bucket is not None and (bucket < 8 or bucket % 8):
        raise ValueError(
            f"bucket={bucket!r} is not a positive multiple of 8: it is how many numbers share a norm, for example 512; "
            "None gives each row one"
        )


def tiles(m: int, d: int, bucket: int | None = None, all_rows: bool = False) -> Iterator[Tile]:
    """The tiles of m rows of d numbers, at most TILE numbers each.

    Several short rows or a part of one long row, so that what is computed of a row is the same whichever rows are with
    it; with `all_rows` a part of every row, of 1,000 columns at least.

    >>> [tuple(t)[1:] for t in tiles(1, 1000, bucket=480)]
    [(0, 960, 0, 2), (960, 1000, 2, 3)]
    """
    height = m if all_rows else min(m, max(1, TILE // max(1, d)))
    most = width(m, d, all_rows)
    for top in range(0, m, max(1, height)):
        rows = slice(top, min(m, top + height))
        if bucket is None or bucket >= d:
            for start in range(0, d, most):
                yield Tile(rows, start, min(d, start + most), 0, 1)
        elif bucket <= most:
            whole, step = d // bucket * bucket, most // math.lcm(bucket, 8) * math.lcm(bucket, 8)
            for start in range(0, whole, step):
                stop = min(whole, start + step)
                yield Tile(rows, start, stop, start // bucket, stop // bucket)
            if whole < d:
                yield Tile(rows, whole, d, whole // bucket, whole // bucket + 1)
        else:
            for i in range(buckets(d, bucket)):
                end = min(d, (i + 1) * bucket)
                for start in range(i * bucket, end, most):
                    yield Tile(rows, start, min(end, start + most), i, i + 1)


def width(m: int, d: int, all_rows: bool = False) -> int:
    """The largest number of columns of a tile."""
    most = max(1000, TILE // max(1, m)) if all_rows else TILE
    return max(1, min(d, most // _ALIGN * _ALIGN))


def height(m: int, d: int) -> int:
    """The largest number of rows of a tile."""
    return min(m, max(1, TILE // max(1, d)))


def is_long(d: int) -> bool:
    """Whether tiles of rows of d numbers are always parts of one row."""
    return TILE // max(1, d) < 2


# -- what a receiver does ---------------------------------------------------------------------------------------------------


class InTiles:
    """How a `Readable` payload is added up: a tile at a time. Stands before `Payload` among the bases."""

    def dense(self: Readable) -> Tensor:
        """(m, d): all of it."""
        m, d = self.rows, self.d
        whole = torch.empty(m, d, dtype=self.dtype, device=self.device)
        read = self.reader(width(m, d, True))
        for tile in tiles(m, d, self.bucket, True):
            part, factor = read(tile)
            torch.mul(part, factor, out=tile.across(whole))
        return whole

    def add_into(self: Readable, into: Tensor, block: Block, scale: float = 1.0) -> None:
        """into_i += scale · Σ_j block_ij · dense_j, a tile at a time."""
        m, d = self.rows, self.d
        read = self.reader(width(m, d, True))
        for tile in tiles(m, d, self.bucket, True):
            part, factor = read(tile)
            block.add(tile.across(into), part if part.dtype == into.dtype else part.to(into.dtype), scale * factor)

    def add_to(self: Readable, into: Tensor) -> None:
        """into_i += dense_i, a tile at a time."""
        m, d = self.rows, self.d
        read = self.reader(width(m, d, True))
        for tile in tiles(m, d, self.bucket, True):
            part, factor = read(tile)
            tile.across(into).add_(part, alpha=factor)
