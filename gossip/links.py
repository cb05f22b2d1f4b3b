"""How long a message takes: latency and bandwidth of every directed link, and the network card that a host's links share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs import Topology

FIBRE = 2.0e5  # km/s: light in glass, two thirds of its speed in vacuum


@dataclass(frozen=True)
class Links:
    """The links between workers, and what their hosts' network cards and CPUs add.

    .. math:: \\mathrm{message}_{ij}(M) = ℓ_{ij} + 2 o + M / \\min(B_{ij}, N)

    alone on the network. All messages that a host sends in a round leave through one card of N bytes per second, and
    what it receives enters by it (`gossip.Timeline`). A link's numbers are one for all, or a table (n, n) whose row is
    the source and whose column is the target.

    Args:
        latency: ℓ, seconds one way.
        bandwidth: B, bytes per second (12.5e6 is 100 Mbit/s).
        nic: N, bytes per second of a host's network card, each way.
        crowding: ε, what f connections at once cost: the card then gives N / (1 + ε (f − 1)) in all.
        burst: S, bytes that pass a card at once after a pause, as by a token bucket: they count as sent S/N earlier.
        hosts: the host of each worker, (n,), if some share one; messages inside a host do not pass its card.
        full_duplex: whether a card sends and receives at the same time, at N each way, or in turn.
        per_message: o, seconds that a message costs the CPU at either end (LogP's overhead).
        handshake: whether a sender first waits for word that the receiver is ready, as gloo does: an exchange then
            takes two delays.

    >>> round(Links(latency=1e-3, bandwidth=12.5e6).message(0, 1, 4e6), 9)
    0.321
    """

    latency: float | Sequence[Sequence[float]] | Tensor = 0.0
    bandwidth: float | Sequence[Sequence[float]] | Tensor = math.inf
    nic: float = math.inf
    crowding: float = 0.0
    burst: float = 0.0
    hosts: Sequence[int] | None = None
    full_duplex: bool = True
    per_message: float = 0.0
    handshake: bool = False

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            values = np.asarray(_plain(getattr(self, name)), dtype=np.float64)
            if values.ndim not in (0, 2) or (values.ndim == 2 and values.shape[0] != values.shape[1]):
                raise ValueError(
                    f"{name} has shape {values.shape}: give one number, or a table (n, n), row source, column target"
                )
            what = "seconds of at least 0" if name == "latency" else "bytes per second above 0"
            if np.isnan(values).any() or (values < 0).any() or (name == "bandwidth" and (values == 0).any()):
                raise ValueError(f"{name} holds {values.min()}: it must be {what}")
        if not self.nic > 0:
            raise ValueError(f"nic={self.nic!r} is not above 0: it is in bytes per second, 125e6 for 1 Gbit/s")
        for name, what in (("per_message", "seconds of CPU"), ("crowding", "a share of the time"), ("burst", "bytes")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a finite number of at least 0: it is {what}")

    def message(self, source: int, target: int, bytes: float) -> float:
        """Seconds from the moment a message of so many bytes is sent until it is there, alone on the network."""
        latency, bandwidth = self.tables
        if isinstance(latency, np.ndarray):
            latency = float(latency[source, target])
        if isinstance(bandwidth, np.ndarray):
            bandwidth = float(bandwidth[source, target])
        if self.nic < bandwidth and (self.hosts is None or self.hosts[source] != self.hosts[target]):
            bandwidth = self.nic
        return latency + 2 * self.per_message + bytes / bandwidth

    def of(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(E,) latencies and (E,) bandwidths of these links."""
        each = [t[source, target] if isinstance(t, np.ndarray) else np.full(len(source), t) for t in self.tables]
        return each[0], each[1]

    def refuse_gaps(self, source: np.ndarray, target: np.ndarray) -> None:
        """ValueError if messages are to go from a worker to one to which there is no link."""
        gaps = ~np.isfinite(self.of(source, target)[0])
        if gaps.any():
            e = int(gaps.argmax())
            raise ValueError(
                f"worker {source[e]} sends to {target[e]}, to which there is no link: choose a graph along the links, or give "
                "this one a latency"
            )

    @property
    def n(self) -> int | None:
        """Workers that the tables speak of; None if one number serves all."""
        sizes = [len(t) for t in self.tables if isinstance(t, np.ndarray)]
        return min(sizes + ([len(self.hosts)] if self.hosts is not None else []), default=None)

    @cached_property
    def tables(self) -> tuple[Any, Any]:
        """Latency and bandwidth, each one float for all links or an (n, n) array."""
        return _table(self.latency), _table(self.bandwidth)


def fibre(
    topology: Topology,
    bandwidth: float = math.inf,
    hop: float = 0.0,
    nic: float = math.inf,
    speed: float = FIBRE,
) -> Links:
    """Links as long as a real network's: latency = kilometres / speed of light in glass + seconds per hop.

    Workers that are no neighbours meet over the shortest way, at `hop` seconds per link on it.

    Args:
        topology: with `lengths`, such as `graphs.geant(2012)`.
        bandwidth: bytes per second of every link; each is a line of its own.
        hop: seconds that forwarding takes at each link.
        nic: bytes per second of every host's card, if it has one for all its lines.
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
    seconds = (topology.lengths / speed + hop).clamp(min=1e-12).numpy()  # scipy takes a 0 for no link
    graph = csr_array((seconds, topology.edge_index.numpy()), shape=(topology.n, topology.n))
    latency = shortest_path(graph, directed=True)
    np.fill_diagonal(latency, 0.0)
    return Links(torch.from_numpy(latency), bandwidth, nic=nic)


def two_level(
    n: int,
    per_host: int = 8,
    near: float = 2e-6,
    far: float = 2e-5,
    inside: float = 5e10,
    nic: float = 3.125e9,
) -> Links:
    """A data centre: consecutive workers share a host and its card, and are near; all others are far.

    Args:
        n: workers.
        per_host: workers of a host.
        near, far: seconds one way inside a host and between hosts.
        inside: bytes per second inside a host.
        nic: bytes per second of a host's card (3.125e9: 25 Gbit/s).

    >>> links = two_level(16, per_host=8, nic=1.25e9)
    >>> round(links.message(0, 7, 5e9), 6), round(links.message(0, 8, 5e9), 6)
    (0.100002, 4.00002)
    """
    if per_host < 1:
        raise ValueError(f"per_host={per_host} is below 1: it is the number of workers that share a host")
    host = torch.arange(n) // per_host
    same = host[:, None] == host
    latency, bandwidth = (
        torch.full((n, n), b, dtype=torch.float64).masked_fill_(same, a) for a, b in ((near, far), (inside, math.inf))
    )
    return Links(latency, bandwidth, nic=nic, hosts=tuple(host.tolist()))


def table(path: str | Path, n: int, nic: float = math.inf, both_ways: bool = True) -> Links:
    """Links from a file with one link a line: source, target, latency in seconds, bandwidth in bytes per second.

    Args:
        path: a text file; numbers are separated by comma or space, # starts a comment.
        n: workers. A link that the file does not name has a latency of infinity: nothing sent over it arrives.
        nic: bytes per second of every host's card.
        both_ways: whether a line stands for both directions, unless the other has a line of its own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "links.csv").write_text("0, 1, 0.01, 1e6\\n1, 2, 0.02, 2e6\\n2, 1, 0.05, 2e6\\n")
    ...     links = table(f"{folder}/links.csv", n=3)
    >>> links.message(1, 0, 1e6), links.message(2, 1, 0), links.message(0, 2, 0)
    (1.01, 0.05, inf)
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"path={str(path)!r} is no file: give one with a line per link, source, target, latency, bandwidth"
        )
    latency, bandwidth = torch.full((n, n), math.inf, dtype=torch.float64), torch.full((n, n), math.inf).double()
    latency.fill_diagonal_(0.0)
    lines: list[tuple[int, int, float, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            i, j, seconds, rate = int(words[0]), int(words[1]), float(words[2]), float(words[3])
            if len(words) > 4 or not (0 <= i < n and 0 <= j < n):
                raise ValueError
        except (ValueError, IndexError):
            raise ValueError(
                f"{path.name}, line {number}: {line.strip()!r} is no link: write two workers below n={n}, the latency in "
                "seconds and the bandwidth in bytes per second"
            ) from None
        lines.append((i, j, seconds, rate))
    for flip in (True, False) if both_ways else (False,):
        for i, j, seconds, rate in lines:
            at = (j, i) if flip else (i, j)
            latency[at], bandwidth[at] = seconds, rate
    return Links(latency, bandwidth, nic=nic)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [list(row) for row in value] if isinstance(value, Sequence) else value


def _table(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float)) else np.asarray(_plain(value), dtype=np.float64)
