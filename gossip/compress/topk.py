"""Top-k: the k coordinates of largest magnitude, exactly (Stich et al. 2018, arXiv 1809.07599)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .payload import check_ratio, kept
from .sparse import Sparse, index_dtype

_LONG = 1 << 17  # rows from this length on are searched by a sampled threshold, in blocks that stay in the cache
_SAMPLE = 1 << 15  # at most _LONG


@dataclass(frozen=True)
class TopK:
    """Keep the k = max(1, round(ratio · d)) coordinates of largest |x|, unscaled; ties go to the lowest index.

    A contraction with δ ≥ k/d, with equality when all magnitudes are equal. A message is k values and k indices (int32).

    Args:
        ratio: the fraction of coordinates that is *kept*, in (0, 1].

    >>> TopK(0.5)(torch.tensor([[-9.0, 1.0, 2.0, -7.0]])).dense()
    tensor([[-9.,  0.,  0., -7.]])
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Sparse:
        """Compress each row of (m, d)."""
        d = x.shape[1]
        k = kept(self.ratio, d)
        if d >= _LONG and 8 * k <= d and x.device.type == "cpu":
            index = torch.stack([_of_long(row, k) for row in x])
        else:
            index = _largest(x.abs(), k)
        return Sparse(x.gather(1, index), index.to(index_dtype(d)), d)

    @property
    def gamma(self) -> float:
        """Start value of γ: 4 k/d, at most 1. On Gaussian rows a ring of 25 stands up to 5 k/d."""
        return min(1.0, 4 * self.ratio)

    def delta(self, d: int) -> float:
        """δ = k/d."""
        return kept(self.ratio, d) / d


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """(m, d) to (m, k): the indices of the k largest of each row, ascending; of equal ones the first."""
    threshold = magnitude.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    keep = magnitude >= threshold
    surplus = keep.sum(1, keepdim=True) - k
    if surplus.any():  # ties at the threshold: drop the ones of highest index
        if (surplus < 0).any():  # NaN compares with nothing: let a diverged row pass it on
            return _largest(magnitude.nan_to_num(nan=torch.inf, posinf=torch.inf), k)
        tied = magnitude == threshold
        keep &= ~tied | (tied.cumsum(1) <= tied.sum(1, keepdim=True) - surplus)
    return keep.nonzero()[:, 1].view(len(magnitude), k)


def _of_long(x: Tensor, k: int) -> Tensor:
    """The same for one long row of values: a threshold from a sample, one pass for candidates, an exact choice among them.

    The sample can only mislead the speed: with too few candidates the whole row is searched.
    """
    stride = len(x) // _SAMPLE
    place = torch.arange(_SAMPLE)
    sample = x[place * stride + place * 40503 % stride].abs()  # jittered: no period of x can hide from it
    share = len(sample) * k / len(x)
    rank = min(len(sample), int(1.15 * share + 4 * share**0.5 + 8))  # so that hardly ever fewer than k lie above
    threshold = sample.topk(rank, sorted=False).values.amin()
    index = _where(x, torch.le, threshold, holds=False)  # so NaN is among them
    if len(index) >= k:
        return index[_largest(x[index].abs()[None], k)[0]]
    tied = _where(x, torch.eq, threshold, k - len(index))  # a plateau, for example of zeros: its first ones
    if len(index) + len(tied) < k:
        return _largest(x.abs()[None], k)[0]
    return torch.cat((index, tied)).sort().values


def _where(
    x: Tensor, compare: Callable[..., Tensor], threshold: Tensor, enough: int | None = None, holds: bool = True
) -> Tensor:
    """Ascending indices at which `compare(|x|, threshold)` holds or not, the first `enough`; block by block, without a copy."""
    found, count = [], 0
    scratch, mask = x.new_empty(_LONG), torch.empty(_LONG, dtype=torch.bool)
    for start in range(0, len(x), _LONG):
        block = x[start : start + _LONG]
        there = compare(torch.abs(block, out=scratch[: len(block)]), threshold, out=mask[: len(block)])
        found.append(
            torch.from_numpy(np.flatnonzero(there.numpy() == holds)).add_(start)
        )  # far faster than torch.nonzero
        count += len(found[-1])
        if enough is not None and count >= enough:
            break
    return torch.cat(found)[:enough]
