"""Who may talk to whom, and how fast that mixes: topologies, mixing matrices, schedules and their spectra.

>>> import graphs
>>> W = graphs.metropolis(graphs.torus(4, 4))
>>> round(graphs.slem(W), 6)
0.6
"""

from graphs.advise import advise
from graphs.families import complete, erdos_renyi, exponential, hypercube, path, random_regular, ring, star, torus
from graphs.laplacian import algebraic_connectivity, fiedler_vector, laplacian
from graphs.predict import (
    consensus_bound,
    contraction,
    effective_neighbours,
    kemeny_constant,
    mixing_time,
    predict_consensus,
    return_times,
    stationary,
)
from graphs.properties import Incompatible
from graphs.quadratics import (
    choco_gamma,
    isotropic_rate,
    quadratic_fixed_point,
    quadratic_noise,
    quadratic_rate,
    stability_limit,
)
from graphs.schedules import Schedule, as_schedule, cycle, one_peer_exponential, static
from graphs.spectral import extremes, gap, slem, spectrum
from graphs.topology import Topology, from_adjacency, from_data, from_edges, from_networkx
from graphs.weights import metropolis, uniform

__all__ = [
    "Incompatible",
    "Schedule",
    "Topology",
    "advise",
    "algebraic_connectivity",
    "as_schedule",
    "choco_gamma",
    "complete",
    "consensus_bound",
    "contraction",
    "cycle",
    "effective_neighbours",
    "erdos_renyi",
    "exponential",
    "extremes",
    "fiedler_vector",
    "from_adjacency",
    "from_data",
    "from_edges",
    "from_networkx",
    "gap",
    "hypercube",
    "isotropic_rate",
    "kemeny_constant",
    "laplacian",
    "metropolis",
    "mixing_time",
    "one_peer_exponential",
    "path",
    "predict_consensus",
    "quadratic_fixed_point",
    "quadratic_noise",
    "quadratic_rate",
    "random_regular",
    "return_times",
    "ring",
    "slem",
    "spectrum",
    "stability_limit",
    "star",
    "static",
    "stationary",
    "torus",
    "uniform",
]
