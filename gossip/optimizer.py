"""The worker's local optimizer: any element-wise `torch.optim` optimizer, on a stack of rows as it stands."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

OptimizerFactory = Callable[[Iterable[Tensor]], Any]  # parameters → torch optimizer, or (optimizer, LR scheduler)

sgd: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)


def scheduled(optimizer: OptimizerFactory, scheduler: Callable[[torch.optim.Optimizer], Any]) -> OptimizerFactory:
    """An optimizer with a learning-rate scheduler of `torch.optim.lr_scheduler`, which ticks once per local step.

    >>> factory = scheduled(sgd, partial(torch.optim.lr_scheduler.StepLR, step_size=10, gamma=0.5))
    >>> local = LocalOptimizer(factory, torch.zeros(2, 3))
    >>> for _ in range(10):
    ...     local.step(torch.zeros(2, 3), torch.ones(2, 3))
    >>> local.lr
    0.05
    """
    return partial(_pair, optimizer, scheduler)


def _pair(optimizer: OptimizerFactory, scheduler: Callable, params: Iterable[Tensor]) -> tuple[Any, Any]:
    built = optimizer(params)
    return built, scheduler(built)


class LocalOptimizer:
    """One torch optimizer whose only parameter is the stack of rows; its buffers are leaves of the algorithm's state.

    An optimizer that is not element-wise (Muon, Adafactor, LBFGS) would mix rows, so it is probed on two rows and refused.

    Args:
        factory: makes the optimizer, for example `functools.partial(torch.optim.SGD, lr=0.1)`.
        like: the rows (m, d) that it will update.
    """

    def __init__(self, factory: OptimizerFactory, like: Tensor, probe: bool = True) -> None:
        if not like.is_floating_point():
            raise ValueError(f"rows of dtype {like.dtype} cannot be averaged or stepped: convert them, rows.double()")
        if probe:
            refuse_unless_row_wise(factory, like)
        self.factory = factory
        self._param = torch.nn.Parameter(like.detach())
        built = factory([self._param])
        self.optimizer, self.scheduler = built if isinstance(built, tuple) else (built, None)
        for group in self.optimizer.param_groups:
            if "foreach" in group:  # useless for one tensor, and SGD's with Nesterov momentum writes to the gradient
                group["foreach"] = False

    def step(self, x: Tensor, g: Tensor) -> None:
        """One step of the rows x along their gradients g, in place."""
        self._param.data, self._param.grad = x, g
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its buffers by name; those without axes (step counts) are shared by all rows."""
        state = self.optimizer.state.get(self._param, {})
        return {name: value for name, value in sorted(state.items()) if isinstance(value, Tensor)}

    @property
    def plain(self) -> dict[str, Any]:
        """What is not a tensor: what it is, the options of its group, and the scheduler's state."""
        (group,) = self.optimizer.param_groups
        return {
            "kind": " with ".join(type(part).__name__ for part in (self.optimizer, self.scheduler) if part is not None),
            "group": {k: v for k, v in group.items() if k != "params"},
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        """Take over buffers and options, for example from a checkpoint."""
        self.optimizer.param_groups[0].update(plain["group"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(plain["scheduler"])
        if tensors:
            self.optimizer.state[self._param] = dict(tensors)

    def take(self, rows: Tensor) -> "LocalOptimizer":
        """The same optimizer for some of the rows, with copies of their buffers."""
        new = LocalOptimizer(self.factory, self._param.data[rows], probe=False)
        new.load({k: v[rows] if v.ndim else v.clone() for k, v in self.tensors.items()}, copy.deepcopy(self.plain))
        return new


def refuse_unless_row_wise(factory: OptimizerFactory, like: Tensor) -> None:
    """Two rows together must step as each does alone."""
    start = torch.tensor([[1.0, -2.0, 3.0], [30.0, 10.0, -20.0]], dtype=like.dtype, device=like.device)

    def stepped(x: Tensor) -> Tensor:
        x = x.clone()
        local = LocalOptimizer(factory, x, probe=False)
        for scale in (0.5, -2.0):
            local.step(x, x * scale + 1)
        return x

    try:
        together = stepped(start)
        row_wise = all(torch.allclose(together[i : i + 1], stepped(start[i : i + 1]), equal_nan=True) for i in range(2))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{_name(factory)} could not step a stack of rows: {error}. Mend its options, or use an element-wise torch.optim "
            "optimizer, such as SGD or Adam"
        ) from error
    if not row_wise:
        raise ValueError(
            f"{_name(factory)} is not element-wise: stepping two workers' rows together differs from stepping each alone, "
            "so it would leak between workers; use an element-wise torch.optim optimizer (SGD, Adam, AdamW, …)"
        )


def _name(factory: OptimizerFactory) -> str:
    inner: Any = factory
    while isinstance(inner, partial):
        inner = inner.args[0] if inner.func is _pair else inner.func
    return getattr(inner, "__name__", repr(inner))
