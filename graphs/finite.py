"""Schedules that average exactly after finitely many rounds: hypercubes of any radix, the phone book, Base-(k+1) graphs."""

import math
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from graphs.properties import matrix
from graphs.schedules import Schedule, half_from
from graphs.topology import sized, whole

__all__ = ["base_graph", "p_peer_hypercube", "phone_book", "simple_base_graph"]

Edges = list[tuple[int, int, float]]  # undirected, with weight; what a row lacks to one is its self weight


def _symmetric(n: int, edges: Edges) -> Tensor:
    table = np.array([(i, j) for i, j, _ in edges], dtype=np.int64).reshape(-1, 2)
    weight = torch.tensor([w for _, _, w in edges], dtype=torch.float64)
    i, j, own = torch.from_numpy(table[:, 0]), torch.from_numpy(table[:, 1]), torch.arange(n)
    keep = torch.ones(n, dtype=torch.float64).index_add_(0, i, -weight).index_add_(0, j, -weight)
    return matrix(torch.cat([i, j, own]), torch.cat([j, i, own]), torch.cat([weight, weight, keep]), n)


def _schedule(n: int, rounds: list[Edges]) -> Schedule:
    rounds = rounds or [[]]
    return Schedule(n, partial(_made, n, rounds), len(rounds))


def _made(n: int, rounds: list[Edges], k: int) -> Tensor:
    return _symmetric(n, rounds[k])


@cache
def _factors(n: int, most: int) -> tuple[int, ...] | None:
    """The fewest factors of n that are all between 2 and `most`, or None."""
    if n == 1:
        return ()
    options = [(f, _factors(n // f, most)) for f in range(min(most, n), 1, -1) if n % f == 0]
    found = [(f, *rest) for f, rest in options if rest is not None]
    return min(found, key=len) if found else None


def _hypercube(nodes: list[int], k: int) -> list[Edges]:
    """Rounds of complete groups of at most k + 1: digit by digit of the position in mixed radix."""
    factors = _factors(len(nodes), k + 1)
    if factors is None:
        raise ValueError(f"{len(nodes)} has a prime factor beyond {k + 1}.")
    rounds, stride = [], 1
    for size in factors:
        edges = []
        for at, node in enumerate(nodes):
            digit = at // stride % size
            edges += [(node, nodes[at + d * stride], 1 / size) for d in range(1, size - digit)]
        rounds.append(edges)
        stride *= size
    return rounds


def _simple_base(nodes: list[int], k: int) -> list[Edges]:
    n = len(nodes)
    if _factors(n, k + 1) is not None:
        return _hypercube(nodes, k)
    # n = Σ a_l (k+1)^{p_l} with falling p_l: one part per digit, each of a_l equal blocks
    parts: list[list[list[int]]] = []
    rest, power = list(nodes), int(math.log(n, k + 1)) + 1
    while rest:
        block = (k + 1) ** power
        count = len(rest) // block
        if count:
            parts.append([rest[a * block : (a + 1) * block] for a in range(count)])
            rest = rest[count * block :]
        power -= 1
    first = [_hypercube([node for block in part for node in block], k) for part in parts]
    start, last = len(first[0]), len(_hypercube(parts[0][0], k))
    rounds: list[Edges] = [[] for _ in range(start + 1 + last)]
    for l, part in enumerate(parts):
        # each part agrees on its own mean
        for m, edges in enumerate(first[l]):
            rounds[m] += edges
        if l == len(parts) - 1:
            break
        # every later worker meets one worker of each block, weighted so that all blocks get the mean of what is left
        later = [node for other in parts[l + 1 :] for block in other for node in block]
        size = sum(map(len, part))
        weight = size / (len(part) * (size + len(later)))
        rounds[start + l] += [(node, block[at], weight) for at, node in enumerate(later) for block in part]
        # and spreads it inside
        for block in part:
            for m, edges in enumerate(_hypercube(block, k)):
                rounds[start + l + 1 + m] += edges
    return rounds


def p_peer_hypercube(n: int, p: int = 1) -> Schedule:
    """Complete groups of at most p + 1 workers, digit by digit: exact averaging when n has no prime factor beyond p + 1.

    At most p messages per worker and round, n = (p+1)^L needs L rounds; p = 1 is the one-peer hypercube, i beside i xor
    2^k. `ValueError` for other n; `base_graph` takes any. Symmetric, doubly stochastic.

    >>> p_peer_hypercube(16).exact_after, p_peer_hypercube(27, 2).exact_after, p_peer_hypercube(12, 2).exact_after
    (4, 3, 3)
    """
    n, p = sized(n), whole("p", p, 1)
    if _factors(n, p + 1) is None:
        raise ValueError(
            f"n is {n}, with a prime factor beyond {p + 1}; use graphs.base_graph({n}, {p}), or a larger p."
        )
    return _schedule(n, _hypercube(list(range(n)), p))


def simple_base_graph(n: int, k: int = 1) -> Schedule:
    """Simple Base-(k+1): exact averaging for every n, at most k neighbours a round, at most 2 log_{k+1} n + 2 rounds.

    n is written in base k + 1; each part averages itself, the later parts hand their mean to the earlier ones, which
    spread it. Symmetric, doubly stochastic. Source: Takezawa et al. 2023, arXiv 2305.11420, algorithm 1.

    >>> [simple_base_graph(n).exact_after for n in (3, 5, 6, 10, 33)]
    [3, 5, 5, 7, 11]
    """
    n, k = sized(n), whole("k", k, 1)
    return _schedule(n, _simple_base(list(range(n)), k))


def base_graph(n: int, k: int = 1) -> Schedule:
    """Base-(k+1): the shorter of `simple_base_graph(n, k)` and one that splits off the factors of n up to k + 1.

    n = p·q, q without factors up to k + 1: p groups of q workers each run the simple graph, then groups of p across
    them a hypercube. Source: Takezawa et al. 2023, arXiv 2305.11420, algorithm 2.

    >>> [base_graph(n).period for n in (6, 10, 12, 48, 100)], base_graph(25, k=4).exact_after
    ([4, 6, 5, 7, 11], 2)
    """
    n, k = sized(n), whole("k", k, 1)
    simple = _simple_base(list(range(n)), k)
    q = n
    for factor in range(2, k + 2):
        while q % factor == 0:
            q //= factor
    p = n // q
    groups = [list(range(a * q, (a + 1) * q)) for a in range(p)]
    runs = [_simple_base(group, k) for group in groups]
    across = [_hypercube([group[at] for group in groups], k) for at in range(q)]
    split = [[edge for run in runs for edge in run[m]] for m in range(len(runs[0]))]
    split += [[edge for run in across for edge in run[m]] for m in range(len(across[0]))]
    return _schedule(n, split if len(split) < len(simple) else simple)


def phone_book(n: int) -> Schedule:
    """SGP's directed exponential phone book: round by round to i + 1, i − 1, i + 2, i − 2, i + 4, …, half one's own.

    One message per worker and round, doubly stochastic. Exact after the whole book when n is a power of two. Source:
    Assran et al. 2019, arXiv 1811.10792 (one peer per iteration).

    >>> phone_book(8).period, phone_book(8).exact_after, phone_book(6).exact_after
    (5, 5, None)
    """
    n = sized(n)
    shifts: list[int] = []
    for k in range((n - 1).bit_length()):
        for shift in ((1 << k) % n, -(1 << k) % n):
            if shift not in shifts:
                shifts.append(shift)
    return Schedule(n, partial(half_from, n, shifts), max(1, len(shifts)))
