"""Schedules: the W of every round, and properties that are computed, not declared (graphs/schedules.py)."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import (
    Incompatible,
    Schedule,
    as_schedule,
    complete,
    cycle,
    exponential,
    extremes,
    from_edges,
    gap,
    kemeny_constant,
    metropolis,
    one_peer_exponential,
    path,
    ring,
    star,
    static,
    torus,
    uniform,
)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def brute_contractive(s):
    """Second modulus of the product below 1 and the limit positive: by the dense eigensolver."""
    P = s.product().numpy()
    limit = np.linalg.matrix_power(P, 4096)
    return bool((limit > 1e-12).all())


@st.composite
def walks(draw):
    n = draw(st.integers(2, 5))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        bits = np.array(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n)), dtype=float).reshape(n, n)
        bits[bits.sum(1) == 0] = np.eye(n)[bits.sum(1) == 0]
        rows.append(bits / bits.sum(1, keepdims=True))
    return rows


@given(walks())
def test_contractive_is_what_the_powers_of_the_product_do(matrices):
    s = cycle(matrices)
    assert s.row_stochastic
    assert s.contractive == brute_contractive(s)


@given(walks(), st.booleans())
def test_properties_against_the_dense_definition(matrices, flip):
    s = cycle([W.T if flip else W for W in matrices])
    dense = [s(k).numpy() for k in range(s.period)]
    assert s.row_stochastic == all(np.allclose(W.sum(1), 1) for W in dense)
    assert s.column_stochastic == all(np.allclose(W.sum(0), 1) for W in dense)
    assert s.doubly_stochastic == (s.row_stochastic and s.column_stochastic)
    assert s.symmetric == all(np.allclose(W, W.T) for W in dense)
    assert s.static == all((dense[0] == W).all() for W in dense)


def test_same_object_within_the_period():
    s = one_peer_exponential(8)
    assert s.period == 3
    for k in range(7):
        assert s(k) is s(k + 3)
    assert s(0) is not s(1)
    with pytest.raises(ValueError, match="round k is -1"):
        s(-1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 16, 33])
def test_one_peer_exponential(n):
    s = one_peer_exponential(n)
    assert s.n == n
    assert s.doubly_stochastic
    assert s.contractive
    assert s.symmetric == (n <= 2)
    assert s.static == (n <= 2)
    for k in range(s.period):
        W = s(k)
        assert W.is_coalesced()
        for i in range(n):
            x = torch.zeros(n, dtype=torch.float64)
            x[i] = 1
            sent = (W @ x).nonzero().flatten().tolist()
            assert sent == sorted({i, (i + 2**k) % n})
    power_of_two = n & (n - 1) == 0
    assert s.exact_after == (int(math.log2(n)) if power_of_two else None)


@pytest.mark.parametrize(("n", "distance"), [(6, 0.216506), (12, 0.209129), (33, 0.031108)])
def test_one_peer_exponential_is_not_exact_elsewhere(n, distance):  # algorithms 5.5
    P = one_peer_exponential(n).product()
    assert abs(float(torch.linalg.matrix_norm(P - 1 / n, 2)) - distance) < 1e-6


@pytest.mark.parametrize(("n", "error"), [(6, 0.083), (7, 0.107), (8, 0), (12, 0.042)])
def test_one_peer_exponential_largest_error(n, error):  # GRAPH-23
    assert abs(float((one_peer_exponential(n).product() - 1 / n).abs().max()) - error) < 1e-3


def test_one_peer_matrices_commute():
    s = one_peer_exponential(16)
    P = s(2) @ (s(0) @ (s(3) @ s(1).to_dense()))
    assert torch.allclose(P, torch.full_like(P, 1 / 16), atol=1e-15)


def test_offence_names_the_round_and_the_value():
    good = tensor([[0.5, 0.5], [0.5, 0.5]])
    s = cycle([good, tensor([[0.5, 0.7], [0.5, 0.5]])])
    assert s.offence("row_stochastic") == "row 0 of W(1) sums to 1.2, not 1"
    assert s.offence("column_stochastic") == "column 1 of W(1) sums to 1.2, not 1"
    assert s.offence("symmetric") == "W(1)[0, 1] is 0.7 and W(1)[1, 0] is 0.5"
    assert s.offence("static") == "W(1) differs from W(0)"
    assert s.offence("nonnegative") is None
    with pytest.raises(ValueError, match="no property"):
        s.offence("nice")


def test_rows_that_were_normalised_in_float32_are_told_from_wrong_ones():
    W = np.random.RandomState(0).rand(100, 100).astype(np.float32)
    W /= W.sum(1, keepdims=True)
    assert str(static(W).offence("row_stochastic")).endswith("not 1 (rounding: normalise the weights in float64)")
    W = W.astype(np.float64)
    assert static(W / W.sum(1, keepdims=True)).row_stochastic


def test_negative_and_zero_weights_are_named():  # GRAPH-16
    W = tensor([[1.5, -0.5, 0], [-0.5, 1.0, 0.5], [0, 0.5, 0.5]])
    s = static(W)
    assert s.doubly_stochastic
    assert not s.nonnegative
    assert s.offence("nonnegative") == "W[0, 1] is -0.5, a negative weight on the message 1 → 0".replace("W[", "W(0)[")
    assert not s.contractive
    zero = torch.sparse_coo_tensor(
        [[0, 0, 1, 1], [0, 1, 0, 1]], tensor([1.0, 0.0, 0.0, 1.0]), (2, 2), check_invariants=True
    )
    assert not static(zero).contractive


def test_over_relaxed_weights_may_be_negative_and_contract():
    W = metropolis(complete(4)).to_dense()
    faster = static(torch.eye(4, dtype=torch.float64) * (1 - 1.5) + 1.5 * W)
    assert not faster.nonnegative
    assert faster.contractive


def test_why_a_schedule_stands_still():
    assert "does not connect the 4 workers" in static(torch.eye(4, dtype=torch.float64)).offence("contractive")
    bipartite = static(metropolis(ring(4), self_term=False))
    assert "periodic" in bipartite.offence("contractive")
    assert "does not connect" in static(metropolis(from_edges([(0, 1), (2, 3)]))).offence("contractive")
    assert not static(tensor([[1, 0], [0.5, 0.5]])).contractive  # a leader that hears nobody
    swap, flip = tensor([[0, 1], [1, 0]]), tensor([[0.5, 0.5], [0.5, 0.5]])
    assert not static(swap).contractive
    assert cycle([swap, flip]).contractive


@pytest.mark.parametrize("dust", [1e-17, -1e-17])
def test_rounding_connects_nobody(dust):
    W = torch.block_diag(torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)).double()
    W[0, 2] = W[2, 0] = dust
    assert str(static(W).offence("contractive")) == "the union of 1 round does not connect the 4 workers"
    assert static(W).nonnegative
    assert gap(W) == 0
    assert extremes(W).second == 1
    assert kemeny_constant(W) == math.inf


def test_union_over_the_period_counts():
    halves = [metropolis(from_edges([(0, 1), (2, 3)], 4)), metropolis(from_edges([(1, 2), (3, 0)], 4))]
    assert not any(static(W).contractive for W in halves)
    s = cycle(halves)
    assert s.contractive
    assert s.exact_after == 2


def test_one_worker_is_everything():  # GRAPH-04
    for s in (static(torch.ones(1, 1)), one_peer_exponential(1), as_schedule(ring(1))):
        assert s.doubly_stochastic
        assert s.symmetric
        assert s.static
        assert s.contractive
        assert s.exact_after == 0
        assert s(5).to_dense().tolist() == [[1.0]]


def test_exact_after():
    assert static(metropolis(complete(6))).exact_after == 1
    assert static(metropolis(torus(4, 4))).exact_after is None


def test_as_schedule_chooses_weights_or_refuses():
    assert torch.equal(as_schedule(path(4))(0).to_dense(), metropolis(path(4)).to_dense())
    assert torch.equal(as_schedule(exponential(6))(0).to_dense(), uniform(exponential(6)).to_dense())
    s = one_peer_exponential(4)
    assert as_schedule(s) is s
    with pytest.raises(Incompatible, match="graphs.push"):
        as_schedule(from_edges([(0, 1), (1, 2), (2, 0), (0, 2)], directed=True))
    with pytest.raises(ValueError, match="is no mixing"):
        as_schedule("ring")


@pytest.mark.parametrize("kind", ["array", "coo", "csr", "list", "scipy", "float32", "objects"])
def test_matrices_of_every_kind(kind):
    dense = metropolis(star(4)).to_dense()
    W = {
        "array": dense.numpy(),
        "coo": dense.to_sparse(),
        "csr": scipy.sparse.csr_matrix(dense.numpy()),
        "list": dense.tolist(),
        "scipy": scipy.sparse.coo_array(dense.numpy()),
        "float32": dense.float(),
        "objects": dense.numpy().astype(object),
    }[kind]
    s = as_schedule(W)
    assert s(0).dtype == torch.float64
    assert torch.allclose(s(0).to_dense(), dense)
    assert s.doubly_stochastic
    assert s.contractive


@pytest.mark.parametrize(
    ("W", "message"),
    [
        (torch.ones(2, 3), "must be square"),
        (torch.ones(3), "must be square"),
        (torch.eye(2, dtype=torch.int64), "must be floating"),
        (torch.eye(2, dtype=torch.complex64), "must be floating"),
        (torch.tensor([[0.5, math.nan], [0.5, 0.5]]), r"W\[0, 1\] is nan"),
        (torch.tensor([[0.5, 0.5], [math.inf, 0.5]]).to_sparse(), r"W\[1, 0\] is inf"),
        (torch.empty(0, 0), "must be square"),
        ([[0.5, 0.5], [1.0]], "is not a mixing matrix: give rows of equally many numbers"),
        ("ring", "'ring' is not a mixing matrix"),
    ],
)
def test_bad_matrices_are_named(W, message):
    with pytest.raises(ValueError, match=message):
        static(W)


def test_what_is_written_into_a_matrix_later_has_no_part_in_its_schedule():
    W = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    s, c = static(W), cycle([W, W])
    W.fill_(7)
    assert s.doubly_stochastic
    assert c.doubly_stochastic


def test_cycle_errors():
    with pytest.raises(ValueError, match="no rounds"):
        cycle([])
    with pytest.raises(ValueError, match="sizes \\[2, 3\\]"):
        cycle([torch.eye(2), torch.eye(3)])


def test_a_schedule_without_period_asks_again_for_the_same_matrix():
    def make(k):
        W = torch.eye(3, dtype=torch.float64)
        i, j = np.random.RandomState(k).permutation(3)[:2]
        W[[i, j], [i, j]] = W[[i, j], [j, i]] = 0.5
        return W

    s = Schedule(3, make, None)
    first = s(0)
    assert s.period is None
    assert s.contractive
    assert s.symmetric
    assert not s.static
    for k in range(200):
        s(k)
    assert torch.equal(s(0), first)
