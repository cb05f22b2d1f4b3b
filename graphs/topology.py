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

from graphs.properties import Incompatible, entries, tensor

__all__ = ["Topology", "from_adjacency", "from_data", "from_edges", "from_networkx"]

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
        lengths = None if self.lengths is None else torch.as_tensor(self.lengths, dtype=torch.float64).cpu()
        if lengths is not None and lengths.shape != key.shape:
            raise ValueError(
                f"lengths has shape {tuple(lengths.shape)}; it needs one entry per message, ({key.numel()},)."
            )
        if lengths is not None and not bool(((lengths >= 0) & lengths.isfinite()).all()):
            bad = int((~((lengths >= 0) & lengths.isfinite())).nonzero()[0])
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
        positions = None if self.positions is None else torch.as_tensor(self.positions, dtype=torch.float64).cpu()
        if names is not None and len(names) != n:
            raise ValueError(f"{len(names)} names for {n} workers; give one name per worker or none.")
        if positions is not None and positions.shape != (n, 2):
            raise ValueError(f"positions has shape {tuple(positions.shape)}; it must be ({n}, 2).")
        for field, value in (
            ("n", n),
            ("edge_index", edges.clone(memory_format=torch.contiguous_format)),
            ("names", names),
        ):
            object.__setattr__(self, field, value)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "positions", positions)

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


def _pair(edge: Any) -> bool:
    return not isinstance(edge, str) and hasattr(edge, "__len__") and len(edge) == 2


def _whole_labels(labels: Iterable[Any]) -> list[int] | None:
    """The labels as ints if all are whole numbers, also as text (`read_edgelist`) or floats (`loadtxt`), else None."""
    numbers: list[int] = []
    for label in labels:
        text = isinstance(label, str) and label.isdecimal() and str(int(label)) == label
        if text or hasattr(label, "__index__") or isinstance(label, (float, np.floating)) and label == label // 1:
            numbers.append(int(label))
        else:
            return None
    return numbers


def from_edges(
    edges: Iterable[tuple[Any, Any]] | Tensor | np.ndarray,
    n: int | None = None,
    *,
    directed: bool = False,
    lengths: Iterable[float] | None = None,
) -> Topology:
    """The topology of a list of pairs (source, target).

    Whole numbers (also as text or floats, as files give them) *are* the workers, whatever their order, and n defaults to
    the largest plus one; other labels are numbered in order of appearance and kept as `names`. Loops are stripped and
    repeated edges collapsed with a warning. Undirected unless said otherwise: a pair stands for both directions, and
    naming both is no repeat.

    Args:
        edges: pairs, or a (E, 2) array.
        n: number of workers, when some have no edge.
        directed: whether (a, b) means only that a sends to b.
        lengths: kilometres of each pair.

    >>> from_edges([(3, 0), (1, 2), (0, 1)]).neighbours(0)
    (1, 3)
    >>> from_edges([("Oslo", "Bern"), ("Bern", "Rome")]).names
    ('Oslo', 'Bern', 'Rome')
    """
    if isinstance(edges, (set, frozenset)):
        # a set's order differs from process to process, and with it who is worker 0
        if lengths is not None:
            raise ValueError("edges is a set, whose order says nothing about `lengths`; give a list of pairs.")
        edges = sorted(edges, key=str)
    pairs: list[Any] = edges.tolist() if isinstance(edges, (Tensor, np.ndarray)) else list(edges)
    if not all(map(_pair, pairs)):
        bad = next(pair for pair in pairs if not _pair(pair))
        raise ValueError(
            f"{bad!r} is no edge; each must be a pair (source, target). Lengths go into `lengths`, and an edge_index of "
            "shape (2, E) into from_edges(edge_index.T)."
        )
    labels = [label for pair in pairs for label in pair]
    numbered, names = _whole_labels(labels), None
    if numbered is not None:
        pairs = list(zip(numbered[::2], numbered[1::2]))
    else:
        if any(label is None or label != label for label in labels):
            raise ValueError("an edge ends at a missing label (None or NaN); drop that row.")
        names = list(dict.fromkeys(labels))
        numbers = {label: number for number, label in enumerate(names)}
        if n is not None and len(names) != n:
            raise ValueError(
                f"the edges name {len(names)} workers, n is {n}; workers without edges need integer labels."
            )
        pairs, n = [(numbers[a], numbers[b]) for a, b in pairs], len(names)
    if n is None:
        if not pairs:
            raise ValueError("no edges and no n; say how many workers there are, from_edges([], n=4).")
        n = max(map(max, pairs)) + 1
    n = sized(n)
    table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    km = None if lengths is None else torch.tensor(list(lengths), dtype=torch.float64)
    if km is not None and len(km) != len(table):
        raise ValueError(f"{len(km)} lengths for {len(table)} edges; give one length per pair.")
    return join(n, table[:, 0], table[:, 1], directed, names, km, report=True)


