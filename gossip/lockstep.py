"""The synchronous clock: every worker computes, sends and receives in the same round."""

from collections.abc import Callable, Iterator

from torch import Tensor

from .algorithm import Algorithm, State
from .compress import NotFinite
from .network import Network

Gradient = Callable[[Tensor, int], Tensor]  # rows (m, d) and the number of the local step → gradients (m, d)


def lockstep(
    algorithm: Algorithm,
    gradient: Gradient,
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
        try:
            if overlap:
                algorithm.send(state, net)
            for t in range(k * local_steps, (k + 1) * local_steps):
                state = algorithm.compute(state, lambda x, t=t: gradient(x, t))
            state = algorithm.receive(state, net) if overlap else algorithm.communicate(state, net)
        except NotFinite as error:
            raise error.of(net.rows) from None
        yield k + 1, state
