"""A checkpoint: one table of all workers' rows and all state, so that it restores in any placement."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import tree
from .algorithm import State
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
        "leaves": leaves,
        "plain": {name: node.plain for name, node in nodes.items() if isinstance(node, LocalOptimizer)},
        "meter": {
            "codes": torch.cat([meter["codes"] for _, meter, _ in parts]),
            "counts": torch.cat([meter["counts"] for _, meter, _ in parts], 1),
            "wire_bytes": sum(bytes for _, _, bytes in parts),
        },
    }


def save(path: str | Path, table: dict[str, Any]) -> None:
    """Write a table; a crash while writing leaves the former file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        torch.save(table, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: str | Path) -> dict[str, Any]:
    """Read a table, in torch's safe mode."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: a run writes one there when checkpoints are on")
    table = torch.load(path, weights_only=True)
    if not isinstance(table, dict) or table.get("version") != VERSION:
        found = table.get("version") if isinstance(table, dict) else type(table).__name__
        raise ValueError(f"{path} is a checkpoint of version {found}, and this library reads version {VERSION}")
    return table


def restore(table: dict[str, Any], state: State, net: Network) -> int:
    """Fill a freshly initialised state, in whatever placement, and the meter; returns the round to go on from."""
    if table["n"] != net.n:
        raise ValueError(
            f"the checkpoint holds n={table['n']} workers and this run has n={net.n}: resume with the same n"
        )

    nodes = tree.nodes(state)
    _refuse_unless_fitting(table, nodes)

    def rows(leaf: Tensor) -> Tensor:
        return leaf[net.rows] if leaf.ndim else leaf.clone()

    for name, node in nodes.items():
        if isinstance(node, LocalOptimizer):
            inside = {
                k.removeprefix(f"{name}."): rows(v) for k, v in table["leaves"].items() if k.startswith(f"{name}.")
            }
            node.load(inside, table["plain"][name])
        else:
            node.copy_(rows(table["leaves"][name]))
    net.meter.load_state_dict(table["meter"], net.rows)
    net.meter.wire_bytes = table["meter"]["wire_bytes"] if net.placement.rank == 0 else 0
    return table["round"]


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

    def shape(leaf: Tensor | None) -> str:
        return "nothing" if leaf is None else f"rows of shape {tuple(leaf.shape[1:])}"

    saved = {k: v for k, v in table["leaves"].items() if not k.startswith(tuple(f"{name}." for name in own))}
    needed = {k: v for k, v in nodes.items() if isinstance(v, Tensor)}
    for name in needed | saved:
        if shape(saved.get(name)) != shape(needed.get(name)):
            raise ValueError(
                f"the checkpoint has {shape(saved.get(name))} for {name}, and this run needs {shape(needed.get(name))}: "
                "resume with the same algorithm and model"
            )
