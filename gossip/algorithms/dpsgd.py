"""D-PSGD: a local step, then every model becomes the weighted average of its neighbours' (Lian et al. 2017, arXiv 1705.09056)."""

from dataclasses import dataclass

from torch import Tensor

from ..algorithm import Algorithm, Gradient, Rows
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


@dataclass(frozen=True)
class DPSGD(Algorithm):
    """Decentralized parallel SGD.

    .. math:: x_i ← Σ_j W_{ij} (x_j − η g_j(x_j))

    (adapt-then-combine). With `overlap`: x_i ← Σ_j W_ij x_j − η g_i(x_i), the original (adapt-while-combine), which is
    stable for η h < 1 + λ_n on quadratics of curvature h, against η h < 2 without overlap. Both are biased by O(η) when
    the workers' data differ. A message is one model.

    Args:
        optimizer: makes the local optimizer from parameters, for example `functools.partial(torch.optim.SGD, lr=0.1)`.
    """

    optimizer: OptimizerFactory = sgd

    requires = frozenset({"doubly_stochastic", "contractive"})
    overlaps = True
    reads_gradient = False
    columnwise = True

    def init(self, x: Tensor) -> Rows:
        return Rows(x, LocalOptimizer(self.optimizer, x))

    def compute(self, state: Rows, grad: Gradient) -> Rows:
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state: Rows, net: Network) -> None:
        net.send(state.x)

    def receive(self, state: Rows, net: Network) -> Rows:
        net.receive(state.x)  # x_i += Σ_j W_ij sent_j − sent_i
        return state

    def communicate(self, state: Rows, net: Network) -> Rows:
        net.mix(state.x)
        return state
