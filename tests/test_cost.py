"""Simulated seconds: closed forms, a longest path by brute force, cards as an event queue, and the axis of a run."""

import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

import gossip
import graphs
from experiments import compare, records, trainer
from experiments.studies import where_gossip_wins
from experiments.train import run
from gossip import Cost, Links, Sent, Timeline, work
from gossip.timeline import _Cards

CONF = Path(trainer.__file__).parent / "conf"
FREE = work.Constant(0.0)
SMALL = ("n=4", "rounds=8", "evaluate_every=2", "track=off", "progress=false", "dtype=float64", "task=quadratic")


def config(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("train", [*SMALL, *overrides]), resolve=True)


# -- work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [work.Constant(2.0), work.Exponential(2.0, 0.5), work.LogNormal(2.0), work.Slow()])
def test_a_step_takes_what_it_takes_whoever_asks(model):
    workers, steps = torch.arange(6), torch.tensor([3, 1, 4, 1, 5, 9])
    every = model(workers, steps)
    assert every.dtype == torch.float64
    assert every.shape == (6,)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(model(workers[order], steps[order]), every[order])
    assert torch.equal(model(workers, steps), every)
    assert model(workers[:0], steps[:0]).shape == (0,)


def test_draws_differ_by_worker_step_and_seed():
    workers = torch.zeros(100, dtype=torch.int64)
    one, other = work.Exponential(seed=0), work.Exponential(seed=1)
    assert len(one(workers, torch.arange(100)).unique()) == 100
    assert not bool((one(workers, torch.arange(100)) == other(workers, torch.arange(100))).any())
    assert not bool((one(workers, torch.arange(100)) == one(workers + 1, torch.arange(100))).any())


def test_the_slowest_of_n_exponential_steps_is_the_harmonic_number():
    n, rounds = 16, 4000
    times = work.Exponential(3.0, least=1.0)(
        torch.arange(n).repeat(rounds), torch.arange(rounds).repeat_interleave(n)
    ).view(rounds, n)
    assert float(times.min()) >= 1
    assert float(times.mean()) == pytest.approx(3.0, rel=0.01)
    assert float(times.amax(1).mean()) == pytest.approx(1 + 2 * sum(1 / k for k in range(1, n + 1)), rel=0.02)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: work.Constant(-1.0), "seconds=-1.0"),
        (lambda: work.Constant((1.0, math.nan)), "seconds=nan"),
        (lambda: work.Exponential(1.0, least=2.0), "least=2.0"),
        (lambda: work.LogNormal(1.0, sigma=-0.1), "sigma=-0.1"),
        (lambda: work.Slow(factor=0.0), "factor=0.0"),
        (lambda: work.Slow(workers=(-1,)), r"workers=\[-1\]"),
        (lambda: work.Trace("nowhere.csv"), "nowhere.csv"),
        (lambda: work.Constant((1.0, 2.0))(torch.tensor([2]), torch.tensor([0])), "worker 2"),
        (lambda: Links(latency=-1.0), "latency holds -1"),
        (lambda: Links(bandwidth=0.0), "bandwidth holds 0"),
        (lambda: Links(latency=[[0.0, 1.0]]), "latency has shape"),
        (lambda: Links(nic=0.0), "nic=0"),
        (lambda: Links(burst=-1.0), "burst=-1"),
        (lambda: Cost(average="tree"), "average='tree'"),
        (lambda: gossip.fibre(graphs.ring(4)), "no lengths"),
        (lambda: gossip.two_level(4, per_host=0), "per_host=0"),
        (lambda: Timeline(Cost(links=Links([[0.0, 1.0], [1.0, 0.0]])), n=3), "2 workers and there are 3"),
    ],
)
def test_wrong_input_is_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_a_trace_is_repeated_and_checked(tmp_path):
    np.save(tmp_path / "t.npy", np.array([1.0, 2.0, 3.0]))
    trace = work.Trace(tmp_path / "t.npy")
    assert trace(torch.tensor([0, 7, 2]), torch.tensor([0, 1, 5])).tolist() == [1.0, 2.0, 3.0]
    (tmp_path / "bad.csv").write_text("1, 2\n3\n")
    with pytest.raises(ValueError, match=r"bad.csv is no table"):
        work.Trace(tmp_path / "bad.csv")
    (tmp_path / "negative.csv").write_text("1, -2\n")
    with pytest.raises(ValueError, match="below 0"):
        work.Trace(tmp_path / "negative.csv")
    (tmp_path / "two.csv").write_text("1, 2\n")
    with pytest.raises(ValueError, match="worker 2 takes a step"):
        work.Trace(tmp_path / "two.csv")(torch.tensor([2]), torch.tensor([0]))


