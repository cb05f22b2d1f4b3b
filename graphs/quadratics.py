"""What decentralized SGD does on quadratics, in closed form: rates, biases, noise floors, step-size limits, CHOCO's γ.

The problem is f_i(x) = (h/2)‖x − b_i‖² with a symmetric doubly stochastic W, where every eigenmode of W decouples.
Orders of one round: "atc" x ← W(x − ηg), the usual one; "awc" x ← Wx − ηg, which mixes while it computes; "cta"
x ← Wx − ηg(Wx), the sequence of "atc" shifted by half a round.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphs.properties import Incompatible, checked, offence
from graphs.spectral import dense_symmetric, extremes, spectrum

__all__ = [
    "Noise",
    "choco_gamma",
    "isotropic_rate",
    "quadratic_fixed_point",
    "quadratic_noise",
    "quadratic_rate",
    "stability_limit",
]


class Noise(NamedTuple):
    """Stationary variances per coordinate: of a worker's own model (mean over workers), and of the average model."""

    worker: float
    mean: float


def _modes(W: Any, order: str) -> Tensor:
    W = checked(W)
    broken = offence(W, "symmetric") or offence(W, "doubly_stochastic")
    if broken:
        raise Incompatible(f"{broken}: the closed forms need a symmetric doubly stochastic W; use graphs.metropolis.")
    if order not in ("atc", "awc", "cta"):
        raise ValueError(f"order is {order!r}; it must be 'atc', 'awc' or 'cta'.")
    return spectrum(W)


def quadratic_rate(W: Any, eta: float, h: float = 1.0, order: str = "atc") -> float:
    """The linear rate: max_k |λ_k(1 − ηh)| for atc and cta, max_k |λ_k − ηh| for awc; it diverges at 1 and above.

    >>> from graphs import metropolis, ring
    >>> round(quadratic_rate(metropolis(ring(16)), 0.1), 6), round(quadratic_rate(metropolis(ring(16)), 2 / 3, order="awc"), 6)
    (0.9, 1.0)
    """
    values = _modes(W, order)
    rates = (values - eta * h).abs() if order == "awc" else (values * (1 - eta * h)).abs()
    return float(rates.max())


def quadratic_fixed_point(W: Any, b: Any, eta: float, h: float = 1.0, order: str = "atc") -> Tensor:
    """Where D-PSGD with full gradients and a constant step ends: the optimum b̄ only on average, biased on every worker.

    awc: ⟨x, v_k⟩ = ηh/(1 − λ_k + ηh) ⟨b, v_k⟩; atc: that times λ_k, over 1 − λ_k(1 − ηh); cta: atc's before mixing.

    Args:
        W: (n, n) symmetric doubly stochastic.
        b: (n,) or (n, d), the workers' optima.
        eta, h: step size and curvature.

    >>> from graphs import metropolis, ring
    >>> x = quadratic_fixed_point(metropolis(ring(4)), torch.tensor([1.0, 0, 0, 0]), eta=0.1)
    >>> round(float(x.mean()), 6), round(float(x[0]), 6)
    (0.25, 0.267399)
    """
    n = len(_modes(W, order))
    b = torch.as_tensor(b, dtype=torch.float64)
    if b.shape[:1] != (n,):
        raise ValueError(f"b has shape {tuple(b.shape)}; it needs one optimum per worker, ({n},) or ({n}, d).")
    values, vectors = np.linalg.eigh(dense_symmetric(checked(W)))
    lam, e = torch.from_numpy(values), eta * h
    gain = {
        "awc": e / (1 - lam + e),
        "atc": e * lam / (1 - lam * (1 - e)),
        "cta": e / (1 - lam * (1 - e)),
    }[order]
    V = torch.from_numpy(vectors)
    return (V @ (gain[:, None] * (V.T @ b.reshape(n, -1)))).reshape(b.shape)


