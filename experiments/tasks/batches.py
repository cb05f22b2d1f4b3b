"""The samples of a worker's batch are a pure function of (seed, worker, step), whoever asks and in whatever order.

Worker i reads an endless stream: a fresh permutation of its samples (epoch 0), another (epoch 1), and so on. Step t
takes the places t·b … t·b + b − 1 of it. So each epoch uses each sample once, no sample is dropped or padded, and all
batches have b rows, also for a worker with fewer than b samples, whose batches simply span several of its epochs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossip import rng
from graphs.topology import whole

BLANK = -100  # the target of padding; torch's cross_entropy ignores it


class Batches:
    """``batches(workers, step)`` is a (m, b) int64 tensor of sample numbers, valid until the next call.

    Args:
        parts: the sample numbers of each worker.
        batch: b, samples a step. None is the full batch: each sample of the worker exactly once, in (m, L) rows as long
            as the largest worker's, filled up with −1.
        seed: the run's seed.

    Kept per worker are two blocks of its stream (a block is the fewest whole epochs that hold a batch), so that a
    permutation is drawn once an epoch, for all workers that need one together. This memory is a cache: no result
    depends on it.

    >>> batches = Batches([torch.arange(6), torch.tensor([7, 8])], batch=3, seed=0)
    >>> everyone = torch.arange(2)
    >>> first, second = batches(everyone, 0).clone(), batches(everyone, 1).clone()
    >>> sorted(first[0].tolist() + second[0].tolist()), sorted(first[1].tolist() + second[1].tolist())
    ([0, 1, 2, 3, 4, 5], [7, 7, 7, 8, 8, 8])
    >>> torch.equal(batches(torch.tensor([1]), torch.tensor([0])), first[1:])
    True
    """

    def __init__(self, parts: Sequence[Tensor], batch: int | None, seed: int) -> None:
        if batch is not None and whole("batch", batch) < 1:
            raise ValueError(f"batch = {batch}: at least 1 sample a step, or null for the full batch.")
        self.batch, self.seed = batch, seed
        self._size = torch.tensor([len(p) for p in parts])
        if batch is None:
            self._rows = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=-1)
            return
        self._samples = torch.cat(list(parts))
        self._begin = self._size.cumsum(0) - self._size
        self._epochs = -(-batch // self._size)
        self._block = self._size * self._epochs
        self._base = 2 * (self._block.cumsum(0) - self._block)
        self._stream = torch.empty(2 * int(self._block.sum()), dtype=torch.int64)
        self._held = torch.full((len(parts), 2), -1)
        self._place = torch.arange(batch)
        self._out = torch.empty(0, dtype=torch.int64)

    def __call__(self, workers: Tensor, step: int | Tensor) -> Tensor:
        if self.batch is None:
            return self._rows[workers]
        first = torch.as_tensor(step) * self.batch
        block = self._block[workers]
        begin = torch.div(first, block, rounding_mode="floor")
        end = torch.div(first + (self.batch - 1), block, rounding_mode="floor")
        for wanted in (begin, end):
            missing = self._held[workers, wanted & 1] != wanted
            if missing.any():
                self._draw(workers[missing], wanted[missing])
        place = (first - begin * block + (begin & 1) * block)[:, None] + self._place
        around = 2 * block[:, None]
        place = torch.where(place >= around, place - around, place).add_(self._base[workers][:, None])
        if self._out.numel() < place.numel():
            self._out = torch.empty(place.numel(), dtype=torch.int64)
        out = self._out[: place.numel()]
        return torch.index_select(self._stream, 0, place.view(-1), out=out).view(place.shape)

    def _draw(self, workers: Tensor, block: Tensor) -> None:
        """Fills in a block of each worker: epoch after epoch, its samples sorted by a hash of (worker, epoch, place)."""
        epochs = self._epochs[workers]
        worker, within = _ragged(epochs)  # a segment is one epoch of one worker
        owner = workers[worker]
        length = self._size[owner]
        key = rng.key(self.seed, "batch", owner, (block * epochs)[worker] + within)
        source = self._begin[owner]
        target = self._base[owner] + ((block & 1) * self._block[workers])[worker] + within * length

        # One flat sort permutes all segments: (segment | 32 bits of hash | place) in 63 bits, the place in the lowest.
        # The hash keeps the same bits whichever workers share the sort, or an order would depend on them.
        low = int(length.max()).bit_length()
        if len(workers) > 1 and low + len(length).bit_length() > 31:
            for half in zip(workers.chunk(2), block.chunk(2)):
                self._draw(*half)
            return
        segment, place = _ragged(length)
        hashed = rng.key(self.seed, "order", key.index_select(0, segment).add_(place)).bitwise_and_((1 << 32) - 1)
        packed = (segment << 32).bitwise_or_(hashed).bitwise_left_shift_(low).bitwise_or_(place)
        packed.numpy().sort()
        order = packed.bitwise_and_((1 << low) - 1).add_(source.index_select(0, segment))
        target = target.index_select(0, segment).add_(place)
        self._stream.scatter_(0, target, self._samples.index_select(0, order))
        self._held[workers, block & 1] = block


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For lengths (2, 3): the segment 0 0 1 1 1 and the place 0 1 0 1 2 of each element."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    begin = lengths.cumsum(0) - lengths
    return segment, torch.arange(len(segment)).sub_(begin.index_select(0, segment))
