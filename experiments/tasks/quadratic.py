"""Quadratics fᵢ(x) = (hᵢ/2)‖x − bᵢ‖², whose optimum and whose gossip fixed points are known in closed form.

With equal h this is QUAD(h): every eigenmode of W decouples. With different h, D-PSGD with a constant step is biased by
O(η).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossip import rng
from graphs.topology import whole


class Quadratic:
    """f(x) = (1/n) Σᵢ (hᵢ/2)‖x − bᵢ‖², gradient hᵢ(x − bᵢ) + σ·ξ with ξ ~ N(0, I), independent for each (worker, step).

    Args:
        b: (n, d) the workers' own optima; its dtype is the task's.
        h: curvatures, one number or (n,), positive.
        sigma: σ, standard deviation of the gradient noise in each coordinate.
        seed: of the noise.
        start: (d,) the common start, by default 0.

    The optimum is x* = Σ hᵢbᵢ / Σ hᵢ, and f(x) − f(x*) = (h̄/2)‖x − x*‖². Metrics: ``suboptimality`` f(x) − f(x*),
    ``distance`` ‖x − x*‖.

    >>> task = Quadratic(b=torch.tensor([[0.0], [3.0]]), h=torch.tensor([1.0, 2.0]))
    >>> task.optimum.tolist(), {k: v.tolist() for k, v in task.evaluate(torch.tensor([[2.0], [4.0]])).items()}
    ([2.0], {'suboptimality': [0.0, 3.0], 'distance': [0.0, 2.0]})
    """

    batch_size = 1

    def __init__(
        self, b: Tensor, h: float | Tensor = 1.0, sigma: float = 0.0, seed: int = 0, start: Tensor | None = None
    ) -> None:
        self.n, self.size = len(b), len(b)
        self.b, self.sigma, self.seed = b, sigma, seed
        self.h = torch.as_tensor(h, dtype=b.dtype, device=b.device).expand(self.n).contiguous()
        if not bool((self.h > 0).all()) or not bool(self.h.isfinite().all()):
            raise ValueError(f"h = {self.h.tolist()}: curvatures are positive numbers, or there is no optimum.")
        if not 0 <= sigma < float("inf"):
            raise ValueError(f"sigma = {sigma}: a standard deviation is finite and not negative.")
        self.optimum = (self.h @ b) / self.h.sum()
        self.start = torch.zeros_like(b[0]) if start is None else start
        self._g = torch.empty_like(b)
        self._loss = torch.empty_like(self.h)

    def report(self) -> str:
        zeta = (self.h[:, None] * (self.optimum - self.b)).square().sum(1).mean()
        return (
            f"{self.n} quadratics in {self.b.shape[1]} dimensions, curvature {float(self.h.min()):.3g} to "
            f"{float(self.h.max()):.3g}, heterogeneity (1/n) Σ‖∇fᵢ(x*)‖² = {float(zeta):.3g}, noise σ = "
            f"{self.sigma:.3g}"
        )

    def initial(self) -> Tensor:
        return self.start.clone()

    def gradient(self, x: Tensor, workers: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        h = self.h[workers]
        g, loss = self._g[: len(x)], self._loss[: len(x)]
        torch.sub(x, self.b[workers], out=g)
        torch.mul(h / 2, (g * g).sum(1), out=loss)
        g.mul_(h[:, None])
        if self.sigma:
            noise = rng.normal(rng.key(self.seed, "noise", workers, step), g.shape[1], g.dtype)
            g.add_(noise.to(g.device), alpha=self.sigma)
        return g, loss

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        squared = (x - self.optimum).square().sum(1)
        return {"suboptimality": squared * (self.h.mean() / 2), "distance": squared.sqrt()}


def quadratic(
    n: int,
    d: int = 10,
    curvature: float | Sequence[float] = 1.0,
    spread: float = 1.0,
    sigma: float = 0.0,
    seed: int = 0,
    dtype: str = "float64",
    device: str = "cpu",
) -> Quadratic:
    """Own optima bᵢ ~ N(1, spread² I), so that the start 0 is away from the optimum also without heterogeneity (spread
    = 0).

    ``curvature`` is one number for all workers, or (lowest, highest), from which the hᵢ are spaced evenly in logarithm
    over the workers.

    >>> task = quadratic(n=4, d=3, curvature=(1, 8))
    >>> task.h.round(decimals=3).tolist()
    [1.0, 2.0, 4.0, 8.0]
    """
    n, d, kind = whole("n", n, 1), whole("d", d, 1), getattr(torch, dtype)
    b = 1 + spread * rng.normal(rng.key(seed, "optima", torch.arange(n)), d)
    ends = [float(c) for c in curvature] if isinstance(curvature, Sequence) else [float(curvature)] * 2
    if len(ends) != 2 or min(ends) <= 0:
        raise ValueError(f"curvature = {curvature}: one positive number, or two (lowest and highest).")
    h = torch.logspace(torch.tensor(ends[0]).log10(), torch.tensor(ends[1]).log10(), n, dtype=torch.float64)
    return Quadratic(b.to(device, kind), h.to(device, kind), sigma, seed)
