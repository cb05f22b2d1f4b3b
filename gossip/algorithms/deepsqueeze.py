"""DeepSqueeze: gossip on compressed models; what is left out is added to the next (Tang et al. 2019, arXiv 1907.07346)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..compress import Compressor, Identity
from ..compress.payload import compress, memory_of
from ..gamma import check_gamma, damped_rate, step_size
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: models; e: C(v) − v of the last message, minus the error; own: what the compressor remembers."""

    x: Tensor
    e: Tensor
    own: Any
    opt: Any


@dataclass(frozen=True)
class DeepSqueeze(Algorithm):
    """Error-compensated gossip without public copies.

    .. math::
        x_i &← x_i − η g_i(x_i), \\quad v_i = x_i + e_i, \\quad c_i = C(v_i), \\quad e_i ← v_i − c_i \\\\
        x_i &← x_i + γ Σ_j W_{ij} (c_j − c_i)

    Models are compressed, not differences, so it needs no memory of the neighbours and stands a changing W; but the error
    does not vanish at a fixed point, and consensus stops at a distance in proportion to γ and to what C leaves out. With
    C = identity and γ = 1 it is D-PSGD. With `overlap`: x_i ← x_i − η g_i(x_i) + γ Σ_j W_ij (c_j − c_i), c made of the model
    before the step; with C = identity and γ = 1 overlapped D-PSGD, stable for η h < 1 + λ_n.

    Args:
        optimizer: makes the local optimizer from parameters.
        compressor: a contraction, E‖C(x) − x‖² ≤ (1 − δ) ‖x‖².
        gamma: consensus step size γ in (0, 2]; None is the compressor's start value, "auto" that of a probe, see `gossip.probe`.

    >>> import gossip, graphs
    >>> b = torch.arange(8.0)[:, None]                                           # f_i(x) = (x − b_i)² / 2
    >>> def end(algorithm, **options):
    ...     gradient, ring = lambda x, workers, step: x - b, graphs.ring(8)
    ...     *_, last = gossip.simulate(gradient, algorithm, ring, 50, x0=torch.zeros(1), **options)
    ...     return last.x
    >>> torch.allclose(end(DeepSqueeze()), end(gossip.DPSGD()))                 # the identity, γ = 1
    True
    """

    optimizer: OptimizerFactory = sgd
    compressor: Compressor = Identity()
    gamma: float | str | None = None

    overlaps = True
    reads_gradient = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma, self.compressor)

    @property
    def step(self) -> float:
        """γ: as given, or the compressor's start value."""
        return step_size(self.gamma, self.compressor)

    def rate(self, W: Tensor) -> float | None:
        return damped_rate(W, self.step, self.compressor)

    def init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), memory_of(self.compressor, x), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state: State, net: Network) -> None:
        v = torch.sub(state.x, state.e, out=state.e)
        c = compress(self.compressor, v, net.keys(), state.own)
        net.send(c)
        c.add_to(state.e.neg_())

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.x, scale=self.step)  # x_i += γ (Σ_j W_ij c_j − c_i)
        return state
