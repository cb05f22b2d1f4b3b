"""Families: every graph against its definition, its degrees, and networkx (graphs/families.py)."""

import math
import time

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    barbell,
    chordal,
    circulant,
    cliques,
    complete,
    davis,
    double_tree,
    exponential,
    florentine,
    from_networkx,
    grid,
    hypercube,
    karate,
    les_miserables,
    margulis,
    metropolis,
    path,
    ramanujan,
    random_regular,
    ring,
    slem,
    star,
    torus,
    tree,
)

FAMILIES = [ring, path, star, complete, exponential, tree, double_tree, barbell]


@pytest.mark.parametrize(
    "family", [*FAMILIES, lambda n: ring(n, directed=True), lambda n: exponential(n, directed=False)]
)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 33])
def test_n_workers_connected_and_without_surprises(family, n):
    t = family(n)
    assert t.n == n
    assert t.connected
    assert t.messages <= n * (n - 1)
    if n == 2:
        assert t.edge_index.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("n", [3, 4, 7, 16])
def test_against_networkx(n):
    assert ring(n) == from_networkx(nx.cycle_graph(n))
    assert path(n) == from_networkx(nx.path_graph(n))
    assert star(n) == from_networkx(nx.star_graph(n - 1))
    assert complete(n) == from_networkx(nx.complete_graph(n))
    assert ring(n, directed=True) == from_networkx(nx.cycle_graph(n, create_using=nx.DiGraph))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_torus_degrees(a, b, c):
    def ends(side):
        return min(side - 1, 2)

    t = torus(a, b, c)
    assert t.n == a * b * c
    assert set(t.degree.tolist()) == {ends(a) + ends(b) + ends(c)}
    assert t.connected
    assert torus(a, b).messages == a * b * (ends(a) + ends(b))


def test_torus_is_the_product_of_rings():
    product = nx.cartesian_product(nx.cycle_graph(3), nx.cycle_graph(5))
    names = {node: node[0] * 5 + node[1] for node in product}
    assert torus(3, 5) == from_networkx(nx.relabel_nodes(product, names))
    assert torus(7) == ring(7)
    assert torus(2, 2) == hypercube(2)
    assert torus(4, 4).diameter == 4


def test_torus_by_n_is_nearly_square():
    assert torus(n=36) == torus(6, 6)
    assert torus(n=32) == torus(4, 8)
    assert torus(n=6) == torus(2, 3)
    assert torus(n=1).n == 1


@pytest.mark.parametrize("n", [2, 3, 7, 31])
def test_torus_of_a_prime_is_refused_in_one_paragraph(n):
    with pytest.raises(ValueError, match=f"n is {n}") as caught:
        torus(n=n)
    message = str(caught.value)
    assert "\n" not in message
    assert f"ring({n})" in message
    assert "a×b" in message
    torus(n=int(message.split("such as ")[1].split(")")[0]))


def test_hypercube():
    for m in range(6):
        t = hypercube(m)
        assert t.n == 2**m
        assert t.diameter == m
        assert set(t.degree.tolist()) == {m}
    assert hypercube(4) == hypercube(n=16)
    for n in (3, 5, 6, 12):  # GRAPH-20
        with pytest.raises(ValueError, match="power of two"):
            hypercube(n=n)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 9, 16, 33])
def test_exponential(n):
    tau = math.ceil(math.log2(n))
    t = exponential(n)
    assert set(t.out_degree.tolist()) == set(t.in_degree.tolist()) == {tau}
    assert t.directed == (n > 3)  # with three workers +1 and +2 are each other's reverse
    assert sorted(t.target[t.source == 0].tolist()) == sorted(2**k for k in range(tau))
    both = exponential(n, directed=False)
    assert not both.directed
    assert set(both.neighbours(0)) == {s * 2**k % n for k in range(tau) for s in (1, -1)}


@pytest.mark.parametrize("make", [ring, path, star, complete, exponential])
@pytest.mark.parametrize("n", [0, -1, 2.0, "3", True, None])
def test_a_bad_n_is_named(make, n):
    with pytest.raises(ValueError, match="n is"):
        make(n)


def test_a_hundred_thousand_workers_at_once():
    start = time.process_time()
    for make in (ring, path, star, exponential):
        assert make(100_000).n == 100_000
    assert torus(250, 400).n == hypercube(16).n + 34464
    assert random_regular(100_000, 4).connected
    assert time.process_time() - start < 10


