"""`wrap(optimizer, algorithm, mixing)`: any torch optimizer, made decentralized, in an ordinary training loop under torchrun."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from graphs import Incompatible, Schedule, Topology, as_schedule

from .algorithm import Algorithm, check
from .live_wrap import LiveOptimizer
from .lockstep_wrap import GossipOptimizer
from .transport import TIMEOUT, Transport, connect


def wrap(
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    mixing: Schedule | Tensor | Topology,
    *,
    local_steps: int = 1,
    overlap: bool = False,
    buckets: int = 1,
    model: nn.Module | None = None,
    buffers: str = "local",
    transport: Transport | None = None,
    process_group: Any = None,
    timeout: float = TIMEOUT,
    seed: int = 0,
    broadcast: bool = True,
    force: bool = False,
    clock: str = "lockstep",
    reweight: bool = False,
) -> Any:
    """Make an optimizer decentralized: this process is one worker, and each `step` ends with an exchange.

    The parameters become views of one flat row, so that mixing copies nothing back. Frozen parameters stay local. Of
    parameters in half precision, and of sharded ones, the row is a float32 master from which they are refreshed. So load
    a model before wrapping, or through the `load_state_dict` of what this returns.

    Args:
        optimizer: any torch optimizer over this worker's parameters; its learning rates stay adjustable.
        algorithm: for example `gossip.Choco(compressor=gossip.TopK(0.01), gamma=0.05)`; `optimizer` replaces its own.
        mixing: a schedule, a mixing matrix or a topology with as many workers as there are processes.
        local_steps: exchange after every so many steps.
        overlap: leave each exchange in flight during the next forward and backward pass; the algorithm's overlapped form.
        buckets: cut the parameters into so many groups, and step and send each as soon as its gradients are there, so that
            the exchange of the last layers starts while backward works on the first. Computes the same. For DPSGD, without
            overlap or local steps. Takes one backward pass per step, and gradients must not be changed after it (clipping,
            GradScaler).
        model: whose buffers (BatchNorm statistics) `buffers` and `average_model` are about, and whose parameters' names the
            ranks compare; an optimizer that was given `named_parameters()` knows these itself.
        buffers: "local" leaves them to each worker; "mix" mixes the floating ones by W at each exchange, of running
            variances the second moment, so that they come to hold what the workers' means differ by. Counters are local, and
            so are the vectors of spectral_norm.
        transport: the processes; made from `process_group` if None, with connections and threads of its own, which last until
            `disconnect`: to many wraps in one process give one.
        process_group: some of the ranks (all if None), for example the outer dimension of a `DeviceMesh` whose inner one
            holds a model under DDP or FSDP2: each shard gossips with its counterparts.
        timeout: bound of every wait, in seconds.
        seed: of the randomness of compressors; the same on every rank.
        broadcast: start every worker from rank 0's model: parameters, frozen ones as well, and the buffers of `model`.
        force: run although the algorithm refuses the schedule, with a warning.
        clock: "lockstep" returns a `GossipOptimizer`; "live" a `gossip.LiveOptimizer`, whose workers average in pairs
            and wait for nobody (DPSGD, or Choco for compressed exchanges). Call its `finish()` in the end (`disconnect()` does
            it otherwise); until then `average_model` is refused.
        reweight: live only: scale the steps so that the data of fast workers do not count more.

    Raises:
        Incompatible: the algorithm refuses the schedule, the overlap or the clock.
        ValueError: the ranks disagree on shapes, algorithm or schedule; the message names the first difference.

    >>> import gossip, graphs, tempfile                 # a single worker; under torchrun `connect()` needs no arguments
    >>> transport = gossip.connect(0, 1, f"file://{tempfile.mkdtemp()}/store")
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = gossip.wrap(optimizer, gossip.DPSGD(), graphs.complete(1), transport=transport)
    >>> for inputs, targets in [(torch.ones(4, 2), torch.zeros(4, 1))] * 50:
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.mse_loss(model(inputs), targets)
    ...     loss.backward()
    ...     optimizer.step()
    >>> optimizer.rounds, bool(loss < 1e-6)
    (50, True)
    >>> gossip.disconnect()
    """
    _refuse_kinds(optimizer, algorithm, model)
    if buffers not in ("local", "mix"):
        raise ValueError(f'buffers={buffers!r} is not "local" (each worker keeps its own) or "mix" (mixed by W)')
    if buffers == "mix" and model is None:
        raise ValueError('buffers="mix" needs the module whose buffers are meant: pass model=…')
    if not isinstance(buckets, int) or buckets < 1:
        raise ValueError(f"buckets={buckets!r} is no whole number of at least 1: 4 is a good start for a large model")
    _refuse_clock(clock, reweight, overlap or buckets > 1 or buffers == "mix")
    schedule = as_schedule(mixing)
    check(algorithm, schedule, overlap=overlap, local_steps=local_steps, force=force)
    _refuse_buckets(buckets, algorithm, local_steps, overlap, model)
    transport = transport or connect(group=process_group, timeout=timeout)
    if schedule.n != transport.size:
        raise ValueError(
            f"the mixing has {schedule.n} workers and there are {transport.size} processes: one worker per process, "
            f"so start {schedule.n} processes or use a graph of {transport.size} workers"
        )
    if clock == "live":
        options: dict[str, Any] = {"local_steps": local_steps, "model": model, "seed": seed, "broadcast": broadcast}
        return LiveOptimizer(optimizer, algorithm, schedule, transport=transport, reweight=reweight, **options)
    return GossipOptimizer(
        optimizer,
        algorithm,
        schedule,
        local_steps,
        overlap,
        buckets,
        model,
        buffers == "mix",
        transport,
        seed,
        broadcast,
    )


def _refuse_buckets(
    buckets: int, algorithm: Algorithm, local_steps: int, overlap: bool, model: nn.Module | None
) -> None:
    if buckets == 1:
        return
    if not algorithm.columnwise:
        raise Incompatible(
            f"buckets={buckets}, and an exchange of {type(algorithm).__name__} is more than x ← W x, column by column: leave "
            "buckets out, or use DPSGD"
        )
    if overlap or local_steps > 1:
        raise Incompatible(
            f"buckets={buckets} with {'overlap=True' if overlap else f'local_steps={local_steps}'}: buckets are sent in each "
            "backward pass; leave out one of the two"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise Incompatible(
            f"buckets={buckets} with a model under DDP, whose gradients are averaged after the hooks: leave buckets out"
        )


def _refuse_kinds(optimizer: Any, algorithm: Any, model: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, GossipOptimizer | LiveOptimizer):
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
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"wrap got model={model!r}: pass the module whose buffers are meant, or None")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"wrap got {algorithm!r} for an algorithm: pass an instance, such as gossip.DPSGD()")


def _refuse_clock(clock: str, reweight: bool, together: bool) -> None:
    if clock not in ("lockstep", "live"):
        raise ValueError(f'clock={clock!r} is not "lockstep" (rounds) or "live" (pairs, at everybody\'s own speed)')
    if reweight and clock != "live":
        raise ValueError(
            "reweight=True without a live clock: in lockstep all workers take as many steps, so leave it out"
        )
    if together and clock == "live":
        raise Incompatible(
            'clock="live" with overlap, buckets or mixed buffers: its exchanges always overlap, and buffers are local; '
            "leave them out"
        )
