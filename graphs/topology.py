"""A topology says who may talk to whom: n workers and directed edges (source, target), frozen and sorted, no loops."""

import hashlib
import operator
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.properties import Incompatible

__all__ = ["Topology"]

MOST = 2**31


@dataclass(frozen=True, eq=False)
class Topology:
    """A communication graph of workers 0 … n−1.

    Args:
        n: number of workers; isolated ones count.
        edge_index: (2, E) int64, rows source and target, one column per message: an undirected edge is two columns.
        names: n labels, the map from workers to the labels of the source (city names, networkx nodes), or None.
        lengths: (E,) float64, kilometres of each column of `edge_index`, or None.
        positions: (n, 2) float64, x and y (longitude and latitude where the graph is geographic), or None.

    The columns are kept sorted by (source, target). Loops and duplicates are refused here (`ValueError`); the
    `from_…` functions strip and collapse them, with a warning. The weight of a worker's own model is no edge: it
    comes from the weight rule.

    >>> square = Topology(4, torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]]))
    >>> square.directed, square.connected, square.degree.tolist()
    (False, True, [2, 2, 2, 2])
    >>> print(square)
    Topology: 4 workers, 4 undirected edges (8 messages a round), degree 2, connected
    """

    n: int
    edge_index: Tensor
    names: tuple[str, ...] | None = None
    lengths: Tensor | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        n = sized(self.n)
        edges = torch.as_tensor(self.edge_index).detach().cpu()
        if edges.ndim != 2 or edges.shape[0] != 2 or (edges.numel() and edges.dtype.is_floating_point):
            raise ValueError(
                f"edge_index has shape {tuple(edges.shape)} and dtype {edges.dtype}; it must be (2, E) of integers, "
                "rows source and target. An edge list of pairs goes through graphs.from_edges."
            )
        edges = edges.to(torch.int64)
        if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= n):
            column = int(((edges < 0) | (edges >= n)).any(0).nonzero()[0])
            raise ValueError(
                f"edge {tuple(edges[:, column].tolist())} leaves the {n} workers 0 … {n - 1}; raise n or relabel."
            )
        key = edges[0] * n + edges[1]
        lengths, positions = _own(self.lengths), _own(self.positions)
        if lengths is not None and lengths.shape != key.shape:
            raise ValueError(
                f"lengths has shape {tuple(lengths.shape)}; it needs one entry per message, ({key.numel()},)."
            )
        if lengths is not None and (wrong := ~((lengths >= 0) & lengths.isfinite())).any():
            bad = int(wrong.nonzero()[0])
            raise ValueError(
                f"edge {tuple(edges[:, bad].tolist())} is {float(lengths[bad])} km long; lengths are finite and not negative."
            )
        if not bool((key[1:] > key[:-1]).all()):
            key, order = key.sort()
            edges, lengths = edges[:, order], None if lengths is None else lengths[order]
        repeated = (key[1:] == key[:-1]).nonzero()
        if len(repeated) or bool((edges[0] == edges[1]).any()):
            bad = edges[:, int(repeated[0])] if len(repeated) else edges[:, edges[0] == edges[1]][:, 0]
            kind = "appears twice" if len(repeated) else "is a loop"
            raise ValueError(
                f"edge {tuple(bad.tolist())} {kind}; a topology holds each message once and no loops. "
                "graphs.from_edges collapses and strips them."
            )
        names = None if self.names is None else tuple(str(name) for name in self.names)
        if names is not None and len(names) != n:
            raise ValueError(f"{len(names)} names for {n} workers; give one name per worker or none.")
        if positions is not None and positions.shape != (n, 2):
            raise ValueError(f"positions has shape {tuple(positions.shape)}; it must be ({n}, 2).")
        edges = edges.clone(memory_format=torch.contiguous_format)
        own = {"n": n, "edge_index": edges, "names": names, "lengths": lengths, "positions": positions}
        for field, value in own.items():
            object.__setattr__(self, field, value)

    @property
    def source(self) -> Tensor:
        """(E,) the sender of each message."""
        return self.edge_index[0]

    @property
    def target(self) -> Tensor:
        """(E,) the receiver of each message."""
        return self.edge_index[1]

    @property
    def messages(self) -> int:
        """Messages in one round: the columns of `edge_index`."""
        return self.edge_index.shape[1]

    @cached_property
    def directed(self) -> bool:
        """Whether some edge lacks its reverse."""
        back, _ = (self.target * self.n + self.source).sort()
        return not torch.equal(back, self.source * self.n + self.target)

    @cached_property
    def in_degree(self) -> Tensor:
        """(n,) int64, how many workers each one hears."""
        return torch.bincount(self.target, minlength=self.n)

    @cached_property
    def out_degree(self) -> Tensor:
        """(n,) int64, how many workers hear each one."""
        return torch.bincount(self.source, minlength=self.n)

    @property
    def degree(self) -> Tensor:
        """(n,) int64, number of neighbours; of a directed graph the in-degree."""
        return self.in_degree

    @cached_property
    def regular(self) -> bool:
        """Whether all workers send to and hear equally many."""
        degrees = torch.cat([self.in_degree, self.out_degree])
        return bool((degrees == degrees[0]).all())

    @cached_property
    def isolated(self) -> tuple[int, ...]:
        """Workers without any edge."""
        return tuple(((self.in_degree + self.out_degree) == 0).nonzero().flatten().tolist())

    @cached_property
    def component_of(self) -> Tensor:
        """(n,) int64, the component of each worker, numbered by first member (strong components if directed)."""
        from scipy.sparse.csgraph import connected_components

        _, labels = connected_components(self._csr(), connection="strong")
        _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
        return torch.from_numpy(np.argsort(np.argsort(first))[inverse])

    @property
    def connected(self) -> bool:
        """Whether every worker's model can reach every other (strongly connected, if directed)."""
        return int(self.component_of.max()) == 0

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The (strong) components, each sorted, by first member."""
        order = torch.argsort(self.component_of, stable=True)
        sizes = torch.bincount(self.component_of).tolist()
        return tuple(tuple(part.tolist()) for part in order.split(sizes))

    @cached_property
    def diameter(self) -> int:
        """Longest shortest path, in hops; `ValueError` when disconnected. Costs n breadth-first searches."""
        from scipy.sparse.csgraph import shortest_path

        if not self.connected:
            raise ValueError(
                f"{len(self.components)} components: a disconnected graph has no diameter; see .components."
            )
        csr, block = self._csr(), 1 + 10**7 // self.n
        return max(
            int(shortest_path(csr, unweighted=True, indices=np.arange(i, min(i + block, self.n))).max())
            for i in range(0, self.n, block)
        )

    def neighbours(self, worker: int) -> tuple[int, ...]:
        """The workers that `worker` hears, sorted."""
        if whole("worker", worker, 0) >= self.n:
            raise ValueError(f"worker is {worker}; the workers are 0 … {self.n - 1}.")
        return tuple(sorted(self.source[self.target == worker].tolist()))

    @cached_property
    def digest(self) -> str:
        """A hash of n and the sorted edges, the same on every machine; two processes compare it at start."""
        return hashlib.sha256(str(self.n).encode() + b":" + self.edge_index.numpy().astype("<i8").tobytes()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return (
            (self.n, self.names) == (other.n, other.names)
            and torch.equal(self.edge_index, other.edge_index)
            and _same(self.lengths, other.lengths)
            and _same(self.positions, other.positions)
        )

    def __str__(self) -> str:
        degree = self.in_degree
        low, high = int(degree.min()), int(degree.max())
        edges = f"{self.messages} directed edges" if self.directed else f"{self.messages // 2} undirected edges"
        parts = [
            f"Topology: {self.n} workers, {edges} ({self.messages} messages a round)",
            f"{'in-degree' if self.directed else 'degree'} {low}" + (f" to {high}" if high > low else ""),
            "connected" if self.connected else f"{int(self.component_of.max()) + 1} components",
        ]
        if self.isolated:
            parts.append(
                f"isolated workers {', '.join(map(str, self.isolated[:8]))}{' …' if len(self.isolated) > 8 else ''}"
            )
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<{self}>"

    def to_networkx(self) -> Any:
        """A networkx `Graph` (or `DiGraph`) on nodes 0 … n−1, with `name`, `pos` and `length` where known."""
        import networkx as nx

        graph = nx.DiGraph() if self.directed else nx.Graph()
        for worker in range(self.n):
            attributes: dict[str, Any] = {}
            if self.names is not None:
                attributes["name"] = self.names[worker]
            if self.positions is not None:
                attributes["pos"] = tuple(self.positions[worker].tolist())
            graph.add_node(worker, **attributes)
        lengths = [None] * self.messages if self.lengths is None else self.lengths.tolist()
        for source, target, length in zip(*self.edge_index.tolist(), lengths):
            graph.add_edge(source, target, **({} if length is None else {"length": length}))
        return graph

    def to_data(self) -> Any:
        """A `torch_geometric.data.Data` with `num_nodes`, `edge_index`, and `pos`, `length`, `names` where known."""
        with warnings.catch_warnings():
            # torch_geometric 2.8 scripts a class on import, which torch 2.13 deprecates
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch_geometric.data import Data

        extra: dict[str, Any] = {"pos": self.positions, "length": self.lengths, "names": self.names}
        return Data(
            edge_index=self.edge_index.clone(), num_nodes=self.n, **{k: v for k, v in extra.items() if v is not None}
        )

    def _csr(self) -> Any:
        from scipy.sparse import csr_array

        pair = (self.source.numpy(), self.target.numpy())
        return csr_array((np.ones(self.messages, dtype=np.float64), pair), shape=(self.n, self.n))


def _own(values: Any) -> Tensor | None:
    return None if values is None else torch.as_tensor(values).detach().to("cpu", torch.float64, copy=True)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))


def whole(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int (of at least `least`), or a `ValueError` that names it."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueError(
            f"{name} is {value!r}; it must be an integer{'' if least is None else f' of at least {least}'}."
        )
    return number


def sized(n: Any) -> int:
    """`n` workers: an int from 1 to 2³¹, so that n² keys fit into int64."""
    n = whole("n", n, 1)
    if n > MOST:
        raise ValueError(
            f"n is {n}, beyond {MOST} workers; labels that are not 0 … n−1 must be renumbered, as graphs.from_networkx does."
        )
    return n


def proper(topology: Any, rule: str) -> Topology:
    """The topology itself, or a `ValueError` for what is none."""
    if not isinstance(topology, Topology):
        raise ValueError(
            f"{rule} takes a graphs.Topology, not {type(topology).__name__}; make one by graphs.ring(n), "
            "graphs.from_networkx, from_data, from_edges or from_adjacency."
        )
    return topology


def join(
    n: int,
    source: Tensor | np.ndarray,
    target: Tensor | np.ndarray,
    directed: bool = False,
    names: Iterable[Any] | None = None,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    report: bool = False,
) -> Topology:
    """The topology with these edges (and, unless directed, their reverses); loops stripped, repeats collapsed.

    With `report` a stripped loop or an edge that was given twice raises a `UserWarning` that counts them. The first
    of several lengths wins.
    """
    source, target = torch.as_tensor(source, dtype=torch.int64), torch.as_tensor(target, dtype=torch.int64)
    if len(source) and (int(torch.minimum(source, target).min()) < 0 or int(torch.maximum(source, target).max()) >= n):
        bad = int(((source < 0) | (target < 0) | (source >= n) | (target >= n)).nonzero()[0])
        raise ValueError(
            f"edge {(int(source[bad]), int(target[bad]))} leaves the {n} workers 0 … {n - 1}; raise n or relabel."
        )
    proper = source != target
    loops = len(proper) - int(proper.sum())
    if loops:
        source, target = source[proper], target[proper]
        lengths = None if lengths is None else lengths[proper]
    if report:
        repeats = len(source) - len(torch.unique(source * n + target))
        found = [
            f"{count} {what}"
            for count, what in ((loops, "loops stripped"), (repeats, "repeated edges collapsed"))
            if count
        ]
        if found:
            warnings.warn(f"{' and '.join(found)}: a topology holds each message once and no loops.", stacklevel=3)
    if not directed:
        source, target = torch.cat([source, target]), torch.cat([target, source])
        lengths = None if lengths is None else torch.cat([lengths, lengths])
    key, order = torch.sort(source * n + target, stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    key, order = key[first], order[first]
    edges = torch.stack([key // n, key % n])
    names = None if names is None else tuple(str(name) for name in names)
    return Topology(n, edges, names, None if lengths is None else lengths[order], positions)


def undirected(topology: Topology, rule: str) -> Topology:
    """The topology itself, or `Incompatible` when it is directed."""
    if proper(topology, rule).directed:
        present = set((topology.source * topology.n + topology.target).tolist())
        i, j = next((i, j) for i, j in topology.edge_index.T.tolist() if j * topology.n + i not in present)
        raise Incompatible(
            f"{rule} needs an undirected graph, and the edge {i} → {j} has no reverse; use graphs.push (column "
            "stochastic, for push-sum) or graphs.pull, or graphs.uniform on a regular directed graph."
        )
    return topology
