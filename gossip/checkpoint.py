"""A checkpoint: one table of all workers' rows and all state, so that it restores in any placement."""

import contextlib
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphs import Schedule

from . import tree
from .algorithm import Algorithm, State
from .network import Network
from .optimizer import LocalOptimizer

VERSION = 1


def table(state: State, net: Network, round: int) -> dict[str, Any]:
    """All rows of all state at every process, as tensors and plain Python types. Every process must call it.

    Randomness is counter-based and batches are functions of the step, so the round is all that there is to save of them.
    """
    nodes = tree.nodes(state)
    own = tree.leaves(state)
    mine = own, net.meter.state_dict(), net.meter.wire_bytes
    parts = [mine] if net.transport is None else net.transport.gather(mine)
    leaves = {}
    for name, leaf in own.items():
        leaves[name] = leaf.new_empty((net.n, *leaf.shape[1:])) if leaf.ndim else leaf.clone()
        for block, (theirs, _, _) in zip(net.placement.blocks, parts if leaf.ndim else ()):
            leaves[name][list(block)] = theirs[name]
    return {
        "version": VERSION,
        "n": net.n,
        "round": round,
        "schedule": net.schedule.digest,
        "leaves": leaves,
        "plain": {name: node.plain for name, node in nodes.items() if isinstance(node, LocalOptimizer)},
        "meter": {
            "codes": torch.cat([meter["codes"] for _, meter, _ in parts]),
            "counts": torch.cat([meter["counts"] for _, meter, _ in parts], 1),
            "wire_bytes": sum(bytes for _, _, bytes in parts),
        },
    }


def write(path: str | Path, table: dict[str, Any]) -> None:
    """Write a table; a crash while writing leaves the former file.

    Raises:
        OSError: it could not be written: no space, no permission, no such place.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(table, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own, after a write that failed
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(
            f"the checkpoint {path} could not be written ({cause}), and a former one is as it was: give a file on a disk with "
            "room, in a folder that may be written to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def read(path: str | Path) -> dict[str, Any]:
    """Read a table, in torch's safe mode."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: a run writes one there when checkpoints are on")
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()  # torch does not look at the checksums
        if broken:
            raise ValueError(f"the checksum of its part {broken} is wrong")
        table = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint ({error}): resume from another one") from error
    if not isinstance(table, dict) or table.get("version") != VERSION:
        found = table.get("version") if isinstance(table, dict) else type(table).__name__
        raise ValueError(f"{path} is a checkpoint of version {found}, and this library reads version {VERSION}")
    return table


def restore(table: dict[str, Any], state: State, net: Network) -> int:
    """Fill a freshly initialised state, in whatever placement, and the meter; returns the round to go on from.

    The state may be that of a simulation although real workers saved it, see `gossip.save`.
    """
    if table["n"] != net.n:
        raise ValueError(
            f"the checkpoint holds n={table['n']} workers and this run has n={net.n}: resume with the same n, or let every "
            "worker start at their average model: resume_average=true of the command, average=True of gossip.load"
        )
    table = stacked(table)
    nodes = tree.nodes(state)
    _refuse_unless_fitting(table, nodes)

    for name, node in nodes.items():
        if isinstance(node, LocalOptimizer):
            inside = {k.removeprefix(f"{name}."): v for k, v in table["leaves"].items() if k.startswith(f"{name}.")}
            device = next(iter(tree.leaves(state).values())).device
            rows = {k: v[net.rows].to(device) if v.ndim else v.clone() for k, v in inside.items()}
            node.load(rows, table["plain"][name])
        else:
            node.copy_(table["leaves"][name][net.rows] if node.ndim else table["leaves"][name])
    net.meter.load_state_dict(table["meter"], net.rows)
    net.meter.wire_bytes = table["meter"]["wire_bytes"] if net.placement.rank == 0 else 0
    return table["round"]


def compare_graphs(table: dict[str, Any], schedule: Schedule, algorithm: Algorithm) -> None:
    """Warn of a checkpoint that was made on another graph; refuse it if the algorithm's memory depends on that W.

    Raises:
        ValueError: the algorithm requires a static W, because its running sums were made with it (CHOCO, exact diffusion).
    """
    if table.get("schedule", schedule.digest) == schedule.digest:
        return
    if "static" in algorithm.requires:
        raise ValueError(
            f"the checkpoint was made on another graph or with other weights, and what {type(algorithm).__name__} remembers "
            "was summed up with those: resume with the same topology, weights and schedule, or use an algorithm without "
            "memory of past mixing (DPSGD, SGP)"
        )
    warnings.warn(
        "the checkpoint was made on another graph or with other weights: the run goes on with those given now",
        stacklevel=3,
    )


