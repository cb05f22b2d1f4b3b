"""Entropy coding: index gaps and quantiser levels in about their entropy (Bamler 2022, constriction, arXiv 2201.01741)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..plan import Block
from .block_topk import Blocks
from .compose import Composed
from .index import pack
from .pack import Packer, octets
from .payload import Payload, compress, memory_of
from .sparse import Packed, Sparse
from .topk import TopK

_MANTISSA = 3  # bits after the leading one that are modelled; the bits below them travel as they are
_STEP = 16  # probabilities are told in steps of 2^(1/16)


@dataclass(frozen=True)
class RangeCoded:
    """The same payload with its indices and codes entropy-coded by the table of their own frequencies, without loss.

    Indices are coded as gaps, small ones each for itself, large ones by exponent and three bits of mantissa, the rest as it
    is. The table travels too: a byte for every symbol in use, its probability to 2 %. A message of this form has the
    length that the data make of it, at most one byte more than the fixed form, which it falls back to; small messages
    mostly do. The coder is the library constriction's (arXiv 2201.01741).

    Args:
        compressor: one whose payload has indices or codes: TopK, BlockTopK, QSGD, Compose of them, ….

    >>> x = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    >>> fixed, coded = TopK(0.05)(x), RangeCoded(TopK(0.05))(x)
    >>> torch.equal(coded.dense(), fixed.dense()), coded.bits < fixed.bits, coded.bits / entropy(fixed) < 1.01
    (True, True, True)
    """

    compressor: Any = TopK()

    def memory(self, x: Tensor) -> Any:
        """That of the compressor."""
        return memory_of(self.compressor, x)

    def __call__(self, x: Tensor, key: Tensor | None = None, memory: Any = None) -> Coded:
        """Compress each row of (m, d)."""
        inner = compress(self.compressor, x, key, memory)
        codecs, parts = codecs_of(inner), inner.parts()
        if not codecs or inner.used is not None:
            raise ValueError(
                f"the message of {type(self.compressor).__name__} has no indices or codes of a fixed number, so there is nothing "
                "to be entropy-coded: take TopK, BlockTopK, a quantiser with levels, or Compose of them; of layers, "
                "PerLayer(RangeCoded(…))"
            )
        rest = tuple(part for place, part in enumerate(parts) if place not in codecs)
        raw = torch.cat([parts[place].contiguous().view(torch.uint8).flatten(1) for place in codecs], 1).cpu().numpy()
        blob = np.zeros((len(x), 1 + raw.shape[1]), np.uint8)
        length = np.empty((len(x), 1), np.int32)
        numbers = [codec.numbers(parts[place]).cpu().numpy() for place, codec in codecs.items()]
        for i, row in enumerate(blob):
            coded = b"\1" + encode([(n[i], codec.direct) for n, codec in zip(numbers, codecs.values())])
            if len(coded) > len(row):
                coded = b"\0" + raw[i].tobytes()
            length[i] = len(coded)
            row[: len(coded)] = np.frombuffer(coded, np.uint8)
        to = parts[0].device
        return Coded(inner, (*rest, torch.from_numpy(length).to(to), torch.from_numpy(blob).to(to)), arrived=False)

    @property
    def gamma(self) -> float:
        """The compressor's: nothing is lost in coding."""
        return self.compressor.gamma

    def omega(self, d: int) -> float:
        """The compressor's."""
        return self.compressor.omega(d)

    def delta(self, d: int) -> float:
        """The compressor's."""
        return self.compressor.delta(d)


@dataclass(frozen=True)
class Coded(Payload):
    """The inner payload's other parts, then lengths (m, 1) and bytes (m, capacity) in place of its indices and codes."""

    inner: Payload  # itself at the sender, a pattern at the receiver
    own: tuple[Tensor, ...]
    arrived: bool

    def parts(self) -> tuple[Tensor, ...]:
        return self.own

    @property
    def used(self) -> Tensor:
        return self.own[-2][:, 0].long().cpu()

    def like(self, parts: tuple[Tensor, ...]) -> Coded:
        return Coded(self.inner, parts, arrived=True)

    @cached_property
    def decoded(self) -> Payload:
        """The inner payload, read from the bytes if they arrived from elsewhere."""
        if not self.arrived:
            return self.inner
        codecs, pattern = codecs_of(self.inner), self.inner.parts()
        length, blob = self.own[-2][:, 0].tolist(), self.own[-1].cpu().numpy()
        shapes = {place: (pattern[place].dtype, tuple(pattern[place].shape[1:])) for place in codecs}
        rows: dict[int, list[Tensor]] = {place: [] for place in codecs}
        for size, row in zip(length, blob):
            if row[0]:
                counts = [(codec.count, codec.direct) for codec in codecs.values()]
                for (place, codec), numbers in zip(codecs.items(), decode(row[1:size].tobytes(), counts)):
                    rows[place].append(codec.part(torch.from_numpy(numbers)[None]))
            else:
                start = 1
                for place, (dtype, shape) in shapes.items():
                    stop = start + dtype.itemsize * int(np.prod(shape))
                    rows[place].append(torch.from_numpy(row[start:stop].copy()).view(dtype).view(1, *shape))
                    start = stop
        rest, to = iter(self.own), self.own[-1].device
        return self.inner.like(
            tuple(torch.cat(rows[place]).to(to) if place in codecs else next(rest) for place in range(len(pattern)))
        )

    def dense(self) -> Tensor:
        return self.decoded.dense()

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        self.decoded.add_into(into, block, scale)

    def add_to(self, into: Tensor) -> None:
        self.decoded.add_to(into)


