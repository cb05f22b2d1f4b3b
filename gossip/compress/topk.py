"""Top-k: the k coordinates of largest magnitude, exactly (Stich et al. 2018, arXiv 1809.07599)."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .payload import Payload, check_ratio, checked_rows, kept, refuse_non_finite
from .sparse import check_indices, sparse

_LONG = 1 << 14  # rows from this length on are searched by a sampled threshold
_BLOCK = 1 << 16  # numbers that stay in the cache
_SAMPLE = 1 << 15


@dataclass(frozen=True)
class TopK:
    """Keep the k = max(1, round(ratio · d)) coordinates of largest |x|, unscaled; ties go to the lowest index.

    A contraction with δ ≥ k/d, with equality when all magnitudes are equal. A message is k values and k indices, of 32 bits
    or packed into 2 + log₂(d/k), whichever is less.

    Args:
        ratio: the fraction of coordinates that is *kept*, in (0, 1].
        indices: "packed", "plain" (int32, int64 above 2³¹), or "auto", the smaller of both.

    Raises:
        ValueError: a row holds NaN or an infinity; the message names it.

    >>> q = TopK(0.5)(torch.tensor([[-9.0, 1.0, 2.0, -7.0]]))
    >>> q.dense(), q.bits, TopK(0.5, indices="plain")(q.dense()).bits
    (tensor([[-9.,  0.,  0., -7.]]), 72, 128)
    """

    ratio: float = 0.01
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_indices(self.indices)

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Payload:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        d = x.shape[1]
        index = largest(x, self.kept(d))
        values = x.gather(1, index)
        refuse_non_finite(values.isfinite().all(1))
        return sparse(values, index, d, self.indices)

    @property
    def gamma(self) -> float:
        """Start value of γ: 4 k/d, at most 1. On Gaussian rows a ring of 25 stands up to 5 k/d."""
        return min(1.0, 4 * self.ratio)

    def kept(self, d: int) -> int:
        """How many values of a row of d travel."""
        return kept(self.ratio, d)

    def delta(self, d: int) -> float:
        """δ = k/d."""
        return self.kept(d) / d


def largest(x: Tensor, k: int) -> Tensor:
    """(m, d) to (m, k) int64: where the k largest magnitudes of each row are, ascending; of equal ones the first."""
    d = x.shape[1]
    if k == d:
        return torch.arange(d, device=x.device).expand(len(x), d)
    if d < _LONG or x.device.type != "cpu":
        return _of_rows(x.abs(), k)
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()  # exact, and numpy has no bfloat16
    index = np.empty((len(x), k), np.int64)
    for row, place in zip(x.detach().numpy(), index):
        place[:] = _of_long(np.ascontiguousarray(row), k)
    return torch.from_numpy(index)


def _of_rows(magnitude: Tensor, k: int) -> Tensor:
    """For all rows at once; NaN counts as the largest."""
    threshold = magnitude.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    keep = magnitude >= threshold
    surplus = keep.sum(1, keepdim=True) - k
    if surplus.any():  # ties at the threshold: drop the ones of highest index
        if (surplus < 0).any():  # NaN compares with nothing
            return _of_rows(magnitude.nan_to_num(nan=torch.inf, posinf=torch.inf), k)
        tied = magnitude == threshold
        keep &= ~tied | (tied.cumsum(1) <= tied.sum(1, keepdim=True) - surplus)
    return keep.nonzero()[:, 1].view(len(magnitude), k)


def _of_long(x: np.ndarray, k: int) -> np.ndarray:
    """For one long row: a threshold from a sample, one pass for candidates above it, an exact choice among them.

    The sample can only mislead the speed: with too few candidates the whole row is searched.
    """
    sample = np.abs(x[_sampled(len(x))])
    share = len(sample) * k / len(x)
    rank = min(len(sample), int(1.15 * share + 4 * share**0.5 + 8))  # so that hardly ever fewer than k lie above
    threshold = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    index = _where(x, np.less_equal, threshold, holds=False)  # so NaN is among them
    if len(index) >= k:
        return index[_of_few(np.abs(x[index]), k)]
    tied = _where(x, np.equal, threshold, k - len(index))  # a plateau, for example of zeros: its first ones
    if len(index) + len(tied) < k:
        return _of_few(np.abs(x), k)
    return np.sort(np.concatenate((index, tied)))


def _of_few(magnitude: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest, ascending; of equal ones the first."""
    if len(magnitude) == k:
        return np.arange(k)
    magnitude = np.nan_to_num(magnitude, copy=False, nan=np.inf)
    threshold = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    keep = magnitude > threshold
    keep[np.flatnonzero(magnitude == threshold)[: k - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)


@lru_cache(maxsize=8)
def _sampled(d: int) -> np.ndarray:
    """Where a row of d numbers is sampled: evenly, but jittered, so that no period of x can hide from it."""
    size = min(_SAMPLE, d // 4)
    stride, place = d // size, np.arange(size)
    return place * stride + place * 40503 % stride


def _where(
    x: np.ndarray, compare: np.ufunc, threshold: float, enough: int | None = None, holds: bool = True
) -> np.ndarray:
    """Ascending indices at which `compare(|x|, threshold)` holds or not, the first `enough`; block by block, without a copy."""
    found, count = [], 0
    scratch, mask = np.empty(_BLOCK, x.dtype), np.empty(_BLOCK, bool)
    for start in range(0, len(x), _BLOCK):
        block = x[start : start + _BLOCK]
        there = compare(np.abs(block, out=scratch[: len(block)]), threshold, out=mask[: len(block)])
        found.append(np.flatnonzero(there if holds else np.logical_not(there, out=there)))
        found[-1] += start
        count += len(found[-1])
        if enough is not None and count >= enough:
            break
    return np.concatenate(found)[:enough]
