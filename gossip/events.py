"""Who meets whom, and when: the events of an asynchronous run in virtual time, a pure function of seed, graph and cost."""

import copy
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from graphs import Schedule

from . import rng
from .cost import Cost

BLOCK = 64  # local steps of a worker that are drawn at once
# A gradient is done; messages have met; a group's delegate has met; an answer is back.
DUE, MEET, PASS, BEGIN = range(4)

HALF = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)  # (i, j) average
PUSH = torch.tensor([[0.5, 0.0], [0.5, 1.0]], dtype=torch.float64)  # i hands half of its mass to j


class Event(NamedTuple):
    """At `time`, `rows` mix by the link's W, `steps` apply their gradients, and `begins` start their next.

    A gradient is taken where its worker's model was at `begins`; it is applied before the mixing if `first`, else after.
    `link` names the W, and the memory of what passed along it: ("pair", i, j), ("push", i, j), ("group", number),
    ("all", round) or ("server", i).
    """

    number: int
    time: float
    rows: tuple[int, ...] = ()
    link: tuple | None = None
    steps: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    first: bool = False


class Graph:
    """What the events need of a schedule: who hears whom, and the W of a round, a group or a pair.

    Args:
        schedule: the mixing matrices; whoever hears j in any of its rounds is a neighbour of j.
        groups: of the hybrid mode.
        by_columns: a group's members keep what they would send outside, rather than give their neighbours' weight to themselves.
    """

    def __init__(self, schedule: Schedule, groups: tuple[tuple[int, ...], ...] = (), by_columns: bool = False) -> None:
        self.schedule, self.n, self.groups = schedule, schedule.n, groups
        hear: list[set[int]] = [set() for _ in range(self.n)]
        for k in schedule.rounds:
            W = schedule(k)
            W = (W if W.is_sparse else W.to_sparse_coo()).coalesce()
            for (i, j), w in zip(W.indices().T.tolist(), W.values().tolist()):
                if i != j and w:
                    hear[j].add(i)
        self.neighbours = [sorted(h) for h in hear]
        self._within = [self._inside(group, by_columns) for group in groups]

    def weights(self, link: tuple) -> Tensor:
        """The W of a link, over the workers that mix by it."""
        kind, number = link[:2]
        if kind in ("pair", "push"):
            return HALF if kind == "pair" else PUSH
        return self._within[number] if kind == "group" else self.schedule(number)

    def _inside(self, group: tuple[int, ...], by_columns: bool) -> Tensor:
        W = self.schedule(0).to_dense().double()[list(group)][:, list(group)]
        return W + torch.diag(1 - W.sum(0 if by_columns else 1))


