"""Rounds in which workers die, pause and return and links are cut: the same faults in a simulation and in real processes."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import gossip
from experiments import metrics
from experiments.crew import Seat
from gossip.compress.payload import naming
from gossip.faults import Kill, Remains, remains

log = logging.getLogger(__name__)


def train(
    config: Mapping[str, Any],
    setup: Any,
    emit: Callable[[dict[str, Any]], None],
    transport: gossip.Transport | None = None,
    seat: Seat | None = None,
) -> None:
    """Run all rounds of a config with faults, as `experiments.trainer.train` does without.

    Args:
        emit: receives rows of metrics, and what was lost as {"event": sentence}; called in one process at a time.
        transport: the other processes, one worker each; all rows are here if None. A restarted worker has none at first.
        seat: this worker's place among the processes.
    """
    run = _Run(config, setup, emit, transport, seat)
    with torch.no_grad():
        if seat is not None and seat.life:
            run.come_back()
        lost, begun = "", seat is not None and seat.life > 0
        while run.here and (lost or not begun or run.round < config["rounds"]):
            try:
                if lost:
                    run.recover(lost)
                    lost, begun = "", True
                    run.change()  # those who go on may have passed the round of a return
                elif not begun:
                    run.evaluate()
                    begun = True
                else:
                    run.advance()
                    run.change()
            except gossip.PeerError as error:
                lost = str(error)  # not the error itself, whose frames would hold the connections open


class _Run:
    """A run's place: its round, who is alive, the network among them, and the state of the rows that are here."""

    def __init__(
        self,
        config: Mapping[str, Any],
        setup: Any,
        emit: Callable[[dict[str, Any]], None],
        transport: gossip.Transport | None,
        seat: Seat | None,
    ) -> None:
        self.config, self.setup, self.emit, self.seat, self.transport = config, setup, emit, seat, transport
        self.task, self.algorithm, self.faults = setup.task, setup.algorithm, setup.faults
        self.round = self.losses_known = 0
        self.seconds, self.began = 0.0, time.perf_counter()
        self.bits = torch.zeros(config["n"], dtype=torch.int64)
        self.alive = tuple(range(config["n"]))
        self.state: Any = None
        self.net: Any = None  # none while the processes part and meet
        self.here, self.past = True, set()
        self.back: set[Kill] = set()  # deaths whose return is past
        if seat is None or not seat.life:
            self._enter(Remains(self.alive, setup.schedule, (self.alive,)))
            x = self.task.initial().expand(1 if seat else config["n"], -1).clone()
            self.state = self.algorithm.init(x)
            self.kept = x.clone()
            self.change()

    @property
    def own(self) -> Tensor:
        """(m,) the workers that are here."""
        return torch.tensor(self.alive)[self.net.rows]

    def _enter(self, left: Remains) -> None:
        """A network among those who are left."""
        if self.net is not None:
            self.bits[self.own] += self.net.meter.bits[self.net.rows]
        self.alive = left.workers
        n = len(left.workers)
        real = self.seat is not None
        placement = gossip.Placement.even(n, n, self.transport.rank) if real and self.transport else None
        self.net = gossip.Network(left.schedule, placement, self.transport if real else None, self.config["seed"])
        self.losses = torch.full((len(self.net.rows),), math.nan)

    def advance(self) -> None:
        """Rounds, until something changes."""
        changes = self.faults.changes(self.config["rounds"])
        stop = min((c for c in changes if c > self.round), default=self.config["rounds"])
        steps, every = self.config["local_steps"], self.config["evaluate_every"]
        while self.round < stop:
            self._befall()
            self.net.begin(self.round)
            for t in range(self.round * steps, (self.round + 1) * steps):
                self.state = self.algorithm.compute(self.state, lambda x, t=t: self._gradient(x, t))
            self.kept.copy_(self.algorithm.params(self.state))  # a failed exchange may have added some of its parts
            with naming(self.own):
                self.state = self.algorithm.communicate(self.state, self.net)
            self.round += 1
            self.kept.copy_(self.algorithm.params(self.state))
            if (self.round % every == 0 or self.round == self.config["rounds"]) and not self.evaluate():
                self.round, self.here = self.config["rounds"], False

    def _gradient(self, x: Tensor, step: int) -> Tensor:
        g, self.losses = self.task.gradient(x, self.own, step)
        return g

    def _befall(self) -> None:
        """For real: what happens to this worker at the beginning of this round."""
        if self.seat is not None:
            self.seat.befall(self.faults, self.round, self.past)

    def change(self) -> None:
        """What is planned for the beginning of this round: returns and cuts; in a simulation deaths as well."""
        if not self.here or self.round >= self.config["rounds"]:
            return
        now = set(self.faults.alive(self.config["n"], self.round))
        due = {k for k in self.faults.kills if k.back is not None and k.back <= self.round} - self.back
        back = sorted({k.worker for k in due} & now - set(self.alive))
        self.back |= {k for k in due if k.worker in back}
        died = sorted(w for w in self.alive if w not in now) if self.seat is None else []
        alive = tuple(sorted((set(self.alive) - set(died)) | set(back)))
        if alive == self.alive and self.faults.cut(self.round) == self.faults.cut(self.round - 1):
            return
        left = self._left(alive)
        if back and self.seat is not None:
            self._welcome(left, back)
            return
        if died:
            self._tell(died, left, self.round)
        if back:
            self.emit({"event": f"worker {_names(back)} is back at round {self.round}"})
        self._go_on(left)

    def _go_on(self, left: Remains) -> None:
        """All rows that are left restart from their models here; those that return from a neighbour's."""
        x, before = self.algorithm.params(self.state), self.alive
        sources = [
            w if w in before else _neighbour(self.setup.topology, w, set(before) & set(left.workers))
            for w in left.workers
        ]
        mine = left.workers if self.seat is None else self.own.tolist()
        rows = torch.tensor([before.index(s) for s in sources]) if self.seat is None else torch.tensor([0])
        new = [r for r, w in enumerate(mine) if w not in before]
        self._enter(left)
        self.state = self.algorithm.restart(self.state, x[rows].clone(), rows)
        for buffer in self.state.opt.tensors.values():
            if buffer.ndim:
                buffer[new] = 0
        self.kept = self.algorithm.params(self.state).clone()

    def _left(self, alive: tuple[int, ...]) -> Remains:
        cut = self.faults.cut(self.round)
        if len(alive) == self.config["n"] and not cut:
            return Remains(alive, self.setup.schedule, (alive,))
        return remains(self.setup.topology, alive, cut, self.faults.loss, self.config["seed"])

    def _tell(self, died: list[int], left: Remains, round: int) -> None:
        text = f"worker {_names(died)} lost at round {round}; {len(left.workers)} of {self.config['n']} go on"
        if len(left.parts) > 1:
            off = sorted(w for part in left.parts for w in part if w not in left.workers)
            text += f"; the graph fell into {len(left.parts)} parts, and worker {_names(off)} is cut off"
        self.emit({"event": text})

    # -- real processes --------------------------------------------------------------------------------------------

    def recover(self, error: str) -> None:
        """Somebody is gone: leave, learn who from the launcher, and meet the others again."""
        assert self.seat is not None
        if self.net is not None:
            self.bits[self.seat.worker] += self.net.meter.bits[self.net.rows[0]]
        self.net = self.transport = None
        gossip.transport.abandon()
        gone = self.seat.losses(beyond=self.losses_known)
        if len(gone) == self.losses_known:
            raise RuntimeError(error)
        died = sorted(set(gone[self.losses_known :]) & set(self.alive))
        self.losses_known = len(gone)
        left = self._left(tuple(w for w in self.alive if w not in died))
        if self.seat.worker not in left.workers:
            self.here = False
            return
        self.transport = self.seat.meet(left.workers, f"lost-{len(gone)}")
        rounds = self.transport.gather(self.round)  # some are a round or two ahead of those who noticed first
        if self.transport.rank == 0:
            self._tell(died, left, min(rounds))
        self.round = max(rounds)
        self._enter(left)
        self.state = self.algorithm.restart(self.state, self.kept.clone(), torch.tensor([0]))
        log.info("worker %s lost; going on at round %d", died, self.round)
        self.evaluate()

    def _welcome(self, left: Remains, back: list[int]) -> None:
        """Meet again with those that return, and give them a model."""
        assert self.seat is not None
        gossip.disconnect()
        self.net, own = None, int(self.own)
        if own == min(self.alive):
            self.seat.invite(back, left.workers, self.round, self.losses_known)
        self._reunite(left, back, self.kept)

    def come_back(self) -> None:
        """A restarted worker: wait for the invitation, and take a neighbour's model."""
        assert self.seat is not None
        invited = self.seat.invitation()
        if invited is None:
            self.emit({"event": f"worker {self.seat.worker} came back too late"})
            self.here = False
            return
        workers, self.round, self.losses_known = invited
        self.back |= {k for k in self.faults.kills if k.back is not None and k.back <= self.round}
        x = self.task.initial()[None].clone()
        self.state = self.algorithm.init(x)
        self._reunite(self._left(workers), [self.seat.worker], None)

    def _reunite(self, left: Remains, back: list[int], x: Tensor | None) -> None:
        assert self.seat is not None
        self.transport = self.seat.meet(left.workers, f"back-{self.round}")
        models = self.transport.gather(x)
        if x is None:
            there = set(left.workers) - set(back)
            x = models[left.workers.index(_neighbour(self.setup.topology, self.seat.worker, there))]
        self._enter(left)
        self.state = self.algorithm.restart(self.state, x.clone(), torch.tensor([0]))
        self.kept = x.clone()
        if self.transport.rank == 0:
            self.emit({"event": f"worker {_names(back)} is back at round {self.round}"})

    # -- metrics ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> bool:
        """Hand out a row of metrics of those who are alive; False if their models are not finite any more."""
        self.seconds += time.perf_counter() - self.began
        net, task = self.net, self.task
        row = metrics.measured(task, net, self.algorithm.params(self.state), self.losses)
        bits = net.gather(self.bits[self.own] + net.meter.bits[net.rows])
        row |= metrics.axes(
            task,
            self.round,
            self.round * self.config["local_steps"],
            float(bits.double().mean()),
            self.seconds,
            net.n,
        )
        row["workers"] = net.n
        if net.placement.rank == 0:
            self.emit(row)
        self.began = time.perf_counter()
        return math.isfinite(row["consensus/distance"])


def _neighbour(topology: Any, worker: int, there: set[int]) -> int:
    """The neighbour of lowest number that is there; anybody if there is none."""
    near = [t for s, t in topology.edge_index.T.tolist() if s == worker and t in there]
    return min(near or there)


def _names(workers: list[int]) -> str:
    return ", ".join(map(str, workers))
