"""Real gloo processes: what goes wrong is detected, named and ended within seconds (gossip/transport.py)."""

import json
import logging
import os
import re
import resource
import signal
import socket
import time

import pytest
import torch
from support import launch, values

import gossip
import graphs
from gossip import Network, Placement

SOON = 20.0  # seconds, on a busy machine; the transport's own bound is far above it


def network(rank, size, store, topology=None, timeout=120.0):
    schedule = graphs.static(graphs.metropolis(topology or graphs.complete(size)))
    return Network(schedule, Placement.even(size, size, rank), gossip.connect(rank, size, store, timeout=timeout))


def mixing(rank, size, store, topology, d, rounds):
    net = network(rank, size, store, topology)
    x = torch.full((1, d), float(rank), dtype=torch.float64)
    for k in range(rounds):
        net.begin(k)
        net.mix(x)
    gossip.disconnect()
    return float(x[0, 0]), bool((x == x[0, 0]).all())


@pytest.mark.parametrize("make", [graphs.path, graphs.ring, graphs.star, graphs.complete], ids=lambda f: f.__name__)
def test_large_messages_pass_on_any_graph(make, tmp_path):
    """Everybody sending first would deadlock: receives are posted first. 1 MB, an odd number of ranks."""
    outcomes = values(launch(mixing, 3, tmp_path, make(3), 1 << 17, 4))
    W = graphs.metropolis(make(3)).to_dense()
    expected = torch.linalg.matrix_power(W, 4) @ torch.arange(3.0, dtype=torch.float64)
    assert [value for value, _ in outcomes] == pytest.approx(expected.tolist(), abs=1e-12)
    assert all(whole for _, whole in outcomes)


def idle(rank, size, store):
    """Rank 2 is idle in round 0, and all in round 2; averages may be taken while an exchange is in flight."""
    W = torch.eye(3, dtype=torch.float64)
    W[:2, :2] = 0.5
    schedule = graphs.cycle([W, graphs.metropolis(graphs.ring(3)), torch.eye(3, dtype=torch.float64)])
    net = Network(schedule, Placement.even(3, 3, rank), gossip.connect(rank, size, store))
    x, means = torch.tensor([[3.0 * rank]], dtype=torch.float64), []
    for k in range(3):
        net.begin(k)
        net.send(x)
        means.append(float(net.mean(x)))
        net.receive(x)
    gossip.disconnect()
    return float(x), means, dict(net.meter.edges)


def test_a_rank_may_be_idle_and_metrics_may_be_taken_in_flight(tmp_path):
    for rank, (x, means, edges) in enumerate(values(launch(idle, 3, tmp_path))):
        assert x == pytest.approx(3)
        assert means == pytest.approx([3, 3, 3])
        assert sorted(edges) == [(rank, j) for j in range(3) if j != rank]


def ahead(rank, size, store):
    net = network(rank, size, store)
    net.begin(7 if rank else 6)
    net.mix(torch.zeros(1, 4))


def test_a_neighbour_one_round_ahead_is_detected_on_both_sides(tmp_path):
    errors = [o.error for o in launch(ahead, 2, tmp_path)]
    assert "from rank 1 is out of step" in errors[0]
    assert "(6, 1, 0, 80), got (7, 1, 0, 80)" in errors[0]
    assert "from rank 0 is out of step" in errors[1]


def skipping(rank, size, store):
    """Rank 1 makes one exchange less in round 0 and sends round 1's message instead."""
    net = network(rank, size, store)
    for k in range(2):
        net.begin(k)
        for _ in range(2 - (k == 0 and rank == 1)):
            net.mix(torch.zeros(1, 4))


def test_a_skipped_message_is_detected(tmp_path):
    error = launch(skipping, 2, tmp_path)[0].error
    assert "out of step" in error
    assert "(0, 1, 1, 80), got (1, 1, 0, 80)" in error


