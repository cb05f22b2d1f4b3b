"""One round's W, compiled for a placement: who sends which rows where, and the sparse blocks that mix what arrives."""

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphs import Schedule

from .placement import Placement
from .wire import CHUNK, Spec, cut


@dataclass
class Block:
    """A part of W − I: `weight[e]` carries source row `src[e]` into hosted row `dst[e]`."""

    dst: Tensor
    src: Tensor
    weight: Tensor
    shape: tuple[int, int]
    _matrices: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def add(self, into: Tensor, source: Tensor, scale: float = 1.0) -> None:
        """into[i] += scale · Σ_j weight[i, j] · source[j], in place; rows (m, …) and (r, …)."""
        if source.device != into.device:
            source = source.to(into.device)
        if self.shape == (1, 1):  # without views, which cost more than the sum of small rows
            for _, _, w in self.entries:
                into.add_(source, alpha=scale * w)
        elif self.shape[0] == 1 or into.dtype not in (torch.float32, torch.float64):
            for i, j, w in self.entries:
                into[i].add_(source[j], alpha=scale * w)
        elif self.weight.numel():
            flat = into.view(len(into), -1)  # refuses a layout in which it would be a copy and the sum be lost
            flat.addmm_(self._matrix(into), source.reshape(len(source), -1), alpha=scale)

    @cached_property
    def entries(self) -> list[tuple[int, int, float]]:
        """(i, j, weight[i, j]) where it is not zero."""
        return [e for e in zip(self.dst.tolist(), self.src.tolist(), self.weight.tolist()) if e[2]]

    def _matrix(self, like: Tensor) -> Tensor:
        """Sparse rows, or a dense matrix where a quarter of it or more is filled."""
        key = like.dtype, like.device
        if key not in self._matrices:
            coo = torch.sparse_coo_tensor(
                torch.stack((self.dst, self.src)), self.weight, self.shape, check_invariants=False
            ).coalesce()
            if 4 * self.weight.numel() >= self.shape[0] * self.shape[1]:
                matrix = coo.to_dense()
            else:
                with warnings.catch_warnings():  # CSR is announced as beta; addmm is the part of it that we use
                    warnings.simplefilter("ignore", UserWarning)
                    matrix = coo.to_sparse_csr()
            self._matrices[key] = matrix.to(device=like.device, dtype=like.dtype)
        return self._matrices[key]


@dataclass
class Edges:
    """Directed edges that meter alike: edge e carries `size[e]` units of a message."""

    src: Tensor
    dst: Tensor
    size: Tensor


