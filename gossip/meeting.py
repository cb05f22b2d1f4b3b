"""The network of those who meet: a `Network` whose rows and W are only the workers of some simultaneous events."""

import copy
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from graphs import Incompatible, Schedule

from . import rng
from .events import PUSH
from .network import Network
from .placement import Placement
from .plan import Edges, Plan
from .transport import Transport
from .wire import CHUNK, row_bits, spec

PLANS = 256  # compiled meetings that are kept


class Part(NamedTuple):
    """The workers who meet, as a placement of their own: what a `Plan` needs to know."""

    n: int
    rank: int
    owner: Tensor
    rows: Tensor
    blocks: range
    alone: bool


class Meeting(Network):
    """A network in which each call of `enter` brings some workers together.

    Workers in other processes are reached point to point; a process that hosts none of those who meet takes no part.
    Every process must enter the same meetings in the same order.

    >>> import graphs
    >>> from gossip.events import HALF
    >>> net, x = Meeting(graphs.as_schedule(graphs.ring(8))), torch.tensor([[1.0], [3.0]])
    >>> net.enter(0, (5, 4), [(HALF, (0, 1))], events=(0, 0))
    >>> net.mix(x)
    >>> net.leave()
    >>> x.tolist(), net.meter.bits.tolist()
    ([[2.0], [2.0]], [0, 0, 0, 0, 32, 32, 0, 0])
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement | None = None,
        transport: Transport | None = None,
        seed: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        self._traffic: dict[int, list[tuple[int, int]]] = defaultdict(list)  # bits of a message → who sent one to whom
        self._held: deque[list[Tensor]] = deque(maxlen=2 * PLANS)
        super().__init__(schedule, placement, transport, seed, chunk)

    def enter(
        self,
        number: int,
        workers: Sequence[int],
        weights: Sequence[tuple[Tensor, Sequence[int]]],
        events: Sequence[int],
        pairs: Tensor | None = None,
    ) -> None:
        """The meeting number `number`.

        Args:
            workers: who takes part; the hosted ones among them are the rows of messages, in this order.
            weights: (W, places) of each group that mixes: rows and columns of W are `workers[p]` for p in places.
            events: the number of each worker's event, from which its randomness is drawn.
            pairs: the W of all groups, if they are pairs of a worker in the first half and the one so far in the second.
        """
        self.round, self._draws, self._sequence = number, 0, 0
        self._workers, self._weights, self._events, self._pairs = workers, weights, events, pairs
        everyone = torch.tensor(workers)
        self.rows = everyone if self.placement.alone else everyone[self._here(everyone)]
        self._everyone, self._plan = everyone, None

    def leave(self) -> None:
        """All hosted workers are the rows again, and the meter is up to date."""
        self.rows = self.placement.rows
        for bits, pairs in self._traffic.items():
            source, target = torch.tensor(pairs).T
            self.meter.record(Edges(source, target, torch.ones_like(source)), bits)
        self._traffic.clear()

    @property
    def plan(self) -> Plan:
        """What this process does in the meeting."""
        if self._plan is None:
            everyone = self._everyone
            where = None if self.placement.alone else tuple(self.placement.owner[everyone].tolist())
            key = tuple((id(W), *places) for W, places in self._weights), where
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._compile()
                if len(self._plans) > PLANS:
                    self._plans.popitem(last=False)
            self._plan = plan = copy.copy(plan)
            plan.out_edges = everyone[plan.out_edges]
            plan.in_edges = plan.out_edges if self.placement.alone else everyone[plan.in_edges]
            plan.edges = Edges(plan.out_edges[0], plan.out_edges[1], plan.edges.size)
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan: Plan | None = plan

    def _compile(self) -> Plan:
        """The plan of such a meeting, whoever it is that meets."""
        m, owners = len(self._everyone), self.placement.owner[self._everyone]
        here, blocks = self._here(self._everyone).nonzero()[:, 0], range(len(self.placement.blocks))
        part = Part(m, self.placement.rank, owners, here, blocks, self.placement.alone)
        plan = Plan(_joined(self._weights, m), cast("Placement", part))
        plan._owner = self.placement.owner
        self._held.append([W for W, _ in self._weights])  # so that the ids by which the plan is known stay taken
        return plan

    def _here(self, workers: Tensor) -> Tensor:
        return self.placement.owner[workers] == self.placement.rank

    def mix(self, *rows: Tensor) -> None:
        """One exchange: each tensor x becomes W x in place; of pairs in one process without a copy."""
        if self._pairs is None or not self.placement.alone:
            super().mix(*rows)
            return
        self._refuse_second()
        k = len(self.rows) // 2
        push = self._pairs is PUSH
        for x in rows:
            first, second = x[:k], x[k:]
            if push:
                second.add_(first.mul_(0.5))
            else:
                second.copy_(first.add_(second).mul_(0.5))
        edges = list(zip(self._workers[:k], self._workers[k:]))
        self._traffic[row_bits(spec(rows))] += edges if push else [*edges, *((j, i) for i, j in edges)]

    def keys(self, shared: bool = False) -> Tensor:
        """(m,) int64: a fresh key per row, from (seed, its event, worker, how many were drawn for this meeting).

        `shared`: without the worker, so that all of an event hold the same.
        """
        self._draws += 1
        events = torch.tensor(self._events)
        events = events if self.placement.alone else events[self._here(self._everyone)]
        workers = torch.full_like(self.rows, -1) if shared else self.rows
        return rng.key(self.seed, "meeting", events, self._draws, workers)

    def average(self, x: Tensor) -> None:
        """Refused: there is no moment at which all workers meet."""
        raise Incompatible(
            "an average over all workers is a synchronous round: use clock=lockstep, or DPSGD, SGP or Choco"
        )


def _joined(weights: Sequence[tuple[Tensor, Sequence[int]]], m: int) -> Tensor:
    """One W (m, m) of groups that have nothing to do with each other; identity elsewhere."""
    places, values = [], []
    idle = torch.ones(m, dtype=torch.bool)
    for W, at in weights:
        coo = (W if W.is_sparse else W.to_sparse_coo()).coalesce()
        index = torch.tensor(at)
        places.append(index[coo.indices()])
        values.append(coo.values().double())
        idle[index] = False
    rest = idle.nonzero()[:, 0]
    places.append(torch.stack((rest, rest)))
    values.append(torch.ones(len(rest), dtype=torch.float64))
    return torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(values), (m, m), check_invariants=False).coalesce()
