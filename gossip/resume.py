"""`save` and `load`: a run in one's own training loop goes on after a crash as if nothing had happened."""

import io
import random
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from . import checkpoint
from .lockstep_wrap import GossipOptimizer
from .network import Network
from .transport import Transport


def save(path: str | Path, optimizer: GossipOptimizer, **extra: Any) -> None:
    """Write one checkpoint of all workers at rank 0; every rank must call it, and after the same step.

    It holds each worker's rows, algorithm and optimizer state, buffers of the `model` given to `wrap`, step counts, random
    state (python, numpy, torch), meter and message in flight, and `extra`, which each worker may give its own of. A crash
    while writing leaves the former file, and if it cannot be written the same error is raised at every rank.

    Args:
        path: a file at rank 0; the other ranks need not see it.
        extra: tensors and plain Python types, for example `epoch=3, scheduler=scheduler.state_dict()`.

    Raises:
        TypeError: an extra that torch's safe mode could not read back.
        ValueError: the ranks have taken different numbers of steps.
        OSError: the file could not be written.
    """
    transport, net = _parts(optimizer)
    wrong = _unsafe(extra)
    saved = {"random": _random(), "extra": {} if wrong else extra, "wire_bytes": net.meter.wire_bytes}
    workers, error = transport.collect((_on_cpu(optimizer.state_dict() | saved), wrong)), None
    if transport.rank == 0:
        told = next((f"rank {rank}: {wrong}" for rank, (_, wrong) in enumerate(workers) if wrong), None)
        steps = [worker["steps"] for worker, _ in workers]
        try:
            if told:
                raise TypeError(told)
            if len(set(steps)) > 1:
                raise ValueError(f"the ranks have taken {steps} steps: call save after the same step at every rank")
            checkpoint.write(path, _table([worker for worker, _ in workers], optimizer))
        except Exception as failure:
            error = failure
    error = transport.deal([error] * transport.size)
    if error is not None:
        raise error


def load(
    path: str | Path, optimizer: GossipOptimizer, *, optional: bool = False, average: bool = False
) -> dict[str, Any] | None:
    """Go on from what `save` wrote, at every rank; returns this worker's `extra`.

    Rank 0 alone looks for the file, reads it and deals it out, so that ranks cannot disagree on what there is. Nothing is
    changed anywhere unless it fits at every rank.

    Args:
        path: where rank 0 finds the file.
        optimizer: freshly wrapped, with the same model, optimizer and algorithm.
        optional: return None at every rank, rather than raise, when there is no file yet.
        average: accept another number of workers: all start at the average model and with the averaged buffers of the
            optimizers, the algorithm's memory and the random state start anew, and `extra` is rank 0's.

    Raises:
        FileNotFoundError: there is no file, and it is not optional.
        ValueError: it is no checkpoint of such a run; the message lists the ranks where it does not fit. Or it was made on
            another graph, and the algorithm remembers that one; of other algorithms that is warned of.
    """
    transport, net = _parts(optimizer)
    dealt: list[Any] = [None] * transport.size
    if transport.rank == 0 and not (optional and not Path(path).exists()):
        try:
            dealt = _workers(checkpoint.read(path), optimizer, average)
        except Exception as failure:
            dealt = [failure] * transport.size
    mine = transport.deal(dealt)
    if mine is None:
        return None
    if isinstance(mine, Exception):
        raise mine
    wrong = {rank: text for rank, text in enumerate(transport.gather(optimizer.misfit(mine))) if text}
    if wrong:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
        raise ValueError(f"{path} does not fit ({told}): load it into the same model, optimizer and algorithm")
    if mine["in_flight"] is not None:
        mine["in_flight"] = [part.to(optimizer.row.x.device) for part in mine["in_flight"]]
    optimizer.load_state_dict(mine)
    net.meter.wire_bytes = mine["wire_bytes"]
    if mine["random"] is not None:
        _set_random(mine["random"])
    return mine["extra"]


