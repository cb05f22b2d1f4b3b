"""The script for Fashion-MNIST under torchrun: killed in the middle and started again, it has the curve of an unbroken run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import fashion_loop
from experiments.tasks import fashion

ROOT = fashion_loop.__file__.rpartition("/experiments/")[0]


def start(out):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "experiments.fashion_loop"]
    words += ["--out", str(out), "--samples", "1600", "--test-samples", "100", "--epochs", "2", "--every", "3"]
    with out.with_suffix(".txt").open("a") as said:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
        return subprocess.Popen([sys.executable, *words], env=env, stdout=said, stderr=said)


def curve(out):
    lines = (out / fashion_loop.CURVE).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.slow
def test_killed_and_started_again_the_curve_is_that_of_an_unbroken_run(tmp_path):
    try:
        fashion.folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    process = start(killed)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if (killed / fashion_loop.CHECKPOINT).exists() and len(curve(killed)) > 2:
                break
            time.sleep(0.01)
        assert process.poll() is None, killed.with_suffix(".txt").read_text()
    finally:
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, workers)):  # torchrun's workers have process groups of their own
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert len(curve(killed)) < 17
    for out in (killed, unbroken):
        process = start(out)
        assert process.wait(100) == 0, out.with_suffix(".txt").read_text()
    begun = re.findall(r"begins at step (\d+) of 50", killed.with_suffix(".txt").read_text())
    assert len(begun) == 2
    assert 6 <= int(begun[1]) < 50
    assert curve(killed) == curve(unbroken)
    assert [row["step"] for row in curve(unbroken)] == [*range(3, 50, 3), 50]