def dying(rank, size, store, victim, how):
    net = network(rank, size, store, graphs.ring(size))
    x = torch.zeros(1, 1000)
    for k in range(1000):
        net.begin(k)
        if rank == victim and k == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the worker's own mistake")
        net.mix(x)


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_dead_peer_is_reported_by_name_with_rank_and_round(how, tmp_path):
    start = time.monotonic()
    outcomes = launch(dying, 4, tmp_path, 1, how, timeout=60)
    assert time.monotonic() - start < SOON
    if how == "killed":
        assert outcomes[1] == (None, None, -signal.SIGKILL)
    else:
        assert "ArithmeticError: the worker's own mistake" in outcomes[1].error
    for rank in (0, 2):
        error = outcomes[rank].error
        assert "PeerError" in error
        assert f"rank {rank} lost rank 1 in round 3 (connection closed)" in error
    assert "PeerError" in outcomes[3].error  # the news travels


def stuck(rank, size, store):
    net = network(rank, size, store, timeout=2.0)
    if rank:
        time.sleep(5)
        return None
    start = time.monotonic()
    with pytest.raises(
        gossip.PeerError, match=r"rank 0 could not receive 80 bytes from rank 1 in round 0: no answer within 2 s"
    ):
        net.mix(torch.zeros(1, 4))
    return time.monotonic() - start


def test_a_stuck_peer_is_given_up_after_the_bound(tmp_path):
    waited = values(launch(stuck, 2, tmp_path))[0]
    assert 1.5 < waited < 4.5


def chained(rank, size, store):
    """On a path 0 - 1 - 2 rank 2 sleeps in round 0: rank 1 waits for it there, and rank 0 for rank 1 in round 1."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gossip").addHandler(handler)
    transport = gossip.connect(rank, size, store, timeout=5.0)
    schedule = graphs.static(graphs.metropolis(graphs.path(size)))
    net = Network(schedule, Placement.even(size, size, rank), transport)
    if rank == 2:
        time.sleep(8)
        return None, said

    def rounds():
        for k in range(3):
            net.begin(k)
            net.mix(torch.zeros(1, 4))

    with pytest.raises(gossip.PeerError) as caught:
        rounds()
    time.sleep(1)  # the store is rank 0's
    return str(caught.value), said


def test_a_stall_is_explained_by_who_waits_for_whom(tmp_path):
    first, second, _ = values(launch(chained, 3, tmp_path))
    rest = "rank 2 waits for nobody: it computes, is stopped, or has ended)"
    chain = rf"\(rank 1 waits in round 0 to receive 80 bytes from rank 2, {rest[:-1]}\)"
    assert re.search(
        rf"rank 0 has waited .* for rank 1 in round 1, to receive 80 bytes from rank 1; .* {chain}", first[1][0]
    )
    assert rest in second[1][0]
    assert re.search(r"rank 1 could not receive 80 bytes from rank 2 in round 0: no answer within 5 s", second[0])
    assert rest in second[0]


def slow(rank, size, store):
    """Rank 1 is late in round 1, but within the bound."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gossip").addHandler(handler)
    net = network(rank, size, store, timeout=10.0)
    x = torch.zeros(1, 1000)
    for k in range(3):
        net.begin(k)
        if rank == k == 1:
            time.sleep(2)
        net.mix(x)
    gossip.disconnect()
    return said


def test_a_stall_is_warned_of_at_a_tenth_of_the_bound(tmp_path):
    said = values(launch(slow, 2, tmp_path))
    assert said[1] == []
    (line,) = said[0]
    assert re.fullmatch(
        r"rank 0 has waited 1(\.\d+)? s for rank 1 in round 1, to receive 4,064 bytes from rank 1; it gives up after 10 s "
        r"\(rank 1 waits for nobody: it computes, is stopped, or has ended\)",
        line,
    )


