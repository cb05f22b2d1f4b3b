"""Composition: a sparsifier, then a quantiser on the values that it kept (Basu et al. 2019, arXiv 1906.02367)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import rng
from .payload import Payload, Placed, compress, memory_of
from .sign import Sign
from .topk import TopK


@dataclass(frozen=True)
class Compose:
    """C(x) = S(x) with its k values v replaced by Q(v).

    What S drops is orthogonal to what it keeps, so with contractions δ = δ_S(d) · δ_Q(k); an unbiased Q with ω < 1 counts
    as δ_Q = 1 − ω. If both are unbiased, so is C, with 1 + ω = (1 + ω_S(d)) (1 + ω_Q(k)). A message is Q's for rows of k
    numbers, and S's indices.

    Args:
        sparsifier: one that sends some values as they are: TopK, RandK, BlockTopK.
        quantiser: any compressor, for rows of k numbers.

    >>> import torch
    >>> q = Compose(TopK(0.5), Sign())(torch.tensor([[-9.0, 1.0, 2.0, -7.0]]))
    >>> q.dense(), q.bits                    # a byte of signs, a scale, a byte of indices
    (tensor([[-8.,  0.,  0., -8.]]), 48)
    """

    sparsifier: Any = TopK()
    quantiser: Any = Sign()

    def __post_init__(self) -> None:
        if not hasattr(self.sparsifier, "kept"):
            raise ValueError(
                f"{type(self.sparsifier).__name__} sends no fixed number of plain values, so nothing can be composed with it: "
                "take TopK, RandK or BlockTopK for the sparsifier"
            )

    def memory(self, x: Tensor) -> Any:
        """That of the quantiser, if it has one."""
        return memory_of(self.quantiser, x.new_zeros(len(x), self.sparsifier.kept(x.shape[1])))

    def __call__(self, x: Tensor, key: Tensor | None = None, memory: Any = None) -> Composed:
        """Compress each row of (m, d); `key` (m,) if one of both draws."""
        kept = self.sparsifier(x, key)
        values = compress(self.quantiser, kept.values, None if key is None else rng.key(0, "compose", key), memory)
        return Composed(values, kept)

    @property
    def gamma(self) -> float:
        """Start value of γ: the product of both."""
        return self.sparsifier.gamma * self.quantiser.gamma

    def omega(self, d: int) -> float:
        """ω, if both are unbiased."""
        return (1 + self.sparsifier.omega(d)) * (1 + self.quantiser.omega(self.sparsifier.kept(d))) - 1

    def delta(self, d: int) -> float:
        """δ = δ_S(d) · δ_Q(k), and 1 − ω if the sparsifier scales what it keeps; may be negative with an unbiased one."""
        if getattr(self.sparsifier, "unbiased", False):
            return 1 - self.omega(d)
        return self.sparsifier.delta(d) * self.quantiser.delta(self.sparsifier.kept(d))


@dataclass(frozen=True)
class Composed(Placed, Payload):
    """The quantiser's payload, of the values, and the sparsifier's, of which the other parts travel."""

    values: Payload
    kept: Payload

    def parts(self) -> tuple[Tensor, ...]:
        return *self.kept.parts()[1:], *self.values.parts()

    @property
    def used(self) -> Tensor | None:
        return self.values.used

    def like(self, parts: tuple[Tensor, ...]) -> Composed:
        own = len(self.kept.parts()) - 1
        first = self.kept.parts()[0]
        return Composed(
            self.values.like(parts[own:]),
            self.kept.like((first.new_empty((len(parts[-1]), *first.shape[1:])), *parts[:own])),
        )

    def placed(self) -> Payload:
        """The sparsifier's payload with the values that the receiver reads."""
        values, own = self.values.dense(), self.kept.parts()
        return self.kept.like((values.view(len(values), *own[0].shape[1:]), *own[1:]))
