"""A run from its config: the same in every placement, resumed, evaluated or not; and refused before any process starts."""

import math
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import gossip
from experiments import launch, records, trainer
from experiments.tasks.quadratic import Quadratic
from experiments.train import message, run

CONF = Path(trainer.__file__).parent / "conf"
SMALL = ("n=4", "rounds=8", "evaluate_every=2", "track=off", "progress=false", "dtype=float64", "task=quadratic")
CHOCO = (
    *("algorithm=choco", "compressor=topk", "compressor.ratio=0.3", "optimizer=momentum", "scheduler=step"),
    *("scheduler.step_size=3", "local_steps=2", "task.sigma=0.1"),
)


def config(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("train", [*SMALL, *overrides]), resolve=True)


def rows(folder, at_least=0):
    """The rows of a record without wall time."""
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in records.read(folder).rows
        if row["round"] >= at_least
    ]


def assert_same(got, expected):
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=0, abs=1e-10, nan_ok=True), (name, one["round"])
        assert one["bits"] == other["bits"]


def test_the_same_metrics_and_bits_in_every_placement(tmp_path):
    digits = ("task=digits", "task.model.hidden=[8]", *[o for o in CHOCO if "sigma" not in o], "rounds=3")
    expected = run(config(*digits), tmp_path / "here", keep=True)
    assert expected.shape == (3, 4, 64 * 8 + 8 + 80 + 10)  # rounds 0, 2 and 3
    assert float((expected[-1] - expected[0]).abs().max()) > 1e-3
    for kind in (("launch=workers",), ("launch=blocks", "launch.processes=3")):  # blocks of 2, 1 and 1
        got = run(config(*digits, *kind), tmp_path / kind[0], keep=True)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        assert_same(rows(tmp_path / kind[0]), rows(tmp_path / "here"))
        assert records.read(tmp_path / kind[0]).status["status"] == "done"
    assert [row["round"] for row in rows(tmp_path / "here")] == [0, 2, 3]
    assert len(list((tmp_path / "launch=blocks").glob("rank-*.log"))) == 3
    waits = (tmp_path / "launch=workers" / "waits.csv").read_text().splitlines()
    pairs = [tuple(map(int, line.split(",")[:2])) for line in waits[1:]]
    assert (waits[0], pairs) == (
        "process,for,seconds",
        [(i, j) for i in range(4) for j in sorted(((i - 1) % 4, (i + 1) % 4))],
    )
    assert all(float(line.split(",")[2]) >= 0 for line in waits[1:])


def test_a_row_and_its_bits(tmp_path):
    run(config("algorithm=dpsgd", "rounds=5"), tmp_path)
    first, *_, last = rows(tmp_path)
    assert [row["round"] for row in rows(tmp_path)] == [0, 2, 4, 5]
    assert last["bits"] == 5 * 2 * 10 * 64  # two neighbours, ten numbers of 64 bits
    assert first["bits"] == 0
    assert first["consensus/distance"] == 0
    assert last["consensus/distance"] > 0
    assert math.isnan(first["train/loss"])  # no batch was seen yet
    assert last["train/loss"] > 0
    for which in ("average", "mean", "worst", "best"):
        assert f"eval/{which}/suboptimality" in last
    assert last["eval/average/suboptimality"] < last["eval/mean/suboptimality"] < last["eval/worst/suboptimality"]
    header = records.read(tmp_path).header
    assert header["config"]["algorithm"]["_target_"] == "gossip.DPSGD"
    assert header["seeds"] == {"seed": 0, "task.seed": 0}


def test_evaluations_and_checkpoints_change_nothing(tmp_path):
    seldom = run(config(*CHOCO, "evaluate_every=8"), tmp_path / "seldom", keep=True)
    often = run(config(*CHOCO, "evaluate_every=1", "checkpoint_every=3"), tmp_path / "often", keep=True)
    assert len(often) == 9
    assert torch.equal(seldom[-1], often[-1])
    assert rows(tmp_path / "seldom")[-1] == rows(tmp_path / "often")[-1]


