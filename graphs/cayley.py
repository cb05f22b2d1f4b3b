"""Exact eigenvalues of a W that looks the same from every worker: ring, torus, hypercube, any circulant.

If W commutes with the translations of Z_{m1} × … × Z_{mr} (worker numbers written in mixed radix), row 0 decides all:
λ_k = Σ_s W[0, s] ω^{k·s}. The differences 1 − λ_k are summed from 2 sin², so that a gap of 1e-12 keeps its digits.
"""

import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from graphs.properties import entries

MOST = 64  # entries of row 0 up to which the sum is direct; beyond, an FFT


def group(W: Tensor) -> tuple[int, ...] | None:
    """The shape (m1, …, mr) whose translations leave W unchanged, (n,) for a circulant, or None.

    >>> from graphs import metropolis, ring, torus, star
    >>> [group(metropolis(t)) for t in (ring(6), torus(3, 5), star(4))]
    [(6,), (3, 5), None]
    """
    n = W.shape[0]
    rows, columns, values = (part.numpy() for part in entries(W))
    counts = np.bincount(rows, minlength=n)
    if not len(rows) or counts.min() != counts.max():
        return None
    degree = int(counts[0])
    offsets = [int(s) for s in columns[:degree]]
    for shape in _candidates(n, offsets):
        if _invariant(shape, rows, columns, values, degree):
            return shape
    return None


def _candidates(n: int, offsets: list[int]) -> Iterator[tuple[int, ...]]:
    yield (n,)
    if len(offsets) > MOST:
        return
    strides = sorted({s for s in offsets if 1 < s < n and n % s == 0})
    tried = 0
    # longest chains 1 | s1 | s2 … | n of strides first: a hypercube's is the full one, a torus's has one step
    stack: list[list[int]] = [[1]]
    chains: list[list[int]] = []
    while stack and len(chains) < 256:
        chain: list[int] = stack.pop()
        chains.append(chain)
        stack += [[*chain, s] for s in strides if s > chain[-1] and s % chain[-1] == 0]
    for chain in sorted(chains, key=lambda chain: -len(chain)):
        if len(chain) > 1 and tried < 32:
            tried += 1
            ends = [*chain, n]
            yield tuple(ends[k + 1] // ends[k] for k in reversed(range(len(chain))))


def _invariant(shape: tuple[int, ...], rows: np.ndarray, columns: np.ndarray, values: np.ndarray, degree: int) -> bool:
    n = math.prod(shape)
    offsets = np.zeros_like(rows)
    stride = n
    for side in shape:
        stride //= side
        digit = (columns // stride - rows // stride) % side
        offsets += digit * stride
    # a cheap look at the second row spares most wrong candidates the full check
    for stop in (2 * degree, len(rows)):
        table = offsets[:stop].reshape(-1, degree)
        order = np.argsort(table, axis=1, kind="stable")
        weights = np.take_along_axis(values[:stop].reshape(-1, degree), order, 1)
        table = np.take_along_axis(table, order, 1)
        if (table != table[0]).any() or np.abs(weights - weights[0]).max() > 1e-13:
            return False
    return True


def deficits(W: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """1 − λ for every character of the group, (n,) complex128 (float64 when all are real); entry 0 is the constant's.

    Exact up to rounding in 1 − λ itself, not in λ. Assumes rows that sum to one.

    >>> from graphs import metropolis, ring
    >>> [round(float(x), 6) for x in deficits(metropolis(ring(4)), (4,))]
    [0.0, 0.666667, 1.333333, 0.666667]
    """
    n = W.shape[0]
    rows, columns, values = (part.numpy() for part in entries(W))
    first = rows == 0
    offsets, weights = columns[first], values[first]
    if len(offsets) > MOST:
        row = np.zeros(n)
        row[offsets] = weights
        mu = 1 - np.conj(np.fft.fftn(row.reshape(shape))).ravel()
        return mu.real if np.abs(mu.imag).max() < 1e-13 else mu
    k = np.arange(n)
    real, imaginary = np.zeros(n), np.zeros(n)
    for s, w in zip(offsets.tolist(), weights.tolist()):
        if s == 0:
            continue
        turn = np.zeros(n)
        stride = n
        for side in shape:
            stride //= side
            digit = s // stride % side
            if digit:
                turn += (k // stride % side * digit % side) / side
        real += 2 * w * np.sin(np.pi * turn) ** 2
        imaginary -= w * np.sin(2 * np.pi * turn)
    return real if np.abs(imaginary).max() < 1e-13 else real + 1j * imaginary
