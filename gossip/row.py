"""One worker's parameters as a row: views where dtype and storage allow it, refreshed copies where they do not."""

import contextlib
import inspect
import re
import weakref
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Layout
from .optimizer import refuse_unless_row_wise

_WRAPPED: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


class ModelRow:
    """The parameters behind a user's optimizer, the flat row that stands for them, and that optimizer on the row.

    float32 and float64 parameters become views of the row, so that mixing copies nothing back. Parameters of lower
    precision, or sharded ones (DTensor), are copies: the row is the float32 master, and they are refreshed from it.
    While the optimizer steps it sees `masters`, views of the algorithm's row; at all other times its groups hold the
    model's own parameters, so that GradScaler, clipping and LR schedulers work on them as ever.

    Args:
        optimizer: the user's, over this worker's parameters; frozen ones (`requires_grad=False`) have no part in the row.
        model: whose parameters' names and whose buffers all workers must agree on; an optimizer that was given
            `named_parameters()` knows the names itself.

    Attributes:
        x: the row (1, d), from which an algorithm starts.
        own: (1, d) without numbers: stands for the parameters' own gradients, where they are.

    >>> linear = torch.nn.Linear(3, 2)
    >>> row = ModelRow(torch.optim.SGD(linear.parameters(), lr=0.5))
    >>> row.show(row.x)
    >>> linear(torch.ones(3)).sum().backward()
    >>> before = row.x.clone()
    >>> row.step(row.x, row.gradient())
    >>> torch.allclose(row.x, before - 0.5), bool((linear.bias == row.x[0, 6:]).all())
    (True, True)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
        self.optimizer, self.model = optimizer, model
        self.every = [p for group in optimizer.param_groups for p in group["params"]]
        self.names = _names(optimizer, model)
        _refuse_what_is_no_row(optimizer, self.every, self.names)
        self._stepping = False
        self.trained = [p.requires_grad for p in self.every]
        self.params = [p for p in self.every if p.requires_grad]
        dtype = torch.float32
        for p in self.params:
            dtype = torch.promote_types(dtype, p.dtype)
        self.layout = Layout.of([(f"parameter {i}", _local(p).detach().to(dtype)) for i, p in enumerate(self.params)])
        self.x = self.layout.flatten([("", _local(p)) for p in self.params])[None]
        self.own = torch.empty_like(self.x, device="meta")
        if self.sharded:
            _refuse_unless_element_wise(optimizer, self.x)
        self.masters = [torch.nn.Parameter(view) for view in self.layout.views(self.x[0]).values()]
        self._stands_for = dict(zip(self.params, self.masters))
        self._of_masters = self.x.data_ptr()
        self.copies: list[tuple[Tensor, Tensor]] = []  # (parameter's storage, its view of the row)
        self._apart: list[Tensor] = []
        self._versions: list[int] = []
        self._shown: list[int] = []

    @cached_property
    def g(self) -> Tensor:
        """Room for a gradient row (1, d), made when an algorithm needs it."""
        return torch.zeros_like(self.x)

    @cached_property
    def views_g(self) -> list[Tensor]:
        """The parameters' places in `g`."""
        return list(self.layout.views(self.g[0]).values())

    def show(self, z: Tensor) -> None:
        """The model's parameters become those of the row z (1, d) from now on, and the optimizer is the row's."""
        _WRAPPED.add(self.optimizer)
        self.optimizer.register_step_pre_hook(self._refuse_outside)
        for p, master in self._stands_for.items():
            if p in self.optimizer.state:  # it has stepped before
                self.optimizer.state[master] = {
                    k: _local(v).to(self.x.dtype) if isinstance(v, Tensor) and v.shape == p.shape else v
                    for k, v in self.optimizer.state.pop(p).items()
                }
        self.copies = []
        for p, view in zip(self.params, self.layout.views(z[0]).values()):
            if p.dtype == view.dtype and not _sharded(p):
                p.data = view
            else:
                self.copies.append((_local(p).detach(), view))
        self._shown = [0 if _sharded(p) else p.data_ptr() for p in self.params]
        # what is written into such a parameter does not reach the algorithm's row
        self._apart = self.params if z.data_ptr() != self.x.data_ptr() else [p for p, _ in self.copies]
        self._versions = [_local(p)._version for p in self._apart]

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the parameters that are copies up to date."""
        for p, view in self.copies:
            p.copy_(view)
        if self.copies:
            self._versions = [_local(p)._version for p in self._apart]

    @torch.no_grad()
    def gradient(self, scale: Tensor | None = None, read: bool = False) -> Tensor:
        """The parameters' gradients (1, d), divided by `scale` (of a GradScaler) if given: `own`, without a copy.

        An algorithm that is to `read` the numbers gets them in `g`, with zeros where a parameter has no gradient.
        """
        for p, master in self._stands_for.items():
            master.grad = None if p.grad is None else _local(p.grad).to(master.dtype)
            if scale is not None and master.grad is not None:
                master.grad.div_(scale)  # in the parameter's own gradient too, as `GradScaler.unscale_` does
        if not read:
            return self.own
        for master, view in zip(self.masters, self.views_g):
            if master.grad is None:
                view.zero_()
            else:
                view.copy_(master.grad.to_dense())  # embeddings may have sparse ones
                master.grad = view
        return self.g

    def step(self, x: Tensor, g: Tensor) -> None:
        """The user's optimizer steps the row x along g, in place; parameters without a gradient have none there either."""
        if x.data_ptr() != self._of_masters:
            self._of_masters = x.data_ptr()
            for master, view in zip(self.masters, self.layout.views(x[0]).values()):
                master.data = view
        if g is not self.own and g is not self.g:
            self.g.copy_(g)  # some optimizers write into gradients (foreach Nesterov), and g is the algorithm's
            for master, view in zip(self.masters, self.views_g):
                master.grad = view
        with self.in_place():
            self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def step_some(self, params: list[Tensor]) -> None:
        """The user's optimizer steps only these parameters of the row x, along their own gradients."""
        for p in params:
            self._stands_for[p].grad = None if p.grad is None else _local(p.grad).to(self.x.dtype)
        with self.in_place():
            self.optimizer.step()
        for p in params:
            self._stands_for[p].grad = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold the masters in place of the parameters."""
        own = [group["params"] for group in self.optimizer.param_groups]
        self._stepping = True
        for group in self.optimizer.param_groups:
            group["params"] = [self._stands_for.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            self._stepping = False
            for group, params in zip(self.optimizer.param_groups, own):
                group["params"] = params

    def _refuse_outside(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                f"step() of the {type(self.optimizer).__name__} that was wrapped, which would exchange nothing and remember "
                "nothing: call step() of what gossip.wrap returned, and give that one to GradScaler too"
            )

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers; of one that is expanded the memory that it shows."""
        every = [] if self.model is None else list(self.model.buffers())
        return [b[tuple(slice(1 if s == 0 else None) for s in b.stride())] if 0 in b.stride() else b for b in every]

    @property
    def rest(self) -> list[Tensor]:
        """What the workers' models consist of besides the row: frozen parameters and buffers."""
        known = [*self.every, *(() if self.model is None else self.model.parameters())]
        frozen = dict.fromkeys(p for p in known if not p.requires_grad)
        return [*(_local(p).detach() for p in frozen), *self.buffers]

    def facts(self, algorithm: Any) -> dict[str, Any]:
        """What all workers must agree on, by parameter, and for what is not in the row; and the algorithm on it."""
        said = {"model=": "not given" if self.model is None else "given"}
        said |= {
            f"parameter {i}": f"{name} {tuple(_local(p).shape)} {p.dtype}".lstrip()
            for i, (name, p) in enumerate(zip(self.names, self.every))
        }
        said |= {f"frozen parameter or buffer {i}": f"{tuple(b.shape)} {b.dtype}" for i, b in enumerate(self.rest)}
        order = iter(self.layout.strides)
        for i, p in enumerate(self.every):
            if not p.requires_grad:
                said[f"parameter {i}"] += " frozen"
            elif (stride := next(order)) != torch.empty(_local(p).shape, device="meta").stride():
                said[f"parameter {i}"] += f" in memory by strides {stride}"
        return said | {"algorithm": re.sub(" at 0x[0-9a-f]+", "", repr(algorithm))}

    @property
    def sharded(self) -> bool:
        """Whether some parameter is a shard of a larger one (DTensor)."""
        return any(_sharded(p) for p in self.params)

    def changed(self) -> str | None:
        """A sentence if parameters were frozen, unfrozen, added or moved since the start, else None."""
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.every):
            return "a parameter group was added to the optimizer, or one was removed, after wrap"
        for i, (p, trained) in enumerate(zip(self.every, self.trained)):
            if p.requires_grad != trained:
                return f"parameter {i} of shape {tuple(p.shape)} was {'frozen' if trained else 'unfrozen'} after wrap"
        for p, place in zip(self.params, self._shown):
            if place and p.data_ptr() != place:
                return f"a parameter of shape {tuple(p.shape)} was given other memory after wrap (model.to, p.data = …)"
        for p, version in zip(self._apart, self._versions):
            if _local(p)._version != version:
                return (
                    f"a parameter of shape {tuple(p.shape)} was written to after wrap (model.load_state_dict), and it only shows "
                    "what the algorithm's row holds"
                )
        return None


