"""Randomness: uniform, independent between streams, distinct where it must be (gossip/rng.py)."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip import rng

ROWS = torch.arange(64)


def chi_square(counts: torch.Tensor, expected) -> float:
    """(χ² − df) / √(2 df), about standard normal when df is large."""
    counts = counts.double()
    df = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - df) / math.sqrt(2 * df))


def test_uniform_is_flat():
    u = rng.uniform(rng.key(0, "test", ROWS), 4096)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(chi_square(torch.histc(u, 256, 0, 1), u.numel() / 256)) < 5
    assert float(u.mean()) == pytest.approx(0.5, abs=5 / math.sqrt(12 * u.numel()))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.01)


def test_every_bit_of_a_uniform_is_a_fair_coin():
    u = rng.uniform(rng.key(1, "test", ROWS), 4096)
    bits = (u * 2.0**53).long()
    for place in range(53):
        share = float(((bits >> place) & 1).double().mean())
        assert share == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(u.numel())), place


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8), (torch.float64, 53)]
)
def test_uniform_stays_below_one_in_every_dtype(dtype, bits):
    u = rng.uniform(rng.key(2, "test", ROWS), 4096, dtype)
    assert u.dtype == dtype
    assert float(u.max()) < 1
    assert float(u.min()) >= 0
    grid = u.double() * 2.0**bits
    assert torch.equal(grid, grid.round())
    assert float(u.double().mean()) == pytest.approx(0.5 - 2.0 ** -(bits + 1), abs=0.003)


def test_streams_seeds_counters_and_positions_are_uncorrelated():
    d = 1 << 15
    keys = [
        rng.key(seed, stream, *counters)[None]
        for seed in (0, 1, 2)
        for stream in ("data", "network")
        for counters in ((0,), (1,), (0, 0), (0, 1), (1, 0))
    ]
    u = rng.uniform(torch.cat(keys), d) - 0.5
    correlation = (u @ u.T) / d * 12
    off = correlation - torch.diag(correlation.diag())
    assert float(off.abs().max()) < 5.5 / math.sqrt(d)
    lagged = [float((u[:, :-lag] * u[:, lag:]).mean()) * 12 for lag in (1, 2, 3, 8)]
    assert max(map(abs, lagged)) < 5.5 / math.sqrt(u.numel())


def test_no_two_first_draws_are_equal_over_seeds_and_ranks():
    """`seed + rank` schemes give (0, 1) what they give (1, 0)."""
    ranks = torch.arange(100)
    first = torch.cat([rng.uniform(rng.key(seed, "data", ranks), 1)[:, 0] for seed in range(100)])
    assert first.unique().numel() == 10_000
    keys = torch.cat([rng.key(seed, stream, ranks) for seed in range(50) for stream in ("data", "network", "model")])
    assert keys.unique().numel() == 50 * 3 * 100


def test_rows_never_overlap_further_on_either():
    """No number of one worker's stream occurs in another's."""
    u = rng.uniform(rng.key(0, "data", torch.arange(16)), 1 << 14)
    assert u.unique().numel() == u.numel()


def test_a_draw_depends_on_its_own_counters_only():
    whole = rng.uniform(rng.key(3, "test", 5, torch.arange(8)), 10)
    part = rng.uniform(rng.key(3, "test", 5, torch.tensor([6, 1])), 10)
    single = rng.uniform(rng.key(3, "test", 5, 6)[None], 4)
    assert torch.equal(part, whole[[6, 1]])
    assert torch.equal(single[0], whole[6, :4])
    assert not torch.equal(rng.key(3, "test", 5, 6), rng.key(3, "test", 6, 5))


def test_counters_broadcast():
    keys = rng.key(0, "test", torch.arange(3)[:, None], torch.arange(4))
    assert keys.shape == (3, 4)
    assert keys.unique().numel() == 12
    assert int(keys[2, 1]) == int(rng.key(0, "test", 2, 1))


@given(st.integers(0, 2**62), st.integers(-(2**62), 2**62))
def test_keys_of_neighbouring_counters_differ_in_half_their_bits(seed, counter):
    a, b = int(rng.key(seed, "test", counter)), int(rng.key(seed, "test", counter + 1))
    flipped = bin((a ^ b) & (2**64 - 1)).count("1")
    assert 8 <= flipped <= 56  # 32 ± 6σ


def test_integers_are_flat_and_bounded_per_row():
    high = torch.tensor([1, 7, 100, 2**40])
    i = rng.integers(rng.key(0, "test", torch.arange(4)), 70_000, high)
    assert i.dtype == torch.int64
    assert bool((i >= 0).all())
    assert bool((i < high[:, None]).all())
    assert abs(chi_square(i[1].bincount(minlength=7), 10_000)) < 5
    assert abs(chi_square(i[2].bincount(minlength=100), 700)) < 5
    assert float(i[3].double().mean()) == pytest.approx(2**39, rel=0.02)
    assert torch.equal(rng.integers(rng.key(0, "test", torch.arange(4)), 5, 7)[1], i[1, :5])


def test_normal_has_the_moments_of_a_normal():
    z = rng.normal(rng.key(0, "test", ROWS), 4096)
    count = z.numel()
    assert z.isfinite().all()
    assert float(z.mean()) == pytest.approx(0, abs=5 / math.sqrt(count))
    assert float(z.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / count))
    assert float((z**3).mean()) == pytest.approx(0, abs=5 * math.sqrt(15 / count))
    assert float((z**4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / count))


SIZES = [1, 2, 3, 5, 100, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 65_537, 1_000_003]


@pytest.mark.parametrize("d", SIZES)
def test_sample_is_distinct_and_in_range(d):
    for k in sorted({1, min(2, d), max(1, d // 100), max(1, d // 5), max(1, 2 * d // 3)}):
        index = rng.sample(rng.key(0, "test", torch.arange(5)), d, k)
        assert index.shape == (5, k)
        assert index.dtype == torch.int64
        assert int(index.min()) >= 0
        assert int(index.max()) < d
        assert all(row.unique().numel() == k for row in index)


@pytest.mark.parametrize("d", [1, 7, 4097])
def test_sample_of_everything_is_a_permutation(d):
    assert torch.equal(
        rng.sample(rng.key(0, "test", torch.arange(3)), d, d).sort(1).values, torch.arange(d).expand(3, d)
    )


@pytest.mark.parametrize(
    ("d", "k", "keys"), [(10, 3, 20_000), (4096, 8, 5_000), (4097, 8, 5_000), (6000, 8, 8_000), (8192, 4, 20_000)]
)
def test_sample_is_uniform(d, k, keys):
    """Every index equally often (at every place, where the order is drawn too), and pairs as often as without replacement."""
    index = rng.sample(rng.key(0, "test", torch.arange(keys)), d, k)
    bins = min(d, 500)
    for place in (slice(None), slice(0, 1), slice(k - 1, k))[: 3 if d <= 4096 else 1]:
        chosen = index[:, place].flatten()
        counts = (chosen * bins // d).bincount(minlength=bins)
        expected = (torch.arange(d) * bins // d).bincount(minlength=bins).double() / d * chosen.numel()
        assert abs(chi_square(counts, expected)) < 5
    low = (index < d // 2).double().sum(1)  # hypergeometric
    share = (d // 2) / d
    variance = k * share * (1 - share) * (d - k) / (d - 1)
    assert float(low.mean()) == pytest.approx(k * share, abs=5 * math.sqrt(variance / keys))
    assert float(low.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / keys))


def test_sample_differs_between_keys_and_repeats_for_one():
    keys = rng.key(0, "test", torch.arange(40))
    for d in (50, 10_000):
        index = rng.sample(keys, d, 10)
        assert torch.equal(index, rng.sample(keys, d, 10))
        assert torch.equal(index[7:8], rng.sample(keys[7:8], d, 10))
        common = [len(set(a) & set(b)) for a, b in itertools.combinations(index.tolist(), 2)]
        assert sum(common) / len(common) == pytest.approx(100 / d, abs=5 * math.sqrt(100 / d / len(common)))