def quadratic_noise(W: Any, eta: float, h: float = 1.0, s: float = 1.0, order: str = "atc") -> Noise:
    """The noise floor with gradient noise of variance s² per coordinate, independent over workers and rounds.

    Worker: (ηs)² mean_k λ_k²/(1 − λ_k²(1 − ηh)²) for atc (without the λ_k² on top for cta), (ηs)² mean_k
    1/(1 − (λ_k − ηh)²) for awc. Mean model: (ηs)²/n / (1 − (1 − ηh)²). Infinite at an unstable step.

    >>> from graphs import metropolis, ring
    >>> noise = quadratic_noise(metropolis(ring(16)), eta=0.1)
    >>> round(noise.worker, 6), round(noise.mean, 6)
    (0.010131, 0.003289)
    """
    lam, e = _modes(W, order), eta * h
    if quadratic_rate(W, eta, h, order) >= 1:
        return Noise(math.inf, math.inf)
    spread = {
        "atc": lam**2 / (1 - lam**2 * (1 - e) ** 2),
        "cta": 1 / (1 - lam**2 * (1 - e) ** 2),
        "awc": 1 / (1 - (lam - e) ** 2),
    }[order]
    scale = (eta * s) ** 2
    return Noise(scale * float(spread.mean()), scale / len(lam) / (1 - (1 - e) ** 2))


def stability_limit(W: Any, method: str, h: float = 1.0) -> float:
    """The largest step η below which `method` is stable on curvature h; 0 if no small step is.

    | method | limit on ηh |
    |---|---|
    | atc, cta, exact_diffusion | 2 |
    | awc | 1 + λₙ |
    | d2 | 2 if λₙ > −1/3, else 0: a small step diverges (or stalls, at −1/3) |
    | extra | (5 + 3λₙ)/4 |
    | tracking_diging | (1 + λₙ)²/2 |
    | tracking_atc | min over λ of (1 + λ)²/(2λ²) |
    | tracking_mixed | min over λ > 0 of (1 + λ)²/(2λ), over λ < 0 of (1 − λ²)/|λ| |

    Args:
        W: symmetric doubly stochastic.
        method: a row of the table.
        h: the largest curvature.

    >>> from graphs import metropolis, ring
    >>> W = metropolis(ring(16))
    >>> [round(stability_limit(W, m), 4) for m in ("atc", "awc", "d2", "extra", "tracking_diging", "tracking_atc")]
    [2.0, 0.6667, 0.0, 1.0, 0.2222, 2.0]
    """
    _, last, _ = extremes(W)
    broken = offence(checked(W), "doubly_stochastic")
    if broken:
        raise Incompatible(f"{broken}: the limits hold for a symmetric doubly stochastic W; use graphs.metropolis.")
    limits = {
        "atc": 2.0,
        "cta": 2.0,
        "exact_diffusion": 2.0,
        "awc": 1 + last,
        "d2": 2.0 if last > -1 / 3 + 1e-9 else 0.0,
        "extra": (5 + 3 * last) / 4,
        "tracking_diging": (1 + last) ** 2 / 2,
        "tracking_atc": min(2.0, (1 + last) ** 2 / (2 * last**2) if last < 0 else 2.0),
        "tracking_mixed": min(2.0, (1 - last**2) / -last if last < 0 else 2.0),
    }
    if not h > 0:
        raise ValueError(f"h is {h!r}; a curvature is positive.")
    if method not in limits:
        raise ValueError(f"method is {method!r}; there are {', '.join(limits)}.")
    return limits[method] / h


