"""Topologies from files: edge lists, GraphML, GML, adjacency matrices."""

from pathlib import Path
from typing import Any

import numpy as np

from graphs.topology import Topology, from_adjacency, from_edges, from_networkx

__all__ = ["from_file"]


def from_file(path: str | Path, *, n: int | None = None, directed: bool = False) -> Topology:
    """The topology in a file, by its suffix.

    | suffix | content |
    |---|---|
    | .graphml, .gml | as networkx reads them; direction, `pos` and `length` come along |
    | .npy, .npz, .mtx | an adjacency matrix (numpy, scipy sparse, Matrix Market), A[i, j] ≠ 0: i sends to j |
    | .csv, .tsv, .txt, .edges, .edgelist | one edge a line, see below |

    A line of an edge list holds two workers, separated by comma, tab or space, and in every line or none a third
    column, the length in km; # starts a comment. Labels that are all whole numbers are the workers' numbers.

    Args:
        path: the file.
        n: number of workers of an edge list, when some have no edge.
        directed: whether a line of an edge list means one direction only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "wheel.txt").write_text("# hub and rim\\n0 1\\n0 2\\n1 2\\n")
    ...     print(from_file(Path(folder) / "wheel.txt"))
    Topology: 3 workers, 3 undirected edges (6 messages a round), degree 2, connected
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; give the path of an edge list, a GraphML file or a matrix.")
    suffix = path.suffix.lower()
    if suffix in (".graphml", ".gml"):
        import networkx as nx

        graph: Any = nx.read_graphml(path) if suffix == ".graphml" else nx.read_gml(path)
        if all(str(node).isdigit() for node in graph):
            graph = nx.relabel_nodes(graph, {node: int(node) for node in graph})
        return from_networkx(graph)
    if suffix in (".npy", ".npz", ".mtx"):
        return from_adjacency(_matrix(path, suffix))
    if suffix not in (".csv", ".tsv", ".txt", ".edges", ".edgelist"):
        raise ValueError(f"{path.name!r} ends in {suffix!r}; known are .graphml, .gml, .npy, .npz, .mtx, .csv, .txt.")
    edges, lengths = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) not in (2, 3):
            raise ValueError(
                f"{path.name}, line {number}: {line.strip()!r} is no edge; two workers, and perhaps a length."
            )
        try:
            lengths += [float(word) for word in words[2:]]
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: the length {words[2]!r} is no number.") from error
        edges.append(tuple(words[:2]))
    if lengths and len(lengths) != len(edges):
        raise ValueError(
            f"{path.name}: {len(lengths)} of {len(edges)} lines have a length; give one to all or to none."
        )
    if all(word.isdigit() for edge in edges for word in edge):
        edges = [(int(a), int(b)) for a, b in edges]
    return from_edges(edges, n, directed=directed, lengths=lengths or None)


def _matrix(path: Path, suffix: str) -> Any:
    if suffix == ".npy":
        return np.load(path)
    if suffix == ".npz":
        from scipy.sparse import load_npz

        return load_npz(path)
    from scipy.io import mmread

    return mmread(path)
