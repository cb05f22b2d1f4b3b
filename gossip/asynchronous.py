"""The asynchronous clock's options, and what can run under it: every worker goes at its own pace, and two meet at a time.

AD-PSGD is D-PSGD under it (Lian et al. 2018, arXiv 1710.06952), SwarmSGD that with several local steps (Nadiradze et al.
2021, arXiv 1910.12308). Time is virtual, so a run is exact and repeatable, in one process or in many.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs import Incompatible, Schedule

from .algorithm import REMEDIES, Algorithm
from .algorithms.allreduce import AllReduce
from .asynchronous_run import AsynchronousRun, WorkerGradient
from .compress import WarmUp
from .cost import Cost
from .events import EventQueue, Graph
from .meeting import Meeting
from .network import Network
from .placement import Placement
from .transport import Transport

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

    def start(
        self,
        algorithm: Algorithm,
        gradient: WorkerGradient,
        schedule: Schedule,
        x: Tensor,
        *,
        cost: Cost | None = None,
        seed: int = 0,
        local_steps: int = 1,
        placement: Placement | None = None,
        transport: Transport | None = None,
    ) -> AsynchronousRun:
        """A run under this clock.

        Args:
            gradient: (x (k, d), workers (k,), steps (k,)) → gradients (k, d), or (gradients, losses).
            schedule: whose edges say who may meet whom; its W is that of groups and of synchronous phases.
            x: the hosted workers' start (m, d); taken over.
            cost: seconds of gradients and messages; every gradient one second and messages none if None.
            seed: of the neighbours that are drawn, and of what compressors draw.
            local_steps: gradients between a worker's exchanges.
            placement, transport: see `gossip.Network`.

        >>> import graphs, gossip
        >>> b = torch.arange(4.0, dtype=torch.float64)[:, None]                  # f_i(x) = (x − b_i)²/2
        >>> gradient = lambda x, workers, steps: x - b[workers]
        >>> start = torch.zeros(4, 1, dtype=torch.float64)
        >>> run = Asynchronous().start(gossip.DPSGD(), gradient, graphs.as_schedule(graphs.ring(4)), start)
        >>> run.advance(updates=400)
        >>> run.queue.time, run.queue.steps, abs(float(run.models.mean()) - 1.5) < 0.1
        (100.0, [100, 100, 100, 100], True)
        """
        meet = meeting(algorithm)
        queue = EventQueue(
            Graph(schedule, self.parted(schedule.n), meet == "push"),
            cost or Cost(),
            seed,
            meet=meet,
            local_steps=local_steps,
            geometric=self.geometric,
            adapt_first=self.adapt_first,
            wait=self.wait,
            bound=self.bound,
            size=message_bytes(algorithm, x[0]),
            modes=self.mode,
        )
        net = Meeting(schedule, placement, transport, seed)
        return AsynchronousRun(algorithm, gradient, queue, net, x, weigh=self.weigh and meet == "push")

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
