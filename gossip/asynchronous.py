"""The asynchronous clock: every worker goes at its own pace, and an algorithm's maps are fired on the rows concerned.

AD-PSGD is D-PSGD under it (Lian et al. 2018, arXiv 1710.06952), SwarmSGD that with several local steps (Nadiradze et al.
2021, arXiv 1910.12308). Time is virtual, so a run is exact and repeatable, in one process or in many.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphs import Incompatible, Schedule

from . import checkpoint
from .algorithm import REMEDIES, Algorithm
from .algorithms.allreduce import AllReduce
from .compress import WarmUp
from .cost import Cost
from .events import HALF, PUSH, Event, EventQueue, Graph
from .meeting import Meeting
from .network import Network
from .optimizer import OptimizerFactory
from .placement import Placement
from .rows import Room, RowOptimizers, changed, gather, head, put, spread, write
from .transport import Transport

# Rows (k, d), their workers (k,) and local steps (k,) → gradients (k, d), or (gradients, losses (k,)).
Oracle = Callable[[Tensor, Tensor, Tensor], Any]

WINDOW = 8  # events planned at once, per worker
BATCH = 128  # gradients evaluated in one call; more are no faster
# W of (i, 0): the server's row gets what i sends, besides its own; i gets what the server's sends, in place of its own.
TO_SERVER = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
FROM_SERVER = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
MODES = ("synchronous", "asynchronous", "hybrid")


@dataclass(frozen=True)
class Asynchronous:
    """Gradients at the workers' own pace, and exchanges of two.

    .. math::
        x_i, x_j ← \\tfrac12 (x_i + x_j), \\qquad x_i ← x_i − η g_i(x_i^{\\text{when it was begun}})

    is an event of worker i under D-PSGD, with a neighbour j drawn uniformly. What the algorithm is decides how two meet: most
    average; one made for column-stochastic weights (SGP) pushes half of its mass to an out-neighbour, x_j += x_i/2,
    x_i ← x_i/2; AllReduce becomes a parameter server beside worker 0, which steps along g_i/n when g_i arrives, and whose
    model i fetches before its next gradient. CHOCO keeps the public copies apart for every neighbour.

    Events of two workers each, on graphs of m edges whose workers are all equally fast: E[x] ← (I − L/2m) x, if regular, and
    E‖x − x̄‖² shrinks at least by the factor 1 − λ₂(L)/2m. One worker s times slower: s (n − 1 + 1/s)/n times the gradients a
    synchronous run makes, if messages take no time.

    Args:
        geometric: draw the number of local steps geometrically, with mean `local_steps`, rather than make as many (SwarmSGD).
        adapt_first: apply the gradient before the two average, rather than after.
        wait: begin the next gradient when the answer is there, rather than at once; without, the gradient is applied first.
        bound: a worker may be at most so many steps ahead of the slowest (stale-synchronous); null: any number.
        groups: for the hybrid mode: workers of each group, or how many groups of consecutive workers. A group is synchronous
            inside; then one of its workers meets one outside.
        phases: modes by round, for example [[0, synchronous], [100, asynchronous]]; a round is n · local_steps gradients.
        waiting: (low, high): turn asynchronous when a barrier would waste a share of time above `high`, and back below `low`.
        weigh: of push-sum (SGP): multiply a worker's gradients by its weight w, so that its model z moves by η g however small
            w has become. Without it η h must stay below about 2 min w, and pushing halves can make w a thousandth; with it
            workers count by their mean w, which is 1 on regular graphs only.
        every_seconds: evaluate on a grid of virtual seconds, rather than of rounds.

    >>> Asynchronous(bound=-1)
    Traceback (most recent call last):
    ValueError: bound=-1 is below 0: a worker may be so many steps ahead of the slowest; null means any number
    """

    geometric: bool = False
    adapt_first: bool = False
    wait: bool = True
    bound: int | None = None
    groups: int | Sequence[Sequence[int]] | None = None
    phases: Sequence[Sequence[Any]] = ()
    waiting: Sequence[float] | None = None
    weigh: bool = True
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 0:
            raise ValueError(
                f"bound={self.bound} is below 0: a worker may be so many steps ahead of the slowest; null means any number"
            )
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ValueError(
                f"every_seconds={self.every_seconds} is not positive: give virtual seconds between evaluations"
            )
        for phase in self.phases:
            if len(phase) != 2 or phase[1] not in MODES or not isinstance(phase[0], int):
                raise ValueError(
                    f"phases={list(self.phases)}: each phase is [round, mode], with a mode of {', '.join(MODES)}"
                )
        if self.waiting is not None:
            if len(self.waiting) != 2 or not 0 <= self.waiting[0] <= self.waiting[1] <= 1:
                raise ValueError(
                    f"waiting={self.waiting}: give (low, high), shares of time with 0 ≤ low ≤ high ≤ 1; above high the run "
                    "turns asynchronous, below low synchronous"
                )
            if self.phases:
                raise ValueError("phases and waiting both say when to switch: give one of them")
        if self.groups is None and any(mode == "hybrid" for _, mode in self.phases):
            raise ValueError("phases name the mode hybrid, and groups=None: say which workers form a group")

    def start(self, algorithm: Algorithm, oracle: Oracle, schedule: Schedule, x: Tensor, **options: Any) -> "Run":
        """A run under this clock, see `Run`.

        >>> import graphs, gossip
        >>> b = torch.arange(4.0, dtype=torch.float64)[:, None]                  # f_i(x) = (x − b_i)²/2
        >>> gradient = lambda x, workers, steps: x - b[workers]
        >>> start = torch.zeros(4, 1, dtype=torch.float64)
        >>> run = Asynchronous().start(gossip.DPSGD(), gradient, graphs.as_schedule(graphs.ring(4)), start)
        >>> run.advance(updates=400)
        >>> run.queue.time, run.queue.steps, abs(float(run.models.mean()) - 1.5) < 0.1
        (100.0, [100, 100, 100, 100], True)
        """
        return Run(self, algorithm, oracle, schedule, x, **options)

    def mode(self, round: int, waiting: float, mode: str) -> str:
        """Which mode follows in a round, when a barrier would waste the share `waiting` of time; "" before the first."""
        loose = "asynchronous" if self.groups is None else "hybrid"
        if self.waiting is not None:
            low, high = self.waiting
            return "synchronous" if not mode or waiting < low else loose if waiting > high else mode
        return next((m for r, m in sorted(self.phases, key=lambda p: -p[0]) if r <= round), loose)

    def parted(self, n: int) -> tuple[tuple[int, ...], ...]:
        """The groups."""
        if self.groups is None:
            return ()
        if isinstance(self.groups, int):
            if not 1 <= self.groups <= n:
                raise ValueError(f"groups={self.groups} for n={n} workers: give 1 to {n} groups, or lists of workers")
            return tuple(tuple(g.tolist()) for g in torch.arange(n).tensor_split(self.groups))
        groups = tuple(tuple(group) for group in self.groups)
        if sorted(w for group in groups for w in group) != list(range(n)):
            raise ValueError(
                f"groups={[list(g) for g in groups]} do not hold each of the workers 0…{n - 1} exactly once"
            )
        return groups

    @property
    def _mixes_many(self) -> bool:
        """Whether more than two ever mix."""
        return self.groups is not None or self.waiting is not None or any(m != "asynchronous" for _, m in self.phases)

    def check(self, algorithm: Algorithm, schedule: Schedule, force: bool = False) -> None:
        """Raise `Incompatible` unless the algorithm can run under this clock on the schedule's graph; with `force`, warn."""
        try:
            self._check(algorithm, schedule)
        except Incompatible as reason:
            if not force:
                raise
            warnings.warn(f"forced although incompatible: {reason}", stacklevel=2)

    def _check(self, algorithm: Algorithm, schedule: Schedule) -> None:
        name, meet = type(algorithm).__name__, meeting(algorithm)
        if meet == "server":
            if self._mixes_many:
                raise Incompatible(
                    "AllReduce under the asynchronous clock is a parameter server, which has no groups and no synchronous "
                    "phases: leave out groups, phases and waiting; bound=0 makes it synchronous"
                )
            return
        compressor = getattr(algorithm, "compressor", None)
        while compressor is not None:
            if isinstance(compressor, WarmUp):
                raise Incompatible(
                    "WarmUp under the asynchronous clock, where two who meet have sent different numbers of messages and would "
                    f"expect other sizes: use {compressor.compressor} without it"
                )
            compressor = getattr(compressor, "compressor", None)
        graph = Graph(schedule)
        edges = {(i, j) for i, heard in enumerate(graph.neighbours) for j in heard}
        one_way = next((e for e in sorted(edges) if e[::-1] not in edges), None)
        if meet == "average" and one_way is not None:
            raise Incompatible(
                f"{name} under the asynchronous clock averages two workers, and {one_way[0]} → {one_way[1]} is an edge without "
                "a way back: use an undirected topology, or SGP, which pushes"
            )
        has = {"column_stochastic"} | (
            {"row_stochastic", "doubly_stochastic", "symmetric"} if meet == "average" else set()
        )
        if algorithm.memory and not (self._mixes_many and not schedule.static):
            has.add("static")  # each link has a memory of its own, for one W
        for needed in sorted(algorithm.requires - {"contractive"} - has):
            remedy = "use clock=lockstep, or DPSGD, SGP or Choco" if needed == "static" else REMEDIES[needed]
            raise Incompatible(
                f"{name} requires mixing that is {needed.replace('_', ' ')}, and under the asynchronous clock it is not: "
                f"{remedy}"
            )
        if (offence := schedule.offence("contractive")) is not None and "does not connect" in offence:
            raise Incompatible(f"{name} under the asynchronous clock needs a connected graph, and {offence}: add edges")
        if self._mixes_many:
            algorithm.check(schedule)