# -- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency", "bandwidth", "reduced", "ring", "peer"),
    [(1e-4, 1.25e9, 0.157, 0.164, 0.082), (5e-3, 1.25e9, 0.304, 0.169, 0.087), (0.0, 1.25e6, 153.6, 163.84, 81.92)],
)
def test_the_table_of_the_network_speed_model(latency, bandwidth, reduced, ring, peer):
    """16 workers, 102.4 MB: an all-reduce 2(n−1)ℓ + 2(n−1)/n M/B, D-PSGD on a ring ℓ + 2M/B, one-peer ℓ + M/B."""
    n, M = 16, 102.4e6
    cost = Cost(FREE, Links(latency, nic=bandwidth))
    got = [
        gossip.seconds_per_round(cost, graphs.ring(n), M, all_reduce=True),
        gossip.seconds_per_round(cost, graphs.ring(n), M),
        gossip.seconds_per_round(cost, graphs.one_peer_exponential(n), M),
    ]
    assert got == pytest.approx([reduced, ring, peer], rel=5e-3)
    exact = [
        gossip.cost.all_reduce_seconds(n, M, latency, bandwidth),
        gossip.cost.gossip_seconds(2, M, latency, bandwidth),
        gossip.cost.gossip_seconds(1, M, latency, bandwidth),
    ]
    assert got == pytest.approx(exact, rel=1e-12)
    server = gossip.seconds_per_round(
        Cost(FREE, Links(latency, nic=bandwidth), "server"), graphs.ring(n), M, all_reduce=True
    )
    assert server == pytest.approx(2 * (latency + n * M / bandwidth), rel=1e-12)
    assert server == pytest.approx(gossip.cost.server_seconds(n, M, latency, bandwidth), rel=1e-12)


def test_a_star_waits_for_the_card_of_its_hub():
    cost = Cost(FREE, Links(0.5, nic=10.0))
    assert gossip.seconds_per_round(cost, graphs.star(9), 20.0) == pytest.approx(0.5 + 8 * 2)


def test_a_link_slower_than_the_card_decides():
    bandwidth = torch.full((4, 4), 100.0)
    bandwidth[0, 1] = 1.0
    timeline = Timeline(Cost(FREE, Links(0.0, bandwidth, nic=50.0)), 4)
    timeline.round(0, graphs.metropolis(graphs.ring(4)), Sent(10.0))
    assert timeline.clock.tolist() == pytest.approx([10.0, 10.0, 0.4, 0.4])


def test_half_duplex_halves_the_card():
    full, half = (
        gossip.seconds_per_round(Cost(FREE, Links(0.0, nic=10.0, full_duplex=d)), graphs.ring(6), 20.0)
        for d in (True, False)
    )
    assert (full, half) == pytest.approx((4.0, 8.0))


def test_workers_of_a_host_share_its_card_and_do_not_need_it_among_themselves():
    ring = graphs.metropolis(graphs.ring(8))
    links = gossip.two_level(8, per_host=4, near=0.0, far=1.0, inside=math.inf, nic=10.0)
    timeline = Timeline(Cost(FREE, links), 8)
    timeline.round(0, ring, Sent(20.0))  # each host sends two messages, of its first and of its last worker
    assert timeline.clock.tolist() == pytest.approx([5.0, 0, 0, 5.0, 5.0, 0, 0, 5.0])
    timeline = Timeline(Cost(FREE, links), 8)
    timeline.round(0, torch.full((8, 8), 1 / 8, dtype=torch.float64), Sent(20.0))
    assert timeline.clock.tolist() == pytest.approx([1 + 16 * 2.0] * 8)


def test_a_handshake_takes_a_delay_more_and_waits_for_the_receiver():
    plain, polite = (
        gossip.seconds_per_round(Cost(FREE, Links(0.01, handshake=h)), graphs.ring(4), 0.0) for h in (False, True)
    )
    assert (plain, polite) == pytest.approx((0.01, 0.02))
    one_way = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)  # 0 sends to 1, which is late
    timeline = Timeline(Cost(work.Constant((0.0, 3.0)), Links(0.01, bandwidth=10.0, handshake=True)), 2)
    timeline.round(0, one_way, Sent(10.0))
    assert timeline.clock.tolist() == pytest.approx([4.01, 4.02])


