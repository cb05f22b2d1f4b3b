"""Who may talk to whom, and how fast that mixes: topologies, mixing matrices, schedules and their spectra.

>>> import graphs
>>> W = graphs.metropolis(graphs.torus(4, 4))
>>> round(graphs.slem(W), 6)
0.6
"""

from graphs.advise import (
    advise,
)
from graphs.ceca import ceca
from graphs.chance import (
    Matcha,
    epidemic,
    equidyn,
    matcha,
    matcha_plan,
    matchings,
    pairwise,
)
from graphs.convert import from_adjacency, from_data, from_edges, from_networkx
from graphs.draw import (
    draw,
    layout,
    plot_consensus,
    plot_spectrum,
)
from graphs.expanders import (
    chordal,
    margulis,
    ramanujan,
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
    relay_tree,
    ring,
    star,
    torus,
    tree,
)
from graphs.fdla import (
    fdla,
)
from graphs.files import (
    from_file,
)
from graphs.finite import (
    base_graph,
    p_peer_hypercube,
    phone_book,
    simple_base_graph,
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
from graphs.topology import Topology
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
from graphs.wrappers import (
    drop,
    every,
)

__all__ = [
    "Extremes",
    "Incompatible",
    "Matcha",
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
    "base_graph",
    "best_constant",
    "by_samples",
    "choco_gamma",
    "ceca",
    "chordal",
    "circulant",
    "cliques",
    "complete",
    "consensus_bound",
    "contraction",
    "cycle",
    "davis",
    "double_tree",
    "draw",
    "drop",
    "effective_neighbours",
    "epidemic",
    "equidyn",
    "equistatic",
    "equistatic_weights",
    "erdos_renyi",
    "every",
    "exponential",
    "extremes",
    "fdla",
    "fiedler_vector",
    "florentine",
    "from_adjacency",
    "from_data",
    "from_edges",
    "from_file",
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
    "layout",
    "lazy",
    "les_miserables",
    "margulis",
    "matcha",
    "matcha_plan",
    "matchings",
    "max_degree",
    "metropolis",
    "mixing_time",
    "nsfnet",
    "one_peer_exponential",
    "over_relaxed",
    "p_peer_hypercube",
    "pairwise",
    "path",
    "phone_book",
    "plot_consensus",
    "plot_spectrum",
    "predict_consensus",
    "pull",
    "push",
    "quadratic_fixed_point",
    "quadratic_noise",
    "quadratic_rate",
    "ramanujan",
    "random_regular",
    "real",
    "real_names",
    "return_times",
    "ring",
    "simple_base_graph",
    "sinkhorn",
    "slem",
    "spectrum",
    "stability_limit",
    "star",
    "static",
    "stationary",
    "stochastic_block",
    "torus",
    "relay_tree",
    "tree",
    "uniform",
    "watts_strogatz",
]
