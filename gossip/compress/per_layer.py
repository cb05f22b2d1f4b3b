"""Per layer: a compressor applied to each parameter of a model by itself, with exceptions for small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from .. import rng
from ..layout import Layout
from ..plan import Block
from .identity import Identity
from .payload import Payload, compress, memory_of
from .topk import TopK


@dataclass(frozen=True)
class PerLayer:
    """C(x) = (C(x₁), …, C(x_L)), x_l the parameters of layer l; the small ones go by `small`.

    Over the whole model top-k may leave a layer without any coordinate; per layer each has its share. δ is the least and ω
    the largest of the layers' own. A compressor that has a `shape`, such as `LowRank`, is given each parameter as a matrix
    (first axis × all others), and vectors are small.

    Args:
        compressor: for the layers.
        small: for parameters of fewer than `below` numbers.
        below: from which size on a parameter is not small.
        layout: a `gossip.Layout` or the parameters' shapes; if None, the trainer and `wrap` fill in the model's, and without
            them the row is one layer.

    >>> import torch
    >>> q = PerLayer(TopK(0.25), below=3, layout=[(2, 2), (2,), (2, 2)])(torch.arange(1.0, 11)[None])
    >>> q.dense()
    tensor([[ 0.,  0.,  0.,  4.,  5.,  6.,  0.,  0.,  0., 10.]])
    """

    compressor: Any = TopK()
    small: Any = Identity()
    below: int = 0
    layout: Layout | Sequence[Sequence[int]] | None = None

    def bind(self, layout: Layout) -> PerLayer:
        """The same for the parameters of a model, unless it has a layout of its own."""
        return self if self.layout is not None else replace(self, layout=layout)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """Of the parameters."""
        shapes = self.layout.shapes if isinstance(self.layout, Layout) else self.layout
        return None if shapes is None else tuple(tuple(s) for s in shapes)

    def layers(self, d: int) -> list[tuple[Any, int]]:
        """The compressor and the size of each parameter, in the order of the row."""
        shapes = self.shapes or ((d,),)
        if sum(map(math.prod, shapes)) != d:
            raise ValueError(
                f"a row of {d} numbers does not fit the layout of {sum(map(math.prod, shapes))} numbers in {len(shapes)} "
                "parameters: give PerLayer the layout of this model, gossip.Layout.of(model)"
            )
        matrices = "shape" in {f.name for f in fields(self.compressor)}
        found = []
        for shape in shapes:
            size = math.prod(shape)
            if not size or size < self.below or matrices and self.shapes and len(shape) < 2:
                found.append((self.small, size))
            elif matrices and len(shape) >= 2:
                found.append((replace(self.compressor, shape=(shape[0], size // shape[0])), size))
            else:
                found.append((self.compressor, size))
        return found

    def memory(self, x: Tensor) -> Any:
        """That of each layer; None if no layer has any."""
        layers = self.layers(x.shape[1])
        kept = tuple(memory_of(c, piece) for (c, _), piece in zip(layers, x.split([s for _, s in layers], 1)))
        return None if all(one is None for one in kept) else kept

    def __call__(self, x: Tensor, key: Tensor | None = None, memory: Any = None) -> Layers:
        """Compress each row of (m, d); `key` (m,) if the compressor draws."""
        layers = self.layers(x.shape[1])
        sizes = tuple(size for _, size in layers)
        payloads = []
        for number, ((compressor, _), piece) in enumerate(zip(layers, x.split(sizes, 1))):
            own = None if key is None else rng.key(number, "layer", key)
            payloads.append(compress(compressor, piece, own, memory and memory[number]))
        return Layers(tuple(payloads), sizes)

    @property
    def gamma(self) -> float:
        """Start value of γ: the compressor's."""
        return min(self.compressor.gamma, self.small.gamma)

    def omega(self, d: int) -> float:
        """The largest ω, if all are unbiased."""
        return max(c.omega(size) for c, size in self.layers(d))

    def delta(self, d: int) -> float:
        """The least δ."""
        return min(c.delta(size) for c, size in self.layers(d))


@dataclass(frozen=True)
class Layers(Payload):
    """A payload for each layer, one behind the other; last, without gaps, the bytes of those whose length varies."""

    layers: tuple[Payload, ...]
    sizes: tuple[int, ...]

    @cached_property
    def varied(self) -> tuple[Tensor | None, ...]:
        """The bytes of each layer's last part that are in use, None where all are."""
        return tuple(layer.used for layer in self.layers)

    def parts(self) -> tuple[Tensor, ...]:
        fixed, tails = [], []
        for layer, used in zip(self.layers, self.varied):
            *own, last = layer.parts()
            fixed += own if used is not None else [*own, last]
            tails += [(last, used.tolist())] if used is not None else []
        if not tails:
            return tuple(fixed)
        whole = torch.cat([last for last, _ in tails], 1).zero_()
        for i, row in enumerate(whole):
            told = torch.cat([last[i, : sizes[i]] for last, sizes in tails])
            row[: len(told)] = told
        return *fixed, whole

    @property
    def used(self) -> Tensor | None:
        varied = [used for used in self.varied if used is not None]
        return torch.stack(varied).sum(0) if varied else None

    def like(self, parts: tuple[Tensor, ...]) -> Layers:
        made, start, at = [], 0, [0] * len(parts[-1])
        for layer, used in zip(self.layers, self.varied):
            pattern = layer.parts()
            own = parts[start : (start := start + len(pattern) - (used is not None))]
            if used is not None:
                own = *own, parts[-1].new_zeros(len(at), pattern[-1].shape[1])
                for i, size in enumerate(cast("Tensor", layer.like(own).used).tolist()):
                    own[-1][i, :size] = parts[-1][i, at[i] : at[i] + size]
                    at[i] += size
            made.append(layer.like(own))
        return Layers(tuple(made), self.sizes)

    def dense(self) -> Tensor:
        first = self.layers[0].dense()
        whole = first.new_empty((len(first), sum(self.sizes)))
        for layer, piece in zip(self.layers, whole.split(self.sizes, 1)):
            piece.copy_(layer.dense())
        return whole

    def add_into(self, into: Tensor, block: Block, scale: float = 1.0) -> None:
        for layer, piece in zip(self.layers, into.split(self.sizes, 1)):
            layer.add_into(piece, block, scale)

    def add_to(self, into: Tensor) -> None:
        for layer, piece in zip(self.layers, into.split(self.sizes, 1)):
            layer.add_to(piece)
