"""Topologies from files: edge lists, GraphML, GML, adjacency matrices."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from graphs.convert import from_adjacency, from_edges, from_networkx
from graphs.topology import Topology

__all__ = ["from_file"]


def from_file(path: str | Path, *, n: int | None = None, directed: bool = False) -> Topology:
    """The topology in a file, by its suffix.

    | suffix | content |
    |---|---|
    | .graphml, .gml | as networkx reads them; direction, `pos` and `length` come along |
    | .npy, .npz, .mtx | an adjacency matrix (numpy, scipy sparse, Matrix Market), A[i, j] ≠ 0: i sends to j |
    | .csv, .tsv, .txt, .edges, .edgelist | one edge a line, see below |

    A line of an edge list holds two workers, separated by commas, by tabs or by spaces, and in every line or none a third
    column, the length in km; # starts a comment, { an attribute list of networkx, which is left out. A first line that
    names the columns is skipped. Labels that are all whole numbers are the workers' numbers.

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

        try:
            graph: Any = nx.read_graphml(path) if suffix == ".graphml" else _gml(path)
        except (nx.NetworkXError, SyntaxError) as error:
            raise ValueError(f"{path.name} is not read by networkx: {error}") from error
        return from_networkx(graph)
    if suffix in (".npy", ".npz", ".mtx"):
        return from_adjacency(_matrix(path, suffix))
    if suffix not in (".csv", ".tsv", ".txt", ".edges", ".edgelist"):
        raise ValueError(f"{path.name!r} ends in {suffix!r}; known are .graphml, .gml, .npy, .npz, .mtx, .csv, .txt.")
    rows: list[tuple[int, list[str]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        line = re.split("[#{]", line)[0].strip()
        if line:
            apart = "," if "," in line else "\t" if "\t" in line else None
            rows.append((number, [word.strip().strip('"') for word in line.split(apart)]))
    if len(rows) > 1 and _titles(rows[0][1], rows[1:]):
        rows = rows[1:]
    edges, lengths = [], []
    for number, words in rows:
        if len(words) not in (2, 3) or not all(words):
            raise ValueError(
                f"{path.name}, line {number}: {' | '.join(words)} is no edge; two workers, and perhaps a length."
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
    return from_edges(edges, n, directed=directed, lengths=lengths or None)


def _titles(words: list[str], rows: list[tuple[int, list[str]]]) -> bool:
    """Whether these are the names of the columns: well known ones, or the only ones that are no whole numbers."""
    known = {("source", "target"), ("from", "to"), ("src", "dst"), ("u", "v"), ("i", "j")}
    numbers = all(word.isdecimal() for _, row in rows for word in row[:2])
    named = all(words) and not any(word.isdecimal() for word in words[:2])
    return named and (numbers or tuple(word.lower() for word in words[:2]) in known)


def _gml(path: Path) -> Any:
    import networkx as nx

    try:
        return nx.read_gml(path)
    except nx.NetworkXError:
        return nx.read_gml(path, label="id")  # the labels are missing or not unique


def _matrix(path: Path, suffix: str) -> Any:
    if suffix == ".npy":
        return np.load(path)
    if suffix == ".npz":
        from scipy.sparse import load_npz

        return load_npz(path)
    from scipy.io import mmread

    return mmread(path)