def entropy(payload: Payload) -> float:
    """Bits per message at which an ideal coder that knew the frequencies would stop: the floor of `RangeCoded`.

    Σ over gaps and codes of −log₂ of their frequency within their row, and all other parts as they are; mean over rows.

    >>> entropy(TopK(0.5)(torch.tensor([[4.0, 0.0, 4.0, 0.0, 4.0, 4.0, 0.0, 0.0]])))    # gaps 0, 1, 1, 0 and 4 values
    132.0
    """
    codecs, total = codecs_of(payload), 0.0
    for place, part in enumerate(payload.parts()):
        if place in codecs:
            for row in codecs[place].numbers(part).cpu().numpy():
                share = np.unique(row, return_counts=True)[1] / len(row)
                total -= len(row) * float((share * np.log2(share)).sum())
        else:
            total += 8 * part.numel() * part.element_size()
    return total / len(payload.parts()[0])


# -- which parts are coded, as which numbers --------------------------------------------------------------------------------


class Codec(NamedTuple):
    """A part as whole numbers ≥ 0, (m, count), and back; numbers below `direct` are symbols of their own."""

    numbers: Callable[[Tensor], Tensor]
    part: Callable[[Tensor], Tensor]
    count: int
    direct: int


def codecs_of(payload: Any) -> dict[int, Codec]:
    """The parts of a payload that gain from entropy coding, by their place."""
    if isinstance(payload, Sparse | Packed):
        d, k, dtype = payload.d, payload.values.shape[1], payload.parts()[1].dtype
        if isinstance(payload, Packed):
            numbers, part = lambda p: _gaps(payload.like((payload.values, p)).index), lambda n: pack(_sums(n), d)
        else:
            numbers, part = lambda p: _gaps(p.long()), lambda n: _sums(n).to(dtype)
        return {1: Codec(numbers, part, k, 16)}
    if isinstance(payload, Blocks):
        return codecs_of(payload.inner)
    if isinstance(payload, Composed):
        shift = len(payload.kept.parts()) - 1
        found = {place - 1: codec for place, codec in codecs_of(payload.kept).items()}
        return found | {place + shift: codec for place, codec in codecs_of(payload.values).items()}
    if hasattr(payload, "codes"):  # a quantiser's levels
        d, base = payload.form.d, payload.form.base

        def packed(numbers: Tensor) -> Tensor:
            packer, out = Packer(len(numbers), d, base), torch.empty(len(numbers), octets(base, d), dtype=torch.uint8)
            packer.room(len(numbers), d)[:, :d].copy_(numbers)
            packer.pack(out, 0, d, d)
            return out

        return {0: Codec(lambda p: payload.like((p, *payload.parts()[1:])).codes().long(), packed, d, 512)}
    return {}


def _gaps(index: Tensor) -> Tensor:
    """Ascending (m, k) to (m, k): how many are left out before each."""
    return torch.diff(index, dim=1, prepend=index.new_full((len(index), 1), -1)) - 1


def _sums(gaps: Tensor) -> Tensor:
    return (gaps + 1).cumsum(1) - 1


# -- streams of numbers to bytes and back -----------------------------------------------------------------------------------


