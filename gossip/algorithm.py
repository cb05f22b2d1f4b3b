"""An algorithm is four maps on rows: init, compute, communicate (send, then receive), params."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphs import Incompatible, Schedule, slem

from .network import Network

Gradient = Callable[[Tensor], Tensor]  # rows (m, d) → their stochastic gradients (m, d), borrowed until the next call
State = Any  # a NamedTuple of tensors (m, …), None, or a LocalOptimizer; the algorithm's own, updated in place

REMEDIES = {
    "doubly_stochastic": "use graphs.metropolis(topology) weights, or an algorithm made for other weights (SGP)",
    "column_stochastic": "use graphs.uniform(topology) on a regular graph, or graphs.metropolis(topology)",
    "row_stochastic": "divide each row by its sum",
    "symmetric": "use an undirected topology with graphs.metropolis weights, or an algorithm that stands directed graphs (SGP)",
    "static": "use one fixed W, graphs.static(W), or an algorithm without memory of past mixing (DPSGD, SGP)",
    "contractive": "add edges until the graph is connected, or self weights if it is periodic",
}


class Algorithm(ABC):
    """Base of all algorithms: frozen dataclasses whose fields are their options.

    A round is compute, send, receive; with `overlap` it is send, compute, receive, and the exchange is in flight while
    the gradients are computed. A state's tensors are preallocated by `init` and updated in place; gradients are borrowed
    and never written to.

    Attributes:
        requires: properties that the schedule must have (see `graphs.Schedule`).
        overlaps: whether `overlap` is allowed; the docstring then states the overlapped formula and its stability limit.
        steps_locally: whether several local steps between exchanges are defined.
        reads_gradient: whether `compute` does more with the gradient than hand it to the optimizer; if not, wrap copies none.
        columnwise: whether an exchange is x ← W x and no more, so that some columns may cross before others (`buckets`).
        exact: whether a constant learning rate reaches the exact optimum although the workers' data differ.
        restarts: whether a run may go on after the loss of a worker or a link, by `restart`.
        memory: leaves of the state that remember what passed by one fixed W; the asynchronous clock keeps them apart for
            every neighbour.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"doubly_stochastic", "contractive"})
    overlaps: ClassVar[bool] = False
    steps_locally: ClassVar[bool] = True
    reads_gradient: ClassVar[bool] = True
    columnwise: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    restarts: ClassVar[bool] = True
    memory: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def init(self, x: Tensor) -> State:
        """The state of rows that start at x (m, d); takes x over as its own."""

    @abstractmethod
    def compute(self, state: State, grad: Gradient) -> State:
        """Local work: `grad(x)` is the stochastic gradient of the rows at x."""

    def skip(self, state: State) -> State:
        """What stands in for `compute` where a local step is left out (overflow, no data left): as a rule nothing."""
        return state

    def restart(self, state: State, x: Tensor, rows: Tensor) -> State:
        """The state of workers that go on from models x (m', d) after a worker or a link was lost or has returned.

        Memory of past mixing (x̂, s, y, w) starts anew, as at the beginning; the local optimizers' buffers are those of the
        given rows (m',) of the state.
        """
        return self.init(x)._replace(opt=state.opt.take(rows))

    @abstractmethod
    def send(self, state: State, net: Network) -> None:
        """Hand this round's message to the network."""

    def resend(self, state: State, net: Network, parts: tuple[Tensor, ...]) -> None:
        """Hand a message over again whose parts were saved while it was in flight."""
        compressor: Any = getattr(self, "compressor", None)
        net.send(*parts) if compressor is None else net.send(
            compressor(torch.zeros_like(state.x), net.keys()).like(parts)
        )

    @abstractmethod
    def receive(self, state: State, net: Network) -> State:
        """Apply what arrived."""

    def communicate(self, state: State, net: Network) -> State:
        """Send, then receive; an algorithm whose exchange is x ← W x says `net.mix(x)`, which needs no copy of x."""
        self.send(state, net)
        return self.receive(state, net)

    def params(self, state: State) -> Tensor:
        """The rows (m, d) at which gradients are taken and the model is evaluated; the same tensor at every call."""
        return state.x

    def rate(self, W: Tensor) -> float | None:
        """The factor by which disagreement shrinks per round when gradients are zero; None without a closed form.

        The SLEM of W unless an algorithm says otherwise. A rate of 0 at W = 11ᵀ/n means: there, mini-batch SGD.
        """
        return slem(W)

    def check(self, schedule: Schedule) -> None:
        """Raise `Incompatible` unless the schedule has every property that the algorithm requires."""
        for name in sorted(self.requires):
            offence = schedule.offence(name)
            if offence is not None:
                raise Incompatible(
                    f"{type(self).__name__} requires a schedule that is {name.replace('_', ' ')}, and {offence}: "
                    f"{REMEDIES[name]}"
                )


def check(
    algorithm: Algorithm, schedule: Schedule, *, overlap: bool = False, local_steps: int = 1, force: bool = False
) -> None:
    """Raise `Incompatible` if the algorithm refuses the schedule, the overlap or local steps; with `force`, warn instead."""
    name = type(algorithm).__name__
    if not isinstance(local_steps, int) or local_steps < 1:
        raise ValueError(
            f"local_steps={local_steps!r} is no whole number of at least 1: it counts the local steps of a round"
        )
    if overlap and not algorithm.overlaps:
        raise Incompatible(
            f"overlap=True, and {name} has no overlapped form: set overlap=False, or use DPSGD, Choco or SGP, which have one"
        )
    if local_steps > 1 and not algorithm.steps_locally:
        raise Incompatible(
            f"local_steps={local_steps}, and {name} averages every gradient: set local_steps=1, or use DPSGD with a "
            "complete graph, which then is local SGD"
        )
    try:
        algorithm.check(schedule)
    except Incompatible as reason:
        if not force:
            raise
        warnings.warn(f"forced although incompatible: {reason}", stacklevel=2)


class Rows(NamedTuple):
    """The simplest state: the model rows and the local optimizer."""

    x: Tensor
    opt: Any
