"""Some rows of a state on their own: gathered, handed to an algorithm's maps, put back; an optimizer for each row."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .optimizer import LocalOptimizer, OptimizerFactory


class RowOptimizers(LocalOptimizer):
    """An optimizer of its own for each row, with its own buffers, step count and learning-rate schedule.

    One without any of these treats all rows alike, so that it steps any of them in one call.

    Args:
        factory: makes an optimizer from parameters.
        like: the rows (m, d).

    >>> rows = RowOptimizers(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5), torch.zeros(2, 1))
    >>> x, one = torch.zeros(1, 1), torch.ones(1, 1)
    >>> for row in (0, 0, 1):
    ...     rows.at(torch.tensor([row])).step(x, one)                                      # 1, then 1.5, and 1 again
    >>> x
    tensor([[-3.5000]])
    """

    def __init__(self, factory: OptimizerFactory, like: Tensor) -> None:
        super().__init__(factory, like[:1].clone(), probe=False)
        self.m = len(like)
        tried = LocalOptimizer(factory, like[:1].clone(), probe=False)
        tried.step(torch.zeros_like(like[:1]), torch.zeros_like(like[:1]))
        self._blank = {name: torch.zeros_like(value) for name, value in tried.tensors.items()}
        self.alike = not self._blank and self.scheduler is None
        self.made = torch.zeros(self.m, dtype=torch.int64)  # steps, where they matter
        self.each = (
            [] if self.alike else [LocalOptimizer(factory, like[:1].clone(), probe=False) for _ in range(self.m)]
        )

    def at(self, rows: Tensor) -> "At":
        """The optimizer of these rows (k,), whose `step` takes as many."""
        return At(self, rows)

    def step(self, x: Tensor, g: Tensor) -> None:
        """All rows step."""
        self.at(torch.arange(self.m)).step(x, g)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Buffers of all rows by name, zero for one that has not stepped; and how often each has."""
        found = {"made": self.made}
        for name, blank in self._blank.items():
            own = [one.tensors.get(name, blank) for one in self.each]
            found[name] = torch.cat(own) if blank.ndim else torch.stack(own)
        return found

    def load(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        """Take over buffers and step counts; schedules go on from as many steps."""
        self.made = tensors["made"].cpu().clone()
        group = plain["group"]
        rates = self._schedule(int(self.made.max()) if self.m else 0)
        for i, one in enumerate(self.each):
            made = int(self.made[i])
            state, options = rates[made] if self.scheduler is not None else (None, group)
            buffers = {k: (tensors[k][i : i + 1] if b.ndim else tensors[k][i]).clone() for k, b in self._blank.items()}
            one.load(buffers if made else {}, {"group": dict(group) | options, "scheduler": state})
        if self.alike:
            super().load({}, plain | {"scheduler": None})

    def _schedule(self, last: int) -> list[tuple[Any, dict[str, Any]]]:
        """The scheduler's state and the options of the group after 0, 1, …, `last` steps."""
        if self.scheduler is None:
            return []
        one = LocalOptimizer(self.factory, self._param.data.clone(), probe=False)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer itself does not step here
            for _ in range(last + 1):
                found.append((one.plain["scheduler"], dict(one.plain["group"])))
                cast("Any", one.scheduler).step()
        return found


class At:
    """Some rows' optimizers."""

    def __init__(self, all: RowOptimizers, rows: Tensor) -> None:
        self.all, self.rows = all, rows

    def step(self, x: Tensor, g: Tensor) -> None:
        """One step of each of the rows x (k, d) along g, in place."""
        if self.all.alike:
            LocalOptimizer.step(self.all, x, g)
            return
        self.all.made[self.rows] += 1
        for place, row in enumerate(self.rows.tolist()):
            self.all.each[row].step(x[place : place + 1], g[place : place + 1])


def spread(state: Any, links: int, memory: frozenset[str]) -> Any:
    """The state with an optimizer per row, and with room for `links` links in the leaves named `memory`."""
    like = next(node for node in state if isinstance(node, Tensor))

    def child(name: str, node: Any) -> Any:
        if isinstance(node, LocalOptimizer):
            return RowOptimizers(node.factory, like)
        if isinstance(node, Tensor) and name in memory:
            return node[:, None].expand(len(node), links, *node.shape[1:]).clone()
        return node

    return _mapped(child, state)


def _mapped(change: Callable[..., Any], *states: Any, name: str = "") -> Any:
    """A state with every leaf changed: change(name of the outermost field, leaf, …), of several states alike."""
    state = states[0]
    if isinstance(state, tuple):
        names = [name] * len(state) if name else getattr(state, "_fields", [""] * len(state))
        children = [_mapped(change, *nodes, name=n) for n, *nodes in zip(names, *states)]
        return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
    return None if state is None else change(name, *states)


class RowBuffers:
    """Buffers for gathered rows, which are kept between calls and only ever grow."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def select(self, name: str, leaf: Tensor, index: Tensor) -> Tensor:
        """leaf[index], in the buffer of that name."""
        held = self._held.get(name)
        if held is None or len(held) < len(index) or held.dtype != leaf.dtype or held.shape[1:] != leaf.shape[1:]:
            held = self._held[name] = leaf.new_empty((len(index), *leaf.shape[1:]))
        return torch.index_select(leaf, 0, index, out=held[: len(index)])


def gather(state: Any, index: Tensor, buffers: RowBuffers, memory: frozenset[str], slots: Tensor | None) -> Any:
    """Rows `index` of a spread state, in memory of their own; of the `memory` leaves those at `slots` (k,)."""
    number = itertools.count()

    def child(name: str, node: Any) -> Any:
        place = f"{name} {next(number)}"
        if isinstance(node, RowOptimizers):
            return node.at(index)
        if name in memory:
            return buffers.select(place, node.flatten(0, 1), index * node.shape[1] + (0 if slots is None else slots))
        return buffers.select(place, node, index)

    return _mapped(child, state)


def head(state: Any, k: int) -> Any:
    """The first k rows of a gathered state, as views."""
    return _mapped(lambda name, node: At(node.all, node.rows[:k]) if isinstance(node, At) else node[:k], state)


def changed(before: Any, after: Any) -> None:
    """Write what a map has made into the rows that it was given, unless it did so itself."""

    def child(name: str, old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and new is not old:
            old.copy_(new)

    _mapped(child, before, after)


def write(leaf: Tensor, index: Tensor, rows: Tensor) -> None:
    """leaf[index] = rows, in place."""
    if leaf.device.type == "cpu" and leaf.dtype in (torch.float32, torch.float64):
        leaf.numpy()[index.numpy()] = rows.numpy()  # copies row by row, in two thirds of index_copy_'s time
    else:
        leaf.index_copy_(0, index, rows)


def put(state: Any, index: Tensor, part: Any, memory: frozenset[str], slots: Tensor | None) -> None:
    """Write gathered rows back."""

    def child(name: str, node: Any, rows: Any) -> None:
        if isinstance(node, RowOptimizers):
            return
        if name not in memory:
            write(node, index, rows)
        elif slots is not None:
            write(node.view(-1, *node.shape[2:]), index * node.shape[1] + slots, rows)

    _mapped(child, state, part)
