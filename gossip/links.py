"""How long a message takes: latency and bandwidth of every directed link, and the network card that a worker's links share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs import Topology

FIBRE = 2.0e5  # km/s: light in glass, two thirds of its speed in vacuum
Table = float | Sequence[Sequence[float]] | Tensor


@dataclass(frozen=True)
class Links:
    """Links between workers.

    .. math:: \\mathrm{message}_{ij}(M) = ℓ_{ij} + M / B_{ij}

    A link's numbers are one for all, or a table whose row is the source and whose column is the target.

    Args:
        latency: ℓ, seconds one way.
        bandwidth: B, bytes per second (12.5e6 is 100 Mbit/s).

    >>> Links(latency=1e-3, bandwidth=12.5e6).message(0, 1, 4e6)
    0.321
    """

    latency: Table = 0.0
    bandwidth: Table = math.inf

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            values = np.asarray(_plain(getattr(self, name)), dtype=np.float64)
            if values.ndim not in (0, 2) or (values.ndim == 2 and values.shape[0] != values.shape[1]):
                raise ValueError(
                    f"{name} has shape {values.shape}: give one number, or a table (n, n), row source, column target"
                )
            if np.isnan(values).any() or (values < 0).any() or (name == "bandwidth" and (values == 0).any()):
                what = "seconds of at least 0" if name == "latency" else "bytes per second above 0"
                raise ValueError(f"{name} holds {values.min()}: it must be {what}")

    def message(self, source: int, target: int, bytes: float) -> float:
        """Seconds from the moment a message of so many bytes is sent until it is there, alone on its link."""
        latency, bandwidth = self._tables
        if isinstance(latency, np.ndarray):
            latency = float(latency[source, target])
        if isinstance(bandwidth, np.ndarray):
            bandwidth = float(bandwidth[source, target])
        return latency + bytes / bandwidth

    @cached_property
    def _tables(self) -> tuple[Any, Any]:
        return _table(self.latency), _table(self.bandwidth)


def fibre(topology: Topology, bandwidth: float = math.inf, hop: float = 0.0, speed: float = FIBRE) -> Links:
    """Links as long as a real network's: latency = kilometres / speed of light in glass + seconds per hop.

    Workers that are no neighbours meet over the shortest way, at `hop` seconds per link on it.

    Args:
        topology: with `lengths`, such as `graphs.geant(2012)`.
        bandwidth: bytes per second of every link.
        hop: seconds that forwarding takes at each link.
        speed: km/s.

    >>> import graphs
    >>> t = graphs.arpanet(1969)
    >>> links = fibre(t)
    >>> i, j = t.names.index("UCLA"), t.names.index("UTAH")
    >>> round(1e3 * links.message(i, j, 0), 2), round(1e3 * links.message(j, i, 0), 2)  # ms for the 1,480 km by SRI
    (7.4, 7.4)
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    if topology.lengths is None:
        raise ValueError(
            "the topology has no lengths: take a real network (graphs.geant(2012)), a file with a third column of "
            "kilometres, or give latency in seconds, Links(latency=…)"
        )
    seconds = (topology.lengths / speed + hop).numpy()
    graph = csr_array((seconds, topology.edge_index.numpy()), shape=(topology.n, topology.n))
    latency = shortest_path(graph, directed=True)
    np.fill_diagonal(latency, 0.0)
    return Links(torch.from_numpy(latency), bandwidth)


def two_level(
    n: int,
    per_rack: int,
    near: float = 5e-6,
    far: float = 50e-6,
    near_bandwidth: float = 12.5e9,
    far_bandwidth: float = 1.25e9,
) -> Links:
    """A data centre: workers of a rack are near, all others far. Consecutive workers share a rack.

    >>> links = two_level(8, per_rack=4)
    >>> links.message(0, 3, 12.5e6), links.message(0, 4, 12.5e6)
    (0.001005, 0.01005)
    """
    if per_rack < 1:
        raise ValueError(f"per_rack={per_rack} is below 1: it is the number of workers that share a rack")
    rack = torch.arange(n) // per_rack
    same = rack[:, None] == rack
    latency, bandwidth = (
        torch.full((n, n), b, dtype=torch.float64).masked_fill_(same, a)
        for a, b in ((near, far), (near_bandwidth, far_bandwidth))
    )
    return Links(latency.fill_diagonal_(0.0), bandwidth)


def _plain(value: Any) -> Any:
    return (
        value.tolist()
        if isinstance(value, Tensor)
        else [list(r) for r in value]
        if isinstance(value, Sequence)
        else value
    )


def _table(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float)) else np.asarray(_plain(value), dtype=np.float64)
