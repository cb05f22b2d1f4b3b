"""A run under the live clock: every worker trains at its own speed, and the launcher looks at them all from time to time."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gossip
from experiments import metrics
from experiments.crew import Seat
from gossip.faults import Faults, remains
from gossip.live import Live, edges_of, live_options

log = logging.getLogger(__name__)


class Look(NamedTuple):
    """A worker's model and axes when all workers together had done `round` · n steps, as far as it knew."""

    worker: int
    round: int
    x: Tensor
    loss: float
    bits: int
    seconds: float
    report: dict[str, Any] | None  # at the end


def live(config: Mapping[str, Any]) -> bool:
    """Whether a config asks for the live clock."""
    return isinstance(config.get("clock"), Mapping) and config["clock"].get("kind") == "live"


def check(config: Mapping[str, Any], setup: Any, torchrun: bool) -> None:
    """Refuse what the live clock cannot do."""
    if config["launch"]["kind"] != "workers" or torchrun:
        raise gossip.Incompatible(
            "clock=live is real time: it needs launch=workers, a process per worker on this machine; clock=asynchronous "
            "simulates it, and under torchrun gossip.wrap(…, clock='live') does it in a loop of your own"
        )
    clash = {name: config[name] for name in ("overlap", "cost", "resume", "checkpoint_every") if config[name]}
    if clash:
        raise gossip.Incompatible(
            f"clock=live together with {', '.join(f'{k}={v}' for k, v in clash.items())}: exchanges always overlap, seconds "
            "are real, and there is no moment at which a checkpoint could be taken; leave it out"
        )
    live_options(setup.algorithm)
    edges_of(setup.schedule)
    _paces(config)


def work(
    config: Mapping[str, Any],
    setup: Any,
    send: Callable[[Any], None],
    seat: Seat,
) -> None:
    """One worker: steps and exchanges until all workers together have done rounds · local_steps · n steps."""
    torch.manual_seed(config["seed"])
    task, algorithm, n, every = setup.task, setup.algorithm, config["n"], config["evaluate_every"]
    if seat.life and seat.invitation() is None:
        send({"event": f"worker {seat.worker} came back too late"})
        return
    faults, steps, rounds = setup.faults or Faults(), config["local_steps"], config["rounds"]
    pace, reweight = _paces(config)[seat.worker], bool(config["clock"].get("reweight"))
    x = task.initial()[None].clone()
    row = Live(
        x,
        edges_of(setup.schedule),
        seat.worker,
        str(Path(seat.home, "live")),
        seed=config["seed"],
        drop=faults.loss,
        cut=lambda: faults.cut(done()),
        life=seat.life,
        returning=frozenset(k.worker for k in faults.kills if k.back is not None),
        timeout=seat.timeout,
        **live_options(algorithm),
    )

    if seat.life and not row.adopted:
        send({"event": f"worker {seat.worker} came back too late"})
        return

    def done() -> float:
        return row.total / (n * steps)

    local, z, me, past = gossip.LocalOptimizer(algorithm.optimizer, x), x.clone(), torch.tensor([seat.worker]), set()
    loss, began, looks = math.nan, time.perf_counter(), 0

    def look(round: int, report: dict[str, Any] | None = None) -> None:
        with row.hold() as now:
            model = now.clone()
        send(Look(seat.worker, round, model, loss, row.bits, time.perf_counter() - began, report))

    invited: set[int] = set()
    if seat.life:
        send({"event": f"worker {seat.worker} is back at round {int(done())}"})
        looks = int(done()) // every + 1
    with torch.no_grad():
        while done() < rounds:
            while looks * every <= done() and looks * every < rounds:
                look(looks * every)
                looks += 1
            seat.befall(faults, done(), past)
            due = {k.worker for k in faults.kills if k.back is not None and k.back <= done()} - invited
            invited |= due
            seat.invite(sorted(due), (), int(done()), 0)
            started = time.perf_counter()
            g, losses = task.gradient(z, me, int(row.known[seat.worker]))
            loss = float(losses[0])
            if pace is not None:
                time.sleep(max(0.0, pace - (time.perf_counter() - started)))
            with row.hold():
                before = x.clone() if reweight else x
                local.step(x, g)
                if reweight:
                    x.sub_(before).mul_(row.scale()).add_(before)
                row.stepped(z)
            if int(row.known[seat.worker]) % steps == 0:
                row.exchange()
    report = row.finish(rounds=config["clock"].get("consensus"))
    look(rounds, report)


def _paces(config: Mapping[str, Any]) -> list[float | None]:
    """Seconds that a step of each worker takes at least."""
    pace, n = config["clock"].get("pace"), config["n"]
    paces = list(pace) if isinstance(pace, list | tuple) else [pace] * n
    if len(paces) != n or any(p is not None and not p >= 0 for p in paces):
        raise ValueError(f"clock.pace={pace!r}: give seconds, one number for all or one for each of the {n} workers")
    return paces


class Gallery:
    """The launcher's side: a row of metrics whenever all who are alive have been looked at."""

    def __init__(self, config: Mapping[str, Any], setup: Any, emit: Callable[[dict[str, Any]], None]) -> None:
        self.config, self.setup, self.emit = config, setup, emit
        self.alive = set(range(config["n"]))
        self.looks: dict[int, dict[int, Look]] = {}
        self.shown = -1

    def receive(self, item: Any) -> None:
        """A `Look`, or a row or event that goes on as it is."""
        if not isinstance(item, Look):
            self.emit(item)
        elif item.round > self.shown:
            self.looks.setdefault(item.round, {})[item.worker] = item
            self._show()

    def lost(self, worker: int) -> None:
        """A worker is dead."""
        self.alive.discard(worker)
        self.emit(
            {
                "event": f"worker {worker} lost after round {max(self.shown, 0)}; {len(self.alive)} of {self.config['n']} go on"
            }
        )
        parts = remains(edges_of(self.setup.schedule), tuple(sorted(self.alive))).parts
        if len(parts) > 1:
            self.emit(
                {"event": f"the graph fell into the parts {', '.join(map(str, parts))}, each of which goes on alone"}
            )
        self._show()

    def _show(self) -> None:
        for round in sorted(self.looks):
            if self.alive <= self.looks[round].keys():
                looks = [look for _, look in sorted(self.looks.pop(round).items())]
                self.shown = round
                with torch.no_grad():
                    self.emit(self._row(round, looks))

    def _row(self, round: int, looks: list[Look]) -> dict[str, float]:
        task, count = self.setup.task, len(looks)
        x, losses = torch.cat([look.x for look in looks]), torch.tensor([look.loss for look in looks])
        row = metrics.measured(task, _Here(), x, losses)
        row |= metrics.axes(
            task,
            round,
            round * self.config["local_steps"],
            sum(look.bits for look in looks) / count,
            sum(look.seconds for look in looks) / count,
            self.config["n"],
        )
        row["workers"] = count
        reports = [look.report for look in looks if look.report is not None]
        if reports:
            names = ("exchanges", "answers", "busy", "seconds waited", "seconds per exchange")
            names += tuple(f"staleness/{what}/{how}" for what in ("gradient", "exchange") for how in ("mean", "max"))
            row |= {f"live/{name.replace(' ', '_')}": sum(r[name] for r in reports) / len(reports) for name in names}
            share = reports[0]["share"]
            row |= {"live/share/smallest": min(share), "live/share/largest": max(share)}
        return row


class _Here:
    """All rows are here."""

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True)

    def gather(self, values: Tensor) -> Tensor:
        return values
