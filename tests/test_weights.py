"""Weight rules: stochastic, on the graph's edges, the numbers of the literature (graphs/weights.py)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Incompatible,
    best_constant,
    by_samples,
    davis,
    double_tree,
    erdos_renyi,
    exponential,
    extremes,
    from_edges,
    grid,
    lazy,
    max_degree,
    metropolis,
    over_relaxed,
    path,
    pull,
    push,
    relay_tree,
    ring,
    sinkhorn,
    slem,
    star,
    stationary,
    torus,
    tree,
    uniform,
)
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


@pytest.mark.parametrize("rule", [metropolis, uniform, max_degree, best_constant, sinkhorn, push, pull])
def test_one_and_two_workers(rule):
    assert rule(ring(1)).to_dense().tolist() == [[1.0]]
    assert torch.allclose(rule(ring(2)).to_dense(), torch.full((2, 2), 0.5, dtype=torch.float64), atol=1e-14)


SYMMETRIC = [
    metropolis,
    max_degree,
    best_constant,
    sinkhorn,
    lambda t: lazy(metropolis(t)),
    lambda t: over_relaxed(metropolis(t)),
]


@pytest.mark.parametrize("rule", SYMMETRIC)
@pytest.mark.parametrize("topology", [ring(1), ring(2), ring(7), star(6), path(5), grid(3, 4), tree(9), davis()])
def test_symmetric_rules_keep_to_the_edges_and_contract(rule, topology):
    W = rule(topology)
    assert W.is_sparse
    assert W.is_coalesced()
    assert offence(W, "symmetric") is None
    assert offence(W, "doubly_stochastic") is None
    assert slem(W) < 1
    rows, columns, _ = entries(W)
    edges = set(map(tuple, topology.edge_index.T.tolist()))
    assert {(i, j) for i, j in zip(rows.tolist(), columns.tolist()) if i != j} <= edges


@pytest.mark.parametrize(
    ("a", "b", "degree_slem", "constant_slem"),
    [(4, 4, 0.882843, 0.841983), (5, 5, 0.923607, 0.899721), (8, 8, 0.969552, 0.961201), (8, 5, 0.969552, 0.960031)],
)
def test_published_grids(a, b, degree_slem, constant_slem):  # algorithms.md 5.3
    assert abs(slem(max_degree(grid(a, b))) - degree_slem) < 5.1e-7
    assert abs(slem(best_constant(grid(a, b))) - constant_slem) < 5.1e-7


def test_published_davis():
    assert abs(slem(max_degree(davis())) - 0.937867) < 5.1e-7
    assert abs(slem(best_constant(davis())) - 0.891564) < 5.1e-7


def test_published_trees():
    for n, value in {7: 0.933013, 15: 0.975803, 31: 0.989922}.items():
        assert abs(slem(metropolis(tree(n))) - value) < 5.1e-7
    for n, value in {16: 0.975803, 32: 0.989922}.items():
        relay = from_edges([(0, 1)] + [(w, c) for w in range(1, n) for c in (2 * w, 2 * w + 1) if c < n])
        assert relay == relay_tree(n)
        assert abs(slem(metropolis(relay)) - value) < 5.1e-7


def test_over_relaxation():  # algorithms.md 5.1: ring of 8, 1.30839
    W = metropolis(ring(8))
    ends = extremes(W)
    assert abs(2 / (2 - ends.second - ends.last) - 1.30839) < 5e-6
    best = slem(over_relaxed(W))
    assert best < min(slem(over_relaxed(W, 1.2)), slem(over_relaxed(W, 1.4)), slem(W))
    assert abs(slem(over_relaxed(W, 1.0)) - slem(W)) < 1e-14
    with pytest.raises(ValueError, match="omega is 0"):
        over_relaxed(W, 0)
    for stuck in (torch.eye(3), torch.tensor([[1.2, -0.2], [-0.2, 1.2]])):
        with pytest.raises(ValueError, match="no omega makes this W contract"):
            over_relaxed(stuck)


def test_lazy_moves_every_eigenvalue_half_way():
    ends, slow = extremes(metropolis(star(5))), extremes(lazy(metropolis(star(5))))
    assert slow.second == pytest.approx((1 + ends.second) / 2)
    assert slow.last == pytest.approx((1 + ends.last) / 2)


def test_best_constant_is_the_best_of_a_line_search():
    t = double_tree(12)
    W = best_constant(t).to_dense()
    alpha = float(W[t.target[0], t.source[0]])
    eye = torch.eye(12, dtype=torch.float64)
    for factor in (0.98, 1.02):
        other = (1 - factor) * eye + factor * W
        assert slem(other) > slem(W)
    assert alpha > 0
    with pytest.raises(ValueError, match="2 components"):
        best_constant(from_edges([(0, 1)], n=3))


@given(st.integers(2, 9), st.integers(0, 999))
def test_directed_rules(n, seed):
    random = torch.Generator().manual_seed(seed)
    extra = torch.randint(0, n, (n, 2), generator=random)
    pairs = {(i, (i + 1) % n) for i in range(n)} | {(int(a), int(b)) for a, b in extra if a != b}
    t = from_edges(sorted(pairs), n, directed=True)
    assert offence(push(t), "column_stochastic") is None
    assert offence(pull(t), "row_stochastic") is None
    W = sinkhorn(t)
    assert offence(W, "doubly_stochastic") is None
    assert (W.to_dense() > 0).sum() == t.messages + n
    assert torch.equal(push(t).to_dense() > 0, pull(t).to_dense() > 0)


def test_sinkhorn_refuses_edges_on_no_cycle():
    with pytest.raises(Incompatible, match="1 → 2 lies on no cycle"):
        sinkhorn(from_edges([(0, 1), (1, 0), (1, 2)], directed=True))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_sample_counts_set_what_is_agreed_upon(counts):
    W = by_samples(ring(len(counts)), counts)
    share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    assert torch.allclose(stationary(W), share, atol=1e-9)
    assert torch.allclose(by_samples(path(4), [3] * 4).to_dense(), metropolis(path(4)).to_dense())
    assert float(W.to_dense().min()) >= 0


def test_sample_counts_are_checked():
    with pytest.raises(ValueError, match="one positive count"):
        by_samples(ring(3), [1, 2])
    with pytest.raises(ValueError, match="one positive count"):
        by_samples(ring(3), [1, 0, 2])
    with pytest.raises(ValueError, match=r"counts are \[1.0, inf, 2.0\]"):
        by_samples(ring(3), [1, math.inf, 2])
    assert math.isclose(float(push(star(4)).to_dense()[1, 0]), 0.25)
