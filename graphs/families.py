"""The classical graphs, each made by one function: ring, star, torus, hypercube, exponential, trees, cliques, circulants."""

import math
from collections.abc import Sequence

import torch

from graphs.topology import Topology, join, sized, whole

__all__ = [
    "barbell",
    "circulant",
    "cliques",
    "complete",
    "double_tree",
    "exponential",
    "grid",
    "hypercube",
    "path",
    "ring",
    "star",
    "torus",
    "relay_tree",
    "tree",
]


def ring(n: int, directed: bool = False) -> Topology:
    """n workers in a circle, each beside the next; directed: each sends only to the next.

    Degree 2, diameter ⌊n/2⌋ (directed: 1 and n−1). With weights 1/3 the eigenvalues are (1 + 2cos(2πk/n))/3, the
    gap ≈ 4π²/(3n²); directed with weights 1/2 their moduli are |cos(πk/n)|. n = 2 is one edge, n = 1 none.

    >>> from graphs import gap, metropolis
    >>> round(gap(metropolis(ring(16))), 6)
    0.050747
    """
    n = sized(n)
    i = torch.arange(n)
    return join(n, i, (i + 1) % n, directed)


def path(n: int) -> Topology:
    """n workers in a line. Degree at most 2, diameter n−1; Metropolis eigenvalues 1 − (2/3)(1 − cos(πk/n)).

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(path(8))), 6)
    0.949253
    """
    n = sized(n)
    i = torch.arange(n - 1)
    return join(n, i, i + 1)


def star(n: int) -> Topology:
    """Worker 0 joined to all others, a parameter server.

    Degree n−1 and 1, diameter 2; Metropolis eigenvalues 1, 1 − 1/n (n−2 times) and 0.

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(star(8))), 12)
    0.875
    """
    n = sized(n)
    leaves = torch.arange(1, n)
    return join(n, torch.zeros_like(leaves), leaves)


def complete(n: int) -> Topology:
    """Everyone beside everyone. Degree n−1, diameter 1, W = 11ᵀ/n: one round averages exactly, n(n−1) messages.

    >>> from graphs import gap, metropolis
    >>> round(gap(metropolis(complete(5))), 12)
    1.0
    """
    n = sized(n)
    i = torch.arange(n)
    source, target = torch.meshgrid(i, i, indexing="ij")
    return join(n, source.flatten(), target.flatten(), directed=True)


def torus(*sides: int, n: int | None = None) -> Topology:
    """A grid whose rows and columns close into rings, in any number of dimensions, numbered along the last side.

    Args:
        sides: the side lengths, torus(4, 4). A side of 2 is one edge (not a doubled one), a side of 1 none: a 2×2
            torus is a ring of four.
        n: instead of sides, the most nearly square a×b = n with both sides at least 2; `ValueError` for a prime n.

    Degree 4 (two sides of at least 3), diameter ⌊a/2⌋ + ⌊b/2⌋; with weights 1/5 the eigenvalues are
    (1 + 2cos(2πi/a) + 2cos(2πj/b))/5.

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(torus(5, 5))), 6), torus(2, 2).degree.tolist(), torus(n=24) == torus(4, 6)
    (0.723607, [2, 2, 2, 2], True)
    """
    if (n is None) == (not sides):
        raise ValueError(f"torus{sides} with n={n}: give either the sides, torus(4, 4), or their product, torus(n=16).")
    if n is not None:
        sides = _squarish(n, "ring")
    shape = tuple(whole("a side of the torus", side, 1) for side in sides)
    return _lattice(shape, wrap=True)


