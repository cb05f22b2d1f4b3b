"""Weight rules: stochastic, on the graph's edges, the numbers of the literature (graphs/weights.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import Incompatible, erdos_renyi, exponential, from_edges, metropolis, path, ring, star, torus, uniform
from graphs.properties import entries, offence


@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 1000))
def test_metropolis_is_symmetric_and_doubly_stochastic(n, p, seed):
    t = erdos_renyi(n, p, seed, allow_disconnected=True)
    W = metropolis(t)
    assert W.dtype == torch.float64
    assert W.is_sparse
    assert W.is_coalesced()
    assert offence(W, "symmetric") is None
    assert offence(W, "nonnegative") is None
    assert torch.equal(W.to_dense(), W.to_dense().T)
    assert (W.to_dense().sum(1) - 1).abs().max() < 1e-14
    degree = t.degree.double()
    assert bool((W.to_dense().diagonal() >= 1 / (1 + degree) - 1e-14).all())
    for i, j in t.edge_index.T.tolist():
        assert W[i, j].item() == 1 / (1 + max(degree[i], degree[j]).item())
    rows, columns, _ = entries(W)
    off = rows != columns
    assert sorted(zip(columns[off].tolist(), rows[off].tolist())) == list(map(tuple, t.edge_index.T.tolist()))


@given(st.integers(1, 12), st.booleans())
def test_uniform_on_circulants_is_doubly_stochastic(n, directed):
    W = uniform(exponential(n, directed))
    assert offence(W, "doubly_stochastic") is None


def test_uniform_is_the_receivers_mean():
    t = from_edges([(0, 1), (2, 1), (1, 2)], directed=True)  # 1 hears 0 and 2, 2 hears 1, 0 hears nobody
    assert torch.allclose(
        uniform(t).to_dense(),
        torch.tensor([[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2]], dtype=torch.float64),
    )


def test_uniform_on_a_star_lets_the_hub_count_too_much():  # GRAPH-17, GRAPH-18
    W, x = uniform(star(5)), torch.tensor([5.0, 0, 0, 0, 0], dtype=torch.float64)
    for _ in range(200):
        x = W @ x
    assert torch.allclose(x, torch.full_like(x, 25 / 13))
    assert offence(W, "row_stochastic") is None
    assert offence(W, "column_stochastic") == "column 0 of W sums to 2.2, not 1"
    assert offence(metropolis(star(5)), "doubly_stochastic") is None


def test_a_torus_with_sides_of_two_has_three_entry_rows():
    W = metropolis(torus(2, 2)).to_dense()
    assert (W != 0).sum(1).tolist() == [3, 3, 3, 3]
    assert (W.sum(1) - 1).abs().max() < 1e-15


def test_metropolis_without_self_term():
    assert metropolis(ring(4), self_term=False).to_dense()[0].tolist() == [0, 0.5, 0, 0.5]
    W = metropolis(path(3), self_term=False).to_dense()
    assert W.tolist() == [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]


def test_a_directed_graph_is_refused_with_its_edge():
    with pytest.raises(Incompatible, match="edge 0 → 1 has no reverse; use graphs.push"):
        metropolis(ring(3, directed=True))


@pytest.mark.parametrize("rule", [metropolis, uniform])
def test_one_and_two_workers(rule):
    assert rule(ring(1)).to_dense().tolist() == [[1.0]]
    assert rule(ring(2)).to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5]]
