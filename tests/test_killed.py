"""A run on real processes that is killed in its middle goes on, and its record is that of a run that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import records, train, trainer

ROOT = Path(train.__file__).parents[1]
OPTIONS = (
    *("n=3", "launch=workers", "task=quadratic", "task.sigma=0.1", "algorithm=choco", "compressor=randk"),
    *("compressor.ratio=0.3", "algorithm.gamma=0.2", "optimizer=momentum", "scheduler=cosine", "scheduler.T_max=400"),
    *("optimizer.lr=0.01", "rounds=400", "evaluate_every=7", "checkpoint_every=10", "track=off", "progress=false"),
)


def config(*overrides):
    with initialize_config_dir(str(ROOT / "experiments" / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("train", [*OPTIONS, *overrides]), resolve=True)


def lines(folder):
    """The record line by line as it stands in the file, without wall time."""
    text = (folder / records.METRICS).read_text().splitlines()[1:]
    return [json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"}) for line in text]


def test_a_killed_run_goes_on_and_its_record_is_that_of_an_unbroken_one(tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "experiments.train", *OPTIONS, f"hydra.run.dir={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        metrics = folder / records.METRICS
        while time.monotonic() < deadline and process.poll() is None:
            if (folder / trainer.CHECKPOINT).exists() and metrics.read_bytes().count(b"\n") > 8:
                break
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / "said.txt").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert records.read(folder).status["status"] == "running"
    before = lines(folder)
    assert 8 <= len(before) < 50

    with metrics.open("a") as file:  # a line that the kill tore
        file.write('{"round": 9999, "tra')
    train.run(config(f"resume={folder}"), folder)
    train.run(config(), tmp_path / "unbroken")
    whole = lines(tmp_path / "unbroken")
    assert lines(folder) == whole
    assert len(whole) == 1 + 400 // 7 + 1
    assert records.read(folder).status["status"] == "done"

    away = tmp_path / "away"  # the same from a copy of the killed run, recorded in a folder of its own
    train.run(config(f"resume={folder}", "rounds=406"), away)
    assert lines(away)[: len(whole)] == whole
    assert len(lines(away)) == len(whole) + 1
