"""Top-k: the k coordinates of largest magnitude, exactly (Stich et al. 2018, arXiv 1809.07599)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .payload import Payload, check_ratio, checked_rows, kept, refuse_in
from .sparse import check_indices, sparse

_LONG = 1 << 14  # rows from this length on are searched by a sampled threshold
_BLOCK = 1 << 17  # numbers that stay in the cache
_SAMPLE = 1 << 15
_UNSIGNED = {4: np.uint32(2**31 - 1), 8: np.uint64(2**63 - 1)}


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
        index, values = largest(x, self.kept(d))
        refuse_in(values)
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


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(m, d) to (m, k) int64: where the k largest magnitudes of each row are, ascending, of equal ones the first; and x there."""
    d = x.shape[1]
    if k < d and _is_long(x):
        index = np.empty((len(x), k), np.int64)
        bits = _bits(x)
        there = np.empty((len(x), k), bits.dtype)
        for i, row in enumerate(bits):
            index[i], there[i] = _of_long(row, k)
        return torch.from_numpy(index), _numbers(there, x.dtype)
    found = torch.arange(d, device=x.device).expand(len(x), d) if k == d else _of_rows(x.abs(), k)
    return found, x.gather(1, found)


def above(x: Tensor, floor: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One row (1, d): (c,) indices at which |x| ≥ floor and x ≠ 0, ascending, the k largest if there are more; and x there."""
    if _is_long(x):
        (bits,) = _bits(x)
        index, there = _where(bits, np.greater_equal, max(_bits(floor)[()], bits.dtype.type(1)))
        if len(index) > k:
            keep = _of_few(_magnitude(there), k)
            index, there = index[keep], there[keep]
        return torch.from_numpy(index), _numbers(there, x.dtype)
    magnitude = x[0].abs()
    index = ((magnitude >= floor) & (magnitude > 0)).nonzero()[:, 0]
    index = index if len(index) <= k else largest(x, k)[0][0]
    return index, x[0][index]


def _is_long(x: Tensor) -> bool:
    return x.shape[1] >= _LONG and x.device.type == "cpu"


def _bits(x: Tensor) -> np.ndarray:
    """Without their sign, the bits of floating-point numbers are whole numbers in the order of the magnitudes, NaN above all."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()  # numpy has no bfloat16
    return exact.detach().contiguous().numpy().view(f"u{exact.itemsize}")


def _numbers(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The inverse, in rows' own dtype."""
    return torch.from_numpy(bits).view(torch.float64 if bits.itemsize == 8 else torch.float32).to(dtype)


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


def _of_long(bits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """For one long row: a threshold from a sample, one pass for candidates above it, an exact choice among them.

    The sample can only mislead the speed: with too few candidates the whole row is searched.
    """
    sample = _magnitude(bits[_sampled(len(bits))])
    share = len(sample) * k / len(bits)
    rank = min(len(sample), int(1.15 * share + 4 * share**0.5 + 8))  # so that hardly ever fewer than k lie above
    sample = sample[sample > 0]  # many equal numbers are what partition is slow at
    threshold = (
        np.partition(sample, len(sample) - rank)[len(sample) - rank] if rank <= len(sample) else bits.dtype.type(0)
    )
    index, there = _where(bits, np.greater, threshold)
    if len(index) >= k:
        keep = _of_few(_magnitude(there), k)
        return index[keep], there[keep]
    tied, _ = _where(bits, np.equal, threshold, k - len(index))  # a plateau, for example of zeros: its first ones
    enough = len(index) + len(tied) >= k
    index = np.sort(np.concatenate((index, tied)), kind="stable") if enough else _of_few(_magnitude(bits), k)  # a merge
    return index, bits[index]


def _magnitude(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return np.bitwise_and(bits, _UNSIGNED[bits.itemsize], out=out)


def _of_few(magnitude: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest, ascending; of equal ones the first."""
    if len(magnitude) == k:
        return np.arange(k)
    threshold = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    keep = magnitude > threshold
    keep[np.flatnonzero(magnitude == threshold)[: k - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)


@lru_cache(maxsize=8)
def _sampled(d: int) -> np.ndarray:
    """Where a row of d numbers is sampled: evenly, but jittered, so that no period of x can hide from it."""
    size = min(_SAMPLE, d // 64)
    stride, place = d // size, np.arange(size)
    return place * stride + place * 40503 % stride


def _where(
    bits: np.ndarray, compare: np.ufunc, threshold: Any, enough: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ascending indices at which `compare(|x|, threshold)` holds, the first `enough`, and x there; block by block."""
    index, there, count = [], [], 0
    size = _BLOCK if enough is None else min(_BLOCK, 2 * enough + 1000)
    scratch, mask = np.empty(size, bits.dtype), np.empty(size, bool)
    for start in range(0, len(bits), size):
        block = bits[start : start + size]
        holds = mask[: len(block)]
        if compare is np.greater and threshold == 0:  # one pass less
            np.not_equal(block.view(f"f{bits.itemsize}"), 0, out=holds)
        else:
            compare(_magnitude(block, scratch[: len(block)]), threshold, out=holds)
        (found,) = holds.nonzero()
        there.append(block[found])  # while it is in the cache
        found += start
        index.append(found)
        count += len(found)
        if enough is not None and count >= enough:
            break
    return np.concatenate(index)[:enough], np.concatenate(there)[:enough]