class EventQueue:
    """The events in the order of their times.

    A worker computes a gradient for `cost.compute` seconds. At the last of its local steps it asks a neighbour, drawn
    uniformly: the two average when its message has arrived (or it pushes half of its mass), and it goes on when the answer
    is back. In a group of several, all wait for the last, then mix by W among themselves, and one of them averages with a
    worker outside, over an edge drawn uniformly from those that leave the group.

    Args:
        graph: who may meet whom.
        cost: seconds of gradients and messages.
        seed: of the neighbours that are drawn, and of how many local steps if `geometric`.
        meet: "average", "push", or "server": worker i sends its gradient to the server, beside worker 0, and fetches the model.
        local_steps, geometric: gradients between exchanges: so many, or that in the mean, drawn geometrically.
        adapt_first: apply the gradient before the two average.
        wait: for the answer, before the next gradient is begun.
        bound: how many steps a worker (or group) may be ahead of the slowest worker.
        size: bytes of a message.
        modes: (round, share of time that a barrier would waste, mode) → mode: "synchronous" (all are one group),
            "asynchronous" (each is a group), or "hybrid" (the graph's groups). Asked once a round: n · local_steps gradients.

    Attributes:
        time: virtual seconds.
        updates: gradients applied by all; `steps`: by each worker.
        idle: virtual seconds that each worker did not compute: it waited for slower ones, or for answers.
        staleness: how many gradients others applied while one was computed → how often that was so.
        mode: the current one.

    >>> import graphs
    >>> queue = EventQueue(Graph(graphs.as_schedule(graphs.path(2))), Cost())  # gradients take 1 s, messages none
    >>> for _ in range(2):
    ...     for event in queue.advance():
    ...         print(event.number, event.time, event.rows, event.steps, event.begins)
    0 1.0 (0, 1) (0,) (0,)
    1 1.0 (1, 0) (1,) (1,)
    >>> queue.staleness                                               # worker 0 had applied one while 1 computed
    {0: 1, 1: 1}
    """

    PLAIN = (
        *("time", "updates", "steps", "idle", "staleness", "mode", "_queue", "_pushed", "_number", "_round", "_rounds"),
        *("_fired", "_read", "_done", "_waits", "_blocked", "_busy", "_pace", "_least", "_counts"),
    )

    def __init__(
        self,
        graph: Graph,
        cost: Cost,
        seed: int = 0,
        *,
        meet: str = "average",
        local_steps: int = 1,
        geometric: bool = False,
        adapt_first: bool = False,
        wait: bool = True,
        bound: int | None = None,
        size: float = 0.0,
        modes: Callable[[int, float, str], str] = lambda round, waiting, mode: mode or "asynchronous",
    ) -> None:
        n = graph.n
        if meet == "server":
            pairs = [(i, 0) for i in range(1, n)]
        else:
            pairs = [(i, j) for i, heard in enumerate(graph.neighbours) for j in heard]
        source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        cost.links.refuse_gaps(source, target)
        if meet != "push":
            cost.links.refuse_gaps(target, source)
        self.graph, self.cost, self.seed, self.meet, self.modes = graph, cost, seed, meet, modes
        self.local_steps, self.geometric, self.adapt_first = local_steps, geometric, adapt_first
        self.wait, self.bound, self.size = wait, bound, size
        self.time, self.updates = 0.0, 0
        self.steps, self.idle = [0] * n, [0.0] * n
        self.staleness: dict[int, int] = {}
        self._queue: list[tuple] = []
        self._pushed = self._number = self._round = self._rounds = 0
        self._fired = [0] * n  # exchanges of each worker's group
        self._read = [0] * n  # gradients applied by all when its current one was begun
        self._done = [0.0] * n  # when its last one was done
        self._waits = [False] * n  # at the barrier of its group
        self._blocked: list[int] = []  # too far ahead
        self._busy, self._pace = [0.0] * n, [0.0] * n  # seconds of the current gradient, and smoothed over all
        self._least, self._counts = 0, {0: n}  # steps of the slowest; how many workers have made how many steps
        self._drawn: list[tuple[int, list, list]] = [(-1, [], [])] * n
        self._seconds: dict[tuple[int, int], float] = {}
        self._out: list[Event] = []
        self.mode = ""
        self._arrange(modes(0, 0.0, ""))
        for i in range(n):
            self._start(i)

    @property
    def next_time(self) -> float:
        """When something happens next."""
        return self._queue[0][0]

    def advance(self) -> list[Event]:
        """Let the next thing happen; returns the events that it causes, all at one time."""
        self.time, _, kind, who, link = heapq.heappop(self._queue)
        self._out = []
        if kind == DUE:
            self._due(who[0])
        elif kind == MEET:
            self._met(who[0], link)
        elif kind == PASS:
            self._passed(who, link)
        else:
            self._emit(begins=self._begin(who))
        return self._out

    def state_dict(self) -> dict[str, Any]:
        """The event queue and all counts, in plain Python types."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.PLAIN}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name in self.PLAIN:
            setattr(self, name, copy.deepcopy(state[name]))
        self._drawn = [(-1, [], [])] * self.graph.n
        self._arrange(self.mode)

    # -- what happens ----------------------------------------------------------------------------------------------

    def _due(self, i: int) -> None:
        """A gradient of i is done."""
        self._done[i] = self.time
        self._pace[i] = 0.5 * (self._pace[i] + self._busy[i]) if self._pace[i] else self._busy[i]
        if self.meet != "server" and not self._exchanges(i):
            self._apply((i,))
            self._emit(steps=(i,), begins=self._begin((i,)))
            self._release()
        else:
            self._waits[i] = True
            self._fire(self.groups[self._group[i]])
        round = self.updates // (self.graph.n * self.local_steps)
        if round > self._round:
            self._round, top = round, max(self._pace)
            mode = self.modes(round, 1 - sum(self._pace) / len(self._pace) / top if top else 0.0, self.mode)
            if mode != self.mode:
                self._arrange(mode)
                for group in self.groups:
                    self._fire(group)
                self._release()

    def _fire(self, group: tuple[int, ...]) -> None:
        """If all of a group are done, they exchange."""
        if not all(self._waits[w] for w in group):
            return
        i = group[0]
        for w in group:
            self._waits[w] = False
            self._fired[w] += 1
        if len(group) > 1 or self.mode == "synchronous":
            link = ("group", self._group[i])
            if self.mode == "synchronous":
                link, self._rounds = ("all", self._rounds), self._rounds + 1
            self._later(self._barrier(group), PASS, group, link)
        elif self.meet == "server":
            self._later(self._message(i, 0), MEET, group, ("server", i))
        else:
            choices = self.graph.neighbours[i]
            j = choices[int(self._draw(i)[1] * len(choices))] if choices else i
            link = ("pair" if self.meet == "average" else "push", i, j)
            if not self.wait:
                self._apply(group)
                self._emit(steps=group, begins=self._begin(group))
                self._release()
            self._later(self._message(i, j), MEET, group, link)

    def _met(self, i: int, link: tuple) -> None:
        """The message of i has arrived at whom it asked."""
        if link[0] == "server":
            self._apply((i,))
            self._emit(rows=(i,), link=link, steps=(i,))
            self._emit(begins=self._begin((i,)))
            self._release()
            return
        j = link[2]
        rows = (i, j) if i != j else ()
        if not self.wait:
            self._emit(rows=rows, link=link)
            return
        self._apply((i,))
        back = self._message(j, i) if link[0] == "pair" else 0.0
        begins = () if back else self._begin((i,))
        self._emit(rows=rows, link=link, steps=(i,), begins=begins, first=self.adapt_first)
        if back:
            self._push(back, BEGIN, (i,), None)
        self._release()

    def _passed(self, group: tuple[int, ...], link: tuple) -> None:
        """The messages within a group have arrived, or that of its delegate to a worker outside."""
        if link[0] in ("pair", "push"):
            self._emit(rows=link[1:], link=link)
            self._later(self._message(link[2], link[1]) if link[0] == "pair" else 0.0, BEGIN, group, None)
            return
        self._apply(group)
        out = self._leaving[link[1]] if link[0] == "group" else []
        self._emit(rows=group, link=link, steps=group, begins=() if out else self._begin(group), first=True)
        if out:
            key = rng.key(self.seed, "delegate", torch.tensor(group[:1]), self._fired[group[0]])
            a, b = out[int(float(rng.uniform(key, 1)) * len(out))]
            self._later(self._message(a, b), PASS, group, ("pair" if self.meet == "average" else "push", a, b))
        self._release()

    def _apply(self, workers: tuple[int, ...]) -> None:
        """Book the gradients of some workers, applied at once."""
        for w in workers:
            stale = self.updates - self._read[w]
            self.staleness[stale] = self.staleness.get(stale, 0) + 1
            count = self.steps[w]
            self.steps[w] = count + 1
            self._counts[count] -= 1
            self._counts[count + 1] = self._counts.get(count + 1, 0) + 1
        while not self._counts.get(self._least):
            self._counts.pop(self._least, None)
            self._least += 1
        self.updates += len(workers)

    def _begin(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Those of some workers who start their next gradient now; the others are too far ahead and wait."""
        if self.bound is None:
            able = workers
        else:
            able = tuple(w for w in workers if not self._ahead(w))
            self._blocked += [w for w in workers if w not in able]
        for w in able:
            self._start(w)
        return able

    def _ahead(self, w: int) -> bool:
        """Whether a worker's whole group is: a barrier never waits for one who waits for the barrier."""
        return min(self.steps[v] for v in self.groups[self._group[w]]) - self._least > (self.bound or 0)

    def _release(self) -> None:
        """Let go those who waited for the slowest."""
        waiting, self._blocked = tuple(self._blocked), []
        if waiting and (begins := self._begin(waiting)):
            self._emit(begins=begins)

    def _start(self, w: int) -> None:
        fetch = self._message(0, w) if self.meet == "server" and self.steps[w] else 0.0
        self.idle[w] += self.time - self._done[w] + fetch
        self._read[w], self._busy[w] = self.updates, self._draw(w)[0]
        self._push(fetch + self._busy[w], DUE, (w,), None)

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def _arrange(self, mode: str) -> None:
        """Who waits for whom from now on."""
        n = self.graph.n
        self.mode = mode
        self.groups: tuple[tuple[int, ...], ...] = {
            "synchronous": (tuple(range(n)),),
            "asynchronous": tuple((i,) for i in range(n)),
            "hybrid": self.graph.groups,
        }[mode]
        self._group = [0] * n
        for number, group in enumerate(self.groups):
            for w in group:
                self._group[w] = number
        edges = [(a, b) for a in range(n) for b in self.graph.neighbours[a]]
        self._leaving: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        for a, b in edges:
            if self._group[a] != self._group[b]:
                self._leaving[self._group[a]].append((a, b))
        self._barriers: dict[tuple[int, ...], float] = {}

    def _barrier(self, group: tuple[int, ...]) -> float:
        """Seconds in which all messages within a group arrive."""
        if group not in self._barriers:
            members = set(group)
            pairs = [(a, b) for a in group for b in self.graph.neighbours[a] if b in members]
            self._barriers[group] = max((self._message(a, b) for a, b in pairs), default=0.0)
        return self._barriers[group]

    def _exchanges(self, i: int) -> bool:
        """Whether the current local step of i is the last before an exchange."""
        if self.geometric:
            return self._draw(i)[2] * self.local_steps < 1
        return (self.steps[i] + 1) % self.local_steps == 0

    def _draw(self, i: int) -> tuple[float, float, float]:
        """Seconds of the current gradient of i, and two numbers in [0, 1): for the neighbour, and for whether to ask one."""
        block, place = divmod(self.steps[i], BLOCK)
        held = self._drawn[i]
        if held[0] != block:
            steps = torch.arange(block * BLOCK, (block + 1) * BLOCK)
            workers = torch.full_like(steps, i)
            u = rng.uniform(rng.key(self.seed, "meeting", workers, steps), 2)
            held = self._drawn[i] = (block, self.cost.compute(workers, steps).tolist(), u.tolist())
        return held[1][place], *held[2][place]

    def _message(self, source: int, target: int) -> float:
        if source == target:
            return 0.0
        if (source, target) not in self._seconds:
            self._seconds[source, target] = float(self.cost.message(source, target, self.size))
        return self._seconds[source, target]

    def _later(self, delay: float, kind: int, who: tuple[int, ...], link: tuple | None) -> None:
        """After a delay; at once if there is none."""
        if delay > 0:
            self._push(delay, kind, who, link)
        elif kind == BEGIN:
            self._emit(begins=self._begin(who))
        elif kind == MEET:
            self._met(who[0], cast("tuple", link))
        else:
            self._passed(who, cast("tuple", link))

    def _push(self, delay: float, kind: int, who: tuple[int, ...], link: tuple | None) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (self.time + delay, self._pushed, kind, who, link))

    def _emit(self, **parts: Any) -> None:
        event = Event(self._number, self.time, **parts)
        if event.rows or event.steps or event.begins:
            self._number += 1
            self._out.append(event)
