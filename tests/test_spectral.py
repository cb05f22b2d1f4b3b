"""Spectra: closed forms, published numbers, and the cases in which eigensolvers lie (graphs/spectral.py)."""

import math
import time
import warnings

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Incompatible,
    complete,
    erdos_renyi,
    exponential,
    from_edges,
    from_networkx,
    gap,
    hypercube,
    metropolis,
    one_peer_exponential,
    path,
    random_regular,
    ring,
    slem,
    star,
    torus,
    uniform,
)
from graphs import spectral as tools


def nx_slem(graph, **options):
    return slem(metropolis(from_networkx(graph), **options))


def brute(W):
    values = np.linalg.eigvals(np.asarray(W.to_dense()))
    return float(np.sort(np.abs(np.delete(values, np.abs(values - 1).argmin())))[-1]) if len(values) > 1 else 0.0


TABLE = [  # algorithms.md 5.3
    *[(f"ring {n}", ring(n), v) for n, v in {4: 0.333333, 5: 0.539345, 6: 0.666667, 7: 0.748993, 8: 0.804738}.items()],
    *[
        (f"ring {n}", ring(n), v)
        for n, v in {9: 0.844030, 16: 0.949253, 25: 0.979055, 32: 0.987190, 64: 0.996790}.items()
    ],
    *[(f"path {n}", path(n), v) for n, v in {8: 0.949253, 16: 0.987190, 32: 0.996790}.items()],
    *[(f"star {n}", star(n), v) for n, v in {8: 0.875, 16: 0.9375, 32: 0.96875, 40: 39 / 41 * 0 + 0.975}.items()],
    *[
        (f"torus {a}x{b}", torus(a, b), v)
        for (a, b), v in {
            (3, 3): 0.4,
            (4, 4): 0.6,
            (5, 5): 0.723607,
            (4, 8): 0.882843,
            (8, 8): 0.882843,
            (2, 16): 0.961940,
        }.items()
    ],
    *[(f"hypercube {n}", hypercube(n=n), v) for n, v in {4: 0.333333, 8: 0.5, 16: 0.6, 32: 0.666667}.items()],
]
EXPONENTIAL = {4: 0.333333, 5: 0.25, 6: 0.5, 7: 0.353553, 8: 0.5, 9: 0.441787, 12: 0.6, 16: 0.6, 32: 0.666667}
EXPONENTIAL |= {33: 0.607800, 64: 0.714286, 100: 0.75, 300: 0.8}


@pytest.mark.parametrize(("topology", "value"), [case[1:] for case in TABLE], ids=[case[0] for case in TABLE])
def test_published_slem(topology, value):
    assert abs(slem(metropolis(topology)) - value) < 5.1e-7


@pytest.mark.parametrize(("n", "value"), EXPONENTIAL.items())
def test_published_slem_of_the_exponential_graph(n, value):
    W = uniform(exponential(n))
    assert abs(slem(W) - value) < 5.1e-7
    # a normal matrix: its contraction in the 2-norm is the SLEM
    assert abs(float(torch.linalg.matrix_norm(W.to_dense() - 1 / n, 2)) - value) < 5.1e-7


@pytest.mark.parametrize(
    ("graph", "value"),
    [
        (nx.grid_2d_graph(4, 4), 0.868641),
        (nx.grid_2d_graph(5, 5), 0.916213),
        (nx.grid_2d_graph(8, 8), 0.967705),
        (nx.grid_2d_graph(8, 5), 0.966548),
        (nx.random_regular_graph(3, 32, seed=0), 0.916821),
        (nx.random_regular_graph(3, 32, seed=1), 0.930945),
        (nx.random_regular_graph(3, 32, seed=2), 0.936540),
        (nx.erdos_renyi_graph(32, 0.2, seed=0), 0.917150),
        (nx.barabasi_albert_graph(32, 2, seed=0), 0.934395),
        (nx.connected_watts_strogatz_graph(32, 4, 0.1, seed=0), 0.963962),
        (nx.connected_watts_strogatz_graph(32, 4, 0.5, seed=0), 0.887176),
        (nx.petersen_graph(), 0.5),
        (nx.dodecahedral_graph(), 0.809017),
        (nx.davis_southern_women_graph(), 1 - 0.0820975),
    ],
)
def test_published_slem_of_networkx_graphs(graph, value):
    assert abs(nx_slem(graph) - value) < 5.1e-7


def test_davis_without_self_term():
    assert abs(nx_slem(nx.davis_southern_women_graph(), self_term=False) - 0.909666) < 5.1e-7


def test_ring_of_25_has_the_gap_of_the_literature():
    assert abs(gap(metropolis(ring(25))) - 0.0209446) < 5e-8
    assert abs((1 + 2 * math.cos(2 * math.pi / 25)) / 3 - slem(metropolis(ring(25)))) < 1e-14