@pytest.mark.parametrize(
    ("before", "after"),
    [(("launch=here",), ("launch=blocks", "launch.processes=3")), (("launch=workers",), ("launch=here",))],
)
def test_resume_equals_the_unbroken_run_also_in_another_placement(tmp_path, before, after):
    unbroken = run(config(*CHOCO), tmp_path / "unbroken", keep=True)
    run(config(*CHOCO, *before, "rounds=5", "checkpoint_every=3"), tmp_path / "first")
    table = gossip.checkpoint.read(tmp_path / "first" / trainer.CHECKPOINT)  # torch's safe mode
    assert table["round"] == 5  # the end of a run is always kept
    resumed = run(config(*CHOCO, *after, f"resume={tmp_path / 'first'}"), tmp_path / "second", keep=True)
    assert len(resumed) == 2  # rounds 6 and 8
    torch.testing.assert_close(resumed, unbroken[-2:], rtol=0, atol=1e-10)
    whole = [row for row in rows(tmp_path / "second") if row["round"] != 5]  # the first run's last is on record too
    assert_same(whole, rows(tmp_path / "unbroken"))
    seconds = [row["seconds"] for row in records.read(tmp_path / "second").rows]
    assert seconds == sorted(seconds)


def test_resume_in_the_same_folder_appends(tmp_path):
    run(config(*CHOCO), tmp_path / "unbroken")
    run(config(*CHOCO, "rounds=4", "checkpoint_every=2"), tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run.*Choose another folder, or resume"):
        run(config(*CHOCO), tmp_path / "run")
    run(config(*CHOCO, f"resume={tmp_path / 'run'}"), tmp_path / "run")
    assert_same(rows(tmp_path / "run"), rows(tmp_path / "unbroken"))
    assert records.read(tmp_path / "run").status["done"] == 8


def test_other_settings_than_the_resumed_run_had_are_told(tmp_path):
    run(config("rounds=2", "checkpoint_every=2"), tmp_path / "run")
    said = []
    resume = f"resume={tmp_path / 'run' / trainer.CHECKPOINT}"  # the file is as good as its folder
    run(config(resume, "seed=1", "task.curvature=3", "evaluate_every=4"), tmp_path / "on", say=said.append)
    assert "other settings than it had: seed=0 there and 1 here, task.curvature=1.0 there and 3 here" in said[0]
    run(config("rounds=2", "checkpoint_every=2", "scheduler=cosine"), tmp_path / "cosine")
    with pytest.raises(ValueError, match="scheduler.T_max=2 there and 8 here"):  # the one of the checkpoint would go on
        run(config("scheduler=cosine", f"resume={tmp_path / 'cosine'}"), tmp_path / "longer")
    run(config(resume, "launch=blocks", "launch.kind=here"), tmp_path / "same", say=said.append)
    assert not any("other settings" in text for text in said[2:])


def test_another_n_starts_at_the_average_on_request(tmp_path):
    run(config(*CHOCO, "rounds=4", "checkpoint_every=2"), tmp_path / "four")
    fewer = ("n=2", f"resume={tmp_path / 'four'}", "resume_average=true")
    with pytest.warns(UserWarning, match=r"n=4 workers is resumed by n=2.*memory of Choco \(hat, lag, r\) starts anew"):
        x = run(config(*CHOCO, *fewer, "evaluate_every=1"), tmp_path / "two", keep=True)
    assert x.shape == (4, 2, 10)  # rounds 5 to 8
    before, after = rows(tmp_path / "four"), rows(tmp_path / "two")
    assert [row["round"] for row in after] == [0, 2, 4, 5, 6, 7, 8]
    assert after[:3] == before
    bits = [row["bits"] for row in after]
    assert bits == sorted(set(bits))
    with pytest.raises(ValueError, match="its record would hold two runs; leave out hydra.run.dir"):
        run(config(*CHOCO, *fewer), tmp_path / "four")
    with pytest.warns(UserWarning, match="n=2"):  # every process says so, in its own log
        again = run(config(*CHOCO, *fewer, "launch=workers"), tmp_path / "processes", keep=True)
    torch.testing.assert_close(again[-1], x[-1], rtol=0, atol=1e-12)


def refused(overrides, tmp_path, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("processes were started")

    monkeypatch.setattr(launch, "run_processes", start)
    with pytest.raises(Exception) as caught:  # noqa: PT011  its kind is looked at here
        run(config("launch=blocks", *overrides), tmp_path / "refused")
    cause = caught.value.__cause__ if "Instantiation" in type(caught.value).__name__ else caught.value
    assert isinstance(cause, (ValueError, FileNotFoundError)), repr(caught.value)
    assert not (tmp_path / "refused").exists()
    text = message(caught.value)
    assert "Traceback" not in text
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["n=7", "topology=torus"], r"n is 7, which is no product.*choose another n.*config key: topology"),
        (["n=6", "topology=hypercube"], r"n is 6; a hypercube needs a power of two"),
        (["topology=erdos_renyi", "topology.p=0.0"], r"p=0.0.*disconnected.*raise p above"),
        (
            ["topology=erdos_renyi", "topology.p=0.01", "+topology.allow_disconnected=true"],
            r"requires.*contractive.*add edges",
        ),
        (["topology=random_regular", "topology.degree=5"], r"degree is 5 and n is 4.*Try degree=3"),
        (["algorithm=choco", "compressor=topk", "compressor.ratio=0"], r"ratio=0 is not in \(0, 1\].*fraction"),
        (["algorithm=choco", "compressor=topk", "compressor.ratio=2"], r"ratio=2 is not in \(0, 1\].*write 0.5"),
        (
            ["algorithm=choco", "compressor=topk", "compressor.ratio=x"],
            r"compressor.ratio=x is text.*TopK takes a number",
        ),
        (
            ["algorithm=choco", "algorithm.gamma=None"],
            r"gamma=None is text here: for no value write algorithm.gamma=null",
        ),
        (["compressor=topk", "compressor.ratio=null"], r"compressor.ratio=null, and gossip.TopK needs a number"),
        (["algorithm=choco", "algorithm.gamma=0"], r"gamma=0 is not in \(0, 2\].*consensus step size"),
        (["optimizer.lr=bad"], r"optimizer.lr=bad is text, and torch.optim.SGD takes a number"),
        (["optimizer.lr=-1"], r"Invalid learning rate: -1"),
        (["compressor=block_topk", "compressor.block=1.5"], r"block=1.5, and gossip.BlockTopK takes a whole number"),
        (["compressor=qsgd", "compressor.levels=7.0"], r"levels=7.0, and gossip.QSGD takes a whole number"),
        (["compressor=qsgd", "compressor.rescaled=maybe"], r"rescaled=maybe, and gossip.QSGD takes true or false"),
        (["algorithm=choco", "algorithm.gamma=true"], r"gamma=true, and gossip.Choco takes a number"),
        (["cost=stragglers", "cost.work.workers=3"], r"work.workers=3, and .* takes Sequence\[int\] there"),
        (["clock=asynchronous", "clock.groups=[0,1]"], r"groups=\[0, 1\], and .* takes int \| Sequence\[Sequence"),
        (["clock=asynchronous", "clock.waiting=[a,b]"], r"waiting=\['a', 'b'\], and .* takes Sequence\[float\]"),
        (["scheduler=step", "scheduler.step_size=0"], r"cannot start.*look at optimizer.\* and scheduler.\*"),
        (["+optimizer.momentun=0.9"], r"optimizer.momentun is no option of torch.optim.SGD: did you mean momentum\?"),
        (["+topology.foo=1"], r"topology.foo is no option of graphs.ring: choose from n, directed"),
        (["+compresor.ratio=1"], r"compresor is no key of the config: did you mean compressor\?"),
        (["+foo=1"], r"foo is no key of the config: choose from n, rounds, seed"),
        (["+launch.foo=1"], r"launch.foo is no option of a launch"),
        (["launch.processes=5"], r"5 processes for n=4 workers.*use 1 to 4"),
        (["n=0"], r"n=0 is below 1"),
        (["seed=-1"], r"seed=-1 is below 0"),
        (["local_steps=0"], r"local_steps=0 is below 1"),
        (["evaluate_every=0"], r"evaluate_every=0 is below 1"),
        (["batch=0"], r"batch=0 is below 1; null means the full batch"),
        (["track=yes"], r"track='yes' is not one of off, offline, online"),
        (["dtype=float16"], r"dtype='float16' is not one of float32, float64"),
        (["device=nowhere"], r"device='nowhere' cannot be used here.*device=cpu always can"),
        (["task.n=5"], r"n=4 and the task has 5 workers.*task.n=\$\{n\}"),
        (["topology.n=5"], r"n=4 and the schedule connects 5 workers"),
        (["task=digits", "n=1500"], r"1437 samples for n = 1500 workers.*at most 1437"),
        (
            ["task=digits", "n=100", "partition.min_size=0", "partition.alpha=0.01"],
            r"worker \d+ of 100 has no samples.*Use fewer",
        ),
        (["task=digits", "partition.min_size=1000"], r"min_size = 1000.*Use min_size ≤ 359"),
        (["task=digits", "partition=by_label", "partition.classes_per_worker=1"], r"classes_per_worker ≥ 3"),
        (["task=digits", "partition.alpha=0"], r"alpha = 0.*partition=iid"),
        (
            ["algorithm=choco", "schedule=one_peer_exponential"],
            r"Choco requires.*static.*W\(1\) differs from W\(0\): use",
        ),
        (["topology=star", "weights=uniform"], r"DPSGD requires.*doubly stochastic.*column 0 of W\(0\) sums to 1.75"),
        (["topology=exponential", "weights=metropolis"], r"metropolis needs an undirected graph"),
        (["algorithm=allreduce", "local_steps=2"], r"local_steps=2, and AllReduce averages every gradient"),
        (["algorithm=gradient_tracking", "overlap=true"], r"overlap=True, and GradientTracking has no overlapped form"),
        (["~rounds"], r"the config has no rounds: a key can be given another value, not be removed"),
        (["~task"], r"the config has no task"),
        (["resume=/nowhere"], r"no checkpoint at /nowhere/checkpoint.pt"),
    ],
)
def test_wrong_input_is_one_paragraph_before_any_process(tmp_path, monkeypatch, overrides, says):
    text = refused(overrides, tmp_path, monkeypatch)
    assert re.search(says, text), text


