"""Who holds which samples: a partition is a pure function of (labels, n, seed), the same on every machine.

`iid` shuffles and cuts, `dirichlet` skews the labels (Hsu et al. 2019, arXiv 1909.06335), `by_label` gives each worker
a few labels only (McMahan et al. 2017, arXiv 1602.05629, without its unequal shards). In all three every sample is used
exactly once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.topology import whole


@dataclass(frozen=True, eq=False, repr=False)
class Partition(Sequence):
    """The samples of n workers: ``parts[i]`` is the sorted int64 index tensor of worker i, into ``labels`` (N,).

    Refused with ValueError: a worker without samples, a sample used twice, an index outside of ``labels``.

    >>> p = Partition((torch.tensor([0, 1]), torch.tensor([2])), labels=torch.tensor([5, 7, 7]))
    >>> p.counts.tolist(), [round(v, 3) for v in p.distance.tolist()]
    ([[1, 1], [0, 1]], [0.167, 0.333])
    """

    parts: tuple[Tensor, ...]
    labels: Tensor
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", _integers(self.labels))
        kinds = {torch.as_tensor(p).dtype for p in self.parts if len(p)}
        if odd := [kind for kind in kinds if kind == torch.bool or kind.is_floating_point]:
            raise ValueError(f"a part of type {odd[0]}: parts are sample numbers. Of a mask: mask.nonzero()[:, 0].")
        parts = tuple(torch.as_tensor(p, dtype=torch.int64).sort().values for p in self.parts)
        object.__setattr__(self, "parts", parts)
        empty = [i for i, p in enumerate(parts) if not len(p)]
        if empty:
            raise ValueError(
                f"worker {empty[0]} of {len(parts)} has no samples ({len(empty)} such workers; {len(self.labels)} "
                "samples in all): every worker needs at least one. Use fewer workers, a larger alpha, more "
                "classes_per_worker, or min_size=1."
            )
        if not parts:
            raise ValueError("a partition among no workers: give one part of samples for each of them.")
        every = torch.cat(parts)
        if int(every.min()) < 0 or int(every.max()) >= len(self.labels):
            raise ValueError(
                f"sample {int(every.max() if every.min() >= 0 else every.min())} is outside of the {len(self.labels)} "
                "samples: a partition indexes the labels that it was made from."
            )
        used = torch.bincount(every, minlength=len(self.labels))
        if int(used.max()) > 1:
            raise ValueError(
                f"sample {int(used.argmax())} is given out {int(used.max())} times: a sample belongs to at most one "
                "worker. Remove it from the others."
            )

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i):
        return self.parts[i]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts)

    @cached_property
    def classes(self) -> Tensor:
        """(C,) the labels that occur, in increasing order (never in order of appearance)."""
        return self.labels.unique()

    @cached_property
    def sizes(self) -> Tensor:
        """(n,) samples of each worker."""
        return torch.tensor([len(p) for p in self.parts])

    @cached_property
    def counts(self) -> Tensor:
        """(n, C) samples of each worker and label."""
        column = torch.searchsorted(self.classes, self.labels)
        return torch.stack([torch.bincount(column[p], minlength=len(self.classes)) for p in self.parts])

    @cached_property
    def distance(self) -> Tensor:
        """(n,) total variation ½ Σ_c |p_i(c) − p(c)| of each worker's label histogram from that of all samples."""
        own = self.counts / self.counts.sum(1, keepdim=True)
        everyone = torch.bincount(torch.searchsorted(self.classes, self.labels)) / len(self.labels)
        return (own - everyone).abs().sum(1) / 2

    def matching(self, labels: Tensor) -> tuple[Tensor, ...]:
        """Splits another set (a test set) by the same label → worker map: each label in proportion to `counts`, in the
        order in which its samples are stored. A worker gets labels that it trains on and no others; it may get none,
        where the set is small.
        Raises ValueError for a label that is not in this partition.

        >>> p = by_label(torch.arange(10).repeat(20), n=5, classes_per_worker=2, seed=0)
        >>> test = torch.arange(9, -1, -1).repeat(3)                       # stored in another order
        >>> [sorted(set(test[i].tolist())) == p.classes[c > 0].tolist() for i, c in zip(p.matching(test), p.counts)]
        [True, True, True, True, True]
        """
        labels, held = _integers(labels), self.classes[self.counts.sum(0) > 0].tolist()
        strange = sorted(set(labels.unique().tolist()) - set(held))
        if strange:
            raise ValueError(
                f"label {strange[0]} is not one of the partition's labels {held}: no worker could "
                "own it. Split both sets of one dataset with the same label names."
            )
        parts: list[list[Tensor]] = [[] for _ in self.parts]
        for c, label in enumerate(self.classes):
            share = self.counts[:, c].double()
            if not share.any():
                continue
            for i, piece in enumerate(
                _cut(torch.nonzero(labels == label)[:, 0].numpy(), (share / share.sum()).numpy())
            ):
                parts[i].append(torch.as_tensor(piece))
        return tuple(torch.cat(p).sort().values for p in parts)

    def report(self, rows: int = 32) -> str:
        """A table to be read before a run is believed: samples and labels per worker, and how far each histogram is
        from the global one (`distance`). More than ``rows`` workers are shortened to the extremes; more than 20 labels
        to their number."""
        n, sizes, distance = len(self), self.sizes, self.distance
        lines = [
            f"{n} workers hold {int(sizes.sum())} of {len(self.labels)} samples, {int(sizes.min())} to "
            f"{int(sizes.max())} each; label histograms differ from the global one by {float(distance.mean()):.3f} on "
            f"average, {float(distance.max()):.3f} at most (worker {int(distance.argmax())}; 0 is the same, 1 nothing "
            "in common)"
        ]
        if self.note:
            lines.append(self.note)
        shown = range(n)
        if n > rows:
            shown = sorted({int(t) for t in (sizes.argmin(), sizes.argmax(), distance.argmin(), distance.argmax())})
            lines.append(f"(the {len(shown)} extreme workers of {n})")
        wide = len(self.classes) <= 20
        width = max(4, len(str(int(self.counts.max()))) + 1, *(len(str(c)) + 1 for c in self.classes.tolist()))
        names = "".join(f"{c:>{width}}" for c in self.classes.tolist()) if wide else f"  labels of {len(self.classes)}"
        lines.append(f"worker samples distance{names}")
        for i in shown:
            row = self.counts[i].tolist()
            cells = "".join(f"{v or '·':>{width}}" for v in row) if wide else f"  {sum(v > 0 for v in row)}"
            lines.append(f"{i:>6} {int(sizes[i]):>7} {float(distance[i]):>8.3f}{cells}")
        return "\n".join(lines)


