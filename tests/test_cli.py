"""`python -m experiments.train` as users type it: records, sweeps that go on, errors in a paragraph, parts of their own."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from experiments import records, sweep, train, trainer
from experiments.train import run

ROOT = Path(train.__file__).parents[1]
CONF = ROOT / "experiments" / "conf"
SMALL = ("n=4", "rounds=4", "evaluate_every=2", "task=quadratic", "track=off")
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD"))} | {"OMP_NUM_THREADS": "1"}


def python(*words, cwd, timeout=110, env=None):
    """A command in a folder of its own. The package is found on the path whether or not it is installed."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**ENV, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def command(*overrides, cwd, **options):
    return python("-m", "experiments.train", *overrides, cwd=cwd, **options)


def torchrun(processes, *overrides, cwd):
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return python(*words, "-m", "experiments.train", *overrides, cwd=cwd)


def config(*overrides):
    with initialize_config_dir(str(ROOT / "experiments" / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("train", [*SMALL, "progress=false", *overrides]), resolve=True)


# -- one run --------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_record_and_one_offline_run_of_wandb(tmp_path):
    done = command(*SMALL, "track=offline", "launch=blocks", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert re.search(r"4 quadratics in 10 dimensions.*\n.*round 4, .* MB sent per worker", done.stdout)
    latest = tmp_path / "runs" / "latest"
    assert latest.is_symlink()
    folder = latest.resolve()
    assert folder.parents[1] == tmp_path / "runs"
    assert f"record: runs/{folder.relative_to(tmp_path / 'runs')}" in done.stdout.replace(f"{tmp_path}/", "")
    run = records.read(latest)
    assert run.status["status"] == "done"
    assert [row["round"] for row in run.rows] == [0, 2, 4]
    assert run.header["config"]["n"] == 4
    assert run.header["choices"]["clock"] == "lockstep"
    assert run.header["versions"]["torch"]
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1  # one per run, not one per process
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


@pytest.mark.slow
def test_resume_of_the_latest_run(tmp_path):
    assert command(*SMALL, "checkpoint_every=4", cwd=tmp_path).returncode == 0
    latest = tmp_path / "runs" / "latest"
    former = latest.resolve()
    done = command(*SMALL, "resume=runs/latest", "rounds=6", "progress=false", "launch=blocks", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert latest.resolve() != former  # which was meant by runs/latest, and is what this run has resumed
    assert [row["round"] for row in records.read(latest).rows] == [0, 2, 4, 6]


def test_a_refused_run_leaves_a_former_one_in_its_folder_as_it_is(tmp_path):
    run(config(), tmp_path)
    before = {p.name: p.read_text() for p in tmp_path.glob("*.json*")}
    with pytest.raises(ValueError, match="already holds a run.*another folder, or resume") as caught:
        run(config(), tmp_path)
    train._record_failure(tmp_path, 4, caught.value, str(caught.value))
    assert {p.name: p.read_text() for p in tmp_path.glob("*.json*")} == before
    assert records.read(tmp_path).status["status"] == "done"
    train._record_failure(tmp_path / "new", 4, caught.value, str(caught.value))
    assert records.read(tmp_path / "new").status["status"] == "failed"


def test_wandb_mode_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run(config("track=offline"), tmp_path)
    assert records.read(tmp_path).status["status"] == "done"
    assert not (tmp_path / "wandb").exists()


def test_the_latest_run_is_the_one_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *_, **__: os.replace(tmp_path / "runs" / "latest", tmp_path / "seen"))
    with pytest.raises(KeyError):  # of the summary: nothing was trained
        run(config(), tmp_path / "runs" / "day" / "time")
    assert (tmp_path / "seen").resolve() == tmp_path / "runs" / "day" / "time"


def test_help(tmp_path):
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0
    for line in (
        *(
            f"{group}: {', '.join(sorted(p.stem for p in (CONF / group).glob('*.yaml')))}"
            for group in ("algorithm", "compressor", "clock", "faults", "cost")
        ),
        "launch: blocks, here, workers",
        "rounds: 300",
        "evaluate_every    rounds between evaluations",
    ):
        assert line in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_commands_at_once(tmp_path):
    words = [sys.executable, "-m", "experiments.train", *SMALL, "launch=blocks", "progress=false"]
    env = {**ENV, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=110)[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert said == ["", ""]  # no complaints of a store or a connection at the end
    assert len(list(tmp_path.glob("runs/*/*/run.json"))) == 2


# -- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_records_incompatible_pairs_and_goes_on_and_seeds_equal_single_runs(tmp_path):
    swept = ("algorithm=dpsgd,choco", "schedule=static,one_peer_exponential", "seed=1,2", "task.sigma=0.5")
    done = command("-m", *SMALL, *swept, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "Warning" not in done.stderr
    folder = (tmp_path / "runs" / "latest").resolve()
    jobs = {int(p.name): records.read(p) for p in folder.iterdir() if p.is_dir()}
    assert [jobs[i].status["status"] for i in range(8)] == ["done"] * 6 + ["incompatible"] * 2
    reason = "Choco requires a schedule that is static, and W(1) differs from W(0): use one fixed W"
    assert jobs[6].status["reason"].startswith(reason)
    assert done.stdout.count(reason) == 2
    assert "sweep: 6 done, 2 incompatible" in done.stdout
    assert json.loads((folder / "sweep.json").read_text())["overrides"] == [*SMALL, *swept]
    assert "8/8" in done.stderr  # the bar

    def same(record):
        return [{k: v for k, v in row.items() if k not in ("seconds", "train/loss")} for row in record.rows]

    for job, seed in ((0, 1), (1, 2)):
        run(config("task.sigma=0.5", f"seed={seed}"), tmp_path / str(seed))
        assert same(jobs[job]) == same(records.read(tmp_path / str(seed)))
    assert same(jobs[0]) != same(jobs[1])


def test_a_sweep_goes_on_past_failures_and_exits_with_1(tmp_path):
    done = command("-m", *SMALL[1:], "n=4,7", "optimizer.lr=0.1,bad", "topology=torus", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    folder = (tmp_path / "runs" / "latest").resolve()
    jobs = {int(p.name): records.read(p).status for p in folder.iterdir() if p.is_dir()}
    assert [jobs[i]["status"] for i in range(4)] == ["done", "failed", "failed", "failed"]
    assert jobs[2]["reason"].startswith("n is 7, which is no product")
    assert jobs[1]["reason"] == "optimizer.lr=bad is text, and torch.optim.SGD takes a number there"
    for i in (1, 2, 3):
        assert "Traceback" in (folder / str(i) / "log.txt").read_text()
    assert re.search(r"failed .*n=4 optimizer.lr=bad topology=torus: optimizer.lr=bad is text", done.stdout)
    assert "sweep: 1 done, 3 failed" in done.stdout


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The command in this process and in a folder of its own; it sets up logging and signals as if it were alone."""
    root, kept = logging.getLogger(), signal.getsignal(signal.SIGTERM)
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.Sweep, "folder", None)

    def call(*overrides):
        monkeypatch.setattr(sys, "argv", ["train", *overrides])
        train.cli()

    yield call
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    signal.signal(signal.SIGTERM, kept)


def test_a_sweep_that_is_repeated_in_its_folder_does_what_is_left_and_another_is_refused(here, tmp_path, capsys):
    swept = ("-m", *SMALL, "progress=false", "hydra.sweep.dir=s", "checkpoint_every=2", "seed=0,1,2")
    here(*swept)
    whole = {job: (tmp_path / "s" / job / records.METRICS).read_text() for job in "012"}
    for job, lines in (("1", 2), ("2", 3)):  # killed after round 0, and after round 2 with a checkpoint
        path = tmp_path / "s" / job
        (path / records.METRICS).write_text("\n".join(whole[job].split("\n")[:lines]) + "\n{torn")
        records.write_status(path, {"status": "running", "planned": 4})
    (tmp_path / "s" / "1" / trainer.CHECKPOINT).unlink()
    run(config("seed=2", "rounds=2", "checkpoint_every=2"), tmp_path / "half")
    (tmp_path / "half" / trainer.CHECKPOINT).replace(tmp_path / "s" / "2" / trainer.CHECKPOINT)
    with pytest.raises(
        SystemExit, match="error: s holds another sweep, .*seed=0,1,2: give this one a folder of its own"
    ):
        here(*swept[:-1], "seed=3,4,5")
    here(*swept)
    assert (tmp_path / "s" / "0" / records.METRICS).read_text() == whole["0"]
    for job in "12":
        again = [json.loads(line) for line in (tmp_path / "s" / job / records.METRICS).read_text().splitlines()]
        assert [row["round"] for row in again[1:]] == [0, 2, 4]
        last = json.loads(whole[job].splitlines()[-1])
        assert again[-1] | {"seconds": 0} == last | {"seconds": 0}
    assert (tmp_path / "s" / "1" / f"cut.{records.METRICS}").exists()
    assert capsys.readouterr().out.count("sweep: 3 done") == 2


def test_options_of_one_choice_in_a_sweep_over_a_group_and_m_in_the_middle(here, tmp_path):
    swept = ("compressor=topk,sign", "-m", "++compressor.ratio=0.3", "hydra.sweep.dir=s", "hydra.job.chdir=true")
    here(*SMALL, "progress=false", "algorithm=choco", *swept)
    config = [records.read(tmp_path / "s" / job).config for job in "01"]
    assert [c["algorithm"]["compressor"] for c in config] == [c["compressor"] for c in config]
    assert config[0]["compressor"]["ratio"] == 0.3
    assert config[1]["compressor"] == {"_target_": "gossip.Sign"}
    with pytest.raises(SystemExit):
        here(*SMALL, "compressor=sign", "++compressor.ratio=0.3")
    with pytest.raises(SystemExit):
        here("-m", *SMALL, "compressor=topk", "++compressor.ration=0.3")


def test_a_console_without_the_letters_of_a_report_ends_no_run(here, tmp_path, monkeypatch):
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", said)
    here(*SMALL, "progress=false", "hydra.run.dir=r")
    said.flush()
    assert b"(1/n) ???f?(x*)??" in said.buffer.getvalue()
    assert "‖∇fᵢ(x*)‖²" in (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")


def test_jobs_that_share_a_folder_end_the_sweep(here, capsys):
    with pytest.raises(SystemExit, match="s/x holds a run with seed=0, and this job has seed=1.*hydra.sweep.subdir"):
        here("-m", *SMALL, "progress=false", "hydra.sweep.dir=s", "hydra.sweep.subdir=x", "seed=0,1")


def test_config_files_that_are_edited_during_a_sweep_change_no_later_job(here, tmp_path, monkeypatch, capsys):
    file = tmp_path / "conf" / "optimizer" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.5\n")
    seen = []

    def edits(config, folder, **options):
        seen.append((config["seed"], config["optimizer"]["lr"]))
        file.write_text(file.read_text().replace("0.5", "9.0"))

    monkeypatch.setattr(train, "run", edits)
    with pytest.raises(SystemExit) as caught:
        here("-m", "--config-dir", "conf", *SMALL, "progress=false", "optimizer=mine", "seed=range(0,3)")
    assert seen == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert caught.value.code == 1  # these jobs have left nothing, and that is no success
    assert "sweep: 3 without a record" in capsys.readouterr().out


def test_a_sweep_is_summed_up_however_deep_its_folders_are(tmp_path):
    for name, status in (("a b/seed=1", "done"), ("a b/seed=0", "failed")):
        records.write_status(tmp_path / name, {"status": status, "reason": "no disk", "planned": 4})
    (tmp_path / "sweep.json").write_text('{"overrides": [], "jobs": 4}')
    expected = f"      failed  seed=0: no disk\nsweep: 1 done, 1 failed, 2 without a record; records: {tmp_path}"
    assert sweep.summary(tmp_path) == expected
    (tmp_path / "a b" / "seed=1" / records.RUN).write_text("{torn")
    assert "unreadable  seed=1:" in sweep.summary(tmp_path)
    assert "sweep: 1 failed, 1 unreadable, 2 without" in sweep.summary(tmp_path)


def test_an_interval_is_nothing_to_sweep_over(here):
    with pytest.raises(SystemExit, match=r"error: optimizer.lr=interval\(0.1,1\): there is nothing to count through"):
        here("-m", *SMALL, "optimizer.lr=interval(0.1,1)")


def test_sigterm_ends_a_sweep_with_a_summary_and_how_to_go_on(here, tmp_path, monkeypatch, capsys):
    def ended(config, folder, **options):
        with records.Writer(folder, {}, planned=4) as record:
            record.log({"round": 2})
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train, "run", ended)
    with pytest.raises(SystemExit) as caught:
        here("-m", *SMALL, "progress=false", "hydra.sweep.dir=s", "seed=0,1")
    assert caught.value.code == 143
    said = capsys.readouterr()
    assert re.search("interrupted .*seed=0: ended by SIGTERM\nsweep: 1 interrupted, 1 without a record", said.out)
    assert "the same command with hydra.sweep.dir=s goes on" in said.err
    assert records.read(tmp_path / "s" / "0").status["done"] == 2


@pytest.mark.slow
def test_a_sweep_in_parallel_starts_processes_of_its_own(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    parallel = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "launch=blocks", "seed=0,1", "topology=ring,star")
    done = command("-m", *SMALL, *parallel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sweep: 4 done" in done.stdout


# -- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_is_one_paragraph_and_on_record(tmp_path):
    done = command(*SMALL, "n=7", "topology=torus", "launch=workers", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(
        r"error: n is 7, which is no product .*choose another n .*\(config key: topology\)\n", done.stderr
    )
    status = records.read(tmp_path / "runs" / "latest").status
    assert status["status"] == "failed"
    assert status["reason"].startswith("n is 7")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("compresor.ratio=0.1", "there is no key compresor in the config; did you mean compressor?"),
        ("algoritm=choco", "there is no key algoritm in the config; did you mean algorithm?"),
        ("gamma=0.3", "there is no key gamma in the config; did you mean algorithm.gamma?"),
        ("+lr=0.3", "there is no key lr in the config; did you mean optimizer.lr?"),
        ("partition=null", "a group takes the name of one of its files"),
    ],
)
def test_misspelt_keys_get_a_suggestion(monkeypatch, argument, says):
    monkeypatch.setattr(sys, "argv", ["train", "n=4", argument])
    with pytest.raises(SystemExit) as caught:
        train.cli()
    assert str(caught.value).startswith(f"error: {argument}")
    assert says in str(caught.value)


def test_the_top_level_is_typed():
    assert config("n=08")["n"] == 8
    for wrong in ("rounds=many", "n=1.5", "overlap=maybe", "seed=null"):
        with pytest.raises(ConfigCompositionException) as caught:
            config(wrong)
        assert re.search("could not be converted to|not a valid bool|not Optional", str(caught.value.__cause__)), wrong


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_multirun_under_torchrun_is_refused(monkeypatch, flag):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train", flag, "seed=0,1"])
    with pytest.raises(SystemExit) as caught:
        train.cli()
    assert re.match("error: --multirun under torchrun: every process would sweep.*launch=workers", str(caught.value))


# -- a user's own parts -------------------------------------------------------------------------------------------

PARTS = '''
from dataclasses import dataclass

import torch

import gossip
import graphs


@dataclass(frozen=True)
class Half(gossip.DPSGD):
    """D-PSGD that goes only part of the way to its neighbours."""

    pull: float = 0.5

    def receive(self, state, net):
        net.receive(state.x, scale=self.pull)
        return state


def wheel(n):
    """A ring around a hub."""
    rim = range(1, n)
    return graphs.from_edges([(0, i) for i in rim] + [(i, i % (n - 1) + 1) for i in rim])


class Line:
    """f_i(x) = (x - i)^2 / 2."""

    def __init__(self, n, fails=False):
        self.n, self.fails = n, fails
        self.b = torch.arange(n, dtype=torch.float64)[:, None]

    def initial(self):
        return torch.zeros(1, dtype=torch.float64)

    def gradient(self, x, workers, step):
        if self.fails and step == 2 and 3 in workers.tolist():
            raise ZeroDivisionError("worker 3 divides")
        g = x - self.b[workers]
        return g, g.square().sum(1) / 2

    def evaluate(self, x):
        return {"error": (x - self.b.mean()).abs().sum(1)}
'''
OWN = ("hydra.searchpath=[pkg://mine.conf]", "study=wheel", "track=off", "rounds=4", "evaluate_every=2")


@pytest.fixture
def own(tmp_path):
    """A package `mine` with configs in `mine/conf`, as a user lays it out."""
    files = {
        "__init__.py": "",
        "parts.py": PARTS,
        "conf/__init__.py": "",
        "conf/algorithm/half.yaml": "_target_: mine.parts.Half\noptimizer: ${optimizer}\npull: 0.5\n",
        "conf/topology/wheel.yaml": "_target_: mine.parts.wheel\nn: ${n}\n",
        "conf/task/line.yaml": "_target_: mine.parts.Line\nn: ${n}\nfails: false\n",
        "conf/study/wheel.yaml": "# @package _global_\ndefaults:\n  - override /algorithm: half\n"
        "  - override /topology: wheel\n  - override /task: line\nn: 6\n",
    }
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def trajectory(folder):
    return [(row["round"], row["bits"], row["eval/worst/error"]) for row in records.read(folder).rows]


def test_parts_of_their_own_by_searchpath_here_and_under_torchrun(own):
    done = command(*OWN, cwd=own)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    here = trajectory(own / "runs" / "latest")
    assert [r[0] for r in here] == [0, 2, 4]
    assert here[-1][1] == 4 * 64 * (5 + 5 * 3) / 6  # a hub of five neighbours, five on the rim with three
    done = torchrun(2, *OWN, "launch=blocks", cwd=own)
    assert done.returncode == 0, done.stderr
    for got, expected in zip(trajectory(own / "runs" / "latest"), here, strict=True):
        assert got == pytest.approx(expected, rel=0, abs=1e-10)
    assert len(list(own.glob("runs/*/*/metrics.jsonl"))) == 2  # only rank 0 has made a folder
    assert {p.name for p in own.iterdir()} == {"mine", "runs"}


def test_a_failing_worker_ends_the_run_with_its_traceback(own):
    began = time.monotonic()
    done = command(*OWN, "task.fails=true", "launch=blocks", "launch.processes=3", cwd=own)
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert "error: rank 1 failed, and the run was ended:\nTraceback" in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: worker 3 divides")
    assert "PeerError" not in done.stderr
    record = records.read(own / "runs" / "latest")
    assert record.status["status"] == "failed"
    assert "worker 3 divides" in record.status["reason"]
    assert [row["round"] for row in record.rows] == [0, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_torchrun_a_failing_worker_does_not_wait_and_refusals_are_told_once(own):
    began = time.monotonic()
    done = torchrun(3, *OWN, "task.fails=true", "launch=blocks", cwd=own)
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert "error: rank 1 failed:\nTraceback" in done.stderr
    assert "ZeroDivisionError: worker 3 divides" in done.stderr
    assert records.read(own / "runs" / "latest").status["status"] == "failed"
    done = torchrun(2, *OWN, "launch=here", cwd=own)
    assert done.returncode == 1
    assert done.stderr.count("error: launch=here under torchrun, which started 2 processes: use launch=blocks") == 1
    done = torchrun(2, *OWN, "launch=blocks", "-m", "seed=0,1", cwd=own)
    assert done.returncode == 1
    assert "error: --multirun under torchrun" in done.stderr
    assert {p.name for p in own.iterdir()} == {"mine", "runs"}
