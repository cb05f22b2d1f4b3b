"""Schedules made from schedules (graphs/wrappers.py)."""

import pickle

import pytest
import torch

from graphs import (
    base_graph,
    contraction,
    cycle,
    drop,
    epidemic,
    equidyn,
    every,
    exponential,
    lazy,
    matcha,
    matchings,
    metropolis,
    one_peer_exponential,
    pairwise,
    phone_book,
    push,
    ring,
    star,
    static,
    torus,
    uniform,
)
from graphs.properties import entries

EYE = torch.eye(8, dtype=torch.float64)


def test_every_mixes_in_the_last_of_tau_rounds():
    inner = one_peer_exponential(8)
    s = every(3, inner)
    assert s.period == 9
    for k in range(20):
        wanted = inner(k // 3).to_dense() if k % 3 == 2 else EYE
        assert torch.equal(s(k).to_dense(), wanted)
    assert s.doubly_stochastic
    assert s.contractive
    assert s.exact_after == 9
    assert contraction(every(2, metropolis(ring(8)))) == pytest.approx(contraction(metropolis(ring(8))) ** 0.5)
    assert every(1, metropolis(ring(8))).static
    assert not every(2, metropolis(ring(8))).static
    assert every(2, matchings(ring(8))).contractive
    with pytest.raises(ValueError, match="rounds is 0"):
        every(0, inner)


@pytest.mark.parametrize(
    "schedule",
    [
        static(metropolis(ring(8))),
        cycle([metropolis(ring(8)), metropolis(star(8))]),
        one_peer_exponential(8),
        lazy(one_peer_exponential(8)),
        phone_book(8),
        base_graph(8),
        matchings(ring(8), 1),
        pairwise(ring(8), 1),
        matcha(ring(8), 0.5, 1),
        epidemic(8, 2, 1),
        epidemic(8, 2, 1, local=True),
        equidyn(8, 0.5, 1),
        every(3, drop(0.2, metropolis(ring(8)), 1)),
    ],
)
def test_every_schedule_travels_to_another_process(schedule):
    schedule(1)
    copy = pickle.loads(pickle.dumps(schedule))
    assert (copy.n, copy.period, copy.horizon) == (schedule.n, schedule.period, schedule.horizon)
    for k in (0, 1, 7, 30):
        assert torch.equal(copy(k).to_dense(), schedule(k).to_dense())
        assert not copy(k).is_sparse or copy(k).is_coalesced()
    assert contraction(copy) == contraction(schedule)
    assert copy(0) is copy(0)


def test_lazy_of_a_schedule():
    s = lazy(one_peer_exponential(8))
    assert s.period == 3
    assert torch.equal(s(1).to_dense(), (one_peer_exponential(8)(1).to_dense() + EYE) / 2)
    assert s.exact_after is None


def test_drop_keeps_the_sums_it_can():
    symmetric = drop(0.3, metropolis(torus(3, 4)), seed=2)
    assert symmetric.doubly_stochastic
    assert symmetric.symmetric
    assert symmetric.contractive
    rows = drop(0.3, uniform(exponential(8)), seed=2)
    assert rows.row_stochastic
    assert not rows.column_stochastic
    columns = drop(0.3, push(star(5)), seed=2)
    assert columns.column_stochastic
    assert not columns.row_stochastic
    assert drop(0.3, one_peer_exponential(8)).row_stochastic


def test_drop_loses_the_stated_share_and_nothing_at_zero():
    W = metropolis(ring(8))
    s = drop(0.25, W, seed=1)
    lost = [16 - int((s(k).to_dense().fill_diagonal_(0) > 0).sum()) for k in range(600)]
    assert abs(sum(lost) / (16 * 600) - 0.25) < 0.02
    assert torch.equal(drop(0.0, W)(5).to_dense(), W.to_dense())
    assert torch.equal(s(7).to_dense(), drop(0.25, W, seed=1)(7).to_dense())
    assert not torch.equal(s(7).to_dense(), drop(0.25, W, seed=2)(7).to_dense())
    with pytest.raises(ValueError, match="p is 1"):
        drop(1.0, W)


def test_losses_do_not_follow_the_draws_of_the_schedule():  # SEED-05: streams of the same seed
    s = matcha(ring(8), 0.5, seed=0)
    d = drop(0.2, s, seed=0)
    first, lost = 0, 0
    for k in range(1500):
        rows, columns, _ = entries(s(k))
        if len(rows) > 8:  # the first link that is active; its matching was drawn first too
            i, j = next((i, j) for i, j in zip(rows.tolist(), columns.tolist()) if i < j)
            first, lost = first + 1, lost + (float(d(k)[i, j]) == 0)
    assert abs(lost / first - 0.2) < 0.05


def test_the_contraction_under_loss_is_exact():
    for W in (metropolis(ring(6)), metropolis(star(5)).to_dense()):
        before = W.to_dense().clone()
        s = drop(0.3, W, seed=0)
        n = W.shape[0]
        mean = sum((lambda A: A.T @ A)(s(k).to_dense() - 1 / n) for k in range(800)) / 800
        assert abs(float(torch.linalg.eigvalsh(mean)[-1]) - contraction(s) ** 2) < 0.04
        assert torch.equal(W.to_dense(), before)
    assert contraction(drop(0.0, metropolis(ring(8)))) == pytest.approx(contraction(static(metropolis(ring(8)))))
