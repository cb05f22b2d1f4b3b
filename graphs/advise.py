"""In plain sentences: what a mixing matrix is good and bad for."""

from typing import Any

import torch

from graphs.predict import effective_neighbours, mixing_time, stationary
from graphs.properties import checked, csr, entries, offence
from graphs.quadratics import stability_limit
from graphs.spectral import DENSE, extremes, recurrent, slem, stochastic

__all__ = ["advise"]


def advise(W: Any) -> str:
    """Plain sentences, one a line, on what W mixes, how fast, and which algorithms it suits.

    Args:
        W: a mixing matrix (rows or columns sum to one; `Incompatible` otherwise).

    >>> from graphs import metropolis, ring
    >>> print(advise(metropolis(ring(16))))
    16 workers, 2 messages each per round at most; doubly stochastic, symmetric.
    SLEM 0.949253 (λ₂ = 0.949253 dominates, λₙ = -0.333333), gap 0.0507; disagreement falls to 1/1000 in 133 rounds.
    Worth 3.00 workers against fresh noise, 6.60 over 10 rounds, 13.12 over 100: the gap alone does not say this.
    Averages are exact: D-PSGD, gradient tracking and CHOCO are safe.
    D² is not safe as steps shrink: λₙ = -0.333333 is not above -1/3; use graphs.lazy(W), or exact diffusion.
    Step limits on curvature h: ηh < 2, mixing while computing (overlap) 0.667, EXTRA 1, DIGing 0.222.
    """
    W = checked(W)
    by_rows = stochastic(W)
    n, matrix = W.shape[0], csr(W)
    if n == 1:
        return "1 worker: nothing to mix; every algorithm is plain SGD, gap 1."
    rows, columns, values = entries(W)
    heard = torch.bincount(rows[rows != columns], minlength=n)
    doubly, symmetric = offence(W, "doubly_stochastic"), offence(W, "symmetric")
    negative = offence(W, "nonnegative")
    kind = "doubly stochastic" if doubly is None else "row stochastic only" if by_rows else "column stochastic only"
    shape = "symmetric" if symmetric is None else "not symmetric"
    lines = [f"{n} workers, {int(heard.max())} messages each per round at most; {kind}, {shape}."]
    if negative:
        lines.append(f"Some weights are negative ({negative}): legitimate, but no averages of what arrives.")
    rate = slem(W)
    if rate >= 1:
        lines.append(_standstill(W, matrix if by_rows else matrix.T.tocsr(), negative is None))
        return "\n".join(lines)
    rounds = (
        f"; disagreement falls to 1/1000 in {mixing_time(W, 1e-3)} rounds" if n <= DENSE or symmetric is None else ""
    )
    ends = extremes(W) if symmetric is None else None
    if ends is not None:
        which = "λ₂" if ends.dominant == "second" else "λₙ"
        first, other = (ends.second, ends.last) if ends.dominant == "second" else (ends.last, ends.second)
        also = "λₙ" if ends.dominant == "second" else "λ₂"
        lines.append(
            f"SLEM {rate:.6f} ({which} = {first:.6f} dominates, {also} = {other:.6f}), gap {1 - rate:.3g}{rounds}."
        )
    else:
        lines.append(f"SLEM {rate:.6f} (a modulus), gap {1 - rate:.3g}{rounds}.")
    if by_rows and n <= DENSE:
        fresh, ten, hundred = (effective_neighbours(W, g) for g in (0.0, 0.9, 0.99))
        lines.append(
            f"Worth {fresh:.2f} workers against fresh noise, {ten:.2f} over 10 rounds, {hundred:.2f} over 100: "
            "the gap alone does not say this."
        )
    if doubly is None:
        safe = (
            "D-PSGD, gradient tracking and CHOCO are safe"
            if symmetric is None
            else "D-PSGD and gradient tracking are safe"
        )
        lines.append(f"Averages are exact: {safe}{'' if symmetric is None else '; CHOCO and D² need a symmetric W'}.")
    elif by_rows:
        pi = stationary(W)
        i = int(pi.argmax())
        lines.append(
            f"Averages are not preserved ({doubly}): worker {i} counts {float(pi[i]) * n:.2f} times its share. "
            "Use graphs.metropolis, or graphs.push with a push-sum algorithm (SGP)."
        )
    else:
        lines.append(
            f"For push-sum algorithms (SGP) only: {doubly}, so plain averaging would not even keep a constant."
        )
    if doubly is None and ends is not None:
        if stability_limit(W, "d2") > 0:
            lines.append(f"D² and exact diffusion are safe: λₙ = {ends.last:.6f} is above -1/3.")
        else:
            lines.append(
                f"D² is not safe as steps shrink: λₙ = {ends.last:.6f} is not above -1/3; use graphs.lazy(W), "
                "or exact diffusion."
            )
        awc, extra, diging = (stability_limit(W, method) for method in ("awc", "extra", "tracking_diging"))
        lines.append(
            f"Step limits on curvature h: ηh < 2, mixing while computing (overlap) {awc:.3g}, EXTRA {extra:.3g}, "
            f"DIGing {diging:.3g}."
        )
    return "\n".join(lines)


def _standstill(W: Any, walk: Any, nonnegative: bool) -> str:
    from graphs.properties import strongly_connected

    if not nonnegative:
        return f"SLEM {slem(W):.6f}: disagreement does not shrink but grows; lower the over-relaxation."
    if not strongly_connected(walk):
        from scipy.sparse.csgraph import connected_components

        count = connected_components(walk, directed=True, connection="strong", return_labels=False)
        return (
            f"Gap 0, strongly connected: no, {count} components: they never agree. Add edges, or check the edge list."
        )
    period = recurrent(walk)
    hint = "bipartite" if period == 2 else f"period {period}"
    return (
        f"Gap 0, strongly connected: yes, aperiodic: no ({hint}): add self weight, or use graphs.lazy(W) = (W + I)/2."
    )
