"""Top-k: the k coordinates of largest magnitude, exactly (Stich et al. 2018, arXiv 1809.07599)."""

import math
from dataclasses import dataclass

from torch import Tensor

from .payload import check_ratio, kept
from .sparse import Sparse, index_dtype


@dataclass(frozen=True)
class TopK:
    """Keep the k = max(1, round(ratio · d)) coordinates of largest |x|, unscaled; ties go to the lowest index.

    A contraction with δ ≥ k/d, with equality when all magnitudes are equal. A message is k values and k indices (int32).

    Args:
        ratio: the fraction of coordinates that is *kept*, in (0, 1].

    >>> import torch
    >>> TopK(0.5)(torch.tensor([[-9.0, 1.0, 2.0, -7.0]])).dense()
    tensor([[-9.,  0.,  0., -7.]])
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Sparse:
        """Compress each row of (m, d)."""
        d = x.shape[1]
        index = _largest(x.abs(), kept(self.ratio, d))
        return Sparse(x.gather(1, index), index.to(index_dtype(d)), d)

    def delta(self, d: int) -> float:
        """δ = k/d."""
        return kept(self.ratio, d) / d


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """The k places of largest magnitude in each row, ascending."""
    threshold = magnitude.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    keep = magnitude >= threshold
    surplus = keep.sum(1, keepdim=True) - k
    if surplus.any():  # ties at the threshold: drop the ones of highest index
        if (surplus < 0).any():  # NaN compares with nothing: let a diverged row pass it on
            return _largest(magnitude.nan_to_num(nan=math.inf, posinf=math.inf), k)
        tied = magnitude == threshold
        keep &= ~tied | (tied.cumsum(1) <= tied.sum(1, keepdim=True) - surplus)
    return keep.nonzero()[:, 1].view(-1, k)