@pytest.mark.parametrize("n", [3, 4, 5, 7, 12, 30])
def test_closed_forms(n):
    angle = math.pi / n
    assert abs(slem(uniform(ring(n, directed=True))) - math.cos(angle)) < 1e-13
    largest_ring = max(abs(1 + 2 * math.cos(2 * angle * k)) / 3 for k in range(1, n))
    assert abs(slem(metropolis(ring(n))) - largest_ring) < 1e-13
    largest_path = max(abs(1 - 2 / 3 * (1 - math.cos(angle * k))) for k in range(1, n))
    assert abs(slem(metropolis(path(n))) - largest_path) < 1e-13
    assert abs(slem(metropolis(star(n))) - (1 - 1 / n)) < 1e-13
    assert slem(metropolis(complete(n))) < 1e-13
    bell = from_edges(
        [(i, j) for i in range(n) for j in range(i)]
        + [(n + i, n + j) for i in range(n) for j in range(i)]
        + [(n - 1, n)]
    )
    assert abs(slem(metropolis(bell)) - (n + math.sqrt(n * n + 4 * (n - 1))) / (2 * (n + 1))) < 1e-13


@pytest.mark.parametrize("m", range(1, 8))
def test_hypercube_closed_form(m):
    assert abs(slem(metropolis(hypercube(m))) - abs(m - 1) / (m + 1)) < 1e-13


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=9), st.sampled_from([(8,), (2, 4), (2, 2, 2), (3, 3), (9,), (2, 3)])
)
def test_translation_invariant_matrices_against_the_dense_solver(weights, shape):
    n = math.prod(shape)
    row = np.resize(np.array(weights) + 1e-3, n)
    row = row / row.sum()
    digits = np.stack(np.unravel_index(np.arange(n), shape))
    offset = (digits[:, None, :] - digits[:, :, None]) % np.array(shape)[:, None, None]
    W = row[np.ravel_multi_index(tuple(offset), shape)]
    assert abs(slem(W) - brute(torch.tensor(W))) < 1e-7


@given(st.integers(2, 14), st.floats(0.2, 1), st.integers(0, 10**6))
def test_undirected_graphs_against_the_dense_solver(n, p, seed):
    t = erdos_renyi(n, p, seed, allow_disconnected=True)
    W = metropolis(t)
    assert abs(slem(W) - brute(W)) < 1e-10
    if not t.connected:
        assert slem(W) == 1
        assert gap(W) == 0


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_directed_walks_against_the_dense_solver(n, seed):
    random = np.random.RandomState(seed)
    A = (random.rand(n, n) < 0.4).astype(float)
    A[A.sum(1) == 0, 0] = 1
    W = torch.tensor(A / A.sum(1, keepdims=True))
    assert abs(slem(W) - brute(W)) < 1e-6  # defective eigenvalues lose digits in the dense solver
    assert abs(slem(W.T.contiguous()) - slem(W)) < 1e-6


def test_one_and_two_workers():
    for rule in (metropolis, uniform):
        assert gap(rule(ring(1))) == 1
        assert slem(rule(ring(1))) == 0
        assert gap(rule(ring(2))) == 1
    assert gap(torch.eye(2)) == 0
    assert slem(torch.tensor([[0.0, 1.0], [1.0, 0.0]])) == 1


def test_identity_and_mean():  # SPEC-09
    for n in (2, 5, 40, 2000):
        assert gap(torch.eye(n).to_sparse()) == 0
    for n in (2, 5, 40):
        assert abs(gap(torch.full((n, n), 1 / n)) - 1) < 1e-6
        assert abs(gap(torch.full((n, n), 1 / n, dtype=torch.float64)) - 1) < 1e-13


def test_disconnected_is_exactly_zero():
    big = from_networkx(
        nx.disjoint_union(nx.random_regular_graph(4, 2000, seed=1), nx.random_regular_graph(4, 2000, seed=2))
    )
    assert gap(metropolis(big)) == 0


def test_bipartite_without_self_weight_is_exactly_zero():  # SPEC-15
    assert slem(metropolis(ring(4), self_term=False)) == 1
    assert slem(uniform(ring(6, directed=True)) * 2 - torch.eye(6, dtype=torch.float64).to_sparse()) == 1
    assert abs(slem(metropolis(ring(5), self_term=False)) - math.cos(math.pi / 5)) < 1e-13


def test_directed_ring_without_self_weight_is_periodic():  # SPEC-14
    shift = torch.roll(torch.eye(4), 1, 0)
    assert gap(shift) == 0
    chain = torch.tensor([[1.0, 0], [0.5, 0.5]])
    assert gap(chain) == 0.5  # not strongly connected, one closed class: its modulus is a true number


