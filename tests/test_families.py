"""Families: every graph against its definition, its degrees, and networkx (graphs/families.py)."""

import math
import time

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import complete, erdos_renyi, exponential, from_networkx, hypercube, path, random_regular, ring, star, torus

FAMILIES = [ring, path, star, complete, exponential]


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


@pytest.mark.parametrize("n", range(1, 13))
def test_random_regular_for_every_degree(n):
    for degree in range(n):
        if n * degree % 2:
            with pytest.raises(ValueError, match="even"):
                random_regular(n, degree)
            continue
        t = random_regular(n, degree, seed=n, allow_disconnected=True)
        assert set(t.degree.tolist()) == {degree}
        assert t == random_regular(n, degree, seed=n, allow_disconnected=True)


def test_random_regular_is_the_same_graph_everywhere():
    assert random_regular(32, 3, seed=0).digest.startswith("6ce6409256dfdc11")
    assert random_regular(32, 3, seed=0) != random_regular(32, 3, seed=1)


def test_random_regular_gives_up_with_a_count():  # GRAPH-07
    with pytest.raises(ValueError, match="all 20 draws .at best 3 components"):
        random_regular(6, 1, tries=20)
    with pytest.raises(ValueError, match="smaller than n"):
        random_regular(4, 4)


def test_erdos_renyi_is_redrawn_until_connected(caplog):  # GRAPH-08
    caplog.set_level("INFO", logger="graphs.families")
    free = [erdos_renyi(8, 0.2, seed, allow_disconnected=True) for seed in range(20)]
    split = [t for t in free if not t.connected]
    assert len(split) > 7
    assert all(erdos_renyi(8, 0.2, seed).connected for seed in range(20))
    assert sum("first connected one" in record.message for record in caplog.records) == len(split)
    with pytest.raises(ValueError, match="disconnected in all 5 draws .* ln n / n"):
        erdos_renyi(50, 0.001, tries=5)


def test_erdos_renyi_has_the_right_distribution():
    assert erdos_renyi(6, 1.0) == complete(6)
    assert erdos_renyi(6, 0.0, allow_disconnected=True).messages == 0
    assert erdos_renyi(1, 0.5).n == 1
    n, p, draws = 12, 0.3, 400
    present = torch.zeros(n, n)
    for seed in range(draws):
        t = erdos_renyi(n, p, seed, allow_disconnected=True)
        present[t.source, t.target] += 1
    off = present[~torch.eye(n, dtype=torch.bool)] / draws
    assert abs(float(off.mean()) - p) < 4 * math.sqrt(p * (1 - p) / (draws * n * (n - 1) / 2))
    assert float((off - p).abs().max()) < 5 * math.sqrt(p * (1 - p) / draws)
    with pytest.raises(ValueError, match="between 0 and 1"):
        erdos_renyi(4, 1.5)


@pytest.mark.parametrize("make", [ring, path, star, complete, exponential])
@pytest.mark.parametrize("n", [0, -1, 2.0, "3", True, None])
def test_a_bad_n_is_named(make, n):
    with pytest.raises(ValueError, match="n is"):
        make(n)


def test_a_hundred_thousand_workers_at_once():
    start = time.perf_counter()
    for make in (ring, path, star, exponential):
        assert make(100_000).n == 100_000
    assert torus(250, 400).n == hypercube(16).n + 34464
    assert random_regular(100_000, 4).connected
    assert time.perf_counter() - start < 10
