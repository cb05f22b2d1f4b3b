"""Random graphs: the right degrees and frequencies, bounded tries, the same graph everywhere (graphs/seeded.py)."""

import math

import numpy as np
import pytest
import torch

from graphs import (
    barabasi_albert,
    complete,
    drop,
    equistatic,
    equistatic_weights,
    erdos_renyi,
    geometric,
    random_regular,
    ring,
    slem,
    spectrum,
    stochastic_block,
    watts_strogatz,
)
from graphs.properties import offence


@pytest.mark.parametrize("n", range(1, 13))
def test_random_regular_for_every_degree(n):
    for degree in range(n):
        if n * degree % 2:
            with pytest.raises(ValueError, match="even"):
                random_regular(n, degree)
            continue
        t = random_regular(n, degree, seed=n, allow_disconnected=True)
        assert set(t.degree.tolist()) == {degree}
        assert t == random_regular(n, degree, seed=n, allow_disconnected=True)


def test_random_regular_is_the_same_graph_everywhere():
    assert random_regular(32, 3, seed=0).digest.startswith("6ce6409256dfdc11")
    assert random_regular(32, 3, seed=0) != random_regular(32, 3, seed=1)


def test_random_regular_gives_up_with_a_count():  # GRAPH-07
    with pytest.raises(ValueError, match="all 20 draws .at best 3 components"):
        random_regular(6, 1, tries=20)
    with pytest.raises(ValueError, match="smaller than n"):
        random_regular(4, 4)


def test_erdos_renyi_is_redrawn_until_connected(caplog):  # GRAPH-08
    caplog.set_level("INFO", logger="graphs.seeded")
    free = [erdos_renyi(8, 0.2, seed, allow_disconnected=True) for seed in range(20)]
    split = [t for t in free if not t.connected]
    assert len(split) > 7
    assert all(erdos_renyi(8, 0.2, seed).connected for seed in range(20))
    assert sum("first connected one" in record.message for record in caplog.records) == len(split)
    with pytest.raises(ValueError, match="disconnected in all 5 draws .* ln n / n"):
        erdos_renyi(50, 0.001, tries=5)


def test_erdos_renyi_has_the_right_distribution():
    assert erdos_renyi(6, 1.0) == complete(6)
    assert erdos_renyi(6, 0.0, allow_disconnected=True).messages == 0
    assert erdos_renyi(1, 0.5).n == 1
    n, p, draws = 12, 0.3, 400
    present = torch.zeros(n, n)
    for seed in range(draws):
        t = erdos_renyi(n, p, seed, allow_disconnected=True)
        present[t.source, t.target] += 1
    off = present[~torch.eye(n, dtype=torch.bool)] / draws
    assert abs(float(off.mean()) - p) < 4 * math.sqrt(p * (1 - p) / (draws * n * (n - 1) / 2))
    assert float((off - p).abs().max()) < 5 * math.sqrt(p * (1 - p) / draws)
    with pytest.raises(ValueError, match="between 0 and 1"):
        erdos_renyi(4, 1.5)


@pytest.mark.parametrize("seed", range(4))
def test_the_other_families_have_their_shape(seed):
    small = watts_strogatz(40, 4, 0.3, seed)
    assert small.messages == 160
    assert small.connected
    assert watts_strogatz(40, 4, 0.0) == watts_strogatz(40, 4, 0.0, seed=9)
    assert set(watts_strogatz(40, 4, 0.0).degree.tolist()) == {4}
    free = barabasi_albert(60, 3, seed)
    assert free.connected
    assert free.messages == 2 * (3 + 3 * 56)
    assert int(free.degree.min()) >= 1
    near = geometric(60, 0.3, seed)
    i, j = near.edge_index
    inside = (near.positions[:, None] - near.positions[None, :]).norm(dim=-1) <= 0.3
    assert torch.equal(inside.fill_diagonal_(False).nonzero(), torch.stack([i, j], 1))
    blocks = stochastic_block([15, 20], 0.6, 0.05, seed)
    group = torch.arange(35) >= 15
    across = int((group[blocks.source] != group[blocks.target]).sum())
    assert 0 < across < blocks.messages / 3
    for make in (
        lambda: watts_strogatz(40, 4, 0.3, seed),
        lambda: barabasi_albert(60, 3, seed),
        lambda: geometric(60, 0.3, seed),
        lambda: stochastic_block([15, 20], 0.6, 0.05, seed),
        lambda: equistatic(40, seed),
    ):
        assert make() == make()


def test_their_bad_arguments_are_named():
    for make, message in [
        (lambda: watts_strogatz(10, 3), "must be even"),
        (lambda: watts_strogatz(10, 4, 1.5), "no probability"),
        (lambda: barabasi_albert(3, 3), "smaller than n"),
        (lambda: geometric(9, 0.0), "must be positive"),
        (lambda: geometric(50, 0.01, tries=3), "all 3 draws"),
        (lambda: stochastic_block([5, 5], 0.9, 0.0, tries=3), "all 3 draws"),
        (lambda: stochastic_block([5, 0], 0.9, 0.1), "group size"),
        (lambda: erdos_renyi(8, 0.5, seed=None), "seed is None"),  # to NumPy another graph on every worker
        (lambda: barabasi_albert(8, seed=-1), "seed is -1"),
        (lambda: random_regular(8, 3, seed=2**32), "seed is 4294967296.*below 2³²"),
        (lambda: drop(0.1, ring(8), seed=1.5)(0), "seed is 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_equistatic_is_the_papers_graph():  # algorithms.md 5.6, 6.5
    offsets = [173, 48, 118, 193, 252, 196, 10, 212, 278]
    t = equistatic(300, seed=0)
    assert t.neighbours(0) == tuple(sorted(offsets))
    assert abs(slem(equistatic_weights(300, 0, True)) - 0.708908870) < 1e-9
    assert abs(slem(equistatic_weights(300, 0, False)) - 0.634469192) < 1e-9
    assert not equistatic(300, 0, directed=False).directed
    assert equistatic(1).n == 1
    assert equistatic_weights(1).to_dense().tolist() == [[1.0]]


@pytest.mark.parametrize("n", [2, 3, 8, 25])
@pytest.mark.parametrize("directed", [True, False])
def test_equistatic_weights_have_the_closed_form_even_with_repeats(n, directed):
    for seed in range(5):
        W = equistatic_weights(n, seed, directed, degree=4)
        assert offence(W, "doubly_stochastic") is None
        a = np.random.RandomState(seed).choice(np.arange(1, n), 4)
        turn = np.exp(2j * np.pi * np.outer(np.arange(n), a) / n)
        values = 1 / n + (n - 1) / n * (turn if directed else turn.real).mean(1)
        assert np.allclose(np.sort(np.abs(values)), np.sort(spectrum(W).abs().numpy()), atol=1e-12)
