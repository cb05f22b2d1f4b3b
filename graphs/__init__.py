"""Who may talk to whom, and how fast that mixes: topologies, mixing matrices, schedules and their spectra.

>>> import graphs
>>> W = graphs.metropolis(graphs.torus(4, 4))
>>> round(graphs.slem(W), 6)
0.6
"""

from graphs.advise import (
    advise,
)
from graphs.expanders import (
    chordal,
    margulis,
)
from graphs.families import (
    barbell,
    circulant,
    cliques,
    complete,
    double_tree,
    exponential,
    grid,
    hypercube,
    path,
    ring,
    star,
    torus,
    tree,
)
from graphs.fdla import (
    fdla,
)
from graphs.laplacian import (
    algebraic_connectivity,
    fiedler_vector,
    laplacian,
)
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
from graphs.properties import (
    Incompatible,
)
from graphs.quadratics import (
    Noise,
    choco_gamma,
    isotropic_rate,
    quadratic_fixed_point,
    quadratic_noise,
    quadratic_rate,
    stability_limit,
)
from graphs.real import (
    abilene,
    arpanet,
    geant,
    germany50,
    nsfnet,
    real,
    real_names,
)
from graphs.schedules import (
    Schedule,
    as_schedule,
    cycle,
    one_peer_exponential,
    static,
)
from graphs.seeded import (
    barabasi_albert,
    equistatic,
    equistatic_weights,
    erdos_renyi,
    geometric,
    random_regular,
    stochastic_block,
    watts_strogatz,
)
from graphs.social import (
    davis,
    florentine,
    karate,
    les_miserables,
)
from graphs.spectral import (
    Extremes,
    extremes,
    gap,
    slem,
    spectrum,
)
from graphs.topology import (
    Topology,
    from_adjacency,
    from_data,
    from_edges,
    from_networkx,
)
from graphs.weights import (
    best_constant,
    by_samples,
    lazy,
    max_degree,
    metropolis,
    over_relaxed,
    pull,
    push,
    sinkhorn,
    uniform,
)

__all__ = [
    "Extremes",
    "Incompatible",
    "Noise",
    "Schedule",
    "Topology",
    "abilene",
    "advise",
    "algebraic_connectivity",
    "arpanet",
    "as_schedule",
    "barabasi_albert",
    "barbell",
    "best_constant",
    "by_samples",
    "choco_gamma",
    "chordal",
    "circulant",
    "cliques",
    "complete",
    "consensus_bound",
    "contraction",
    "cycle",
    "davis",
    "double_tree",
    "effective_neighbours",
    "equistatic",
    "equistatic_weights",
    "erdos_renyi",
    "exponential",
    "extremes",
    "fdla",
    "fiedler_vector",
    "florentine",
    "from_adjacency",
    "from_data",
    "from_edges",
    "from_networkx",
    "gap",
    "geant",
    "geometric",
    "germany50",
    "grid",
    "hypercube",
    "isotropic_rate",
    "karate",
    "kemeny_constant",
    "laplacian",
    "lazy",
    "les_miserables",
    "margulis",
    "max_degree",
    "metropolis",
    "mixing_time",
    "nsfnet",
    "one_peer_exponential",
    "over_relaxed",
    "path",
    "predict_consensus",
    "pull",
    "push",
    "quadratic_fixed_point",
    "quadratic_noise",
    "quadratic_rate",
    "random_regular",
    "real",
    "real_names",
    "return_times",
    "ring",
    "sinkhorn",
    "slem",
    "spectrum",
    "stability_limit",
    "star",
    "static",
    "stationary",
    "stochastic_block",
    "torus",
    "tree",
    "uniform",
    "watts_strogatz",
]
