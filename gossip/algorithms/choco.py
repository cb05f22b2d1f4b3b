"""CHOCO-SGD: gossip on compressed differences to public copies (Koloskova et al. 2019, arXiv 1902.00340 and 1907.09356)."""

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
    """x: models; hat: the public copies x̂; lag: Σ_j W_ij x̂_j − x̂_i, kept as one row; r: room for x − x̂;
    own: what the compressor remembers."""

    x: Tensor
    hat: Tensor
    lag: Tensor
    r: Tensor
    own: Any
    opt: Any


@dataclass(frozen=True)
class Choco(Algorithm):
    """CHOCO-SGD in its memory-efficient form.

    .. math::
        x_i &← x_i − η g_i(x_i), \\quad q_i = C(x_i − \\hat x_i) \\\\
        \\hat x_i &← \\hat x_i + q_i, \\quad x_i ← x_i + γ Σ_j W_{ij} (\\hat x_j − \\hat x_i)

    Only q travels. x̂ starts at 0. With `overlap` q is made before the step ("order B" of the paper's code):
    x_i ← x_i − η g_i(x_i) + γ Σ_j W_ij (x̂_j − x̂_i); with C = identity and γ = 1 it is overlapped D-PSGD, stable for
    η h < 1 + λ_n. The running sum is only right for a fixed W.

    Args:
        optimizer: makes the local optimizer from parameters.
        compressor: a contraction, E‖C(x) − x‖² ≤ (1 − δ) ‖x‖².
        gamma: consensus step size γ in (0, 2]; None is the compressor's own start value, "auto" that of a probe, see
            `gossip.probe`. The coarser the compressor, the smaller: 1 with identity, 0.04 with top-k of 1 %; beyond a
            stability limit the models drift apart (`gossip.drifts`).
    """

    optimizer: OptimizerFactory = sgd
    compressor: Compressor = Identity()
    gamma: float | str | None = None

    requires = frozenset({"doubly_stochastic", "symmetric", "static", "contractive"})
    overlaps = True
    reads_gradient = False
    memory = frozenset({"hat", "lag", "own"})

    def __post_init__(self) -> None:
        check_gamma(self.gamma, self.compressor)

    @property
    def step(self) -> float:
        """γ: as given, or the compressor's start value."""
        return step_size(self.gamma, self.compressor)

    def rate(self, W: Tensor) -> float | None:
        return damped_rate(W, self.step, self.compressor)

    def init(self, x: Tensor) -> State:
        zeros = torch.zeros_like
        own = memory_of(self.compressor, x)
        return State(x, zeros(x), zeros(x), zeros(x), own, LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state: State, net: Network) -> None:
        torch.sub(state.x, state.hat, out=state.r)
        q = compress(self.compressor, state.r, net.keys(), state.own)
        net.send(q)
        q.add_to(state.hat)

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.lag)  # lag_i += Σ_j W_ij q_j − q_i
        state.x.add_(state.lag, alpha=self.step)
        return state
