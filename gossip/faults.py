"""Faults: workers die, pause and return, links are cut, messages get lost; what happens when, for simulations and for real."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphs import Incompatible, Schedule, Topology, as_schedule, from_edges, metropolis
from graphs import drop as lossy

from .algorithm import Algorithm


@dataclass(frozen=True)
class Kill:
    """A worker dies at the beginning of a round, or so many seconds after all have started; for real by SIGKILL.

    Args:
        worker: who.
        round: when; under the live clock when all workers together have done `round` · n steps.
        seconds: when, instead; real processes only.
        back: the round at which it is restarted: it takes a neighbour's model and is back in the graph.
    """

    worker: int = 1
    round: int | None = None
    seconds: float | None = None
    back: int | None = None


@dataclass(frozen=True)
class Pause:
    """A worker stands still (SIGSTOP, SIGCONT) for `lasting` seconds. In rounds the others wait; the live clock goes on."""

    worker: int = 1
    lasting: float = 5.0
    round: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Cut:
    """The link between two workers carries nothing from round `round` to `until` − 1."""

    link: tuple[int, int] = (0, 1)
    round: int = 0
    until: int = 1


@dataclass(frozen=True)
class Drop:
    """Every message is lost with probability p, in both directions of a link at once (see `graphs.drop`)."""

    p: float = 0.1


Fault = Kill | Pause | Cut | Drop


class Remains(NamedTuple):
    """What is left: the workers that go on, in order; their mixing, row r for the r-th of them; the parts of the graph."""

    workers: tuple[int, ...]
    schedule: Schedule
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Faults:
    """All that goes wrong in a run: pure functions of the round.

    On a death the neighbours drop their edges and W becomes Metropolis–Hastings on what remains, so it is doubly stochastic
    again; likewise while a link is cut. Algorithms `restart` their memory at each such change. If a death leaves several
    parts, the largest goes on (of equals that of the lowest worker), and the others are lost; while a cut leaves several,
    each goes on alone.

    Args:
        events: of `Kill`, `Pause`, `Cut`, `Drop`; a single one may be given as it is.

    >>> import graphs
    >>> faults = Faults((Kill(2, round=10, back=30), Cut((0, 1), 20, 40)))
    >>> faults.changes(100), faults.alive(4, 10), faults.cut(25)
    ((10, 20, 30, 40), (0, 1, 3), frozenset({(0, 1)}))
    >>> remains(graphs.ring(4), faults.alive(4, 10)).schedule(0).to_dense().round(decimals=2).tolist()
    [[0.33, 0.33, 0.33], [0.33, 0.67, 0.0], [0.33, 0.0, 0.67]]
    """

    events: Any = ()

    def __post_init__(self) -> None:
        listed = isinstance(self.events, Sequence) and not isinstance(self.events, str)
        events = tuple(self.events) if listed else (self.events,)
        object.__setattr__(self, "events", events)
        for event in events:
            if not isinstance(event, Kill | Pause | Cut | Drop):
                raise ValueError(f"{event!r} is no fault: give gossip.faults.Kill, Pause, Cut or Drop")

    @property
    def kills(self) -> tuple[Kill, ...]:
        """The deaths."""
        return tuple(e for e in self.events if isinstance(e, Kill))

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """The pauses."""
        return tuple(e for e in self.events if isinstance(e, Pause))

    @property
    def loss(self) -> float:
        """The probability that a message is lost."""
        return 1 - math.prod(1 - e.p for e in self.events if isinstance(e, Drop))

    def alive(self, n: int, round: float) -> tuple[int, ...]:
        """Workers that live in a round, by the deaths that are given by round."""
        dead = {k.worker for k in self.kills if k.round is not None and k.round <= round < (k.back or math.inf)}
        return tuple(i for i in range(n) if i not in dead)

    def cut(self, round: float) -> frozenset[tuple[int, int]]:
        """Links (i, j), i < j, that carry nothing in a round."""
        cuts = [e for e in self.events if isinstance(e, Cut)]
        return frozenset((min(c.link), max(c.link)) for c in cuts if c.round <= round < c.until)

    def changes(self, rounds: int) -> tuple[int, ...]:
        """The rounds before `rounds` that begin with other workers or links than the one before."""
        at = {r for k in self.kills for r in (k.round, k.back)}
        at |= {r for e in self.events if isinstance(e, Cut) for r in (e.round, e.until)}
        return tuple(sorted(r for r in at if r is not None and 0 < r < rounds))

    def check(self, topology: Topology, algorithm: Algorithm, real: bool, rounds: float = math.inf) -> None:
        """Refuse what cannot happen: unknown workers and links, no time, an algorithm that cannot stand losses."""
        n = topology.n
        for event in self.events:
            _check_numbers(event, rounds)
        if topology.directed:
            raise Incompatible(
                "faults need an undirected topology, for W is rebuilt by Metropolis weights on what remains: choose one"
            )
        links = {(i, j) for i, j in topology.edge_index.T.tolist() if i < j}
        for event in self.events:
            if isinstance(event, Kill | Pause):
                if not 0 <= event.worker < n:
                    raise ValueError(f"{event} names worker {event.worker}, and the workers are 0…{n - 1}")
                if (event.round is None) == (event.seconds is None):
                    raise ValueError(f"{event} needs one time: round or seconds")
                if event.seconds is not None and not real:
                    raise ValueError(
                        f"{event} happens at seconds of real time, and all rows are here: give round, or launch=workers"
                    )
            if (
                isinstance(event, Kill)
                and event.back is not None
                and (event.round is None or event.round >= event.back)
            ):
                raise ValueError(f"{event} returns at round {event.back}: give the round of its death, before that")
            if isinstance(event, Pause) and not event.lasting > 0:
                raise ValueError(f"{event} lasts {event.lasting!r} s: give a positive number")
            if isinstance(event, Cut):
                if (min(event.link), max(event.link)) not in links:
                    raise ValueError(f"{event} cuts the link {tuple(event.link)}, which the topology does not have")
                if not 0 <= event.round < event.until:
                    raise ValueError(f"{event} must begin at round 0 or later, and before it ends")
            if isinstance(event, Drop) and not 0 <= event.p < 1:
                raise ValueError(f"{event} has p={event.p!r}, and a probability of loss lies in [0, 1)")
        for kill in self.kills:
            others = [k for k in self.kills if k is not kill and k.worker == kill.worker]
            if any(real or None in (k.round, kill.round) or _overlap(k, kill) for k in others):
                raise ValueError(
                    f"{kill} and {others[0]}: a worker dies a second time only in a simulation (launch=here), and after it has "
                    "come back; leave out one of them"
                )
        if len({k.worker for k in self.kills}) >= n:
            raise ValueError(f"the faults kill all {n} workers, and nothing would be left: spare one")
        if not algorithm.restarts and any(isinstance(e, Kill | Cut) for e in self.events):
            raise Incompatible(
                f"{type(algorithm).__name__} cannot go on after the loss of a worker or a link: use an algorithm that can "
                "restart, for example DPSGD"
            )


def _check_numbers(event: Fault, rounds: float) -> None:
    """What is no number of its kind, or beyond the run, would never happen, and nobody would notice."""
    for name in ("worker", "round", "back", "until"):
        value = getattr(event, name, None)
        if value is not None and (type(value) is not int or value < 0 and name != "worker"):
            raise ValueError(f"{event} has {name}={value!r}: give a whole number, at least 0")
        if value is not None and name in ("round", "back") and value >= rounds:
            raise ValueError(
                f"{event} has {name}={value}, and the run ends after {rounds} rounds, so that it would never happen: give an "
                "earlier round, or more rounds"
            )
    for name in ("seconds", "lasting", "p"):
        value = getattr(event, name, None)
        if value is not None and (isinstance(value, bool | str) or not 0 <= value < math.inf):
            raise ValueError(f"{event} has {name}={value!r}: give a number, at least 0")
    if isinstance(event, Cut):
        link = event.link
        if isinstance(link, str) or not isinstance(link, Sequence) or [type(i) for i in link] != [int, int]:
            raise ValueError(f"{event} has link={link!r}: give the two workers that it connects, for example [0, 1]")


def _overlap(one: Kill, other: Kill) -> bool:
    """Whether one is to die while it is dead by the other, or at once when it returns."""
    first, second = sorted((one, other), key=lambda k: k.round or 0)
    return first.back is None or first.back >= (second.round or 0)


def remains(
    topology: Topology,
    alive: tuple[int, ...],
    cut: frozenset[tuple[int, int]] = frozenset(),
    p: float = 0.0,
    seed: int = 0,
) -> Remains:
    """The workers that go on after deaths and cuts, and their doubly stochastic W."""
    parts = _induced(topology, alive, frozenset()).components
    part = max(parts, key=lambda part: (len(part), -part[0]))
    workers = tuple(alive[i] for i in part)
    W = metropolis(_induced(topology, workers, cut))
    schedule = lossy(p, W, seed) if p else as_schedule(W)
    return Remains(workers, schedule, tuple(tuple(alive[i] for i in each) for each in parts))


def _induced(topology: Topology, workers: tuple[int, ...], cut: frozenset[tuple[int, int]]) -> Topology:
    """The graph on these workers, numbered in order, without the links that are cut."""
    place = {w: i for i, w in enumerate(workers)}
    pairs = [(i, j) for i, j in topology.edge_index.T.tolist() if i < j and i in place and j in place]
    kept = [(place[i], place[j]) for i, j in pairs if (i, j) not in cut]
    if not kept:
        return Topology(len(workers), torch.empty(2, 0, dtype=torch.int64))
    return from_edges(kept, n=len(workers))
