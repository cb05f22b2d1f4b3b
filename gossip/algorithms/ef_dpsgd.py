"""D-PSGD with error feedback on the differences that it sends (Tang et al. 2018, arXiv 1803.06443; memory of 1809.07599)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..compress import Compressor, Identity
from ..compress.identity import Dense
from ..compress.payload import compress, memory_of
from ..gamma import check_gamma, step_size
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """hat: the models x̂; x: x̂ + e; lag: Σ_j W_ij x̂_j − x̂_i; r: room; told: whether x̂ was sent; own: the compressor's."""

    x: Tensor
    hat: Tensor
    lag: Tensor
    r: Tensor
    told: Tensor
    own: Any
    opt: Any


@dataclass(frozen=True)
class EFDPSGD(Algorithm):
    """Difference-compressed D-PSGD whose compression error e is fed back.

    .. math::
        x_i &← \\hat x_i + e_i − η g_i(\\hat x_i) + γ Σ_j W_{ij} (\\hat x_j − \\hat x_i) \\\\
        q_i &= C(x_i − \\hat x_i), \\quad \\hat x_i ← \\hat x_i + q_i, \\quad e_i = β (x_i − \\hat x_i)

    The model is x̂, which the neighbours know exactly: gradients are taken where the messages have got to, while CHOCO-SGD
    takes them at x. The first message is the model itself. β < 1 discounts the error (DEFD-PSGD, openreview
    zqXANcFO9T); β = 0, γ = 1 is DCD-PSGD, which diverges under coarse compression. With C = identity and γ = 1 it is the
    original D-PSGD (adapt-while-combine), stable for η h < 1 + λ_n. The running sum is only right for a fixed W.

    Args:
        optimizer: makes the local optimizer from parameters.
        compressor: a contraction, E‖C(x) − x‖² ≤ (1 − δ) ‖x‖².
        gamma: consensus step size γ in (0, 2]; None is the compressor's start value, "auto" that of a probe, see `gossip.probe`.
        discount: β in [0, 1].
    """

    optimizer: OptimizerFactory = sgd
    compressor: Compressor = Identity()
    gamma: float | str | None = None
    discount: float = 1.0

    requires = frozenset({"doubly_stochastic", "symmetric", "static", "contractive"})
    reads_gradient = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma, self.compressor)
        if not 0 <= self.discount <= 1:
            raise ValueError(
                f"discount={self.discount!r} is not in [0, 1]: it is the share of the error that is fed back"
            )

    @property
    def step(self) -> float:
        """γ: as given, or the compressor's start value."""
        return step_size(self.gamma, self.compressor)

    def rate(self, W: Tensor) -> float | None:
        return None  # known without compression only, where it is D-PSGD's

    def init(self, x: Tensor) -> State:
        zeros, told = torch.zeros_like, torch.zeros((), dtype=torch.int64)
        own, opt = memory_of(self.compressor, x), LocalOptimizer(self.optimizer, x)
        return State(x, x.clone(), zeros(x), zeros(x), told, own, opt)

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(state.hat))
        return state

    def send(self, state: State, net: Network) -> None:
        if not state.told:
            state.told.fill_(1)
            net.send(Dense(state.hat.copy_(state.x).clone()))
            return
        state.x.add_(state.lag, alpha=self.step)
        torch.sub(state.x, state.hat, out=state.r)
        q = compress(self.compressor, state.r, net.keys(), state.own)
        net.send(q)
        q.add_to(state.hat)
        if self.discount < 1:
            state.x.lerp_(state.hat, 1 - self.discount)

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.lag)  # lag_i += Σ_j W_ij q_j − q_i
        return state

    def params(self, state: State) -> Tensor:
        return state.hat