def test_grids_trees_and_cliques_against_networkx():
    for a, b in [(1, 5), (2, 3), (4, 4), (3, 7)]:
        assert grid(a, b) == from_networkx(nx.convert_node_labels_to_integers(nx.grid_2d_graph(a, b)))
    assert grid(n=12) == grid(3, 4)
    assert grid(2, 3, 4).n == 24
    for k, h in [(2, 3), (3, 2), (1, 4)]:
        balanced = nx.balanced_tree(k, h)
        assert tree(balanced.number_of_nodes(), k) == from_networkx(balanced)
    assert barbell(8) == from_networkx(nx.barbell_graph(4, 0))
    assert cliques(10, 1) == complete(10)
    assert cliques(7, 7) == path(7)
    assert circulant(9, [1, 3]) == from_networkx(nx.circulant_graph(9, [1, 3]))
    with pytest.raises(ValueError, match="message to oneself"):
        circulant(4, [4])
    with pytest.raises(ValueError, match="every clique needs a worker"):
        cliques(3, 4)
    with pytest.raises(ValueError, match="n is 7"):
        grid(n=7)


def test_double_tree_is_two_trees_on_the_same_workers():
    t = double_tree(12)
    one = set(map(tuple, tree(12).edge_index.T.tolist()))
    assert set(map(tuple, t.edge_index.T.tolist())) == one | {(11 - a, 11 - b) for a, b in one}


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_margulis_against_networkx(m):
    multigraph = nx.margulis_gabber_galil_graph(m)
    simple = nx.Graph((a[0] * m + a[1], b[0] * m + b[1]) for a, b in multigraph.edges() if a != b)
    simple.add_nodes_from(range(m * m))
    assert margulis(m * m) == from_networkx(simple)
    with pytest.raises(ValueError, match="needs a square"):
        margulis(m * m + 1)


def test_expanders_keep_their_gap():
    assert slem(metropolis(margulis(2500))) < 0.95
    assert slem(metropolis(chordal(2003))) < 0.985
    assert slem(metropolis(chordal(20_011))) < 0.985
    assert chordal(2).n == 2
    with pytest.raises(ValueError, match="prime number of workers, such as 17"):
        chordal(15)


@pytest.mark.parametrize("n", [7, 11, 13, 17, 19, 29, 31])
def test_chords_that_coincide_leave_the_rows_whole(n):  # ChocoSGD's expander summed to 2/3 for n = ±1 mod 5
    W = metropolis(chordal(n)).to_dense()
    assert float((W.sum(1) - 1).abs().max()) < 1e-14


def test_social_graphs_are_unweighted():
    for make, n, edges in [(karate, 34, 78), (davis, 32, 89), (florentine, 15, 20), (les_miserables, 77, 254)]:
        assert (make().n, make().messages // 2) == (n, edges)
        assert slem(metropolis(make())) < 1
        assert len(make().names or range(n)) == n


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [ring, path, star, tree, double_tree, lambda n: torus(n=n), lambda n: grid(n=n), margulis]
)
def test_a_million_workers_within_seconds(make):
    start = time.process_time()  # the machine may be busy with other things
    assert metropolis(make(1_000_000)).shape == (1_000_000, 1_000_000)
    assert time.process_time() - start < 15


@pytest.mark.parametrize(("p", "q", "n"), [(13, 5, 120), (17, 13, 1092)])
def test_ramanujan_graphs_are(p, q, n):
    t = ramanujan(p, q)
    assert (t.n, t.connected) == (n, True)
    assert set(t.degree.tolist()) == {p + 1}
    values = nx.adjacency_spectrum(t.to_networkx()).real if n < 500 else None
    if values is not None:
        assert max(abs(v) for v in values if abs(v) < p + 1 - 1e-6) <= 2 * math.sqrt(p) + 1e-9
    else:
        assert slem(metropolis(t)) <= (1 + 2 * math.sqrt(p)) / (p + 2)


def test_ramanujan_errors():
    with pytest.raises(ValueError, match="both 1 mod 4"):
        ramanujan(5, 7)
    with pytest.raises(ValueError, match="too small for p = 29"):
        ramanujan(29, 5)
