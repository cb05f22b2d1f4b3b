"""Gradient tracking: each worker follows an estimate of the average gradient (Koloskova et al. 2021, arXiv 2202.03836)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: models; y: tracked gradients; g: the gradients of the last step."""

    x: Tensor
    y: Tensor
    g: Tensor
    opt: Any


@dataclass(frozen=True)
class GradientTracking(Algorithm):
    """Gradient tracking, the variant that mixes the stepped models and the tracked gradients.

    .. math::
        y_i^k = Σ_j W_{ij} y_j^{k−1} + g_i^k − g_i^{k−1}, \\quad x_i^{k+1} = Σ_j W_{ij} (x_j^k − η y_j^k)

    with y = g = 0 before the first round. The mean of y is the mean of g at every step, so a constant η reaches the exact
    optimum although the workers' data differ. A message is two models. No overlapped form.

    Args:
        optimizer: makes the local optimizer from parameters; it steps x along y.
    """

    optimizer: OptimizerFactory = sgd

    requires = frozenset({"doubly_stochastic", "contractive"})
    exact = True

    def init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), torch.zeros_like(x), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        g = grad(state.x)
        state.y.add_(g).sub_(state.g)
        state.g.copy_(g)
        state.opt.step(state.x, state.y)
        return state

    def send(self, state: State, net: Network) -> None:
        net.send(state.x, state.y)

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.x, state.y)
        return state

    def communicate(self, state: State, net: Network) -> State:
        net.mix(state.x, state.y)
        return state
