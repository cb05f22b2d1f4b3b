"""What a mixing matrix guarantees, computed: every property has an `offence`, the sentence that names who breaks it.

W[i, j] is the weight of j's message at i (receiver row). Sums and symmetry hold within `TOLERANCE` = 1e-7, so that
weights rounded to float32 pass. Doubly stochastic means that rows and columns sum to one; negative entries are allowed,
because the fastest mixing matrices have them (`nonnegative` is a property of its own).
"""

import reprlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Incompatible", "aperiodic", "offence", "strongly_connected"]

TOLERANCE = 1e-7
DUST = 1e-12  # weights up to here are the rounding of a solver: they connect nobody, and are not negative


class Incompatible(ValueError):
    """A graph, matrix or schedule lacks a property that its user needs; the message names all three and a remedy."""


def checked(W: Any) -> Tensor:
    """W as a float64 tensor, dense or sparse COO; `ValueError` unless it is square, floating and finite.

    Takes tensors (any layout), numpy arrays, nested lists of floats, and scipy sparse matrices.
    """
    if hasattr(W, "edge_index") or hasattr(W, "period"):
        remedy = (
            "graphs.metropolis(topology)"
            if hasattr(W, "edge_index")
            else "schedule(k), or graphs.contraction(schedule)"
        )
        raise ValueError(f"{W!r} is no mixing matrix; use {remedy}.")
    W = tensor(W, "a mixing matrix")
    if W.ndim != 2 or W.shape[0] != W.shape[1] or W.shape[0] < 1:
        raise ValueError(f"a mixing matrix of shape {tuple(W.shape)}; it must be square, one row per receiving worker.")
    if not W.dtype.is_floating_point:
        raise ValueError(
            f"a mixing matrix of dtype {W.dtype}; it must be floating. For an adjacency matrix: "
            "graphs.metropolis(graphs.from_adjacency(A)); for an integer W: W.double()."
        )
    if W.is_sparse:
        W = W.to(torch.float64).coalesce()
        finite = torch.isfinite(W.values())
        spots = W.indices()[:, ~finite]
    else:
        W = W.to(torch.float64)
        spots = (~torch.isfinite(W)).nonzero().T
    if spots.numel():
        i, j = spots[:, 0].tolist()
        raise ValueError(f"W[{i}, {j}] is {W[i, j].item()}; every weight must be finite.")
    return W


