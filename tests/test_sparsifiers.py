"""Sparsifiers, low rank, composition, layers and entropy coding: what they keep, at what price (gossip/compress)."""

import dataclasses
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compress import keys, stacks

import gossip
from gossip import (
    BlockTopK,
    Compose,
    Identity,
    Layout,
    LowRank,
    PerLayer,
    RandK,
    RangeCoded,
    Sign,
    Threshold,
    TopK,
    WarmUp,
    entropy,
    rng,
    tree,
)
from gossip.compress.entropy import _sealed, _words, codecs_of, decode, encode
from gossip.compress.index import low_bits, pack, packed_bytes, unpack
from gossip.compress.lowrank import orthonormal
from gossip.compress.payload import NotFinite, compress, memory_of
from gossip.compress.threshold import capacity


def gaussian(m: int, d: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (q - x).square().sum(1) / x.square().sum(1)


# -- packed indices -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_indices_survive_packing(data):
    d = data.draw(st.integers(1, 3000))
    k = data.draw(st.integers(1, d))
    m = data.draw(st.integers(1, 3))
    index = rng.sample(rng.key(data.draw(st.integers(0, 99)), "test", torch.arange(m)), d, k).sort(1).values
    packed = pack(index, d)
    assert packed.shape == (m, packed_bytes(d, k))
    assert torch.equal(unpack(packed, d, k), index)


@pytest.mark.parametrize("where", ["first", "last", "spread"])
def test_the_length_of_packed_indices_does_not_depend_on_them(where):
    d, k = 1_000_003, 1000
    index = {"first": torch.arange(k), "last": torch.arange(d - k, d), "spread": torch.arange(k) * (d // k)}[where][
        None
    ]
    assert torch.equal(unpack(pack(index, d), d, k), index)
    assert pack(index, d).shape[1] == packed_bytes(d, k)


@pytest.mark.parametrize("d", [1000, 10**6, 10**8])
@pytest.mark.parametrize("share", [1e-3, 1e-2, 1e-1])
def test_packed_indices_take_two_bits_more_than_their_gap(d, share):
    """k (2 + log₂(d/k)) bits up to a byte or two, against a floor of log₂ binomial(d, k) ≈ k (1.44 + log₂(d/k))."""
    k = int(d * share)
    bits = 8 * packed_bytes(d, k)
    floor = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert floor <= bits <= k * (2 + math.log2(d / k)) + 16
    assert bits < 32 * k


def test_packed_bytes_grow_with_k_so_that_a_cap_bounds_them():
    for d in (1, 7, 64, 1000):
        sizes = [packed_bytes(d, k) for k in range(1, d + 1)]
        assert sizes == sorted(sizes)
        assert sizes[-1] <= -(-d // 8) + 1
    assert low_bits(1000, 900) == 0


@pytest.mark.parametrize("d", [2**33, 2**40])
def test_packed_indices_above_two_to_the_31(d):
    index = torch.tensor([[5, 2**31, 2**32 + 1, d - 1]])
    assert torch.equal(unpack(pack(index, d), d, 4), index)
    assert torch.equal(unpack(pack(index[:, 3:], d), d, 1), index[:, 3:])
    assert packed_bytes(d, 4) < 4 * 8


@pytest.mark.parametrize("indices", ["plain", "packed", "auto"])
def test_the_index_format_changes_the_bits_only(indices):
    x = gaussian(3, 5000, dtype=torch.float32)
    a, b = TopK(0.02, indices=indices)(x), TopK(0.02, indices="plain")(x)
    assert torch.equal(a.dense(), b.dense())
    assert a.bits == 100 * 32 + (100 * 32 if indices == "plain" else 8 * packed_bytes(5000, 100))
    with pytest.raises(ValueError, match="indices='int16'.*plain.*packed.*auto"):
        TopK(indices="int16")


def test_nearly_all_coordinates_travel_with_a_bitmap():
    x = gaussian(1, 800, dtype=torch.float32)
    assert TopK(0.9)(x).bits == 720 * 32 + 800


# -- random-k -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.4, 0.7])
def test_random_k_of_a_long_row_draws_every_coordinate_equally_often(ratio):
    d, rows = 5000, 600
    q = RandK(ratio)(torch.ones(rows, d), keys(rows)).dense()
    count = q.sum(0)
    k = round(ratio * d)
    assert q.sum(1).unique().tolist() == [k]
    variance = rows * ratio * (1 - ratio)
    assert float((count - rows * ratio).square().mean()) == pytest.approx(variance, rel=5 * math.sqrt(2 / d))


# -- blocks ---------------------------------------------------------------------------------------------------------------


@given(stacks(), st.sampled_from([0.01, 0.3, 1.0]), st.sampled_from([1, 2, 3, 8]))
def test_block_top_k_keeps_the_blocks_of_largest_norm(x, ratio, b):
    m, d = x.shape
    q = BlockTopK(ratio, block=b)(x)
    blocks = -(-d // b)
    k = max(1, round(ratio * blocks))
    unit = x.abs().amax(1, keepdim=True)
    scaled = torch.nn.functional.pad(x / unit.masked_fill(unit == 0, 1), (0, blocks * b - d)).view(m, blocks, b)
    energy = scaled.square().sum(2)
    dense = torch.nn.functional.pad(q.dense(), (0, blocks * b - d)).view(m, blocks, b)
    for i in range(m):
        index = q.inner.index[i].long().tolist()
        assert len(index) == k
        assert float(energy[i, index].sum()) >= float(energy[i].sort(descending=True).values[:k].sum()) * (1 - 1e-9)
        rest = [j for j in range(blocks) if j not in index]
        assert not dense[i, rest].any()
    assert relative_error(q.dense()[unit[:, 0] > 1e-290], x[unit[:, 0] > 1e-290]).le(1 - k / blocks + 1e-9).all()


def test_block_top_k_of_equal_blocks_attains_delta_and_takes_the_first():
    x = torch.ones(1, 64, dtype=torch.float64)
    q = BlockTopK(0.25, block=4)(x)
    assert q.inner.index.tolist() == [[0, 1, 2, 3]]
    assert float(relative_error(q.dense(), x)) == pytest.approx(1 - BlockTopK(0.25, block=4).delta(64))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_block_norms_neither_vanish_nor_overflow(scale):
    x = torch.tensor([[1.0, 1.0, 2.0, 2.0, 3.0, 0.0]], dtype=torch.float64) * scale
    assert BlockTopK(0.3, block=2)(x).inner.index.tolist() == [[2]]


@pytest.mark.parametrize("d", [1, 5, 63])
def test_a_row_shorter_than_a_block_is_not_padded_to_one(d):
    x = gaussian(1, d, dtype=torch.float32)
    payload = BlockTopK(0.1, block=64)(x)
    assert torch.equal(payload.dense(), x)
    assert payload.bits == 32 * d + 8
    assert BlockTopK(0.1, block=64).kept(d) == d


def test_block_top_k_sends_one_index_a_block():
    x = gaussian(1, 6400, dtype=torch.float32)
    assert BlockTopK(0.1, block=64, indices="plain")(x).bits == 10 * 64 * 32 + 10 * 32
    with pytest.raises(ValueError, match="block=0"):
        BlockTopK(block=0)


# -- threshold ------------------------------------------------------------------------------------------------------------


@given(stacks(), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.2, 1.0]))
def test_threshold_keeps_what_is_large_against_the_row_up_to_the_cap(x, threshold, ratio):
    d = x.shape[1]
    cap = max(1, round(ratio * d))
    dense, used = Threshold(threshold, ratio)(x).dense(), Threshold(threshold, ratio)(x).used
    for row, kept_row, octets in zip(x.tolist(), dense.tolist(), used.tolist()):
        top = max(map(abs, row))
        want = sorted(
            (i for i in range(d) if row[i] and abs(row[i]) >= top * threshold), key=lambda i: (-abs(row[i]), i)
        )
        want = set(want[:cap])
        assert kept_row == [v if i in want else 0.0 for i, v in enumerate(row)]
        assert octets == (8 * len(want) + packed_bytes(d, len(want)) if want else 0)
        assert octets <= capacity(d, cap, 8)


def test_an_absolute_threshold_may_send_nothing():
    x = torch.tensor([[0.1, -0.2], [3.0, -0.2]])
    payload = Threshold(1.0, ratio=1.0, relative=False)(x)
    assert payload.dense().tolist() == [[0.0, 0.0], [3.0, 0.0]]
    assert payload.used.tolist() == [0, 5]
    assert Threshold(1.0, relative=False).delta(10) == 0
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="threshold="):
            Threshold(bad, relative=False)
    with pytest.raises(ValueError, match=r"threshold=2.0 is not in \(0, 1\]"):
        Threshold(2.0)


def test_what_is_metered_of_a_varying_message_is_what_is_used():
    """Two workers send rows of 1 and of 4 large coordinates: a count of 32 bits, and 4 or 16 bytes with a byte of index."""
    import graphs

    x = torch.zeros(2, 8)
    x[0, 3], x[1, 2:6] = 1.0, 1.0
    net = gossip.Network(graphs.static(torch.full((2, 2), 0.5, dtype=torch.float64)))
    into = torch.zeros(2, 8)
    net.send(Threshold(0.5, ratio=0.5)(x))
    net.receive(into)
    assert torch.allclose(into, x.flip(0) / 2 - x / 2)
    assert net.meter.bits.tolist() == [32 + 8 * (4 + 1), 32 + 8 * (16 + 1)]


# -- low rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_is_exact_for_matrices_of_that_rank(rank):
    a, b = gaussian(4, 6 * rank).view(4, 6, rank), gaussian(4, 5 * rank, 1).view(4, 5, rank)
    x = (a @ b.mT).flatten(1)
    q = LowRank(rank, shape=(6, 5))(x, keys(4))
    assert torch.allclose(q.dense(), x, atol=1e-10)
    assert q.bits == 64 * rank * (6 + 5)


@pytest.mark.parametrize(("shape", "rank"), [((4, 4), 1), ((6, 3), 1), ((3, 6), 2), ((5, 5), 5)])
def test_low_rank_from_a_gaussian_start_attains_delta_when_all_singular_values_are_equal(shape, rank):
    a, b = shape
    rows = 4000
    x = torch.eye(a, b, dtype=torch.float64).flatten().expand(rows, -1)
    compressor = LowRank(rank, shape=shape)
    error = relative_error(compressor(x, keys(rows)).dense(), x)
    assert compressor.delta(a * b) == rank / min(a, b)
    assert float(error.mean()) == pytest.approx(1 - rank / min(a, b), abs=5 * float(error.std()) / rows**0.5 + 1e-12)


@given(st.integers(0, 50), st.sampled_from([(4, 5), (7, 3), None]), st.integers(1, 3))
def test_low_rank_is_a_projection_for_any_matrix(seed, shape, rank):
    d = 20 if shape is None else shape[0] * shape[1]
    x = gaussian(2, d, seed) * torch.logspace(-3, 3, d, dtype=torch.float64)
    q = LowRank(rank, shape=shape)(x, keys(2, seed)).dense()
    assert bool((relative_error(q, x) <= 1 + 1e-12).all())
    if shape is not None:  # folded rows are cut off
        assert torch.allclose(
            (q * (x - q)).sum(1), torch.zeros(2, dtype=torch.float64), atol=1e-8 * float(x.square().sum())
        )


def test_the_warm_start_tends_to_the_best_approximation():
    """40 × 50 Gaussian, r = 2: relative error of the best is about .84, of one cold iteration more (algorithms.md, 4)."""
    x, compressor = gaussian(1, 2000), LowRank(2, shape=(40, 50))
    best = 1 - torch.linalg.svdvals(x.view(40, 50))[:2].square().sum() / x.square().sum()
    memory = compressor.memory(x)
    errors = [float(relative_error(compressor(x, keys(1), memory).dense(), x)) for _ in range(60)]
    assert errors[0] > best + 0.02
    assert errors == pytest.approx(sorted(errors, reverse=True), abs=1e-9)
    assert errors[-1] == pytest.approx(float(best), abs=2e-3)
    assert float(best) == pytest.approx(0.84, abs=0.02)


def test_a_start_that_has_died_out_is_drawn_anew():
    compressor, memory = LowRank(1, shape=(2, 2)), torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)  # orthogonal to the start
    assert not compressor(x, keys(1), memory).dense().any()
    assert not memory.any()
    assert torch.allclose(compressor(x, keys(1), memory).dense(), x)
    with pytest.raises(ValueError, match="LowRank draws its start at random and got key=None"):
        compressor(x)
    with pytest.raises(ValueError, match=r"shape=\(2, 2\) does not hold a row of 5"):
        compressor(torch.zeros(1, 5), keys(1))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_low_rank_in_float32_at_any_scale(scale):
    x = (torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 5)) * scale).view(1, 12)
    assert torch.allclose(LowRank(2, shape=(3, 4))(x, keys(1)).dense() / scale, x / scale, rtol=1e-5)


