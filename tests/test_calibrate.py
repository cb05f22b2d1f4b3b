"""Calibration finds the numbers that exchanges were made with, and the command writes a file that a run reads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossip
import graphs
from experiments import calibrate
from experiments.calibrate import Measured, links
from gossip import Cost, Links, work

ROOT = Path(calibrate.__file__).parents[1]


def exchanged(model: Links, n: int, M: int) -> Measured:
    """What the timeline says that calibration would measure."""

    def seconds(W, bytes, bare=False, rest=0.0):
        timeline = gossip.Timeline(Cost(work.Constant(rest), model), n)
        for k in range(10):
            timeline.round(k, W, gossip.Sent(bytes))
        before = timeline.clock.clone()
        timeline.round(10, W, gossip.Sent(bytes))
        own = 2 * model.per_message if bare else 0.0
        return (timeline.clock - before - rest - own).tolist()

    tables = [torch.zeros(n, n, dtype=torch.float64) for _ in range(3)]
    rested = 0.0
    for partner in calibrate._tournament(n):
        W = torch.eye(n, dtype=torch.float64)
        for i, j in enumerate(partner):
            W[i, j] += 1
        for table, options in zip(tables, ((0.0, True), (0.0,), (M,))):
            for i, s in enumerate(seconds(W, *options)):
                table[i, partner[i]] = s if partner[i] != i else 0.0
        rested = max(rested, *seconds(W, M / 10, rest=100.0))
    everybody = torch.ones(n, n, dtype=torch.float64)
    return Measured(*(t.tolist() for t in tables), max(seconds(everybody, 0.0)), max(seconds(everybody, M)), rested, M)


@pytest.mark.parametrize("n", [2, 4, 5])
@pytest.mark.parametrize("burst", [0.0, 256e3])
def test_the_numbers_come_back(n, burst):
    crowding = 0.2 if n > 2 else 0.0
    truth = Links(0.01, nic=12e6, crowding=crowding, burst=burst, per_message=2e-4, handshake=True)
    found = links(exchanged(truth, n, 4_000_000))
    for name in ("latency", "nic", "crowding", "burst", "per_message", "handshake"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert found.bandwidth == float("inf")


def test_links_that_differ_are_kept_apart():
    latency = torch.tensor([[0.0, 0.01, 0.05], [0.01, 0.0, 0.03], [0.05, 0.03, 0.0]], dtype=torch.float64)
    bandwidth = torch.tensor([[1e15, 5e6, 1e6], [5e6, 1e15, 2e6], [1e6, 2e6, 1e15]], dtype=torch.float64)
    found = links(exchanged(Links(latency, bandwidth, nic=5e6, handshake=True), 3, 1_000_000))
    torch.testing.assert_close(torch.tensor(found.latency, dtype=torch.float64), latency)
    for i, j in ((0, 1), (0, 2), (1, 2), (2, 0)):
        assert found.message(i, j, 1e6) == pytest.approx(float(latency[i, j]) + 1e6 / float(bandwidth[i, j]), rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_everybody_meets_everybody_once(n):
    rounds = calibrate._tournament(n)
    met = [(i, j) for partner in rounds for i, j in enumerate(partner) if i != j]
    assert sorted(met) == [(i, j) for i in range(n) for j in range(n) if i != j]
    assert all(partner[j] == i for partner in rounds for i, j in enumerate(partner))


def test_the_file_of_the_command_is_read_by_a_run(tmp_path):
    out, trace = tmp_path / "cost.yaml", tmp_path / "steps.csv"
    words = ["n=2", "task=quadratic", "seconds=0.1", f"out={out}", f"trace={trace}"]
    command = [sys.executable, "-m", "experiments.calibrate", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "a local step" in done.stdout
    assert "all-reduce" in done.stdout
    cost = calibrate.read(str(out))
    assert 1e-6 < float(cost.compute(torch.arange(2), torch.tensor([0, 9])).max()) < 1
    assert 0 < cost.message(0, 1, 0) < cost.message(0, 1, 1e9) < 60
    assert cost.links.handshake
    assert 0 < gossip.seconds_per_round(cost, graphs.complete(2), 4e4) < 1
    steps = work.Trace(trace)(torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert bool((steps > 0).all())


@pytest.mark.parametrize(
    ("words", "named"),
    [(["out=x.yaml", "algoritm=dpsgd"], "algoritm"), (["out=x.yaml", "n=1"], "links need two"), ([], "out=cost.yaml")],
)
def test_wrong_words_end_with_a_sentence(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert calibrate.main(words) == 2
    said = capsys.readouterr()
    assert named in said.out + said.err
    with pytest.raises(ValueError, match="experiments.calibrate out=nowhere.yaml"):
        calibrate.read("nowhere.yaml")