def isotropic_rate(W: Any, eta: float, zeta: float) -> float:
    """The rate r of D-SGD on random isotropic quadratics (E‖Hx‖² = ζ E‖x‖²): E‖x‖² shrinks by 1 − r a step.

    r = 1 − (1−η)² − (ζ−1)η²/n_W(γ) at γ = (1−η)²/(1−r); the largest such r, 0 when it diverges.
    Source: Vogels et al. 2022, arXiv 2206.03093.

    >>> from graphs import metropolis, ring
    >>> round(isotropic_rate(metropolis(ring(32)), eta=0.0565, zeta=100), 4)
    0.0797
    """
    if not (eta > 0 and zeta >= 1):
        raise ValueError(f"eta is {eta!r} and zeta {zeta!r}; a step is positive, and ζ = E‖Hx‖²/E‖x‖² is 1 or more.")
    if eta >= 2:
        return 0.0
    values = _modes(W, "atc") ** 2
    keep = (1 - eta) ** 2

    def excess(r: float) -> float:
        gamma = keep / (1 - r)
        # [1/(1−γ)] / n_W(γ), finite at γ = 1 only for the disagreeing modes
        spread = float((values / (1 - gamma * values)).mean()) * (1 - gamma)
        return 1 - keep - (zeta - 1) * eta**2 * spread - r

    low, high = 0.0, 1 - keep - 1e-12  # γ < 1
    if excess(low) < 0:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def choco_gamma(W: Any, delta: float, biased: bool = False) -> float:
    """A consensus step γ for CHOCO with a compressor of contraction `delta` (E‖C(x) − x‖² ≤ (1 − δ)‖x‖²), near the best.

    The fastest mean-square rate of CHOCO-Gossip when every worker sends each coordinate with probability δ, found on the
    exact second-moment recursion of the modes of W. It lies close below a cliff: on a ring of 25 rand-1 % diverges from
    0.016 on, in simulation too. The step of the proof is 10³ to 10⁵ times smaller (arXiv 1902.00340); this is no proof.

    Args:
        W: (n, n) symmetric doubly stochastic.
        delta: in (0, 1]: k/d for rand-k.
        biased: for top-k and sign, with δ measured on a typical vector (top-1 % of a Gaussian one: 0.09). What error
            feedback leaves over is flatter than that and δ smaller, so γ is multiplied by 0.4.

    >>> from graphs import metropolis, ring
    >>> W = metropolis(ring(25))
    >>> round(choco_gamma(W, 0.01), 3), round(choco_gamma(W, 0.0894, biased=True), 3), choco_gamma(W, 1.0)
    (0.014, 0.051, 1.0)
    """
    if not 0 < delta <= 1:
        raise ValueError(f"delta is {delta!r}; a contraction lies in (0, 1], rand-k has k/d.")
    mu = 1 - _modes(W, "atc").numpy()
    mu[0] = 0.0
    if len(mu) == 1:
        return 1.0
    grid = np.geomspace(1e-2 * delta, min(1.5, 20 * delta), 30)
    rates = [_choco_rate(mu, delta, float(g)) for g in grid]
    best = int(np.argmin(rates))
    fine = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 15)
    rates = [_choco_rate(mu, delta, float(g)) for g in fine]
    return float(min(1.0, fine[int(np.argmin(rates))])) * (0.4 if biased and delta < 1 else 1)


def _choco_rate(mu: np.ndarray, delta: float, gamma: float) -> float:
    """Growth per round of the second moments of x and e = x − x̂ when coordinates travel with probability delta."""
    groups, size = _grouped(mu)
    m, g = len(groups), gamma * groups
    first, second = 1 - delta, delta * (1 - delta)
    # a = (1 − b)e; x' = (1 − g)x + g a; e' = (1 + g)a − g x, with E a = first·e and a variance spread over the modes
    block = np.zeros((3, 3, m))
    block[0] = (1 - g) ** 2, 2 * g * (1 - g) * first, g * g * first**2
    block[1] = -g * (1 - g), ((1 - g) * (1 + g) - g * g) * first, g * (1 + g) * first**2
    block[2] = g * g, -2 * g * (1 + g) * first, (1 + g) ** 2 * first**2
    block[:2, :, groups == 0] = 0  # the mean of x stays where it is
    M = np.einsum("abk,kl->akbl", block, np.eye(m))
    M[:, :, 2, :] += np.stack([g * g, g * (1 + g), (1 + g) ** 2])[:, :, None] * second * size / size.sum()
    return float(np.abs(np.linalg.eigvals(M.reshape(3 * m, 3 * m))).max())


def _grouped(mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct eigenvalues and their multiplicities, at most 40: neighbours merged where there are more."""
    values, counts = np.unique(np.round(mu, 9), return_counts=True)
    if len(values) > 40:
        # the mean's mode and both ends as they are, bins between
        edges = np.linspace(values[1], values[-1], 39)[1:-1]
        bins = np.concatenate([[0], 1 + np.digitize(values[1:], edges)])
        total = np.bincount(bins, counts)
        values, counts = np.bincount(bins, counts * values)[total > 0] / total[total > 0], total[total > 0]
        values[1], values[-1] = np.sort(mu)[1], mu.max()
    return values, counts
