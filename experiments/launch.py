"""Where a run's processes come from: none (all rows here), started inside this job, or torchrun's."""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import gossip
from experiments.crew import Crew, Seat
from gossip.faults import Pause

# Slow imports of tasks, made once for all children if this process made them.
PRELOAD = ("sklearn.datasets", "sklearn.model_selection")
GRACE = 10.0  # seconds that the other processes get to end by themselves after one has failed
KINDS = ("here", "workers", "blocks")


class WorkerError(RuntimeError):
    """A worker's process failed; carries its traceback."""


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that sets RANK and WORLD_SIZE) started this process."""
    return all(os.environ.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE"))


def world(config: Mapping[str, Any]) -> int:
    """How many processes a run needs; refuses what does not fit, before any process starts."""
    launch, n = config["launch"], config["n"]
    kind = launch["kind"]
    if kind not in KINDS:
        raise ValueError(f"launch.kind={kind!r} is not one of {', '.join(KINDS)}")
    for key, value in launch.items():
        if key in ("processes", "threads"):
            if not (isinstance(value, int) and value >= 1 or value is None and key == "threads"):
                raise ValueError(f"launch.{key}={value!r}: give a whole number, at least 1")
        elif key == "timeout":
            if not (isinstance(value, int | float) and value > 0):
                raise ValueError(
                    f"launch.timeout={value!r}: give a positive number of seconds, the bound of every wait"
                )
        elif key != "kind":
            raise ValueError(f"launch.{key} is no option of a launch: it has kind, processes, threads and timeout")
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if kind == "here":
            raise ValueError(
                f"launch=here under torchrun, which started {size} processes: use launch=blocks (several workers per process) "
                "or launch=workers (one each), or start the run without torchrun"
            )
        if kind == "workers" and size != n:
            raise ValueError(
                f"launch=workers needs one process per worker, n={n}, and torchrun started {size}: use "
                f"--nproc-per-node {n}, or launch=blocks"
            )
    else:
        size = {"here": 1, "workers": n, "blocks": launch.get("processes")}[kind]
    if size < 1 or size > n:
        raise ValueError(
            f"{size} processes for n={n} workers: each process hosts at least one worker, so use 1 to {n} processes"
        )
    if kind != "here" and size > 64 and not under_torchrun():
        raise ValueError(
            f"launch={kind} would start {size} processes on this machine: up to 64 make sense; launch=here computes the same "
            "trajectory in one process, and launch=blocks shares it among a few"
        )
    return size


def threads(config: Mapping[str, Any], processes: int) -> int:
    """torch threads per process: what the config or OMP_NUM_THREADS says, else cores // processes."""
    wanted = config["launch"].get("threads") or os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted and not (str(wanted).isdecimal() and int(wanted) >= 1):
        raise ValueError(
            f"OMP_NUM_THREADS={wanted!r} is no whole number of at least 1: unset it, or set launch.threads, which goes first"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(wanted) if wanted else max(1, cores // processes)


def run_processes(
    target: Callable[..., Any],
    args: tuple,
    processes: int,
    receive: Callable[[Any], None] = lambda item: None,
    timeout: float = gossip.transport.TIMEOUT,
    threads: int = 1,
    logs: str | Path | None = None,
    faults: gossip.Faults | None = None,
    told: Callable[[int], None] = lambda worker: None,
) -> list[Any]:
    """Run `target(rank, transport, send, *args)` in fresh processes on this machine and return what each returns.

    `send` passes an item to `receive` in this process. The first failure ends all processes within seconds and is raised
    here as `WorkerError` with the worker's traceback. The processes end when this one does, however it ends.

    With `faults`, targets get `seat=Seat(…)` as well, and a process that is killed is no failure: `told` hears which, the
    others find it by their seats, and its result is None. One that is restarted has the transport None.
    """
    # forkserver with torch preloaded starts four workers in 0.2 s, spawn takes 15; Windows has only spawn. The default
    # must be set as well, or a joblib worker's own start method wins. torch imports _dynamo, for seconds, when a process
    # makes its first optimizer.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_start_method(method, force=True)
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        loaded = [name for name in PRELOAD if name in sys.modules]
        context.set_forkserver_preload(
            ["torch", "torch._dynamo", "torch.distributed", "gossip", __name__, target.__module__, *loaded]
        )
    results: list[Any] = [None] * processes
    with tempfile.TemporaryDirectory(prefix="gossip-") as folder:
        store = Path(folder, "store").as_uri()
        children = {}

        def start(rank: int, life: int = 0) -> None:
            ours, theirs = context.Pipe()
            seat = None if faults is None else (folder, life)
            child = context.Process(
                target=_child,
                args=(rank, processes, store, timeout, threads, logs, theirs, target, args, seat),
                name=f"rank-{rank}",
                daemon=True,
            )
            try:
                child.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                _end([child for _, child in children.values()], 0.0)
                raise ValueError(
                    f"the run's parts cannot be sent to its processes ({error}): give functions and classes that live in a "
                    "module, not lambdas or local functions"
                ) from error
            theirs.close()
            children[ours] = (rank, child)
            if crew is not None:
                crew.processes[rank] = child

        crew = None if faults is None else Crew(faults, Path(folder), start, told)
        for rank in range(processes):
            start(rank)
        grace = 0.0
        try:
            _collect(children, results, receive, crew)
            grace = GRACE
        finally:
            _end([child for _, child in children.values()], grace)
    return results


def _collect(children: dict, results: list[Any], receive: Callable[[Any], None], crew: Crew | None = None) -> None:
    """Read the children's pipes until all have returned; the first failure decides."""
    open_pipes = dict(children)
    failure: tuple[int, str] | None = None
    deadline, met = None, 0
    seen = set(children)
    while open_pipes:
        wait = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        wait = wait if crew is None else min(wait, crew.tick())
        if crew is not None:
            crew.left({rank for rank, _ in open_pipes.values()})
        ready: list[Any] = multiprocessing.connection.wait(list(open_pipes), timeout=wait)
        for pipe in ready:
            rank, child = open_pipes[pipe]
            try:
                kind, item = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                child.join(GRACE)
                if crew is not None and crew.died(rank, child.exitcode):
                    del open_pipes[pipe]
                    open_pipes |= {p: c for p, c in children.items() if p not in seen}  # its next life
                    seen |= children.keys()
                    continue
                kind, item = (
                    "error",
                    f"it ended without a word, exit code {child.exitcode} (negative: killed by that signal)",
                )
            if kind == "item" and isinstance(item, Pause):
                if crew is not None:
                    crew.pause(rank, item.lasting)
            elif kind == "item":
                receive(item)
            elif kind == "met":
                met += 1
                if crew is not None and met == len(results):
                    crew.begin()
            elif kind == "result":
                results[rank] = item
                del open_pipes[pipe]
            else:
                del open_pipes[pipe]
                # A peer's loss is a consequence: prefer the failure that caused it.
                if failure is None or "PeerError" in failure[1]:
                    failure = (rank, item)
        if failure is not None:
            latest = time.monotonic() + (GRACE if "PeerError" in failure[1] else 1.0)
            deadline = min(deadline or latest, latest)
            if time.monotonic() >= deadline or not open_pipes:
                break
    if failure is not None:
        rank, text = failure
        raise WorkerError(f"rank {rank} failed, and the run was ended:\n{text}")


def _end(children: Iterable[multiprocessing.process.BaseProcess], grace: float) -> None:
    """Wait a little for all, then end those that go on."""
    deadline = time.monotonic() + grace
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.terminate()
    for child in children:
        child.join(2.0)
        if child.is_alive():
            child.kill()
            child.join()


def _child(rank, size, store, timeout, threads, logs, pipe, target, args, seat=None) -> None:
    threading.Thread(target=_watch, daemon=True).start()
    lock = threading.Lock()

    def send(kind: str, item: Any) -> None:
        with lock:
            pipe.send_bytes(pickle.dumps((kind, item)))  # by value: what multiprocessing shares dies with its sender

    try:
        if logs is not None:
            logging.basicConfig(
                filename=Path(logs, f"rank-{rank}.log"),
                encoding="utf-8",
                level=logging.INFO,
                format=f"[%(asctime)s][rank {rank}][%(name)s][%(levelname)s] %(message)s",
            )
        torch.set_num_threads(threads)
        if seat is None:
            transport = gossip.connect(rank, size, store, timeout=timeout)
            result = target(rank, transport, lambda item: send("item", item), *args)
            gossip.disconnect()
        else:
            home, life = seat
            transport = None if life else gossip.connect(rank, size, store, timeout=timeout)
            if not life:
                send("met", None)
            place = Seat(home, rank, life, timeout, lambda item: send("item", item))
            result = target(rank, transport, place.send, *args, seat=place)
            with contextlib.suppress(gossip.PeerError):  # somebody may be gone by now
                gossip.disconnect()
        send("result", result)
    except BaseException:
        text = traceback.format_exc()
        logging.getLogger(__name__).error("%s", text)
        send("error", text)
        os._exit(1)  # gloo's threads may wait for peers that are gone


def _watch() -> None:
    """End this process when the one that started it is gone; its parent by pid is the fork server, which outlives that."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