def tensor(A: Any, what: str) -> Tensor:
    """A tensor (any layout), array, nested list or scipy sparse matrix as a dense or sparse COO tensor on the CPU."""
    if isinstance(A, Tensor):
        A = A.detach().cpu()
        return A if A.layout in (torch.strided, torch.sparse_coo) else A.to_sparse_coo()
    from scipy.sparse import coo_array, issparse

    if issparse(A):
        A = coo_array(A)
        values = torch.as_tensor(A.data)
        places = torch.as_tensor(np.stack(A.coords), dtype=torch.int64)
        return torch.sparse_coo_tensor(places, values, A.shape, check_invariants=True)
    try:
        array = np.asarray(A)
        return torch.as_tensor(array if array.dtype != object else array.astype(np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{reprlib.repr(A)} is not {what}: give rows of equally many numbers, as a tensor, an array, a list or a scipy "
            "sparse matrix."
        ) from error


def matrix(rows: Tensor, columns: Tensor, values: Tensor, n: int) -> Tensor:
    """The sparse COO matrix with these entries, coalesced (equal places add up)."""
    # torch's coalesce costs three times this sort, and most rules name no place twice
    key = rows * n + columns
    if int((key[1:] < key[:-1]).sum()) < 8:
        # a few sorted runs, which NumPy's stable sort merges in one pass
        order = torch.from_numpy(np.argsort(key.numpy(), kind="stable"))
        key = key[order]
    else:
        key, order = torch.sort(key)
    row = key // n
    places, values = torch.stack([row, key - row * n]), values.double()[order]
    W = torch.sparse_coo_tensor(places, values, (n, n), check_invariants=False)
    return W.coalesce() if bool((key[1:] == key[:-1]).any()) else W._coalesced_(True)


def entries(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of the non-zero entries of W, sorted by (row, column)."""
    if W.is_sparse:
        W = W.coalesce()
        (rows, columns), values = W.indices(), W.values()
        if not bool((values == 0).any()):
            return rows, columns, values
        keep = values != 0
        return rows[keep], columns[keep], values[keep]
    rows, columns = W.nonzero(as_tuple=True)
    return rows, columns, W[rows, columns]


def csr(W: Tensor) -> Any:
    """W as a scipy `csr_array` of its non-zero entries."""
    from scipy.sparse import csr_array

    rows, columns, values = entries(W)
    n = W.shape[0]
    start = np.zeros(n + 1, dtype=np.int64)
    start[1:] = np.cumsum(np.bincount(rows.numpy(), minlength=n))
    small = np.int32 if len(values) < 2**31 else np.int64
    return csr_array((values.numpy(), columns.numpy().astype(small), start.astype(small)), shape=(n, n))


def solid(pattern: Any) -> Any:
    """A scipy sparse matrix without its rounding dust."""
    kept = pattern.copy()
    kept.data[np.abs(kept.data) <= DUST] = 0
    kept.eliminate_zeros()
    return kept


def offence(W: Tensor, name: str, label: str = "W") -> str | None:
    """None if W has the property, else a sentence that names the worst offender and its value.

    Properties: "row_stochastic", "column_stochastic", "doubly_stochastic", "symmetric", "nonnegative".

    >>> offence(torch.tensor([[0.7, 0.5], [0.5, 0.5]]), "row_stochastic")
    'row 0 of W sums to 1.2, not 1'
    """
    if name == "doubly_stochastic":
        return offence(W, "row_stochastic", label) or offence(W, "column_stochastic", label)
    if name in ("row_stochastic", "column_stochastic"):
        axis = 1 if name == "row_stochastic" else 0
        total = W.sum(axis)
        error = ((total.to_dense() if total.is_sparse else total) - 1).abs()
        # the first of the worst, so that rounding does not choose the name
        i = int((error >= 0.999 * error.max()).nonzero()[0])
        if float(error[i]) <= TOLERANCE:
            return None
        rounding = " (rounding: normalise the weights in float64)" if float(error[i]) < 1e-5 else ""
        return f"{'row' if axis else 'column'} {i} of {label} sums to {_short(float(total[i]))}, not 1{rounding}"
    if name == "symmetric":
        rows, columns, values = entries((W - W.T) if not W.is_sparse else (W - W.t()).coalesce())
        if not len(values) or float(values.abs().max()) <= TOLERANCE:
            return None
        worst = int(values.abs().argmax())
        i, j = sorted((int(rows[worst]), int(columns[worst])))
        return f"{label}[{i}, {j}] is {_short(float(W[i, j]))} and {label}[{j}, {i}] is {_short(float(W[j, i]))}"
    if name == "nonnegative":
        rows, columns, values = entries(W)
        if not len(values) or float(values.min()) >= -DUST:
            return None
        worst = int(values.argmin())
        i, j = int(rows[worst]), int(columns[worst])
        return f"{label}[{i}, {j}] is {_short(float(values[worst]))}, a negative weight on the message {j} → {i}"
    raise ValueError(
        f"{name!r} is no property of a matrix; there are row_stochastic, column_stochastic, doubly_stochastic, "
        "symmetric and nonnegative."
    )


def _short(value: float) -> str:
    # six digits, unless they would say "1, not 1"
    return f"{value:.12g}" if f"{value:.6g}" == "1" else f"{value:.6g}"


def strongly_connected(pattern: Any) -> bool:
    """Whether a scipy sparse matrix's non-zero pattern links every worker to every other."""
    from scipy.sparse.csgraph import connected_components

    return connected_components(pattern, directed=True, connection="strong", return_labels=False) == 1


def cycle_length(pattern: Any) -> int:
    """The greatest common divisor of the cycle lengths of a strongly connected pattern (0: it has no cycle)."""
    from scipy.sparse.csgraph import shortest_path

    if pattern.nnz == 0:
        return 0
    depth = shortest_path(pattern, unweighted=True, indices=0).astype(np.int64)
    rows, columns = pattern.tocoo().coords
    return int(np.gcd.reduce(np.abs(depth[rows] + 1 - depth[columns])))


def aperiodic(pattern: Any) -> bool:
    """Whether a strongly connected pattern has cycles of coprime lengths (a self weight is enough)."""
    return bool((pattern.diagonal() != 0).any()) or cycle_length(pattern) == 1