def _cut(indices: np.ndarray, share: np.ndarray) -> list[np.ndarray]:
    """Cuts `indices` at the rounded cumulative shares, so that the pieces are disjoint and cover all."""
    ends = np.rint(np.cumsum(share)[:-1] * len(indices)).astype(np.int64).clip(0, len(indices))
    return np.split(indices, ends)


def _integers(labels: Any) -> Tensor:
    """Labels as (N,) int64; ValueError for one-hot rows, floats and text."""
    kept = labels if isinstance(labels, Tensor) else np.asarray(labels)
    if isinstance(kept, np.ndarray):
        if kept.dtype.kind not in "biu":
            raise ValueError(
                f"labels of type {kept.dtype}: a partition needs one integer a sample. Of names or numbers of any kind: "
                "np.unique(labels, return_inverse=True)[1]."
            )
        kept = torch.as_tensor(kept)
    if kept.ndim != 1 or kept.is_floating_point():
        raise ValueError(
            f"labels of shape {tuple(kept.shape)} and type {kept.dtype}: a partition needs one integer a sample."
        )
    return kept.to(torch.int64)


def _checked(labels: Tensor, n: int, seed: int) -> tuple[np.ndarray, np.random.Generator]:
    labels, n, seed = _integers(labels), whole("n", n, 1), whole("seed", seed, 0)
    if len(labels) < n:
        raise ValueError(
            f"{len(labels)} samples for n = {n} workers leave some without any: use at most {len(labels)} workers."
        )
    return labels.numpy(), np.random.Generator(np.random.PCG64(seed))


def iid(labels: Tensor, n: int, seed: int = 0) -> Partition:
    """All samples shuffled with the seed, then cut into n parts whose sizes differ by at most one.

    >>> p = iid(torch.arange(10).repeat_interleave(100), n=10, seed=0)          # sorted by label: shuffled all the same
    >>> p.sizes.tolist() == [100] * 10, float(p.distance.max()) < 0.25
    (True, True)
    """
    y, rng = _checked(labels, n, seed)
    return Partition(tuple(torch.as_tensor(p) for p in np.array_split(rng.permutation(len(y)), n)), torch.from_numpy(y))