def grid(*sides: int, n: int | None = None) -> Topology:
    """A grid without wrap-around, in any number of dimensions, numbered along the last side.

    Args: as for `torus`. Degree 2 to 4 in two dimensions, diameter Σ(side − 1). With max-degree weights the eigenvalues
    are 1 − (4 − 2cos(πi/a) − 2cos(πj/b))/5; Metropolis weights mix a little faster.

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(grid(4, 4))), 6), grid(2, 3).degree.tolist()
    (0.868641, [2, 3, 2, 2, 3, 2])
    """
    if (n is None) == (not sides):
        raise ValueError(f"grid{sides} with n={n}: give either the sides, grid(4, 4), or their product, grid(n=16).")
    if n is not None:
        sides = _squarish(n, "path")
    return _lattice(tuple(whole("a side of the grid", side, 1) for side in sides), wrap=False)


def _squarish(n: int, other: str) -> tuple[int, int]:
    n = sized(n)
    a = next((a for a in range(math.isqrt(n), 1, -1) if n % a == 0), 1)
    if a == 1 and n > 1:
        raise ValueError(
            f"n is {n}, which is no product a×b of two sides of at least 2; choose another n "
            f"(such as {_composite(n)}), give the sides (1, {n}), or use {other}({n})."
        )
    return a, n // a


def _composite(n: int) -> int:
    return max(4, n + 1 if n > 2 else 4)


def _lattice(shape: tuple[int, ...], wrap: bool) -> Topology:
    n = math.prod(shape)
    index = torch.arange(n).reshape(shape)
    source, target = [], []
    for axis, side in enumerate(shape):
        if wrap:
            source.append(index.flatten())
            target.append(index.roll(-1, axis).flatten())
        elif side > 1:
            source.append(index.narrow(axis, 0, side - 1).flatten())
            target.append(index.narrow(axis, 1, side - 1).flatten())
    empty = torch.empty(0, dtype=torch.int64)
    return join(n, torch.cat([empty, *source]), torch.cat([empty, *target]))


def hypercube(dimension: int | None = None, *, n: int | None = None) -> Topology:
    """2^m workers, i beside i xor 2^k.

    Degree and diameter m = log₂ n; with weights 1/(m+1) the eigenvalues are 1 − 2k/(m+1), C(m, k) times each.

    Args:
        dimension: m; or
        n: the number of workers, a power of two (`ValueError` otherwise).

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(hypercube(4))), 12), hypercube(n=16) == hypercube(4)
    (0.6, True)
    """
    if (dimension is None) == (n is None):
        raise ValueError(f"hypercube(dimension={dimension}, n={n}): give one of them, hypercube(4) or hypercube(n=16).")
    if n is not None:
        n = sized(n)
        if n & (n - 1):
            near = 1 << (n.bit_length() - 1)
            raise ValueError(
                f"n is {n}; a hypercube needs a power of two, such as {near} or {2 * near}. "
                f"exponential({n}) takes any n."
            )
        dimension = n.bit_length() - 1
    m = whole("dimension", dimension, 0)
    i = torch.arange(1 << m)
    bits = [torch.empty(0, dtype=torch.int64)] + [i ^ (1 << k) for k in range(m)]
    return join(1 << m, i.repeat(m), torch.cat(bits), directed=True)


def exponential(n: int, directed: bool = True) -> Topology:
    """i sends to i + 2^k (mod n) for every 2^k < n; undirected: to i ± 2^k.

    Degree τ = ⌈log₂ n⌉ (directed), diameter at most τ. Uniform weights 1/(τ+1) make a normal circulant with
    SLEM (τ−1)/(τ+1) for even n, less for odd n: a gap of 2/(τ+1) for τ messages, which no sparse undirected graph
    of that degree is known to beat (Ying et al. 2021, arXiv 2110.13363).

    >>> from graphs import slem, uniform
    >>> round(slem(uniform(exponential(16))), 6), round(slem(uniform(exponential(9))), 6)
    (0.6, 0.441787)
    """
    n = sized(n)
    i = torch.arange(n)
    offsets = [1 << k for k in range((n - 1).bit_length())]
    empty = torch.empty(0, dtype=torch.int64)
    return join(n, i.repeat(len(offsets)), torch.cat([empty, *((i + o) % n for o in offsets)]), directed)


