"""Random graphs from a seed: regular, Erdős–Rényi, small-world, scale-free, geometric, block, EquiTopo; the same everywhere.

Draws come from NumPy's `RandomState`, whose stream is frozen, so a seed gives the same graph on every machine.
"""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from graphs.properties import matrix
from graphs.topology import Topology, join, sized, whole

__all__ = [
    "barabasi_albert",
    "equistatic",
    "equistatic_weights",
    "erdos_renyi",
    "geometric",
    "random_regular",
    "stochastic_block",
    "watts_strogatz",
]

log = logging.getLogger(__name__)


def stream(seed: int, *more: int) -> np.random.RandomState:
    """The draws of a seed (and of `more`, each below 2³²), the same on every worker; so None is refused."""
    seed = whole("seed", seed, 0)
    if seed >= 2**32:
        raise ValueError(f"seed is {seed}; NumPy's RandomState takes seeds below 2³².")
    return np.random.RandomState([seed, *more] if more else seed)


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
    n, degree = sized(n), whole("degree", degree, 0)
    if degree >= n or n * degree % 2:
        rule = "smaller than n" if degree >= n else "such that n·degree is even"
        raise ValueError(
            f"degree is {degree} and n is {n}; the degree must be {rule}. Try degree={max(0, min(degree, n) - 1)}."
        )
    random = stream(seed)
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
    n = sized(n)
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}; a probability lies between 0 and 1. Mean degree k is p = k/(n−1).")
    random, total = stream(seed), n * (n - 1) // 2

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


def _until_connected(
    draw: Callable[[], Topology], what: str, allow_disconnected: bool, tries: int, remedy: str
) -> Topology:
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


