"""How fast a mixing matrix mixes: the second largest modulus (SLEM) and the gap 1 − SLEM, exact where a formula exists.

The method follows the structure, and every answer is either certain or checked:
1. one worker, a disconnected graph or a periodic walk (found on the graph, not by an eigensolver): exact;
2. a W that looks the same from every worker (ring, torus, exponential …): its characters, see `graphs.cayley`;
3. a symmetric tridiagonal W (a path): LAPACK's bisection;
4. up to `DENSE` workers: LAPACK on the dense matrix, the symmetric solver when |W − Wᵀ| ≤ 1e-7;
5. beyond: Lanczos, or the inverse for long thin graphs, residual checked, see `graphs.solvers`; Arnoldi for directed
   ones. No convergence is a `ValueError` that says what is known.
All are deterministic.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphs import cayley
from graphs.properties import Incompatible, checked, csr, cycle_length, entries, offence, solid, strongly_connected
from graphs.solvers import constant_free_ends, operator

__all__ = ["Extremes", "extremes", "gap", "slem", "spectrum"]

DENSE = 1500
RESIDUAL = 1e-8


def gap(W: Any) -> float:
    """The spectral gap 1 − |λ|, λ the eigenvalue of second largest modulus: the share of disagreement gone per round.

    Args:
        W: (n, n) mixing matrix whose rows (or columns) sum to one; `Incompatible` otherwise.

    n = 1 has gap 1. Disconnected, bipartite and otherwise periodic graphs have gap 0, exactly. A W with negative
    weights may have a negative gap: it diverges. Of a directed W the modulus of complex eigenvalues is meant.

    >>> from graphs import metropolis, ring
    >>> round(gap(metropolis(ring(25))), 7), gap(metropolis(ring(1)))
    (0.0209446, 1.0)
    """
    W = checked(W)
    n = W.shape[0]
    by_rows = stochastic(W)
    if n == 1:
        return 1.0
    negative = offence(W, "nonnegative") is not None
    matrix = csr(W)
    if not negative:
        moduli_one = recurrent(solid(matrix) if by_rows else solid(matrix).T.tocsr())
        if moduli_one > 1:
            return 0.0
    shape = cayley.group(W)
    if shape is not None:
        return float(below(cayley.deficits(W, shape)[1:]).min())
    if offence(W, "symmetric") is None:
        # Gershgorin: 1 − λₙ is at most 2(1 − min W_ii), which often decides that λ₂ dominates
        floor = 2 * float(matrix.diagonal().min()) if not negative else -np.inf
        second, last = deficits_at_the_ends(W, matrix, far=False)
        if not second <= floor and np.isnan(last):
            last = deficits_at_the_ends(W, matrix)[1]
        return second if second <= floor else float(below(np.array([second, last])).min())
    return 1 - _directed_slem(W, matrix, by_rows)


def slem(W: Any) -> float:
    """The second largest modulus of the eigenvalues of W, one copy of 1 set aside: disagreement shrinks by it a round.

    |λ₂| or |λₙ|, whichever is larger, for a symmetric W; see `gap` for arguments, errors and special cases.

    >>> from graphs import metropolis, star, torus
    >>> round(slem(metropolis(star(16))), 6), round(slem(metropolis(torus(4, 8))), 6)
    (0.9375, 0.882843)
    """
    return 1 - gap(W)


class Extremes(NamedTuple):
    """λ₂ and λₙ of a symmetric W, and which of them ("second" or "last") is larger in modulus and sets the pace."""

    second: float
    last: float
    dominant: str


def extremes(W: Any) -> Extremes:
    """The second largest and the smallest eigenvalue of a symmetric W, signed; `Incompatible` for a directed one.

    Where "last" dominates, the walk nearly alternates between two sides: self weights, graphs.lazy(W), help.

    >>> from graphs import metropolis, path, hypercube
    >>> e = extremes(metropolis(hypercube(3)))
    >>> round(e.second, 6), round(e.last, 6), e.dominant
    (0.5, -0.5, 'second')
    """
    W = checked(W)
    unlike = offence(W, "symmetric")
    if unlike:
        raise Incompatible(f"{unlike}: λ₂ and λₙ need a symmetric W; slem, gap and spectrum take any.")
    stochastic(W)
    if W.shape[0] == 1:
        return Extremes(0.0, 0.0, "second")
    matrix, shape = csr(W), cayley.group(W)
    if shape is not None:
        mu = cayley.deficits(W, shape)[1:].real
        low, high = float(mu.min()), float(mu.max())
    else:
        low, high = deficits_at_the_ends(W, matrix)
        if offence(W, "nonnegative") is None and not strongly_connected(solid(matrix)):
            low = 0.0
    return Extremes(1 - low, 1 - high, "second" if 1 - low >= high - 1 else "last")


def spectrum(W: Any) -> Tensor:
    """All eigenvalues of W: (n,) float64 in falling order if W is symmetric, else complex128 by falling modulus.

    Exact sums for a W with translation symmetry at any n; otherwise dense, refused (`ValueError`) beyond 5,000 workers.

    >>> from graphs import metropolis, star
    >>> spectrum(metropolis(star(4))).round(decimals=6).abs().tolist()
    [1.0, 0.75, 0.75, 0.0]
    """
    W = checked(W)
    symmetric = offence(W, "symmetric") is None
    shape = cayley.group(W) if offence(W, "row_stochastic") is None else None
    if shape is not None:
        values = 1 - cayley.deficits(W, shape)
        values = values.real if symmetric else values.astype(np.complex128)
    elif W.shape[0] > 5000:
        raise ValueError(
            f"all eigenvalues of a W on {W.shape[0]} workers take minutes and gigabytes; up to 5000 they are computed. "
            "graphs.slem and graphs.extremes give the ends of the spectrum at any n."
        )
    else:
        values = np.linalg.eigvalsh(dense_symmetric(W)) if symmetric else np.linalg.eigvals(W.to_dense().numpy()) + 0j
    order = np.argsort(-values if symmetric else -np.abs(values), kind="stable")
    return torch.from_numpy(np.ascontiguousarray(values[order]))


def stochastic(W: Tensor) -> bool:
    """True if the rows of W sum to one, False if only the columns do; `Incompatible` if neither."""
    rows, columns = offence(W, "row_stochastic"), offence(W, "column_stochastic")
    if rows and columns:
        raise Incompatible(
            f"{rows}, and {columns}: without an eigenvalue 1 the spectral gap has no meaning. Use a weight rule "
            "(graphs.metropolis, graphs.uniform, graphs.push) or normalise the rows."
        )
    return rows is None


def recurrent(walk: Any) -> int:
    """How many eigenvalues of modulus one a nonnegative row-stochastic walk has: closed classes, or a period."""
    from scipy.sparse.csgraph import connected_components

    count, label = connected_components(walk, directed=True, connection="strong")
    rows, columns = walk.tocoo().coords
    leaves = np.zeros(count, dtype=bool)
    across = label[rows] != label[columns]
    leaves[label[rows[across]]] = True
    closed = np.flatnonzero(~leaves)
    if len(closed) > 1:
        return len(closed)
    inside = np.flatnonzero(label == closed[0])
    if (walk.diagonal()[inside] != 0).any():
        return 1
    return cycle_length(walk if count == 1 else walk[inside][:, inside])


def below(mu: np.ndarray) -> np.ndarray:
    """1 − |1 − μ| without cancellation."""
    if not np.iscomplexobj(mu):
        return np.where(mu <= 1, mu, 2 - mu)
    modulus = np.abs(1 - mu)
    return (2 * mu.real - mu.real**2 - mu.imag**2) / (1 + modulus)


def deficits_at_the_ends(W: Tensor, matrix: Any, far: bool = True) -> tuple[float, float]:
    """1 − λ₂ and 1 − λₙ of a symmetric W without translation symmetry; the latter may be nan unless `far`."""
    n = W.shape[0]
    rows, columns, _ = entries(W)
    if n > 3 and bool(((rows - columns).abs() <= 1).all()):
        from scipy import linalg

        eigh: Any = linalg.eigh_tridiagonal

        # of I − W, whose small eigenvalues bisection finds to an absolute 1e-16
        d, e = 1 - matrix.diagonal(), -matrix.diagonal(1)
        ends = [eigh(d, e, True, "i", (k, k))[0] for k in ((1, n - 1) if far else (1,))]
        return float(ends[0]), float(ends[-1]) if far else float("nan")
    if n <= DENSE:
        mu = 1 - np.linalg.eigvalsh(dense_symmetric(W))[:-1] if n > 1 else np.ones(1)
        return float(mu[-1]), float(mu[0])
    return constant_free_ends(matrix, far)


def dense_symmetric(W: Tensor) -> np.ndarray:
    """W as a dense array, its rounding asymmetry averaged away."""
    A = W.to_dense().numpy()
    return (A + A.T) / 2


def _directed_slem(W: Tensor, matrix: Any, by_rows: bool) -> float:
    n = W.shape[0]
    if n <= DENSE:
        values = np.linalg.eigvals(W.to_dense().numpy())
        moduli = np.sort(np.abs(np.delete(values, np.abs(values - 1).argmin())))
        return float(moduli[-1])
    from scipy.sparse.linalg import ArpackNoConvergence, eigs

    walk = matrix if by_rows else matrix.T.tocsr()
    # W − 1(1/n)ᵀ has the eigenvalues of W, but 0 in place of the 1 (Wielandt)
    deflated = operator(n, lambda x: walk @ x - x.mean())
    start = np.random.RandomState(0).standard_normal(n)
    try:
        values, vectors = eigs(deflated, k=1, which="LM", v0=start, tol=1e-9, maxiter=1000, ncv=40)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"the second modulus of this directed W on {n} workers did not converge in 1000 restarts of Arnoldi; "
            f"up to {DENSE} workers the dense solver decides."
        ) from error
    image = deflated.matvec(vectors[:, 0].real) + 1j * deflated.matvec(vectors[:, 0].imag)
    residual = float(np.linalg.norm(image - values[0] * vectors[:, 0]))
    if residual > RESIDUAL:
        raise ValueError(
            f"eigenvalue {values[0]:.12g} has a residual of {residual:.1e}, too large to trust; use a smaller n."
        )
    return float(abs(values[0]))
