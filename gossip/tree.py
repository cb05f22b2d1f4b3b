"""States as trees: NamedTuples of tensors, None and local optimizers, walked by name."""

from typing import Any

from torch import Tensor

from .optimizer import LocalOptimizer


def nodes(state: Any, prefix: str = "") -> dict[str, Tensor | LocalOptimizer]:
    """Every tensor and local optimizer of a state by its dotted name.

    >>> import torch
    >>> from gossip.algorithm import Rows
    >>> list(nodes(Rows(torch.zeros(2, 3), None)))
    ['x']
    """
    if isinstance(state, Tensor | LocalOptimizer):
        return {prefix: state}
    if state is None:
        return {}
    if not isinstance(state, tuple):
        raise TypeError(
            f"{prefix or 'a state'} is a {type(state).__name__}: a state may hold tensors, tuples, None and local optimizers"
        )
    names = getattr(state, "_fields", range(len(state)))
    return {
        name: node
        for field, child in zip(names, state)
        for name, node in nodes(child, f"{prefix}.{field}" if prefix else str(field)).items()
    }


def leaves(state: Any) -> dict[str, Tensor]:
    """Every tensor of a state by its dotted name, the optimizers' buffers included."""
    found: dict[str, Tensor] = {}
    for name, node in nodes(state).items():
        found |= {name: node} if isinstance(node, Tensor) else {f"{name}.{k}": v for k, v in node.tensors.items()}
    return found


def take(state: Any, rows: Tensor) -> Any:
    """Copies of some rows of every leaf; leaves without axes are shared by all rows and copied whole."""
    if isinstance(state, Tensor):
        return state[rows] if state.ndim else state.clone()
    if isinstance(state, LocalOptimizer):
        return state.take(rows)
    if state is None:
        return None
    children = [take(child, rows) for child in state]
    return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