def watts_strogatz(
    n: int, degree: int = 4, p: float = 0.1, seed: int = 0, *, allow_disconnected: bool = False, tries: int = 100
) -> Topology:
    """A small world: a ring in which each worker knows its `degree` nearest, every edge's far end rewired with probability p.

    p = 0 is a circulant, p = 1 nearly random; a few rewired edges already shorten paths to log n. Source: Watts,
    Strogatz 1998. Redrawn until connected.

    >>> watts_strogatz(64, 4, 0.1, seed=1).messages
    256
    """
    n, degree = sized(n), whole("degree", degree, 0)
    if degree % 2 or degree >= max(n, 1):
        raise ValueError(
            f"degree is {degree} and n is {n}; it must be even and below n. Try degree={min(n - 1, degree) // 2 * 2}."
        )
    _probability(p)
    random = stream(seed)

    def draw() -> Topology:
        near = {(i, (i + s) % n) for s in range(1, degree // 2 + 1) for i in range(n)}
        edges = {(min(e), max(e)) for e in near}
        for s in range(1, degree // 2 + 1):
            for i in range(n):
                old = (min(i, (i + s) % n), max(i, (i + s) % n))
                if random.random_sample() >= p or old not in edges:
                    continue
                for _ in range(100):
                    j = int(random.randint(n))
                    new = (min(i, j), max(i, j))
                    if j != i and new not in edges:
                        edges.remove(old)
                        edges.add(new)
                        break
        return _of_pairs(n, sorted(edges))

    what = f"watts_strogatz(n={n}, degree={degree}, p={p}, seed={seed})"
    return _until_connected(draw, what, allow_disconnected, tries, "raise the degree")


def barabasi_albert(n: int, links: int = 2, seed: int = 0) -> Topology:
    """Scale-free by preferential attachment: each new worker links to `links` old ones, chosen in proportion to their degree.

    Starts from a star of links + 1 workers; always connected; a few hubs. Source: Barabási, Albert 1999.

    >>> t = barabasi_albert(32, 2, seed=0)
    >>> t.connected, t.messages // 2
    (True, 60)
    """
    n, links = sized(n), whole("links", links, 1)
    if n <= links:
        raise ValueError(f"links is {links} and n is {n}; links must be smaller than n.")
    random = stream(seed)
    pairs = [(0, j) for j in range(1, links + 1)]
    ends = [worker for pair in pairs for worker in pair]
    for new in range(links + 1, n):
        chosen: set[int] = set()
        while len(chosen) < links:
            chosen.add(ends[random.randint(len(ends))])
        for old in sorted(chosen):
            pairs.append((old, new))
            ends += [old, new]
    return _of_pairs(n, pairs)


def geometric(n: int, radius: float, seed: int = 0, *, allow_disconnected: bool = False, tries: int = 1000) -> Topology:
    """Workers at random points of the unit square, edges where the distance is at most `radius`: wireless sensors.

    Connected with high probability above √(ln n / (πn)); mixes slowly, like a grid. `positions` holds the points.

    >>> geometric(50, 0.35, seed=0).positions.shape
    torch.Size([50, 2])
    """
    from scipy.spatial import KDTree

    n = sized(n)
    if not radius > 0:
        raise ValueError(
            f"radius is {radius!r}; it must be positive, √(ln n / (πn)) = {_radius(n):.3g} at least to connect."
        )
    random = stream(seed)

    def draw() -> Topology:
        points = random.random_sample((n, 2))
        pairs = KDTree(points).query_pairs(radius, output_type="ndarray").astype(np.int64)
        return join(n, pairs[:, 0], pairs[:, 1], positions=torch.from_numpy(points))

    what = f"geometric(n={n}, radius={radius}, seed={seed})"
    return _until_connected(draw, what, allow_disconnected, tries, f"raise the radius above {_radius(n):.3g}")


def _radius(n: int) -> float:
    return math.sqrt(math.log(max(n, 2)) / (math.pi * n))


def stochastic_block(
    sizes: Sequence[int],
    inside: float,
    across: float,
    seed: int = 0,
    *,
    allow_disconnected: bool = False,
    tries: int = 1000,
) -> Topology:
    """Communities: workers in groups of these sizes, an edge with probability `inside` within a group, `across` between.

    >>> stochastic_block([10, 10, 12], 0.6, 0.05, seed=0).n
    32
    """
    group = np.repeat(np.arange(len(sizes)), [whole("a group size", size, 1) for size in sizes])
    _probability(inside)
    _probability(across)
    n = whole("the number of workers", len(group), 1)
    random = stream(seed)

    def draw() -> Topology:
        chance = np.where(group[:, None] == group[None, :], inside, across)
        pairs = np.argwhere(np.triu(random.random_sample((n, n)) < chance, 1))
        return join(n, pairs[:, 0], pairs[:, 1])

    what = f"stochastic_block({list(sizes)}, {inside}, {across}, seed={seed})"
    return _until_connected(draw, what, allow_disconnected, tries, "raise `across`")


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{p!r} is no probability; it must lie between 0 and 1.")


def _of_pairs(n: int, pairs: list[tuple[int, int]]) -> Topology:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return join(n, table[:, 0], table[:, 1])


def _equi_offsets(n: int, seed: int, degree: int | None) -> np.ndarray:
    n = sized(n)
    count = (n - 1).bit_length() if degree is None else whole("degree", degree, 1)
    if n == 1:
        return np.empty(0, dtype=np.int64)
    return stream(seed).choice(np.arange(1, n), count).astype(np.int64)


def equistatic(n: int, seed: int = 0, directed: bool = True, degree: int | None = None) -> Topology:
    """EquiStatic: `degree` random offsets a, i + a sends to i; undirected, both ways. Constant gap at degree O(ln n).

    Offsets are drawn with replacement from 1 … n−1 by the paper's own draw, so a seed is the paper's graph; one drawn
    twice is a single edge here and weighs double in `equistatic_weights`. Default degree ⌈log₂ n⌉. Source: Song et
    al. 2022, arXiv 2210.07881.

    >>> t = equistatic(300, seed=0)
    >>> t.regular, int(t.in_degree[0]), t.neighbours(0)[:3]
    (True, 9, (10, 48, 118))
    """
    offsets = _equi_offsets(n, seed, degree)
    i = torch.arange(n)
    empty = torch.empty(0, dtype=torch.int64)
    return join(n, torch.cat([empty, *((i + int(a)) % n for a in offsets)]), i.repeat(len(offsets)), directed)


def equistatic_weights(n: int, seed: int = 0, directed: bool = True, degree: int | None = None) -> Tensor:
    """The paper's W on `equistatic`: the mean of basis matrices with (n−1)/n at offset a and 1/n on the diagonal.

    λ_k = 1/n + ((n−1)/n) mean_a ω^{ka}, or cos in place of ω^{…} if undirected; doubly stochastic. Uniform weights on
    the same graph have a larger self weight.

    >>> from graphs import slem
    >>> [round(slem(equistatic_weights(300, 0, directed)), 6) for directed in (False, True)]
    [0.634469, 0.708909]
    """
    offsets = _equi_offsets(n, seed, degree)
    i = torch.arange(n)
    if n == 1:
        return matrix(i, i, torch.ones(1), 1)
    share = (n - 1) / n / len(offsets)
    rows, columns = [i], [i]
    for a in offsets.tolist():
        rows += [i] if directed else [i, i]
        columns += [(i + a) % n] if directed else [(i + a) % n, (i - a) % n]
    values = torch.full((len(rows), n), share if directed else share / 2, dtype=torch.float64)
    values[0] = 1 / n
    return matrix(torch.cat(rows), torch.cat(columns), values.flatten(), n)
