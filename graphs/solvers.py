"""The extreme eigenvalues of a large sparse symmetric W, by the method that its shape calls for, the residual checked.

No method covers all graphs. Long thin graphs (rings, paths, road maps) have gaps of 1/n², which a Krylov method on W
never resolves, but their matrices are narrow bands after reordering: I − W is factorised with one worker grounded, and
Lanczos runs on its pseudo-inverse. On everything wider plain Lanczos (three-term, no reorthogonalisation, the constant
projected out at every step) gives both ends at once. All starts are fixed, so that two runs give the same bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["constant_free_ends", "second_vector"]

STEPS = 30_000
BAND_WORK = 4e10  # n·bandwidth² up to which a banded Cholesky is a matter of seconds
BAND_MEMORY = 2e8  # n·bandwidth, numbers held


def constant_free_ends(W: Any, far: bool = True) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of I − W on vectors of mean zero, of a sparse symmetric connected W.

    Args:
        W: scipy `csr_array`, symmetric, rows summing to one.
        far: whether the largest is wanted (else it may come back as nan).

    Raises `ValueError` with what is known when the method does not converge.
    """
    n = W.shape[0]
    band = _band(W)
    try:
        pseudo = None if band is None else _inverse(band[0], band[1][1:])
    except np.linalg.LinAlgError:
        pseudo = None  # negative weights, and an eigenvalue beyond 1
    if band is None or pseudo is None:
        low, high = _lanczos(lambda x: W @ x, n, "W")
        return 1 - high, 1 - low
    order = band[1]
    smallest = 1 / _lanczos(pseudo, n, "the inverse of I − W", (1,), 1e-7)[1]
    if not far:
        return smallest, float("nan")
    # Ritz values lie inside; where W − σ is positive definite no eigenvalue lies outside: bisect between the two
    inside = _lanczos(lambda x: W @ x, n, "W", (0,), 1e-3)[0]
    bands, _ = _bands(W, order, -1.0, 0.0)
    outside, step = inside, 1e-9
    while not _definite(bands, outside := inside - step):
        inside, step = outside, 8 * step
    while inside - outside > 1e-9:
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if _definite(bands, middle) else (middle, outside)
    return smallest, 1 - (inside + outside) / 2


def _definite(bands: np.ndarray, sigma: float) -> bool:
    from scipy.linalg import cholesky_banded

    shifted = bands.copy()
    shifted[-1] -= sigma
    try:
        cholesky_banded(shifted, overwrite_ab=True, check_finite=False)
    except np.linalg.LinAlgError:
        return False
    return True


def second_vector(W: Any) -> np.ndarray:
    """The unit eigenvector of W of the second largest eigenvalue, mean zero, its first largest entry positive."""
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    n = W.shape[0]
    band = _band(W)
    apply = _inverse(band[0], band[1][1:]) if band is not None else (lambda x: W @ x - x.mean())
    try:
        _, vector = eigsh(operator(n, apply), k=1, which="LA", v0=_start(n), tol=1e-8, ncv=40)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"the Fiedler vector of this graph on {n} workers did not converge; use a smaller n."
        ) from error
    v = vector[:, 0] - vector[:, 0].mean()
    v /= np.linalg.norm(v)
    return v if v[np.abs(v).argmax()] > 0 else -v


def _start(n: int) -> np.ndarray:
    x = np.random.RandomState(0).standard_normal(n)
    return x - x.mean()


