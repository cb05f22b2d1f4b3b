"""A run in a notebook: gossip averaging alone, or an algorithm on a task, all rows here."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graphs import Schedule, Topology, as_schedule
from graphs.topology import whole

from .algorithm import Algorithm, check
from .algorithms import DPSGD, Choco
from .asynchronous import Asynchronous
from .compress import Compressor
from .cost import Cost
from .lockstep import lockstep
from .network import Network
from .probe import resolved
from .timeline import Timeline, Watch


class Task(Protocol):
    """What a run needs to know of the problem. Any object with these members is a task."""

    n: int

    def initial(self) -> Tensor:
        """The row (d,) from which all workers start."""
        ...

    def gradient(self, x: Tensor, workers: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Rows (m, d) of the given workers to their stochastic gradients (m, d) and losses (m,) at local step `step`."""
        ...


class Record(NamedTuple):
    """One round of a simulation: x (n, d) are the models (a live view), bits the sum over workers so far, seconds what it
    would have taken by the cost that was given, until the last worker was through."""

    round: int
    x: Tensor
    loss: float
    consensus: float
    bits: int
    messages: int
    seconds: float = float("nan")


def consensus_distance(x: Tensor) -> float:
    """(1/n) Σ_i ‖x_i − x̄‖² of rows (n, d), in float64: in float32 the mean of equal rows is not one of them.

    >>> consensus_distance(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    1.0
    """
    center = x.mean(0, dtype=torch.float64)
    return sum(float((row.double() - center).square().sum()) for row in x) / len(x)


@torch.no_grad()  # as a decorator it holds inside the generator only, not in the caller's loop
def simulate(
    task: Task | Callable[[Tensor, Tensor, int], Tensor],
    algorithm: Algorithm,
    mixing: Schedule | Tensor | Topology,
    rounds: int,
    *,
    x0: Tensor | None = None,
    every: int = 1,
    local_steps: int = 1,
    overlap: bool = False,
    seed: int = 0,
    force: bool = False,
    cost: Cost | None = None,
    clock: Asynchronous | None = None,
) -> Iterator[Record]:
    """Run an algorithm with all workers in this process and yield a `Record` every `every` rounds, and at the end.

    Args:
        task: a `Task`, or just a function (x (m, d), workers (m,), step) → gradients (m, d), which then needs `x0`.
        mixing: a schedule, a mixing matrix, or a topology (which then mixes by its default weights).
        x0: the start, (d,) for all workers or (n, d); the task's own if None. Half precision becomes float32.
        force: run although the algorithm refuses the schedule, with a warning.
        cost: seconds of steps and messages, from which the records' `seconds` follow.
        clock: `gossip.Asynchronous(…)`: every worker at its own pace; a round is n · local_steps gradients then. Rounds in
            lockstep if None. The task's `gradient` is then called with a tensor of steps (m,).

    >>> import graphs
    >>> b = torch.arange(8.0)[:, None]                                 # f_i(x) = (x − b_i)² / 2
    >>> for r in simulate(lambda x, workers, step: x - b[workers], DPSGD(), graphs.ring(8), 500, x0=torch.zeros(1), every=500):
    ...     print(r.round, round(float(r.x.mean()), 4), r.consensus > 0.01)
    500 3.5 True
    """
    schedule, rounds, every = as_schedule(mixing), whole("rounds", rounds, 0), whole("every", every, 1)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"simulate got {algorithm!r} for an algorithm: pass an instance, such as gossip.DPSGD()")
    if clock is None:
        check(algorithm, schedule, overlap=overlap, local_steps=local_steps, force=force)
    else:
        if overlap:
            raise ValueError("overlap=True under an asynchronous clock, where nobody waits for a round: leave it out")
        if not isinstance(clock, Asynchronous):
            raise TypeError(f"clock={clock!r} is no gossip.Asynchronous(…): pass one, or None for rounds in lockstep")
        clock.check(algorithm, schedule, force=force)
    if cost is not None and not isinstance(cost, Cost):
        raise TypeError(
            f"cost={cost!r} is no gossip.Cost(…): pass one, for example gossip.Cost(gossip.work.Constant(0.01))"
        )
    function: Any = getattr(task, "gradient", task)
    if x0 is None:
        initial = getattr(task, "initial", None)
        if initial is None:
            raise ValueError("x0=None, and the task is a function, which names no start: pass x0, (d,) or (n, d)")
        x0 = initial()
    n, x0 = schedule.n, torch.as_tensor(x0)
    workers = getattr(task, "n", n)
    if workers != n:
        raise ValueError(f"the task has {workers} workers and the mixing {n}: give both the same n")
    x = _mixable(x0.reshape(-1).expand(n, -1) if x0.ndim < 2 else x0).clone(memory_format=torch.contiguous_format)
    if x0.ndim > 2 or x.shape[0] != n:
        raise ValueError(f"x0 has shape {tuple(x0.shape)} and the mixing {n} workers: pass (d,) or ({n}, d)")
    algorithm = resolved(algorithm, schedule, x.shape[1], getattr(task, "layout", None))
    if clock is not None:
        run = clock.start(algorithm, function, schedule, x, cost=cost, seed=seed, local_steps=local_steps)
        for k in [*range(every, rounds, every), rounds]:
            run.advance(updates=k * n * local_steps)
            bits, messages, loss = run.net.meter.bits, run.net.meter.messages, float(run.progress.losses.nanmean())
            distance = consensus_distance(run.models)
            yield Record(k, run.models, loss, distance, int(bits.sum()), int(messages.sum()), run.queue.time)
        return
    net = Network(schedule, seed=seed)
    watch = None if cost is None else Watch(Timeline(cost, n, local_steps, overlap), net)
    losses = torch.full((n,), float("nan"))

    def oracle(x: Tensor, step: int) -> Tensor:
        nonlocal losses
        with torch.enable_grad():  # the task may use autograd
            result = function(x, net.rows, step)
        if isinstance(result, tuple):
            result, losses = result
        return result

    for k, state in lockstep(algorithm, oracle, net, algorithm.init(x), rounds, 0, local_steps, overlap):
        if watch is not None:
            watch.round(k - 1)
        if k % every == 0 or k == rounds:
            x, meter = algorithm.params(state), net.meter
            bits, messages = int(meter.bits.sum()), int(meter.messages.sum())
            seconds = float("nan") if watch is None else watch.timeline.seconds
            yield Record(k, x, float(losses.mean()), consensus_distance(x), bits, messages, seconds)


