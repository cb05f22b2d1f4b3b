"""From a model and a loss to gradients of rows: forward under `torch.func.vmap`, one ordinary backward of the summed losses."""

import copy
import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .layout import Layout

log = logging.getLogger(__name__)


class Oracle:
    """Stochastic gradients of every row at once.

    Each row's loss depends on its own parameters only, so the gradient of Σ_i loss_i with respect to the rows is the stack
    of their gradients. What vmap refuses (data-dependent control flow, dropout, some operators) runs in a loop over rows.

    Args:
        model: the network; its own parameters serve as a template and are never written.
        loss: (outputs, targets) of one batch → scalar, the mean over the batch.

    >>> oracle = Oracle(nn.Linear(3, 1, bias=False), nn.functional.mse_loss)
    >>> x = torch.zeros(2, 3)                                           # two workers
    >>> g, loss = oracle(x, torch.ones(2, 4, 3), torch.tensor([1.0, 2.0])[:, None, None].expand(2, 4, 1))
    >>> g.tolist(), loss.tolist()
    ([[-2.0, -2.0, -2.0], [-4.0, -4.0, -4.0]], [1.0, 4.0])
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False) and getattr(module, "running_mean", None) is not None:
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) keeps running statistics, which would be shared by all "
                    "workers here: use nn.GroupNorm, or track_running_stats=False"
                )
        self.layout = Layout.of(model)
        self.model, self.loss = copy.deepcopy(model).train(), loss
        self._frozen = copy.deepcopy(model).eval()
        self._vectorised = True
        self.draws = True  # whether `keys` may matter
        self._seen: dict[str, tuple[int, int] | None] | None = {}  # where buffers were after the first call
        self._g = self._room = torch.empty(0, self.layout.d, dtype=self.layout.dtype, device=self.layout.device)
        self._views: list[Tensor] = []

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gradients (m, d), borrowed until the next call, and losses (m,) of rows x (m, d).

        Args:
            x: parameters of m rows.
            inputs: (m, b, …), each row's batch.
            targets: (m, b, …).
            keys: (m,) int64, the randomness of each row's random layers (dropout), see `gossip.rng`.
        """
        if len(self._g) != len(x) or self._g.dtype != x.dtype:
            if len(self._room) < len(x) or self._room.dtype != x.dtype:
                self._room = torch.empty_like(x, memory_format=torch.contiguous_format)
            self._g = self._room[: len(x)]  # fresh memory for every other number of rows would cost page faults
            self._views = list(self.layout.views(self._g).values())
        if self._vectorised:
            try:
                losses = self._gradients(x, inputs, targets)
                self.draws = False  # or vmap had refused it
            except (RuntimeError, ValueError) as refusal:
                losses = self._loop(x, inputs, targets, keys)  # a mistake of the user's is raised by the loop as well
                log.info("vmap refused this model, so gradients run in a loop over rows: %s", refusal)
                self._vectorised = False
        else:
            losses = self._loop(x, inputs, targets, keys)
        if self._seen is not None:
            self._refuse_memory()
        return self._g, losses

    def _refuse_memory(self) -> None:
        """Buffers that the second forward writes again (what the first one may have cached is constant)."""
        seen: dict[str, tuple[int, int] | None] = {}
        for name, b in self.model.named_buffers():
            try:
                seen[name] = b.data_ptr(), b._version
            except RuntimeError:  # assigned inside of vmap, a tensor that has no place outside
                seen[name] = None
            if seen[name] is None or (self._seen and self._seen.get(name) != seen[name]):
                raise ValueError(
                    f"buffer {name!r} is written by every forward and would be shared by all workers here: use a layer that "
                    "remembers nothing (not spectral_norm, running statistics or centers), or gossip.wrap, a worker per process"
                )
        self._seen = None if self._seen or not seen else seen

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Outputs (k, b, …) of each of k rows on the same inputs (b, …), in evaluation mode, without gradients."""
        with torch.no_grad():
            rows = self.layout.views(x)
            if self._vectorised:
                try:
                    return vmap(lambda p: functional_call(self._frozen, p, (inputs,)))(rows)
                except (RuntimeError, ValueError):
                    pass
            return torch.stack(
                [functional_call(self._frozen, {k: v[i] for k, v in rows.items()}, (inputs,)) for i in range(len(x))]
            )

    def _one(self, params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(functional_call(self.model, params, (inputs,)), targets)
        if loss.ndim:
            raise ValueError(
                f"the loss of one batch has shape {tuple(loss.shape)} and must be a scalar, its mean over the batch: "
                "use reduction='mean'"
            )
        return loss

    def _gradients(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(x).items()}
            losses = vmap(self._one)(leaves, inputs, targets)
            grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        torch._foreach_copy_(self._views, _dense(grads))
        return losses.detach()

    def _loop(self, x: Tensor, inputs: Tensor, targets: Tensor, keys: Tensor | None) -> Tensor:
        losses = x.new_empty(len(x))
        with torch.random.fork_rng(devices=[], enabled=keys is not None), torch.enable_grad():
            for i in range(len(x)):
                if keys is not None:
                    torch.manual_seed(int(keys[i]))
                leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(x[i]).items()}
                loss = self._one(leaves, inputs[i], targets[i])
                grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                torch._foreach_copy_([v[i] for v in self._views], _dense(grads))
                losses[i] = loss.detach()
        return losses


def _dense(grads: Iterable[Tensor]) -> list[Tensor]:
    return [g.to_dense() if g.is_sparse else g for g in grads]  # embeddings may have sparse ones