def from_adjacency(A: Any, *, directed: bool | None = None) -> Topology:
    """The topology of an adjacency matrix (tensor, array, or scipy sparse): A[i, j] ≠ 0 means that i sends to j.

    Values are ignored (weights come from a weight rule). `directed=None` keeps what the matrix says;
    `directed=False` refuses a matrix that is not symmetric in its pattern.

    >>> from_adjacency([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).degree.tolist()
    [1, 2, 1]
    """
    A = tensor(A, "an adjacency matrix")
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"an adjacency matrix of shape {tuple(A.shape)}; it must be square, one row per worker.")
    row, column, value = entries(A)
    if bool(value.isnan().any()):
        i, j = int(row[value.isnan()][0]), int(column[value.isnan()][0])
        raise ValueError(f"A[{i}, {j}] is nan, neither an edge nor none; write 0 where there is no edge.")
    topology = join(A.shape[0], row, column, directed=True, report=True)
    if directed is False and topology.directed:
        raise ValueError("the matrix is not symmetric in its pattern; pass directed=True, or A + A.T.")
    return topology


def from_networkx(graph: Any, *, length: str | None = "length") -> Topology:
    """The topology of a networkx graph, unweighted: edge weights are left behind (karate club carries some).

    Nodes labelled 0 … n−1 keep their numbers, whatever the order in which they were added and also as text (as
    `networkx.read_edgelist` reads them); other whole numbers are numbered in increasing order, anything else in the
    graph's order, and `names` holds the labels.

    Args:
        graph: `Graph`, `DiGraph`, or a multigraph, whose parallel edges are collapsed with a warning.
        length: the edge attribute that holds kilometres; used when every edge has it.

    >>> import networkx as nx
    >>> from_networkx(nx.petersen_graph()).degree.tolist()
    [3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    """
    if not hasattr(graph, "nodes") or not hasattr(graph, "is_directed"):
        raise ValueError(f"{type(graph).__name__} is no networkx graph; see from_data, from_edges and from_adjacency.")
    nodes = list(graph.nodes)
    if not nodes:
        raise ValueError("the graph has no nodes; a topology needs at least one worker.")
    numbered = _whole_labels(nodes)
    if numbered is not None:
        nodes = [node for _, node in sorted(zip(numbered, nodes), key=lambda pair: pair[0])]
    n = len(nodes)
    names = None if numbered is not None and sorted(numbered) == list(range(n)) else nodes
    number = {node: rank for rank, node in enumerate(nodes)}
    edges = list(graph.edges(data=True))
    source = torch.tensor([number[a] for a, _, _ in edges], dtype=torch.int64)
    target = torch.tensor([number[b] for _, b, _ in edges], dtype=torch.int64)
    km = [float(data[length]) for _, _, data in edges if length and data.get(length) is not None]
    lengths = torch.tensor(km, dtype=torch.float64) if km and len(km) == len(edges) else None
    spots = [graph.nodes[node].get("pos") for node in nodes]
    placed = all(spot is not None and len(spot) == 2 for spot in spots)
    positions = torch.tensor([tuple(map(float, spot)) for spot in spots], dtype=torch.float64) if placed else None
    if names is None and all("name" in graph.nodes[node] for node in nodes):
        names = [graph.nodes[node]["name"] for node in nodes]
    return join(n, source, target, graph.is_directed(), names, lengths, positions, report=True)


def from_data(data: Any) -> Topology:
    """The topology of a `torch_geometric.data.Data`: `edge_index` as it stands, `num_nodes`, `pos`, `length`, `names`.

    `pos` (n, 2) and `length` (E,) are taken where they have these shapes. Loops are stripped and repeated columns
    collapsed with a warning; n counts isolated last nodes, because `num_nodes` says so.

    >>> from graphs import ring
    >>> from_data(ring(3).to_data()) == ring(3), from_data(from_edges([(0, 1)], n=3).to_data()).isolated
    (True, (2,))
    """
    if not hasattr(data, "num_nodes") or not hasattr(data, "edge_index"):
        raise ValueError(
            f"{type(data).__name__} is no homogeneous torch_geometric Data; see from_networkx, from_edges, from_adjacency."
        )
    n = whole("data.num_nodes", data.num_nodes, 1)
    edges = data.edge_index if data.edge_index is not None else torch.empty(2, 0, dtype=torch.int64)
    if getattr(data, "adj_t", None) is not None:
        raise ValueError("the edges are in data.adj_t, not in data.edge_index; leave the transform ToSparseTensor out.")
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.is_floating_point():
        raise ValueError(
            f"data.edge_index has shape {tuple(edges.shape)} and dtype {edges.dtype}; it must be (2, E) of integers, rows "
            "source and target. A list of pairs (E, 2) goes in transposed, edge_index.T."
        )
    pos, km = getattr(data, "pos", None), getattr(data, "length", None)
    positions = pos.double() if isinstance(pos, Tensor) and pos.shape == (n, 2) else None
    lengths = km.double() if isinstance(km, Tensor) and km.shape == edges.shape[1:] else None
    return join(n, edges[0].cpu(), edges[1].cpu(), True, getattr(data, "names", None), lengths, positions, report=True)
