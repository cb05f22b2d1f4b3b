"""The classical graphs, each made by one function: ring, path, star, complete, torus, hypercube, exponential."""

import logging
import math

import numpy as np
import torch

from graphs.topology import Topology, join, whole

__all__ = [
    "complete",
    "erdos_renyi",
    "exponential",
    "hypercube",
    "path",
    "random_regular",
    "ring",
    "star",
    "torus",
]

log = logging.getLogger(__name__)


def ring(n: int, directed: bool = False) -> Topology:
    """n workers in a circle, each beside the next; directed: each sends only to the next.

    Degree 2, diameter ⌊n/2⌋ (directed: 1 and n−1). With weights 1/3 the eigenvalues are (1 + 2cos(2πk/n))/3, the
    gap ≈ 4π²/(3n²); directed with weights 1/2 their moduli are |cos(πk/n)|. n = 2 is one edge, n = 1 none.

    >>> from graphs import gap, metropolis
    >>> round(gap(metropolis(ring(16))), 6)
    0.050747
    """
    n = whole("n", n, 1)
    i = torch.arange(n)
    return join(n, i, (i + 1) % n, directed)


def path(n: int) -> Topology:
    """n workers in a line. Degree at most 2, diameter n−1; Metropolis eigenvalues 1 − (2/3)(1 − cos(πk/n)).

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(path(8))), 6)
    0.949253
    """
    n = whole("n", n, 1)
    i = torch.arange(n - 1)
    return join(n, i, i + 1)


def star(n: int) -> Topology:
    """Worker 0 joined to all others, a parameter server.

    Degree n−1 and 1, diameter 2; Metropolis eigenvalues 1, 1 − 1/n (n−2 times) and 0.

    >>> from graphs import metropolis, slem
    >>> round(slem(metropolis(star(8))), 12)
    0.875
    """
    n = whole("n", n, 1)
    leaves = torch.arange(1, n)
    return join(n, torch.zeros_like(leaves), leaves)