def test_orthonormal_columns():
    P = orthonormal(torch.cat((gaussian(3, 24).view(3, 8, 3), torch.ones(3, 8, 2, dtype=torch.float64)), 2))
    gram = P.mT @ P
    assert torch.allclose(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), atol=1e-12)
    assert torch.allclose(gram.diagonal(dim1=1, dim2=2)[:, :4], torch.ones(3, 4, dtype=torch.float64))
    assert not P[:, :, 4].any()  # the second column of ones depends on the first


# -- layers ---------------------------------------------------------------------------------------------------------------


def test_per_layer_or_over_the_model():
    """The second layer's values are ten times larger: over the model all picks fall there (GRACE issue 9)."""
    layout = Layout.of(torch.nn.Sequential(torch.nn.Linear(7, 7, bias=False), torch.nn.Linear(7, 7, bias=False)))
    x = torch.cat((torch.arange(1.0, 50), torch.arange(10.0, 500, 10)))[None]
    whole = TopK(0.1)(x).dense()
    each = PerLayer(TopK(0.1), layout=layout)(x).dense()
    assert not whole[0, :49].any()
    assert int((whole != 0).sum()) == int((each != 0).sum()) == 10
    assert int((each[0, :49] != 0).sum()) == 5


def test_small_layers_go_as_they_are_and_weights_as_matrices():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    layout = Layout.of(model)
    compressor = PerLayer(LowRank(1)).bind(layout)
    kinds = [(type(c).__name__, getattr(c, "shape", None), size) for c, size in compressor.layers(layout.d)]
    assert kinds == [("LowRank", (5, 6), 30), ("Identity", None, 5), ("LowRank", (4, 5), 20), ("Identity", None, 4)]
    x = gaussian(2, layout.d, dtype=torch.float32)
    q = compressor(x, keys(2))
    assert q.bits == 32 * ((5 + 6) + 5 + (4 + 5) + 4)
    assert torch.equal(q.dense()[:, 30:35], x[:, 30:35])
    assert compressor.delta(layout.d) == 1 / 5
    assert PerLayer(TopK(0.1), below=25).bind(layout).delta(layout.d) == 0.1
    with pytest.raises(ValueError, match="a row of 10 numbers does not fit the layout of 59"):
        compressor(torch.zeros(1, 10), keys(1))


