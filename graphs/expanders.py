"""Explicit expanders: sparse graphs of constant degree whose gap does not shrink with n, built without chance."""

import itertools
import math

import torch

from graphs.topology import Topology, join, sized, whole

__all__ = ["chordal", "margulis", "ramanujan"]


def margulis(n: int) -> Topology:
    """Margulis–Gabber–Galil on n = m² workers (x, y) ∈ ℤ_m²: beside (x ± 2y, y), (x ± (2y+1), y), (x, y ± 2x), (x, y ± (2x+1)).

    Degree at most 8 (coinciding edges are one), adjacency λ₂ ≤ 5√2 < 8 for every m. `ValueError` unless n is a square.
    Source: Gabber, Galil 1981.

    >>> t = margulis(25)
    >>> t.connected, int(t.degree.max())
    (True, 8)
    """
    n = sized(n)
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
    n = sized(n)
    if n > 1 and any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        raise ValueError(f"n is {n}; the chords i → 1/i need a prime number of workers, such as {_prime(n)}.")
    i = torch.arange(n)
    inverse = torch.tensor([pow(k, -1, n) if k > 0 else 0 for k in range(n)], dtype=torch.int64)
    return join(n, torch.cat([i, i]), torch.cat([(i + 1) % n, inverse]))


def ramanujan(p: int = 5, q: int = 13) -> Topology:
    """Lubotzky–Phillips–Sarnak: a (p+1)-regular graph whose adjacency eigenvalues besides ±(p+1) are at most 2√p in modulus.

    No family of that degree does better (Alon–Boppana). The Cayley graph of PSL(2, q), with q(q²−1)/2 workers, if p is a
    square mod q, else of PGL(2, q), bipartite with q(q²−1): the generators are the p + 1 integer quaternions of norm p.

    Args:
        p, q: different primes, both 1 mod 4 (`ValueError` otherwise, or if q is so small that edges coincide): (5, 13) has
            2,184 workers, (13, 5) 120, (17, 13) 1,092.

    Source: Lubotzky, Phillips, Sarnak 1988.

    >>> t = ramanujan(17, 13)
    >>> t.n, t.regular, int(t.degree[0]), t.connected
    (1092, True, 18, True)
    """
    p, q = whole("p", p, 2), whole("q", q, 2)
    if p == q or p % 4 != 1 or q % 4 != 1 or _prime(p) != p or _prime(q) != q:
        raise ValueError(
            f"p is {p} and q is {q}; they must be different primes, both 1 mod 4. Try (5, 13) or (17, 13)."
        )
    root = next(x for x in range(2, q) if (x * x + 1) % q == 0)
    reach = range(-math.isqrt(p), math.isqrt(p) + 1)
    steps = [
        ((a + root * b) % q, (c + root * d) % q, (-c + root * d) % q, (a - root * b) % q)
        for a, b, c, d in itertools.product(reach, repeat=4)
        if a > 0 and a % 2 and a * a + b * b + c * c + d * d == p
    ]

    def normal(m: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        lead = pow(next(x for x in m if x), -1, q)
        return m[0] * lead % q, m[1] * lead % q, m[2] * lead % q, m[3] * lead % q

    # breadth first from the identity; matrices up to a scalar are the workers
    number = {(1, 0, 0, 1): 0}
    queue, source, target = [(1, 0, 0, 1)], [], []
    for x, y, z, w in queue:
        for a, b, c, d in steps:
            image = normal(((x * a + y * c) % q, (x * b + y * d) % q, (z * a + w * c) % q, (z * b + w * d) % q))
            if image not in number:
                number[image] = len(queue)
                queue.append(image)
            source.append(number[x, y, z, w])
            target.append(number[image])
    topology = join(len(queue), torch.tensor(source), torch.tensor(target))
    if not bool((topology.degree == p + 1).all()):
        raise ValueError(
            f"q is {q}, too small for p = {p}: edges of the graph coincide; take q > 2√p = {2 * p**0.5:.3g}."
        )
    return topology


def _prime(n: int) -> int:
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n
