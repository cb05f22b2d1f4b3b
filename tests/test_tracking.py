"""The tracker is one run per job, offline by default, and harmless whatever goes wrong."""

import json
import logging
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import tracking

CONFIG = {
    "n": 4,
    "seed": 0,
    "algorithm": {"_target_": "gossip.DPSGD", "lr": 0.1},
    "topology": {"_target_": "graphs.ring"},
}
ROW = {"round": 10, "bits": 1e6, "seconds": 0.5, "epoch": 1.0, "eval/average/accuracy": 0.5, "train/loss": 2.0}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    for name in [k for k in os.environ if k.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def offline(folder: Path) -> tuple[dict, list[dict], list]:
    """What an offline run holds: its run record, its rows and its metric definitions."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(200):  # W&B writes the last block a moment after `finish` has returned
        run, rows, defined, ended = parsed(path.read_bytes())
        if ended:
            break
        time.sleep(0.05)
    return run, rows, defined


def parsed(data: bytes) -> tuple[dict, list[dict], list, bool]:
    """LevelDB framing of protobufs; True once the record of the end is there."""
    from wandb.proto import wandb_internal_pb2 as pb

    at, record, ended = 7, b"", False
    run, rows, defined = {}, [], []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            found, record = pb.Record.FromString(record), b""
            if found.WhichOneof("record_type") == "run":
                run = {"project": found.run.project, "group": found.run.run_group, "name": found.run.display_name}
                run["config"] = {i.key: json.loads(i.value_json) for i in found.run.config.update}
            if found.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in found.history.item})
            if found.WhichOneof("record_type") == "metric":
                defined.append(found.metric.name or found.metric.glob_name)
            ended = ended or found.WhichOneof("record_type") == "exit"
    return run, rows, defined, ended


def test_an_offline_run_holds_config_group_axes_and_rows(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    start = time.perf_counter()
    with tracking.tracker("offline", CONFIG, tmp_path) as track:
        track.log(ROW)
        track.log({**ROW, "round": 20, "train/loss": float("nan")})
    assert time.perf_counter() - start < 20
    run, rows, defined = offline(tmp_path)
    assert run["config"]["algorithm"] == CONFIG["algorithm"]
    assert (run["project"], run["group"], run["name"]) == ("gossip-sgd", tracking.group(CONFIG), "DPSGD ring n4 seed0")
    assert {k: rows[0][k] for k in ROW} == ROW
    assert rows[1]["nonfinite"] == 1
    assert {"round", "bits", "seconds", "epoch", "eval/*"} <= set(defined)
    assert f"wandb sync {tmp_path}/wandb/offline-run-" in caplog.text


def test_a_second_part_is_listed_beside_the_first(tmp_path):
    tracking.tracker("offline", CONFIG, tmp_path).finish()
    (part,) = tracking.offline_parts(tmp_path)
    part.rename(part.with_name(f"offline-run-20260101_000000-{part.name.split('-')[-1]}"))  # of a while ago
    tracking.tracker("offline", CONFIG, tmp_path).finish()
    first, second = tracking.offline_parts(tmp_path)
    assert first.name.split("-")[-1] == second.name.split("-")[-1]  # one run of W&B, not two repetitions


def test_the_environment_is_honoured(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track = tracking.tracker("online", CONFIG, tmp_path)
    track.finish()
    run, _, _ = offline(tmp_path)
    assert (run["project"], track._run.settings.entity) == ("mine", "us")
    monkeypatch.setenv("WANDB_NAME", "first")
    monkeypatch.setenv("WANDB_RUN_GROUP", "ours")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "scratch"))
    caplog.set_level(logging.INFO)
    tracking.tracker("offline", CONFIG, tmp_path / "run").finish()
    run, _, _ = offline(tmp_path / "scratch")
    assert (run["name"], run["group"]) == ("first", "ours")
    assert f"wandb sync {tmp_path}/scratch/wandb/offline-run-" in caplog.text
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert type(tracking.tracker("online", CONFIG, tmp_path)) is tracking.Off
    monkeypatch.setenv("WANDB_MODE", "online")
    assert type(tracking.tracker("off", CONFIG, tmp_path)) is tracking.Off


def test_runs_that_differ_in_their_seed_share_a_group():
    seeds = [{**CONFIG, "seed": s, "task": {"seed": s, "split_seed": 0}} for s in (0, 1, 2)]
    graphs = [{**c, "topology": {"_target_": "graphs.path"}} for c in seeds]
    assert len({tracking.group(c) for c in seeds + graphs}) == 2


class Broken:
    """A W&B run whose every call raises."""

    url = None

    def log(self, row):
        raise ValueError("NaN in a histogram")

    def finish(self, exit_code):
        raise OSError("disk full")


def test_errors_of_the_tracker_never_end_training(tmp_path, caplog):
    track = tracking.Tracker(Broken(), tmp_path)
    for _ in range(5):
        track.log(ROW)
    track.finish()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "training goes on (ValueError: NaN in a histogram)" in caplog.text


def test_a_tracker_that_cannot_start_is_one_warning_and_offline_where_it_was_online(
    tmp_path, monkeypatch, caplog, capsys
):
    import wandb

    tried, start = [], wandb.init

    def refuse(mode, **options):
        tried.append(mode)
        if mode == "online":
            (tmp_path / "job" / "wandb" / "run-20260101_000000-in_use").mkdir(parents=True)  # as W&B does
            raise TimeoutError("no network")
        return start(mode=mode, **options)

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setenv("WANDB_MODE", "online")
    tracking.tracker("online", CONFIG, tmp_path / "job").finish()
    assert "the run goes on offline (TimeoutError: no network)" in caplog.text
    (part,) = tracking.offline_parts(tmp_path / "job")
    assert not part.name.endswith("in_use")
    start = json.loads  # fails too
    for _ in range(2):  # jobs of a sweep: they do not wait for the network again, and tell once
        track = tracking.tracker("online", CONFIG, tmp_path / "next job")
        track.log(ROW)
        track.finish()
    assert tried == ["online", "offline", "offline", "offline"]
    assert "the run goes on without it (TypeError" in caplog.text
    assert capsys.readouterr().err.count("track=off silences this") == 2


class Counting:
    def __init__(self):
        self.rows, self.codes = [], []

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.codes.append(exit_code)


def test_the_handle_is_bound_to_its_process_and_ends_with_finish(tmp_path, monkeypatch, caplog):
    run = Counting()
    track = tracking.Tracker(run, tmp_path)
    track.log(ROW)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)  # as in a forked loader worker
    track.log(ROW)
    track.log(ROW)
    track.finish()
    monkeypatch.setattr(os, "getpid", lambda: here)
    track.finish()
    track.finish()
    track.log(ROW)
    assert (len(run.rows), run.codes) == (1, [0])
    assert [r.message.split(" is ignored")[0] for r in caplog.records] == [
        "log in another process than the one that opened the W&B run",
        "log after the W&B run was finished",
    ]


def test_an_exception_marks_the_run_as_failed(tmp_path):
    run = Counting()
    with pytest.raises(RuntimeError), tracking.Tracker(run, tmp_path):
        raise RuntimeError("worker 3")
    assert run.codes == [1]


def test_other_ranks_get_the_same_face():
    names = {n for n in dir(tracking.Tracker) if not n.startswith("_")}
    assert names == {n for n in dir(tracking.Off) if not n.startswith("_")}
    with tracking.tracker("off", CONFIG, ".") as track:
        track.log(ROW)
        track.finish()
    with pytest.raises(ValueError, match="track='on' is not one of off, offline, online"):
        tracking.tracker("on", CONFIG, ".")


def test_importing_the_module_does_not_load_wandb():
    code = "import sys, experiments.tracking; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