def encode(streams: list[tuple[np.ndarray, int]]) -> bytes:
    """Streams of (numbers, direct) to bytes: tables, then the low bits, then the range coder's words.

    >>> numbers = np.array([3, 0, 0, 70_000, 3])
    >>> decode(encode([(numbers, 16)]), [(5, 16)])[0].tolist()
    [3, 0, 0, 70000, 3]
    """
    queue = _library().stream.queue
    encoder, tables, extras = queue.RangeEncoder(), [], []
    for numbers, direct in streams:
        token, width, low = _tokens(numbers.astype(np.int64), direct)
        counts = np.bincount(token) if len(token) else np.zeros(1, np.int64)
        used = np.flatnonzero(counts)
        share = counts[used] / len(token)
        told = np.clip(np.rint(-_STEP * np.log2(share)), 0, 255).astype(np.uint8)
        marks = np.packbits(counts > 0, bitorder="little")
        tables.append(struct.pack("<H", len(marks)) + marks.tobytes() + told.tobytes())
        if len(used) > 1:
            place = np.zeros(len(counts), np.int32)
            place[used] = np.arange(len(used))
            encoder.encode(place[token], _model(told))
        extras.append(_packed(width, low))
    extra = b"".join(extras)
    words = np.asarray(encoder.get_compressed(), "<u4").tobytes()
    return b"".join(tables) + struct.pack("<I", len(extra)) + extra + words


def decode(data: bytes, streams: list[tuple[int, int]]) -> list[np.ndarray]:
    """The inverse, for streams of (count, direct)."""
    tables, start = [], 0
    for _ in streams:
        (size,) = struct.unpack_from("<H", data, start)
        marks = np.unpackbits(np.frombuffer(data, np.uint8, size, start + 2), bitorder="little")
        used = np.flatnonzero(marks)
        tables.append((used, np.frombuffer(data, np.uint8, len(used), start + 2 + size)))
        start += 2 + size + len(used)
    (size,) = struct.unpack_from("<I", data, start)
    extra, words = start + 4, np.frombuffer(data, "<u4", offset=start + 4 + size).astype(np.uint32)
    decoder, found = _library().stream.queue.RangeDecoder(words), []
    for (count, direct), (used, told) in zip(streams, tables):
        if len(used) > 1:
            token = used[np.asarray(decoder.decode(_model(told), count))]
        else:
            token = np.full(count, used[0] if count else 0)
        base, width = _base_and_width(token, direct)
        low, extra = _unpacked(width, data, extra)
        found.append(base + low if len(low) else base)
    return found


def _tokens(numbers: np.ndarray, direct: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The symbol of each number, and how many low bits of it travel as they are, and which."""
    if not len(numbers) or numbers.max() < direct:
        return numbers, numbers[:0], numbers[:0]
    exponent = np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 1
    width = np.where(numbers < direct, 0, exponent - _MANTISSA)
    first = direct.bit_length() - 1
    octave = direct + ((exponent - first) << _MANTISSA) + (numbers >> width) - (1 << _MANTISSA)
    return np.where(numbers < direct, numbers, octave), width, numbers & ((1 << width) - 1)


def _base_and_width(token: np.ndarray, direct: int) -> tuple[np.ndarray, np.ndarray]:
    """The least number of each symbol, and its low bits (none where no symbol has any)."""
    if not len(token) or token.max() < direct:
        return token, token[:0]
    octave, mantissa = np.divmod(np.maximum(token - direct, 0), 1 << _MANTISSA)
    width = np.where(token < direct, 0, octave + direct.bit_length() - 1 - _MANTISSA)
    return np.where(token < direct, token, (mantissa + (1 << _MANTISSA)) << width), width


def _packed(width: np.ndarray, low: np.ndarray) -> bytes:
    """Low bits, gathered by their number, in planes."""
    bits = [(low[width == w][None] >> np.arange(w)[:, None]) & 1 for w in np.unique(width) if w]
    return (
        np.packbits(np.concatenate([b.ravel() for b in bits]).astype(bool), bitorder="little").tobytes()
        if bits
        else b""
    )


def _unpacked(width: np.ndarray, data: bytes, start: int) -> tuple[np.ndarray, int]:
    total = int(width.sum())
    octets = np.frombuffer(data, np.uint8, -(-total // 8), start)
    bits, low, place = np.unpackbits(octets, count=total, bitorder="little"), np.zeros(len(width), np.int64), 0
    for w in np.unique(width):
        if w:
            here = width == w
            plane = bits[place : place + w * here.sum()].reshape(w, -1).astype(np.int64)
            low[here] = (plane << np.arange(w)[:, None]).sum(0)
            place += plane.size
    return low, start + len(octets)


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """Of the 256 probabilities that a table can tell: whole numbers, so that every machine has the same."""
    return np.rint(2.0 ** (30 - np.arange(256) / _STEP))


def _model(told: np.ndarray) -> Any:
    weights = _weights()[told]
    return _library().stream.model.Categorical(weights / weights.sum(), perfect=False)


def _library() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError(
            "RangeCoded needs the entropy coder of the library constriction, which is not installed: pip install constriction"
        ) from error
    return constriction