def consensus(
    x: Tensor,
    mixing: Schedule | Tensor | Topology,
    rounds: int,
    *,
    compressor: Compressor | None = None,
    gamma: float | str | None = None,
    seed: int = 0,
    history: bool = False,
    force: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gossip averaging: the rows after some rounds of x ← W x, or of CHOCO-Gossip if a compressor is given.

    .. math:: q_i = C(x_i − \\hat x_i), \\; \\hat x_i ← \\hat x_i + q_i, \\; x_i ← x_i + γ Σ_j W_{ij} (\\hat x_j − \\hat x_i)

    Args:
        x: rows (n, d), or (n,) for one number per worker; left as it is. Half precision is mixed in float32.
        mixing: a schedule, a mixing matrix, or a topology.
        gamma: consensus step size γ of CHOCO-Gossip; the compressor's start value if None, "auto" for a probe.
        history: also return (1/n) Σ ‖x_i − x̄‖² after each round, (rounds,) float64.
        force: allow weights that do not preserve the average, with a warning.

    >>> import graphs
    >>> x, distance = consensus(torch.arange(16.0, dtype=torch.float64), graphs.ring(16), rounds=10, history=True)
    >>> round(float(x[0]), 9), round(float(distance[-1]), 9)
    (6.787041271, 4.680283131)
    """
    schedule, x, rounds = as_schedule(mixing), torch.as_tensor(x), whole("rounds", rounds, 0)
    if x.shape[:1] != (schedule.n,):
        raise ValueError(
            f"x has {len(x) if x.ndim else 1} rows and the mixing {schedule.n} workers: pass one row per worker"
        )
    if compressor is None and gamma not in (None, 1):
        raise ValueError(
            f"gamma={gamma!r} without a compressor: γ is CHOCO-Gossip's; pass compressor=gossip.Identity() to use it"
        )
    algorithm: Algorithm = DPSGD() if compressor is None else Choco(compressor=compressor, gamma=gamma)
    check(algorithm, schedule, force=force)
    net = Network(schedule, seed=seed)
    rows = _mixable(x.detach()).reshape(len(x), -1).clone(memory_format=torch.contiguous_format)
    algorithm = resolved(algorithm, schedule, rows.shape[1])
    state = algorithm.init(rows)
    distances = []
    for k in range(rounds):
        net.begin(k)
        state = algorithm.communicate(state, net)
        if history:
            distances.append(consensus_distance(rows))
    out = rows.view_as(x).to(x.dtype)
    return (out, torch.tensor(distances, dtype=torch.float64)) if history else out


def _mixable(x: Tensor) -> Tensor:
    """Half precision in float32: averages of averages that are rounded to bfloat16 leave the mean, and never meet."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