def dirichlet(labels: Tensor, n: int, alpha: float, seed: int = 0, min_size: int = 1) -> Partition:
    """Label c's samples are dealt out by shares p_c ~ Dirichlet(α, …, α): small α concentrates, large α equalises.

    Sizes differ too. A worker left with fewer than ``min_size`` samples takes random ones from the largest worker: no
    redrawing, which for small α would never end, and no bias in the others. The report says how many samples moved.
    (Hsu et al. 2019, arXiv 1909.06335.)
    Raises ValueError unless α > 0 and n · min_size ≤ the number of samples.

    >>> y = torch.arange(10).repeat(100)
    >>> [round(float(dirichlet(y, 8, alpha, seed=0).distance.mean()), 2) for alpha in (0.1, 1, 1000)]
    [0.66, 0.28, 0.02]
    """
    y, rng = _checked(labels, n, seed)
    min_size = whole("min_size", min_size, 0)
    if not 0 < alpha < np.inf:
        raise ValueError(
            f"alpha = {alpha}: the Dirichlet concentration is a positive number. For equal histograms use "
            "partition=iid."
        )
    parts: list[list[int]] = [[] for _ in range(n)]
    for label in np.unique(y):
        shuffled = rng.permutation(np.flatnonzero(y == label))
        for part, piece in zip(parts, _cut(shuffled, rng.dirichlet(np.full(n, float(alpha))))):
            part.extend(piece.tolist())
    smallest = min(len(p) for p in parts)
    if n * min_size > len(y):
        raise ValueError(
            f"min_size = {min_size} for n = {n} workers needs {n * min_size} samples, there are {len(y)} (with alpha "
            f"= {alpha} the smallest worker got {smallest}). Use min_size ≤ {len(y) // n}, or fewer workers."
        )
    moved = 0
    for part in parts:
        while len(part) < min_size:
            largest = max(parts, key=len)
            part.append(largest.pop(int(rng.integers(len(largest)))))
            moved += 1
    note = (
        f"{moved} samples moved so that each worker has at least {min_size} (the smallest had {smallest})"
        if moved
        else ""
    )
    return Partition(tuple(torch.tensor(p, dtype=torch.int64) for p in parts), torch.from_numpy(y), note)


def by_label(labels: Tensor, n: int, classes_per_worker: int, seed: int = 0) -> Partition:
    """Each worker holds ``classes_per_worker`` labels, whose holders share their samples evenly.

    A worker takes the labels least used so far, ties broken at random. Every label has a holder, so every sample is
    used: this needs n · classes_per_worker ≥ the number of labels (ValueError otherwise).

    >>> p = by_label(torch.arange(10).repeat(30), n=10, classes_per_worker=2, seed=0)
    >>> (p.counts > 0).sum(1).tolist(), (p.counts > 0).sum(0).tolist()
    ([2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    y, rng = _checked(labels, n, seed)
    classes = np.unique(y)
    if not 1 <= classes_per_worker <= len(classes):
        raise ValueError(
            f"classes_per_worker = {classes_per_worker}: the data have {len(classes)} labels, so use 1 to "
            f"{len(classes)}."
        )
    if n * classes_per_worker < len(classes):
        raise ValueError(
            f"n = {n} workers with classes_per_worker = {classes_per_worker} hold {n * classes_per_worker} labels, "
            f"and there are {len(classes)}: samples of the others would be lost. Use classes_per_worker ≥ "
            f"{-(-len(classes) // n)} or more workers."
        )
    used = np.zeros(len(classes), dtype=np.int64)
    holders: list[list[int]] = [[] for _ in classes]
    for worker in range(n):
        for c in np.lexsort((rng.permutation(len(classes)), used))[:classes_per_worker]:
            used[c] += 1
            holders[c].append(worker)
    parts: list[list[np.ndarray]] = [[] for _ in range(n)]
    for c, label in enumerate(classes):
        shuffled = rng.permutation(np.flatnonzero(y == label))
        for worker, piece in zip(holders[c], np.array_split(shuffled, len(holders[c]))):
            parts[worker].append(piece)
    return Partition(tuple(torch.as_tensor(np.concatenate(p)) for p in parts), torch.from_numpy(y))
