"""One worker's parameters as a row: views where dtype and storage allow it, refreshed copies where they do not."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Layout


class ModelRow:
    """The parameters behind a user's optimizer, the flat row that stands for them, and that optimizer on the row.

    float32 and float64 parameters become views of the row, so that mixing copies nothing back. Parameters of lower
    precision, or sharded ones (DTensor), are copies: the row is the float32 master, and they are refreshed from it.
    While the optimizer steps it sees `masters`, views of the algorithm's row; at all other times its groups hold the
    model's own parameters, so that GradScaler, clipping and LR schedulers work on them as ever.

    Args:
        optimizer: the user's, over this worker's parameters; frozen ones (`requires_grad=False`) have no part in the row.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.every = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained = [p.requires_grad for p in self.every]
        self.params = [p for p in self.every if p.requires_grad]
        dtype = torch.float32
        for p in self.params:
            dtype = torch.promote_types(dtype, p.dtype)
        self.layout = Layout.of([(f"parameter {i}", _local(p).detach().to(dtype)) for i, p in enumerate(self.params)])
        self.x = self.layout.flatten([("", _local(p)) for p in self.params])[None]
        self.g = torch.zeros_like(self.x)
        self.views_g = list(self.layout.views(self.g[0]).values())
        self.copies: list[tuple[Tensor, Tensor]] = []  # (parameter's storage, its view of the row)
        self.masters: list[torch.nn.Parameter] = []
        self._of_masters = 0

    def show(self, z: Tensor) -> None:
        """The model's parameters become those of the row z (1, d) from now on."""
        self.copies = []
        for p, view in zip(self.params, self.layout.views(z[0]).values()):
            if p.dtype == view.dtype and not hasattr(p, "to_local"):
                p.data = view
            else:
                self.copies.append((_local(p).detach(), view))

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the parameters that are copies up to date."""
        for p, view in self.copies:
            p.copy_(view)

    @torch.no_grad()
    def gradient(self, scale: Tensor | None = None) -> Tensor:
        """The parameters' gradients as a row (1, d), None as zero; divided by `scale` (of a GradScaler) if given."""
        for p, view in zip(self.params, self.views_g):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(_local(p.grad).to_dense())  # embeddings may have sparse ones
        return self.g if scale is None else self.g.div_(scale)

    def step(self, x: Tensor, g: Tensor) -> None:
        """The user's optimizer steps the row x along g, in place; parameters without a gradient have none there either."""
        if x.data_ptr() != self._of_masters:
            self._bind(x)
        own = g is self.g
        if not own:
            self.g.copy_(g)  # some optimizers write into gradients (foreach Nesterov), and g is the algorithm's
        for p, master, view in zip(self.params, self.masters, self.views_g):
            master.grad = view if p.grad is not None or not own else None
        with self.in_place():
            self.optimizer.step()

    def _bind(self, x: Tensor) -> None:
        """Masters are views of x; what the optimizer had remembered of the parameters goes over to them."""
        self._of_masters = x.data_ptr()
        old = self.masters or self.params
        self.masters = [torch.nn.Parameter(view) for view in self.layout.views(x[0]).values()]
        for before, master in zip(old, self.masters):
            if before in self.optimizer.state:
                self.optimizer.state[master] = {
                    k: _local(v).to(master.dtype) if isinstance(v, Tensor) and v.shape == before.shape else v
                    for k, v in self.optimizer.state.pop(before).items()
                }

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold the masters in place of the parameters."""
        stands_for: dict[Tensor, Any] = dict(zip(self.params, self.masters))
        own = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [stands_for.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, own):
                group["params"] = params

    def facts(self) -> dict[str, str]:
        """What all workers must agree on, by parameter."""
        return {
            f"parameter {i}": f"{tuple(_local(p).shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for i, p in enumerate(self.every)
        }

    def changed(self) -> str | None:
        """A sentence if a parameter was frozen or unfrozen since the start, else None."""
        for i, (p, trained) in enumerate(zip(self.every, self.trained)):
            if p.requires_grad != trained:
                return f"parameter {i} of shape {tuple(p.shape)} was {'frozen' if trained else 'unfrozen'} after wrap"
        return None


def _local(p: Tensor) -> Tensor:
    """A sharded tensor's own shard; any other tensor as it is."""
    return p.to_local() if hasattr(p, "to_local") else p
