"""Quantisers: constants by Monte Carlo, closed forms, exact wire formats, every awkward input (gossip/compress)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossip
import graphs
from gossip import (
    QSGD,
    Cast,
    LInf,
    Moniqua,
    Natural,
    NotFinite,
    OneBit,
    Sign,
    StochasticRounding,
    TernGrad,
    rng,
)
from gossip.compress import tiles
from gossip.compress.measure import measured, norms
from gossip.compress.pack import Packer, octets, planes
from gossip.compress.tiles import TILE
from gossip.plan import Block

CASTS = [Cast(t) for t in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")]
UNBIASED = [
    QSGD(),
    QSGD(1),
    QSGD(127),
    QSGD(16),
    QSGD(7, "linf"),
    QSGD(3, bucket=8),
    QSGD(1, bucket=16),
    LInf(2),
    LInf(5),
    LInf(8, bucket=16),
    TernGrad(),
    StochasticRounding(1),
    StochasticRounding(3),
    StochasticRounding(8, bucket=8),
    Natural(),
]
CONTRACTIONS = [Sign(), OneBit(), QSGD(rescaled=True), QSGD(2, "linf", 16, True), TernGrad(True), Natural(), *CASTS]
ALL = [*UNBIASED, *CONTRACTIONS, Moniqua(1e3)]
each = pytest.mark.parametrize("compressor", ALL, ids=repr)


def keys(m, seed=0):
    return rng.key(seed, "quantisers", torch.arange(m))


def rows_of(d, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Rows of d numbers that have broken quantisers elsewhere."""
    some = torch.randn(d, generator=torch.Generator().manual_seed(d)).double()
    one, tail = torch.zeros(d).double(), some.pow(5)
    one[d // 2] = -2.5
    found = {
        "gaussian": some,
        "zeros": torch.zeros(d).double(),
        "equal": torch.full((d,), 0.3).double(),
        "ties": some.sign(),
        "one": one,
        "heavy tail": tail,
        "offset": some + 100,
        "tiny": some * 1e-30,
        "huge": some * 1e30,
        "worst of the infinity norm": torch.full((d,), 1 / (1 + math.sqrt(d)))
        .double()
        .index_fill(0, torch.tensor(0), 1),
    }
    return {name: x.to(dtype) for name, x in found.items()}


def draws(compressor, x, count=4000) -> torch.Tensor:
    return compressor(x.expand(count, -1).contiguous(), keys(count)).dense().double()


# -- constants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", UNBIASED, ids=repr)
@pytest.mark.parametrize("d", [1, 21])
def test_unbiased_with_the_stated_omega(compressor, d):
    for name, x in rows_of(d).items():
        q, unit = draws(compressor, x), float(x.abs().max()) or 1.0
        error = (q - x) / unit
        assert (error.mean(0).abs() <= 6 * error.std(0) / math.sqrt(len(q)) + 1e-4).all(), name
        square = error.square().sum(1)
        bound = compressor.omega(d) * float((x / unit).square().sum())
        assert float(square.mean()) <= bound * (1 + 1e-5) + 6 * float(square.std()) / math.sqrt(len(q)) + 1e-9, name


@pytest.mark.parametrize("compressor", CONTRACTIONS, ids=repr)
@pytest.mark.parametrize("d", [1, 21])
def test_contraction_with_the_stated_delta(compressor, d):
    for name, x in rows_of(d).items():
        unit = float(x.abs().max()) or 1.0
        square = ((draws(compressor, x) - x) / unit).square().sum(1)
        bound = (1 - compressor.delta(d)) * float((x / unit).square().sum())
        assert float(square.mean()) <= bound * (1 + 1e-5) + 6 * float(square.std()) / math.sqrt(len(square)) + 1e-13, (
            name
        )


@pytest.mark.parametrize(
    ("compressor", "worst"),
    [
        (QSGD(2), torch.ones(100)),  # √d / s − 1 = 4
        (QSGD(4), torch.ones(64) * 3),  # √d = 2 s: both cases meet at ω = 1
        (
            QSGD(7, "linf"),
            torch.full((50,), 1 / 7 / (1 + math.sqrt(2))).index_fill(0, torch.tensor(0), 1.0),
        ),
        (TernGrad(), torch.full((25,), 1 / 6).index_fill(0, torch.tensor(3), 1.0)),
        (
            StochasticRounding(1),
            torch.zeros(400).index_fill(0, torch.tensor(0), 1.0).index_fill(0, torch.tensor(1), -1.0),
        ),
        (Natural(), torch.full((30,), 4 / 3)),
    ],
    ids=repr,
)
def test_omega_is_attained(compressor, worst):
    x = worst.double()
    found = float((draws(compressor, x, 20_000) - x).square().sum(1).mean() / x.square().sum())
    assert found == pytest.approx(compressor.omega(len(x)), rel=0.03)


def test_the_relative_errors_of_the_literature():
    """One Gaussian row of 2,000 (algorithms.md, section 4): errors that follow from the row's own norms."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    square, one, largest = float(x.square().sum()), float(x.abs().sum()), float(x.abs().max())

    def found(compressor, count=300):
        return float((draws(compressor, x, count) - x).square().sum(1).mean()) / square

    assert found(Sign(), 1) == pytest.approx(1 - one**2 / (2000 * square), abs=1e-6)
    assert found(TernGrad()) == pytest.approx(largest * one / square - 1, rel=0.02)
    assert found(QSGD(1)) == pytest.approx(one / math.sqrt(square) - 1, rel=0.02)
    assert found(QSGD(16)) == pytest.approx(1.249, rel=0.03)
    assert found(Natural()) == pytest.approx(0.0831, rel=0.03)
    assert found(Cast("float16"), 1) == pytest.approx(4.4e-8, rel=0.1)
    assert found(Cast("bfloat16"), 1) == pytest.approx(2.7e-6, rel=0.1)
    tau = 1 + QSGD(16).omega(2000)
    rescaled = 1.249 / tau**2 + (1 - 1 / tau) ** 2
    assert found(QSGD(16, rescaled=True)) == pytest.approx(rescaled, rel=0.02)


def test_two_means_are_the_projection():
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    q = OneBit()(x).dense()
    for row, out in zip(x, q):
        above = row >= 0
        assert torch.allclose(out[above], row[above].mean(), rtol=1e-12)
        assert torch.allclose(out[~above], row[~above].mean(), rtol=1e-12)
    assert ((q - x).square().sum(1) <= (Sign()(x).dense() - x).square().sum(1)).all()
    assert torch.allclose(OneBit()(x.abs()).dense(), x.abs().mean(1, keepdim=True).expand_as(x))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(0, 1000), st.sampled_from([1, 2, 5, 8]))
def test_stochastic_rounding_stays_between_the_levels_around(numbers, seed, bits):
    """Constant rows and single numbers are exact, nothing is off by a step (hivemind 202, 591)."""
    x = torch.tensor([numbers], dtype=torch.float64)
    q = StochasticRounding(bits)(x, keys(1, seed)).dense()
    step = float(x.max() - x.min()) / (2**bits - 1)
    assert float((q - x).abs().max()) <= step * (1 + 1e-9) + 1e-12
    if step == 0:
        assert torch.equal(q, x)


@given(st.sampled_from(ALL), st.integers(1, 40), st.integers(0, 2**30), st.sampled_from([torch.float32, torch.float64]))
def test_values_are_levels_of_the_row(compressor, d, seed, dtype):
    """Codes stay in range whatever is rounded: dense values are within the norm, and zeros stay zero where zero is a level."""
    x = torch.randn(2, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[1, 0] = 0
    x[1, d // 2] = -5
    q = compressor(x, keys(2, seed)).dense()
    assert q.isfinite().all()
    if isinstance(compressor, QSGD | LInf | TernGrad | Natural | Cast) and x[1, 0] == 0:
        assert q[1, 0] == 0
    if isinstance(compressor, LInf | TernGrad):
        assert float(q.abs().max()) <= float(x.abs().max()) * (1 + 1e-5)


# -- modulo --------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([2, 3, 8]), st.floats(0.1, 10), st.integers(0, 10_000), st.floats(-1e3, 1e3))
def test_moniqua_is_read_near_the_receiver(bits, theta, seed, offset):
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(1, 50, generator=g, dtype=torch.float64) * 3 + offset
    x = y + (2 * torch.rand(1, 50, generator=g, dtype=torch.float64) - 1) * theta * 0.999
    moniqua = Moniqua(theta, bits)
    assert moniqua.modulus == pytest.approx(2 * theta / (1 - 2 * 2.0**-bits))
    read = moniqua.near(moniqua(x, keys(1, seed)), y)
    assert float((read - x).abs().max()) <= moniqua.modulus * 2.0**-bits * (1 + 1e-9)


def test_moniqua_is_unbiased_where_theta_holds_and_wraps_where_it_does_not():
    x = torch.linspace(-0.99, 0.99, 40, dtype=torch.float64)
    q = draws(Moniqua(1.0, 2), x, 8000)
    assert torch.allclose(q.mean(0), x, rtol=0, atol=6 * 0.5 / math.sqrt(8000))
    far = x[None] + 5
    assert (Moniqua(1.0, 8)(far, keys(1)).dense() - far).abs().min() > 1
    same = keys(1).expand(2)
    two = Moniqua(1.0, 2)(x.expand(2, -1), same).dense()
    assert torch.equal(two[0], two[1])  # equal keys share the noise


# -- casts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_casts_are_torchs_own(cast):
    """At a scale of one: every number of the type is sent exactly, and what is between as torch rounds it."""
    kind = getattr(torch, cast.dtype)
    if cast.dtype == "float8_e4m3fn":  # the largest that stands below 2^8, where the scale is one
        values = torch.arange(256, dtype=torch.uint8).view(kind).float()
        values = values[values.abs() < 256]
        assert torch.equal(cast(values[None]).dense()[0], values)
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    if cast.dtype == "bfloat16":
        assert torch.equal(cast(x).dense(), x.bfloat16().float())
    scale = cast(x).scale
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    assert torch.equal(cast(x).dense(), (x / scale).to(kind).float() * scale)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="dtype='int8' is not one of float16, bfloat16"):
        Cast("int8")


# -- the wire ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2, 3, 4, 5, 15, 16, 33, 128, 255, 256, 512, 4096])
@given(data=st.data())
def test_packing_is_reversible_in_any_tiles(base, data):
    d, cut = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 4))
    codes = torch.tensor(data.draw(st.lists(st.integers(0, base - 1), min_size=2 * d, max_size=2 * d))).view(2, d)
    packer, packed = Packer(2, d, base), torch.full((2, octets(base, d)), 255, dtype=torch.uint8)
    bounds = [0, min(d, 40 * cut), d] if cut else [0, d]
    for start, stop in zip(bounds, bounds[1:]):
        if stop > start:
            packer.room(2, stop - start).copy_(codes[:, start:stop])
            packer.pack(packed, start, stop - start, d)
    read = [packer.read(packed, a, b - a, d).long().clone() for a, b in zip(bounds, bounds[1:]) if b > a]
    assert torch.equal(torch.cat(read, 1), codes)
    bits = (base - 1).bit_length()
    assert sum(planes(base)) == bits
    assert octets(base, d) == (-(-d // 5) if base == 3 else sum(-(-d * w // 8) for w in planes(base)))


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (Sign(), 2000 + 32),
        (OneBit(), 2000 + 64),
        (QSGD(7), 4 * 2000 + 32),
        (QSGD(127), 8 * 2000 + 32),
        (QSGD(16), 6 * 2000 + 32),
        (QSGD(7, bucket=512), 4 * 2000 + 4 * 32),
        (LInf(6), 6 * 2000 + 32),
        (TernGrad(), 400 * 8 + 32),
        (Natural(), 9 * 2000),
        (StochasticRounding(3), 3 * 2000 + 64),
        (Moniqua(1.0, 4), 4 * 2000 + 32),
        (Cast("float16"), 16 * 2000 + 32),
        (Cast("float8_e4m3fn"), 8 * 2000 + 32),
    ],
    ids=repr,
)
def test_bits_on_the_wire(compressor, bits):
    """The formulas of algorithms.md, section 4, to the bit at d = 2,000 in float32."""
    assert compressor(torch.randn(1, 2000, generator=torch.Generator().manual_seed(0)), keys(1)).bits == bits


@pytest.mark.parametrize(
    "compressor", [QSGD(7), QSGD(7, bucket=24), Sign(), OneBit(), Natural(), CASTS[2], TernGrad()], ids=repr
)
def test_long_rows_are_like_short_ones(compressor):
    """Rows longer than a tile: the same whatever rows are beside them; added up as the dense form is, to the last number."""
    d = TILE + 1001
    x = torch.randn(2, d, generator=torch.Generator().manual_seed(0))
    payload = compressor(x, keys(2))
    dense = payload.dense()
    assert torch.equal(compressor(x[1:], keys(2)[1:]).dense(), dense[1:])
    ratio = (dense - x).square().sum(1) / x.square().sum(1)
    constant = compressor.omega(d) if hasattr(compressor, "omega") else 1 - compressor.delta(d)
    assert (ratio <= constant * 1.05).all()
    into = torch.ones(2, d)
    payload.add_to(into)
    assert torch.allclose(into, 1 + dense, rtol=1e-5, atol=1e-5)
    block = Block(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([0.5, -1.0, 0.25]), (2, 2))
    into.zero_()
    payload.add_into(into, block, 2.0)
    expected = torch.stack((dense[0] - 2 * dense[1], 0.5 * dense[1]))
    assert torch.allclose(into, expected, rtol=1e-5, atol=1e-5)


def test_tiles_cover_every_number_once():
    shapes = [
        (1, 10, None),
        (3, TILE + 7, None),
        (5, 1000, 24),
        (2, 3 * TILE, 80),
        (1, 3 * TILE, TILE + 8),
        (4, 50, 64),
    ]
    for m, d, bucket in shapes:
        for whole in (False, True):
            seen = torch.zeros(m, d)
            for tile in tiles.tiles(m, d, bucket, whole):
                part = tile.of(seen)
                part += 1
                assert (tile.start % 8) == 0
                if bucket and bucket < d:
                    assert part.ndim == 2 or part.shape[2] == bucket
                    assert tile.start // bucket == tile.first
            assert (seen == 1).all()


# -- awkward inputs ------------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("d", [1, 13, TILE + 9])
def test_a_diverged_row_is_refused_by_name(compressor, bad, d):
    if d > TILE and bad != math.inf:
        return
    x = torch.ones(3, d)
    x[1, d // 2] = bad
    with pytest.raises(NotFinite, match="row 1 of the 3 rows to compress holds NaN or an infinity") as caught:
        compressor(x, keys(3))
    assert caught.value.row == 1


def test_the_worker_that_diverged_is_named_before_anything_is_sent():
    """One infinite gradient at round 3 on worker 1 (pytorch 49374): refused there, x̂ as it was, nothing on the meter."""

    def gradient(x, workers, step):
        g = x.clone()
        g[workers == 1] = math.inf if step == 3 else 1.0
        return g

    net = gossip.Network(graphs.static(graphs.metropolis(graphs.ring(4))))
    algorithm = gossip.Choco(compressor=QSGD(rescaled=True), gamma=0.3)
    state = algorithm.init(torch.ones(4, 6))
    rounds = gossip.lockstep(algorithm, lambda x, step: gradient(x, net.rows, step), net, state, 10)
    for _ in range(3):
        _, state = next(rounds)
    hat, bits = state.hat.clone(), net.meter.bits.clone()
    with pytest.raises(NotFinite, match=r"row 1 \(worker 1\) of the 4 rows"):
        next(rounds)
    assert torch.equal(state.hat, hat)
    assert hat.isfinite().all()
    assert torch.equal(net.meter.bits, bits)


@each
def test_no_nan_from_nothing(compressor):
    """Zeros, one number, a constant, an empty row (grace 14, hivemind 202)."""
    for x in (torch.zeros(1, 4), torch.zeros(2, 1), torch.full((1, 8), 0.3), torch.tensor([[1.0]]), torch.empty(1, 0)):
        payload = compressor(x, keys(len(x)))
        assert payload.dense().shape == x.shape
        assert payload.dense().isfinite().all()
        if not x.any():
            assert torch.equal(payload.dense(), torch.zeros_like(x))


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_keeps_its_own(compressor, dtype):
    x = torch.randn(3, 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = compressor(x, keys(3))
    assert q.dense().dtype == dtype
    exact = compressor(x.double(), keys(3)).dense()
    if not isinstance(compressor, Moniqua):  # a level may tip over, no more
        close = ((q.dense().double() - exact).abs() <= 1e-2 * exact.abs().max() + 1e-12).double().mean()
        assert close > 0.9


@pytest.mark.parametrize("exponent", [-120, -90, 90, 120])
@pytest.mark.parametrize("compressor", [Sign(), OneBit(), QSGD(), LInf(4), StochasticRounding(8), *CASTS], ids=repr)
def test_float32_rows_of_any_magnitude(compressor, exponent):
    """Squares of 1e-30 and 1e30 do not exist in float32; C(2^e x) = 2^e C(x) all the same."""
    x = torch.randn(2, 33, generator=torch.Generator().manual_seed(0))
    plain, scaled = (compressor(y, keys(2)).dense().double() for y in (x, x * 2.0**exponent))
    assert torch.allclose(scaled * 2.0**-exponent, plain, rtol=1e-5, atol=1e-5)


def test_norms_of_any_tile_are_those_of_torch():
    for d in (1, 50, TILE + 33):
        x = torch.randn(3, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for p in (1, 2, math.inf):
            expected = torch.linalg.vector_norm(x, p, dim=1)
            assert torch.allclose(norms(x, p)[:, 0], expected, rtol=1e-12)
    x = torch.arange(1.0, 21)[None]
    assert torch.allclose(norms(x, 2, 8)[0], torch.stack([part.norm() for part in x[0].split(8)]).double())
    with pytest.raises(NotFinite):
        measured(torch.tensor([[1.0, math.nan]]), lambda y: norms(y, 2))


def test_a_key_is_asked_for():
    for compressor in UNBIASED:
        with pytest.raises(ValueError, match=r"draws at random and got key=None: pass one int64 key per row"):
            compressor(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: QSGD(0), "levels=0 is not a whole number from 1 to 127"),
        (lambda: QSGD(128), "levels=128"),
        (lambda: QSGD(norm="l1"), "norm='l1' is neither 'l2' nor 'linf'"),
        (lambda: QSGD(bucket=12), "bucket=12 is not a positive multiple of 8"),
        (lambda: LInf(1), "bits=1 is not a whole number from 2 to 8"),
        (lambda: StochasticRounding(9), "bits=9"),
        (lambda: Moniqua(0.0), "theta=0.0 is not a positive number"),
        (lambda: Moniqua(bits=1), "bits=1"),
    ],
)
def test_options_are_checked(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_natural_refuses_what_would_be_rounded_to_infinity():
    with pytest.raises(ValueError, match="would be rounded to infinity"):
        Natural()(torch.tensor([[3e38]]), keys(1))


def test_the_same_numbers_from_the_same_key_only():
    x = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    for compressor in UNBIASED:
        again = compressor(x, keys(2)).dense()
        assert torch.equal(compressor(x.clone(), keys(2)).dense(), again)
        assert not torch.equal(compressor(x, keys(2, 1)).dense(), again)


def test_what_a_contraction_starts_from():
    """γ exists where CHOCO can use it, and is refused by name where not."""
    for compressor in CONTRACTIONS:
        if compressor != QSGD(rescaled=True):  # without buckets δ falls with d
            assert 0 < compressor.gamma <= 1
    assert QSGD(7, bucket=512, rescaled=True).gamma == QSGD(7, rescaled=True).delta(512)
    for compressor in (QSGD(), QSGD(rescaled=True), TernGrad(), LInf(2), StochasticRounding(2)):
        with pytest.raises(ValueError, match="gamma=None, and .* names no start value"):
            gossip.Choco(compressor=compressor)


# -- dither --------------------------------------------------------------------------------------------------------------------


def test_dither_is_flat_odd_and_the_words_of_uniform():
    d = 40_000
    bits = rng.Bits(keys(3), d)
    numbers = bits(slice(0, 3), 0, d).clone()
    assert (numbers & 1).all()
    words = (rng.uniform(keys(3), d // 4) * 2.0**53).long() >> 37  # the uppermost 16 bits of each
    top = numbers.view(3, -1, 4)[:, :, 3].long() & 0xFFFF
    assert torch.equal(top >> 1, words >> 1)
    u = numbers.double() / 65536
    assert float(u.mean()) == pytest.approx(0, abs=5 / math.sqrt(12 * u.numel()))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.01)
    for lag in (1, 2, 3, 4):
        assert abs(float((u[:, lag:] * u[:, :-lag]).mean()) * 12) < 5 / math.sqrt(u.numel())
    parts = [bits(slice(1, 2), start, 1000).clone() for start in range(0, d, 1000)]
    assert torch.equal(torch.cat(parts, 1), numbers[1:2])


def test_numpy_and_torch_agree_on_the_dither():
    """What another device would compute, in torch's own arithmetic."""
    key = keys(2)
    expected = rng._finish(rng._finish(key)[:, None] + torch.arange(251, 351) * rng._GOLDEN) | rng._ODD
    assert torch.equal(rng.Bits(key, 400)(slice(0, 2), 1000, 400), expected.view(torch.int16))


def test_natural_rounds_up_as_often_as_down():
    """The dither is symmetric, so what lies closer to a power of two than its grid goes there, from below and from above."""
    for x, nearest in ((1 + 2.0**-17, 1.0), (2 - 2.0**-17, 2.0)):
        row = torch.full((1, 400_000), x, dtype=torch.float64)
        assert (Natural()(row, keys(1)).dense() == nearest).all()


# -- what stands where dtypes end, and whoever is beside a row -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressor", "row"),
    [
        (QSGD(7), torch.full((1, 64), 3e38)),
        (QSGD(7), torch.full((1, 4), 3e38)),
        (StochasticRounding(8), torch.tensor([[3e38, -3e38]])),
        (OneBit(), torch.tensor([[3e38, -3e38]])),
        (Natural(), torch.full((1, 4), 6e4, dtype=torch.float16)),
        (Cast("bfloat16"), torch.full((1, 4), 65504.0, dtype=torch.float16)),
        (Cast("bfloat16"), torch.full((1, 4), 3.4e38)),
        (Cast("float8_e5m2"), torch.full((1, 4), 3.4e38)),
    ],
)
def test_what_would_be_rounded_to_infinity_is_refused(compressor, row):
    with pytest.raises(ValueError, match="would be rounded to infinity"):
        compressor(row, keys(1))
    assert compressor(row / 4, keys(1)).dense().isfinite().all()


