"""Block top-k: whole blocks of neighbouring coordinates, those of largest 2-norm (Fei et al. 2021, OmniReduce, SIGCOMM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .payload import Payload, Placed, check_ratio, checked_rows, kept, refuse_non_finite
from .sparse import Sparse, check_indices, sparse
from .topk import largest


@dataclass(frozen=True)
class BlockTopK:
    """Cut a row into ⌈d/b⌉ blocks of b coordinates and keep the k_b = max(1, round(ratio · ⌈d/b⌉)) of largest 2-norm.

    A contraction with δ ≥ k_b / ⌈d/b⌉, with equality when all blocks have the same norm; of equal ones the first are kept.
    A message is k_b · b values (the last block padded with zeros) and one index a block, packed where that is smaller.

    Args:
        ratio: the fraction of blocks that is *kept*, in (0, 1].
        block: b, coordinates a block.
        indices: see `TopK`.

    Raises:
        ValueError: a row holds NaN or an infinity; the message names it.

    >>> BlockTopK(0.5, block=2)(torch.tensor([[3.0, 3.0, 4.0, 1.0, 0.0]])).dense()
    tensor([[3., 3., 4., 1., 0.]])
    >>> BlockTopK(0.3, block=2)(torch.tensor([[3.0, 3.0, 4.0, 1.0, 0.0]])).dense()
    tensor([[3., 3., 0., 0., 0.]])
    """

    ratio: float = 0.01
    block: int = 64
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_indices(self.indices)
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(
                f"block={self.block!r} is not a whole number of at least 1: it is how many neighbouring coordinates are kept "
                "together"
            )

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Blocks:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        m, d = x.shape
        b = self.size(d)
        whole = d // b * b
        energy = _energy(x, whole, b)
        refuse_non_finite(energy.isfinite().all(1))
        index, _ = largest(energy, kept(self.ratio, energy.shape[1]))
        place = (index[:, :, None] * b + torch.arange(b, device=x.device)).flatten(1)
        values = x.gather(1, place.clamp(max=d - 1))
        if whole < d:
            values.masked_fill_(place >= d, 0)
        return Blocks(sparse(values.view(m, index.shape[1], b), index, energy.shape[1], self.indices), d, b)

    @property
    def gamma(self) -> float:
        """Start value of γ: twice the ratio. On Gaussian rows, with blocks all alike, a ring of 25 stands 2.8 times."""
        return min(1.0, 2 * self.ratio)

    def size(self, d: int) -> int:
        """Coordinates a block, of a row of d: no more than that."""
        return max(1, min(self.block, d))

    def kept(self, d: int) -> int:
        """How many values of a row of d travel."""
        return kept(self.ratio, -(-d // self.size(d))) * self.size(d)

    def delta(self, d: int) -> float:
        """δ = k_b / ⌈d/b⌉."""
        blocks = -(-d // self.block)
        return kept(self.ratio, blocks) / blocks


def _energy(x: Tensor, whole: int, b: int) -> Tensor:
    """(m, blocks): the squared 2-norm of each block, of rows scaled if their squares would leave the range."""
    kind = torch.float32 if x.element_size() < 4 else x.dtype

    def sums(x: Tensor) -> Tensor:
        parts = [x[:, :whole].unflatten(1, (-1, b)), x[:, None, whole:]]
        norms = [torch.linalg.vector_norm(p, dim=2, dtype=kind) for p in parts if p.shape[1] * p.shape[2]]
        return torch.cat(norms, 1).square_()

    energy = sums(x)
    top = energy.amax(1)
    if bool(((top < torch.finfo(kind).tiny * 2**60) | ~top.isfinite()).any()):
        peak = x.abs().amax(1, keepdim=True).to(kind)
        energy = sums(x / peak.masked_fill(peak == 0, 1))
    return energy


@dataclass(frozen=True)
class Blocks(Placed, Payload):
    """The values of some blocks: `inner.values` (m, k_b, b) at the blocks `inner.index`."""

    inner: Payload
    d: int
    b: int

    @property
    def values(self) -> Tensor:
        """(m, k_b · b)."""
        return self.parts()[0]

    def parts(self) -> tuple[Tensor, ...]:
        values, index = self.inner.parts()
        return values.flatten(1), index

    def like(self, parts: tuple[Tensor, ...]) -> Blocks:
        values = parts[0].unflatten(1, (-1, self.b))
        return Blocks(self.inner.like((values, *parts[1:])), self.d, self.b)

    def placed(self) -> Sparse:
        """Each value with its own index; those of padding, of which a quantiser may have made something, are zero."""
        inner = self.inner.placed() if not isinstance(self.inner, Sparse) else self.inner  # type: ignore[attr-defined]
        place = inner.index.long()[:, :, None] * self.b + torch.arange(self.b, device=inner.index.device)
        place = place.flatten(1)
        values = self.values.masked_fill(place >= self.d, 0) if self.d % self.b else self.values
        return Sparse(values, place.clamp_(max=self.d - 1), self.d)

    def dense(self) -> Tensor:
        zeros = self.values.new_zeros(len(self.values), self.d)
        self.add_to(zeros)
        return zeros
