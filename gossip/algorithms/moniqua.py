"""Moniqua: gossip on models modulo a constant, in few bits and without memory (Lu and De Sa 2020, arXiv 2002.11787)."""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from ..algorithm import Algorithm, Gradient
from ..compress import Moniqua
from ..compress.laps import Laps
from ..network import Network
from ..optimizer import LocalOptimizer, OptimizerFactory, sgd


class State(NamedTuple):
    """x: models; sent: as they were sent, near which the neighbours' are read."""

    x: Tensor
    sent: Tensor
    opt: Any


@dataclass(frozen=True)
class MoniquaSGD(Algorithm):
    """D-PSGD on models of which k bits a coordinate travel: where they are modulo B = 2 θ / (1 − 2 δ), δ = 2^−k.

    .. math::
        x_i &← x_i − η g_i(x_i), \\quad q_i = Q_δ(x_i \\bmod B), \\quad \\hat x_{ij} = (q_j − x_i) \\bmod B + x_i \\\\
        x_i &← x_i + γ Σ_j W_{ij} (\\hat x_{ij} − \\hat x_{ii})

    Every model is read near the receiver's own, x̂_ij is unbiased and off by less than δ B, and a common offset costs
    nothing. All workers of a round share the dither of Q, and a worker counts its own model as the others read it (x̂_ii, the
    biased reconstruction): so Σ x is kept exactly, and errors of near models cancel. What remains is a consensus distance in
    proportion to (γ δ B)². As δ → 0 it is D-PSGD. With `overlap`, the paper's order:
    x_i ← x_i − η g_i(x_i) + γ Σ_j W_ij (x̂_ij − x̂_ii), x̂ of the models before the step, as δ → 0 overlapped D-PSGD, stable for
    η h < 1 + λ_n with γ = 1.

    A coordinate in which neighbours are θ or more apart may be read wrong by a multiple of B. A sum of 8 bytes in the message
    shows when that happens, not before, and stops the run (`gossip.compress.laps`).

    Args:
        optimizer: makes the local optimizer from parameters.
        theta: θ > 0, more than any two neighbours ever differ in any coordinate; there is no value that fits all.
        bits: k from 2 to 8.
        gamma: consensus step size γ in (0, 1], the slack of W: 1 for 8 bits, about 0.1 for 2.

    >>> import gossip, graphs, torch
    >>> b = torch.arange(8.0)[:, None]                                           # f_i(x) = (x − b_i)² / 2
    >>> algorithm = MoniquaSGD(theta=2.0)
    >>> *_, last = gossip.simulate(lambda x, *_: x - b, algorithm, graphs.ring(8), 300, x0=torch.zeros(1))
    >>> round(float(last.x.mean()), 3), last.bits // (300 * 8 * 2)               # 8 bits, B / 2^8, and the sum
    (3.5, 104)
    """

    optimizer: OptimizerFactory = sgd
    theta: float | None = None
    bits: int = 8
    gamma: float = 1.0

    overlaps = True
    reads_gradient = False

    def __post_init__(self) -> None:
        if self.theta is None:
            raise ValueError(
                "theta=None: MoniquaSGD needs a bound on how far apart neighbours ever are in any coordinate: give theta, at a "
                "guess η max|g| / (1 − SLEM(W)); one too small stops the run with a message, one too large costs precision"
            )
        _ = self.quantiser  # checks theta and bits
        if isinstance(self.gamma, str) or not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma!r} is not in (0, 1]: it is the slack of W; 1 for 8 bits, 0.1 for 2")

    @property
    def quantiser(self) -> Moniqua:
        """Q_δ on the circle."""
        return Moniqua(cast("float", self.theta), self.bits)

    def rate(self, W: Tensor) -> None:
        """None: disagreement shrinks to where rounding keeps it, and no further."""

    def init(self, x: Tensor) -> State:
        return State(x, x.clone(), LocalOptimizer(self.optimizer, x))

    def compute(self, state: State, grad: Gradient) -> State:
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state: State, net: Network) -> None:
        state.sent.copy_(state.x)
        net.send(self._message(state, net))

    def resend(self, state: State, net: Network, parts: tuple[Tensor, ...]) -> None:
        net.send(self._message(state, net).like(parts))

    def _message(self, state: State, net: Network) -> Laps:
        return Laps.of(self.quantiser, state.sent, net.keys(shared=True), net.rows, net.round)

    def receive(self, state: State, net: Network) -> State:
        net.receive(state.x, scale=self.gamma)  # x_i += γ Σ_j (W − I)_ij (x̂_ij − sent_i)
        return state
