"""Exact diffusion and D²: corrected by the pull that gossip has had (Yuan et al. 2017, arXiv 1702.05122; D²: 1803.07068)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphs import Incompatible, Schedule

from ..algorithm import Algorithm, Gradient
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: models; c: corrections, the sum of all displacements by gossip so far (their mean is 0)."""

    x: Tensor
    c: Tensor
    opt: Any


@dataclass(frozen=True)
class ExactDiffusion(Algorithm):
    """Exact diffusion in its correction form, which stands a changing learning rate.

    .. math::
        φ_i = x_i − η g_i(x_i) + c_i, \\quad x_i ← Σ_j \\bar W_{ij} φ_j, \\quad c_i ← c_i + x_i − φ_i

    with c = 0 at first and W̄ = (W + I)/2, or W̄ = W for D² (`lazy=False`). For constant η it equals
    x^{t+1} = W̄ (2x^t − x^{t−1} − η g^t + η g^{t−1}). A constant η reaches the exact optimum although the workers' data
    differ; not so with several local steps, between which c is blind, nor with Adam, whose steps are not linear in the
    gradient (gradient tracking stands both). D² needs λ_n > −1/3, exact diffusion any λ_n > −1. No overlapped form. A message
    is one model.

    Args:
        optimizer: makes the local optimizer from parameters.
        lazy: mix by (W + I)/2 (exact diffusion) rather than by W (D²).
    """

    optimizer: OptimizerFactory = sgd
    lazy: bool = True

    requires = frozenset({"doubly_stochastic", "symmetric", "static", "contractive"})
    exact = True
    reads_gradient = False

    def check(self, schedule: Schedule) -> None:
        """Besides `requires`: D² needs every eigenvalue of W above −1/3."""
        super().check(schedule)
        if not self.lazy:
            smallest = float(torch.linalg.eigvalsh(schedule(0).to_dense())[0])
            if smallest <= -1 / 3 + 1e-9:
                raise Incompatible(
                    f"ExactDiffusion(lazy=False), which is D², needs λ_min(W) > −1/3, and λ_min = {smallest:.6f}: use "
                    "lazy=True (W̄ = (W + I)/2), or more self weight"
                )

    def rate(self, W: Tensor) -> float:
        """The largest root of z² − 2λz + λ = 0 over the eigenvalues λ < 1 of W̄: √λ₂ where they are positive."""
        lam = torch.linalg.eigvalsh(W.to_dense())[:-1]
        lam = ((1 + lam) / 2 if self.lazy else lam).to(torch.complex128)
        split = (lam * lam - lam).sqrt()
        return float(torch.cat(((lam + split).abs(), (lam - split).abs(), torch.zeros(1))).max())

    def init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state: State, net: Network) -> None:
        state.x.add_(state.c)
        net.send(state.x)

    def receive(self, state: State, net: Network) -> State:
        state.x.sub_(state.c)
        net.receive(state.c, scale=0.5 if self.lazy else 1.0)  # c_i += Σ_j W̄_ij φ_j − φ_i
        state.x.add_(state.c)
        return state
