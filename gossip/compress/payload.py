"""A compressed message: the tensors that travel, and how the receiver adds them up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..plan import Block
from ..wire import row_bits, spec


class Payload(ABC):
    """What a compressor makes of m rows of d numbers; row axis first in every part.

    What is metered is what travels: `bits` follows from the parts' dtypes and shapes, and from `used`.
    """

    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that travel, (m, …), in the dtypes in which they travel."""

    @abstractmethod
    def like(self, parts: tuple[Tensor, ...]) -> Payload:
        """The same kind of payload around parts that arrived."""

    @abstractmethod
    def dense(self) -> Tensor:
        """(m, d): what the receiver adds."""

    @property
    def used(self) -> Tensor | None:
        """(m,) int64 for messages of variable length: the bytes of the last part that are in use; None if all are.

        That part is uint8 (m, capacity); the capacity follows from d and the options alone, and `used` from the other
        parts, so that a receiver knows it.
        """
        return None

    @property
    def bits(self) -> int:
        """Bits per message (one row); of variable length, their mean, rounded up."""
        specs, used = spec(self.parts()), self.used
        return row_bits(specs) if used is None else row_bits(specs[:-1]) + math.ceil(8 * float(used.double().mean()))

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        """into_i += scale · Σ_j block_ij · dense_j, in place; a sparse payload does it without the dense rows."""
        block.add(into, self.dense(), scale)

    def add_to(self, into: Tensor) -> None:
        """into_i += dense_i, in place."""
        into.add_(self.dense())


class Placed:
    """A payload that is added up as another one with the same numbers. Stands before `Payload` among the bases."""

    @abstractmethod
    def placed(self) -> Payload:
        """The same with an index for every value."""

    def dense(self) -> Tensor:
        """(m, d): what the receiver adds."""
        return self.placed().dense()

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        """into_i += scale · Σ_j block_ij · dense_j, in place."""
        self.placed().add_into(into, block, scale)

    def add_to(self, into: Tensor) -> None:
        """into_i += dense_i, in place."""
        self.placed().add_to(into)


class Compressor(Protocol):
    """Rows (m, d) to a `Payload`. `key` (m,) int64 is the randomness of each row, see `gossip.rng`.

    A contraction has E‖C(x) − x‖² ≤ (1 − δ) ‖x‖²; `delta(d)` states δ for rows of d numbers. `gamma` is a consensus step
    size to start from in CHOCO: stable on a ring of 25, by measurement; a compressor may lack it.
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Payload:
        """Compress each row."""
        ...

    def delta(self, d: int) -> float:
        """The contraction constant δ in (0, 1] that holds for every row of d numbers."""
        ...


def memory_of(compressor: Any, x: Tensor) -> Any:
    """What a compressor remembers between messages of rows like x (m, d): leaves of the algorithm's state, or None.

    Compressors are pure, so one with a memory (a warm start, the number of the message) has a method `memory(x)` that makes
    it, and updates it in place when it is called with it: `compressor(x, key, memory)`. Without it each message is the first.
    """
    return compressor.memory(x) if hasattr(compressor, "memory") else None


def compress(compressor: Any, x: Tensor, key: Tensor | None, memory: Any) -> Payload:
    """The payload of rows x (m, d), with the memory that `memory_of` made."""
    x = checked_rows(x)
    payload = compressor(x, key) if memory is None else compressor(x, key, memory)
    if not isinstance(payload, Payload):
        raise TypeError(
            f"{type(compressor).__name__} made a {type(payload).__name__}, and a compressor makes a gossip.Payload, which says "
            "what travels (parts) and what is added (dense): see the README's example"
        )
    return payload


def checked_rows(x: Tensor) -> Tensor:
    """Rows (m, d) to compress, without their graph."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(
            f"a compressor takes rows (m, d) of floating-point numbers, and got {tuple(x.shape)} of {x.dtype}: one vector is "
            "x[None], whole numbers are x.float()"
        )
    return x.detach()


def check_ratio(ratio: float) -> None:
    """A ratio is the fraction of coordinates that is kept."""
    number = isinstance(ratio, int | float)
    if not number or not 0 < ratio <= 1:
        hint = f"; to keep one coordinate in {ratio:g}, write {1 / ratio:g}" if number and ratio > 1 else ""
        raise ValueError(
            f"ratio={ratio!r} is not in (0, 1]: it is the fraction of coordinates that is kept, 0.01 sends 1 %{hint}"
        )


def kept(ratio: float, d: int) -> int:
    """Coordinates kept of d: the nearest integer to ratio · d, at least 1."""
    return max(1, round(ratio * d))


class NotFinite(ValueError):
    """A row to compress holds NaN or an infinity: the run has diverged. `row` is the first such row."""

    def __init__(self, row: int, rows: int, bad: int, worker: int | None = None, where: str = "") -> None:
        who = f"row {row}" if worker is None else f"row {row} (worker {worker})"
        super().__init__(
            f"{who} of the {rows} rows to compress holds NaN or an infinity{where} ({bad} rows do): the run has "
            "diverged, so use a smaller learning rate or a smaller gamma"
        )
        self.row, self.rows, self.bad = row, rows, bad

    def of(self, workers: Tensor, where: str = "") -> NotFinite:
        """The same, with the worker named; `workers` are the ids of the rows, `where` says in which tensor of it."""
        return NotFinite(self.row, self.rows, self.bad, int(workers[self.row]), where)


@contextmanager
def naming(workers: Tensor, where: Callable[[], str] = str) -> Generator[None]:
    """Inside, a compressor that refuses a row names its worker; `workers` (m,) are the ids of the rows."""
    try:
        yield
    except NotFinite as error:
        raise error.of(workers, where()) from None


def refuse_non_finite(finite: Tensor) -> None:
    """`finite` (m,) says of each row whether all of it is; NaN and infinities would spread to the neighbours for good."""
    if not finite.all():
        rows = (~finite).nonzero()[:, 0].tolist()
        raise NotFinite(rows[0], len(finite), len(rows))


def refuse_in(values: Tensor) -> None:
    """The same of values (m, k) themselves: one sum tells, unless it overflows."""
    if not values.sum(dtype=torch.float64).isfinite():
        refuse_non_finite(values.isfinite().all(1))
