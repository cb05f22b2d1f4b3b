"""The synchronous clock: every worker computes, sends and receives in the same round."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .algorithm import Algorithm, State
from .compress.payload import naming
from .network import Network

StepGradient = Callable[[Tensor, int], Tensor]  # rows (m, d) and the number of the local step → gradients (m, d)


def lockstep(
    algorithm: Algorithm,
    gradient: StepGradient,
    net: Network,
    state: State,
    rounds: int,
    start: int = 0,
    local_steps: int = 1,
    overlap: bool = False,
) -> Iterator[tuple[int, State]]:
    """Run rounds `start` to `rounds` − 1, yielding (rounds done, state) after each.

    A round is `local_steps` times compute, then send and receive; with `overlap` it is send, compute, receive. A compressor
    that refuses a row names its worker.
    """
    for k in range(start, rounds):
        net.begin(k)
        with naming(net.rows):
            if overlap:
                algorithm.send(state, net)
            for t in range(k * local_steps, (k + 1) * local_steps):
                state = algorithm.compute(state, lambda x, t=t: checked_gradient(gradient(x, t), x))
            state = algorithm.receive(state, net) if overlap else algorithm.communicate(state, net)
        yield k + 1, state


def checked_gradient(g: Any, x: Tensor) -> Tensor:
    """A task's gradient of rows x; one of another shape would be broadcast, and of another dtype rounded, unnoticed."""
    if not isinstance(g, Tensor) or (g.shape, g.dtype) != (x.shape, x.dtype):
        said = f"{g.dtype} {tuple(g.shape)}" if isinstance(g, Tensor) else type(g).__name__
        raise ValueError(
            f"the task's gradient at {x.dtype} rows {tuple(x.shape)} is {said}: return a tensor like the rows, or a pair of "
            "that and losses (m,)"
        )
    return g