def test_a_bucket_lets_a_burst_pass_and_fills_again_while_workers_compute():
    ring = graphs.ring(4)
    links = Links(nic=10.0, burst=20.0)
    timeline = Timeline(Cost(FREE, links), 4)
    ends = []
    for k in range(4):
        timeline.round(k, graphs.metropolis(ring), Sent(15.0))
        ends.append(timeline.seconds)
    assert ends == pytest.approx([1.0, 4.0, 7.0, 10.0])  # 30 bytes a round at 10 a second, of which 20 are free once
    rested = gossip.seconds_per_round(Cost(work.Constant(3.0), links), ring, 10.0)
    tired = gossip.seconds_per_round(Cost(work.Constant(1.0), links), ring, 10.0)
    assert (rested, tired) == pytest.approx((3.0, 2.0))


def test_connections_at_once_cost_some_of_the_card():
    cost = Cost(FREE, Links(nic=10.0, crowding=0.25))
    assert gossip.seconds_per_round(cost, graphs.ring(4), 10.0) == pytest.approx(2 * 1.25)
    assert gossip.seconds_per_round(cost, graphs.one_peer_exponential(4), 10.0) == pytest.approx(1.0)


def test_messages_cost_the_cpu_at_both_ends_and_a_collective_once():
    cost = Cost(FREE, Links(per_message=0.1))
    assert cost.message(0, 1, 0.0) == pytest.approx(0.2)
    assert gossip.seconds_per_round(cost, graphs.ring(6), 0.0) == pytest.approx(0.4)
    assert gossip.seconds_per_round(cost, graphs.ring(6), 0.0, all_reduce=True) == pytest.approx(0.2)


# -- the recursion -------------------------------------------------------------------------------------------------


def reference(T, tables, matrices, size, overlap):
    """The recursion by hand, edge by edge: T (rounds, n) work, latency and bandwidth tables, no cards."""
    latency, bandwidth = tables
    n = T.shape[1]
    t = [0.0] * n
    for k, W in enumerate(matrices):
        leave = [t[i] + (0.0 if overlap else float(T[k, i])) for i in range(n)]
        new = [t[i] + float(T[k, i]) for i in range(n)]
        for i, j in itertools.product(range(n), repeat=2):
            if i != j and W[i, j] != 0:
                gone = leave[j] + size[j] / float(bandwidth[j, i])
                new[j] = max(new[j], gone)
                new[i] = max(new[i], gone + float(latency[j, i]))
        t = new
    return t


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_clocks_are_the_longest_path(overlap, seed):
    n, rounds = 7, 9
    generator = torch.Generator().manual_seed(seed)
    latency, bandwidth = (torch.rand(n, n, generator=generator, dtype=torch.float64) for _ in range(2))
    matrices = [
        (torch.rand(n, n, generator=generator) < 0.3).double() + torch.eye(n, dtype=torch.float64) for _ in range(3)
    ]
    model = work.Exponential(1.0, seed=seed)
    T = torch.stack([model(torch.arange(n), torch.full((n,), k)) for k in range(rounds)])
    size = torch.rand(n, generator=generator, dtype=torch.float64).tolist()
    timeline = Timeline(Cost(model, Links(latency, bandwidth)), n, overlap=overlap)
    for k in range(rounds):
        timeline.round(k, matrices[k % 3].to_sparse(), Sent(size))
    expected = reference(T, (latency, bandwidth), [matrices[k % 3] for k in range(rounds)], size, overlap)
    assert timeline.clock.tolist() == pytest.approx(expected, rel=1e-12)
    assert timeline.idle.tolist() == pytest.approx((timeline.clock - T.sum(0)).tolist(), abs=1e-12)


def test_a_delay_travels_one_hop_a_round():
    n, factor = 16, 10.0
    timeline = Timeline(Cost(work.Slow(work.Constant(1.0), factor, (0,))), n)
    ring = graphs.metropolis(graphs.ring(n))
    hops = [min(i, n - i) for i in range(n)]
    for k in range(1, 13):
        timeline.round(k - 1, ring, Sent(1.0))
        assert timeline.clock.tolist() == [(k - e) * 10 + e if h <= k else k for h in hops for e in [max(h - 1, 0)]]