def circulant(n: int, offsets: Sequence[int], directed: bool = False) -> Topology:
    """i sends to i + s (mod n) for every offset s; undirected: to i ± s. Uniform weights: λ_k = (1 + Σ_s ω^{ks})/(d + 1).

    >>> circulant(8, [1]) == ring(8), circulant(8, [1, 2, 4], directed=True) == exponential(8)
    (True, True)
    """
    n = sized(n)
    shifts = [whole("an offset", s) % n for s in offsets]
    if 0 in shifts:
        raise ValueError(f"offsets {list(offsets)} hold a multiple of n = {n}, a message to oneself; leave it out.")
    i = torch.arange(n)
    empty = torch.empty(0, dtype=torch.int64)
    return join(n, i.repeat(len(shifts)), torch.cat([empty, *((i + s) % n for s in shifts)]), directed)


def tree(n: int, branching: int = 2) -> Topology:
    """A complete k-ary tree in heap order: worker i > 0 under worker ⌊(i − 1)/k⌋. Degree at most k + 1.

    Diameter about 2 log_k n, but the root is a bottleneck: the gap is only of order 1/n.

    >>> from graphs import metropolis, slem
    >>> [round(slem(metropolis(tree(n))), 6) for n in (7, 15, 31)]
    [0.933013, 0.975803, 0.989922]
    """
    n, k = sized(n), whole("branching", branching, 1)
    i = torch.arange(1, n)
    return join(n, (i - 1) // k, i)


def relay_tree(n: int) -> Topology:
    """RelaySGD's binary tree: worker 0 beside 1, and each w ≥ 1 beside 2w and 2w + 1, so that no degree exceeds 3.

    Relayed sums (RelaySum) are exact on any tree after diameter rounds, about 2 log₂ n here, n − 1 on `path`.
    Source: Vogels et al. 2021, arXiv 2110.04175.

    >>> from graphs import metropolis, slem
    >>> [round(slem(metropolis(relay_tree(n))), 6) for n in (16, 32)], int(relay_tree(32).degree.max())
    ([0.975803, 0.989922], 3)
    """
    n = sized(n)
    i = torch.arange(1, n)
    return join(n, i // 2, i)


def double_tree(n: int) -> Topology:
    """Two binary trees over the same workers, the second numbered backwards, so that leaves of one are inner in the other.

    Each tree can carry half of a message (Sanders et al. 2009; NCCL; RelaySGD's double binary trees). Degree at most 6.

    >>> double_tree(15).connected, int(double_tree(15).degree.max()) <= 6
    (True, True)
    """
    one = tree(n)
    both = torch.cat([one.edge_index, n - 1 - one.edge_index], 1)
    return join(one.n, both[0], both[1], directed=True)


def cliques(n: int, count: int) -> Topology:
    """n workers in `count` complete groups of (nearly) equal size, in a chain joined by single edges.

    Fast inside, slow across: the gap is tiny though an average worker hears n/count − 1 others.

    >>> cliques(6, 3).degree.tolist()
    [1, 2, 2, 2, 2, 1]
    """
    n, count = sized(n), whole("count", count, 1)
    if count > n:
        raise ValueError(f"count is {count} and n is {n}; every clique needs a worker. Try count={n}.")
    group = torch.arange(n) * count // n
    source, target = (group[:, None] == group[None, :]).nonzero(as_tuple=True)
    last = (group[1:] != group[:-1]).nonzero().flatten()
    return join(n, torch.cat([source, last]), torch.cat([target, last + 1]))


def barbell(n: int) -> Topology:
    """Two cliques of n/2 workers joined by one edge: cliques(n, 2).

    With m = n/2 and Metropolis weights λ₂ = (m + √(m² + 4(m − 1))) / (2(m + 1)).

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(barbell(20))), 6), round((10 + (100 + 36) ** 0.5) / 22, 6)
    (0.984632, 0.984632)
    """
    return cliques(n, min(2, sized(n)))
