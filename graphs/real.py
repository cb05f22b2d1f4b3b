"""Real communication networks with the length of every link in kilometres, read from topohub's files by name.

The files come from `$GOSSIP_DATA/topohub` if it exists, else from the installed package `topohub` (only read, never
imported). Several SNDlib sets have no geography: their links count as 1 km each.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import torch

from graphs.topology import Topology, join

__all__ = ["abilene", "arpanet", "geant", "germany50", "nsfnet", "real", "real_names"]

# drawn on a plane of their own: positions are not degrees, and the lengths derived from them mean nothing
FLAT = {"atlanta", "di-yuan", "france", "giul39", "newyork", "norway", "pioro40", "sun", "ta1", "ta2", "zib54"}


def _folder() -> Path:
    own = os.environ.get("GOSSIP_DATA")
    if own and (Path(own) / "topohub").is_dir():
        return Path(own) / "topohub"
    spec = find_spec("topohub")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("real networks come with the package topohub, which is not installed; pip install topohub.")
    return Path(spec.submodule_search_locations[0]) / "data"


def real_names() -> list[str]:
    """The names that `real` takes, such as "sndlib/germany50" or "topozoo/Geant2012", sorted.

    >>> "topozoo/Arpanet196912" in real_names()
    True
    """
    folder = _folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.json"))


def real(name: str) -> Topology:
    """A real network: cities as `names`, `lengths` in km per link, `positions` as longitude and latitude.

    Args:
        name: as in `real_names`, or its last part in any case where that is unambiguous: "germany50", "geant2012".

    >>> t = real("germany50")
    >>> t.n, t.messages // 2, t.names[0], round(float(t.lengths.max()))
    (50, 88, 'Aachen', 252)
    """
    name = str(name)
    names = [name] if (_folder() / f"{name}.json").is_file() else real_names()
    found = [full for full in names if full == name] or [full for full in names if full.split("/")[-1] == name]
    found = found or [
        full for full in names if full.lower().split("/")[-1] == name.lower() or full.lower() == name.lower()
    ]
    if len(found) != 1:
        near = found or [full for full in names if name.lower()[:4] in full.lower()][:8] or names[:8]
        what = "ambiguous" if found else "unknown"
        raise ValueError(f"the network {name!r} is {what}; there are {len(names)}, among them {', '.join(near)}.")
    with open(_folder() / f"{found[0]}.json", encoding="utf-8") as file:
        data = json.load(file)
    nodes = sorted(data["nodes"], key=lambda node: node["id"])
    rank = {node["id"]: k for k, node in enumerate(nodes)}
    links = data.get("edges", data.get("links"))
    flat = found[0].split("/")[-1] in FLAT
    lengths = [1.0 if flat else float(link["dist"]) for link in links]
    return join(
        len(nodes),
        torch.tensor([rank[link["source"]] for link in links], dtype=torch.int64),
        torch.tensor([rank[link["target"]] for link in links], dtype=torch.int64),
        names=[node.get("name", node["id"]) for node in nodes],
        lengths=torch.tensor(lengths, dtype=torch.float64),
        positions=torch.tensor([[float(x) for x in node["pos"]] for node in nodes], dtype=torch.float64),
        report=True,
    )


def geant(year: int = 2012) -> Topology:
    """GÉANT, Europe's research network: 2001, 2009, 2010 or 2012.

    >>> from graphs import gap, metropolis
    >>> geant(2012).n, round(gap(metropolis(geant(2012))), 3)
    (37, 0.023)
    """
    return _dated("GÉANT", year, {year: f"topozoo/Geant{year}" for year in (2001, 2009, 2010, 2012)})


def arpanet(year: int = 1969) -> Topology:
    """ARPANET at the end of 1969 (four hosts), in June 1970, September 1971 or August 1972.

    >>> arpanet(1969).n, arpanet(1969).names[0]
    (4, 'SRI')
    """
    months = {1969: "196912", 1970: "19706", 1971: "19719", 1972: "19728"}
    return _dated("ARPANET", year, {year: f"topozoo/Arpanet{month}" for year, month in months.items()})


def _dated(what: str, year: int, names: dict[int, str]) -> Topology:
    if year not in names:
        raise ValueError(f"no map of {what} in {year!r}; there are {', '.join(map(str, names))}.")
    return real(names[year])


def nsfnet() -> Topology:
    """NSFNET, the American backbone of the early 1990s.

    >>> nsfnet().n
    13
    """
    return real("topozoo/Nsfnet")


def abilene() -> Topology:
    """Abilene, Internet2's backbone of the 2000s (SNDlib's map).

    >>> abilene().n, abilene().messages // 2
    (12, 15)
    """
    return real("sndlib/abilene")


def germany50() -> Topology:
    """Fifty German cities (SNDlib).

    >>> germany50().n
    50
    """
    return real("sndlib/germany50")
