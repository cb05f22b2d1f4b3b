"""The network against plain matrix algebra, in one process and over ranks that are threads (gossip/network.py)."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import in_threads
from test_plan import matrices, partitions

import gossip
import graphs
from gossip import Network, Placement, rng
from gossip.wire import HEADER, row_bits, spec

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.3}
RING = graphs.static(graphs.metropolis(graphs.ring(6)))
BLOCKS = [[range(6)], [[0, 1, 2], [3, 4, 5]], [[5, 0], [3], [4, 1, 2]], [[i] for i in range(6)]]


def rows(n, *shape, dtype=torch.float64, seed=0):
    return (torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5).to(dtype)


def collected(blocks, parts):
    """The rows of all ranks in the order of the workers."""
    out = parts[0].new_empty((sum(map(len, blocks)), *parts[0].shape[1:]))
    for block, part in zip(blocks, parts):
        out[list(block)] = part
    return out


def brute_edges(W, bits, messages=1):
    return {(j, i): (messages, bits) for i, j in (W.to_dense() != 0).nonzero().tolist() if i != j}


@given(st.data())
def test_mix_is_w_times_x_for_any_w_partition_dtype_and_shape(data):
    W = data.draw(matrices())
    n = len(W)
    blocks = data.draw(partitions(n))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    x, y = rows(n, *shape, dtype=dtype), rows(n, 1, dtype=dtype, seed=1)

    def rank(placement, transport):
        net = Network(graphs.static(W), placement, transport)
        mine, also = x[placement.rows], y[placement.rows]
        for k in range(2):
            net.begin(k)
            net.mix(mine, also)
        handed = 0 if transport is None else transport.handed
        return mine, also, net.meter.edges, net.meter.wire_bytes, handed

    results = in_threads(blocks, rank)
    twice = W.to_dense() @ W.to_dense()
    for place, start in ((0, x), (1, y)):
        found = collected(blocks, [r[place] for r in results])
        assert found.dtype == dtype
        assert torch.allclose(found.double(), torch.tensordot(twice, start.double(), 1), rtol=0, atol=DTYPES[dtype])
    bits = 8 * dtype.itemsize * (x[0].numel() + 1)
    edges = {}
    for r in results:
        edges |= r[2]
        assert r[3] == r[4], "wire_bytes are the bytes handed to the transport"
    assert edges == brute_edges(W, 2 * bits, 2)


@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_receive_adds_what_was_sent_although_x_moved_meanwhile(blocks, scale):
    x, move = rows(6, 4), rows(6, 4, seed=1)

    def rank(placement, transport):
        net = Network(RING, placement, transport)
        mine = x[placement.rows]
        net.send(mine)
        mine.mul_(0).add_(x[placement.rows]).add_(move[placement.rows])
        net.receive(mine, scale=scale)
        return mine

    W = RING(0).to_dense()
    expected = x + move + scale * (W @ x - x)
    assert torch.allclose(collected(blocks, in_threads(blocks, rank)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
def test_a_received_message_may_go_elsewhere_than_the_sent_tensor(blocks):
    """CHOCO's running sum: lag_i += Σ_j W_ij q_j − q_i, and q stays as it was."""
    x, lag = rows(6, 4), rows(6, 4, seed=1)

    def rank(placement, transport):
        net = Network(RING, placement, transport)
        q, mine = x[placement.rows], lag[placement.rows]
        net.send(q)
        net.receive(mine)
        assert torch.equal(q, x[placement.rows])
        return mine

    found = collected(blocks, in_threads(blocks, rank))
    assert torch.allclose(found, lag + RING(0).to_dense() @ x - x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "make", [lambda a: a.T.contiguous().T, lambda a: torch.stack((a, a), 2)[:, :, 0]], ids=["T", "strided"]
)
def test_rows_need_not_be_contiguous(make):
    x = rows(6, 4)
    mine = make(x.clone())
    assert not mine.is_contiguous()
    Network(RING).mix(mine)
    assert torch.allclose(mine, RING(0).to_dense() @ x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "compressor", [gossip.Identity(), gossip.TopK(0.3), gossip.RandK(0.3), gossip.Sign()], ids=repr
)
@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
def test_a_payload_travels_as_its_parts_and_is_added_as_its_dense_form(compressor, blocks):
    d = 21
    x = rows(6, d, dtype=torch.float32)

    def rank(placement, transport):
        net = Network(RING, placement, transport, seed=2)
        payload = compressor(x[placement.rows], net.keys())
        into = torch.zeros(len(placement.rows), d)
        net.send(payload)
        net.receive(into, scale=0.5)
        handed = 0 if transport is None else transport.handed
        return into, net.meter.edges, payload.bits, net.meter.wire_bytes, handed, len(net.plan.sends)

    results = in_threads(blocks, rank)
    keys = Network(RING, seed=2).keys()
    q = compressor(x.clone(), keys).dense()
    expected = 0.5 * (RING(0).to_dense().float() @ q - q)
    assert torch.allclose(collected(blocks, [r[0] for r in results]), expected, atol=1e-6)
    edges = {}
    for r in results:
        edges |= r[1]
        assert r[3] == r[4]
        assert r[4] >= r[5] * (HEADER + r[2] // 8)
    assert edges == brute_edges(RING(0), results[0][2])


@pytest.mark.parametrize("inner", [gossip.Threshold(0.5, 0.9), gossip.RangeCoded(gossip.TopK(0.1))], ids=repr)
@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
def test_layers_whose_lengths_vary_travel_without_gaps(inner, blocks):
    """Two that vary, a small one that does not between them; stale bytes behind what is used are not read."""
    layout, W = [(40, 30), (7,), (900,)], RING(0).to_dense().float()
    compressor = gossip.PerLayer(inner, gossip.Cast("float16"), below=10, layout=layout)
    x = rows(6, 2107, dtype=torch.float32) ** 5 * torch.exp(-torch.arange(6)[:, None] * torch.arange(2107) / 500)

    def rank(placement, transport):
        net = Network(RING, placement, transport, seed=2)
        for k in range(2):
            net.begin(k)
            into = torch.zeros(len(placement.rows), 2107)
            net.send(compressor(x[placement.rows] * (k or 2), net.keys()))
            net.receive(into)
        return into, net.meter.edges

    results = in_threads(blocks, rank)
    alone = [c(part) for c, part in zip((inner, gossip.Cast("float16"), inner), x.split((1200, 7, 900), 1))]
    q = torch.cat([payload.dense() for payload in alone], 1)
    assert torch.allclose(collected(blocks, [r[0] for r in results]), W @ q - q, atol=1e-5)
    edges = {}
    for r in results:
        edges |= r[1]
    bits = 8 * (alone[0].used + alone[2].used) + sum(
        row_bits(spec(p.parts()[: None if p.used is None else -1])) for p in alone
    )
    assert len(bits.unique()) > 1
    assert edges == {(j, i): (2, 2 * int(bits[j])) for j, i in brute_edges(RING(0).to_dense(), 0)}


@dataclass(frozen=True)
class Runs(gossip.Payload):
    """Small integers as so many bytes of ones: of variable length, and stored in at most 20 bytes."""

    length: torch.Tensor
    ones: torch.Tensor

    def parts(self):
        return self.length, self.ones

    def like(self, parts):
        return Runs(*parts)

    @property
    def used(self):
        return self.length[:, 0].long()

    def dense(self):
        inside = torch.arange(20) < self.length
        return (self.ones * inside).sum(1, keepdim=True, dtype=torch.float64)


@pytest.mark.parametrize("blocks", [*BLOCKS, [[0, 3], [1], [2, 4], [5]]], ids=len)
@pytest.mark.parametrize("stretches", [True, False])
def test_a_payload_of_variable_length_travels_as_long_as_it_is(blocks, stretches):
    """Where a receive buffer must have the length of the message, it travels at its capacity, and is metered as it is."""
    W, n, rounds = RING(0).to_dense(), 6, 3

    def rank(placement, transport):
        if transport is not None:
            transport.stretches = stretches
        net, into = Network(RING, placement, transport), torch.zeros(len(placement.rows), 1, dtype=torch.float64)
        for k in range(rounds):
            net.begin(k)
            length = (placement.rows[:, None] * 3 + k).int()
            ones = (torch.arange(20) < length).to(torch.uint8)
            net.send(Runs(length, ones))
            net.receive(into)
        peers = len(net.plan.sends)
        return into, net.meter.edges, net.meter.wire_bytes, 0 if transport is None else transport.handed, peers

    results = in_threads(blocks, rank)
    sent = sum(torch.arange(6.0, dtype=torch.float64)[:, None] * 3 + k for k in range(rounds))
    assert torch.allclose(collected(blocks, [r[0] for r in results]), W @ sent - sent, atol=1e-13)
    edges = {}
    for r in results:
        edges |= r[1]
    length = {i: sum(3 * i + k for k in range(rounds)) for i in range(n)}
    assert edges == {(j, i): (rounds, 32 * rounds + 8 * length[j]) for j, i in brute_edges(W, 0)}
    for block, (*_, wire, handed, peers) in zip(blocks, results):
        assert wire == handed
        if len(block) == 1:
            at_capacity = rounds * peers * (HEADER + 8 + 24)
            assert handed == (peers * (rounds * (HEADER + 8) + length[block[0]]) if stretches else at_capacity)


def test_top_one_percent_of_a_large_row_is_under_three_percent_on_the_wire():
    d = 10_000
    x = rows(2, d, dtype=torch.float32)
    W = graphs.static(torch.full((2, 2), 0.5, dtype=torch.float64))

    def rank(placement, transport):
        net = Network(W, placement, transport)
        net.send(gossip.TopK(0.01)(x[placement.rows]))
        net.receive(torch.zeros(1, d))
        return transport.handed

    assert all(handed < 0.03 * 4 * d for handed in in_threads([[0], [1]], rank))


# -- large messages, in packets ------------------------------------------------------------------------------------------


@given(st.data())
def test_packets_change_nothing_for_any_w_partition_dtypes_and_shapes(data):
    """Two parts of any dtypes and shapes, one of them strided, in packets of at least 16 columns; with a thread as well."""
    W = data.draw(matrices())
    n = len(W)
    blocks = data.draw(partitions(n))
    dtypes = data.draw(st.tuples(*[st.sampled_from(list(DTYPES))] * 2))
    shapes = data.draw(st.tuples(*[st.sampled_from([(), (1,), (70,), (9, 13), (200,)])] * 2))
    chunk, scale = data.draw(st.sampled_from([64, 1000, 1 << 20])), data.draw(st.sampled_from([1.0, 0.25]))
    background = data.draw(st.booleans())
    x, y = (rows(n, *shape, dtype=dtype, seed=i) for i, (dtype, shape) in enumerate(zip(dtypes, shapes)))

    def rank(placement, transport):
        net = Network(graphs.static(W), placement, transport, chunk=chunk)
        net.background = background
        mine, also = x[placement.rows], y[placement.rows]
        if also.ndim == 2:
            also = also.T.contiguous().T
        for k in range(2):
            net.begin(k)
            net.send(mine, also)
            assert all(torch.equal(a.view_as(b), b) for a, b in zip(net.in_flight, (mine, also)))
            net.receive(mine, also, scale=scale)
        handed = 0 if transport is None else transport.handed
        return mine, also, net.meter.edges, net.meter.wire_bytes == handed

    results = in_threads(blocks, rank)
    step = (1 - scale) * torch.eye(n, dtype=torch.float64) + scale * W.to_dense()
    for place, begun in enumerate((x, y)):
        found = collected(blocks, [r[place] for r in results])
        expected = torch.tensordot(step @ step, begun.double(), 1)
        assert torch.allclose(found.double(), expected, rtol=0, atol=DTYPES[begun.dtype])
    edges = {}
    for r in results:
        edges |= r[2]
        assert r[3]
    bits = 8 * sum(a[0].numel() * a.element_size() for a in (x, y))
    assert edges == brute_edges(W, 2 * bits, 2)


@pytest.mark.parametrize("topology", [graphs.ring, graphs.complete], ids=lambda f: f.__name__)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_large_row_needs_two_chunks_per_peer_and_never_a_row_per_neighbour(topology, background, in_place):
    """A row of its own is only kept where x may move between send and receive."""
    d, chunk, n = 100_000, 20_000, 5

    def rank(placement, transport):
        net = Network(graphs.as_schedule(topology(n)), placement, transport, chunk=chunk)
        net.background = background
        x, held = rows(n, d, dtype=torch.float32)[placement.rows], set()
        for k in range(4):
            net.begin(k)
            if in_place:
                net.mix(x)
            else:
                net.send(x)
                net.receive(x)
            held.add((net.nbytes, len(transport.buffers)))
        return held, len(net.plan.remote)

    row = 4 * d
    for held, peers in in_threads([[i] for i in range(n)], rank):
        ((most, buffers),) = held  # the same after each round
        chunks = -(-row // (chunk // 64 * 64))  # 16 columns of float32 at least
        kept = 0 if in_place else 1 + background
        assert most <= row * kept + HEADER + peers * (2 * chunk + HEADER)
        assert buffers == 1 + chunks + 3 * peers  # a lead each way, and two rooms for what comes


def test_identity_payloads_travel_in_packets_too():
    """CHOCO with no compression holds no row per neighbour either."""
    x = rows(6, 1000)

    def rank(placement, transport):
        net = Network(RING, placement, transport, chunk=512)
        into = torch.zeros(1, 1000, dtype=torch.float64)
        net.send(gossip.Identity()(x[placement.rows]))
        net.receive(into)
        return into, len(net._route_of(((torch.float64, (1000,)),), True, x.device).steps)

    results = in_threads([[i] for i in range(6)], rank)
    assert torch.allclose(torch.cat([r[0] for r in results]), RING(0).to_dense() @ x - x, rtol=0, atol=1e-14)
    assert {r[1] for r in results} == {16}


@pytest.mark.parametrize("chunk", [1 << 20, 4096])
def test_a_warm_round_allocates_nothing(chunk):
    """Counted by torch's profiler, in rank 0's thread, where all ranks take their turns."""
    W = graphs.static(torch.full((2, 2), 0.5, dtype=torch.float64))

    def rank(placement, transport):
        net, x = Network(W, placement, transport, chunk=chunk), torch.zeros(1, 5000)
        for k in range(2):
            net.begin(k)
            net.mix(x)
        if placement.rank:
            net.begin(2)
            net.mix(x)
            return None
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            net.begin(2)
            net.mix(x)
        return [e.name for e in profile.events() if e.self_cpu_memory_usage > 0 and e.name != "aten::clone"]

    allocations = in_threads([[0], [1]], rank)[0]
    assert not set(allocations) - {"[memory]", "aten::empty_strided", "aten::clone"}, allocations


# -- misuse --------------------------------------------------------------------------------------------------------------


def test_a_second_message_before_the_first_is_received_is_refused():
    net, x = Network(RING), rows(6, 4)
    net.send(x)
    with pytest.raises(RuntimeError, match=r"second message.*round 0.*net\.send\(x, y\)"):
        net.send(x)
    with pytest.raises(RuntimeError, match=r"exchange in round 0.*call net\.receive first"):
        net.exchange(rows(12, 4))
    net.receive(x)
    net.send(x)  # and then it is allowed again
    net.receive(x)


def test_receive_without_send_is_refused():
    with pytest.raises(RuntimeError, match=r"nothing was sent in round 0: call net\.send"):
        Network(RING).receive(rows(6, 4))


def test_as_many_buffers_as_tensors_of_the_message():
    net, x = Network(RING), rows(6, 4)
    net.send(x, x)
    with pytest.raises(ValueError, match=r"2 tensors were sent as one message and 1 given to receive into"):
        net.receive(x)


def test_a_placement_of_another_size_or_without_a_transport_is_refused():
    with pytest.raises(ValueError, match="schedule connects 6 workers and the placement hosts 5"):
        Network(RING, Placement.here(5))
    with pytest.raises(ValueError, match=r"over 2 processes, which needs a transport: pass gossip\.connect\(\)"):
        Network(RING, Placement.even(6, 2, 0))


# -- exchange ------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_exchange_carries_each_edge_its_own_message(data):
    W = data.draw(matrices())
    n = len(W)
    blocks = data.draw(partitions(n))
    every = sorted(brute_edges(W, 0))

    def rank(placement, transport):
        net = Network(graphs.static(W), placement, transport)
        out = []
        for step in range(2):  # two exchanges of one round
            i, j = net.plan.out_edges
            sent = torch.stack((i, j, i * 0 + step), 1)
            arrived = net.exchange(sent)
            out += [arrived]
            assert arrived[:, :2].T.equal(net.plan.in_edges)
            assert bool((arrived[:, 2] == step).all())
        handed = 0 if transport is None else transport.handed
        return torch.cat(out), net.meter.edges, net.meter.wire_bytes == handed

    results = in_threads(blocks, rank)
    arrived = [tuple(e) for r in results for e in r[0][:, :2].tolist()]
    assert sorted(arrived) == sorted(2 * every)
    edges = {}
    for r in results:
        edges |= r[1]
        assert r[2]
    assert edges == dict.fromkeys(every, (2, 2 * 3 * 64))


# -- averages, keys, gathering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
@pytest.mark.parametrize("d", [1, 4, 13])
def test_average_is_exact_and_metered_as_a_ring_all_reduce(blocks, d):
    """Every worker sends 2 (n − 1) messages round the ring and all chunks but one, twice."""
    x = rows(6, d)

    def rank(placement, transport):
        net = Network(RING, placement, transport)
        mine = x[placement.rows]
        mean = net.mean(mine)
        net.average(mine)
        return mine, mean, net.meter.edges, net.gather(x[placement.rows])

    results = in_threads(blocks, rank)
    mean = x.mean(0)
    assert torch.allclose(collected(blocks, [r[0] for r in results]), mean.expand(6, -1), rtol=0, atol=1e-15)
    edges = {}
    for _, m, e, everything in results:
        assert torch.allclose(m, mean[None], rtol=0, atol=1e-15)
        assert torch.equal(everything, x)
        edges |= e
    assert set(edges) == {(i, (i + 1) % 6) for i in range(6)}
    assert all(messages == 10 for messages, _ in edges.values())
    assert sum(bits for _, bits in edges.values()) == 2 * 5 * d * 64  # 2 (n − 1) / n models per worker
    chunk = -(-d // 6) * 64
    assert all(2 * d * 64 - 2 * chunk <= bits <= 2 * d * 64 for _, bits in edges.values())


def test_average_of_one_and_of_two_workers():
    one, two = (graphs.static(torch.full((n, n), 1 / n, dtype=torch.float64)) for n in (1, 2))
    net, x = Network(one), rows(1, 5)
    before = x.clone()
    net.average(x)
    assert torch.equal(x, before)
    assert net.meter.edges == {}
    net, x = Network(two), rows(2, 4)
    net.average(x)
    assert net.meter.edges == {(0, 1): (2, 4 * 64), (1, 0): (2, 4 * 64)}


def test_gather_is_in_the_order_of_the_workers_also_when_all_rows_are_here():
    placement = Placement(((2, 0, 1),))
    net = Network(graphs.static(torch.full((3, 3), 1 / 3, dtype=torch.float64)), placement)
    assert net.gather(placement.rows).tolist() == [0, 1, 2]


def test_keys_depend_on_seed_round_worker_and_draw_and_not_on_the_placement():
    whole = Network(RING, seed=4)
    part = Network(RING, Placement(((4, 1), (0, 2, 3, 5))), transport=object(), seed=4)
    seen = set()
    for k in range(3):
        for net in (whole, part):
            net.begin(k)
        for _ in range(2):
            keys = whole.keys()
            assert torch.equal(part.keys(), keys[[4, 1]])
            seen |= set(keys.tolist())
    assert len(seen) == 3 * 2 * 6
    whole.begin(1)
    again = whole.keys()
    assert set(again.tolist()) <= seen
    assert not set(Network(RING, seed=5).keys().tolist()) & seen
    whole.begin(1)
    part.begin(1)
    (shared,) = set(whole.keys(shared=True).tolist()) | set(part.keys(shared=True).tolist())
    assert shared not in seen
    whole.begin(1)
    u = whole.uniform(7, torch.float32)
    assert u.shape == (6, 7)
    assert torch.equal(u, rng.uniform(again, 7, torch.float32))


# -- buffers -------------------------------------------------------------------------------------------------------------


def test_buffers_are_reused_from_round_to_round():
    schedule = graphs.cycle([graphs.metropolis(graphs.ring(6)), graphs.metropolis(graphs.star(6))])

    def rank(placement, transport):
        net, x = Network(schedule, placement, transport), rows(6, 4)[placement.rows]

        def rounds(start, stop):
            for k in range(start, stop):
                net.begin(k)
                net.mix(x)
                net.exchange(x.new_zeros(net.plan.out_edges.shape[1], 2))
            return set(transport.buffers), len(net._messages)

        return rounds(0, 4) == rounds(4, 40)

    assert all(in_threads([[0], [1, 2], [3, 4, 5]], rank))


def test_a_schedule_that_never_repeats_keeps_plans_and_buffers_bounded():
    n = 12

    def W(k):
        W = torch.eye(n, dtype=torch.float64)
        i, j = k % n, (k // n + k + 1) % n
        if i != j:
            W[[i, i, j, j], [i, j, i, j]] = 0.5
        return W

    schedule = graphs.Schedule(n, W, period=None)

    def rank(placement, transport):
        net, x = Network(schedule, placement, transport), rows(n, 3)[placement.rows]
        for k in range(300):
            net.begin(k)
            net.mix(x)
        return x, len(net._messages), len(net._plans), net.meter.edges

    blocks = [[i] for i in range(n)]
    results = in_threads(blocks, rank)
    x, edges = rows(n, 3), {}
    for k in range(300):
        x = W(k) @ x
        for e in brute_edges(W(k), 0):
            messages, bits = edges.get(e, (0, 0))
            edges[e] = messages + 1, bits + 3 * 64
    assert torch.allclose(collected(blocks, [r[0] for r in results]), x, rtol=0, atol=1e-13)
    assert {k: v for r in results for k, v in r[3].items()} == edges
    assert max(r[1] for r in results) <= 2  # one out, one in
    assert max(r[2] for r in results) <= 65


def test_in_one_process_a_message_is_copied_into_the_same_room_every_round():
    net, x = Network(RING), rows(6, 4)
    net.mix(x)
    held = net.nbytes
    for k in range(5):
        net.begin(k)
        net.mix(x)
    assert net.nbytes == held == HEADER + 6 * 4 * 8
