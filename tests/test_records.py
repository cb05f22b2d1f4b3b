"""A run's record survives crashes, NaN and resumes, and says how far the run came."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphs
from experiments import records

ROOT = Path(__file__).parents[1]


def rows_of(folder: Path) -> list[int]:
    return [row["round"] for row in records.read(folder).rows]


def test_header_rows_and_status_come_back(tmp_path):
    config = {"n": 4, "seed": 3, "task": {"split_seed": 0}, "clip": math.inf, "gamma": None}
    with records.Writer(tmp_path, records.header(config, graphs.ring(4), note="x"), planned=20) as record:
        record.log({"round": 0, "eval/average/accuracy": torch.tensor(0.25), "loss": float("nan")})
        assert records.read(tmp_path).status["status"] == "running"
        record.log({"round": 10, "eval/average/accuracy": 0.5, "loss": -math.inf})
    run = records.read(tmp_path)
    assert run.header["config"] == config
    assert run.header["seeds"] == {"seed": 3, "task.split_seed": 0}
    assert run.header["versions"]["torch"] == torch.__version__
    assert run.header["topology"] == graphs.ring(4).digest
    assert run.header["note"] == "x"
    assert [row["eval/average/accuracy"] for row in run.rows] == [0.25, 0.5]
    assert math.isnan(run.rows[0]["loss"])
    assert run.rows[1]["loss"] == -math.inf
    assert (run.status["status"], run.status["done"], run.status["planned"]) == ("done", 10, 20)
    assert run.status["summary"]["eval/average/accuracy"] == 0.5
    for line in (tmp_path / records.METRICS).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_commit_and_its_changes_are_named(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    assert records.git(tmp_path / "nowhere") is None
    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "m")
    found = records.git(tmp_path)
    assert found is not None
    assert (len(found["commit"]), found["dirty"]) == (40, False)
    (tmp_path / "f").write_text("2")
    assert records.git(tmp_path) == {"commit": found["commit"], "dirty": True}


def test_a_failure_leaves_its_traceback(tmp_path):
    def train():
        with records.Writer(tmp_path, {}, planned=50) as record:
            record.log({"round": 7})
            raise RuntimeError("worker 3 has no heart")

    with pytest.raises(RuntimeError):
        train()
    status = records.read(tmp_path).status
    assert (status["status"], status["done"], status["planned"]) == ("failed", 7, 50)
    assert "Traceback" in status["reason"]
    assert "worker 3 has no heart" in status["reason"]


def test_a_run_that_never_began_is_recorded_too(tmp_path):
    records.write_status(tmp_path / "job", {"status": "incompatible", "reason": "row 3 sums to 1.2", "planned": 9})
    _, header, rows, status = records.read(tmp_path / "job")
    assert (header, rows, status["status"], status["done"]) == ({}, [], "incompatible", 0)
    with records.Writer(tmp_path / "other", {"config": {}}) as record:
        record.finish("incompatible", "row 3 sums to 1.2")
    assert records.read(tmp_path / "other").status["status"] == "incompatible"
    with pytest.raises(ValueError, match="'great' is none of running, done"):
        record.finish("great")


def test_a_crash_loses_at_most_one_evaluation(tmp_path):
    code = (
        "import os, sys; from experiments import records\nrecord = records.Writer(sys.argv[1], {}, planned=50)\nfor "
        "k in range(5): record.log({'round': k})\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert rows_of(tmp_path) == [0, 1, 2, 3, 4]
    status = records.read(tmp_path).status
    assert (status["status"], status["done"], status["planned"]) == ("running", 4, 50)


@pytest.mark.parametrize("torn", ['{"round": 3, "eval/aver', '{"round": 3}', '{"name": "é'.encode()[:-1]])
def test_a_torn_last_line_is_left_out_and_cut_off_on_resume(tmp_path, torn):
    with records.Writer(tmp_path, {"config": {"n": 1}}) as record:
        for k in range(3):
            record.log({"round": k})
    with (tmp_path / records.METRICS).open("ab") as file:
        file.write(torn if isinstance(torn, bytes) else torn.encode())
    assert rows_of(tmp_path)[:3] == [0, 1, 2]
    with records.Writer(tmp_path, {"config": {"n": 2}}, resume=True) as record:
        for k in (1, 2, 3, 4):  # from the checkpoint of round 1 on
            record.log({"round": k, "again": True})
    assert rows_of(tmp_path) == [0, 1, 2, 3, 4]
    assert [row.get("again") for row in records.read(tmp_path).rows] == [None, None, None, True, True]
    assert records.read(tmp_path).header["config"] == {"n": 1}


def test_a_record_is_never_overwritten(tmp_path):
    records.Writer(tmp_path, {}).finish()
    with pytest.raises(ValueError, match="already holds a run.*Choose another folder, or resume"):
        records.Writer(tmp_path, {})


def test_duplicate_rounds_of_another_writer_are_read_once(tmp_path):
    lines = [{"config": {}}, {"round": 0, "a": 1}, {"round": 10, "a": 1}, {"round": 10, "a": 2}, {"round": 5, "a": 3}]
    (tmp_path / records.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["round"], r["a"]) for r in records.read(tmp_path).rows] == [(0, 1), (5, 3), (10, 2)]
    assert records.read(tmp_path).status["status"] == "unknown"


def test_broken_records_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run's folder"):
        records.read(tmp_path)
    (tmp_path / records.METRICS).write_text('{"config": {}}\nnonsense\n{"round": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no JSON object: 'nonsense'"):
        records.read(tmp_path)
    (tmp_path / records.METRICS).write_text('["config"]\n{"round": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is no JSON object"):
        records.read(tmp_path)
    (tmp_path / records.RUN).write_text("")
    with pytest.raises(ValueError, match=r"run.json is no JSON object"):
        records.read(tmp_path)


def test_run_json_is_replaced_whole(tmp_path, monkeypatch):
    records.write_status(tmp_path, {"status": "running"})

    def refuse(*_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="full"):
            records.write_status(tmp_path, {"status": "done"})
    assert records.read(tmp_path).status["status"] == "running"
