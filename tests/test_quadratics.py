"""Closed forms on quadratics against running them (graphs/quadratics.py), the Laplacian, and the advice."""

import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Incompatible,
    advise,
    algebraic_connectivity,
    choco_gamma,
    complete,
    exponential,
    extremes,
    fiedler_vector,
    from_edges,
    from_networkx,
    hypercube,
    isotropic_rate,
    laplacian,
    metropolis,
    path,
    quadratic_fixed_point,
    quadratic_noise,
    quadratic_rate,
    random_regular,
    ring,
    spectrum,
    stability_limit,
    star,
    torus,
    uniform,
)
from graphs.quadratics import _choco_rate


def one_round(W, x, b, eta, h, order):
    if order == "awc":
        return W @ x - eta * h * (x - b)
    if order == "atc":
        return W @ (x - eta * h * (x - b))
    p = W @ x
    return p - eta * h * (p - b)


@pytest.mark.parametrize("order", ["atc", "awc", "cta"])
@pytest.mark.parametrize("topology", [ring(8), star(6), path(5), torus(3, 4), ring(1), complete(3)])
def test_fixed_point_and_rate_are_where_the_rounds_go(topology, order):
    W, eta, h = metropolis(topology), 0.15, 1.3
    b = torch.tensor(np.random.RandomState(0).standard_normal((topology.n, 2)))
    x = quadratic_fixed_point(W, b, eta, h, order)
    assert torch.allclose(one_round(W, x, b, eta, h, order), x, atol=1e-13)
    assert torch.allclose(x.mean(0), b.mean(0), atol=1e-13)
    y = torch.tensor(np.random.RandomState(1).standard_normal(x.shape))
    for _ in range(400):
        y = y / y.norm()
        before, y = y, one_round(W, y, torch.zeros_like(y), eta, h, order)
    assert abs(float(y.norm() / before.norm()) - quadratic_rate(W, eta, h, order)) < 1e-6


def test_published_noise_floor():
    W = metropolis(ring(16))
    assert abs(quadratic_noise(W, 0.1).worker - 0.010131) < 5e-7
    assert abs(quadratic_noise(W, 0.1, order="awc").worker - 0.018030) < 5e-7
    assert abs(quadratic_noise(W, 0.1).mean - 0.003289) < 5e-7
    assert quadratic_noise(W, 0.7, order="awc").worker == math.inf


@pytest.mark.parametrize("order", ["atc", "awc", "cta"])
def test_noise_floor_solves_the_covariance_equation(order):
    W = metropolis(star(5)).to_dense()
    eta, h, s = 0.2, 1.0, 0.7
    n, eye = 5, torch.eye(5, dtype=torch.float64)
    A = W - eta * h * eye if order == "awc" else (1 - eta * h) * W
    B = eta * s * (W if order == "atc" else eye)
    C = torch.zeros(n, n, dtype=torch.float64)
    for _ in range(2000):
        C = A @ C @ A.T + B @ B.T
    noise = quadratic_noise(W, eta, h, s, order)
    assert abs(noise.worker - float(C.diagonal().mean())) < 1e-12
    assert abs(noise.mean - float(C.mean())) < 1e-12


POLYNOMIALS = {  # z² + p z + q of each mode l at e = ηh, algorithms.md 1.5 to 1.7
    "d2": lambda l, e: (-l * (2 - e), l * (1 - e)),
    "exact_diffusion": lambda l, e: (-(1 + l) / 2 * (2 - e), (1 + l) / 2 * (1 - e)),
    "extra": lambda l, e: (-(1 + l - e), (1 + l) / 2 - e),
    "tracking_diging": lambda l, e: (e - 2 * l, l * l - e),
    "tracking_atc": lambda l, e: (e * l * l - 2 * l, l * l - e * l * l),
    "tracking_mixed": lambda l, e: (e * l - 2 * l, l * l - e * l),
    "atc": lambda l, e: (-l * (1 - e), 0.0),
    "awc": lambda l, e: (-(l - e), 0.0),
}


@pytest.mark.parametrize("method", POLYNOMIALS)
@pytest.mark.parametrize("topology", [ring(16), ring(9), torus(2, 4), star(7), path(6), hypercube(3)])
def test_stability_limits_are_where_the_roots_leave_the_circle(method, topology):
    W = metropolis(topology)
    values = spectrum(W).tolist()

    def radius(e):
        return max(max(abs(np.roots([1, *POLYNOMIALS[method](l, e)]))) for l in values[1:])

    def optimum(e):  # the mean's own mode must not leave it either
        return max(abs(np.roots([1, *POLYNOMIALS[method](1.0, e)])))

    limit = stability_limit(W, method)
    if limit == 0:
        assert method == "d2"
        assert radius(1e-3) > 1 - 1e-3  # at best as slow as half the step
        return
    assert radius(limit * 0.99) < 1 + 1e-9
    assert optimum(limit * 0.99) < 1 + 1e-9
    assert max(radius(limit * 1.01), optimum(limit * 1.01)) > 1
    assert stability_limit(W, method, h=4.0) == limit / 4


