"""What a run would cost in seconds: how long local steps take, and messages."""

from dataclasses import dataclass

from torch import Tensor

from .links import Links
from .work import Constant, Work


@dataclass(frozen=True)
class Cost:
    """Compute and link models, in seconds.

    Args:
        work: seconds of a local step, see `gossip.work`.
        links: seconds of a message, see `gossip.links`.

    >>> import torch, gossip
    >>> cost = Cost(gossip.work.Slow(gossip.work.Constant(0.1), factor=10, workers=(0,)), Links(1e-3, 12.5e6))
    >>> cost.compute(torch.tensor([0, 1]), torch.tensor([5, 5])).tolist(), cost.message(0, 1, bytes=1.25e6)
    ([1.0, 0.1], 0.101)
    """

    work: Work = Constant()
    links: Links = Links()

    def compute(self, workers: Tensor, steps: Tensor) -> Tensor:
        """(m,) workers and the numbers of their local steps → (m,) float64 seconds, a function of (seed, worker, step)."""
        return self.work(workers, steps)

    def message(self, source: int, target: int, bytes: float) -> float:
        """Seconds until a message is there: latency + bytes / bandwidth of the link, without contention."""
        return self.links.message(source, target, bytes)
