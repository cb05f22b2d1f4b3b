"""The asynchronous clock's speed: gradients a second against lockstep, D-PSGD on a ring, digits, MLP 64-128-10, batch 32."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import gossip
import graphs
from experiments.tasks.digits import digits

from .harness import Row, at_least, side_by_side

ROUNDS = 25  # a call of either side: so many gradients per worker, as between two evaluations
COSTS = {
    "equally fast": gossip.Cost(),
    "one 10 × slower": gossip.Cost(gossip.work.Slow(factor=10.0)),
    "log-normal": gossip.Cost(gossip.work.LogNormal(sigma=0.5)),
    "exponential": gossip.Cost(gossip.work.Exponential()),
}


def lockstep(n: int) -> Callable[[], object]:
    """Rounds of the engine."""
    task, algorithm = digits(n=n), gossip.DPSGD(partial(torch.optim.SGD, lr=0.1))
    net = gossip.Network(graphs.as_schedule(graphs.ring(n)))
    state = algorithm.init(task.initial().expand(n, -1).clone())
    rounds = gossip.lockstep(algorithm, lambda x, step: task.gradient(x, net.rows, step)[0], net, state, 10**9)

    def some() -> None:
        with torch.no_grad():
            for _ in range(ROUNDS):
                next(rounds)

    return some


def asynchronous(n: int, cost: gossip.Cost) -> Callable[[], object]:
    """As many gradients, each at its own time, each followed by an exchange of two."""
    task, algorithm = digits(n=n), gossip.DPSGD(partial(torch.optim.SGD, lr=0.1))
    start, schedule = task.initial().expand(n, -1).clone(), graphs.as_schedule(graphs.ring(n))
    run = gossip.Asynchronous().start(algorithm, task.gradient, schedule, start, cost=cost)

    def some() -> None:
        with torch.no_grad():
            run.advance(updates=run.queue.updates + ROUNDS * n)

    return some


def rows() -> Iterator[Row]:
    """The part of the table about the asynchronous clock."""
    torch.set_num_threads(1)
    n = 256
    for name, cost in COSTS.items():
        ratio, a, b = side_by_side(asynchronous(n, cost), lockstep(n), pairs=3)
        detail = f"{ROUNDS * n / a:,.0f} against {ROUNDS * n / b:,.0f} gradients/s"
        yield at_least(f"gradients/s, asynchronous n={n}, {name}", "lockstep", ratio, 0.5, detail)
