"""Which workers' rows live in which process: all in one (a simulation), one each (real workers), or blocks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """A partition of workers 0…n−1 into one block of rows per process, seen from process `rank`.

    >>> Placement.even(6, processes=4, rank=1)
    Placement(blocks=((0, 1), (2, 3), (4,), (5,)), rank=1)
    >>> Placement.here(3).rows.tolist()
    [0, 1, 2]
    """

    blocks: tuple[tuple[int, ...], ...]
    rank: int = 0

    def __post_init__(self) -> None:
        hosted = sorted(w for block in self.blocks for w in block)
        if hosted != list(range(len(hosted))):
            raise ValueError(
                f"blocks {self.blocks} do not host each of the workers 0…{len(hosted) - 1} exactly once; "
                "list every worker in one block"
            )
        if not all(self.blocks):
            raise ValueError(
                f"blocks {self.blocks} leave process {self.blocks.index(())} without a worker; use fewer processes"
            )
        if not 0 <= self.rank < len(self.blocks):
            raise ValueError(f"rank {self.rank} is outside 0…{len(self.blocks) - 1}, one rank per block")

    @classmethod
    def here(cls, n: int) -> "Placement":
        """All n rows in this process."""
        return cls((tuple(range(n)),))

    @classmethod
    def even(cls, n: int, processes: int, rank: int) -> "Placement":
        """Consecutive rows, as evenly as n allows."""
        if n < processes:
            raise ValueError(
                f"n={n} workers cannot fill {processes} processes; use at most {n} processes or more workers"
            )
        return cls(tuple(tuple(b.tolist()) for b in torch.arange(n).tensor_split(processes)), rank)

    @property
    def n(self) -> int:
        """Workers in all."""
        return sum(map(len, self.blocks))

    @cached_property
    def rows(self) -> Tensor:
        """The workers hosted by this process, (m,) int64, in the order of its rows."""
        return torch.tensor(self.blocks[self.rank])

    @cached_property
    def owner(self) -> Tensor:
        """(n,) int64: the process that hosts each worker."""
        owner = torch.empty(self.n, dtype=torch.int64)
        for q, block in enumerate(self.blocks):
            owner[list(block)] = q
        return owner

    @property
    def alone(self) -> bool:
        """Whether this process hosts every worker."""
        return len(self.blocks) == 1
