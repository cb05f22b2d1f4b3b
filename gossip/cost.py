"""What a run would cost in seconds: how long local steps take, how long messages take, and how averages are carried out."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .links import Links
from .work import Constant, Work


@dataclass(frozen=True)
class Cost:
    """Compute and link models, in seconds.

    Args:
        work: seconds of a local step, see `gossip.work`.
        links: seconds of a message, see `gossip.links`.
        average: how the exact average of the baselines is carried out, a "ring" all-reduce or a parameter "server" on a
            host of its own, as far as the worst link is.

    >>> import torch, gossip
    >>> cost = Cost(gossip.work.Slow(gossip.work.Constant(0.1), factor=10, workers=(0,)), Links(1e-3, 12.5e6))
    >>> cost.compute(torch.tensor([0, 1]), torch.tensor([5, 5])).tolist(), round(cost.message(0, 1, bytes=1.25e6), 9)
    ([1.0, 0.1], 0.101)
    """

    work: Work = Constant()
    links: Links = Links()
    average: str = "ring"

    def __post_init__(self) -> None:
        if self.average not in ("ring", "server"):
            raise ValueError(
                f"average={self.average!r} is neither 'ring' (an all-reduce) nor 'server' (a parameter server)"
            )
        if self.average == "server" and not np.isfinite(self.links.tables[0]).all():
            raise ValueError(
                "average='server' with links that do not join all workers: the server is as far as the two farthest of them are "
                "apart; give every two a link, or take average='ring' with a link from each worker to the next"
            )

    def compute(self, workers: Tensor, steps: Tensor) -> Tensor:
        """(m,) workers and the numbers of their local steps → (m,) float64 seconds, a function of (seed, worker, step)."""
        return self.work(workers, steps)

    def message(self, source: int, target: int, bytes: float) -> float:
        """Seconds until a message is there, alone on the network: ℓ + 2 o + M / min(B, N), see `gossip.Links`."""
        return self.links.message(source, target, bytes)


def all_reduce_seconds(n: int, bytes: float, latency: float, bandwidth: float) -> float:
    """A ring all-reduce among n equal workers: each sends and receives 2 (n − 1) chunks of M/n bytes in turn.

    .. math:: 2 (n − 1) ℓ + 2 \\frac{n − 1}{n} \\frac{M}{B}

    (Patarasu and Yuan 2009). What `gossip.Timeline` finds where links differ, or some workers come late.

    >>> round(all_reduce_seconds(16, 102.4e6, 1e-4, 1.25e9), 3), round(all_reduce_seconds(16, 102.4e6, 5e-3, 1.25e9), 3)
    (0.157, 0.304)
    """
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * bytes / bandwidth


def server_seconds(n: int, bytes: float, latency: float, bandwidth: float) -> float:
    """A parameter server that n equal workers send M bytes to and receive M bytes from, all by the server's one card.

    .. math:: 2 (ℓ + n M / B)

    >>> round(server_seconds(16, 102.4e6, 1e-4, 1.25e9), 2), round(server_seconds(16, 102.4e6, 5e-3, 1.25e9), 2)
    (2.62, 2.63)
    """
    return 2 * (latency + n * bytes / bandwidth)


def gossip_seconds(neighbours: int, bytes: float, latency: float, bandwidth: float) -> float:
    """An exchange of M bytes with some neighbours, all by a worker's one card: one-peer graphs have 1, a ring 2.

    .. math:: ℓ + d M / B

    >>> round(gossip_seconds(2, 102.4e6, 1e-4, 1.25e9), 3), round(gossip_seconds(1, 102.4e6, 5e-3, 1.25e9), 3)
    (0.164, 0.087)
    """
    return latency + neighbours * bytes / bandwidth
