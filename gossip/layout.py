"""The flat layout: a model's parameters as one row, and the row as a model's parameters, without a copy."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat row of d numbers.

    Tied parameters occur once, frozen ones of a module (`requires_grad=False`) not at all. All must share one dtype and one
    device. A parameter that is stored in another order (channels_last) keeps its order in the row.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.names, layout.d
    (('weight', 'bias'), 8)
    >>> {k: tuple(v.shape) for k, v in layout.views(torch.zeros(5, 8)).items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module | Iterable[tuple[str, Tensor]]) -> "Layout":
        """The layout of a module's parameters, or of (name, tensor) pairs, in their order."""
        named = _named(model)
        if lazy := [name for name, p in named if nn.parameter.is_lazy(p)]:
            raise ValueError(f"parameter {lazy[0]!r} has no shape yet: call the lazy model on one batch first")
        if not named:
            raise ValueError(
                "the model has no parameters to train: a layout needs at least one; pass a module or an optimizer that has some"
            )
        kinds = {(p.dtype, p.device): name for name, p in named}
        if len(kinds) > 1:
            found = ", ".join(f"{name!r} is {dtype} on {device}" for (dtype, device), name in kinds.items())
            raise ValueError(
                f"parameters of several kinds ({found}): a row holds one dtype on one device; "
                "convert the model with .to(dtype=…, device=…) first"
            )
        (dtype, device), _ = next(iter(kinds.items()))
        names, tensors = zip(*named)
        return cls(names, tuple(p.shape for p in tensors), tuple(_strides(p) for p in tensors), dtype, device)

    @property
    def d(self) -> int:
        """The length of a row."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers per parameter."""
        return tuple(math.prod(s) for s in self.shapes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat (…, d) tensor, named and shaped (…, *shape) like the parameters; nothing is copied."""
        if flat.shape[-1] != self.d:
            raise ValueError(f"a row of {flat.shape[-1]} numbers does not fit this layout of {self.d}")
        return dict(zip(self.names, self._pieces(flat)))

    def flatten(self, model: nn.Module | Iterable[tuple[str, Tensor]], out: Tensor | None = None) -> Tensor:
        """The parameters as one (d,) row, written into `out` if that is given."""
        tensors = [p for _, p in _named(model)]
        out = torch.empty(self.d, dtype=self.dtype, device=self.device) if out is None else out
        with torch.no_grad():
            torch._foreach_copy_(list(self._pieces(out)), tensors)
        return out

    def _pieces(self, flat: Tensor) -> Iterator[Tensor]:
        for piece, shape, stride in zip(flat.split(self.sizes, dim=-1), self.shapes, self.strides):
            yield piece.as_strided((*flat.shape[:-1], *shape), (*flat.stride()[:-1], *stride))


def _named(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return (
        [(k, p) for k, p in model.named_parameters() if p.requires_grad]
        if isinstance(model, nn.Module)
        else list(model)
    )


def _strides(p: Tensor) -> tuple[int, ...]:
    """Its own if it fills its storage without gaps, else those of a contiguous tensor."""
    packed = torch.empty_like(p, device="meta")  # keeps the order of dimensions of a dense tensor
    return packed.stride() if packed.stride() == p.stride() else torch.empty(p.shape, device="meta").stride()
