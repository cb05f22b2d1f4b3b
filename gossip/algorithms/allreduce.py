"""AllReduce SGD: the centralized baseline, every worker steps along the average gradient."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: models, equal on all workers; g: the gradients held until they are averaged."""

    x: Tensor
    g: Tensor
    opt: Any


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Mini-batch SGD on n batches.

    .. math:: x ← x − η \\frac1n Σ_j g_j(x)

    Needs no graph; metered as a ring all-reduce, 2 (n − 1) / n models sent per worker and step.
    Local steps between averages are refused.

    Args:
        optimizer: makes the local optimizer from parameters; all workers' copies stay equal.
    """

    optimizer: OptimizerFactory = sgd

    requires = frozenset()
    exact = True
    steps_locally = False

    def init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.g.copy_(grad(state.x))
        return state

    def skip(self, state: State) -> State:
        """This worker contributes no gradient."""
        state.g.zero_()
        return state

    def rate(self, W: Tensor) -> None:
        """None: the models are equal from the start, and nothing else would make them so."""

    def send(self, state: State, net: Network) -> None:
        net.average(state.g)

    def receive(self, state: State, net: Network) -> State:
        state.opt.step(state.x, state.g)
        return state
