"""Random schedules: one generator for all, properties of every round, published contractions (graphs/chance.py)."""

import math

import networkx as nx
import numpy as np
import pytest
import torch

from graphs import (
    complete,
    contraction,
    davis,
    epidemic,
    equidyn,
    from_edges,
    from_networkx,
    geant,
    matcha,
    matcha_plan,
    matchings,
    pairwise,
    path,
    random_regular,
    ring,
    star,
    torus,
)
from graphs.properties import entries

SYMMETRIC = {
    "matchings": matchings(torus(3, 4), seed=1),
    "pairwise": pairwise(torus(3, 4), seed=1),
    "matcha": matcha(torus(3, 4), 0.5, seed=1),
    "epidemic": epidemic(12, 3, seed=1),
    "ou": equidyn(12, 0.5, seed=1, directed=False),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_schedules(name):
    s = SYMMETRIC[name]
    assert s.period is None
    assert s.symmetric
    assert s.doubly_stochastic
    assert s.contractive
    assert not s.static
    assert s.exact_after is None


def test_directed_schedules_say_what_they_are():
    od, local = equidyn(12, 0.5, seed=1), epidemic(12, 3, seed=1, local=True)
    assert od.doubly_stochastic
    assert not od.symmetric
    assert local.row_stochastic
    assert "column" in local.offence("doubly_stochastic")
    assert od.contractive
    assert local.contractive


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_worker_draws_the_same_round_whenever_it_asks(name):  # GRAPH-24
    s = SYMMETRIC[name]
    late = s(1000)
    rounds = [s(k).to_dense() for k in range(80)]
    assert torch.equal(s(1000).to_dense(), late.to_dense())
    assert torch.equal(s(3).to_dense(), rounds[3])
    assert len({W.numpy().tobytes() for W in rounds}) > 4
    assert s(2**40).shape == (12, 12)


def test_senders_and_receivers_agree_and_workers_differ():  # GRAPH-24
    W = epidemic(8, 1, seed=0, local=True)(0).to_dense()
    off = (W > 0) & ~torch.eye(8, dtype=torch.bool)
    assert off.sum(0).tolist() == [1] * 8  # every worker sends once
    receivers = off.float().argmax(0)
    assert len(set(receivers.tolist())) > 2


@pytest.mark.parametrize(
    ("n", "s", "oracle", "local"), [(16, 2, 0.28889, 0.38268), (32, 4, 0.17419, 0.21474), (32, 7, 0.09677, 0.11056)]
)
def test_published_epidemic_contraction(n, s, oracle, local):
    assert abs(contraction(epidemic(n, s)) ** 2 - oracle) < 5.1e-6
    assert abs(contraction(epidemic(n, s, local=True)) ** 2 - local) < 5.1e-6


def shrink(schedule, rounds=3000, seed=0):
    """Mean of ‖Wx − mean x‖²/‖x − mean x‖² over rounds and random x."""
    random = np.random.RandomState(seed)
    total = 0.0
    for k in range(rounds):
        x = random.standard_normal(schedule.n)
        x -= x.mean()
        total += np.square((schedule(k) @ torch.tensor(x)).numpy()).sum() / np.square(x).sum()
    return total / rounds


@pytest.mark.parametrize("local", [False, True])
def test_epidemic_contraction_is_what_happens(local):
    s = epidemic(16, 2, seed=5, local=local)
    assert abs(shrink(s, 1500) - contraction(s) ** 2) < 0.01


def test_published_equidyn_contraction():
    for (n, eta), value in {(8, 0.5): 0.4375, (50, 0.5): 0.49, (8, 1.0): 0.75, (50, 1.0): 0.96}.items():
        assert abs(contraction(equidyn(n, eta)) ** 2 - value) < 5e-5
    assert abs(shrink(equidyn(9, 0.3, seed=2)) - contraction(equidyn(9, 0.3)) ** 2) < 0.01


def test_ou_equidyn_is_a_matching_along_one_offset():
    s = equidyn(9, 1.0, seed=3, directed=False)
    for k in range(20):
        rows, columns, values = entries(s(k))
        off = rows != columns
        assert torch.allclose(values[off], torch.full((1,), 8 / 9, dtype=torch.float64))
        assert torch.bincount(rows[off], minlength=9).max() == 1
        offsets = {min((int(i) - int(j)) % 9, (int(j) - int(i)) % 9) for i, j in zip(rows[off], columns[off])}
        assert len(offsets) == 1


def test_pairwise_contraction():
    assert abs(contraction(pairwise(ring(16))) ** 2 - 0.99524) < 5e-6
    assert abs(contraction(pairwise(complete(4))) ** 2 - 2 / 3) < 1e-12
    s = pairwise(star(5), seed=1)
    assert all(len(entries(s(k))[2]) == 7 for k in range(10))
    mean = sum(s(k).to_dense() for k in range(1000)) / 1000
    expected = torch.eye(5, dtype=torch.float64)
    for leaf in range(1, 5):
        expected[0, leaf] = expected[leaf, 0] = 1 / 8
        expected[leaf, leaf] -= 1 / 8
        expected[0, 0] -= 1 / 8
    assert float((mean - expected).abs().max()) < 0.06


@pytest.mark.parametrize(
    ("budget", "alpha", "rho"), [(1.0, 0.4361, 0.55431), (0.5, 0.607, 0.78395), (0.25, 0.607, 0.91105)]
)
def test_published_matcha(budget, alpha, rho):
    plan = matcha_plan(ring(8), budget)
    assert abs(plan.alpha - alpha) < 1.5e-3 * alpha
    assert abs(plan.rho - rho) < 5e-5  # the sheet rounds α before ρ
    assert abs(contraction(matcha(ring(8), budget)) ** 2 - plan.rho) < 1e-12


@pytest.mark.parametrize("topology", [path(6), star(5), davis(), geant(), from_networkx(nx.petersen_graph())])
def test_matcha_plans_are_feasible_and_beat_equal_probabilities(topology):
    plan = matcha_plan(topology, 0.4)
    covered = sorted(tuple(edge) for pairs in plan.matchings for edge in pairs.tolist())
    assert covered == [tuple(e) for e in topology.edge_index.T.tolist() if e[0] < e[1]]
    for pairs in plan.matchings:
        assert len(set(pairs.ravel().tolist())) == 2 * len(pairs)
    assert len(plan.matchings) <= int(topology.degree.max()) + 1
    assert plan.p.sum() <= 0.4 * len(plan.p) + 1e-6
    assert plan.p.min() >= 0
    assert plan.p.max() <= 1

    def connectivity(p):
        L = np.zeros((topology.n, topology.n))
        for share, pairs in zip(p, plan.matchings):
            for i, j in pairs:
                L[[i, j], [i, j]] += share
                L[[i, j], [j, i]] -= share
        return np.linalg.eigvalsh(L)[1]

    assert connectivity(plan.p) >= connectivity(np.full(len(plan.p), 0.4)) - 1e-6
    assert 0 < plan.rho < 1


def test_the_rounding_of_an_eigensolver_is_not_in_the_plan():
    # one and two threads of OpenBLAS differed by 3e-11, and so the processes of a run in the digest of their schedule
    plan = matcha_plan(geant(), 0.5)
    assert plan.alpha == round(plan.alpha, 6)
    assert np.array_equal(plan.p, plan.p.round(6))


def test_matcha_at_full_budget_is_one_matrix():
    s = matcha(torus(3, 4), 1.0)
    assert s.static
    assert s.contractive


def test_matchings_are_maximal():
    t = random_regular(20, 4, seed=2)
    s = matchings(t, seed=4)
    for k in range(10):
        W = s(k).to_dense()
        free = W.diagonal() == 1
        assert not bool((free[t.source] & free[t.target]).any())
        assert set(W.diagonal().tolist()) <= {0.5, 1.0}


def test_one_worker_and_no_edges():
    for s in (matchings(ring(1)), pairwise(ring(1)), matcha(ring(1), 0.5), epidemic(1, 0), equidyn(1)):
        assert s(3).to_dense().tolist() == [[1.0]]
        assert s.contractive
        assert contraction(s) == 0
    assert not matchings(from_edges([], n=3)).contractive


def test_errors():
    for make, message in [
        (lambda: epidemic(5, 3), "no 3-regular graph"),
        (lambda: epidemic(5, 5), "at most 4 others"),
        (lambda: equidyn(5, 0.0), "eta is 0"),
        (lambda: matcha(ring(4), 1.5), "budget is 1.5"),
        (lambda: matcha(from_edges([(0, 1)], n=3)), "2 components"),
        (lambda: matchings(ring(4, directed=True)), "has no reverse"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    assert math.isclose(contraction(equidyn(2, 0.5)), 0.5)