def test_published_limits_of_the_even_ring():
    W = metropolis(ring(16))
    assert stability_limit(W, "awc") == pytest.approx(2 / 3)
    assert stability_limit(W, "extra") == pytest.approx(1.0)
    assert stability_limit(W, "tracking_diging") == pytest.approx(2 / 9)
    assert stability_limit(W, "tracking_atc") == pytest.approx(2)
    assert stability_limit(W, "d2") == 0
    assert stability_limit(metropolis(ring(9)), "d2") == 2
    with pytest.raises(ValueError, match="there are atc"):
        stability_limit(W, "adam")
    with pytest.raises(Incompatible, match="symmetric"):
        stability_limit(uniform(exponential(6)), "atc")


@pytest.mark.parametrize(
    ("topology", "eta", "rate"),
    [
        # the sheet's digits; its star and two cliques lie up to 1.5 % below the root of the sheet's own equation
        (ring(32), 0.0565, 0.0797),
        (torus(4, 8), 0.1035, 0.1392),
        (hypercube(5), 0.1231, 0.1585),
        (complete(32), 0.244275, 0.244275),
        (from_networkx(nx.barbell_graph(16, 0)), 0.1390, 0.144488),
        (star(32), 0.0240, 0.040003),
    ],
)
def test_published_rates_on_random_isotropic_quadratics(topology, eta, rate):
    W = metropolis(topology)
    assert abs(isotropic_rate(W, eta, 100) - rate) < 6e-5
    # the published step is the best one, to its digits
    assert isotropic_rate(W, eta, 100) > max(isotropic_rate(W, 1.05 * eta, 100), isotropic_rate(W, 0.95 * eta, 100))
    assert isotropic_rate(metropolis(ring(1)), 0.01, 100) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda W: quadratic_fixed_point(W, torch.ones(8), 0.1),
            r"b has shape \(8,\); it needs one optimum per worker",
        ),
        (lambda W: stability_limit(W, "atc", 0), "h is 0; a curvature is positive"),
        (lambda W: isotropic_rate(W, math.nan, 10), "eta is nan"),
        (lambda W: isotropic_rate(W, 0.1, 0), "ζ.* is 1 or more"),
    ],
)
def test_bad_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(metropolis(ring(4)))


def choco_gossip(W, gamma, share, rounds, seed=0, d=400):
    random = np.random.RandomState(seed)
    W, x = W.to_dense().numpy(), random.standard_normal((W.shape[0], d))
    hat = np.zeros_like(x)
    start = np.square(x - x.mean(0)).mean()
    for _ in range(rounds):
        hat += (random.rand(*x.shape) < share) * (x - hat)
        x += gamma * (W @ hat - hat)
    return np.square(x - x.mean(0)).mean() / start


def test_choco_gamma_is_near_the_best_and_below_the_cliff():
    W = metropolis(ring(25))
    gamma = choco_gamma(W, 0.05)
    here = choco_gossip(W, gamma, 0.05, 1000)
    assert here < 0.05
    assert here < choco_gossip(W, gamma / 3, 0.05, 1000)
    assert here < choco_gossip(W, gamma * 3, 0.05, 1000)
    mu = 1 - spectrum(W).numpy()
    mu[0] = 0
    # the cliff of rand-1 % at 0.016, algorithms.md 6.6
    assert _choco_rate(mu, 0.01, 0.0145) < 1 < _choco_rate(mu, 0.01, 0.0175)
    assert choco_gamma(W, 1.0) == 1
    assert choco_gamma(metropolis(ring(1)), 0.1) == 1
    with pytest.raises(ValueError, match="delta is 0"):
        choco_gamma(W, 0)


@pytest.mark.parametrize(
    "graph", [nx.path_graph(9), nx.cycle_graph(200), nx.star_graph(7), nx.karate_club_graph(), nx.complete_graph(5)]
)
def test_algebraic_connectivity_against_the_dense_solver(graph):  # SPEC-02
    values = np.linalg.eigvalsh(nx.laplacian_matrix(graph, weight=None).toarray().astype(float))
    assert abs(algebraic_connectivity(from_networkx(graph)) - values[1]) < 1e-10