def meeting(algorithm: Algorithm) -> str:
    """How two workers meet under an algorithm: "average", "push" or "server".

    >>> import gossip
    >>> [meeting(algorithm) for algorithm in (gossip.DPSGD(), gossip.SGP(), gossip.AllReduce())]
    ['average', 'push', 'server']
    """
    if isinstance(algorithm, AllReduce):
        return "server"
    pushes = "column_stochastic" in algorithm.requires and "doubly_stochastic" not in algorithm.requires
    return "push" if pushes else "average"


def message_bytes(algorithm: Algorithm, x: Tensor) -> float:
    """Bytes of one message of an algorithm whose model is the row x (d,), by sending one.

    >>> import gossip
    >>> message_bytes(gossip.DPSGD(), torch.zeros(10)), message_bytes(gossip.SGP(), torch.zeros(10))
    (40.0, 44.0)
    """
    from graphs import static

    if isinstance(algorithm, AllReduce):
        return float(x.numel() * x.element_size())
    pair = torch.full((2, 2), 0.5, dtype=torch.float64)
    net = Network(static(pair))
    algorithm.communicate(algorithm.init(x.expand(2, -1).clone()), net)
    return int(net.meter.bits[0]) / 8


class Server(NamedTuple):
    """x: the models as the workers fetched them; s: the server's, in worker 0's row; opt: its optimizer."""

    x: Tensor
    s: Tensor
    opt: Any


