"""Compressors: contraction with the stated constant, exact wire formats, every edge case (gossip/compress)."""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossip
import gossip.compress
from gossip import Identity, RandK, Sign, TopK, rng
from gossip.compress.payload import kept
from gossip.compress.sparse import Sparse, index_dtype
from gossip.plan import Block
from gossip.wire import row_bits, spec

modules = [importlib.import_module(f"gossip.compress.{m.name}") for m in pkgutil.iter_modules(gossip.compress.__path__)]
FOUND = {c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if dataclasses.is_dataclass(c)}
CLASSES = sorted((c for c in FOUND if hasattr(c, "delta")), key=lambda c: c.__name__)
RATIOS = [0.01, 0.3, 1.0]


def instances(cls) -> list:
    if "ratio" in {f.name for f in dataclasses.fields(cls)}:
        return [cls(ratio=r) for r in RATIOS]
    wraps = [f.name for f in dataclasses.fields(cls) if hasattr(f.default, "ratio")]
    return [cls(**{name: TopK(0.3) for name in wraps})]


ALL = [c for cls in CLASSES for c in instances(cls)]
each = pytest.mark.parametrize("compressor", ALL, ids=repr)
TINY = 2.0**-1060  # a denormal in float64
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, TINY, -TINY, 1e-300, 1e30]), st.floats(-1e6, 1e6, allow_subnormal=True)
)


@st.composite
def stacks(draw, dtype=torch.float64):
    """Rows with zeros, ties, one element, one non-zero, denormals, and lengths that are no multiple of 8."""
    m, d = draw(st.integers(1, 4)), draw(st.integers(1, 21))
    kind = draw(st.sampled_from(["any", "equal", "one", "zero"]))
    if kind == "any":
        x = torch.tensor(draw(st.lists(numbers, min_size=m * d, max_size=m * d)), dtype=torch.float64).view(m, d)
    elif kind == "equal":
        signs = torch.tensor(draw(st.lists(st.sampled_from([1.0, -1.0]), min_size=m * d, max_size=m * d)))
        x = signs.double().view(m, d) * draw(st.sampled_from([1.0, 1e-12, 3.7]))
    else:
        x = torch.zeros(m, d, dtype=torch.float64)
        if kind == "one":
            x[torch.arange(m), draw(st.integers(0, d - 1))] = draw(st.sampled_from([1.0, -2.5, 1e-160]))
    return x.to(dtype)


def keys(m, seed=0):
    return rng.key(seed, "compress", torch.arange(m))


def randomised(compressor) -> bool:
    x = torch.arange(1.0, 65).expand(2, -1)
    a, b = compressor(x, keys(2)).dense(), compressor(x, keys(2, 1)).dense()
    return not torch.equal(a, b)


@each
@given(data=st.data())
def test_contraction_with_the_stated_delta(compressor, data):
    """‖C(x) − x‖² ≤ (1 − δ) ‖x‖² for each row; for a random one on average over keys."""
    x = data.draw(stacks())
    m, d = x.shape
    delta = compressor.delta(d)
    assert delta <= 1
    assert delta > 0 or hasattr(compressor, "omega")  # then 1 − δ is ω
    unit = x.abs().amax(1, keepdim=True)
    unit[unit == 0] = 1  # squares of denormals would vanish
    square = (x / unit).square().sum(1)
    slack = 1e-12 + 1e-2 * (unit[:, 0] < 1e-290).double()  # a denormal has few digits
    if randomised(compressor):
        x, rows = x[:1], 400
        error = ((compressor(x.expand(rows, d), keys(rows)).dense() - x) / unit[:1]).square().sum(1)
        mean, spread = error.mean(), error.std() / math.sqrt(rows)
        assert float(mean) <= float(((1 - delta) * (1 + slack[0]) + 1e-28) * square[0] + 5 * spread)
    else:
        error = ((compressor(x, keys(m)).dense() - x) / unit).square().sum(1)
        assert bool((error <= (1 - delta) * square * (1 + slack)).all())