def complete(n: int) -> Topology:
    """Everyone beside everyone. Degree n−1, diameter 1, W = 11ᵀ/n: one round averages exactly, n(n−1) messages.

    >>> from graphs import gap, metropolis
    >>> round(gap(metropolis(complete(5))), 12)
    1.0
    """
    n = whole("n", n, 1)
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
        n = whole("n", n, 1)
        a = next((a for a in range(math.isqrt(n), 1, -1) if n % a == 0), 1)
        if a == 1 and n > 1:
            raise ValueError(
                f"n is {n}, which is no product a×b of two sides of at least 2; choose another n "
                f"(such as {_composite(n)}), give the sides torus(1, {n}), or use ring({n})."
            )
        sides = (a, n // a)
    shape = tuple(whole("a side of the torus", side, 1) for side in sides)
    return _lattice(shape, wrap=True)


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
        n = whole("n", n, 1)
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
    n = whole("n", n, 1)
    i = torch.arange(n)
    offsets = [1 << k for k in range((n - 1).bit_length())]
    empty = torch.empty(0, dtype=torch.int64)
    return join(n, i.repeat(len(offsets)), torch.cat([empty, *((i + o) % n for o in offsets)]), directed)


def random_regular(
    n: int, degree: int, seed: int = 0, *, allow_disconnected: bool = False, tries: int = 100
) -> Topology:
    """A random graph in which every worker has `degree` neighbours: an expander with high probability from degree 3 on.

    λ₂ of the adjacency tends to 2√(d−1) (Friedman 2003), so uniform weights give a SLEM near (1 + 2√(d−1))/(d+1)
    for every n. Pairing model with random switches that remove loops and repeats; the stream is NumPy's frozen
    `RandomState`, so a seed gives the same graph everywhere. A disconnected draw is drawn again.

    Args:
        n: workers; n·degree must be even and degree < n.
        degree: neighbours of each.
        seed: of the draw.
        allow_disconnected: accept the first draw, connected or not.
        tries: draws before giving up with a `ValueError`.

    >>> g = random_regular(32, 3, seed=1)
    >>> g.regular, g.connected, g == random_regular(32, 3, seed=1)
    (True, True, True)
    """
    n, degree = whole("n", n, 1), whole("degree", degree, 0)
    if degree >= n or n * degree % 2:
        rule = "smaller than n" if degree >= n else "such that n·degree is even"
        raise ValueError(
            f"degree is {degree} and n is {n}; the degree must be {rule}. Try degree={max(0, min(degree, n) - 1)}."
        )
    random = np.random.RandomState(seed)
    complement = degree > (n - 1) // 2

    def draw() -> Topology:
        pairs = _pairing(n, n - 1 - degree if complement else degree, random)
        if complement:
            absent = np.ones((n, n), dtype=bool)
            absent[pairs[:, 0], pairs[:, 1]] = absent[pairs[:, 1], pairs[:, 0]] = False
            pairs = np.argwhere(np.triu(absent, 1))
        return join(n, pairs[:, 0], pairs[:, 1])

    remedy = f"with degree {degree} it hardly ever is; raise the degree to 3, or use ring({n})"
    return _until_connected(
        draw, f"random_regular(n={n}, degree={degree}, seed={seed})", allow_disconnected, tries, remedy
    )


def _pairing(n: int, degree: int, random: np.random.RandomState) -> np.ndarray:
    pairs = random.permutation(np.repeat(np.arange(n), degree)).reshape(-1, 2)
    for _ in range(10_000):
        key = pairs.min(1) * n + pairs.max(1)
        order = np.argsort(key, kind="stable")
        bad = pairs[:, 0] == pairs[:, 1]
        bad[order[1:][key[order[1:]] == key[order[:-1]]]] = True
        if not bad.any():
            return pairs
        # a bad pair can only be mended together with good ones: their ends are dealt anew
        worst = np.flatnonzero(bad)
        mixed = np.union1d(worst, random.randint(0, len(pairs), size=len(worst) + 1))
        pairs[mixed] = random.permutation(pairs[mixed].ravel()).reshape(-1, 2)
    raise ValueError(f"no simple {degree}-regular graph on {n} workers in 10000 rounds of switching; try another seed.")


def erdos_renyi(n: int, p: float, seed: int = 0, *, allow_disconnected: bool = False, tries: int = 1000) -> Topology:
    """Each of the n(n−1)/2 edges is present with probability p, independently; drawn again until connected.

    Mean degree p(n−1). Connected with high probability only above p = ln n / n: n = 8, p = 0.2 fails in two draws
    of three. Redraws are logged with their count; conditioning on connectedness is what they do to the distribution.

    Args:
        n: workers.
        p: probability of an edge, 0 … 1.
        seed: of the draw (NumPy's frozen `RandomState`).
        allow_disconnected: accept the first draw, connected or not.
        tries: draws before giving up with a `ValueError`.

    >>> g = erdos_renyi(8, 0.2, seed=3)
    >>> g.connected, g.n
    (True, 8)
    """
    n = whole("n", n, 1)
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}; a probability lies between 0 and 1. Mean degree k is p = k/(n−1).")
    random, total = np.random.RandomState(seed), n * (n - 1) // 2

    def draw() -> Topology:
        # geometric gaps between present edges: O(edges) time and exactly independent trials
        found, last = [np.empty(0, dtype=np.int64)], -1
        while p > 0 and last < total:
            steps = random.geometric(p, size=max(16, int(1.1 * p * (total - last))))
            # a gap past the end is all the same (NumPy's overflow, for a tiny p, comes out negative): cut it
            spots = last + np.cumsum(np.where((steps < 1) | (steps > total), total + 1, steps))
            found.append(spots[spots < total])
            last = int(spots[-1])
        key = np.concatenate(found)
        # key = i(i−1)/2 + j with j < i
        i = ((1 + np.sqrt(1 + 8 * key.astype(np.float64))) / 2).astype(np.int64)
        i -= i * (i - 1) // 2 > key
        i += (i + 1) * i // 2 <= key
        return join(n, key - i * (i - 1) // 2, i)

    remedy = f"raise p above ln n / n = {math.log(max(n, 2)) / max(n, 2):.3g}"
    return _until_connected(draw, f"erdos_renyi(n={n}, p={p}, seed={seed})", allow_disconnected, tries, remedy)


def _until_connected(draw, what: str, allow_disconnected: bool, tries: int, remedy: str) -> Topology:
    fewest = math.inf
    for attempt in range(1, whole("tries", tries, 1) + 1):
        topology = draw()
        if allow_disconnected or topology.connected:
            if attempt > 1:
                log.info("%s: draw %d is the first connected one", what, attempt)
            return topology
        fewest = min(fewest, int(topology.component_of.max()) + 1)
    raise ValueError(
        f"{what} was disconnected in all {tries} draws (at best {fewest} components); {remedy}, "
        "or pass allow_disconnected=True and train on a split graph knowingly."
    )