def test_layers_may_have_messages_of_any_length():
    """Their bytes follow each other without gaps, and what lies behind them is stale."""
    x = torch.tensor([[9.0, 1.0, 9.0, 0.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0]])
    q = PerLayer(Threshold(0.5, ratio=1.0), layout=[(3,), (4,)])(x)
    assert torch.equal(q.dense(), x * (x != 1.0) + x * torch.tensor([[0.0], [1.0]]) * (x == 1.0))
    assert q.used.tolist() == [(2 * 4 + 1) + (4 + 1), (4 + 1) + (4 * 4 + 1)]
    *counts, tail = q.parts()
    assert torch.cat(counts, 1).tolist() == [[2, 1], [1, 4]]
    tail[torch.arange(tail.shape[1]) >= q.used[:, None]] = 0xAA
    assert torch.equal(q.like((*counts, tail)).dense(), q.dense())
    assert PerLayer(Threshold(), layout=[(3,), (4,)])(x[:0]).dense().shape == (0, 7)


def test_layers_draw_apart():
    q = PerLayer(RandK(0.5), layout=[(50,), (50,)])(torch.ones(1, 100), keys(1)).dense()[0]
    assert not torch.equal(q[:50], q[50:])


# -- composition and warm-up ----------------------------------------------------------------------------------------------