def refuse_copy(optimizer: Any) -> TypeError:
    """What copying or pickling a wrapped optimizer raises."""
    return TypeError(
        f"a {type(optimizer).__name__} cannot be copied or pickled, since it is connected to other processes: save its "
        "state_dict(), or the whole run by gossip.save"
    )


def _sharded(p: Tensor) -> bool:
    return hasattr(p, "to_local")


def _local(p: Any) -> Tensor:
    """A sharded tensor's own shard; any other tensor as it is."""
    return p.to_local() if _sharded(p) else p


def _names(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[str]:
    """The parameters' names as far as the optimizer or the model knows them, else empty."""
    known = {} if model is None else {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        known |= dict(zip(group["params"], group.get("param_names", ())))
    return [known.get(p, "") for group in optimizer.param_groups for p in group["params"]]


def _refuse_what_is_no_row(optimizer: torch.optim.Optimizer, params: list[Tensor], names: list[str]) -> None:
    """A row is stepped by one optimizer and holds real numbers, each of one parameter."""
    if optimizer in _WRAPPED:
        raise ValueError(
            f"this {type(optimizer).__name__} was wrapped before, and its state belongs to that row: build a new optimizer "
            "over the parameters and wrap that one"
        )
    places: dict[int, str] = {}
    for i, (p, name) in enumerate(zip(params, names)):
        what = f"parameter {i}{f', {name},' if name else ''}"
        if nn.parameter.is_lazy(p):
            raise ValueError(f"{what} is lazy and has no shape yet: run one batch through the model, then wrap")
        if p.is_meta:
            raise ValueError(
                f"{what} is on the meta device and holds no numbers: initialise or load the model, then wrap"
            )
        if p.is_complex() and p.requires_grad:
            raise ValueError(
                f"{what} of shape {tuple(p.shape)} is {p.dtype}, and rows hold real numbers: keep its real view, "
                "nn.Parameter(torch.view_as_real(p)), and use torch.view_as_complex of it in forward"
            )
        other = places.setdefault(_local(p).data_ptr(), what)
        if p.requires_grad and p.numel() and other != what:
            raise ValueError(
                f"{what} lies in the same memory as {other}, and each would get a place of its own: tie them by using "
                "one nn.Parameter in both modules"
            )


def _refuse_unless_element_wise(optimizer: torch.optim.Optimizer, like: Tensor) -> None:
    """Each shard steps alone, which Muon or Adafactor would take for a matrix of its own."""
    kind = type(optimizer)
    options = {k: v for k, v in optimizer.defaults.items() if k in inspect.signature(kind).parameters}
    try:
        refuse_unless_row_wise(partial(kind, **options), like)
    except ValueError as error:
        raise ValueError(
            f"{kind.__name__} over sharded parameters: each process steps its own shard, so the optimizer must be "
            f"element-wise, such as SGD or Adam. {error}"
        ) from error
