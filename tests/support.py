"""Many ranks for tests, as real processes or as threads: every wait bounded, whatever is left killed on the way out."""

import copy
import multiprocessing
import os
import pickle
import queue
import time
import traceback
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossip import Placement

# torch.optim imports torch._dynamo, in seconds, when the first optimizer is made
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "gossip", "gossip.checkpoint", "pytest"]


class Outcome(NamedTuple):
    """What became of one process: its value, or its traceback, or (both None) a death without a word."""

    value: Any
    error: str | None
    exitcode: int | None


def launch(function, size: int, folder: Path, *args, timeout: float = 60.0) -> list[Outcome]:
    """Call `function(rank, size, store, *args)` in `size` processes and return their outcomes by rank.

    `store` is a `file://` rendezvous for `gossip.connect`. Fails the test if a process says nothing for `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = f"file://{folder / f'store-{time.monotonic_ns()}'}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_child, args=(function, rank, size, store, args, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    said: dict[int, Outcome] = {}
    try:
        for process, (_, writer) in zip(processes, pipes):
            process.start()
            writer.close()
        deadline = time.monotonic() + timeout
        while len(said) < size and (left := deadline - time.monotonic()) > 0:
            silent = {pipes[rank][0]: rank for rank in range(size) if rank not in said}
            for reader in wait(list(silent), left):
                rank = silent[reader]
                try:
                    value, error = pickle.loads(reader.recv_bytes())
                except EOFError:
                    value, error = None, None
                processes[rank].join(max(0.0, deadline - time.monotonic()))
                said[rank] = Outcome(value, error, processes[rank].exitcode)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join(10)
    assert len(said) == size, f"ranks {sorted(set(range(size)) - set(said))} said nothing within {timeout:g} s"
    return [said[rank] for rank in range(size)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values of processes that must all have succeeded."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.error}"
        assert outcome.exitcode == 0, f"rank {rank} exited with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _child(function, rank, size, store, args, writer) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    failed = False
    try:
        said = function(rank, size, store, *args), None
    except BaseException:
        said, failed = (None, traceback.format_exc()), True
    writer.send_bytes(pickle.dumps(said))
    writer.close()
    os._exit(int(failed))  # a process whose peer died must not wait for it in a destructor


class Post:
    """An in-process stand-in for `gossip.Transport`, for ranks that are threads: a queue per pair, every wait bounded.

    `handed` counts the bytes that were handed over, and `buffers` remembers which.
    """

    staged = stretches = True

    def __init__(self, rank: int, queues: dict[tuple, queue.Queue], size: int) -> None:
        self.rank, self.size = rank, size
        self.handed, self.buffers = 0, set()
        self._queues, self._incoming = queues, deque()

    def prepare(self, outgoing, incoming):
        return outgoing, incoming

    def start(self, batch, round) -> None:
        outgoing, incoming = batch
        for peer, buffers in outgoing.items():
            for buffer in buffers:
                assert buffer.dtype == torch.uint8
                self.handed += buffer.numel()
                self.buffers.add(buffer.data_ptr())
                self._queues["message", self.rank, peer].put(buffer.clone())
        self.buffers |= {buffer.data_ptr() for buffers in incoming.values() for buffer in buffers}
        self._incoming.append(incoming)

    def finish(self, background=False) -> None:
        for peer, buffers in self._incoming.popleft().items():
            for buffer in buffers:
                got = self._queues["message", peer, self.rank].get(timeout=20)
                assert len(got) <= len(buffer), (
                    f"rank {self.rank} awaits {len(buffer)} bytes from {peer}, which sent {len(got)}"
                )
                buffer[: len(got)].copy_(got)

    def wait(self, future, round) -> None:
        future.result(timeout=20)

    def gather(self, item) -> list:
        for peer in range(self.size):
            self._queues["item", self.rank, peer].put(copy.deepcopy(item))
        return [self._queues["item", peer, self.rank].get(timeout=20) for peer in range(self.size)]

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self.gather(x)))


def in_threads(blocks, function) -> list:
    """`function(placement, transport)` once per block, each in a thread of its own; the results by rank."""
    size = len(blocks)
    queues = {(kind, i, j): queue.Queue() for kind in ("message", "item") for i in range(size) for j in range(size)}
    with ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(
                function, Placement(tuple(map(tuple, blocks)), rank), Post(rank, queues, size) if size > 1 else None
            )
            for rank in range(size)
        ]
        return [future.result(timeout=30) for future in futures]