def test_algebraic_connectivity_in_bounded_time():  # SPEC-01
    assert algebraic_connectivity(from_edges([(1, 2), (2, 3), (3, 4), (5, 3), (6, 2), (0, 1)])) > 0
    assert algebraic_connectivity(random_regular(100, 5)) > 0.5
    big = path(2000)
    assert abs(algebraic_connectivity(big) / (4 * math.sin(math.pi / 4000) ** 2) - 1) < 1e-6
    assert algebraic_connectivity(from_edges([(0, 1)], n=3)) == 0
    assert algebraic_connectivity(ring(1)) == 0
    with pytest.raises(Incompatible):
        algebraic_connectivity(ring(4, directed=True))


def test_laplacian_of_an_isolated_worker_is_a_zero_row():  # SPEC-18
    L = laplacian(from_edges([(0, 1), (1, 2)], n=4)).to_dense()
    assert L[3].tolist() == [0, 0, 0, 0]
    assert int((torch.linalg.eigvalsh(L).abs() < 1e-12).sum()) == 2


@given(st.integers(2, 20))
def test_fiedler_vector_is_the_same_twice_and_an_eigenvector(n):  # SPEC-12
    for t in (ring(n), path(n), star(n), complete(n)):
        v = fiedler_vector(t)
        value = algebraic_connectivity(t)
        assert torch.allclose(laplacian(t).to_dense() @ v, value * v, atol=1e-9)
        assert abs(float(v.norm()) - 1) < 1e-12
        assert abs(float(v.sum())) < 1e-9
        assert torch.equal(v, fiedler_vector(t))


def test_fiedler_vector_of_large_graphs_and_its_errors():
    v = fiedler_vector(path(4000))
    cosine = torch.cos(math.pi * (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    assert abs(abs(float(v @ cosine / cosine.norm())) - 1) < 1e-9
    with pytest.raises(ValueError, match="2 components of 3 workers"):
        fiedler_vector(from_edges([(0, 1)], n=3))


def test_extremes_name_the_one_that_dominates():
    assert extremes(metropolis(path(9))).dominant == "second"
    mesh = extremes(metropolis(from_networkx(nx.convert_node_labels_to_integers(nx.grid_2d_graph(2, 4)))))
    assert abs(mesh.last + 0.384) < 1e-3  # SPEC-21
    bipartite = extremes(metropolis(ring(4), self_term=False))
    assert bipartite.dominant == "last"
    assert bipartite.last == pytest.approx(-1)
    davis = extremes(metropolis(from_networkx(nx.davis_southern_women_graph())))
    assert abs(davis.second - 0.917902) < 5e-7
    assert abs(davis.last + 0.434279) < 5e-7
    without = extremes(metropolis(from_networkx(nx.davis_southern_women_graph()), self_term=False))
    assert abs(without.last + 0.608380) < 5e-7
    assert abs(extremes(metropolis(ring(9))).last + 0.293128) < 5e-7
    assert tuple(extremes(metropolis(ring(1)))) == (0.0, 0.0, "second")
    with pytest.raises(Incompatible):
        extremes(uniform(exponential(8)))


@given(st.integers(1, 12), st.integers(0, 99))
def test_spectrum_against_the_dense_solver(n, seed):
    for W in (metropolis(ring(n)), metropolis(star(n)), uniform(exponential(n)), uniform(ring(n, directed=True))):
        values, dense = spectrum(W), torch.linalg.eigvals(W.to_dense())
        assert len(values) == n
        # each has its partner
        distance = (values[:, None].to(torch.complex128) - dense[None, :]).abs()
        assert float(distance.min(0).values.max()) < 1e-7
        assert float(distance.min(1).values.max()) < 1e-7
        assert abs(complex(values.sum()) - complex(W.to_dense().trace())) < 1e-9


def test_spectrum_at_scale():
    assert len(spectrum(metropolis(ring(20_000)))) == 20_000
    with pytest.raises(ValueError, match="up to 5000"):
        spectrum(metropolis(star(6000)))


@pytest.mark.parametrize(
    ("W", "said"),
    [
        (metropolis(ring(1)), "1 worker"),
        (torch.eye(3), "strongly connected: no, 3 components"),
        (metropolis(ring(4), self_term=False), "aperiodic: no (bipartite)"),
        (uniform(ring(3, directed=True)) * 2 - torch.eye(3, dtype=torch.float64).to_sparse(), "period 3"),
        (uniform(star(5)), "worker 0 counts 1.92 times its share"),
        (uniform(star(5)).t(), "push-sum algorithms"),
        (uniform(exponential(8)), "CHOCO and D² need a symmetric W"),
        (metropolis(ring(9)), "D² and exact diffusion are safe"),
        (metropolis(ring(8)), "D² is not safe"),
        (torch.tensor([[1.5, -0.5], [-0.5, 1.5]]), "does not shrink but grows"),
    ],
)
def test_advice_says_what_matters(W, said):
    assert said in advise(W)