@given(stacks())
def test_a_composition_errs_by_the_sum_of_both(x):
    """‖C(x) − x‖² = ‖S(x) − x‖² + ‖Q(v) − v‖²."""
    x = x.clamp(-1e6, 1e6)
    sparsifier, quantiser = TopK(0.3), Sign()
    kept = sparsifier(x)
    first = (kept.dense() - x).square().sum(1)
    second = (quantiser(kept.values).dense() - kept.values).square().sum(1)
    both = (Compose(sparsifier, quantiser)(x).dense() - x).square().sum(1)
    assert torch.allclose(both, first + second, rtol=1e-9, atol=1e-9 * float(x.square().sum()) + 1e-300)


@pytest.mark.parametrize(
    "quantiser", [gossip.Sign(), gossip.OneBit(), gossip.StochasticRounding(bits=1), gossip.LowRank(1)], ids=repr
)
def test_what_a_quantiser_makes_of_the_padding_of_a_last_block_is_not_added(quantiser):
    """Sign makes a number of each of the three zeros that fill the second block, all of which went to the last coordinate."""
    x = gaussian(2, 5)
    padded = torch.nn.functional.pad(x, (0, 3))
    values = quantiser(padded, rng.key(0, "compose", keys(2)))
    payload = Compose(BlockTopK(1.0, block=4), quantiser)(x, keys(2))
    assert torch.equal(payload.dense(), values.dense()[:, :5])
    into = torch.zeros(2, 5, dtype=torch.float64)
    payload.add_to(into)
    assert torch.equal(into, payload.dense())


