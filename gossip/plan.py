"""One round's W, compiled for a placement: who sends which rows where, and the sparse blocks that mix what arrives."""

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .placement import Placement


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
        source = source.to(into.device)
        if self.shape[0] == 1 or into.dtype not in (torch.float32, torch.float64):
            for i, j, w in self._entries:
                into[i].add_(source[j], alpha=scale * w)
        elif self.weight.numel():
            flat = into.view(len(into), -1)  # refuses a layout in which it would be a copy and the sum be lost
            flat.addmm_(self._matrix(into), source.reshape(len(source), -1), alpha=scale)

    @cached_property
    def _entries(self) -> list[tuple[int, int, float]]:
        return list(zip(self.dst.tolist(), self.src.tolist(), self.weight.tolist()))

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
