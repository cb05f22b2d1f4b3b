"""No compression: the trivial member of the family, δ = 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .payload import Payload


@dataclass(frozen=True)
class Dense(Payload):
    """The rows themselves."""

    x: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def like(self, parts: tuple[Tensor, ...]) -> Dense:
        return Dense(*parts)

    def dense(self) -> Tensor:
        return self.x


@dataclass(frozen=True)
class Identity:
    """C(x) = x.

    >>> import torch
    >>> Identity()(torch.ones(1, 5)).bits
    160
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Dense:
        """The rows, in a private copy."""
        return Dense(x.clone())

    gamma = 1.0

    def delta(self, d: int) -> float:
        """δ = 1."""
        return 1.0
