"""Explicit expanders: sparse graphs of constant degree whose gap does not shrink with n, built without chance."""

import math

import torch

from graphs.topology import Topology, join, whole

__all__ = ["chordal", "margulis"]


def margulis(n: int) -> Topology:
    """Margulis–Gabber–Galil on n = m² workers (x, y) ∈ ℤ_m²: beside (x ± 2y, y), (x ± (2y+1), y), (x, y ± 2x), (x, y ± (2x+1)).

    Degree at most 8 (coinciding edges are one), adjacency λ₂ ≤ 5√2 < 8 for every m. `ValueError` unless n is a square.
    Source: Gabber, Galil 1981.

    >>> t = margulis(25)
    >>> t.connected, int(t.degree.max())
    (True, 8)
    """
    n = whole("n", n, 1)
    m = math.isqrt(n)
    if m * m != n:
        raise ValueError(f"n is {n}; Margulis's graph needs a square, such as {m * m} or {(m + 1) ** 2}.")
    i = torch.arange(n)
    x, y = i // m, i % m
    shifts = [((x + 2 * y) % m, y), ((x + 2 * y + 1) % m, y), (x, (y + 2 * x) % m), (x, (y + 2 * x + 1) % m)]
    return join(n, i.repeat(4), torch.cat([a * m + b for a, b in shifts]))


def chordal(n: int) -> Topology:
    """A ring of a prime number of workers with chords from i to its inverse i⁻¹ mod n (0 to none): degree at most 3.

    A known expander family; fixed points of the inverse (0, 1, n−1) and chords along the ring leave lower degrees, and
    Metropolis weights stay stochastic there. Source: Lubotzky 1994, as in ChocoSGD's expander.

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(chordal(101))), 3) < 0.97
    True
    """
    n = whole("n", n, 1)
    if n > 1 and any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        raise ValueError(f"n is {n}; the chords i → 1/i need a prime number of workers, such as {_prime(n)}.")
    i = torch.arange(n)
    inverse = torch.tensor([pow(k, -1, n) if k > 0 else 0 for k in range(n)], dtype=torch.int64)
    return join(n, torch.cat([i, i]), torch.cat([(i + 1) % n, inverse]))


def _prime(n: int) -> int:
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n
