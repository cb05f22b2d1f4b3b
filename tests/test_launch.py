"""Processes of a run: what they return, whose failure is told, and that none is left behind."""

import functools
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import gossip
import graphs
from experiments import launch, train

SOON = 60.0  # seconds; the bound of waits is 300, so nothing that ends sooner has waited for it


def _mark(folder) -> None:
    Path(folder, f"{os.getpid()}.pid").touch()


def _pids(folder: Path) -> list[int]:
    return [int(p.stem) for p in folder.glob("*.pid")]


def _gone(pids: list[int], within: float) -> bool:
    """Whether all processes end within so many seconds; a zombie has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(map(_runs, pids)):
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _works(rank, transport, send, factor):
    logging.getLogger("work").info("hello from %d", rank)
    for item in range(3):
        send({"rank": rank, "item": item})
    total = transport.sum_(torch.tensor([float(rank)]))
    return rank * factor, float(total), torch.get_num_threads()


def test_results_in_rank_order_items_and_one_log_per_rank(tmp_path):
    items = []
    results = launch.run_processes(_works, (10,), 3, items.append, threads=2, logs=tmp_path)
    assert results == [(0, 3.0, 2), (10, 3.0, 2), (20, 3.0, 2)]
    for rank in range(3):
        assert [i["item"] for i in items if i["rank"] == rank] == [0, 1, 2]
        assert f"[rank {rank}][work][INFO] hello from {rank}" in (tmp_path / f"rank-{rank}.log").read_text()


def _gossips(rank, transport, send, folder, fail):
    """A ring that exchanges for ever; `fail(rank)` breaks one of its workers in the third round."""
    _mark(folder)
    schedule = graphs.as_schedule(graphs.ring(transport.size))
    net = gossip.Network(schedule, gossip.Placement.even(transport.size, transport.size, rank), transport)
    for k in range(10**9):
        if k == 3:
            fail(rank)
        net.begin(k)
        net.mix(torch.ones(1, 4))
    raise AssertionError("unreachable")


def _raises(rank):
    if rank == 1:
        raise ZeroDivisionError("the third round of worker 1")


def _dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _leaves(rank):
    if rank == 1:
        os._exit(0)


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (_raises, "ZeroDivisionError: the third round of worker 1"),
        (_dies, "exit code -9"),
        (_leaves, "exit code 0"),
    ],
)
def test_the_culprit_is_told_within_seconds_and_no_process_is_left(tmp_path, fail, told):
    began = time.monotonic()
    with pytest.raises(launch.WorkerError) as caught:
        launch.run_processes(_gossips, (str(tmp_path), fail), 4)
    assert time.monotonic() - began < SOON
    assert str(caught.value).startswith("rank 1 failed")
    assert told in str(caught.value)
    assert "PeerError" not in str(caught.value)  # the neighbours' losses are consequences
    pids = _pids(tmp_path)
    assert len(pids) == 4
    assert _gone(pids, 5.0)


def test_a_consequence_that_arrives_first_gives_way_to_the_cause():
    class Pipe:
        """A pipe of which `multiprocessing.connection.wait` can be told by a file descriptor."""

        def __init__(self, *said):
            self.said = list(said)
            self.out, into = os.pipe()
            os.close(into)

        def fileno(self):
            return self.out

        def recv_bytes(self):
            if not self.said:
                raise EOFError
            return pickle.dumps(self.said.pop(0))

    class Child:
        exitcode = -9

        def join(self, timeout=None):
            pass

    pipes = [Pipe(("error", "gossip.transport.PeerError: rank 0 could not …")), Pipe()]
    with pytest.raises(launch.WorkerError, match=r"rank 1 failed.*\n.*exit code -9"):
        launch._collect({pipe: (rank, Child()) for rank, pipe in enumerate(pipes)}, [None, None], print)


def _sleeps(rank, transport, send, folder):
    _mark(folder)
    send("begun")
    time.sleep(600)


def test_an_error_of_the_receiver_ends_the_processes(tmp_path):
    def receive(item):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        launch.run_processes(_sleeps, (str(tmp_path),), 2, receive)
    assert _gone(_pids(tmp_path), 5.0)


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    script = (
        "import sys, test_launch\n"
        "from experiments import launch\n"
        "if __name__ == '__main__':\n"
        "    launch.run_processes(test_launch._sleeps, (sys.argv[1],), 2)\n"
    )
    (tmp_path / "parent.py").write_text(script)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(launch.__file__).parents[1])])
    with (tmp_path / "said.txt").open("w") as said:  # a pipe would stay open as long as an orphan lives
        parent = subprocess.Popen(
            [sys.executable, tmp_path / "parent.py", tmp_path], env={**os.environ, "PYTHONPATH": path}, stderr=said
        )
    deadline = time.monotonic() + 60
    while len(_pids(tmp_path)) < 2 and time.monotonic() < deadline and parent.poll() is None:
        time.sleep(0.1)
    pids = _pids(tmp_path)
    parent.kill()
    parent.wait()
    try:
        assert len(pids) == 2, (tmp_path / "said.txt").read_text()
        assert _gone(pids, 10.0), "orphans"
    finally:
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)


def test_two_runs_at_once_do_not_meet():
    results = {}

    def go(factor):
        results[factor] = launch.run_processes(_works, (factor,), 2)

    launch.run_processes(_works, (1,), 2)  # the fork server is started by one thread
    runs = [threading.Thread(target=go, args=(factor,)) for factor in (10, 20)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert {k: [r[:2] for r in v] for k, v in results.items()} == {
        10: [(0, 1.0), (10, 1.0)],
        20: [(0, 1.0), (20, 1.0)],
    }


@pytest.mark.parametrize("target", [lambda rank, transport, send: rank, "local", "bound"])
def test_what_cannot_be_sent_is_named(target):
    if target == "local":

        def target(rank, transport, send):
            return rank

    if target == "bound":
        target = functools.partial(_works, threading.Lock())
        target.__module__ = __name__
    with pytest.raises(ValueError, match=r"(?s)cannot be sent to its processes \(.*(lambda|local|lock).*not lambdas"):
        launch.run_processes(target, (), 2)


def _stalls(rank, transport, send):
    if rank == 1:
        time.sleep(60)
    transport.barrier()


def test_the_timeout_bounds_every_wait():
    began = time.monotonic()
    with pytest.raises(launch.WorkerError, match=r"rank 0 failed[\s\S]*no answer within 4 s"):
        launch.run_processes(_stalls, (), 2, timeout=4.0)
    assert time.monotonic() - began < SOON


@pytest.mark.slow
def test_processes_that_are_spawned(monkeypatch, tmp_path):
    """The only way on Windows, and the default on macOS."""
    context = multiprocessing.get_context("spawn")
    method = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    items = []
    try:
        results = launch.run_processes(_works, (10,), 2, items.append, logs=tmp_path)
        assert isinstance(multiprocessing.get_context(), type(context))
        with pytest.raises(ValueError, match="cannot be sent to its processes"):
            launch.run_processes(lambda rank, transport, send: rank, (), 2)
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert [r[:2] for r in results] == [(0, 1.0), (10, 1.0)]
    assert len(items) == 6
    assert "hello from 1" in (tmp_path / "rank-1.log").read_text()


def test_the_slurm_launcher_composes_where_its_plugin_is():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'gossip-sgd[slurm]'")
    with initialize_config_dir(str(Path(train.__file__).parent / "conf"), version_base="1.3"):
        overrides = ["hydra/launcher=slurm", "hydra.launcher.account=me", "hydra.launcher.partition=gpu", "n=4"]
        launcher = compose("train", overrides, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.account, launcher.partition, launcher.timeout_min) == ("me", "gpu", 60)


def _multiplies(rank, transport, send):
    return float((torch.ones(300, 300) @ torch.ones(300, 300))[0, 0])


def test_matrix_products_before_and_inside():
    """A fork after the parent's thread pool has run would hang here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(600, 600) @ torch.ones(600, 600)
        assert launch.run_processes(_multiplies, (), 2, threads=2) == [300.0, 300.0]
    finally:
        torch.set_num_threads(threads)


