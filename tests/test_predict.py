"""Predictions against running the thing: consensus, mixing times, effective neighbours, walks (graphs/predict.py)."""

import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Incompatible,
    Schedule,
    complete,
    consensus_bound,
    contraction,
    cycle,
    effective_neighbours,
    erdos_renyi,
    exponential,
    from_edges,
    from_networkx,
    hypercube,
    kemeny_constant,
    metropolis,
    mixing_time,
    one_peer_exponential,
    path,
    predict_consensus,
    return_times,
    ring,
    slem,
    star,
    static,
    stationary,
    torus,
    uniform,
)


def two_cliques(m):
    clique = [(i, j) for i in range(m) for j in range(i)]
    return from_edges([*clique, *((m + i, m + j) for i, j in clique), (m - 1, m)])


def relay_tree(n):
    return from_edges([(0, 1)] + [(w, c) for w in range(1, n) for c in (2 * w, 2 * w + 1) if c < n])


def test_published_trajectory():
    W, x = metropolis(ring(16)), torch.arange(16, dtype=torch.float64)
    curve = predict_consensus(W, x, 100)
    for t, value in {1: 14.8055556, 10: 4.680283131, 50: 0.0718947847, 100: 0.000393456031}.items():
        assert abs(float(curve[t]) / value - 1) < 1e-8
    for _ in range(10):
        x = W @ x
    assert abs(float(x[0]) - 6.787041271) < 1e-9


@given(st.integers(1, 10), st.floats(0.2, 1), st.integers(0, 999))
def test_prediction_equals_the_spectrum_and_stays_under_the_bound(n, p, seed):
    W = metropolis(erdos_renyi(n, p, seed, allow_disconnected=True))
    x = torch.tensor(np.random.RandomState(seed).standard_normal((n, 2)))
    curve, bound = predict_consensus(W, x, 12), consensus_bound(W, x, 12)
    values, vectors = torch.linalg.eigh(W.to_dense())
    inner = (vectors.T @ (x - x.mean(0))).square().sum(1)
    for t in range(13):
        assert abs(float(curve[t] - (values ** (2 * t) * inner).sum() / n)) < 1e-12
    assert bool((curve <= bound + 1e-12).all())


def test_small_distances_keep_their_digits():
    W, x = metropolis(ring(8)), torch.arange(8.0) + 1e6
    curve = predict_consensus(W, x, 400)
    assert abs(float(curve[400] / curve[399]) / slem(W) ** 2 - 1) < 1e-6
    assert float(curve[400]) < 1e-70
    with pytest.raises(ValueError, match="one row per worker"):
        predict_consensus(W, torch.ones(7), 3)


@pytest.mark.parametrize("eps", [0.5, 1e-1, 1e-3])
def test_mixing_time_is_the_first_power_that_is_close(eps):
    cases = [metropolis(ring(7)), metropolis(star(6)), uniform(exponential(6)), uniform(star(5)), uniform(star(5)).t()]
    directed = from_edges([(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)], directed=True)
    for W in [*cases, uniform(directed)]:
        A = W.to_dense().numpy()
        limit = np.linalg.matrix_power(A, 20_000)
        t = mixing_time(W, eps)
        assert np.linalg.norm(np.linalg.matrix_power(A, t) - limit, 2) <= eps * (1 + 1e-9)
        assert t == 1 or np.linalg.norm(np.linalg.matrix_power(A, t - 1) - limit, 2) > eps


def test_mixing_time_at_the_edges():
    assert mixing_time(metropolis(ring(1))) == 0
    assert mixing_time(metropolis(complete(5)), 1e-9) == 1
    assert mixing_time(torch.eye(3)) == math.inf
    with pytest.raises(ValueError, match="strictly between"):
        mixing_time(metropolis(ring(4)), 0)


def test_contraction_of_periods():
    assert contraction(metropolis(ring(16))) == slem(metropolis(ring(16)))
    assert contraction(one_peer_exponential(16)) == 0
    assert contraction(ring(1)) == 0
    s = one_peer_exponential(6)
    assert abs(contraction(s) ** 3 - 0.216506) < 1e-6  # commuting and normal: the product's norm is its SLEM
    halves = cycle([metropolis(from_edges([(0, 1), (2, 3)], 4)), metropolis(from_edges([(1, 2)], 4))])
    assert abs(contraction(halves) ** 2 - slem(halves.product())) < 1e-12


def test_contraction_of_a_random_schedule_is_measured_where_no_formula_is_known():
    def make(k):
        W = torch.eye(4, dtype=torch.float64)
        i, j = np.random.RandomState(k).permutation(4)[:2]
        W[[i, i, j, j], [i, j, i, j]] = 0.5
        return W

    # a random pair of the complete graph: ρ = 1 − λ₂(L)/(2m) = 1 − 4/12
    assert abs(contraction(Schedule(4, make, None, horizon=4000)) ** 2 - 2 / 3) < 0.03


