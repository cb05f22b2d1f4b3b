"""A module's floating buffers, such as BatchNorm's statistics, as one row that is mixed."""

from typing import Any

import torch
from torch import Tensor, nn

from .layout import Layout
from .network import Network

# the unit vectors of torch's two spectral_norms: a mean of unit vectors is none, and the norm would be underestimated
SINGULAR = {"_u", "_v", "weight_u", "weight_v"}


def mixable(model: nn.Module) -> list[str]:
    """The names of the buffers that are mixed.

    >>> mixable(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))), mixable(nn.BatchNorm1d(2))
    ([], ['running_mean', 'running_var'])
    """
    floating = (name for name, b in model.named_buffers() if b.is_floating_point())
    return [name for name in floating if name.rpartition(".")[2] not in SINGULAR]


class MixedBuffers:
    """The mixable buffers of a module (at least one); running variances travel as second moments, E z² = var + mean²."""

    def __init__(self, model: nn.Module) -> None:
        self.names = mixable(model)
        parts = (name.rpartition(".") for name in self.names)
        self._places = [(model.get_submodule(path), name) for path, _, name in parts]
        buffers = self.buffers
        dtype = torch.float32
        for b in buffers:
            dtype = torch.promote_types(dtype, b.dtype)
        layout = Layout.of([(name, b.to(dtype)) for name, b in zip(self.names, buffers)])
        self.row = torch.zeros(1, layout.d, dtype=dtype, device=layout.device)
        self.views = list(layout.views(self.row[0]).values())
        place = dict(zip(buffers, self.views))
        norms: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "running_var", None), Tensor)]
        self.moments = [(place[m.running_mean], place[m.running_var]) for m in norms]

    @property
    def buffers(self) -> list[Tensor]:
        """Those of now: a module may assign a new tensor to its buffer at every step."""
        return [getattr(module, name) for module, name in self._places]

    def mix(self, net: Network) -> None:
        """Mix them by W of the current round, in place."""
        buffers = self.buffers
        torch._foreach_copy_(self.views, buffers)
        for mean, var in self.moments:
            var.addcmul_(mean, mean)
        net.mix(self.row)
        for mean, var in self.moments:
            var.addcmul_(mean, mean, value=-1).clamp_(min=0)
        torch._foreach_copy_(buffers, self.views)
