"""`wrap(optimizer, algorithm, mixing)`: any torch optimizer, made decentralized, in an ordinary training loop under torchrun."""

import contextlib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs import Schedule, Topology, as_schedule

from . import tree
from .algorithm import Algorithm, check
from .layout import Layout
from .network import Network
from .placement import Placement
from .transport import Transport, connect


def wrap(
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    mixing: Schedule | Tensor | Topology,
    *,
    local_steps: int = 1,
    transport: Transport | None = None,
    seed: int = 0,
    broadcast: bool = True,
    force: bool = False,
) -> "GossipOptimizer":
    """Make an optimizer decentralized: this process is one worker, and each `step` ends with an exchange.

    The parameters become views of one flat row, so that mixing copies nothing back.

    Args:
        optimizer: any torch optimizer over this worker's parameters; its learning rates stay adjustable.
        algorithm: for example `gossip.Choco(compressor=gossip.TopK(0.01), gamma=0.05)`; `optimizer` replaces its own.
        mixing: a schedule, a mixing matrix or a topology with as many workers as there are processes.
        local_steps: exchange after every so many steps.
        transport: the processes; `gossip.connect()` (torchrun's environment) if None.
        seed: of the randomness of compressors; the same on every rank.
        broadcast: start every worker from rank 0's parameters.
        force: run although the algorithm refuses the schedule, with a warning.

    Raises:
        Incompatible: the algorithm refuses the schedule.
        ValueError: the ranks disagree on shapes, algorithm or schedule; the message names the first difference.
    """
    return GossipOptimizer(optimizer, algorithm, mixing, local_steps, transport, seed, broadcast, force)


class _Users:
    """The user's optimizer as the local optimizer of one row."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor], layout: Layout) -> None:
        self.optimizer, self.params, self.layout = optimizer, params, layout
        self.own: Tensor | None = None  # the row made of the parameters' own gradients

    def step(self, x: Tensor, g: Tensor) -> None:
        """Step the row x along g; the parameters' own gradients are used as they stand, None included."""
        moved = [(p, p.data, p.grad) for p in self.params]
        views_x, views_g = self.layout.views(x[0]).values(), self.layout.views(g[0]).values()
        for p, vx, vg in zip(self.params, views_x, views_g):
            p.data = vx
            if g is not self.own:
                p.grad = (
                    vg.clone()
                )  # it is the algorithm's, and some optimizers write into gradients (foreach Nesterov)
        self.optimizer.step()
        for p, data, grad in moved:
            p.data, p.grad = data, grad


