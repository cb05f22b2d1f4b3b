"""Four hosts with links of 100 Mbit/s: torchrun on each, the network interface found, and the trajectory of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import netlab
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import records, train

N = 4
OPTIONS = (
    *("n=4", "task=quadratic", "task.sigma=0.1", "dtype=float64", "algorithm=choco", "compressor=topk"),
    *("compressor.ratio=0.3", "algorithm.gamma=0.2", "optimizer=momentum", "rounds=6", "evaluate_every=2", "track=off"),
)
ENV = {"GLOO_SOCKET_IFNAME": "", "PYTHONPATH": str(netlab.ROOT)}


@pytest.fixture(scope="module")
def hosts():
    reason = netlab.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with netlab.bridged(N, "100mbit") as hosts:
        yield hosts


def torchrun(hosts, port, *words, timeout=110):
    """What each host's torchrun printed."""
    return netlab.outputs(
        [
            hosts.start(
                i,
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(N), "--nproc-per-node", "1"]
                + ["--node-rank", str(i), "--master-addr", hosts.address(0), "--master-port", str(port), *words],
                ENV,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(N)
        ],
        timeout,
    )


@pytest.mark.slow
def test_the_command_has_the_trajectory_of_one_process(hosts, tmp_path):
    folder = tmp_path / "hosts"
    torchrun(hosts, 29621, "-m", "experiments.train", *OPTIONS, "launch=workers", f"hydra.run.dir={folder}")
    with initialize_config_dir(str(Path(train.__file__).parent / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", [*OPTIONS, "progress=false"]), resolve=True)
    train.run(config, tmp_path / "here")
    got, expected = records.read(folder), records.read(tmp_path / "here")
    assert got.status["status"] == "done"
    assert [row["round"] for row in got.rows] == [0, 2, 4, 6]
    for one, other in zip(got.rows, expected.rows, strict=True):
        for name in one.keys() - {"seconds"}:
            assert one[name] == pytest.approx(other[name], rel=0, abs=1e-10, nan_ok=True), name


@pytest.mark.slow
def test_the_script_of_the_readme(hosts):
    printed = torchrun(hosts, 29622, "-m", "experiments.own_loop")
    found = re.search(r"accuracy ([\d.]+), consensus distance ([\d.e-]+), (\d+) rounds", printed[0])
    assert found, printed
    assert float(found[1]) > 0.8
    assert int(found[3]) == 10 * (375 // 32)


def test_an_interface_that_does_not_exist_is_told_with_the_remedy():
    script = "import gossip\ngossip.connect(timeout=20)"
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "no0"}
    env = {**os.environ, **env, "PYTHONPATH": str(netlab.ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "rank 0 of 1 could not meet the others at 127.0.0.1 by the network interface no0: " in done.stderr
    assert "set GLOO_SOCKET_IFNAME on every host to the interface that reaches the others" in done.stderr