@pytest.mark.parametrize(
    ("compressor", "x"),
    [
        (RandK(0.5, unbiased=True), torch.full((3, 8), 3e38)),  # times d/k
        (LowRank(1), torch.full((3, 400), 6e4, dtype=torch.float16)),  # the norms of columns
    ],
    ids=repr,
)
def test_what_leaves_the_range_of_the_dtype_is_refused(compressor, x):
    x[:2] /= 4096
    assert compressor(x[:2], keys(2)).dense().isfinite().all()
    with pytest.raises(NotFinite, match="row 2 of the 3 rows"):
        compressor(x, keys(3))


def test_composed_bits():
    x = gaussian(1, 2000, dtype=torch.float32)
    q = Compose(TopK(0.01), Sign())(x)
    assert q.bits == 8 * packed_bytes(2000, 20) + 8 * 3 + 32
    keyed = Compose(RandK(0.01), Sign())(x, keys(1))
    assert keyed.bits == 64 + 8 * 3 + 32
    with pytest.raises(ValueError, match="Sign sends no fixed number of plain values"):
        Compose(Sign(), TopK())


def test_both_unbiased_makes_unbiased():
    d, rows = 24, 30_000
    x = torch.linspace(-1, 2, d, dtype=torch.float64)
    compressor = Compose(RandK(0.5, unbiased=True), gossip.QSGD(4))
    q = compressor(x.expand(rows, d), keys(rows)).dense()
    omega = compressor.omega(d)
    assert torch.allclose(q.mean(0), x, rtol=0, atol=5 * 2 * math.sqrt(omega / rows))
    assert float((q - x).square().sum(1).mean() / x.square().sum()) <= omega * 1.02
    assert compressor.delta(d) == pytest.approx(1 - omega)


def test_the_ratio_warms_up_and_a_checkpoint_knows_where_it_is():
    compressor = WarmUp(TopK(0.02), stages=2, rounds=3, factor=5.0)
    x = gaussian(2, 100)
    memory = memory_of(compressor, x)
    sizes = [compress(compressor, x, None, memory).values.shape[1] for _ in range(9)]
    assert sizes == [50, 50, 50, 10, 10, 10, 2, 2, 2]
    algorithm = gossip.Choco(compressor=compressor, gamma=0.05)
    state = algorithm.init(x.clone())
    assert "own.0" in tree.leaves(state)
    assert compressor(x).values.shape[1] == 2  # without memory: after the warm-up
    for bad in ({"stages": -1}, {"rounds": 0}, {"factor": 1.0}):
        with pytest.raises(ValueError, match="stages="):
            WarmUp(**bad)
    with pytest.raises(ValueError, match="Sign has no `ratio`"):
        WarmUp(Sign())