def reshard(table: dict[str, Any], algorithm: Algorithm, n: int) -> dict[str, Any]:
    """The checkpoint of n workers who all start where the average of the saved ones is, with a warning.

    Their optimizers' buffers are averaged too, and the algorithm's memory (x̂, s, y, w, …) starts anew. What one of the
    saved workers had sent on average is booked as sent by each new one to itself, so that bits per worker go on.
    """
    x = table["leaves"]["x"]
    state = algorithm.init(torch.zeros_like(x))
    old = {name: node for name, node in tree.nodes(state).items() if isinstance(node, Tensor)}
    optimizers = [f"{name}." for name, node in tree.nodes(state).items() if isinstance(node, LocalOptimizer)]
    buffers = {k: v for k, v in table["leaves"].items() if k.startswith(tuple(optimizers))}
    _refuse_other_leaves({k: v for k, v in table["leaves"].items() if k not in buffers}, old)
    for name, leaf in old.items():
        leaf.copy_(table["leaves"][name])
    start = mean(list(algorithm.params(state)))
    fresh = tree.nodes(algorithm.init(start.expand(n, -1).clone()))
    leaves = {name: node for name, node in fresh.items() if isinstance(node, Tensor)}
    for name, leaf in buffers.items():
        leaves[name] = mean(list(leaf)).expand(n, *leaf.shape[1:]).clone() if leaf.ndim else leaf
    sent = table["meter"]["counts"].sum(1, keepdim=True) // table["n"]
    meter = table["meter"] | {"codes": torch.arange(n) * (n + 1), "counts": sent.expand(2, n).clone()}
    memory = ", ".join(name for name in old if name != "x")
    warnings.warn(
        f"a checkpoint of n={table['n']} workers is resumed by n={n}: every worker starts at their average model with the "
        "average of the optimizers' buffers"
        + (f", and the memory of {type(algorithm).__name__} ({memory}) starts anew" if memory else ""),
        stacklevel=2,
    )
    table = {k: v for k, v in table.items() if k != "schedule"}  # that of another n is not to be compared with
    return table | {"n": n, "leaves": leaves, "meter": meter}


def mean(tensors: list[Tensor]) -> Tensor:
    """The mean of equal shapes, summed in float64."""
    return torch.stack(tensors).double().mean(0).to(tensors[0].dtype)


def stacked(table: dict[str, Any]) -> dict[str, Any]:
    """A table of real workers, whose optimizers saw one tensor per parameter, as one of stacked rows; others as they are."""
    if "workers" not in table:
        return table

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f"the checkpoint was saved by gossip.save, and {reason}, which rows in one process do not have: "
            "load it by gossip.load in the loop that saved it"
        )

    inner = [worker["inner"] for worker in table["workers"]]
    if any(worker["in_flight"] is not None for worker in table["workers"]):
        raise refuse("a message is in flight")
    if table["steps"] % table["local_steps"]:
        raise refuse(f"it is at step {table['steps']}, in the middle of a round")
    if len(inner[0]["param_groups"]) > 1:
        raise refuse("its optimizers have several parameter groups")
    group = inner[0]["param_groups"][0]
    buffers = [[own["state"].get(i, {}) for i in group["params"]] for own in inner]
    if len({tuple(buffer) for own in buffers for buffer in own}) > 1:
        raise refuse("some parameters had no gradients")
    leaves = dict(table["leaves"])
    for key, value in buffers[0][0].items():
        parts = [[buffer[key] for buffer in own] for own in buffers]
        if value is None:
            continue
        if value.ndim:
            leaves[f"opt.{key}"] = torch.stack([torch.cat([_in_memory_order(p) for p in own]) for own in parts])
        elif any(not torch.equal(p, value) for own in parts for p in own):
            raise refuse(f"its optimizers' {key} differ")
        else:
            leaves[f"opt.{key}"] = value
    options = {k: v for k, v in group.items() if k not in ("params", "foreach")}
    plain = {"opt": {"kind": table["kind"], "group": options, "scheduler": None}}
    return {k: v for k, v in table.items() if k != "workers"} | {"leaves": leaves, "plain": plain}


def _in_memory_order(p: Tensor) -> Tensor:
    """A dense tensor as it lies in memory, which is its order in the row."""
    return p.as_strided((p.numel(),), (1,))


def _refuse_unless_fitting(table: dict[str, Any], nodes: dict[str, Tensor | LocalOptimizer]) -> None:
    """The checkpoint must hold the same leaves and optimizers as the state, no fewer and no more."""
    own = {name: node.plain["kind"] for name, node in nodes.items() if isinstance(node, LocalOptimizer)}
    for name in own | table["plain"]:
        saved, needed = table["plain"].get(name, {}).get("kind", "nothing"), own.get(name, "nothing")
        if saved != needed:
            raise ValueError(
                f"the checkpoint has {saved} for {name}, and this run needs {needed}: resume with the same optimizer and "
                "scheduler"
            )
    _refuse_other_leaves(
        {k: v for k, v in table["leaves"].items() if not k.startswith(tuple(f"{name}." for name in own))},
        {k: v for k, v in nodes.items() if isinstance(v, Tensor)},
    )


def _refuse_other_leaves(saved: dict[str, Tensor], needed: dict[str, Tensor]) -> None:
    def kind(leaf: Tensor | None) -> str:
        dtype = "" if leaf is None else str(leaf.dtype).removeprefix("torch.")
        return "nothing" if leaf is None else f"{dtype} rows of shape {tuple(leaf.shape[1:])}"

    for name in needed | saved:
        if kind(saved.get(name)) != kind(needed.get(name)):
            raise ValueError(
                f"the checkpoint has {kind(saved.get(name))} for {name}, and this run needs {kind(needed.get(name))}: "
                "resume with the same algorithm, model and dtype"
            )
