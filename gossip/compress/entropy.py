"""Entropy coding: index gaps and quantiser levels in about their entropy (Bamler 2022, constriction, arXiv 2201.01741)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

_MANTISSA = 2  # bits after the leading one that are modelled; the bits below them travel as they are
_STEP = 16  # probabilities are told in steps of 2^(1/16) at the finest
_WORD = 4  # bytes of a word of the range coder


@dataclass(frozen=True)
class RangeCoded:
    """The same payload with its indices and codes entropy-coded by the table of their own frequencies, without loss.

    Indices are coded as gaps, small ones each for itself, large ones by exponent and two bits of mantissa, the rest as it
    is. The table travels too, through the same coder: of n numbers among K symbols each probability in steps of about
    √(25 K/n) octaves, as its difference from the one before, some 4 bits a symbol for gaps and 15 for few levels. The
    message has the length that the data make of it, at most that of the fixed form, which it falls back to where it would
    gain nothing, as with a hundred indices; two bytes tell its length, four from 2¹⁵ bytes on. That is within 5 % of
    `entropy` from some 2,000 bits and 20 numbers for each different gap or level on; K frequencies that nobody knows
    beforehand cost any code about K/2 · log₂ n bits (Rissanen 1984). The coder is constriction's (arXiv 2201.01741).

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
        blob = np.zeros_like(raw)
        length = np.empty((len(x), 1), np.int16 if raw.shape[1] < 1 << 15 else np.int32)
        numbers = [codec.numbers(parts[place]).cpu().numpy() for place, codec in codecs.items()]
        for i, row in enumerate(blob):
            coded = encode([(n[i], codec.direct) for n, codec in zip(numbers, codecs.values())])
            if len(coded) >= len(row):  # the fixed form, which is told from the other by its length
                coded = raw[i].tobytes()
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
            if size < len(row):
                counts = [(codec.count, codec.direct) for codec in codecs.values()]
                for (place, codec), numbers in zip(codecs.items(), decode(row[:size].tobytes(), counts)):
                    rows[place].append(codec.part(torch.from_numpy(numbers)[None]))
            else:
                start = 0
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
    """Streams of (numbers, direct) to bytes by one range coder: of each the table, the symbols, then the low bits.

    >>> numbers = np.array([3, 0, 0, 70_000, 3])
    >>> coded = encode([(numbers, 16)])
    >>> decode(coded, [(5, 16)])[0].tolist(), len(coded)
    ([3, 0, 0, 70000, 3], 16)
    """
    library = _library()
    encoder, uniform = library.stream.queue.RangeEncoder(), library.stream.model.Uniform
    for numbers, direct in streams:
        if not len(numbers):
            continue
        token, width, low = _tokens(numbers.astype(np.int64), direct)
        first = token.min()
        token -= first
        counts = np.bincount(token)
        step, unused = _resolution(len(token), len(counts))
        told = np.rint(step * np.log2(len(token) / np.maximum(counts, 1))).clip(0, 30 * step)
        told = np.where(counts > 0, told, unused).astype(np.int64)
        change = np.diff(told, prepend=unused)
        table = np.concatenate([[first, len(told)], np.where(change > 0, 2 * change - 1, -2 * change)])
        encoder.encode(table.astype(np.int32), _model(_falling()))
        used = np.flatnonzero(counts)
        if len(used) > 1:
            place = np.cumsum(counts > 0, dtype=np.int32) - 1
            encoder.encode(place[token], _model(_weights()[told[used] * (_STEP // step)]))
        for here, shift, bits in _pieces(width):
            encoder.encode((low[here] >> shift & (1 << bits) - 1).astype(np.int32), uniform(1 << bits))
    return _sealed(encoder)


def decode(data: bytes, streams: list[tuple[int, int]]) -> list[np.ndarray]:
    """The inverse, for streams of (count, direct)."""
    library, found = _library(), []
    decoder, uniform = library.stream.queue.RangeDecoder(_words(data)), library.stream.model.Uniform
    for count, direct in streams:
        if not count:
            found.append(np.zeros(0, np.int64))
            continue
        first, size = decoder.decode(_model(_falling()), 2).tolist()
        step, unused = _resolution(count, size)
        table = decoder.decode(_model(_falling()), size).astype(np.int64)
        told = unused + np.where(table & 1, table + 1 >> 1, -(table >> 1)).cumsum()
        used = np.flatnonzero(told < unused)
        if len(used) > 1:
            token = (first + used)[decoder.decode(_model(_weights()[told[used] * (_STEP // step)]), count)]
        else:
            token = np.full(count, first)
        base, width = _base_and_width(token, direct)
        for here, shift, bits in _pieces(width):
            base[here] += decoder.decode(uniform(1 << bits), int(here.sum())).astype(np.int64) << shift
        found.append(base)
    return found


def _resolution(count: int, size: int) -> tuple[int, int]:
    """Steps per octave for the probabilities of `size` symbols, and the step of a symbol not used: beyond all others.

    A step of δ octaves costs about 0.029 δ² bits a number and −log₂ δ bits a symbol: least at δ² ≈ 25 size/count.
    """
    step = 1 << min(max((count // size).bit_length() - 4, 0) // 2, 4)
    return step, step * count.bit_length() + 1


def _sealed(encoder: Any) -> bytes:
    """The code in the fewest bytes: of the numbers in the coder's last interval one that ends in ones, and without them.

    The decoder reads ones beyond the end: those that are missing, 4 to 7 bytes.
    """
    words, (count, (lower, width)) = encoder.get_compressed(), encoder.pos()
    if lower + (1 << 32) > 1 << 64:  # the words have the carry already
        lower -= 1 << 64
    ones = width.bit_length() - 1
    last = (lower + width >> ones << ones) - 1
    whole = int.from_bytes(words[:count].astype(">u4").tobytes()) << 64
    return (whole + last).to_bytes(_WORD * (count + 2))[: _WORD * (count + 2) - ones // 8]


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data + b"\xff" * (_WORD + -len(data) % _WORD), ">u4").astype(np.uint32)


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


def _pieces(width: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """Low bits as the coder takes them: which numbers have them, the shift, and how many, at most 16."""
    for w in np.unique(width).tolist():
        for shift in range(0, w, 16):
            yield width == w, shift, min(16, w - shift)


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """Of the probabilities that a table can tell: whole numbers, so that every machine has the same."""
    return np.rint(2.0 ** (30 - np.arange(30 * _STEP + 1) / _STEP))


@lru_cache(maxsize=1)
def _falling() -> np.ndarray:
    """Of the numbers in a table, ∝ 1/((z + 1)(z + 2)): whole numbers too."""
    z = np.arange(2048)
    return ((1 << 40) // ((z + 1) * (z + 2))).astype(np.float64)


def _model(weights: np.ndarray) -> Any:
    return _library().stream.model.Categorical(weights / weights.sum(), perfect=False)


def _library() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError(
            "RangeCoded needs the entropy coder of the library constriction, which is not installed: pip install constriction"
        ) from error
    return constriction