class GossipOptimizer(torch.optim.Optimizer):
    """What `wrap` returns: a torch optimizer whose `step` also gossips. LR schedulers and `state_dict` work as usual."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        mixing: Schedule | Tensor | Topology,
        local_steps: int,
        transport: Transport | None,
        seed: int,
        broadcast: bool,
        force: bool,
    ) -> None:
        _refuse_kinds(optimizer, algorithm)
        if local_steps < 1:
            raise ValueError(f"local_steps={local_steps} is below 1: exchange after every so many steps, at least one")
        schedule = as_schedule(mixing)
        check(algorithm, schedule, local_steps=local_steps, force=force)
        transport = transport or connect()
        if schedule.n != transport.size:
            raise ValueError(
                f"the mixing has {schedule.n} workers and there are {transport.size} processes: one worker per process, "
                f"so start {schedule.n} processes or use a graph of {transport.size} workers"
            )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self.param_groups = optimizer.param_groups  # shared, so that LR schedulers reach the optimizer
        self.state = optimizer.state
        params = [p for group in optimizer.param_groups for p in group["params"]]
        named = [(f"parameter {i}", p) for i, p in enumerate(params)]
        layout = Layout.of(named)
        transport.agree(
            {name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in named}
            | {
                "algorithm": re.sub(" at 0x[0-9a-f]+", "", repr(algorithm)),
                "local_steps": local_steps,
                "seed": seed,
                "schedule": _digest(schedule),
            }
        )

        self.algorithm, self.local_steps, self.steps = algorithm, local_steps, 0
        self.net = Network(schedule, Placement.even(schedule.n, transport.size, transport.rank), transport, seed)
        x = layout.flatten(named)[None]
        if broadcast:
            transport.broadcast_(x)
        self._users = _Users(optimizer, params, layout)
        self._g = torch.zeros_like(x)
        self._g_views = list(layout.views(self._g[0]).values())
        state = algorithm.init(x)
        if "opt" not in getattr(state, "_fields", ()):
            raise TypeError(
                f"the state of {type(algorithm).__name__} has no field `opt`: an algorithm keeps its local optimizer "
                "there, so that wrap can put the user's in its place"
            )
        self.gossip = state._replace(opt=self._users)
        for p, view in zip(params, layout.views(algorithm.params(self.gossip)[0]).values()):
            p.data = view

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """The local step; then, after every `local_steps` of them, the exchange."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.gossip = self.algorithm.compute(self.gossip, self._gradient)
        self.steps += 1
        if self.steps % self.local_steps == 0:
            self.net.begin(self.rounds - 1)
            self.gossip = self.algorithm.communicate(self.gossip, self.net)
        self.algorithm.params(self.gossip)
        return loss

    def _gradient(self, x: Tensor) -> Tensor:
        for p, view in zip(self._users.params, self._g_views):
            view.zero_() if p.grad is None else view.copy_(p.grad.to_dense())  # embeddings may have sparse ones
        self._users.own = self._g
        return self._g

    @property
    def rounds(self) -> int:
        """Exchanges done."""
        return self.steps // self.local_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once wrapped: all workers' rows have a fixed length."""
        if hasattr(self, "net"):
            raise ValueError(
                "parameters cannot be added after wrap: add the group to the optimizer first, then wrap it"
            )
        super().add_param_group(param_group)

    @contextlib.contextmanager
    def average_model(self) -> Iterator[None]:
        """Inside, every worker's parameters are the exact average of all workers'; afterwards its own again."""
        x = self.algorithm.params(self.gossip)
        own = x.clone()
        x.copy_(self.net.mean(x))
        try:
            yield
        finally:
            x.copy_(own)

    def consensus_distance(self) -> float:
        """(1/n) Σ_i ‖x_i − x̄‖² over all workers; every rank must call it."""
        x = self.algorithm.params(self.gossip)
        return float(self.net.mean((x - self.net.mean(x)).square().sum(1)))

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, this worker's gossip state and the step count; for this rank."""
        return {
            "inner": self.inner.state_dict(),
            "gossip": {k: v.clone() for k, v in tree.leaves(self.gossip._replace(opt=None)).items()},
            "steps": self.steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned at this rank, the parameters included."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        own = tree.leaves(self.gossip._replace(opt=None))
        if own.keys() != state_dict["gossip"].keys():
            raise ValueError(
                f"the state holds {sorted(state_dict['gossip'])} and {type(self.algorithm).__name__} needs {sorted(own)}: "
                "load it into the same algorithm"
            )
        for name, leaf in own.items():
            leaf.copy_(state_dict["gossip"][name])
        self.steps = state_dict["steps"]


def _refuse_kinds(optimizer: Any, algorithm: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, GossipOptimizer):
        raise TypeError(
            f"wrap got a {type(optimizer).__name__}, and takes a torch optimizer that is not wrapped yet: "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, and an exchange needs one gradient per "
            "step: use an optimizer whose step works without a closure, such as SGD or Adam"
        )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"wrap got {algorithm!r} for an algorithm: pass an instance, such as gossip.DPSGD()")


def _digest(schedule: Schedule) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for k in range(min(schedule.period or 64, 64)):
        W = schedule(k)
        coo = (W if W.is_sparse else W.to_sparse_coo()).coalesce()
        digest.update(coo.indices().numpy().tobytes() + coo.values().numpy().tobytes())
    return digest.hexdigest()