class Plan:
    """What one process does in a round with mixing matrix W.

    Attributes:
        local: the block of W − I among hosted rows.
        remote: for each process that sends here, the block of its rows; in the order in which they travel.
        sends: rows (positions among the hosted ones) to each process that needs some.
        edges: the directed edges that leave hosted workers, for the meter.
        out_edges, in_edges: (2, E) worker ids of the edges that leave and reach hosted workers, sorted by (source, target).
    """

    def __init__(self, W: Tensor, placement: Placement) -> None:
        n, rank, owner = placement.n, placement.rank, placement.owner
        self.W = W  # held, so that the id by which the plan is cached stays taken
        coo = W if W.layout == torch.sparse_coo else W.to_sparse_coo()
        (receiver, sender), weight = coo.coalesce().indices(), coo.coalesce().values()
        keep = (weight != 0) & (receiver != sender)
        own = torch.full((n,), -1.0, dtype=weight.dtype)  # the diagonal of W − I
        diagonal = receiver == sender
        own[receiver[diagonal]] += weight[diagonal]
        receiver, sender, weight = receiver[keep], sender[keep], weight[keep]

        position = torch.full((n,), -1)
        position[placement.rows] = torch.arange(len(placement.rows))
        to_here, from_here = owner[receiver] == rank, owner[sender] == rank
        here = to_here & from_here
        rows = torch.arange(len(placement.rows))
        m = len(rows)
        self.local = Block(
            torch.cat((rows, position[receiver[here]])),
            torch.cat((rows, position[sender[here]])),
            torch.cat((own[placement.rows], weight[here])),
            (m, m),
        )
        self.remote: dict[int, Block] = {}
        self.sends: dict[int, Tensor] = {}
        for q in () if placement.alone else range(len(placement.blocks)):
            if q == rank:
                continue
            incoming = to_here & (owner[sender] == q)
            if incoming.any():
                workers, src = sender[incoming].unique(return_inverse=True)
                self.remote[q] = Block(position[receiver[incoming]], src, weight[incoming], (m, len(workers)))
            outgoing = from_here & (owner[receiver] == q)
            if outgoing.any():
                self.sends[q] = position[sender[outgoing].unique()]

        def ordered(mask: Tensor) -> Tensor:
            order = (sender[mask] * n + receiver[mask]).argsort()
            return torch.stack((sender[mask][order], receiver[mask][order]))

        self.out_edges, self.in_edges = ordered(from_here), ordered(to_here)
        self.edges = Edges(self.out_edges[0], self.out_edges[1], torch.ones_like(self.out_edges[0]))
        self.routes: dict[tuple, Any] = {}  # what the network compiles for messages of given dtypes and shapes
        self._owner, self._rank = owner, rank

    @cached_property
    def edge_routes(self) -> tuple[tuple[Tensor, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """For messages that differ per edge: ((from, to) positions of edges inside this process, out and in per process)."""
        n = len(self._owner)
        target, source = self._owner[self.out_edges[1]], self._owner[self.in_edges[0]]
        stays, arrives = (target == self._rank).nonzero()[:, 0], (source == self._rank).nonzero()[:, 0]
        code_out = (self.out_edges[0] * n + self.out_edges[1])[stays]
        code_in = (self.in_edges[0] * n + self.in_edges[1])[arrives]
        inside = stays[code_out.argsort()], arrives[code_in.argsort()]
        out = {q: (target == q).nonzero()[:, 0] for q in target.unique().tolist() if q != self._rank}
        into = {q: (source == q).nonzero()[:, 0] for q in source.unique().tolist() if q != self._rank}
        return inside, out, into


def verify(
    schedule: Schedule,
    blocks: tuple[tuple[int, ...], ...],
    specs: tuple[Spec, ...] = ((torch.float32, (1,)),),
    chunk: int = CHUNK,
    window: int = 2,
    plans: int = 256,
) -> int:
    """Check that the processes' plans of a schedule fit together: what is sent is awaited, and no order can deadlock.

    The rounds of one period are run through as the processes would run them, each at its own speed: it posts `window`
    chunks per peer, waits for the oldest, posts the next.

    Args:
        schedule: the mixing matrices.
        blocks: the workers of each process.
        specs: dtype and row shape of each tensor of the message.
        chunk: bytes of a chunk of a large part.
        window: steps in flight, of a chunk each.
        plans: bound on the work, as the number of rounds times the number of processes; at least one round is checked.

    Returns:
        The number of rounds that were checked.

    Raises:
        ValueError: names the round, both processes and what differs, or who waits for whom.

    >>> import graphs
    >>> verify(graphs.one_peer_exponential(8), ((0, 1, 2), (3, 4), (5, 6, 7)))
    3
    """
    processes = range(len(blocks))
    rounds = min(schedule.period or 64, max(1, plans // len(blocks)))
    work: list[list[tuple[int, int, dict[int, int], dict[int, int]]]] = [[] for _ in processes]
    for k in range(rounds):
        made = [Plan(schedule(k), Placement(blocks, p)) for p in processes]
        for p in processes:
            for q in processes:
                sent = [blocks[p][i] for i in made[p].sends[q].tolist()] if q in made[p].sends else []
                awaited = made[q].remote[p].shape[1] if p in made[q].remote else 0
                if len(sent) != awaited:
                    raise ValueError(
                        f"in round {k} process {p} sends {len(sent)} rows to process {q}, which awaits {awaited}: "
                        "schedule(k) must be the same matrix whenever and wherever it is asked for"
                    )
        sizes = [
            (
                {q: _sizes(specs, len(rows), chunk) for q, rows in plan.sends.items()},
                {q: _sizes(specs, block.shape[1], chunk) for q, block in plan.remote.items()},
            )
            for plan in made
        ]
        for p, (out, into) in enumerate(sizes):
            for s in range(max(map(len, (*out.values(), *into.values())), default=0)):
                leaving = {q: packets[s] for q, packets in out.items() if s < len(packets)}
                arriving = {q: packets[s] for q, packets in into.items() if s < len(packets)}
                work[p].append((k, s, leaving, arriving))
    _run(work, window)
    return rounds


def _sizes(specs: tuple[Spec, ...], rows: int, chunk: int) -> list[int]:
    """Bytes that cross in each step, without the header."""
    small, chunks = (
        [rows * specs[p.part][0].itemsize * (p.stop - p.start) for p in pieces] for pieces in cut(specs, rows, chunk)
    )
    return [sum(small) + sum(chunks[:1]), *chunks[1:]]


def _run(work: list[list[tuple[int, int, dict[int, int], dict[int, int]]]], window: int) -> None:
    """Let every process go as far as it can, until all are done or none can go on.

    A step is (round, chunk, bytes to each process, bytes from each process). It is over once both ends of each of its
    transfers are posted, in the order of posting for each pair of processes; a round's first step is posted after the
    last round is over.
    """
    posted, over = [0] * len(work), [0] * len(work)
    legs: dict[tuple[int, int, str], list[tuple[int, int, int]]] = {}
    need: list[list[list[tuple[int, int, str, int]]]] = [[] for _ in work]
    moved = True
    while moved:
        moved = False
        for p, steps in enumerate(work):
            while posted[p] < len(steps) and posted[p] < over[p] + window:
                k, s, out, into = steps[posted[p]]
                if posted[p] > over[p] and steps[over[p]][0] != k:
                    break
                waits = []
                for q, size, key, other in [(q, b, (p, q, "out"), "in") for q, b in out.items()] + [
                    (q, b, (q, p, "in"), "out") for q, b in into.items()
                ]:
                    mine = legs.setdefault(key, [])
                    waits.append((key[0], key[1], other, len(mine)))
                    mine.append((k, s, size))
                    theirs = legs.get((key[0], key[1], other), [])
                    if len(theirs) >= len(mine) and theirs[len(mine) - 1] != mine[-1]:
                        raise ValueError(
                            f"processes {p} and {q} differ in what passes from {key[0]} to {key[1]}: (round, chunk, "
                            f"bytes) = {mine[-1]} at {p} and {theirs[len(mine) - 1]} at {q}; both must follow one schedule"
                        )
                need[p].append(waits)
                posted[p] += 1
                moved = True
            while over[p] < posted[p] and all(len(legs.get((a, b, e), [])) > i for a, b, e, i in need[p][over[p]]):
                over[p] += 1
                moved = True
    stuck = []
    for p, steps in enumerate(work):
        if over[p] < len(steps):
            k, s, out, into = steps[over[p]]
            waits = need[p][over[p]] if over[p] < len(need[p]) else []
            on = sorted({a if b == p else b for a, b, e, i in waits if len(legs.get((a, b, e), [])) <= i})
            stuck.append(f"process {p} waits for {on} in round {k}, chunk {s} ({sum({**out, **into}.values())} bytes)")
    if stuck:
        raise ValueError("the exchange would deadlock: " + "; ".join(stuck))
