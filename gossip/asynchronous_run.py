"""A run under the asynchronous clock: its events are carried out, on the rows concerned and as many at a time as possible."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checkpoint
from .algorithm import Algorithm
from .compress.payload import naming
from .events import HALF, PUSH, Event, EventQueue
from .lockstep import checked_gradient
from .meeting import Meeting
from .optimizer import OptimizerFactory
from .rows import RowBuffers, RowOptimizers, changed, gather, head, put, spread, write

# Rows (k, d), their workers (k,) and local steps (k,) → gradients (k, d), or (gradients, losses (k,)).
WorkerGradient = Callable[[Tensor, Tensor, Tensor], Any]

WINDOW = 8  # events planned at once, per worker
BATCH = 128  # gradients evaluated in one call; more are no faster
# W of (i, 0): the server's row gets what i sends, besides its own; i gets what the server's sends, in place of its own.
TO_SERVER = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
FROM_SERVER = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)


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


class AsynchronousRun:
    """An asynchronous run, in this process or in many: all of them know the same events and meet in their order.

    Gradients are evaluated when the first of them is needed, then for all workers that have begun one: where they were begun
    is known. Events that concern different workers are carried out together; that is the order of their times, as they
    commute.

    Args:
        gradient: (x (k, d), workers (k,), steps (k,)) → gradients (k, d), or (gradients, losses).
        queue: who meets whom, and when.
        net: the network of those who meet.
        x: the hosted workers' start (m, d); taken over.
        weigh: multiply a worker's gradients by its push-sum weight.

    Attributes:
        queue: its `time`, `updates`, `steps`, `idle`, `staleness`.
        net: the network, with its meter.
        progress: the hosted workers' state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        gradient: WorkerGradient,
        queue: EventQueue,
        net: Meeting,
        x: Tensor,
        weigh: bool = False,
    ) -> None:
        self.algorithm, self.gradient, self.queue, self.net = algorithm, gradient, queue, net
        self.graph, self.meet, self._weigh = queue.graph, queue.meet, weigh
        self.workers = self.net.placement.rows
        self._at = [-1] * self.graph.n  # a worker's row here
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
        self._buffers, self._meetings = RowBuffers(), 0
        row_bytes = x[0].numel() * x.element_size()
        self._together = max(1, (768 << 10) // row_bytes)  # events carried out together: what stays in the cache
        self._window = WINDOW * max(8, self.graph.n)

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
        part = gather(p.state, index, self._buffers, self._memory, slots)
        if stepping and (first or not mixes):
            self._compute(part, index[:stepping])
        if mixes:
            place = {w: i for i, w in enumerate(workers)}
            number = {w: e.number for e in wave for w in e.rows}
            weights = [(self.graph.weights(e.link), [place[w] for w in e.rows]) for e in wave if e.link]
            self.net.enter(self._meetings, workers, weights, [number[w] for w in workers], pairs)
            with naming(self.net.rows):
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
        return self._buffers.select("(gradients)", self.progress.gradients, rows)

    def _evaluate(self) -> None:
        """The gradients of all who have begun one."""
        p, which = self.progress, torch.tensor(list(self._begun))
        steps = torch.tensor(self._counts)[which]
        for x, rows, step in zip(self._where[: len(which)].split(BATCH), which.split(BATCH), steps.split(BATCH)):
            with torch.enable_grad():  # the task may use autograd
                found = self.gradient(x, self.workers[rows], step)
            g, losses = found if isinstance(found, tuple) else (found, None)
            write(p.gradients, rows, checked_gradient(g, x).detach())
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
