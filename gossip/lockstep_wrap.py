"""What `wrap(…)` returns under the lockstep clock: a torch optimizer whose step also exchanges with the neighbours."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphs import Incompatible, Schedule

from . import tree
from .algorithm import Algorithm
from .buckets import Buckets
from .buffers import MixedBuffers, mixable
from .compress.payload import naming
from .network import Network
from .placement import Placement
from .plan import verify
from .probe import resolved
from .row import ModelRow, refuse_copy
from .transport import Transport


class GossipOptimizer(torch.optim.Optimizer):
    """What `wrap` returns: a torch optimizer whose `step` also gossips.

    LR schedulers, `state_dict`, gradient clipping and accumulation, GradScaler and autocast work as usual. When a
    GradScaler finds an overflow at one worker its local update is skipped, but never its part in the exchange.

    `step`, `join`, `average_model`, `consensus_distance`, `trace` and `finish` are collective: every rank must call them, and
    equally often; who is left alone waits until the timeout.

    Attributes:
        steps, rounds: local steps and exchanges done.
        skipped: local updates that were left out because of an overflow.
        net: the network, whose `meter` counts what was sent.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to `step`

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        schedule: Schedule,
        local_steps: int,
        overlap: bool,
        buckets: int,
        model: nn.Module | None,
        mix_buffers: bool,
        transport: Transport,
        seed: int,
        broadcast: bool,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self.param_groups = optimizer.param_groups  # shared, so that LR schedulers reach the optimizer
        self.state = optimizer.state
        self.algorithm, self.local_steps, self.overlap = algorithm, local_steps, overlap
        self.steps = self.skipped = 0
        self._model, self._in_flight, self._exchanges, self._joining = model, False, True, False
        self._averaged = False

        transport.settle()  # a former optimizer may have left its last exchange in flight
        self.row = row = ModelRow(optimizer, model)
        options = {
            "local_steps": local_steps,
            "overlap": overlap,
            "buckets": buckets,
            "buffers mixed": mix_buffers,
            "broadcast": broadcast,
            "seed": seed,
            "schedule": schedule.digest,
        }
        transport.agree(row.facts(algorithm) | options)
        self.algorithm = algorithm = resolved(algorithm, schedule, row.layout.d, row.layout)
        placement = Placement.even(schedule.n, transport.size, transport.rank)
        verify(schedule, placement.blocks, plans=64)
        self.net = Network(schedule, placement, transport, seed)
        self.net.background, self.net.channel = overlap, transport.agreements - 1

        if broadcast:
            for tensor in (row.x, *row.rest):
                transport.broadcast_(tensor)
        state = algorithm.init(row.x)
        if "opt" not in getattr(state, "_fields", ()):
            raise TypeError(
                f"the state of {type(algorithm).__name__} has no field `opt`: an algorithm keeps its local optimizer "
                "there, so that wrap can put the user's in its place"
            )
        self.gossip = state._replace(opt=row)
        row.show(algorithm.params(self.gossip))
        row.refresh()
        self._buckets = Buckets(row, self.net, buckets) if buckets > 1 else None
        self._buffers = MixedBuffers(model) if mix_buffers and model is not None and mixable(model) else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """The local step; then, after every `local_steps` of them, the exchange."""
        self._refuse_averaged("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        change = self.row.changed()
        if change is not None:
            raise RuntimeError(f"{change}: change the model first, then build the optimizer and wrap again")
        if self._joining:
            self._anyone(1)
        if self.overlap and not self._in_flight:
            self._send()
        found = getattr(self, "found_inf", None)
        if self._buckets is not None and self._exchanges:
            if getattr(self, "grad_scale", None) is not None:
                raise RuntimeError(
                    "a GradScaler with buckets: gradients are used during backward, before they can be unscaled; leave one out"
                )
            self._buckets.step()
        elif found is not None and float(found) > 0:
            self.skipped += 1
            self.gossip = self.algorithm.skip(self.gossip)
        else:
            scale = getattr(self, "grad_scale", None)
            read = self.algorithm.reads_gradient
            self.gossip = self.algorithm.compute(self.gossip, lambda x: self.row.gradient(scale, read))
        self._tick()
        return loss

    def _tick(self) -> None:
        """Count the step, and exchange when it is time."""
        if self._exchanges:
            self.steps += 1
            if self.steps % self.local_steps == 0:
                if self._in_flight:
                    self._receive()
                elif self._buckets is not None:
                    self._buckets.exchange(self.rounds)
                else:
                    self._begin(self.rounds - 1)
                    with naming(self.net.rows, self._diverged):
                        self.gossip = self.algorithm.communicate(self.gossip, self.net)
                if self._buffers is not None:
                    self._buffers.mix(self.net)
                if self.overlap:
                    self._send()
        self.algorithm.params(self.gossip)
        self.row.refresh()

    def _diverged(self) -> str:
        """The first parameter that is not finite, in words."""
        views = self.row.layout.views(self.algorithm.params(self.gossip)[0])
        found = (f", first in {name} of shape {tuple(p.shape)}" for name, p in views.items() if not p.isfinite().all())
        return next(found, "")

    def _begin(self, round: int) -> None:
        transport = self.net.transport
        if transport and any(other != id(self) for other in transport.unfinished):
            raise RuntimeError(
                "the exchange of another optimizer is in flight on the same transport (overlap=True): call its finish() first, "
                "or give each a transport of its own, as wrap does where transport= is not passed"
            )
        self.net.begin(round)

    def _send(self) -> None:
        self._begin(self.rounds)
        with naming(self.net.rows, self._diverged):
            self.algorithm.send(self.gossip, self.net)
        self._leave_in_flight()

    def _leave_in_flight(self) -> None:
        self._in_flight = True
        if self.overlap and self.net.transport:
            self.net.transport.unfinished[id(self)] = self.finish

    def _receive(self) -> None:
        self.gossip = self.algorithm.receive(self.gossip, self.net)
        self._in_flight = False
        if self.net.transport:
            self.net.transport.unfinished.pop(id(self), None)

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
    def no_sync(self) -> Iterator[None]:
        """Inside, steps are local: they neither exchange nor count towards `local_steps`. Every rank must do the same.

        Gradient accumulation needs no such thing: gradients add up until `step` is called.
        """
        if not self.algorithm.steps_locally:
            raise Incompatible(
                f"no_sync, and {type(self.algorithm).__name__} averages every gradient: to accumulate gradients, call "
                "backward several times before one step"
            )
        self._exchanges = False
        if self._buckets is not None:
            self._buckets.enabled = False
        try:
            yield
        finally:
            self._exchanges = True
            if self._buckets is not None:
                self._buckets.enabled = True

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For loops of uneven length: a worker that leaves goes on exchanging, without steps, until all have left.

        Every step inside costs one more tiny all-reduce. The average over workers always is over all of them: under AllReduce
        one that has left contributes a gradient of zero. Leave every `join` before an evaluation.
        """
        self._joining = True
        try:
            yield
        finally:
            self._joining = False
        with torch.no_grad():
            while self._anyone(0):
                if self.overlap and not self._in_flight:
                    self._send()
                self.gossip = self.algorithm.skip(self.gossip)
                self._tick()

    def _anyone(self, active: int) -> bool:
        return bool(self.net.transport.sum_(torch.tensor([active]))) if self.net.transport else False

    @contextlib.contextmanager
    def average_model(self, batches: Iterable[Any] | None = None) -> Iterator[None]:
        """Inside, every worker's parameters are the exact average of all workers'; afterwards its own again. Collective.

        Args:
            batches: a loader from which the BatchNorm statistics of `model` are estimated anew for the average model, as
                `torch.optim.swa_utils.update_bn` does; the workers' own statistics say little about it. Take the same one
                at every rank.
        """
        self._refuse_averaged("another average_model()")
        x = self.algorithm.params(self.gossip)
        own = x.clone()
        buffers = self.row.buffers
        kept = [b.clone() for b in buffers]
        x.copy_(self.net.mean(x))
        self.row.refresh()
        self._averaged = True
        try:
            if batches is not None:
                if self._model is None:
                    raise ValueError("average_model(batches) re-estimates BatchNorm statistics: pass model=… to wrap")
                stream = iter(batches)
                first = next(stream, None)
                if first is None:
                    raise ValueError(
                        "average_model(batches) got no batch: pass a loader, not an iterator that is used up"
                    )
                torch.optim.swa_utils.update_bn(itertools.chain([first], stream), self._model)
            yield
        finally:
            self._averaged = False
            with torch.no_grad():
                x.copy_(own)
                for b, before in zip(buffers, kept):
                    b.copy_(before)
            self.row.refresh()

    def _refuse_averaged(self, what: str) -> None:
        if self._averaged:
            raise RuntimeError(
                f"{what} inside average_model(), where the worker's own model is laid aside: leave the block first"
            )

    def consensus_distance(self) -> float:
        """(1/n) Σ_i ‖x_i − x̄‖² over all workers; every rank must call it. Of sharded models: of this shard, so sum them."""
        x = self.algorithm.params(self.gossip).double()  # in float32 the mean of equal rows is not one of them
        return float(self.net.mean((x - self.net.mean(x)).square().sum(1)))

    def report(self) -> dict[str, float]:
        """What this worker's exchanges took: counts, bytes on the wire with headers, seconds, and the share hidden.

        "seconds waited for j" is how much of "seconds waited" went by for the messages to and from worker j: the slow one's
        neighbours wait for it, and theirs for them. `overlap` is 1 − seconds waited / seconds exchanging: 0 if every exchange
        was waited for from its first byte on, 1 if all were over when their results were needed.
        """
        transport, meter = self.net.transport, self.net.meter
        waited, exchanging = (transport.waited, transport.exchanging) if transport else (0.0, 0.0)
        return {
            "rounds": self.rounds,
            "messages": int(meter.messages.sum()),
            "bits": int(meter.bits.sum()),
            "bytes": meter.wire_bytes,
            "seconds waited": waited,
            "seconds exchanging": exchanging,
            "overlap": max(0.0, 1 - waited / exchanging) if exchanging else 0.0,
        } | {f"seconds waited for {j}": s for j, s in sorted(transport.waited_for.items() if transport else ())}

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike) -> Iterator[None]:
        """Record a timeline of what happens inside; rank 0 then writes it for `chrome://tracing` or Perfetto.

        One track per rank: computing and waiting in turn, exchanges in flight above. Every rank must enter and leave.
        """
        if (transport := self.net.transport) is None:
            raise ValueError("a timeline shows exchanges, and there is one process only: start several")
        transport.record()
        try:
            yield
        except BaseException:
            transport.spans = None  # the others may never come to gather
            raise
        events = transport.timeline()
        if transport.rank == 0:
            with open(path, "w") as file:
                json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def finish(self) -> None:
        """With `overlap`: wait for the exchange in flight and apply it. Call it on every rank when training is over.

        `gossip.disconnect` does, and so does the next `wrap` on the same transport.
        """
        if self._in_flight:
            with torch.no_grad():
                self._receive()
                self.algorithm.params(self.gossip)
                self.row.refresh()

    def state_dict(self) -> dict[str, Any]:
        """This worker's parameters, gossip state, the wrapped optimizer's state, the buffers of `model`, and what is in flight.

        Tensors and plain Python types only, loadable with `weights_only`. Each rank saves its own.
        """
        self._refuse_averaged("state_dict()")
        with self.row.in_place():
            inner = self.inner.state_dict()
        return {
            "inner": inner,
            "names": list(self.row.names),
            "gossip": {k: v.clone() for k, v in tree.leaves(self.gossip._replace(opt=None)).items()},
            "steps": self.steps,
            "skipped": self.skipped,
            "in_flight": [part.clone() for part in self.net.in_flight] if self._in_flight else None,
            "buffers": [b.clone() for b in self.row.buffers],
            "meter": self.net.meter.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned at this rank; the model's parameters are restored as well."""
        self._refuse_averaged("load_state_dict()")
        wrong = self.misfit(state_dict)
        if wrong:
            raise ValueError(f"the state dict does not fit: {wrong}; load it into the same algorithm and model")
        self.finish()
        for name, leaf in tree.leaves(self.gossip._replace(opt=None)).items():
            leaf.copy_(state_dict["gossip"][name])
        with self.row.in_place():
            self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.steps, self.skipped = state_dict["steps"], state_dict["skipped"]
        if self._buckets is not None:
            self._buckets.begin(self.rounds)
        for buffer, saved in zip(self.row.buffers, state_dict["buffers"]):
            buffer.copy_(saved)
        self.algorithm.params(self.gossip)
        self.row.refresh()
        if state_dict["in_flight"] is not None:  # every rank saved its half of the exchange: post it again
            self.net.begin(self.rounds)
            self.algorithm.resend(self.gossip, self.net, tuple(state_dict["in_flight"]))
            self._leave_in_flight()
        self.net.meter.load_state_dict(state_dict["meter"], self.net.rows)  # last: it has the message in flight already

    def misfit(self, state_dict: dict[str, Any]) -> str:
        """Why `load_state_dict` would refuse this one, or nothing."""
        if "gossip" not in state_dict:
            return (
                f"it holds {', '.join(map(str, state_dict)) or 'nothing'} and no gossip state, so it is not of an optimizer that "
                "was wrapped (a plain optimizer's is loaded before wrap)"
            )
        here, saved = (
            {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
            for leaves in (tree.leaves(self.gossip._replace(opt=None)), state_dict["gossip"])
        )
        for name in here | saved:
            if here.get(name) != saved.get(name):
                return f"{name} is {saved.get(name, 'missing')} as saved and {here.get(name, 'missing')} here"
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (state_dict["inner"]["param_groups"], self.inner.param_groups)
        ]
        names = state_dict.get("names", []), self.row.names
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            return f"the parameters are in another order, {', '.join(names[0])} as saved and {', '.join(names[1])} here"
        if sizes[0] != sizes[1]:
            return f"parameter groups of {sizes[0]} parameters as saved and {sizes[1]} here"
        if [b.shape for b in state_dict["buffers"]] != [b.shape for b in self.row.buffers]:
            return "the model has other buffers here, or model=… was given to wrap in one of the two"
        return ""

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
