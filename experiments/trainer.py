"""Build a run from its config, run it in whatever placement, evaluate and hand out one row per evaluation."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import gossip
import graphs
from experiments import asynchronous, faulty, lively, metrics
from experiments.crew import Seat
from experiments.divergence import Divergence
from experiments.launch import under_torchrun
from gossip import checkpoint
from gossip.faults import Kill, Pause
from gossip.plan import verify
from graphs import Schedule

CHECKPOINT = "checkpoint.pt"
log = logging.getLogger(__name__)


class Task(gossip.Task, Protocol):
    """What a run needs to know of the problem: see `experiments.tasks`."""

    def evaluate(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Metrics (k,) of each row of x (k, d) on the common test set."""
        ...


class Setup(NamedTuple):
    """What a config describes."""

    task: Task
    algorithm: gossip.Algorithm
    schedule: Schedule
    topology: Any
    cost: gossip.Cost | None
    faults: gossip.Faults | None = None


def build(config: Mapping[str, Any]) -> Setup:
    """Instantiate and check everything that can be refused, before any process starts."""
    nodes = OmegaConf.create(dict(config))
    topology = instantiate(nodes.topology)
    schedule = instantiate(nodes.schedule)
    algorithm = instantiate(nodes.algorithm)
    faults = instantiate(nodes.faults) if nodes.faults else None
    if faults is not None and not isinstance(faults, gossip.Faults):
        faults = gossip.Faults(faults)
    if faults is not None:
        faults = _timed(faults, config["rounds"])
    if faults is not None and faults.loss and not lively.live(config):
        schedule = graphs.drop(faults.loss, schedule, config["seed"])
    if nodes.scheduler is not None:
        algorithm = dataclasses.replace(
            algorithm, optimizer=gossip.scheduled(algorithm.optimizer, instantiate(nodes.scheduler))
        )
    if schedule.n != config["n"]:
        raise ValueError(
            f"n={config['n']} and the schedule connects {schedule.n} workers: choose a topology of {config['n']} workers, "
            f"or n={schedule.n}"
        )
    clock = asynchronous.clock_of(config)
    if clock is not None:
        asynchronous.check(config, clock, algorithm, schedule)
    else:
        gossip.check(
            algorithm, schedule, overlap=config["overlap"], local_steps=config["local_steps"], force=config["force"]
        )
    if faults is not None:
        _check_faults(faults, config, topology, algorithm)
    task = instantiate(nodes.task)
    if task.n != config["n"]:
        raise ValueError(f"n={config['n']} and the task has {task.n} workers: give both the same n, task.n=${{n}}")
    start = task.initial()
    algorithm = gossip.resolved(algorithm, schedule, len(start), getattr(task, "layout", None))
    try:
        algorithm.init(start[None].clone())  # the optimizer's options are only known to be right once it is made
    except (ArithmeticError, TypeError) as error:
        raise ValueError(
            f"{type(algorithm).__name__} cannot start ({error}): look at optimizer.* and scheduler.*"
        ) from error
    cost = instantiate(nodes.cost) if nodes.cost else None
    if cost is not None:
        gossip.Timeline(cost, config["n"])  # refuses tables of fewer workers
    setup = Setup(task, algorithm, schedule, topology, cost, faults)
    if lively.live(config):
        lively.check(config, setup, under_torchrun())
    return setup