@pytest.mark.parametrize("compressor", [c for c in ALL if isinstance(c, Identity | TopK | RandK | Sign)], ids=repr)
def test_delta_is_attained(compressor):
    """The constant is the best one: some row, or the mean over keys, comes within the sampling error of it."""
    d, rows = 40, 20_000
    delta = compressor.delta(d)
    worst = torch.stack((torch.ones(d), torch.nn.functional.one_hot(torch.tensor(3), d))).double()
    found = []
    for x in worst:
        q = compressor(x.expand(rows, d), keys(rows)).dense()
        found.append(float((q - x).square().sum(1).mean() / x.square().sum()))
    assert max(found) == pytest.approx(1 - delta, abs=0.02)
    assert max(found) <= 1 - delta + 0.02


def over_the_wire(part: torch.Tensor) -> torch.Tensor:
    octets = bytearray(part.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(octets, dtype=part.dtype).view(part.shape)


@each
@given(data=st.data())
def test_payloads_travel_as_their_parts(compressor, data):
    """dense ∘ like ∘ parts = dense; bits are the bytes of the parts; rows are independent; the input stays as it was."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    x = data.draw(stacks()).clamp(-1e4, 1e4).to(dtype)
    before, m, d = x.clone(), *x.shape
    payload = compressor(x, keys(m))
    assert torch.equal(x, before)
    parts = payload.parts()
    assert all(len(p) == m for p in parts)
    dense = payload.dense()
    assert dense.dtype == dtype
    assert dense.shape == (m, d)
    assert dense.isfinite().all()
    arrived, used = list(map(over_the_wire, parts)), payload.used
    if used is not None:  # of the last part only so many bytes travel; what lies behind them is stale
        assert arrived[-1].dtype == torch.uint8
        assert arrived[-1].ndim == 2
        assert bool((used <= arrived[-1].shape[1]).all())
        assert parts[-1].shape == compressor(torch.zeros_like(x), keys(m)).parts()[-1].shape  # whatever the data
        arrived[-1][torch.arange(arrived[-1].shape[1]) >= used[:, None]] = 0xAA
        assert torch.equal(payload.like(tuple(arrived)).used, used)
    assert torch.equal(payload.like(tuple(arrived)).dense(), dense)
    octets = sum(p.numel() * p.element_size() for p in (parts if used is None else parts[:-1]))
    assert payload.bits == math.ceil(8 * (octets + (0 if used is None else int(used.sum()))) / m)
    assert used is not None or payload.bits == row_bits(spec(parts))
    for i in range(m):
        assert torch.equal(compressor(x[i : i + 1], keys(m)[i : i + 1]).dense(), dense[i : i + 1])


@each
@given(data=st.data())
def test_adding_a_payload_is_adding_its_dense_form(compressor, data):
    x = data.draw(stacks()).clamp(-1e6, 1e6)
    m, d = x.shape
    payload = compressor(x, keys(m))
    q = payload.dense().clone()
    into = torch.linspace(-1, 1, m * d, dtype=torch.float64).view(m, d)
    expected = into + q
    payload.add_to(into)
    assert torch.allclose(into, expected, rtol=1e-14, atol=1e-14)
    rows = data.draw(st.integers(1, 4))
    weights = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, -1.0, 0.3]), min_size=rows * m, max_size=rows * m))
    )
    weights = weights.double().view(rows, m)
    dst, src = weights.nonzero().T
    into = torch.linspace(-1, 1, rows * d, dtype=torch.float64).view(rows, d)
    expected = into + 0.25 * weights @ q
    payload.add_into(into, Block(dst, src, weights[dst, src], (rows, m)), 0.25)
    assert torch.allclose(into, expected, rtol=1e-12, atol=1e-9)


@each
def test_zero_in_zero_out(compressor):
    for d in (1, 7, 8, 9):
        assert torch.equal(compressor(torch.zeros(2, d), keys(2)).dense(), torch.zeros(2, d))


@each
def test_a_private_copy(compressor):
    """The payload stays what it was when x changes: the network keeps it until it is received."""
    x = torch.arange(1.0, 17).view(2, 8)
    payload = compressor(x, keys(2))
    dense = payload.dense().clone()
    x.zero_()
    assert torch.equal(payload.dense(), dense)


@each
def test_rows_may_be_strided(compressor):
    x = torch.arange(1.0, 17).view(8, 2)
    assert torch.equal(compressor(x.T, keys(2)).dense(), compressor(x.T.contiguous(), keys(2)).dense())


def test_identity_is_exact():
    x = torch.tensor([[0.1, -2.0, float("inf")]])
    assert torch.equal(Identity()(x).dense(), x)
    assert Identity()(x.double()).bits == 3 * 64


# -- top-k ---------------------------------------------------------------------------------------------------------------


@given(stacks(), st.sampled_from(RATIOS))
def test_top_k_keeps_the_largest_magnitudes_and_ties_go_to_the_lowest_index(x, ratio):
    d = x.shape[1]
    k = max(1, round(ratio * d))
    payload = TopK(ratio)(x)
    assert payload.values.shape == payload.index.shape == (len(x), k)
    for row, values, index in zip(x.tolist(), payload.values.tolist(), payload.index.tolist()):
        expected = sorted(sorted(range(d), key=lambda i: (-abs(row[i]), i))[:k])
        assert index == expected
        assert values == [row[i] for i in expected]


def test_top_k_takes_magnitudes_not_values():
    assert TopK(0.5)(torch.tensor([[-9.0, 1.0, 2.0, -7.0]])).index.tolist() == [[0, 3]]


def test_top_k_picks_over_the_whole_model():
    small, large = torch.arange(1.0, 51), torch.arange(10.0, 510, 10)
    assert TopK(0.1)(torch.cat((small, large))[None]).index.min() >= 50


def test_indices_travel_as_int32_and_survive_beyond_2_to_the_24():
    """A float32 index would turn 16,777,217 into 16,777,216."""
    d = 2**24 + 2
    x = torch.zeros(1, d, dtype=torch.float16)
    x[0, d - 1], x[0, d - 2] = 3, -2
    assert TopK(2 / d)(x).index.tolist() == [[d - 2, d - 1]]
    payload = TopK(2 / d, indices="plain")(x)
    assert payload.index.dtype == torch.int32
    assert payload.index.tolist() == [[d - 2, d - 1]]
    into = torch.zeros(1, d, dtype=torch.float16)
    payload.add_to(into)
    assert torch.equal(into, x)
    assert payload.bits == 2 * (16 + 32)
    assert index_dtype(2**31) == torch.int32
    assert index_dtype(2**31 + 1) == torch.int64


def test_sparse_rows_add_into_far_rows_without_overflow():
    """row · d + index exceeds int32 here."""
    m, d = 3, 2**30
    sparse = Sparse(torch.ones(m, 1), torch.full((m, 1), d - 1, dtype=torch.int32), d)
    place = sparse.index + (torch.arange(m) * d)[:, None]
    assert place.dtype == torch.int64
    assert int(place.max()) == m * d - 1
    small = torch.zeros(m, 5)
    Sparse(torch.ones(m, 1), torch.full((m, 1), 4, dtype=torch.int32), 5).add_into(
        small, Block(torch.arange(m), torch.arange(m), torch.ones(m), (m, m))
    )
    assert small[:, 4].tolist() == [1] * m


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_diverged_row_is_refused_or_passed_on_but_never_garbled(value):
    """Not a complaint about shapes from inside: either the row is named, or what is not finite stays so at the receiver."""
    x = torch.arange(1.0, 21).view(2, 10)
    x[1, 3] = value
    for compressor in ALL:
        try:
            dense = compressor(x, keys(2)).dense()
        except ValueError as error:
            if "row 1" not in str(error):
                raise
            continue
        assert dense[0].isfinite().all()
        if not isinstance(compressor, RandK) or compressor.ratio == 1:
            assert not dense[1].isfinite().all(), compressor


# -- random-k ------------------------------------------------------------------------------------------------------------


@given(stacks(), st.sampled_from(RATIOS))
def test_random_k_is_decoded_from_the_key(x, ratio):
    m, d = x.shape
    k = kept(ratio, d)
    payload = RandK(ratio)(x, keys(m))
    assert [p.dtype for p in payload.parts()] == [torch.float64, torch.int64]
    assert payload.bits == 64 * k + 64
    index = rng.sample(keys(m), d, k)
    expected = torch.zeros_like(x).scatter(1, index, x.gather(1, index))
    assert torch.equal(payload.dense(), expected)


def test_random_k_at_large_d_sends_no_indices():
    x = torch.arange(1.0, 100_001)[None]
    payload = RandK(0.01)(x, keys(1))
    assert payload.bits == 32 * 1000 + 64
    dense = payload.dense()
    assert int((dense != 0).sum()) == 1000
    assert torch.equal(dense[dense != 0], x[dense != 0])


def test_unbiased_random_k_is_unbiased_with_the_stated_variance():
    d, rows = 20, 40_000
    x = torch.linspace(-1, 2, d, dtype=torch.float64)
    q = RandK(0.25, unbiased=True)(x.expand(rows, d), keys(rows)).dense()
    omega = d / 5 - 1
    assert torch.allclose(q.mean(0), x, rtol=0, atol=5 * 2 * math.sqrt(omega / rows))
    error = (q - x).square().sum(1).mean() / x.square().sum()
    assert float(error) == pytest.approx(omega, rel=0.05)
    assert RandK(0.75, unbiased=True).delta(d) == pytest.approx(2 - 1 / 0.75)


@pytest.mark.parametrize(
    "compressor", [RandK(0.5), gossip.Threshold(), gossip.BlockTopK(0.5), gossip.LowRank(1)], ids=repr
)
def test_rows_are_rows_of_floating_point_numbers_and_lose_their_graph(compressor):
    for x in (torch.ones(8), torch.ones(2, 2, 2), torch.ones(2, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"a compressor takes rows \(m, d\) of floating-point numbers, and got \("):
            compressor(x, keys(2))
    x = torch.arange(1.0, 17).view(2, 8)
    payload = compressor(x.clone().requires_grad_(), keys(2))
    assert not payload.dense().requires_grad
    assert torch.equal(payload.dense(), compressor(x, keys(2)).dense())


def test_random_k_needs_a_key_for_every_row():
    with pytest.raises(ValueError, match=r"key=\(2,\) keys for 3 rows: pass one int64 key per row"):
        RandK(0.5)(torch.ones(3, 8), keys(2))


def test_random_k_needs_a_key():
    with pytest.raises(ValueError, match=r"key=None: pass one int64 key per row, gossip\.rng\.key"):
        RandK(0.1)(torch.ones(1, 10))


# -- sign ----------------------------------------------------------------------------------------------------------------


@given(stacks())
def test_sign_is_the_mean_magnitude_with_plus_at_zero(x):
    q = Sign()(x).dense()
    scale = x.abs().mean(1, keepdim=True)
    assert torch.equal(q, torch.where(x >= 0, scale, -scale))
    assert Sign()(x).bits == 8 * math.ceil(x.shape[1] / 8) + 64


@given(stacks())
def test_sign_has_the_exact_error_of_its_docstring(x):
    """‖C(x) − x‖² = (1 − ‖x‖₁² / (d ‖x‖₂²)) ‖x‖²."""
    x = x.clamp(-1e6, 1e6)
    error = (Sign()(x).dense() - x).square().sum(1)
    expected = x.square().sum(1) - x.abs().sum(1) ** 2 / x.shape[1]
    assert torch.allclose(error, expected, rtol=1e-9, atol=1e-9 * float(x.square().sum()) + 1e-300)


def test_sign_of_gaussian_rows_has_delta_two_over_pi():
    x = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (Sign()(x).dense() - x).square().sum(1) / x.square().sum(1)
    assert torch.allclose(error, torch.full((4,), 1 - 2 / math.pi, dtype=torch.float64), rtol=0, atol=0.02)


def test_reference_bits():
    """Bits at d = 2000: 64-bit values with 32-bit indices, a key, and one bit a coordinate (algorithms.md, section 4)."""
    x = torch.ones(1, 2000, dtype=torch.float64)
    assert Identity()(x).bits == 128_000
    assert TopK(0.01, indices="plain")(x).bits == 20 * (64 + 32)
    assert TopK(0.01)(x).bits == 20 * 64 + 8 * (7 + 15) < 20 * (64 + 11)  # l = 6: 51 bits of bitmap, 120 low bits
    assert RandK(0.01)(x, keys(1)).bits == 20 * 64 + 64
    assert Sign()(x.float()).bits == 2000 + 32


# -- ratios --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [c for c in CLASSES if "ratio" in {f.name for f in dataclasses.fields(c)}])
@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, 100, float("nan"), "0.1", None])
def test_a_ratio_outside_zero_to_one_is_refused(cls, ratio):
    with pytest.raises(ValueError, match=r"is not in \(0, 1\].*fraction of coordinates that is kept") as caught:
        cls(ratio=ratio)
    assert repr(ratio) in str(caught.value)
    assert ("write 0.01" in str(caught.value)) == (ratio == 100)


def test_kept_is_the_nearest_integer_and_at_least_one():
    assert [kept(0.1, d) for d in (1, 4, 10, 26, 30)] == [1, 1, 1, 3, 3]
    assert kept(0.3, 10) == 3  # int(0.3 · 10 · …) style truncation gives 2 in some orders
    assert kept(1.0, 7) == 7
    for d in range(1, 200):
        assert 1 <= kept(0.01, d) <= d


def test_every_compressor_is_exported():
    for cls in CLASSES:
        assert getattr(gossip, cls.__name__) is cls


# -- long rows, which top-k may search another way -----------------------------------------------------------------------

LONG = 300_001


def long_rows() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(LONG, generator=random)
    sparse, heavy = torch.zeros(LONG), torch.zeros(LONG)
    sparse[torch.randperm(LONG, generator=random)[:500]] = torch.randn(500, generator=random)
    heavy[: LONG // 2] = 7.0
    bumped = normal.clone()
    bumped[-40:] = 100.0
    return {
        "normal": normal,
        "many ties": (normal * 4).round() / 4,
        "all equal": torch.full((LONG,), -2.0),
        "zeros": torch.zeros(LONG),
        "sparse": sparse,
        "half ties, half zeros": heavy,
        "two values": torch.where(normal > 2.5, 3.0, -1.0),
        "largest at the end": bumped,
        "sorted up": normal.abs().sort().values,
        "sorted down": normal.abs().sort(descending=True).values,
        "periodic": torch.sin(torch.arange(LONG) * (2 * math.pi / 64)),
        "denormal": normal * 1e-42,
    }


@pytest.mark.parametrize("kind", long_rows())
@pytest.mark.parametrize("ratio", [3e-6, 0.001, 0.01, 0.1, 0.3])
def test_top_k_of_a_long_row_is_exact_with_ties_to_the_lowest_index(kind, ratio):
    x = torch.stack((long_rows()[kind], torch.arange(float(LONG)).flip(0)))
    k = kept(ratio, LONG)
    payload = TopK(ratio)(x)
    expected = x.abs().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
    assert torch.equal(payload.index.long().sort(1).values, expected)
    assert torch.equal(payload.values, x.gather(1, payload.index.long()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_top_k_of_a_long_row_in_other_dtypes(dtype):
    x = long_rows()["normal"].to(dtype)[None]  # coarse dtypes have many ties
    expected = x.abs().sort(dim=1, descending=True, stable=True).indices[:, : kept(0.01, LONG)].sort(1).values
    assert torch.equal(TopK(0.01)(x).index.long().sort(1).values, expected)


@pytest.mark.parametrize("bad", [1, 5000, LONG])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_long_diverged_row_is_refused(bad, value):
    x = long_rows()["normal"].expand(3, -1).clone()
    x[1, torch.randperm(LONG, generator=torch.Generator().manual_seed(1))[:bad]] = value
    with pytest.raises(ValueError, match=r"row 1 of the 3 rows.*NaN or an infinity"):
        TopK(0.01)(x)