TABLE = {  # algorithms.md 5.4, n = 32
    "ring": (ring(32), [3, 3.7197, 6.6321, 8.7814, 17.0755, 28.895]),
    "torus": (torus(4, 8), [5, 7.1159, 15.7391, 20.5018, 28.5406, 31.6094]),
    "tree": (relay_tree(32), [2.2261, 2.7409, 5.1477, 7.1217, 15.3898, 28.3355]),
    "two cliques": (two_cliques(16), [16.0525, 16.1828, 16.9906, 17.873, 22.3849, 29.9062]),
    "star": (star(32), [1.0976, 1.1627, 1.6736, 2.2889, 6.4379, 22.0577]),
}


@pytest.mark.parametrize("name", TABLE)
def test_published_effective_neighbours(name):
    topology, values = TABLE[name]
    for gamma, value in zip((0, 0.5, 0.9, 0.95, 0.99, 0.999), values):
        assert abs(effective_neighbours(metropolis(topology), gamma) - value) < 4e-5 * value


@given(st.integers(2, 8), st.floats(0, 0.99), st.integers(0, 999))
def test_effective_neighbours_of_any_matrix_against_the_series(n, gamma, seed):
    A = np.random.RandomState(seed).rand(n, n) ** 3 + 1e-3
    A /= A.sum(1, keepdims=True)
    C, P = np.zeros((n, n)), A.copy()
    for k in range(3000):
        C += gamma**k * P @ P.T
        P = P @ A
    expected = 1 / (1 - gamma) / np.mean(np.diag(C))
    assert abs(effective_neighbours(A, gamma) / expected - 1) < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predict_consensus(metropolis(ring(4)), torch.ones(4), -1), "rounds is -1"),
        (lambda: consensus_bound(metropolis(ring(4)), torch.ones(4), 1.5), "rounds is 1.5"),
        (lambda: return_times(metropolis(from_edges([(0, 1), (2, 3)]))), "several closed groups"),  # 2 each, not 4
        (lambda: predict_consensus(metropolis(ring(4)), torch.ones(8), 1), "one row per worker"),
    ],
)
def test_what_has_no_answer_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_effective_neighbours_at_the_edges():
    assert effective_neighbours(metropolis(ring(1)), 0.5) == pytest.approx(1)
    assert effective_neighbours(torch.eye(4), 0.9) == pytest.approx(1)
    assert effective_neighbours(metropolis(complete(7)), 0.3) == pytest.approx(7)
    assert effective_neighbours(uniform(hypercube(3)), 0) == pytest.approx(4)
    assert effective_neighbours(metropolis(ring(9)), 1 - 1e-9) == pytest.approx(9, rel=1e-6)
    assert effective_neighbours(torch.tensor([[1.2, -0.2], [-0.2, 1.2]]), 0.9) == 0  # noise grows
    with pytest.raises(ValueError, match="must lie in"):
        effective_neighbours(metropolis(ring(9)), 1.0)
    with pytest.raises(Incompatible, match="row 0"):
        effective_neighbours(uniform(star(5)).t(), 0.5)


@given(st.integers(2, 8), st.integers(0, 999))
def test_walks_against_their_definitions(n, seed):
    A = np.random.RandomState(seed).rand(n, n) + 0.01
    A /= A.sum(1, keepdims=True)
    pi = stationary(A).numpy()
    assert np.allclose(pi @ A, pi)
    assert abs(pi.sum() - 1) < 1e-12
    assert np.allclose(return_times(A), 1 / pi)
    # mean first passage times by linear equations
    M = np.zeros((n, n))
    for target in range(n):
        others = [i for i in range(n) if i != target]
        M[others, target] = np.linalg.solve(np.eye(n - 1) - A[np.ix_(others, others)], np.ones(n - 1))
    K = M @ pi
    assert np.allclose(K, K[0])
    assert abs(kemeny_constant(A) - K[0]) < 1e-8
    assert abs(kemeny_constant(torch.tensor(A).T) - K[0]) < 1e-8


def test_walks_of_graphs():
    g = nx.petersen_graph()
    W = nx.to_numpy_array(g) / 3
    assert abs(kemeny_constant(W) - nx.kemeny_constant(g)) < 1e-9
    assert kemeny_constant(torch.eye(3)) == math.inf
    assert kemeny_constant(metropolis(ring(1))) == 0
    assert stationary(metropolis(from_networkx(g))).tolist() == [0.1] * 10
    assert [round(float(p), 3) for p in stationary(uniform(star(5)))] == [0.385, 0.154, 0.154, 0.154, 0.154]
    assert torch.allclose(stationary(torch.tensor([[1.0, 0], [0.5, 0.5]])), torch.tensor([1.0, 0], dtype=torch.float64))
    lost = torch.tensor([[0.9, 0.1, 0, 0], [0.2, 0.8, 0, 0], [0, 0, 0.6, 0.4], [0, 0, 0.3, 0.7]])
    with pytest.raises(Incompatible, match="several closed groups"):
        stationary(lost)
    assert static(uniform(path(3))).row_stochastic
