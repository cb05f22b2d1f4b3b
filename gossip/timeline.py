"""The seconds that synchronous rounds would take: a max-plus recursion, in which a straggler slows only its surroundings.

Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphs import Schedule, Topology, as_schedule

from .cost import Cost
from .links import Links
from .network import Network

_KEPT = 64  # compiled rounds, as in `gossip.network`


class Sent(NamedTuple):
    """One message of a round: (n,) bytes that each worker sends to each of its neighbours; or, if `steps` is above 1, the
    bytes of each step of a ring all-reduce."""

    bytes: Any
    steps: int = 1


class Timeline:
    """When each worker has finished which round, with all of them obeying `cost`.

    .. math::
        c_i = Σ_τ T_i^τ, \\quad l_i = t_i + c_i, \\quad t_i' = \\max(l_i, \\max_{j → i} a_{ji}, \\max_{i → j} d_{ij})

    Worker i computes for c_i seconds, its messages begin at l_i (at t_i with `overlap`), and the next round starts at t′
    when all that is sent to it has arrived and all that it sends has left. A message that begins at
    b_ji = l_j (with `handshake` max(l_j, l_i + ℓ_ij)) has left at d and arrived at a:

    .. math::
        d_{ji} = \\max(b_{ji} + M / B_{ji}, \\; \\mathrm{out}_{ji}), \\quad a_{ji} = \\max(d_{ji} + ℓ_{ji}, \\; \\mathrm{in}_{ji})

    where out and in are the times at which it has passed its sender's and its receiver's card: cards serve messages in
    the order in which they come, and those that come together share it and are through together. A worker's CPU adds
    o seconds for each message of an exchange that it sends or receives. An all-reduce is 2 (n − 1) such steps along the
    ring 0 → 1 → … → 0, with o for the first of them, or goes by a server, which all wait for.

    Args:
        cost: the models.
        n: workers.
        local_steps: of a round.
        overlap: whether the messages are in flight during the local steps.

    Attributes:
        clock: (n,) float64 seconds at which each worker ended its last round.
        idle: (n,) float64 seconds for which each worker has computed nothing.

    A straggler in a ring slows its neighbours in the first round, and theirs in the second:

    >>> import gossip, graphs
    >>> ring, slow = graphs.metropolis(graphs.ring(8)), gossip.work.Slow(gossip.work.Constant(1.0), 5, (0,))
    >>> timeline = Timeline(Cost(slow), n=8)
    >>> for k in range(2):
    ...     timeline.round(k, ring, Sent(1000))
    ...     print(timeline.clock.tolist())
    [5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    [10.0, 10.0, 6.0, 2.0, 2.0, 2.0, 6.0, 10.0]
    """

    def __init__(self, cost: Cost, n: int, local_steps: int = 1, overlap: bool = False) -> None:
        known = cost.links.n
        if known is not None and known < n:
            raise ValueError(
                f"the links are known of {known} workers and there are {n}: give tables for all of them, or n={known}"
            )
        slow = max(getattr(cost.work, "workers", ()), default=0)
        if slow >= n:
            raise ValueError(f"worker {slow} is to be slow, and the workers are 0…{n - 1}: name one of them")
        self.cost, self.n, self.local_steps, self.overlap = cost, n, local_steps, overlap
        self.clock, self.idle = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        self._workers = torch.arange(n).repeat(local_steps)
        self._wires: OrderedDict[int, _Wires] = OrderedDict()
        self._ring: _Wires | None = None
        hosts = n if cost.links.hosts is None else 1 + max(list(cost.links.hosts)[:n])
        self._busy = np.full(2 * hosts, -np.inf)  # until when each card's work lasts, out and in

    @property
    def seconds(self) -> float:
        """When the last worker ended its last round."""
        return float(self.clock.max())

    def round(self, k: int, W: Tensor, *messages: Sent) -> None:
        """Round k: local steps, then the messages, one after the other, along W (those of several steps round a ring)."""
        steps = torch.arange(k * self.local_steps, (k + 1) * self.local_steps).repeat_interleave(self.n)
        work = self.cost.compute(self._workers, steps).view(self.local_steps, self.n).sum(0).numpy()
        start = self.clock.numpy()
        computed = start + work
        done = start if self.overlap else computed
        for sent in messages:
            size = np.broadcast_to(np.asarray(sent.bytes, dtype=np.float64), (self.n,))
            if sent.steps == 1:
                done = self._along(W)(done, size, self._busy)
            elif self.cost.average == "server":
                done = self._server(done, self.n * float(size.sum()))
            elif self.n > 1:
                for step in range(sent.steps):
                    done = self._round_the_ring(done, size, self._busy, calls=step == 0)
        end = np.maximum(computed, done)
        self.idle += torch.from_numpy(end - computed)
        self.clock = torch.from_numpy(end)

    def report(self) -> str:
        """Comma-separated, a line per worker: when it ended its last round, how long it was idle, and the share of that."""
        lines = [f"{i},{t:.6g},{w:.6g},{w / t if t else 0:.4f}" for i, (t, w) in enumerate(zip(self.clock, self.idle))]
        return "\n".join(["worker,seconds,idle,share", *lines, ""])

    def state_dict(self) -> dict[str, Tensor]:
        """Clocks and idle seconds, for a checkpoint."""
        return {"clock": self.clock, "idle": self.idle, "busy": torch.from_numpy(self._busy)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there; another number of workers all start when the last of them had ended."""
        if len(state["clock"]) == self.n:
            self.clock, self.idle = state["clock"].clone(), state["idle"].clone()
            self._busy[:] = state["busy"].numpy()
        else:
            self.clock = torch.full_like(self.clock, float(state["clock"].max()))
            self.idle = torch.full_like(self.idle, float(state["idle"].mean()))

    def _along(self, W: Tensor) -> "_Wires":
        wires = self._wires.get(id(W))
        if wires is None:
            coo = W.to_sparse_coo().coalesce()
            i, j = coo.indices()[:, coo.values() != 0].numpy()
            wires = self._wires[id(W)] = _Wires(self.cost, self.n, j[i != j], i[i != j], W)
            if len(self._wires) > _KEPT:
                self._wires.popitem(last=False)
        return wires

    @property
    def _round_the_ring(self) -> "_Wires":
        if self._ring is None:
            i = np.arange(self.n)
            self._ring = _Wires(self.cost, self.n, i, (i + 1) % self.n, None)
        return self._ring

    def _server(self, leave: np.ndarray, bytes: float) -> np.ndarray:
        """All send to a host of its own and hear from it: 2 (ℓ + n M / B), from when the last has come."""
        links = self.cost.links
        latency, bandwidth = float(np.max(links.tables[0])), float(np.min(links.tables[1]))
        there = 2 * (latency + bytes / min(bandwidth, links.nic)) + 4 * links.per_message
        return np.full_like(leave, float(leave.max()) + there)


class _Wires:
    """The directed edges of one W, compiled: (n,) times at which messages leave → (n,) times at which all is over."""

    def __init__(self, cost: Cost, n: int, source: np.ndarray, target: np.ndarray, held: Tensor | None) -> None:
        order = np.lexsort((source, target))
        self.source, self.target, self.links = source[order], target[order], cost.links
        self.held = held  # so that the id by which this is cached stays taken
        self.links.refuse_gaps(self.source, self.target)
        if self.links.handshake:
            self.links.refuse_gaps(self.target, self.source)
        self.latency, self.bandwidth = self.links.of(self.source, self.target)
        self.back = self.links.of(self.target, self.source)[0]
        self.receivers, self.first = np.unique(self.target, return_index=True)
        self.by_source = np.argsort(self.source, kind="stable")
        self.senders, self.first_out = np.unique(self.source[self.by_source], return_index=True)
        counts = np.bincount(self.source, minlength=n) + np.bincount(self.target, minlength=n)
        self.overhead = counts * self.links.per_message
        host = np.arange(n) if self.links.hosts is None else np.asarray(list(self.links.hosts))[:n]
        out, into = host[self.source], host[self.target]
        self.outside = out != into
        self.cards = None
        if self.links.nic < np.inf and self.outside.any():
            out, into = out[self.outside], into[self.outside]
            if self.links.full_duplex:
                into = into + 1 + host.max()  # a queue of its own
            self.cards = _Cards(np.concatenate((out, into)), self.links)

    def __call__(self, leave: np.ndarray, size: np.ndarray, busy: np.ndarray, calls: bool = True) -> np.ndarray:
        if not len(self.source):
            return leave
        begin = leave[self.source]
        if self.links.handshake:
            begin = np.maximum(begin, leave[self.target] + self.back)
        size = size[self.source]
        gone = begin + size / self.bandwidth
        through = gone + self.latency
        if self.cards is not None:
            b, bytes, late = (each[self.outside] for each in (begin, size, self.latency))
            over = self.cards(np.concatenate((b, b + late)), np.concatenate((bytes, bytes)), busy)
            out, into = np.split(over, 2)
            gone[self.outside] = np.maximum(gone[self.outside], out)
            through[self.outside] = np.maximum(gone[self.outside] + late, into)
        done = leave.copy()
        arrived = np.maximum.reduceat(through, self.first)
        done[self.receivers] = np.maximum(done[self.receivers], arrived)
        left = np.maximum.reduceat(gone[self.by_source], self.first_out)
        done[self.senders] = np.maximum(done[self.senders], left)
        return done + self.overhead if calls else done


class _Cards:
    """Network cards take messages in the order in which they come; those that come together are over together.

    With w_e = M_e (1 + ε (f − 1)) / N and begins b_e that a token bucket of S bytes lets count S/N earlier, message e is over
    at max(b_e, v_e), where v_e = max(v_{e−1}, b_e − S/N) + w_e = C_e + max_{e' ≤ e} (b_e' − S/N − C_{e'−1}), and C sums w.
    """

    def __init__(self, card: np.ndarray, links: Links) -> None:
        order = np.argsort(card, kind="stable")
        self.card, first, count = np.unique(card[order], return_index=True, return_counts=True)
        self.seconds = (1 + links.crowding * (count - 1))[:, None] / links.nic  # per byte
        self.ahead = links.burst / links.nic
        self.place = np.full((len(count), count.max()), len(card))
        for row, a, c in zip(self.place, first, count):
            row[:c] = order[a : a + c]

    def __call__(self, begin: np.ndarray, bytes: np.ndarray, busy: np.ndarray) -> np.ndarray:
        b, w = np.append(begin, np.inf)[self.place], np.append(bytes, 0.0)[self.place] * self.seconds
        order = np.argsort(b, axis=1, kind="stable")
        b, w = np.take_along_axis(b, order, 1), np.take_along_axis(w, order, 1)
        total = np.cumsum(w, axis=1)
        before = np.maximum.accumulate(b - self.ahead - (total - w), axis=1)
        over = total + np.maximum(before, busy[self.card][:, None])
        busy[self.card] = np.where(np.isfinite(over), over, -np.inf).max(1)
        over = np.maximum(over, b)
        last = np.ones_like(b, dtype=bool)
        last[:, :-1] = b[:, 1:] != b[:, :-1]
        over = np.minimum.accumulate(np.where(last, over, np.inf)[:, ::-1], axis=1)[:, ::-1]
        result = np.empty(len(begin) + 1)
        result[np.take_along_axis(self.place, order, 1)] = over
        return result[:-1]


def seconds_per_round(
    cost: Cost,
    mixing: Schedule | Tensor | Topology,
    bytes: float | Sequence[float],
    rounds: int = 64,
    all_reduce: bool = False,
    local_steps: int = 1,
    overlap: bool = False,
) -> float:
    """Mean seconds of a round once the start is forgotten: over the second half of some rounds.

    Args:
        cost: seconds of steps and messages.
        mixing: a schedule, a mixing matrix or a topology.
        bytes: of a message, or of the model that is averaged; a list holds one number per worker.
        rounds: how many are gone through.
        all_reduce: average exactly rather than along the graph.
        local_steps, overlap: see `Timeline`.

    D-PSGD on a ring, one-peer D-PSGD and an all-reduce of 102.4 MB among 16 workers, at 0.1 ms and 10 Gbit/s:

    >>> import gossip, graphs
    >>> cost = Cost(gossip.work.Constant(0.0), gossip.Links(latency=1e-4, nic=1.25e9))
    >>> ring, one = graphs.ring(16), graphs.one_peer_exponential(16)
    >>> [round(seconds_per_round(cost, g, 102.4e6), 3) for g in (ring, one)]
    [0.164, 0.082]
    >>> round(seconds_per_round(cost, ring, 102.4e6, all_reduce=True), 3)
    0.157
    """
    schedule = as_schedule(mixing)
    n = schedule.n
    timeline, half = Timeline(cost, n, local_steps, overlap), 0.0
    steps = 2 * (n - 1)
    size = np.asarray(bytes, dtype=np.float64)
    sent = Sent(size / n, steps) if all_reduce else Sent(size)
    for k in range(rounds):
        if k == rounds // 2:
            half = timeline.seconds
        timeline.round(k, schedule(k), sent)
    return (timeline.seconds - half) / (rounds - rounds // 2)


class Watch:
    """Tells a timeline what a network sends, as its meter logs it, wherever the rows live.

    >>> import gossip, graphs
    >>> net = gossip.Network(graphs.as_schedule(graphs.ring(4)))
    >>> watch = Watch(Timeline(Cost(links=gossip.Links(latency=0.5, nic=4.0)), n=4), net)
    >>> net.mix(torch.zeros(4, 2))                                    # 8 bytes to each of two neighbours
    >>> watch.round(0)
    >>> watch.timeline.seconds                                        # 1 s of work, 0.5 s on the way, 16 bytes by one card
    5.5
    """

    def __init__(self, timeline: Timeline, net: Network) -> None:
        self._timeline, self.net = timeline, net
        self._pending: list[tuple[int, Tensor, int]] = []  # round, W, messages
        self._sent: list[tuple[Tensor, int]] = []  # bytes of each hosted row, steps
        net.meter.log = []

    def round(self, k: int) -> None:
        """Round k is over."""
        log, self.net.meter.log = self.net.meter.log or [], []
        self._pending.append((k, self.net.plan.W, len(log)))
        for edges, bits, steps in log:
            each = torch.zeros(self.net.n, dtype=torch.float64)
            each[edges.src] = (edges.size * bits).double() / (8 * steps)
            self._sent.append((each[self.net.rows], steps))

    @property
    def timeline(self) -> Timeline:
        """Up to date; every process must ask for it at the same round, for they tell each other what they sent."""
        pending, self._pending = self._pending, []
        sent, self._sent = self._sent, []
        messages = iter(())
        if sent:
            bytes = self.net.gather(torch.stack([each for each, _ in sent], 1)).T.numpy()
            messages = iter([Sent(b, steps) for b, (_, steps) in zip(bytes, sent)])
        for k, W, count in pending:
            self._timeline.round(k, W, *(next(messages) for _ in range(count)))
        return self._timeline