def test_resume_refused(tmp_path, monkeypatch):
    run(config("rounds=4", "checkpoint_every=2"), tmp_path / "run")
    resume = f"resume={tmp_path / 'run'}"
    assert re.search(
        r"holds n=4 workers and this run has n=6: resume with the same n, or .*resume_average=true",
        refused(["n=6", resume], tmp_path, monkeypatch),
    )
    assert "at round 4 already: ask for more rounds" in refused(["rounds=4", resume], tmp_path, monkeypatch)
    assert "resume with the same algorithm, model and dtype" in refused(
        ["algorithm=choco", resume], tmp_path, monkeypatch
    )
    assert "resume with the same algorithm, model and dtype" in refused(["task.d=11", resume], tmp_path, monkeypatch)
    text = refused(["optimizer.lr=0.01", resume], tmp_path, monkeypatch)  # the checkpoint's would be taken
    assert re.search(r"with optimizer.lr=0.1 there and 0.01 here: the optimizer goes on as it was saved", text)
    (tmp_path / "run" / trainer.CHECKPOINT).write_bytes(b"torn")
    assert "checkpoint.pt cannot be read as a checkpoint" in refused([resume], tmp_path, monkeypatch)


def test_a_rank_that_meets_nobody_is_a_paragraph(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(
        launch.WorkerError, match="rank 0 of 1 could not meet the others at MASTER_ADDR, which is not set"
    ):
        run(config("launch=blocks"), tmp_path)


class Failing(Quadratic):
    """A task whose worker 2 fails at its fourth step."""

    def gradient(self, x, workers, step):
        if step == 3 and 2 in workers.tolist():
            raise ZeroDivisionError("worker 2 divides")
        return super().gradient(x, workers, step)


def failing(n):
    return Failing(torch.arange(n, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("kind", ["here", "workers"])
def test_a_failing_worker_is_on_record(tmp_path, kind):
    broken = config(f"launch={kind}") | {"task": {"_target_": "test_trainer.failing", "n": 4}}
    with pytest.raises(ZeroDivisionError if kind == "here" else launch.WorkerError, match="worker 2 divides") as caught:
        run(broken, tmp_path)
    assert kind == "here" or str(caught.value).startswith("rank 2 failed")
    record = records.read(tmp_path)
    assert record.status["status"] == "failed"
    assert "worker 2 divides" in record.status["reason"]
    assert [row["round"] for row in record.rows] == [0, 2]


def test_a_run_whose_models_are_not_finite_stops_and_says_so(tmp_path):
    said = []
    run(config("task=quadratic", "optimizer.lr=1e9", "rounds=100"), tmp_path / "run", say=said.append)
    status = records.read(tmp_path / "run").status
    assert status["status"] == "diverged"
    assert status["done"] < 100
    assert "lower optimizer.lr" in status["reason"]
    assert status["reason"] in said[-1]


@pytest.mark.parametrize("kind", ["here", "workers"])
def test_a_compressor_that_refuses_a_diverged_row_ends_the_run_with_its_record(tmp_path, kind):
    """Long before the next evaluation."""
    options = "algorithm=choco", "compressor=topk", "optimizer.lr=1e30", "rounds=1000", "evaluate_every=400"
    run(config("task=quadratic", f"launch={kind}", *options), tmp_path)
    record = records.read(tmp_path)
    assert record.status["status"] == "diverged"
    assert re.search(
        r"row \d+ \(worker \d+\) of the \d+ rows to compress holds NaN or an infinity", record.status["reason"]
    )
    assert [row["round"] for row in record.rows] == [0]


def test_a_run_that_explodes_stops_before_its_models_are_not_finite(tmp_path):
    said = []
    options = "algorithm=choco", "compressor=randk", "algorithm.gamma=1.5", "rounds=4000", "evaluate_every=1"
    run(config("task=quadratic", *options), tmp_path, say=said.append)
    record = records.read(tmp_path)
    assert record.status["status"] == "diverged"
    assert "consensus/distance is " in record.status["reason"]
    assert "lower optimizer.lr or algorithm.gamma" in record.status["reason"]
    distances = [row["consensus/distance"] for row in record.rows]
    assert math.isfinite(distances[-1])
    assert distances[-1] > 1e6 * max(distances[:4]) > distances[-2]
    assert said[0].startswith("warning: algorithm.gamma=1.5 is beyond the stability limit")


def test_gamma_auto_is_found_before_the_run_and_on_record(tmp_path):
    run(config("task=quadratic", "algorithm=choco", "compressor=sign", "algorithm.gamma=auto"), tmp_path)
    found = records.read(tmp_path).header["config"]["algorithm"]["gamma"]
    assert 0.2 < found <= 1


@pytest.mark.parametrize(("compressor", "gamma"), [("identity", 1.0), ("topk", 0.04), ("randk", 0.01), ("sign", 0.5)])
def test_choco_starts_from_the_gamma_of_its_compressor(compressor, gamma):
    setup = trainer.build(config("algorithm=choco", f"compressor={compressor}"))
    assert setup.algorithm.step == pytest.approx(gamma)


def test_a_compressor_without_use_is_told(tmp_path):
    said = []
    options = "task=quadratic", "n=4", "rounds=2", "compressor=topk"
    run(config(*options), tmp_path / "a", say=said.append)
    assert "note: DPSGD takes no compressor, so gossip.TopK is not used" in said
    run(config(*options, "algorithm=choco"), tmp_path / "b", say=(other := []).append)
    assert not any("not used" in text for text in other)