@each
@pytest.mark.parametrize("d", [100, 60_001, TILE + 1])
def test_a_message_does_not_depend_on_the_rows_beside_it(compressor, d):
    """To the bit, also where rows of odd length begin at other alignments, and where they are zero."""
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(d))
    x[1, : d // 2] = 0
    x[0, 1:] = 0
    together = compressor(x, keys(3))
    for i in range(3):
        alone = compressor(x[i : i + 1].clone(), keys(3)[i : i + 1])
        for one, all_of_them in zip(alone.parts(), together.parts()):
            assert torch.equal(one[0].view(torch.uint8), all_of_them[i].view(torch.uint8))


@pytest.mark.parametrize("bucket", [8, 1000, 40_968, 1 << 16, TILE])
@pytest.mark.parametrize("kind", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_buckets_of_casts_are_casts_of_their_own(kind, bucket):
    d = 200 if bucket == 8 else 2 * TILE + 77
    x = torch.randn(2, d, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, d)
    q = Cast(kind, bucket)(x)
    expected = torch.cat([Cast(kind)(part).dense() for part in x.split(bucket, 1)], 1)
    assert torch.equal(q.dense(), expected)
    assert q.scale.shape == (2, -(-d // bucket))
    one = Cast(kind, bucket)(x[:1])
    into = torch.zeros(1, d)
    one.add_into(into, Block(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.25]).double(), (1, 1)), 2.0)
    assert torch.equal(into, 0.5 * expected[:1])
    with pytest.raises(ValueError, match=r"bucket=12 is not a multiple of 8 up to 81,920"):
        Cast(kind, 12)


def test_buffers_are_kept_per_thread():
    """Two threads that compress at the same time do not write into each other's tiles."""
    from concurrent.futures import ThreadPoolExecutor

    x = [torch.randn(1, 3 * TILE, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [QSGD(7)(row, keys(1)).dense() for row in x]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda row: QSGD(7)(row, keys(1)).dense(), x))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))


@each
def test_inference_mode_leaves_nothing_behind(compressor):
    """Buffers that were made inside it cannot be written outside."""
    x, into = torch.ones(1, TILE + 9), torch.zeros(1, TILE + 9)
    block = Block(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.5]).double(), (1, 1))
    with torch.inference_mode():
        inside = compressor(x, keys(1)).dense()
    outside = compressor(x, keys(1))
    outside.add_into(into, block)
    assert torch.equal(outside.dense(), inside)