def test_a_straggler_sets_everybodys_pace_in_the_end_and_their_idle_time():
    cost = Cost(work.Slow(work.Constant(1.0), 10.0, (3,)))
    for mixing, average in ((graphs.ring(8), False), (graphs.one_peer_exponential(8), False), (graphs.ring(8), True)):
        assert gossip.seconds_per_round(cost, mixing, 1.0, all_reduce=average) == pytest.approx(10.0)
    timeline = Timeline(cost, 8)
    for k in range(200):
        timeline.round(k, graphs.metropolis(graphs.ring(8)), Sent(1.0))
    share = timeline.idle / timeline.seconds
    assert float(share[3]) == 0
    assert float(share[2]) == pytest.approx(0.9, abs=0.01)


def test_overlap_hides_the_shorter_of_work_and_messages():
    for seconds, expected in ((3.0, 3.0), (1.0, 2.5)):
        cost = Cost(work.Constant(seconds), Links(0.5, nic=10.0))
        assert gossip.seconds_per_round(cost, graphs.ring(6), 10.0, overlap=True) == pytest.approx(expected)
        assert gossip.seconds_per_round(cost, graphs.ring(6), 10.0) == pytest.approx(seconds + 2.5)


def test_local_steps_add_up():
    model = work.LogNormal(1.0, seed=3)
    timeline = Timeline(Cost(model), 3, local_steps=4)
    for k in range(2):
        timeline.round(k, torch.eye(3, dtype=torch.float64))
    expected = sum(model(torch.arange(3), torch.full((3,), t)) for t in range(8))
    assert timeline.clock.tolist() == pytest.approx(expected.tolist())


def test_w_along_no_link_is_refused(tmp_path):
    (tmp_path / "links.csv").write_text("0 1 0.1 10\n")
    links = gossip.links.table(tmp_path / "links.csv", n=3)
    with pytest.raises(ValueError, match="worker 2 sends to 0"):
        Timeline(Cost(FREE, links), 3).round(0, graphs.metropolis(graphs.ring(3)), Sent(1.0))
    (tmp_path / "wrong.csv").write_text("0 3 0.1 10\n")
    with pytest.raises(ValueError, match="line 1"):
        gossip.links.table(tmp_path / "wrong.csv", n=3)


def test_what_no_link_carries_is_refused_before_the_run(tmp_path):
    """A table's gaps are infinitely far: a run that needs one of them would never end, or go on without a worker."""
    (tmp_path / "ring.csv").write_text("".join(f"{i},{(i + 1) % 4},0.5,inf\n" for i in range(4)))
    links = gossip.links.table(tmp_path / "ring.csv", n=4)
    with pytest.raises(ValueError, match="average='server' with links that do not join all workers.*average='ring'"):
        Cost(links=links, average="server")
    x, gradient = torch.zeros(4, 1, dtype=torch.float64), lambda x, workers, steps: x
    started = partial(gossip.Asynchronous().start, gradient=gradient, cost=Cost(links=links))
    ring, complete = (graphs.as_schedule(graphs.metropolis(g)) for g in (graphs.ring(4), graphs.complete(4)))
    for algorithm, schedule in ((gossip.AllReduce(), ring), (gossip.DPSGD(), complete)):
        with pytest.raises(ValueError, match="sends to ., to which there is no link: choose a graph along the links"):
            started(algorithm, schedule=schedule, x=x.clone())
    run = started(gossip.DPSGD(), schedule=ring, x=x.clone())
    run.advance(updates=8)
    assert run.queue.time == 3.5  # a second of work and half a second there, twice, and between them back
    with pytest.raises(ValueError, match="worker 2 sends to 0, to which there is no link"):
        Timeline(Cost(links=links), n=4).round(0, complete(0), Sent(8.0))
    one_way = gossip.links.table(tmp_path / "ring.csv", n=4, both_ways=False)
    push = graphs.as_schedule(graphs.push(graphs.ring(4, directed=True)))
    assert started(gossip.SGP(), schedule=push, x=x.clone(), cost=Cost(links=one_way)).queue.next_time == 1


def queue(begin, bytes, nic):
    """One card, message by message."""
    over, free, order = {}, -math.inf, sorted(range(len(begin)), key=lambda e: begin[e])
    for e in order:
        free = max(free, begin[e]) + bytes[e] / nic
        over[e] = free
    return [max(over[f] for f in order if begin[f] == begin[e]) for e in range(len(begin))]