def packets(rank, size, store):
    """A row of 1 MB in chunks of 64 KB, copied or as it lies, with and without a thread, and what the transport counts."""
    transport = gossip.connect(rank, size, store)
    schedule = graphs.as_schedule(graphs.ring(size))
    net = Network(schedule, Placement.even(size, size, rank), transport, chunk=1 << 16)
    x = torch.full((1, 1 << 18), float(rank))
    for k in range(6):
        net.background = k % 2 == 1
        net.begin(k)
        if k >= 4:
            net.mix(x)
            continue
        net.send(x)
        time.sleep(0.05)
        net.receive(x)
    net.background = True
    net.begin(6)
    net.send(x)
    time.sleep(0.5)
    before = transport.waited
    net.receive(x)
    counts = transport.messages, transport.bytes, net.meter.wire_bytes, transport.waited <= transport.exchanging
    gossip.disconnect()
    return x, counts, transport.waited - before


def test_packets_over_real_connections(tmp_path):
    said = values(launch(packets, 4, tmp_path))
    W = torch.linalg.matrix_power(graphs.metropolis(graphs.ring(4)).to_dense(), 7)
    expected = W @ torch.arange(4.0, dtype=torch.float64)
    for i, (x, (messages, sent, metered, sane), _) in enumerate(said):
        assert torch.allclose(x.double(), expected[i].expand_as(x), atol=1e-6)
        assert messages == 7 * 2 * (1 + 16)  # to two neighbours, a header and its chunks
        assert sent == metered == 7 * 2 * (64 + (1 << 20))
        assert sane
    assert min(waited for _, _, waited in said) < 0.2  # the thread had done it


def traced(rank, size, store, path):
    """Ten overlapped steps; each computes for at least 20 ms."""
    gossip.connect(rank, size, store)
    x = torch.nn.Parameter(torch.full((1000,), float(rank)))
    sgd = torch.optim.SGD([x], lr=0.1)
    optimizer = gossip.wrap(sgd, gossip.DPSGD(), graphs.ring(size), overlap=True, broadcast=False)
    with optimizer.trace(path):
        for _ in range(10):
            time.sleep(0.02)
            x.grad = torch.zeros_like(x)
            optimizer.step()
    optimizer.finish()
    recording = optimizer.net.transport.spans
    gossip.disconnect()
    return optimizer.report(), recording


def test_report_and_timeline(tmp_path):
    path = tmp_path / "trace.json"
    for report, recording in values(launch(traced, 2, tmp_path, path)):
        assert recording is None
        assert report["rounds"] == 10
        assert report["messages"] >= 10
        assert report["bytes"] == 11 * (4000 + 64)  # the last one was left in flight
        assert 0 <= report["seconds waited"] <= report["seconds exchanging"]
        assert report["overlap"] == 1 - report["seconds waited"] / report["seconds exchanging"]
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(2):
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert [e["args"]["round"] for e in own if e["name"] == "exchange"] == list(range(10))
        turns = [e for e in own if e["tid"] == 1]
        assert [e["name"] for e in turns] == ["compute", "wait"] * 10
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in zip(turns, turns[1:]))
        assert all(e["dur"] >= 15_000 for e in turns if e["name"] == "compute")