class Progress(NamedTuple):
    """state: the algorithm's; gradients, due: those computed and not applied yet, and their losses; losses: the last applied."""

    state: Any
    gradients: Tensor
    due: Tensor
    losses: Tensor


class Run:
    """An asynchronous run, in this process or in many: all of them know the same events and meet in their order.

    Gradients are evaluated when the first of them is needed, then for all workers that have begun one: where they were begun
    is known. Events that concern different workers are carried out together; that is the order of their times, as they
    commute.

    Args:
        clock: the options.
        oracle: (x (k, d), workers (k,), steps (k,)) → gradients (k, d), or (gradients, losses).
        schedule: whose edges say who may meet whom; its W is that of groups and of synchronous phases.
        x: the hosted workers' start (m, d); taken over.
        cost: seconds of gradients and messages; every gradient one second and messages none if None.
        seed: of the neighbours that are drawn, and of what compressors draw.
        local_steps: gradients between a worker's exchanges.
        placement, transport: see `gossip.Network`.

    Attributes:
        queue: who meets whom and when; its `time`, `updates`, `steps`, `idle`, `staleness`.
        net: the network, with its meter.
        progress: the hosted workers' state.
    """

    def __init__(
        self,
        clock: Asynchronous,
        algorithm: Algorithm,
        oracle: Oracle,
        schedule: Schedule,
        x: Tensor,
        *,
        cost: Cost | None = None,
        seed: int = 0,
        local_steps: int = 1,
        placement: Placement | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.algorithm, self.oracle, self.meet = algorithm, oracle, meeting(algorithm)
        self._weigh = clock.weigh and self.meet == "push"
        groups = clock.parted(schedule.n)
        self.net = Meeting(schedule, placement, transport, seed)
        self.graph = Graph(schedule, groups, self.meet == "push")
        self.queue = EventQueue(
            self.graph,
            cost or Cost(),
            seed,
            meet=self.meet,
            local_steps=local_steps,
            geometric=clock.geometric,
            adapt_first=clock.adapt_first,
            wait=clock.wait,
            bound=clock.bound,
            size=message_bytes(algorithm, x[0]),
            modes=clock.mode,
        )
        self.workers = self.net.placement.rows
        self._at = [-1] * schedule.n  # a worker's row here
        for row, w in enumerate(self.workers.tolist()):
            self._at[w] = row
        m = len(x)
        self._memory = algorithm.memory
        self._slots = 2 + max(map(len, self.graph.neighbours))  # one for each neighbour, the group, and all
        if self.meet == "server":
            factory: OptimizerFactory = getattr(algorithm, "optimizer")  # noqa: B009
            state: Any = Server(x, x.clone(), RowOptimizers(factory, x))
        else:
            state = spread(algorithm.init(x), self._slots, self._memory)
        unknown = torch.full((m,), math.nan, dtype=torch.float64)
        self.progress = Progress(state, torch.zeros_like(x), unknown, unknown.clone())
        self._counts = [0] * m  # local steps made
        self._where = self._models(state).clone()  # where gradients were begun that are not evaluated yet, and …
        self._begun = dict.fromkeys(range(m))  # … by which rows, in this order
        self._room, self._meetings = Room(), 0
        row_bytes = x[0].numel() * x.element_size()
        self._together = max(1, (768 << 10) // row_bytes)  # events carried out together: what stays in the cache
        self._window = WINDOW * max(8, schedule.n)

    @property
    def models(self) -> Tensor:
        """The hosted workers' models (m, d), a live view."""
        return self._models(self.progress.state)

    def _models(self, state: Any) -> Tensor:
        return state.x if self.meet == "server" else self.algorithm.params(state)

    def advance(self, updates: float = math.inf, seconds: float = math.inf) -> None:
        """Go on until so many gradients have been applied by all, or nothing more happens up to a virtual time."""
        if updates == seconds == math.inf:
            raise ValueError(
                "updates and seconds are both infinite: an asynchronous run has no end of its own, so give one"
            )
        queue = self.queue
        planned: list[Event] = []  # has happened and was not carried out yet
        more = True
        while more:
            while (more := queue.updates < updates and queue.next_time <= seconds) and len(planned) < self._window:
                planned += queue.advance()
            planned = self._carry_out(planned, rest=more)
        self.net.leave()

    def table(self, round: int = 0) -> dict[str, Any]:
        """A checkpoint, see `gossip.checkpoint`: all workers' rows, gradients on their way, and the event queue."""
        if self._begun:
            self._evaluate()
        return checkpoint.table(self.progress, self.net, round) | {"trace": self.queue.state_dict()}

    def restore(self, table: dict[str, Any]) -> int:
        """Go on from a checkpoint, in whatever placement; returns its round."""
        if "trace" not in table:
            raise ValueError(
                "the checkpoint was saved by a synchronous run, which has no event queue: resume it with clock=lockstep"
            )
        round = checkpoint.restore(table, self.progress, self.net)
        self.queue.load_state_dict(table["trace"])
        self._counts = [self.queue.steps[w] for w in self.workers.tolist()]
        self._begun.clear()
        return round

    # -- what may be done together ---------------------------------------------------------------------------------

    def _turns(self, events: list[Event]) -> list[dict[tuple, list[Event]]]:
        """Events in an order that their workers cannot tell from that of their times: turns of waves of disjoint workers.

        The first turn needs no gradient that is begun in these events, the second only such as are begun in the first, and
        so on: gradients are evaluated once a turn, as many at a time as possible.
        """
        n = self.graph.n
        turn, level, needs = [0] * (n + 1), [-1] * (n + 1), [0] * n  # the server is n
        server = {n} if self.meet == "server" else set()
        turns: list[dict[tuple, list[Event]]] = []
        for event in events:
            concerned = {*event.rows, *event.steps, *event.begins} | server
            now = 0
            for w in concerned:
                now = max(now, turn[w])
            for w in event.steps:
                now = max(now, needs[w])
            depth = 1 + max([level[w] for w in concerned if turn[w] == now], default=-1)
            for w in concerned:
                turn[w], level[w] = now, depth
            for w in event.begins:
                needs[w] = now + 1
            if now == len(turns):
                turns.append({})
            kind = depth, bool(event.rows), bool(event.steps), event.first
            turns[now].setdefault(kind, []).append(event)
        return turns

    def _carry_out(self, events: list[Event], rest: bool) -> list[Event]:
        """Carry out the events; if a `rest` may be left for later, only about the first half, in full turns; returns it."""
        done, size = 0, self._together
        turns = self._turns(events)
        for number, turn in enumerate(turns):
            if rest and 2 * done > len(events):
                left = [event for later in turns[number:] for wave in later.values() for event in wave]
                return sorted(left, key=lambda event: event.number)
            for _, wave in sorted(turn.items()):
                for i in range(0, len(wave), size):
                    self._fire(wave[i : i + size])
                done += len(wave)
        return []

    # -- carrying out ----------------------------------------------------------------------------------------------

    def _fire(self, wave: list[Event]) -> None:
        """Events of one kind whose workers are disjoint."""
        if self.meet == "server":
            for event in wave:
                if event.steps:
                    self._push_gradient(event)
                else:
                    self._fetch(event)
            return
        self._meetings += 1
        mixes, first = bool(wave[0].rows), wave[0].first
        pairs = HALF if self.meet == "average" else PUSH
        if mixes and all(e.link and e.link[0] in ("pair", "push") for e in wave):
            workers = [e.rows[0] for e in wave] + [e.rows[1] for e in wave]
        else:
            pairs, workers = None, list(dict.fromkeys([w for e in wave for w in (*e.steps, *e.rows, *e.begins)]))
        here = workers if self.net.placement.alone else [w for w in workers if self._at[w] >= 0]
        if not here:
            return
        p, at = self.progress, self._at
        index = torch.tensor([at[w] for w in here])
        stepping = sum(at[w] >= 0 for e in wave for w in e.steps)  # they come first
        beginning = {w for e in wave for w in e.begins}
        begins = [i for i, w in enumerate(here) if w in beginning]
        if not mixes and not stepping:
            self._begin(index, self.models.index_select(0, index))
            return
        slots = self._places(wave, here) if mixes and self._memory else None
        part = gather(p.state, index, self._room, self._memory, slots)
        if stepping and (first or not mixes):
            self._compute(part, index[:stepping])
        if mixes:
            place = {w: i for i, w in enumerate(workers)}
            number = {w: e.number for e in wave for w in e.rows}
            weights = [(self.graph.weights(e.link), [place[w] for w in e.rows]) for e in wave if e.link]
            self.net.enter(self._meetings, workers, weights, [number[w] for w in workers], pairs)
            part = self.algorithm.communicate(part, self.net)
        if stepping and mixes and not first:
            self._compute(part, index[:stepping])
        put(p.state, index, part, self._memory, slots)
        if begins:
            models = self.algorithm.params(part)
            if begins[-1] == len(begins) - 1:
                self._begin(index[: len(begins)], models[: len(begins)])
            else:
                some = torch.tensor(begins)
                self._begin(index[some], models[some])

    def _begin(self, rows: Tensor, models: Tensor) -> None:
        """These rows begin a gradient, at these models."""
        q = len(self._begun)
        self._where[q : q + len(rows)] = models
        self._begun.update(dict.fromkeys(rows.tolist()))

    def _compute(self, part: Any, rows: Tensor) -> None:
        """The algorithm's local work on the first rows of a gathered state, with the gradients that they began."""
        g = self._gradients(rows)
        some = head(part, len(rows))
        if self._weigh:
            g = g * some.w
        changed(some, self.algorithm.compute(some, lambda x: g))

    def _gradients(self, rows: Tensor) -> Tensor:
        """The gradients that these rows began; all that are begun are evaluated if one of them is not."""
        which = rows.tolist()
        if any(row in self._begun for row in which):
            self._evaluate()
        for row in which:
            self._counts[row] += 1
        self.progress.losses[rows] = self.progress.due[rows]
        return self._room.select("(gradients)", self.progress.gradients, rows)

    def _evaluate(self) -> None:
        """The gradients of all who have begun one."""
        p, which = self.progress, torch.tensor(list(self._begun))
        steps = torch.tensor(self._counts)[which]
        for x, rows, step in zip(self._where[: len(which)].split(BATCH), which.split(BATCH), steps.split(BATCH)):
            with torch.enable_grad():  # the task may use autograd
                found = self.oracle(x, self.workers[rows], step)
            g, losses = found if isinstance(found, tuple) else (found, None)
            write(p.gradients, rows, g.detach())
            if losses is not None:
                p.due[rows] = losses.detach().to(p.due)
        self._begun.clear()

    def _places(self, wave: list[Event], here: list[int]) -> Tensor:
        """Where each row's memory of its link lies."""
        place = {}
        for e in wave:
            if e.link and e.link[0] in ("pair", "push"):
                _, i, j = e.link
                place[i], place[j] = self.graph.neighbours[i].index(j), self.graph.neighbours[j].index(i)
            elif e.link:
                place |= dict.fromkeys(e.rows, self._slots - (1 if e.link[0] == "all" else 2))
        return torch.tensor([place[w] for w in here])

    # -- the parameter server --------------------------------------------------------------------------------------

    def _push_gradient(self, event: Event) -> None:
        """The server steps along g_i/n."""
        (i,) = event.steps
        at, beside = self._at[i], self._at[0]
        self._meetings += 1
        if at < 0 and beside < 0:
            return
        p = self.progress
        g = self._gradients(torch.tensor([at])) if at >= 0 else None
        if i:
            self.net.enter(self._meetings, (i, 0), [(TO_SERVER, (0, 1))], [event.number] * 2)
            message = p.gradients.new_zeros(len(self.net.rows), p.gradients.shape[1])
            if g is not None:
                message[:1] = g
            into = torch.zeros_like(message)
            self.net.send(message)
            self.net.receive(into)
            g = into[-1:]
        if beside >= 0 and g is not None:
            p.state.opt.at(torch.tensor([beside])).step(p.state.s[beside : beside + 1], g / self.graph.n)

    def _fetch(self, event: Event) -> None:
        """Workers begin at the server's model."""
        p, beside = self.progress, self._at[0]
        for i in event.begins:
            at = self._at[i]
            self._meetings += 1
            if at < 0 and beside < 0:
                continue
            if i == 0:
                p.state.x[at] = p.state.s[beside]
            else:
                self.net.enter(self._meetings, (i, 0), [(FROM_SERVER, (0, 1))], [event.number] * 2)
                rows = [p.state.x[at : at + 1]] * (at >= 0) + [p.state.s[beside : beside + 1]] * (beside >= 0)
                message = torch.cat(rows)
                self.net.mix(message)
                if at >= 0:
                    p.state.x[at] = message[0]
            if at >= 0:
                self._begin(torch.tensor([at]), p.state.x[at : at + 1])