# -- entropy coding -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20) | st.integers(0, 2**62), max_size=60), st.sampled_from([16, 512]))
def test_streams_survive_coding(numbers, direct):
    numbers = np.array(numbers, np.int64)
    twice = encode([(numbers, direct), (numbers[:3] % 7, 16)])
    back = decode(twice, [(len(numbers), direct), (len(numbers[:3]), 16)])
    assert back[0].tolist() == numbers.tolist()
    assert back[1].tolist() == (numbers[:3] % 7).tolist()


@given(st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from([1e-4, 0.03, 0.5, 0.9999]))
def test_many_numbers_survive_coding_in_a_table_and_their_entropy(seed, count, share):
    """n numbers, K of them different, of entropy H: n H bits, 0.04 n for coarse steps, 12 K for the table, 3 bytes."""
    numbers = np.random.default_rng(seed).geometric(share, count) % 16
    frequency = np.unique(numbers, return_counts=True)[1] / count
    coded = encode([(numbers, 16)])
    assert decode(coded, [(count, 16)])[0].tolist() == numbers.tolist()
    least = -count * (frequency * np.log2(frequency)).sum()
    assert 8 * len(coded) <= least + 0.04 * count + 24 + 12 * len(frequency)


@given(st.lists(st.integers(0, 15), min_size=8, max_size=20))
def test_a_carry_that_is_pending_at_the_end_of_a_code_is_no_loss(symbols):
    """The worst for a range coder: each symbol is the one in whose interval the coder's numbers overflow."""
    stream = pytest.importorskip("constriction").stream
    encoder, uniform = stream.queue.RangeEncoder(), stream.model.Uniform(16)
    encoder.encode(np.array(symbols, np.int32), uniform)
    for _ in range(20):
        _, (lower, width) = encoder.pos()
        symbols.append(min(15, (2**64 - 1 - lower) // ((width >> 24) << 20)))
        encoder.encode(np.array(symbols[-1:], np.int32), uniform)
        decoder = stream.queue.RangeDecoder(_words(_sealed(encoder)))
        assert decoder.decode(uniform, len(symbols)).tolist() == symbols


def test_a_code_is_the_same_bytes_on_every_machine():
    square = np.arange(5000) ** 2 % 1000
    assert zlib.crc32(encode([(square, 16), (square % 5, 512)])) == 526_028_295


CODED = [TopK(0.05), TopK(0.05, indices="plain"), RandK(0.05), BlockTopK(0.1, block=4), Compose(TopK(0.1), gossip.QSGD(7)),
         gossip.QSGD(7, norm="linf"), gossip.StochasticRounding(5), Compose(TopK(0.1), Sign())]  # fmt: skip


@pytest.mark.parametrize("inner", [c for c in CODED if not isinstance(c, RandK)], ids=repr)
@pytest.mark.parametrize("d", [40, 20_000])
def test_coding_loses_nothing_and_is_never_longer_by_more_than_the_bytes_of_its_length(inner, d):
    x = gaussian(3, d, dtype=torch.float32)
    plain, coded = inner(x, keys(3)), RangeCoded(inner)(x, keys(3))
    arrived = coded.like(tuple(p.clone() for p in coded.parts()))
    assert torch.equal(arrived.dense(), plain.dense())
    assert coded.bits <= plain.bits + 8 * coded.parts()[-2].element_size()


@pytest.mark.parametrize(
    "inner", [TopK(0.1), Compose(TopK(0.1), gossip.QSGD(7, norm="linf")), gossip.QSGD(31, norm="linf")], ids=repr
)
def test_coded_messages_are_within_two_percent_of_their_entropy(inner):
    x = gaussian(1, 200_000, dtype=torch.float32)
    plain, coded = inner(x, keys(1)), RangeCoded(inner)(x, keys(1))
    floor, other = entropy(plain), sum(8 * p.numel() * p.element_size() for p in coded.parts()[:-2])
    assert floor <= coded.bits
    assert coded.bits - other <= 1.02 * (floor - other)
    assert coded.bits < plain.bits


@pytest.mark.parametrize(
    ("inner", "d"),
    [(TopK(0.1), 1000), (gossip.QSGD(127), 1000), (gossip.QSGD(7), 10_000), (gossip.QSGD(1), 100_000),
     (gossip.TernGrad(), 10_000), (gossip.StochasticRounding(8), 10_000), (Compose(TopK(0.1), gossip.QSGD(7)), 10_000)],
    ids=repr,
)  # fmt: skip
def test_short_coded_messages_are_within_five_percent_of_their_entropy(inner, d):
    x = gaussian(1, d, dtype=torch.float32)
    assert RangeCoded(inner)(x, keys(1)).bits <= 1.05 * entropy(inner(x, keys(1)))


def test_entropy_is_that_of_the_frequencies():
    x = torch.zeros(1, 64)
    x[0, torch.tensor([1, 3, 5, 7, 10, 13, 16, 19])] = 1.0  # gaps 1 four times, then 2 four times: a bit each
    payload = TopK(8 / 64)(x)
    assert entropy(payload) == pytest.approx(8 * 32 + 8)
    assert entropy(Identity()(x)) == 64 * 32
    with pytest.raises(ValueError, match="RandK has no indices or codes"):
        RangeCoded(RandK(0.1))(x, keys(1))


def test_every_index_and_code_is_found():
    x = gaussian(1, 500, dtype=torch.float32)
    assert list(codecs_of(TopK(0.1)(x))) == [1]
    assert list(codecs_of(Compose(TopK(0.1), gossip.QSGD(7))(x, keys(1)))) == [0, 1]
    assert codecs_of(Identity()(x)) == {}


# -- refused rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1), RandK(1.0), BlockTopK(0.1, block=4), Threshold(), LowRank(2), Compose(TopK(0.1), Sign()),
     PerLayer(TopK(0.1)), RangeCoded(TopK(0.1)), WarmUp(TopK(0.1))],
    ids=lambda c: type(c).__name__ if dataclasses.is_dataclass(c) else str(c),
)  # fmt: skip
def test_a_diverged_row_is_refused_by_number(compressor, value):
    x = gaussian(3, 50)
    x[2, 17] = value
    with pytest.raises(NotFinite, match="row 2 of the 3 rows"):
        compressor(x, keys(3))


