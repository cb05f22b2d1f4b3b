"""Large sparse solvers: both ends right on every shape of graph, or a refusal (graphs/solvers.py, graphs/cayley.py)."""

import math

import numpy as np
import pytest
import torch

import graphs
from graphs import cayley, solvers
from graphs.properties import csr
from graphs.topology import join


def relabelled(topology, seed=0):
    order = np.random.RandomState(seed).permutation(topology.n)
    return join(topology.n, order[topology.source.numpy()], order[topology.target.numpy()], directed=True)


SHAPES = {
    "ring": graphs.ring(700),
    "odd ring": graphs.ring(701),
    "path": graphs.path(650),
    "ladder": graphs.torus(5, 140),
    "tree": graphs.tree(600),
    "caterpillar": graphs.from_edges([(i, i + 1) for i in range(299)] + [(i, 300 + i) for i in range(300)]),
    "cliques": graphs.cliques(640, 40),
    "torus": graphs.torus(25, 27),
    "regular": graphs.random_regular(700, 3, seed=1),
    "random": graphs.erdos_renyi(600, 0.02, seed=2),
    "star": graphs.star(600),
    "scale-free": graphs.barabasi_albert(600, 2, seed=1),
    "watts-strogatz": graphs.watts_strogatz(600, 4, 0.02, seed=1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ends_against_the_dense_solver(shape):
    W = graphs.metropolis(relabelled(SHAPES[shape]))
    values = np.linalg.eigvalsh(W.to_dense().numpy())
    near, far = solvers.constant_free_ends(csr(W))
    assert abs(near / (1 - values[-2]) - 1) < 1e-6
    assert abs(far - (1 - values[0])) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_second_vector_against_the_dense_solver(shape):
    W = graphs.metropolis(relabelled(SHAPES[shape]))
    v = solvers.second_vector(csr(W))
    values = np.linalg.eigvalsh(W.to_dense().numpy())
    residual = np.linalg.norm(W.to_dense().numpy() @ v - values[-2] * v)
    assert residual < 1e-5 * (1 - values[-2]) + 1e-7
    assert abs(np.linalg.norm(v) - 1) < 1e-12


def test_narrow_bands_serve_long_graphs_and_lanczos_wide_ones():
    assert solvers._band(csr(graphs.metropolis(relabelled(graphs.ring(5000))))) is not None
    assert solvers._band(csr(graphs.metropolis(graphs.random_regular(5000, 4)))) is None


def test_an_eigenvalue_beyond_one_is_found_on_a_band_too():
    W = 1.5 * graphs.metropolis(relabelled(graphs.ring(400))).to_dense() - 0.5 * torch.eye(400, dtype=torch.float64)
    W[0, 0] += 1.2
    W[0, 1] -= 1.2
    W[1, 0] -= 1.2
    W[1, 1] += 1.2
    values = np.linalg.eigvalsh(W.numpy())
    assert values[-1] > 1.5
    near, far = solvers.constant_free_ends(csr(W))
    assert abs(near - (1 - values[-1])) < 1e-6
    assert abs(far - (1 - values[0])) < 1e-4


def test_no_convergence_is_an_error_that_says_what_is_known(monkeypatch):
    monkeypatch.setattr(solvers, "STEPS", 30)
    with pytest.raises(ValueError, match="has not converged in 30 steps.*All that is known is 1 − λ₂ ≤"):
        solvers.constant_free_ends(csr(graphs.metropolis(graphs.torus(60, 60))))


@pytest.mark.slow
def test_a_ring_of_a_million_under_any_numbers_keeps_its_digits():
    n = 1_000_000
    W = graphs.metropolis(relabelled(graphs.ring(n)))
    assert abs(graphs.gap(W) / (4 / 3 * math.sin(math.pi / n) ** 2) - 1) < 1e-3


@pytest.mark.parametrize(
    ("W", "shape"),
    [
        (graphs.metropolis(graphs.ring(12)), (12,)),
        (graphs.metropolis(graphs.torus(4, 6)), (4, 6)),
        (graphs.metropolis(graphs.torus(6, 4)), (6, 4)),
        (graphs.metropolis(graphs.torus(2, 16)), (2, 16)),
        (graphs.metropolis(graphs.torus(3, 4, 5)), (3, 4, 5)),
        (graphs.metropolis(graphs.hypercube(4)), (2, 2, 2, 2)),
        (graphs.uniform(graphs.exponential(16)), (16,)),
        (torch.full((100, 100), 0.01, dtype=torch.float64), (100,)),
        (graphs.metropolis(graphs.grid(4, 6)), None),
        (graphs.metropolis(graphs.random_regular(30, 4)), None),
    ],
)
def test_translation_symmetry_is_found(W, shape):
    assert cayley.group(W) == shape


def test_the_fast_transform_and_the_direct_sum_agree(monkeypatch):
    W = graphs.uniform(graphs.circulant(90, range(1, 30), directed=True))
    direct = cayley.deficits(W, (90,))
    monkeypatch.setattr(cayley, "MOST", 5)
    assert np.allclose(direct, cayley.deficits(W, (90,)), atol=1e-13)
    values = np.linalg.eigvals(W.to_dense().numpy())
    assert max(np.abs(1 - values - mu).min() for mu in direct) < 1e-10