def _timed(faults: gossip.Faults, rounds: int) -> gossip.Faults:
    """Deaths and pauses without a time are those of half the run."""

    def timed(event: Any) -> Any:
        free = isinstance(event, Kill | Pause) and event.round is None and event.seconds is None
        return dataclasses.replace(event, round=rounds // 2) if free else event

    return gossip.Faults(tuple(map(timed, faults.events)))


def _check_faults(faults: gossip.Faults, config: Mapping[str, Any], topology: Any, algorithm: gossip.Algorithm) -> None:
    launch = config["launch"]["kind"]
    if under_torchrun():
        raise ValueError(
            "faults under torchrun, which ends all processes when one dies: start the run without torchrun, launch=workers"
        )
    if not hasattr(topology, "edge_index"):
        raise gossip.Incompatible(
            "faults need a topology, whose edges are what is left to mix by, and this run has none: choose one"
        )
    if launch == "blocks":
        raise gossip.Incompatible(
            "faults with launch=blocks, where a death takes several workers: use launch=workers or launch=here"
        )
    given = {"overlap": config["overlap"], "cost": config["cost"], "resume": config["resume"]}
    given |= {"checkpoint_every": config["checkpoint_every"]}
    if clash := [name if isinstance(value, Mapping) else f"{name}={value}" for name, value in given.items() if value]:
        raise gossip.Incompatible(
            f"faults together with {', '.join(clash)}: a run with faults has none of them; leave out either"
        )
    faults.check(topology, algorithm, real=launch == "workers", rounds=config["rounds"])


def resumable(config: Mapping[str, Any], setup: Setup) -> int:
    """The round to resume from; refuses what is no checkpoint, one of another run, and where nothing is left to do."""
    table = saved(config, setup.algorithm)
    if asynchronous.clock_of(config) is not None:
        done = asynchronous.begin(config, setup).restore(table)
    elif "trace" in table:
        raise ValueError(
            f"the checkpoint in {config['resume']} was saved under the asynchronous clock, with gradients on their way: resume "
            "it with the same clock"
        )
    else:
        state = setup.algorithm.init(setup.task.initial().expand(config["n"], -1).clone())
        done = checkpoint.restore(table, state, gossip.Network(setup.schedule))
    checkpoint.compare_graphs(table, setup.schedule, setup.algorithm)
    if done >= config["rounds"]:
        raise ValueError(
            f"rounds={config['rounds']}, and the checkpoint in {config['resume']} is at round {done} already: "
            "ask for more rounds"
        )
    return done


def saved(config: Mapping[str, Any], algorithm: gossip.Algorithm) -> dict[str, Any]:
    """The checkpoint to go on from, made one of this run's n workers if the config asks for that."""
    table = checkpoint.read(Path(config["resume"]) / CHECKPOINT)
    if table["n"] != config["n"] and config["resume_average"]:
        return checkpoint.reshard(checkpoint.stacked(table), algorithm, config["n"])
    return table


def train(
    config: Mapping[str, Any],
    setup: Setup,
    emit: Callable[[dict[str, float]], None],
    placement: gossip.Placement | None = None,
    transport: gossip.Transport | None = None,
    folder: str | Path | None = None,
    keep: bool = False,
) -> torch.Tensor | None:
    """Run all rounds of a config.

    Args:
        emit: receives one row of metrics and axes per evaluation; called at rank 0 only.
        placement, transport: which rows are here, and the other processes; all rows here if None.
        folder: where checkpoints go.
        keep: return the models' trajectory at the evaluations, (evaluations, n, d), at rank 0.
    """
    if setup.faults is not None:
        faulty.train(config, setup, emit)
        return None
    if asynchronous.clock_of(config) is not None:
        table = None if config["resume"] is None else saved(config, setup.algorithm)
        file = None if folder is None else Path(folder) / CHECKPOINT
        return asynchronous.train(config, setup, emit, placement, transport, table, file, keep)
    task, algorithm, schedule, _, cost, _ = setup
    rounds, every, steps = config["rounds"], config["evaluate_every"], config["local_steps"]
    if placement is not None and transport is not None:
        verify(schedule, placement.blocks, plans=64)
    net = gossip.Network(schedule, placement, transport, config["seed"])
    net.background = config["overlap"]
    watch = None
    if cost is not None:
        watch = gossip.Watch(gossip.Timeline(cost, net.n, steps, config["overlap"]), net)
    rank = net.placement.rank
    state = algorithm.init(task.initial().expand(len(net.rows), -1).clone())
    start, seconds = 0, 0.0
    if config["resume"] is not None:
        table = saved(config, algorithm)
        start, seconds = checkpoint.restore(table, state, net), table.get("seconds", 0.0)
        if watch is not None and "timeline" in table:
            watch.timeline.load_state_dict(table["timeline"])
        log.info("resumed from %s at round %d", config["resume"], start)
    losses = torch.full((len(net.rows),), float("nan"))
    trajectory, diverged = [], Divergence()

    def oracle(x: torch.Tensor, step: int) -> torch.Tensor:
        nonlocal losses
        g, losses = task.gradient(x, net.rows, step)
        return g

    def evaluate(done: int, seconds: float) -> bool:
        """Hand out a row of metrics; False if the run has diverged."""
        x = algorithm.params(state)
        bits = net.gather(net.meter.bits[net.rows])
        row = metrics.measured(task, net, x, losses)
        row |= metrics.axes(
            task,
            done,
            done * steps,
            float(bits.double().mean()),
            seconds,
            net.n,
            None if watch is None else watch.timeline.seconds,
        )
        if watch is not None:
            row |= metrics.idleness(watch.timeline.idle, watch.timeline.seconds)
        everyone = net.gather(x) if keep else None
        if rank == 0:
            emit(row)
            if everyone is not None:
                trajectory.append(everyone.clone())
        return diverged(row) is None

    if start == 0:
        evaluate(0, 0.0)
    began = time.perf_counter()
    with torch.no_grad():
        clock = gossip.lockstep(algorithm, oracle, net, state, rounds, start, steps, config["overlap"])
        for done, state in clock:
            if watch is not None:
                watch.round(done - 1)
            last = done == rounds
            saves = config["checkpoint_every"] and (done % config["checkpoint_every"] == 0 or last)
            if done % every and not last and not saves:
                continue
            seconds += time.perf_counter() - began
            if (done % every == 0 or last) and not evaluate(done, seconds):
                break
            if saves and folder is not None:
                table = checkpoint.table(state, net, done)
                if watch is not None:
                    table["timeline"] = watch.timeline.state_dict()
                if rank == 0:
                    checkpoint.write(Path(folder) / CHECKPOINT, table | {"seconds": seconds})
            began = time.perf_counter()
    if watch is not None and rank == 0 and folder is not None:
        Path(folder, "idle.csv").write_text(watch.timeline.report(), encoding="utf-8")
    if transport is not None:
        waits = enumerate(transport.gather(transport.waited_for))
        lines = [f"{i},{j},{waited:.6g}" for i, each in waits for j, waited in sorted(each.items())]
        if rank == 0 and folder is not None:
            Path(folder, "waits.csv").write_text("\n".join(["process,for,seconds", *lines, ""]), encoding="utf-8")
    return torch.stack(trajectory) if trajectory else None


def hosted(
    rank: int,
    transport: gossip.Transport,
    send: Callable[[Any], None],
    config: Mapping[str, Any],
    folder: str | None,
    keep: bool,
    seat: Seat | None = None,
) -> torch.Tensor | None:
    """One process's share of a run: builds everything from the config, so that nothing but plain data is sent to it."""
    if seat is not None:
        if lively.live(config):
            lively.work(config, build(config), send, seat)
        else:
            faulty.train(config, build(config), send, transport, seat)
        return None
    placement = gossip.Placement.even(config["n"], transport.size, rank)
    transport.agree({"config": repr(config)})
    return train(config, build(config), send, placement, transport, folder, keep)