def straggling(rank, size, store, path, overlap):
    """Five steps of a large model on a complete graph; the last worker takes 0.1 s for each."""
    gossip.connect(rank, size, store)
    x = torch.nn.Parameter(torch.full((2 << 20,), float(rank)))
    sgd = torch.optim.SGD([x], lr=0.1)
    optimizer = gossip.wrap(sgd, gossip.DPSGD(), graphs.complete(size), overlap=overlap)
    with optimizer.trace(path):
        for _ in range(5):
            time.sleep(0.1 if rank == size - 1 else 0.0)
            x.grad = torch.zeros_like(x)
            optimizer.step()
        optimizer.finish()
    gossip.disconnect()
    return optimizer.report()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_was_waited_for_is_told(overlap, tmp_path):  # COMM-23
    path = tmp_path / "trace.json"
    for rank, report in enumerate(values(launch(straggling, 3, tmp_path, path, overlap))):
        each = {j: report[f"seconds waited for {j}"] for j in range(3) if j != rank}
        assert sum(each.values()) <= report["seconds waited"]
        waits = [
            e["args"] for e in json.loads(path.read_text())["traceEvents"] if e["pid"] == rank and e["name"] == "wait"
        ]
        assert sum(args.get(f"seconds for {j}", 0.0) for args in waits for j in each) == pytest.approx(
            sum(each.values())
        )
        if rank < 2:
            assert each[2] > 0.25
            assert each[2] > 0.5 * report["seconds waited"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_rounds_with_idle_ranks_and_metrics_in_between(tmp_path):
    outcomes = launch(soak, 4, tmp_path, 10_000, timeout=280)
    for x, descriptors, threads in values(outcomes):
        assert x == pytest.approx(1.5)
        assert descriptors == 0
        assert threads == 0


def soak(rank, size, store, rounds):
    """In a cycle: pair 0-1 only, pair 1-2 only, the ring; every hundredth round an average is taken in flight."""

    def pair(i, j):
        W = torch.eye(4, dtype=torch.float64)
        W[[i, i, j, j], [i, j, i, j]] = 0.5
        return W

    schedule = graphs.cycle([pair(0, 1), pair(1, 2), graphs.metropolis(graphs.ring(4))])
    net = Network(schedule, Placement.even(4, 4, rank), gossip.connect(rank, size, store))
    x = torch.full((1, 50), float(rank), dtype=torch.float64)

    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for k in range(rounds):
        net.begin(k)
        net.send(x)
        if k % 100 == 0:
            assert float(net.mean(x)[0, 0]) == pytest.approx(1.5)
        net.receive(x)
        if k == 1000:
            before = held()
    after = held()
    gossip.disconnect()
    return float(x[0, 0]), after[0] - before[0], after[1] - before[1]


def disagreeing(rank, size, store, facts):
    transport = gossip.connect(rank, size, store)
    transport.agree({"n": size, "seed": 0})
    try:
        transport.agree(facts[rank])
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{"d": 8}, {"d": 8}, {"d": 16}], "ranks 0 and 2 differ in d: 8 at rank 0, 16 at rank 2"),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 9}], "ranks 0 and 1 differ in b: 2 at rank 0, 3 at rank 1"),
        ([{"a": 1}, {"a": 1}, {"a": 1, "more": 5}], "ranks 0 and 2 differ in more: nothing at rank 0, 5 at rank 2"),
    ],
)
def test_disagreement_names_both_ranks_and_the_first_difference(facts, expected, tmp_path):
    said = values(launch(disagreeing, 3, tmp_path, facts))
    assert all(expected in text for text in said)
    assert all("every rank must build the same" in text for text in said)


def collective(rank, size, store):
    transport = gossip.connect(rank, size, store)
    x = torch.tensor([float(rank)])
    y = torch.tensor([float(rank)])
    strided = [t.t() for t in torch.arange(8.0).add(10 * rank).view(2, 2, 2)[:, :, 1:]] + [
        torch.arange(6.0).add(10 * rank).view(2, 3).t()
    ]
    for t in strided:  # gloo would take their memory as it lies
        transport.broadcast_(t, 1)
    assert [t.tolist() for t in strided] == [[[11, 13]], [[15, 17]], [[10, 13], [11, 14], [12, 15]]]
    kinds = torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64
    told = [transport.broadcast_(torch.ones(2).mul(rank % 2).to(kind), 1) for kind in kinds]
    assert [t.dtype for t in told] == list(kinds)
    assert all(t.to(torch.complex64).real.tolist() == [1, 1] for t in told)
    gap = torch.arange(4.0)[::2]
    assert transport.sum_(gap).tolist() == [0, 6]
    result = float(transport.sum_(x)), float(transport.broadcast_(y, 1)), transport.gather((rank, "a" * rank))
    again = gossip.connect(rank, size, store)  # an initialised group is used as it is
    result += (again.rank, again.size)
    gossip.disconnect()
    gossip.disconnect()  # harmless
    return result


def test_collectives(tmp_path):
    for rank, said in enumerate(values(launch(collective, 3, tmp_path))):
        assert said == (3.0, 1.0, [(0, ""), (1, "a"), (2, "aa")], rank, 3)


