"""How fast a mixing matrix mixes: the second largest modulus (SLEM) and the gap 1 − SLEM, exact where a formula exists.

The method follows the structure, and every answer is either certain or checked:
1. one worker, a disconnected graph or a periodic walk (found on the graph, not by an eigensolver): exact;
2. a W that looks the same from every worker (ring, torus, exponential …): its characters, see `graphs.cayley`;
3. a symmetric tridiagonal W (a path): LAPACK's bisection;
4. up to `DENSE` workers: LAPACK on the dense matrix, the symmetric solver when |W − Wᵀ| ≤ 1e-7;
5. beyond: Lanczos with the constant deflated, or shift-and-invert for long thin graphs, residual checked; Arnoldi for
   directed ones. No convergence is a `ValueError` that says what is known.
All are deterministic.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from graphs import cayley
from graphs.properties import Incompatible, checked, csr, cycle_length, entries, offence

__all__ = ["gap", "slem"]

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
    negative = bool((entries(W)[2] < 0).any())
    matrix = csr(W)
    if not negative:
        moduli_one = recurrent(matrix if by_rows else matrix.T.tocsr())
        if moduli_one > 1:
            return 0.0
    shape = cayley.group(W)
    if shape is not None:
        return float(below(cayley.deficits(W, shape)[1:]).min())
    if offence(W, "symmetric") is None:
        return _symmetric_gap(W, matrix)
    return 1 - _directed_slem(W, matrix, by_rows)


def slem(W: Any) -> float:
    """The second largest modulus of the eigenvalues of W, one copy of 1 set aside: disagreement shrinks by it a round.

    |λ₂| or |λₙ|, whichever is larger, for a symmetric W; see `gap` for arguments, errors and special cases.

    >>> from graphs import metropolis, star, torus
    >>> round(slem(metropolis(star(16))), 6), round(slem(metropolis(torus(4, 8))), 6)
    (0.9375, 0.882843)
    """
    return 1 - gap(W)


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


def _symmetric_gap(W: Tensor, matrix: Any) -> float:
    n = W.shape[0]
    if n > 3 and _tridiagonal(W):
        from scipy.linalg import eigh_tridiagonal

        # of I − W, whose small eigenvalues bisection finds to an absolute 1e-16
        d, e = 1 - matrix.diagonal(), -matrix.diagonal(1)
        second = eigh_tridiagonal(d, e, eigvals_only=True, select="i", select_range=(1, 1))[0]
        last = eigh_tridiagonal(d, e, eigvals_only=True, select="i", select_range=(n - 1, n - 1))[0]
        return float(min(below(np.array([second, last]))))
    if n <= DENSE:
        values = np.linalg.eigvalsh(dense_symmetric(W))
        return float(below(1 - values[:-1]).min()) if n > 1 else 1.0
    second, last = extremes(W, matrix)
    return float(min(below(np.array([1 - second, 1 - last]))))


def _tridiagonal(W: Tensor) -> bool:
    rows, columns, _ = entries(W)
    return bool(((rows - columns).abs() <= 1).all())


def dense_symmetric(W: Tensor) -> np.ndarray:
    """W as a dense array, its rounding asymmetry averaged away."""
    A = W.to_dense().numpy()
    return (A + A.T) / 2


def extremes(W: Tensor, matrix: Any) -> tuple[float, float]:
    """λ₂ and a λₙ that is exact or known not to decide the SLEM, of a large sparse symmetric W."""
    n = W.shape[0]
    second = _second_thin(matrix) if _thin(matrix) else _lanczos(matrix, "LA")
    floor = float(2 * matrix.diagonal().min() - 1)  # Gershgorin: no eigenvalue lies below
    if bool((matrix.data >= 0).all()) and abs(floor) <= second:
        return second, floor
    return second, _lanczos(matrix, "SA", n)


def _thin(matrix: Any) -> bool:
    """Whether the graph is long and narrow (its depth beyond n^0.6), where factorising is cheap and Lanczos endless."""
    from scipy.sparse.csgraph import shortest_path

    n = matrix.shape[0]
    depth = shortest_path(abs(matrix), unweighted=True, indices=0)
    return float(depth[np.isfinite(depth)].max()) > n**0.6


def _second_thin(matrix: Any) -> float:
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import eigsh, splu

    n = matrix.shape[0]
    # a shift just above 1 keeps the factor regular; the constant is projected out before and after each solve
    shift = 1e-13
    lu = splu((eye_array(n) * (1 + shift) - matrix).tocsc())

    def solve(x: np.ndarray) -> np.ndarray:
        y = lu.solve(x - x.mean())
        return y - y.mean()

    start = np.random.RandomState(0).standard_normal(n)
    operator = _operator(n, solve)
    value, vector = eigsh(operator, k=1, which="LA", v0=start - start.mean(), tol=1e-6)
    return _audited(matrix, 1 + shift - 1 / float(value[0]), vector[:, 0])


def _lanczos(matrix: Any, which: str, rounds: int = 0) -> float:
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    n = matrix.shape[0]
    operator = _operator(n, lambda x: matrix @ x - x.mean())
    start = np.random.RandomState(0).standard_normal(n)
    try:
        value, vector = eigsh(operator, k=1, which=which, v0=start, tol=1e-9, maxiter=1000, ncv=40)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"the {'second' if which == 'LA' else 'last'} eigenvalue of this W on {n} workers did not converge in 1000 "
            "restarts of Lanczos; it is nearly degenerate. A closed form or a smaller n decides."
        ) from error
    return _audited(matrix, float(value[0]), vector[:, 0])


def _operator(n: int, matvec: Callable[[np.ndarray], np.ndarray]) -> Any:
    from scipy.sparse.linalg import LinearOperator

    make: Any = LinearOperator
    return make((n, n), matvec=matvec, dtype=np.float64)


def _audited(matrix: Any, value: float, vector: np.ndarray) -> float:
    residual = float(np.linalg.norm(matrix @ vector - value * vector) / np.linalg.norm(vector))
    # the eigenvalue is wrong by at most the residual; by its square over the distance to the next, as a rule
    if not residual <= max(RESIDUAL, 1e-3 * abs(1 - value)):
        raise ValueError(
            f"eigenvalue {value:.12g} has a residual of {residual:.1e}, too large to trust; use a smaller n."
        )
    return value


def _directed_slem(W: Tensor, matrix: Any, by_rows: bool) -> float:
    n = W.shape[0]
    if n <= DENSE:
        values = np.linalg.eigvals(W.to_dense().numpy())
        moduli = np.sort(np.abs(np.delete(values, np.abs(values - 1).argmin())))
        return float(moduli[-1])
    from scipy.sparse.linalg import ArpackNoConvergence, eigs

    walk = matrix if by_rows else matrix.T.tocsr()
    # W − 1(1/n)ᵀ has the eigenvalues of W, but 0 in place of the 1 (Wielandt)
    operator = _operator(n, lambda x: walk @ x - x.mean())
    start = np.random.RandomState(0).standard_normal(n)
    try:
        values, vectors = eigs(operator, k=1, which="LM", v0=start, tol=1e-9, maxiter=1000, ncv=40)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"the second modulus of this directed W on {n} workers did not converge in 1000 restarts of Arnoldi; "
            f"up to {DENSE} workers the dense solver decides."
        ) from error
    image = operator.matvec(vectors[:, 0].real) + 1j * operator.matvec(vectors[:, 0].imag)
    residual = float(np.linalg.norm(image - values[0] * vectors[:, 0]))
    if residual > RESIDUAL:
        raise ValueError(
            f"eigenvalue {values[0]:.12g} has a residual of {residual:.1e}, too large to trust; use a smaller n."
        )
    return float(abs(values[0]))