def test_rounding_asymmetry_keeps_the_symmetric_solver():  # SPEC-16
    random = np.random.RandomState(0)
    W = metropolis(erdos_renyi(60, 0.1, seed=1)).to_dense()
    noisy = W + torch.tensor(random.uniform(-1e-8, 1e-8, (60, 60)))
    noisy -= torch.diag(noisy.sum(1) - 1)
    assert abs(slem(noisy) - slem(W)) < 1e-6
    assert isinstance(slem(noisy), float)


def test_small_and_large_never_reach_the_solver_limits():  # SPEC-10, SPEC-08
    for n in (2, 3, 4, 5):
        assert abs(slem(metropolis(ring(n))) - brute(metropolis(ring(n)))) < 1e-13
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert abs(slem(metropolis(ring(200))) - (1 + 2 * math.cos(2 * math.pi / 200)) / 3) < 1e-12


def test_without_an_eigenvalue_one_there_is_no_gap():
    with pytest.raises(Incompatible, match="row 0 of W sums to 2, not 1"):
        gap(torch.eye(3) * 2)
    assert 0 < gap(uniform(star(5)).t()) < 1  # column stochastic is fine


def test_a_topology_or_a_schedule_is_no_matrix():
    with pytest.raises(ValueError, match=r"use graphs.metropolis\(topology\)"):
        slem(ring(4))
    with pytest.raises(ValueError, match="graphs.contraction"):
        gap(one_peer_exponential(4))


def test_negative_weights_can_diverge():
    W = torch.tensor([[1.5, -0.5], [-0.5, 1.5]])
    assert gap(W) == pytest.approx(-1)


@pytest.mark.parametrize("n", [2000, 10_000, 100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_rings_keep_their_relative_digits(n):  # SPEC-05
    truth = 4 / 3 * math.sin(math.pi / n) ** 2
    start = time.process_time()
    assert abs(gap(metropolis(ring(n))) / truth - 1) < 1e-9
    assert time.process_time() - start < 20


@pytest.mark.parametrize("n", [2000, 10_000, 100_000])
def test_paths_keep_their_relative_digits(n):
    truth = 4 / 3 * math.sin(math.pi / (2 * n)) ** 2
    assert abs(gap(metropolis(path(n))) / truth - 1) < 1e-3


def relabelled(t, seed=0):
    order = np.random.RandomState(seed).permutation(t.n)
    return from_edges(order[t.edge_index.T.numpy()], t.n, directed=True)


@pytest.mark.parametrize("n", [2000, 10_000])
def test_a_relabelled_ring_goes_through_shift_and_invert(n):
    truth = 4 / 3 * math.sin(math.pi / n) ** 2
    assert abs(gap(metropolis(relabelled(ring(n)))) / truth - 1) < 1e-3


def test_a_relabelled_torus_goes_through_lanczos():
    W = metropolis(torus(50, 60))
    assert abs(gap(metropolis(relabelled(torus(50, 60)))) - gap(W)) < 1e-9


def test_lanczos_agrees_with_the_dense_solver(monkeypatch):
    monkeypatch.setattr(tools, "DENSE", 100)
    for t in (random_regular(600, 4, seed=3), erdos_renyi(600, 0.02, seed=3)):
        W = metropolis(t)
        values = np.linalg.eigvalsh(W.to_dense().numpy())
        assert abs(slem(W) - max(values[-2], -values[0])) < 1e-9


def test_both_ends_are_looked_at_beyond_the_dense_solver(monkeypatch):
    monkeypatch.setattr(tools, "DENSE", 100)
    t = from_networkx(nx.random_regular_graph(5, 600, seed=0))
    W = 1.6 * metropolis(t) - 0.6 * torch.eye(600, dtype=torch.float64).to_sparse()
    values = np.linalg.eigvalsh(W.to_dense().numpy())
    assert -values[0] > values[-2]
    assert abs(slem(W) + values[0]) < 1e-9


def test_directed_beyond_the_dense_solver(monkeypatch):
    i = np.arange(400)
    far = (i * 7 + 3) % 401 % 400  # irregular, so that no symmetry helps
    pairs = {(a, b) for a, b in zip([*i, *i], [*((i + 1) % 400), *far]) if a != b}
    t = from_edges(sorted((int(a), int(b)) for a, b in pairs), directed=True)
    W = uniform(t)
    dense = slem(W)
    monkeypatch.setattr(tools, "DENSE", 100)
    assert abs(slem(W) - dense) < 1e-8


def test_two_runs_give_the_same_bits():  # SPEC-12
    W = metropolis(random_regular(3000, 4, seed=1))
    assert gap(W) == gap(W)


def test_one_round_of_one_peer_has_no_gap_of_its_own():
    s = one_peer_exponential(8)
    assert slem(s(0)) < 1
    assert slem(s(1)) == 1
    assert slem(s(2)) == 1
