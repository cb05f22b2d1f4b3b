"""Four small social networks of the literature, unweighted: karate club, Southern women, Florentine families, Les Misérables."""

from graphs.convert import from_networkx
from graphs.topology import Topology

__all__ = ["davis", "florentine", "karate", "les_miserables"]


def karate() -> Topology:
    """Zachary's karate club (1977): 34 members, 78 friendships.

    >>> karate().n, karate().messages // 2
    (34, 78)
    """
    import networkx as nx

    return from_networkx(nx.karate_club_graph())


def davis() -> Topology:
    """Davis's Southern women (1941): 18 women and the 14 events they attended, bipartite, 89 edges; CHOCO's social graph.

    >>> from graphs import gap, metropolis
    >>> round(gap(metropolis(davis())), 7)
    0.0820975
    """
    import networkx as nx

    return from_networkx(nx.davis_southern_women_graph())


def florentine() -> Topology:
    """Marriages of 15 Florentine families (Padgett, Ansell 1993), 20 edges.

    >>> florentine().names[int(florentine().degree.argmax())]
    'Medici'
    """
    import networkx as nx

    return from_networkx(nx.florentine_families_graph())


def les_miserables() -> Topology:
    """Characters of Les Misérables that share a scene (Knuth 1993): 77 characters, 254 edges.

    >>> les_miserables().n, les_miserables().messages // 2
    (77, 254)
    """
    import networkx as nx

    return from_networkx(nx.les_miserables_graph())