# -- memory of a compressor inside an algorithm --------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", [LowRank(1), PerLayer(LowRank(1)), Compose(TopK(0.5), LowRank(1))], ids=repr)
def test_choco_with_a_warm_start_finds_the_average(compressor):
    import graphs

    x = gaussian(8, 16)
    _, distance = gossip.consensus(x, graphs.ring(8), 800, compressor=compressor, gamma=0.15, history=True)
    assert distance[-1] < 1e-6 * distance[0]


@pytest.mark.parametrize(
    "compressor",
    [LowRank(1), Threshold(), RangeCoded(TopK(0.2))],
    ids=lambda c: type(c).__name__,
)
def test_memory_and_varying_lengths_under_the_asynchronous_clock(compressor):
    """Workers meet in pairs, so the rows of a message are others each time."""
    import graphs

    b = gaussian(8, 20)
    algorithm = gossip.Choco(compressor=compressor, gamma=0.1)
    options = {"x0": torch.zeros(20, dtype=torch.float64), "every": 30, "clock": gossip.Asynchronous()}
    *_, last = gossip.simulate(lambda x, workers, step: x - b[workers], algorithm, graphs.ring(8), 30, **options)
    assert last.bits > 0
    assert float((last.x.mean(0) - b.mean(0)).square().sum()) < 0.3 * float(b.mean(0).square().sum())


def test_a_warm_up_is_refused_where_two_who_meet_have_sent_different_numbers_of_messages():
    import graphs

    algorithm = gossip.Choco(compressor=WarmUp(TopK(0.2), 2, 5), gamma=0.1)
    with pytest.raises(gossip.Incompatible, match=r"WarmUp under the asynchronous clock.*use TopK\(ratio=0.2"):
        gossip.Asynchronous().check(algorithm, graphs.as_schedule(graphs.ring(8)))


def test_scaled_random_k_has_no_start_value_of_gamma():
    with pytest.raises(ValueError, match="RandK names no start value"):
        gossip.Choco(compressor=gossip.RandK(0.1, unbiased=True))


def test_block_top_k_of_no_rows_is_a_message_of_no_rows():
    assert gossip.BlockTopK(0.5, block=4)(torch.zeros(0, 9)).dense().shape == (0, 9)