def _config(kind, n=4, **more):
    return {"n": n, "launch": {"kind": kind, "threads": None, "timeout": 300, **more}}


def test_threads(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.threads(_config("workers"), 1) == cores
    assert launch.threads(_config("workers"), 64 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # of nested regions
    assert launch.threads(_config("workers"), 1) == 3
    assert launch.threads(_config("workers", threads=5), 1) == 5
    for wrong in ("many", "0", "-1"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match=f"OMP_NUM_THREADS='{wrong}' is no whole number.*launch.threads"):
            launch.threads(_config("workers"), 1)


def test_world():
    assert launch.world(_config("here")) == 1
    assert launch.world(_config("workers")) == 4
    assert launch.world(_config("blocks", processes=2)) == 2
    assert launch.world(_config("workers", n=64)) == 64


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (_config("everywhere"), "launch.kind='everywhere' is not one of here, workers, blocks"),
        (_config("blocks", processes=5), "5 processes for n=4.*use 1 to 4 processes"),
        (_config("blocks", processes=0), "processes=0.*whole number"),
        (_config("blocks", processes=None), "processes=None.*whole number"),
        (_config("blocks", processes="two"), "processes='two'.*whole number"),
        (_config("workers", n=65), "would start 65 processes.*up to 64.*launch=here"),
        (_config("workers", threads=0), "threads=0.*whole number"),
        (_config("workers", threads="x"), "threads='x'.*whole number"),
        (_config("workers", timeout=0), "timeout=0.*seconds"),
        (_config("workers", timeout="long"), "timeout='long'.*seconds"),
        (_config("workers", thread=2), "launch.thread.*threads"),
    ],
)
def test_world_refuses(config, says):
    with pytest.raises(ValueError, match=says):
        launch.world(config)


def test_world_under_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert launch.world(_config("here")) == 1  # somebody's leftover, without a world
    monkeypatch.setenv("WORLD_SIZE", "")
    assert launch.world(_config("here")) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch.world(_config("blocks", n=16, processes=2)) == 4
    assert launch.world(_config("workers")) == 4
    with pytest.raises(ValueError, match="launch=here under torchrun, which started 4.*launch=blocks"):
        launch.world(_config("here"))
    with pytest.raises(ValueError, match="n=8, and torchrun started 4.*nproc-per-node 8"):
        launch.world(_config("workers", n=8))
    with pytest.raises(ValueError, match="4 processes for n=3"):
        launch.world(_config("blocks", n=3))


def _crowd(rank, transport, send):
    return float(transport.sum_(torch.ones(1)))


@pytest.mark.slow
def test_sixty_four_processes():
    assert launch.run_processes(_crowd, (), 64) == [64.0] * 64
