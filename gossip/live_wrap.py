"""What `wrap(…, clock="live")` returns: a torch optimizer on a row that others average with meanwhile (see `Live`)."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphs import Schedule

from .algorithm import Algorithm
from .live import Live, edges_of, live_options, refuse_unless_averaging
from .probe import resolved
from .row import ModelRow, refuse_copy
from .transport import FAREWELLS, Transport


class LiveOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose `step` never waits for anybody.

    The gradient is that of the snapshot z which the model shows; the step is applied to the row x, which has met others
    meanwhile (that is AD-PSGD), and z becomes x:

    .. math:: x_i ← x_i − η g_i(z_i), \\quad z_i ← x_i

    Workers may take as many steps as they like; `total` tells how many all took together. Call `finish` on every rank in the
    end: it answers the others until all have finished, and leaves the same model everywhere; `gossip.disconnect` does it if
    nobody has. A process that ends otherwise, by an exception for example, is lost to its neighbours, who go on.

    Args:
        optimizer: the user's; its learning rates stay adjustable.
        algorithm: DPSGD, or Choco for compressed exchanges; of `gamma="auto"` the probe finds the one of lockstep rounds by
            the schedule.
        schedule: a fixed symmetric W, of which only the edges count.
        local_steps: try to begin an exchange after every so many steps.
        model: whose buffers are those of rank 0 at the start (with `broadcast`) and local from then on;
            `average_model` can estimate them anew.
        transport: the processes.
        seed: of the choice of neighbours and of compressors.
        broadcast: start every worker from rank 0's model: parameters, frozen ones as well, and the buffers of `model`.
        reweight: multiply the learning rate by `Live.scale`, mean steps / own steps within [1/8, 8], so that the data of
            workers that step often do not count more.

    Attributes:
        live: the row's exchanges; `live.report()` says what they took.

    >>> import gossip, graphs, tempfile                 # a single worker; under torchrun `connect()` needs no arguments
    >>> transport = gossip.connect(0, 1, f"file://{tempfile.mkdtemp()}/store")
    >>> model = nn.Linear(2, 1)
    >>> optimizer, mixing = torch.optim.SGD(model.parameters(), lr=0.1), graphs.complete(1)
    >>> optimizer = gossip.wrap(optimizer, gossip.DPSGD(), mixing, clock="live", transport=transport)
    >>> while optimizer.total < 50:                     # steps of all workers together
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.mse_loss(model(torch.ones(4, 2)), torch.zeros(4, 1))
    ...     loss.backward()
    ...     optimizer.step()
    >>> optimizer.finish()["steps"], bool(loss < 1e-6)
    (50, True)
    >>> gossip.disconnect()
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        schedule: Schedule,
        *,
        transport: Transport,
        local_steps: int = 1,
        model: nn.Module | None = None,
        seed: int = 0,
        broadcast: bool = True,
        reweight: bool = False,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.transport, self.local_steps, self.reweight = transport, local_steps, reweight
        self._model, self._finished = model, False
        refuse_unless_averaging(algorithm)
        topology = edges_of(schedule)
        transport.settle()
        self.row = row = ModelRow(optimizer, model)
        facts = row.facts(algorithm) | {"clock": "live", "local_steps": local_steps, "seed": seed}
        facts |= {"broadcast": broadcast, "edges": topology.edge_index.tolist()}
        transport.agree(facts)
        options = live_options(resolved(algorithm, schedule, row.layout.d, row.layout))
        if broadcast:
            for tensor in (row.x, *row.rest):
                transport.broadcast_(tensor)
        self.z = row.x.clone()
        row.show(self.z)
        row.refresh()
        token = transport.gather(os.urandom(8).hex())[0]
        store = transport.store(f"live-{token}")
        self.live = Live(row.x, topology, transport.rank, store, seed=seed, timeout=transport.timeout, **options)
        FAREWELLS[id(self)] = self.finish

    @property
    def total(self) -> int:
        """Local steps of all workers together, as far as is known here."""
        return self.live.total

    @property
    def steps(self) -> int:
        """Local steps of this worker."""
        return int(self.live.known[self.live.rank])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A local step of the live row along the snapshot's gradient; then an exchange is begun, if one can be."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (change := self.row.changed()) is not None:
            raise RuntimeError(
                f"{change}: the row that is exchanged has a fixed length; build the optimizer and wrap again"
            )
        found = getattr(self, "found_inf", None)
        with self.live.hold() as x:
            if found is None or float(found) == 0:
                g = self.row.gradient(getattr(self, "grad_scale", None))
                rates = [group["lr"] for group in self.param_groups]
                scale = self.live.scale() if self.reweight else 1.0
                for group, rate in zip(self.param_groups, rates):
                    group["lr"] = rate * scale
                try:
                    self.row.step(x, g)
                finally:
                    for group, rate in zip(self.param_groups, rates):
                        group["lr"] = rate
            self.live.stepped(self.z)
        self.row.refresh()
        if self.steps % self.local_steps == 0:
            self.live.exchange()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self.inner.zero_grad(set_to_none)

    def consensus_distance(self) -> float:
        """(1/n) Σ_i ‖x_i − x̄‖² over all workers, now; every rank must call it."""
        with self.live.hold() as x:
            now = x.clone()
        n = self.transport.size
        mean = self.transport.sum_(now.clone()).div_(n)
        return float(self.transport.sum_((now - mean).square().sum())) / n

    @torch.no_grad()
    def finish(self, rounds: int | None = None) -> dict[str, Any]:
        """End together (see `Live.finish`): the model then is the exact average of all, or, if a worker was lost or is
        lost now, what some rounds of gossip among the others make of it."""

        def average(x: Tensor) -> Tensor:
            return self.transport.sum_(x.clone()).div_(self.transport.size)

        FAREWELLS.pop(id(self), None)
        report = self.live.finish(rounds, average)
        self.z.copy_(self.live.x)
        self.row.refresh()
        self._finished, self.transport.whole = True, self.live.whole
        return report

    @contextlib.contextmanager
    def average_model(self, batches: Iterable[Any] | None = None) -> Iterator[None]:
        """After `finish`, whose model is the average already: nothing changes inside but what `batches` are for.

        Before it there is no average: the workers' models are of different moments, and none of them waits for the others.

        Args:
            batches: a loader from which the BatchNorm statistics of `model` are estimated anew, inside only.
        """
        if not self._finished:
            raise RuntimeError(
                "average_model of a live optimizer before its finish(): workers that wait for nobody have no average yet; "
                "evaluate the model as it is, or call finish() on every rank first"
            )
        if batches is not None and self._model is None:
            raise ValueError("average_model(batches) re-estimates BatchNorm statistics: pass model=… to wrap")
        buffers = self.row.buffers
        kept = [b.clone() for b in buffers]
        try:
            if batches is not None and self._model is not None:
                torch.optim.swa_utils.update_bn(batches, self._model)
            yield
        finally:
            with torch.no_grad():
                for b, before in zip(buffers, kept):
                    b.copy_(before)

    def report(self) -> dict[str, Any]:
        """Steps, exchanges, staleness, seconds waited, and everybody's share of all steps."""
        return self.live.report()

    def state_dict(self) -> dict[str, Any]:
        """This worker's row and the wrapped optimizer's state; what was in flight is not part of it."""
        with self.live.hold() as x, self.row.in_place():
            return {"inner": self.inner.state_dict(), "x": x.clone(), "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        saved = state_dict["x"].shape if "x" in state_dict else ()
        if saved != self.live.x.shape:
            raise ValueError(
                f"the state dict's row has shape {tuple(saved)} and this model's {tuple(self.live.x.shape)}: "
                "load it into the same model, a plain optimizer's before wrap"
            )
        with self.live.hold() as x, self.row.in_place():
            self.inner.load_state_dict(state_dict["inner"])
            x.copy_(state_dict["x"])
            self.z.copy_(x)
            self.live.known[self.live.rank] = state_dict["steps"]
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.row.refresh()

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
