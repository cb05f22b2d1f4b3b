"""A run under the asynchronous clock: the same rows of metrics, on a grid of rounds or of virtual seconds.

A round is as much work as in lockstep, n · local_steps gradients, whoever made them.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

import gossip
from experiments import metrics
from experiments.divergence import Divergence
from gossip import checkpoint
from gossip.asynchronous_run import AsynchronousRun

log = logging.getLogger(__name__)


def clock_of(config: Mapping[str, Any]) -> gossip.Asynchronous | None:
    """The asynchronous clock, if a config asks for it."""
    node = config.get("clock")
    return instantiate(node) if isinstance(node, Mapping) and "_target_" in node else None


def check(config: Mapping[str, Any], clock: gossip.Asynchronous, algorithm: Any, schedule: Any) -> None:
    """Refuse what the asynchronous clock cannot do."""
    if config["overlap"]:
        raise gossip.Incompatible(
            "overlap=true with clock=asynchronous, where nobody waits for a round: set overlap=false; clock.wait=false lets a "
            "worker compute while its message is on the way"
        )
    if config.get("faults"):
        raise gossip.Incompatible(
            "faults with clock=asynchronous: use clock=lockstep (simulated or real) or clock=live (real)"
        )
    if config["resume"] is not None and config["resume_average"]:
        raise ValueError(
            "resume_average=true with clock=asynchronous, whose gradients on their way belong to the saved workers: resume "
            "with the same n"
        )
    clock.parted(config["n"])
    clock.check(algorithm, schedule, config["force"])


def begin(
    config: Mapping[str, Any],
    setup: Any,
    placement: gossip.Placement | None = None,
    transport: gossip.Transport | None = None,
) -> AsynchronousRun:
    """The run of a config, at its start."""
    hosted = config["n"] if placement is None else len(placement.rows)
    return clock_of(config).start(  # pyrefly: ignore
        setup.algorithm,
        setup.task.gradient,
        setup.schedule,
        setup.task.initial().expand(hosted, -1).clone(),
        cost=setup.cost,
        seed=config["seed"],
        local_steps=config["local_steps"],
        placement=placement,
        transport=transport,
    )


def train(
    config: Mapping[str, Any],
    setup: Any,
    emit: Callable[[dict[str, float]], None],
    placement: gossip.Placement | None = None,
    transport: gossip.Transport | None = None,
    table: dict[str, Any] | None = None,
    file: Path | None = None,
    keep: bool = False,
) -> torch.Tensor | None:
    """Run all rounds of a config; `table` is the checkpoint to go on from, `file` where checkpoints go."""
    run = begin(config, setup, placement, transport)
    task, net, queue = setup.task, run.net, run.queue
    rounds, every, saving = config["rounds"], config["evaluate_every"], config["checkpoint_every"]
    work, grid = net.n * config["local_steps"], getattr(clock_of(config), "every_seconds", None)
    seconds = 0.0
    if table is not None:
        run.restore(table)
        seconds = table.get("seconds", 0.0)
        log.info("resumed from %s at round %d", config["resume"], queue.updates // work)
    trajectory, diverged = [], Divergence()

    def evaluate() -> bool:
        """Hand out a row of metrics; False if the run has diverged."""
        x = run.models
        bits = net.gather(net.meter.bits[net.rows])
        losses = net.gather(run.progress.losses)
        row = metrics.measured(task, net, x, run.progress.losses)
        row["train/loss"] = float(losses.nanmean())  # a slow worker may not have made a step yet
        row |= metrics.axes(
            task,
            queue.updates // work if grid is None else queue.updates / work,  # a record has one row a round
            queue.updates / net.n,
            float(bits.double().mean()),
            seconds,
            net.n,
            queue.time,
        )
        row |= metrics.idleness(torch.tensor(queue.idle, dtype=torch.float64), queue.time)
        row |= metrics.staleness(queue.staleness)
        everyone = net.gather(x) if keep else None
        if net.placement.rank == 0:
            emit(row)
            if everyone is not None:
                trajectory.append(everyone.clone())
        return diverged(row) is None

    with torch.no_grad():
        if table is None:
            evaluate()
        while queue.updates < rounds * work:
            done, began = queue.updates // work, time.perf_counter()
            stop = min(
                [rounds] + [(done // step + 1) * step for step in (every if grid is None else 0, saving) if step]
            )
            tick = math.inf
            if grid is not None:  # the next point of the grid before which something happens
                tick = max(math.floor(queue.time / grid + 1e-9) + 1, math.ceil(queue.next_time / grid - 1e-9)) * grid
            run.advance(updates=stop * work, seconds=tick)
            seconds += time.perf_counter() - began
            round, last = queue.updates // work, queue.updates >= rounds * work
            ticked = queue.updates < stop * work
            if ticked:
                queue.time = tick  # nothing else happens before
            if (last or (ticked if grid is not None else round // every > done // every)) and not evaluate():
                break
            if saving and (last or round // saving > done // saving):
                saved = run.table(round) | {"seconds": seconds}
                if net.placement.rank == 0 and file is not None:
                    checkpoint.write(file, saved)
    log.info("staleness (gradients applied by others meanwhile: how often): %s", dict(sorted(queue.staleness.items())))
    log.info("steps by worker: %s", queue.steps)
    return torch.stack(trajectory) if trajectory else None