def _band(W: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """I − W without its first worker as upper bands for LAPACK and the order of workers, if Lanczos would cost more."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee, shortest_path

    n = W.shape[0]
    pattern = abs(W)
    reach = shortest_path(pattern, unweighted=True, indices=0)
    depth = float(reach[np.isfinite(reach)].max())
    if depth < 4 * np.log2(n):
        return None
    order = reverse_cuthill_mckee(W.tocsr(), symmetric_mode=True)
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    coo = W.tocoo()
    rows, columns = place[coo.coords[0]], place[coo.coords[1]]
    width = int(np.abs(rows - columns).max())
    work, memory = float(n) * width * width, float(n) * (width + 1)
    # Lanczos takes about ten steps per hop of the diameter
    if work > BAND_WORK or memory > BAND_MEMORY or 0.3 * work + 200 * memory > 10 * depth * 3 * (W.nnz + 8 * n):
        return None
    return _bands(W, order, 1.0, 1.0, grounded=True)[0], order


def _bands(
    W: Any, order: np.ndarray, sign: float, shift: float, grounded: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """sign·(shift − W) in this order of workers, without the first if grounded, as LAPACK's upper bands."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    coo = W.tocoo()
    rows, columns = place[coo.coords[0]], place[coo.coords[1]]
    keep = (columns >= rows) & (rows >= grounded)
    rows, columns, values = rows[keep] - grounded, columns[keep] - grounded, coo.data[keep]
    width = int((columns - rows).max())
    bands = np.zeros((width + 1, len(order) - grounded))
    bands[width + rows - columns, columns] = -sign * values
    bands[width] += sign * shift
    return bands, order[int(grounded) :]


def _inverse(bands: np.ndarray, order: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """x → the centred solution of bands · y = x, workers outside `order` held at zero.

    Of I − W with one worker held at zero that is the pseudo-inverse on vectors of mean zero, exactly.
    """
    from scipy.linalg import cho_solve_banded, cholesky_banded

    factor = cholesky_banded(bands, overwrite_ab=True, check_finite=False)

    def apply(x: np.ndarray) -> np.ndarray:
        y = np.zeros_like(x)
        y[order] = cho_solve_banded((factor, False), x[order], check_finite=False)
        return y - y.mean()

    return apply


def operator(n: int, apply: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A scipy `LinearOperator` of this function on (n,) vectors."""
    from scipy.sparse.linalg import LinearOperator

    make: Any = LinearOperator
    return make((n, n), matvec=apply, dtype=np.float64)


def _lanczos(
    apply: Callable[[np.ndarray], np.ndarray],
    n: int,
    what: str,
    ends: tuple[int, ...] = (0, 1),
    tolerance: float = 1e-5,
) -> tuple[float, float]:
    from scipy import linalg

    eigh: Any = linalg.eigh_tridiagonal
    q, before = _start(n), np.zeros(n)
    q /= np.linalg.norm(q)
    add: Any = linalg.get_blas_funcs("axpy", (q,))  # y += a·x in one pass over memory
    alpha: list[float] = []
    beta: list[float] = []
    look = 12
    low = high = scale = 0.0
    for step in range(1, STEPS + 1):
        r = apply(q)
        alpha.append(float(q @ r))
        r = add(q, r, a=-alpha[-1])
        if beta:
            r = add(before, r, a=-beta[-1])
        if step % 8 == 0:
            # the constant creeps back by rounding, slowly, along both terms of the recurrence
            r -= r.mean()
            q -= q.mean()
        norm = float(np.sqrt(r @ r))
        scale = max(scale, norm, abs(alpha[-1]))
        # nothing left but rounding: the start's Krylov space holds every eigenvalue
        done = norm < 1e-10 * scale
        if step >= look or done:
            look = int(1.15 * step) + 8
            d, e = np.array(alpha), np.array(beta)
            found, residuals = [], []
            for index in (0, step - 1):
                value, vector = eigh(d, e, select="i", select_range=(index, index))
                found.append(float(value[0]))
                residuals.append(norm * abs(float(vector[-1, 0])))
            low, high = found
            # the eigenvalue is off by at most the residual, as a rule by its square over the distance to the next
            near = (1 + low, 1 - high) if what == "W" else found
            sure = all(residuals[k] <= max(tolerance * abs(near[k]), 1e-13) for k in ends)
            if sure or done:
                return low, high
        beta.append(norm)
        r *= 1 / norm
        before, q = q, r
    raise ValueError(
        f"Lanczos on {what} ({n} workers) has not converged in {STEPS} steps: the eigenvalues crowd together. "
        f"All that is known is 1 − λ₂ ≤ {1 - high if what == 'W' else 1 / high:.3g}; use a closed form or a smaller n."
    )
