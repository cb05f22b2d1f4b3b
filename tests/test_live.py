"""The live clock: sums conserved to rounding while everybody moves, at any speed, with pauses, deaths and returns."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gossip
import graphs
from gossip.live import Live, edges_of, live_options
from tests.support import launch, values

SPEEDS = (1, 3, 5, 7)


def together(topology, act, x=None, **options):
    """Workers in threads of one process: what each returned, and the rows (n, d)."""
    place = f"{tempfile.mkdtemp()}/store"
    x = start(topology.n) if x is None else x

    def run(rank):
        worker = Live(x[rank : rank + 1].clone(), topology, rank, place, timeout=30, **options)
        return act(worker), worker.x

    with ThreadPoolExecutor(topology.n) as pool:
        said, rows = zip(*pool.map(run, range(topology.n)))
    return said, torch.cat(rows)


def start(n, d=7):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def chat(worker, exchanges, seconds=0.0):
    """Step with zero gradients and exchange, until all workers together have stepped often enough."""
    while worker.total < exchanges:
        with worker.hold():
            worker.stepped()
        worker.exchange()
        time.sleep(seconds)


@pytest.mark.parametrize(
    "compressor", [None, gossip.TopK(0.4), gossip.Sign()], ids=lambda c: "dense" if c is None else type(c).__name__
)
@pytest.mark.parametrize("topology", [graphs.star(4), graphs.complete(4)], ids=["star", "complete"])
def test_the_sum_is_conserved_and_the_models_meet(topology, compressor):
    def act(worker):
        chat(worker, 400, 0.0005)
        return worker.finish(rounds=0)

    reports, x = together(topology, act, compressor=compressor)
    before = start(topology.n)
    assert torch.allclose(x.sum(0), before.sum(0), rtol=0, atol=1e-12)
    assert gossip.consensus_distance(x) < 0.5 * gossip.consensus_distance(before)
    assert sum(r["exchanges"] for r in reports) == sum(r["answers"] for r in reports) > 20
    assert all(r["lost"] == {} for r in reports)
    bits = 7 * 64 if compressor is None else compressor(before[:1], torch.zeros(1, dtype=torch.int64)).bits
    assert sum(r["bits"] for r in reports) == bits * 2 * sum(r["exchanges"] for r in reports)


def test_both_ends_use_the_two_snapshots_although_they_move_meanwhile():
    """x_i and x_j move while the answer is on its way; each still gets half the difference of the snapshots 0 and 8."""
    asked = threading.Event()

    def act(worker):
        if worker.rank == 0:
            with worker.hold() as x:  # the thread that would apply the answer has to wait
                worker.exchange()
                x.add_(100.0)
            asked.set()
        else:
            asked.wait(10)
            worker._await(lambda: worker.answers == 1, 10)
            with worker.hold() as x:
                x.sub_(50.0)
        return worker.finish(rounds=0)

    _, x = together(graphs.path(2), act, x=torch.tensor([[0.0], [8.0]], dtype=torch.float64))
    assert x.tolist() == [[104.0], [-46.0]]


def test_the_last_rounds_bring_the_exact_average_of_a_small_graph_near():
    _, x = together(graphs.ring(5), lambda worker: worker.finish())
    before = start(5)
    assert torch.allclose(x.sum(0), before.sum(0), rtol=0, atol=1e-12)
    assert 0 < gossip.consensus_distance(x) < 1.1e-4 * gossip.consensus_distance(before)
    _, x = together(graphs.ring(5), lambda worker: worker.finish(rounds=3))
    W = graphs.metropolis(graphs.ring(5)).to_dense()
    assert torch.allclose(x, W @ W @ W @ before, rtol=0, atol=1e-12)


def test_lost_exchanges_touch_neither_end():
    def act(worker):
        chat(worker, 400, 0.0005)
        return worker.finish(rounds=0)

    reports, x = together(graphs.ring(4), act, drop=0.5)
    assert torch.allclose(x.sum(0), start(4).sum(0), rtol=0, atol=1e-12)
    lost, kept = (sum(r[name] for r in reports) for name in ("dropped", "exchanges"))
    assert 0.3 < lost / (lost + kept) < 0.7


def test_a_link_that_is_cut_carries_nothing():
    def act(worker):
        chat(worker, 200)
        return worker.finish(rounds=0)

    x = torch.tensor([[0.0], [0.0], [3.0]], dtype=torch.float64)
    reports, x = together(graphs.path(3), act, x=x, cut=lambda: frozenset({(1, 2)}))
    assert x.tolist() == [[0.0], [0.0], [3.0]]
    assert reports[2]["exchanges"] == reports[2]["answers"] == 0


def test_everybody_knows_everybodys_steps_in_the_end_and_waits_for_the_slow():
    def act(worker):
        for _ in range(10 * (worker.rank + 1)):
            with worker.hold():
                worker.stepped()
            worker.exchange()
            time.sleep(0.002)
        return worker.finish(rounds=0)

    reports, _ = together(graphs.path(4), act)
    assert [r["steps"] for r in reports] == [10, 20, 30, 40]
    assert all(r["share"] == [0.1, 0.2, 0.3, 0.4] for r in reports)
    assert all(r["staleness/gradient/max"] >= r["staleness/gradient/mean"] >= 0 for r in reports)


def test_steps_are_scaled_by_how_rare_they_are():
    worker = object.__new__(Live)
    worker.rank, worker.known = 1, torch.tensor([10, 30, 20])
    assert worker.scale() == pytest.approx(20 / 30)
    worker.known = torch.tensor([1000, 1, 999])
    assert worker.scale() == 8.0  # 666 without the bound
    worker.known = torch.tensor([0, 0, 0])
    assert worker.scale() == 1.0


def in_processes(rank, size, store, folder, exchanges, trouble, speeds):
    """Zero gradients at speeds 1:3:5:7; `trouble` befalls worker 3."""
    torch.set_num_threads(1)
    place = Path(folder, "live")
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    worker = Live(start(size)[rank : rank + 1], graphs.complete(size), rank, str(place), timeout=20)
    gap, seen = 0.0, time.monotonic()
    done = 0
    while worker.total < exchanges:
        with worker.hold():
            worker.stepped()
        while not worker.exchange() and time.monotonic() < seen + 2:
            time.sleep(2e-4)
        gap, seen = max(gap, time.monotonic() - seen), time.monotonic()
        done += 1
        if trouble and rank == 0 and done == 20:
            threading.Thread(target=befall, args=(int(Path(folder, "3.pid").read_text()), trouble), daemon=True).start()
        time.sleep(1e-3 * (speeds[-1] / speeds[rank] - 1) / 3)
    report = worker.finish(rounds=10 if trouble == "death" else 0)
    return report, worker.x, gap


def befall(pid, trouble):
    if trouble == "death":
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(trouble)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("exchanges", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_processes_of_any_speed_conserve_the_sum(tmp_path, exchanges):
    outcomes = values(launch(in_processes, 4, tmp_path, str(tmp_path), exchanges, None, SPEEDS, timeout=120))
    x = torch.cat([row for _, row, _ in outcomes])
    total = start(4).sum(0)
    assert float((x.sum(0) - total).abs().max() / total.abs().max()) < 1e-6
    done = sum(r["exchanges"] for r, _, _ in outcomes)
    assert done == sum(r["answers"] for r, _, _ in outcomes) >= 0.95 * exchanges
    steps = [r["steps"] for r, _, _ in outcomes]
    assert steps[0] < steps[3]  # the slow one holds nobody up
    assert gossip.consensus_distance(x) < 1e-12


@pytest.mark.parametrize("seconds", [1.5, pytest.param(5.0, marks=pytest.mark.slow)])
def test_while_one_is_paused_the_others_go_on(tmp_path, seconds):
    outcomes = values(launch(in_processes, 4, tmp_path, str(tmp_path), 600, seconds, (7, 7, 7, 7), timeout=60))
    x, total = torch.cat([row for _, row, _ in outcomes]), start(4).sum(0)
    assert float((x.sum(0) - total).abs().max() / total.abs().max()) < 1e-6
    gaps = [gap for _, _, gap in outcomes]
    assert (
        gaps[3] > 0.9 * seconds or outcomes[3][0]["seconds waited"] > 0.5 * seconds
    )  # it slept, in its loop or after it
    assert all(r["lost"] == {} for r, _, _ in outcomes)
    assert sum(r["exchanges"] for r, _, _ in outcomes[:3]) > 300


def test_a_death_costs_its_edges_and_not_the_run(tmp_path):
    outcomes = launch(in_processes, 4, tmp_path, str(tmp_path), 600, "death", (7, 7, 7, 7), timeout=60)
    assert outcomes[3].exitcode == -signal.SIGKILL
    survivors = values(outcomes[:3])
    assert all(list(report["lost"]) == [3] for report, _, _ in survivors)
    x = torch.cat([row for _, row, _ in survivors])
    assert gossip.consensus_distance(x) < 1e-6  # 600 exchanges and 10 rounds among three
    assert bool((x.abs() < start(4).abs().max()).all())


def restarted(rank, size, store, folder):
    """Worker 2 kills itself and comes back as the process of rank 3, from far away."""
    torch.set_num_threads(1)
    place, back = str(Path(folder, "live")), rank == 3
    while back and not Path(folder, "2.pid").exists():
        time.sleep(0.01)
    x = torch.tensor([[(0.0, 3.0, 9.0, 1e6)[rank]]], dtype=torch.float64)
    options = {"timeout": 20, "returning": frozenset({2}), "life": int(back)}
    worker = Live(x, graphs.ring(3), rank - back, place, **options)
    with worker.hold():
        taken = float(worker.x)
    if rank == 2:
        Path(folder, "2.pid").touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    chat(worker, 600, 0.004)
    return worker.finish(), worker.x, taken


def test_a_restarted_worker_takes_a_neighbours_model_and_is_back(tmp_path):
    outcomes = launch(restarted, 4, tmp_path, str(tmp_path), timeout=60)
    assert outcomes.pop(2).exitcode == -signal.SIGKILL
    said = values(outcomes)
    assert said[2][2] < 10  # a neighbour's, not its own
    rows = torch.cat([row for _, row, _ in said])
    assert gossip.consensus_distance(rows) < 1e-3
    assert all(r["lost"] == {} for r, _, _ in said)
    assert said[2][0]["exchanges"] + said[2][0]["answers"] > 10


def wrapped(rank, size, store, speeds, choco, reweight):
    """Least squares whose workers disagree: worker i pulls its model to b_i = i."""
    torch.set_num_threads(1)
    transport = gossip.connect(rank, size, store, timeout=30)
    torch.manual_seed(rank)
    model = torch.nn.Linear(1, 2).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    algorithm = gossip.Choco(compressor=gossip.TopK(0.5), gamma=0.7) if choco else gossip.DPSGD()
    options = {"transport": transport, "clock": "live", "reweight": reweight}
    optimizer = gossip.wrap(inner, algorithm, graphs.complete(size), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**9)
    target = torch.full((1, 2), float(rank), dtype=torch.float64)
    ones = torch.ones(1, 1, dtype=torch.float64)
    while optimizer.total < 800:
        optimizer.zero_grad()
        loss = (model(ones) - target).square().sum() / 4
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(1e-3 * speeds[rank])
    saved = optimizer.state_dict()
    report = optimizer.finish()
    distance = optimizer.consensus_distance()
    reached = float(model(ones).detach().mean())
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.live.x, saved["x"])
    assert optimizer.param_groups[0]["lr"] == 0.02
    gossip.disconnect()
    return reached, distance, report


@pytest.mark.parametrize("choco", [pytest.param(False, marks=pytest.mark.slow), True], ids=["dense", "top-k"])
def test_wrap_trains_live_and_ends_with_one_model(tmp_path, choco):
    outcomes = values(launch(wrapped, 3, tmp_path, (1, 1, 1), choco, False))
    assert all(distance < 1e-20 for _, distance, _ in outcomes)
    reached = {x for x, _, _ in outcomes}
    assert max(reached) - min(reached) < 1e-12
    assert 0.7 < reached.pop() < 1.3  # the optimum of all is 1
    assert all(r["averaged"] and sum(r["share"]) == pytest.approx(1) for _, _, r in outcomes)


LOOP = """
import sys, time, torch, gossip, graphs
trouble, rank = sys.argv[1], int(sys.argv[2])
transport = gossip.connect(rank, 2, sys.argv[3], timeout=20)
model = torch.nn.Linear(1, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = gossip.wrap(optimizer, gossip.DPSGD(), graphs.path(2), clock="live", transport=transport)
for step in range(40):
    model(torch.full((1, 1), float(rank))).square().sum().backward()
    optimizer.step()
    time.sleep(0.005)
    if trouble == "a mistake" and rank == 1 and step == 10:
        raise ValueError("a mistake in the loop")
if trouble == "a mistake":
    print("lost", list(optimizer.finish()["lost"]))
gossip.disconnect()
print("model", model.weight.flatten().tolist(), optimizer.live.whole)
"""


@pytest.mark.parametrize("trouble", [pytest.param("none", marks=pytest.mark.slow), "a mistake"])
def test_scripts_end_with_their_exit_codes(tmp_path, trouble):
    """In interpreters of their own, whose finalization aborts while a thread waits for a message."""
    place, env = f"file://{tmp_path}/store", os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", LOOP, trouble, str(rank), place] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        (one, says), (two, error) = running[0].communicate(timeout=50), running[1].communicate(timeout=50)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, trouble == "a mistake"], (one, says, two, error)
    assert "terminate" not in says + error
    if trouble == "none":
        assert one == two  # the average
        assert "True" in one
    else:
        assert "ValueError: a mistake in the loop" in error
        assert one.startswith("lost [1]")
        assert "False" in one


def unfinished(rank, size, store):
    torch.set_num_threads(1)
    transport = gossip.connect(rank, size, store, timeout=30)
    model = torch.nn.Linear(1, 2)
    with torch.no_grad():
        model.bias.fill_(rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip.wrap(inner, gossip.DPSGD(), graphs.ring(size), clock="live", transport=transport, broadcast=False)
    time.sleep(0.2 * rank)
    gossip.disconnect()
    return model.bias.tolist(), [thread.name for thread in threading.enumerate() if "gossip with" in thread.name]


def test_disconnect_finishes_a_live_run_that_nobody_holds_any_more(tmp_path):
    assert values(launch(unfinished, 3, tmp_path)) == [([1.0, 1.0], [])] * 3


def automatic(rank, size, store):
    """γ by the probe, of a compressor that needs the layout of the model."""
    torch.set_num_threads(1)
    transport = gossip.connect(rank, size, store, timeout=30)
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 10)
    algorithm = gossip.Choco(compressor=gossip.PerLayer(gossip.TopK(0.1)), gamma="auto")
    options = {"transport": transport, "clock": "live", "broadcast": False}
    optimizer = gossip.wrap(
        torch.optim.SGD(model.parameters(), lr=0.0), algorithm, graphs.path(size), model=model, **options
    )
    with pytest.raises(RuntimeError, match="before its finish"), optimizer.average_model():
        pass
    before = optimizer.consensus_distance()
    while optimizer.total < 600:
        optimizer.step()
        time.sleep(0.001)
    after = optimizer.consensus_distance()
    report = optimizer.finish()
    assert optimizer.finish()["averaged"] == report["averaged"]
    with optimizer.average_model():
        assert torch.equal(model.weight.detach().flatten(), optimizer.live.x[0, :80])
    layout = optimizer.live.compressor.layout
    gossip.disconnect()
    return optimizer.live.gamma, after / before, layout is not None


def test_gamma_is_found_and_layers_are_bound_before_a_live_run(tmp_path):
    for gamma, shrunk, bound in values(launch(automatic, 2, tmp_path)):
        assert 0.05 < gamma <= 1
        assert shrunk < 0.1
        assert bound


def test_fast_workers_pull_the_model_to_their_data_and_reweighting_mends_it(tmp_path):
    """Worker 0 steps most often, so that D-PSGD ends near Σ share_i b_i; with `reweight` nearer to the mean 1."""
    biased = values(launch(wrapped, 3, tmp_path, (1, 5, 5), False, False))[0]
    mended = values(launch(wrapped, 3, tmp_path, (1, 5, 5), False, True))[0]
    share = biased[2]["share"]
    expected = sum(i * s for i, s in enumerate(share))
    assert share[0] > 0.45
    assert abs(biased[0] - expected) < 0.2
    assert abs(mended[0] - 1) < 0.5 * abs(biased[0] - 1)


def test_what_cannot_be_live_is_refused():
    with pytest.raises(gossip.Incompatible, match="SGP does more than average"):
        live_options(gossip.SGP())
    with pytest.raises(gossip.Incompatible, match="W that is static"):
        edges_of(graphs.one_peer_exponential(4))
    with pytest.raises(gossip.Incompatible, match="undirected"):
        Live(torch.zeros(1, 2), graphs.exponential(8), 0, "nowhere")
    with pytest.raises(gossip.Incompatible, match="2 parts"):
        Live(torch.zeros(1, 2), graphs.from_edges([(0, 1), (2, 3)]), 0, "nowhere")
    with pytest.raises(ValueError, match=r"drop=1\.5"):
        Live(torch.zeros(1, 2), graphs.ring(3), 0, "nowhere", drop=1.5)
    with pytest.raises(ValueError, match="outside 0…2"):
        Live(torch.zeros(1, 2), graphs.ring(3), 3, "nowhere")
    with pytest.raises(ValueError, match="gamma=None, and QSGD names no start value"):
        Live(torch.zeros(1, 2), graphs.ring(3), 0, "nowhere", compressor=gossip.QSGD(7, rescaled=True))
    with pytest.raises(ValueError, match=r"gamma=2.5 is not in \(0, 2\]"):
        Live(torch.zeros(1, 2), graphs.ring(3), 0, "nowhere", gamma=2.5)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="clock='sundial'"):
        gossip.wrap(inner, gossip.DPSGD(), graphs.ring(3), clock="sundial")
    with pytest.raises(ValueError, match="without a live clock"):
        gossip.wrap(inner, gossip.DPSGD(), graphs.ring(3), reweight=True)
    with pytest.raises(gossip.Incompatible, match="always overlap"):
        gossip.wrap(inner, gossip.DPSGD(), graphs.ring(3), clock="live", overlap=True)


def test_edges_are_those_of_w():
    topology = edges_of(graphs.static(graphs.metropolis(graphs.star(5))))
    assert torch.equal(topology.edge_index, graphs.star(5).edge_index)
