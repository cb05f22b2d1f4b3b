"""Topologies from what others hold them in: lists of edges, adjacency matrices, networkx graphs and PyG's data."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.properties import entries, tensor
from graphs.topology import Topology, join, sized, whole

__all__ = ["from_adjacency", "from_data", "from_edges", "from_networkx"]


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
    if getattr(data, "adj_t", None) is not None:
        raise ValueError("the edges are in data.adj_t, not in data.edge_index; leave the transform ToSparseTensor out.")
    edges = data.edge_index if data.edge_index is not None else torch.empty(2, 0, dtype=torch.int64)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.is_floating_point():
        raise ValueError(
            f"data.edge_index has shape {tuple(edges.shape)} and dtype {edges.dtype}; it must be (2, E) of integers, rows "
            "source and target. A list of pairs (E, 2) goes in transposed, edge_index.T."
        )
    pos, km = getattr(data, "pos", None), getattr(data, "length", None)
    positions = pos.double() if isinstance(pos, Tensor) and pos.shape == (n, 2) else None
    lengths = km.double() if isinstance(km, Tensor) and km.shape == edges.shape[1:] else None
    return join(n, edges[0].cpu(), edges[1].cpu(), True, getattr(data, "names", None), lengths, positions, report=True)


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
