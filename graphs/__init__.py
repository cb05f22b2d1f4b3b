"""Who may talk to whom, and how fast that mixes: topologies, mixing matrices, schedules and their spectra.

>>> import graphs
>>> W = graphs.metropolis(graphs.torus(4, 4))
>>> round(graphs.slem(W), 6)
0.6
"""

from graphs.families import complete, erdos_renyi, exponential, hypercube, path, random_regular, ring, star, torus
from graphs.properties import Incompatible
from graphs.schedules import Schedule, as_schedule, cycle, one_peer_exponential, static
from graphs.spectral import gap, slem
from graphs.topology import Topology, from_adjacency, from_data, from_edges, from_networkx
from graphs.weights import metropolis, uniform

__all__ = [
    "Incompatible",
    "Schedule",
    "Topology",
    "as_schedule",
    "complete",
    "cycle",
    "erdos_renyi",
    "exponential",
    "from_adjacency",
    "from_data",
    "from_edges",
    "from_networkx",
    "gap",
    "hypercube",
    "metropolis",
    "one_peer_exponential",
    "path",
    "random_regular",
    "ring",
    "slem",
    "star",
    "static",
    "torus",
    "uniform",
]