def partial(rank, size, store):
    """Ranks 1 and 2 gossip in a group of their own, numbered 0 and 1 there."""
    import torch.distributed as dist

    gossip.connect(rank, size, store)
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not in the process group"):
            gossip.Transport(group)
        gossip.disconnect()
        return None
    transport = gossip.Transport(group)
    net = Network(graphs.static(graphs.metropolis(graphs.complete(2))), Placement.even(2, 2, transport.rank), transport)
    x = torch.tensor([[float(rank)]], dtype=torch.float64)
    net.mix(x)
    total = transport.sum_(torch.tensor([1.0]))
    told = transport.broadcast_(torch.tensor([float(rank)]), 1)
    gossip.disconnect()
    return transport.rank, transport.size, float(x), float(total), float(told)


def test_a_subgroup_has_its_own_ranks(tmp_path):
    said = values(launch(partial, 3, tmp_path))
    assert said == [None, (0, 2, 1.5, 2.0, 2.0), (1, 2, 1.5, 2.0, 2.0)]


def test_without_a_process_group_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK is not set and no store was given; start the script with `torchrun"):
        gossip.connect()
    with pytest.raises(RuntimeError, match=r"call gossip\.connect\(\) first"):
        gossip.Transport()
    gossip.disconnect()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("timeout", [0, -1, None, "5", float("nan"), float("inf")])
def test_a_bound_of_waits_is_a_positive_number(timeout, tmp_path):
    with pytest.raises(ValueError, match=r"timeout=.* bounds every wait: give a positive number of seconds"):
        gossip.connect(0, 1, f"file://{tmp_path / 'store'}", timeout=timeout)


@pytest.mark.parametrize("quoted", [True, False])
def test_a_store_in_a_folder_of_any_name(quoted, tmp_path):
    path = tmp_path / "mit Löchern %41 ☃" / "store"
    path.parent.mkdir()
    gossip.connect(0, 1, path.as_uri() if quoted else f"file://{str(path).replace('%', '%25')}", timeout=5)
    assert path.exists()
    gossip.disconnect()


def restarted(rank, size, store, port):
    elastic = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ |= {k: str(v) for k, v in elastic.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        transport = gossip.connect(timeout=20)
        total = float(transport.sum_(torch.tensor([rank + 1.0])))
        gossip.transport.abandon()
    return total


def test_processes_that_torchrun_restarts_do_not_meet_those_of_before(tmp_path):
    kept = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert values(launch(restarted, 2, tmp_path, kept.port)) == [3.0, 3.0]


def test_connections_need_open_files(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"100 processes need about \d+ open files each.*`ulimit -n` allows 256"):
            gossip.connect(0, 100, f"file://{tmp_path / 'store'}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_processes_that_do_not_meet_are_told_why(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"rank=2 of size=2: ranks count from 0 to 1"):
        gossip.connect(2, 2, f"file://{tmp_path / 'store'}")
    with pytest.raises(
        RuntimeError, match=r"rank 0 of 2 could not meet the others at file://.*start all 2 processes within 1 s"
    ):
        gossip.connect(0, 2, f"file://{tmp_path / 'store'}", timeout=1)
    with pytest.raises(RuntimeError, match=r"has no folder .*none: give connect\(rank, size, .*a folder that exists"):
        gossip.connect(0, 1, f"file://{tmp_path / 'none' / 'store'}")
    with pytest.raises(RuntimeError, match=r"needs rank and size as well"):
        gossip.connect(0, store=f"file://{tmp_path / 'store'}")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"at MASTER_ADDR, which is not set, "):
        gossip.connect()
    with socket.create_server(("localhost", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RuntimeError, match=r"another run listens at port \d+: give torchrun --standalone"):
            gossip.connect(timeout=2)


def early(rank, size, store):
    net = network(rank, size, store)
    x = torch.full((1, 100_000), float(rank))
    for k in range(50):
        net.begin(k)
        net.mix(x)
    if rank == 1:
        time.sleep(1.5)  # evaluates longer than the others
    gossip.disconnect()
    return True


def test_leaving_early_disturbs_nobody(tmp_path):
    assert values(launch(early, 3, tmp_path)) == [True] * 3