def _parts(optimizer: GossipOptimizer) -> tuple[Transport, Network]:
    if not isinstance(optimizer, GossipOptimizer):
        raise TypeError(
            f"got a {type(optimizer).__name__}, and a run is saved and loaded by what gossip.wrap returned for lockstep rounds: "
            "of a live or a plain optimizer save the state_dict()"
        )
    return cast(Transport, optimizer.net.transport), optimizer.net


def _table(workers: list[dict[str, Any]], optimizer: GossipOptimizer) -> dict[str, Any]:
    """A table as `checkpoint.restore` takes it, with what only real workers have under "workers"."""
    meters = [worker.pop("meter") for worker in workers]
    rows = [worker.pop("gossip") for worker in workers]
    return {
        "version": checkpoint.VERSION,
        "n": len(workers),
        "round": optimizer.rounds,
        "schedule": optimizer.net.schedule.digest,
        "steps": optimizer.steps,
        "local_steps": optimizer.local_steps,
        "leaves": {name: torch.cat([own[name] for own in rows]) for name in rows[0]},
        "plain": {},
        "kind": type(optimizer.inner).__name__,
        "meter": {
            "codes": torch.cat([meter["codes"] for meter in meters]),
            "counts": torch.cat([meter["counts"] for meter in meters], 1),
            "wire_bytes": sum(worker["wire_bytes"] for worker in workers),
        },
        "workers": workers,
    }


def _workers(table: dict[str, Any], optimizer: GossipOptimizer, average: bool) -> list[dict[str, Any]]:
    """Of each of this run's workers what `load_state_dict` takes, and random state and extra."""
    n = optimizer.net.n
    if "workers" not in table:
        raise ValueError("it is the checkpoint of a simulation: resume it by `python -m experiments.train resume=DIR`")
    if table["kind"] != type(optimizer.inner).__name__:
        raise ValueError(
            f"the checkpoint has {table['kind']}, and this run has {type(optimizer.inner).__name__}: resume with the same "
            "optimizer"
        )
    if table["n"] != n:
        if not average:
            raise ValueError(
                f"the checkpoint holds n={table['n']} workers and this run has n={n}: resume with the same n, or pass "
                "average=True, and every worker starts at the average model"
            )
        table = checkpoint.reshard(table, optimizer.algorithm, n)
        table["workers"] = [_average(table["workers"])] * n
    else:
        checkpoint.compare_graphs(table, optimizer.net.schedule, optimizer.algorithm)
    return [
        worker | {"gossip": {name: leaf[i : i + 1] for name, leaf in table["leaves"].items()}, "meter": table["meter"]}
        for i, worker in enumerate(table["workers"])
    ]


def _average(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """A worker between all of them: the floating tensors of optimizers and models averaged where all have them."""

    def between(first: Any, others: list[Any]) -> Any:
        if isinstance(first, Tensor) and first.is_floating_point():
            return checkpoint.mean([first, *others])
        if isinstance(first, dict):
            return {
                k: between(v, [o[k] for o in others]) if all(k in o for o in others) else v for k, v in first.items()
            }
        return first

    first, *others = workers
    inner = {**first["inner"], "state": between(first["inner"]["state"], [o["inner"]["state"] for o in others])}
    buffers = [between(first["buffers"][i], [o["buffers"][i] for o in others]) for i in range(len(first["buffers"]))]
    return {**first, "inner": inner, "buffers": buffers, "in_flight": None, "random": None}


def _random() -> dict[str, Any]:
    name, keys, *rest = cast(tuple, numpy.random.get_state())  # noqa: NPY002  the one that transforms draw from
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def _set_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _unsafe(extra: dict[str, Any]) -> str:
    """A sentence on the first extra that could not be loaded again, or nothing."""
    for name, value in extra.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:
            return (
                f"{name} is of type {type(value).__name__} or holds what is not plain, and a checkpoint holds tensors and "
                "plain Python types only: give its state_dict(), .item() or .tolist()"
            )
    return ""


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        own = value.detach().cpu()  # a parameter is a view of the whole row, all of which would travel with it
        return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(v) for v in value)
    return value
