"""SGP: push-sum gossip for directed graphs, de-biased by a weight that travels along (Assran et al. 2019, arXiv 1811.10792)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: biased numerators; w: push-sum weights (m, 1), Σ w = n; z: the models x / w."""

    x: Tensor
    w: Tensor
    z: Tensor
    opt: Any


@dataclass(frozen=True)
class SGP(Algorithm):
    """Stochastic gradient push.

    .. math::
        x_i ← Σ_j P_{ij} (x_j − η g_j(z_j)), \\quad w_i ← Σ_j P_{ij} w_j, \\quad z_i = x_i / w_i

    P is column stochastic: a sender splits its mass, so Σ x and Σ w are conserved, and x / w is unbiased on any strongly
    connected directed graph. x and w travel as one message. With `overlap`: x_i ← Σ_j P_ij x_j − η g_i(z_i) (overlapped
    SGP with delay 1), stable for η h < 1 + λ_n when P is symmetric.

    Args:
        optimizer: makes the local optimizer from parameters; it steps the numerator x along gradients at z.
    """

    optimizer: OptimizerFactory = sgd

    requires = frozenset({"column_stochastic", "contractive"})
    overlaps = True
    reads_gradient = False

    def init(self, x: Tensor) -> State:
        return State(x, x.new_ones(len(x), 1), x.clone(), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(self.params(state)))
        return state

    def send(self, state: State, net: Network) -> None:
        net.send(state.x, state.w)

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.x, state.w)
        return state

    def communicate(self, state: State, net: Network) -> State:
        net.mix(state.x, state.w)
        return state

    def params(self, state: State) -> Tensor:
        """z = x / w."""
        return torch.div(state.x, state.w, out=state.z)
