"""Finite-time averaging: exact after the published number of rounds, for every n (graphs/finite.py)."""

import math

import pytest
import torch

from graphs import base_graph, one_peer_exponential, p_peer_hypercube, phone_book, simple_base_graph
from graphs.properties import entries

LENGTHS = {  # algorithms.md 5.5, (Base, Simple-Base)
    1: "2 1, 3 3, 4 2, 5 5, 6 4/5, 7 5, 8 3, 9 7, 10 6/7, 11 7, 12 5/7, 13 7, 15 7, 16 4, 17 9, 20 7/9, 21 9, 22 8/9, 23 9, "
    "24 6/9, 25 9, 31 9, 32 5, 33 11, 48 7/11, 50 10/11, 63 11, 64 6, 65 13, 99 13, 100 11/13",
    2: "3 1, 4 2, 5 3, 6 2, 7 4, 8 3, 9 2, 10 4/5, 12 3, 15 4/5, 16 4, 17 5, 20 5/6, 24 4, 25 6, 32 5, 33 6/7, 50 7, 63 6/8, "
    "64 6, 65 8, 99 7/9, 100 8/9",
    3: "4 1, 5 3, 6 2, 8 2, 9 2, 10 4, 12 2, 16 2, 17 5, 20 4/5, 24 3, 25 5, 32 3, 33 5/6, 64 3, 65 7, 100 6/7",
    4: "5 1, 6 2, 7 3, 10 2, 11 4, 15 2, 20 2, 24 3, 25 2, 31 5, 50 3, 63 5/6, 64 3, 65 5/6, 100 3",
}
PUBLISHED = [
    (k, int(n), int(length.split("/")[0]), int(length.split("/")[-1]))
    for k, text in LENGTHS.items()
    for n, length in (item.split() for item in text.split(", "))
]


@pytest.mark.parametrize(("k", "n", "base", "simple"), PUBLISHED)
def test_published_lengths(k, n, base, simple):
    assert base_graph(n, k).period == base
    assert simple_base_graph(n, k).period == simple


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [base_graph, simple_base_graph])
def test_exact_for_every_n_with_at_most_k_neighbours(make, k):
    for n in range(1, 42):
        s = make(n, k)
        assert s.exact_after == (0 if n == 1 else s.exact_after)
        assert s.exact_after is not None
        assert s.doubly_stochastic
        assert s.symmetric
        assert s.nonnegative
        assert s.contractive
        assert float((s.product() - 1 / n).abs().max()) < 1e-14
        for j in range(s.period):
            rows, columns, _ = entries(s(j))
            assert int(torch.bincount(rows[rows != columns], minlength=n).max()) <= k
        assert s.period <= 2 * math.log(n, k + 1) + 2


@pytest.mark.slow
def test_exact_for_all_n_to_a_hundred():
    for k in (1, 2, 3, 4):
        for n in range(1, 100):
            assert float((base_graph(n, k).product() - 1 / n).abs().max()) < 1e-13


@pytest.mark.parametrize(
    ("n", "p", "rounds"), [(9, 2, 2), (27, 2, 3), (16, 3, 2), (64, 3, 3), (25, 4, 2), (8, 1, 3), (1, 1, 0)]
)
def test_p_peer_hypercube(n, p, rounds):
    s = p_peer_hypercube(n, p)
    assert s.exact_after == rounds
    assert s.symmetric


def test_one_peer_hypercube_is_xor():
    s = p_peer_hypercube(8)
    for k in range(3):
        W = s(k).to_dense()
        for i in range(8):
            assert W[i].nonzero().flatten().tolist() == sorted({i, i ^ (1 << k)})
    for n in (5, 6, 12):  # GRAPH-20
        with pytest.raises(ValueError, match=r"graphs.base_graph"):
            p_peer_hypercube(n)


def test_phone_book_calls_in_the_published_order():
    s = phone_book(8)
    sent = [int((s(k) @ torch.eye(8, dtype=torch.float64)[0]).nonzero().flatten()[-1]) for k in range(5)]
    assert sent == [1, 7, 2, 6, 4]
    for n in (1, 2, 4, 8, 16):
        assert phone_book(n).exact_after is not None
    assert phone_book(12).exact_after is None
    assert phone_book(5).doubly_stochastic
    assert phone_book(5).contractive


def test_finite_time_averaging_in_any_order_on_one_peer():
    s = one_peer_exponential(32)
    P = torch.eye(32, dtype=torch.float64)
    for k in (4, 0, 3, 1, 2):
        P = s(k) @ P
    assert float((P - 1 / 32).abs().max()) < 1e-15