@pytest.mark.parametrize("seed", range(5))
def test_cards_serve_in_order_and_share_among_those_that_come_together(seed):
    draw = np.random.default_rng(seed)
    card = draw.integers(0, 4, 30)
    begin, bytes = draw.integers(0, 12, 30).astype(float), draw.uniform(0, 5, 30)
    got = _Cards(card, Links(nic=2.0))(begin, bytes, np.full(8, -np.inf))
    for c in range(4):
        mine = np.flatnonzero(card == c)
        assert got[mine].tolist() == pytest.approx(queue(begin[mine], bytes[mine], 2.0))


# -- real networks and presets -------------------------------------------------------------------------------------


def test_latencies_follow_the_kilometres():
    arpanet = graphs.arpanet(1969)
    links = gossip.fibre(arpanet, bandwidth=7000.0, hop=1e-3)
    i, j = arpanet.names.index("SRI"), arpanet.names.index("UTAH")
    assert links.message(i, j, 0) == pytest.approx(960.57 / 2e5 + 1e-3, rel=1e-4)
    assert links.message(i, j, 7000) == pytest.approx(1 + 960.57 / 2e5 + 1e-3, rel=1e-4)
    geant = gossip.fibre(graphs.geant(2012))
    delays = torch.as_tensor(geant.latency)
    direct = delays[graphs.geant(2012).source, graphs.geant(2012).target]
    assert bool((direct <= graphs.geant(2012).lengths / 2e5 + 1e-9).all())
    torch.testing.assert_close(delays, delays.T)
    assert bool((delays[:, :, None] <= delays[:, None, :] + delays.T[None] + 1e-9).all())  # no detour is shorter


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "cost").glob("*.yaml")))
def test_every_cost_of_the_configuration_can_be_made(name, tmp_path):
    more = {"file": f"cost.path={tmp_path / 'c.yaml'}", "links": f"cost.links.path={tmp_path / 'l.csv'}"}.get(name)
    (tmp_path / "c.yaml").write_text("_target_: gossip.Cost\n")
    (tmp_path / "l.csv").write_text("0 1 0.1 10\n")
    settings = config(f"cost={name}", "topology=arpanet", *([more] if more else []))
    assert settings["cost"] == {} if name == "none" else isinstance(instantiate(settings["cost"]), Cost)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "cost" / "work").glob("*.yaml")))
def test_every_model_of_work_can_be_made(name, tmp_path):
    (tmp_path / "t.csv").write_text("0.5\n")
    more = [f"cost.work.path={tmp_path / 't.csv'}"] if name == "trace" else []
    cost = instantiate(config("cost=lan", f"cost/work={name}", *more)["cost"])
    assert bool((cost.compute(torch.arange(4), torch.zeros(4, dtype=torch.int64)) > 0).all())


def test_a_simulation_in_a_notebook_tells_its_seconds():
    cost = Cost(work.Slow(work.Constant(1.0), 10.0, (0,)), Links(0.5, nic=80.0))
    records = list(
        gossip.simulate(
            lambda x, workers, step: x, gossip.DPSGD(), graphs.ring(4), 3, x0=torch.ones(10).double(), cost=cost
        )
    )
    assert [r.seconds for r in records] == pytest.approx([12.5, 24.5, 36.5])  # worker 0 waits for nobody
    plain = next(gossip.simulate(lambda x, workers, step: x, gossip.DPSGD(), graphs.ring(4), 1, x0=torch.ones(10)))
    assert math.isnan(plain.seconds)


# -- the axis of a run ---------------------------------------------------------------------------------------------

WAN = ("cost=wan", "cost/work=exponential", "algorithm=choco", "compressor=topk", "compressor.ratio=0.3", "rounds=6")


def simulated(folder):
    return [(r["round"], r["simulated"], r.get("idle/mean")) for r in records.read(folder).rows]


def test_every_placement_simulates_the_same_seconds_and_a_resumed_run_goes_on(tmp_path):
    run(config(*WAN), tmp_path / "here")
    expected = simulated(tmp_path / "here")
    assert expected[0] == (0, 0.0, None)
    assert all(a[1] < b[1] for a, b in itertools.pairwise(expected))
    run(config(*WAN, "launch=blocks", "launch.processes=3"), tmp_path / "blocks")
    assert simulated(tmp_path / "blocks") == expected
    run(config(*WAN, "rounds=4", "checkpoint_every=4"), tmp_path / "half")
    run(config(*WAN, f"resume={tmp_path / 'half'}"), tmp_path / "rest")
    assert simulated(tmp_path / "rest")[-1] == expected[-1]


def test_the_seconds_of_a_run_are_those_of_its_bytes(tmp_path):
    run(config("cost=wan", "rounds=5", "task.d=10"), tmp_path)
    last = records.read(tmp_path).rows[-1]
    assert last["simulated"] == pytest.approx(5 * (0.01 + 0.01 + 2 * 80 / 12.5e6), rel=1e-9)  # d = 10 in float64
    assert last["idle/mean"] == pytest.approx(1 - 0.05 / last["simulated"])
    lines = (tmp_path / "idle.csv").read_text().splitlines()
    assert lines[0] == "worker,seconds,idle,share"
    assert [float(line.split(",")[3]) for line in lines[1:]] == pytest.approx([last["idle/mean"]] * 4, abs=1e-4)
    result = compare.compare(tmp_path, x="simulated", y="eval/average/suboptimality")
    assert result.rows[0]["simulated"].mean == pytest.approx(last["simulated"])


def test_an_all_reduce_and_a_server_by_name(tmp_path):
    model, rounds, n = 80, 3, 4
    for average, seconds in (
        ("ring", 2 * (n - 1) * 0.01 + 2 * (n - 1) / n * model / 12.5e6),
        ("server", 2 * (0.01 + n * model / 12.5e6)),
    ):
        run(
            config("cost=wan", "algorithm=allreduce", f"rounds={rounds}", f"cost.average={average}"),
            tmp_path / average,
        )
        last = records.read(tmp_path / average).rows[-1]
        assert last["simulated"] == pytest.approx(rounds * (0.01 + seconds), rel=1e-6)


# -- studies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("study", "n"), [("where_gossip_wins", 16), ("arpanet_1969", 4), ("geant_2012", 37)])
def test_the_studies_can_be_made(study, n):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = OmegaConf.to_container(compose("train", [f"study={study}", "recipe=choco_sign"]), resolve=True)
    setup = trainer.build(made)
    assert setup.schedule.n == n
    if setup.cost is not None:
        far = max(setup.topology.lengths.tolist()) / 2e5
        assert gossip.seconds_per_round(setup.cost, setup.topology, 0.0) == pytest.approx(0.01 + far, rel=1e-6)


def test_the_map_of_where_gossip_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(where_gossip_wins, "TARGET", 0.05)
    few = ("n=4", "rounds=4", "evaluate_every=1", "track=off", "progress=false", "task.model.hidden=[8]")
    for k, more in enumerate(
        (("recipe=dpsgd",), ("recipe=dpsgd", "schedule=one_peer_exponential"), ("recipe=allreduce",))
    ):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            made = OmegaConf.to_container(compose("train", ["study=where_gossip_wins", *few, *more]), resolve=True)
        run(made, tmp_path / str(k))
    rounds, n, bytes = where_gossip_wins.needed(tmp_path)
    assert (n, bytes) == (4, 4 * (64 * 8 + 8 + 80 + 10))
    assert all(0 <= r <= 4 for r in rounds.values())
    per_round = where_gossip_wins.seconds(n, bytes)
    for name, graph, average in (
        ("ring", graphs.ring(4), False),
        ("one-peer", graphs.one_peer_exponential(4), False),
        ("all-reduce", graphs.ring(4), True),
    ):
        latency, rate = where_gossip_wins.LATENCIES[30], where_gossip_wins.RATES[40]
        cost = Cost(work.Constant(where_gossip_wins.WORK), Links(latency, nic=rate))
        simulated = gossip.seconds_per_round(cost, graph, bytes, all_reduce=average)
        assert per_round[name][30, 40] == pytest.approx(simulated, rel=1e-9)
    rounds = {name: max(r, 1.0) for name, r in rounds.items()}
    assert len(where_gossip_wins.figure(per_round, rounds, n, bytes).axes) == 5  # four maps and their scale
    assert "WAN" in where_gossip_wins.table(per_round, rounds)
    monkeypatch.setattr(where_gossip_wins, "TARGET", 1.1)
    with pytest.raises(ValueError, match="give it more rounds"):
        where_gossip_wins.needed(tmp_path)


def test_a_straggler_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="worker 9 is to be slow, and the workers are 0…7"):
        gossip.Timeline(gossip.Cost(gossip.work.Slow(workers=(0, 9))), n=8)
