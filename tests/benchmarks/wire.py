"""The wire: exchanges between 4 processes against a bare loop that moves the same bytes, what our own code costs."""

import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import gossip
import graphs
from tests import netlab

from .harness import Row, at_most, seconds

RANKS = 4
HEADER = struct.Struct("=4q")  # round, sender, sequence, length


def bare(x: Tensor, n: int, rank: int) -> Callable[[], object]:
    """A ring exchange by hand: receives first, then (x + a + b) / 3 in place."""
    left, right = (rank - 1) % n, (rank + 1) % n
    a, b = torch.empty_like(x), torch.empty_like(x)

    def exchange() -> None:
        works = [dist.irecv(a, left), dist.irecv(b, right), dist.isend(x, left), dist.isend(x, right)]
        for work in works:
            assert work is not None
            work.wait()
        x.add_(a).add_(b).div_(3)

    return exchange


def ours(x: Tensor, transport: gossip.Transport) -> Callable[[], object]:
    """The same through the network."""
    n = transport.size
    net = gossip.Network(graphs.as_schedule(graphs.ring(n)), gossip.Placement.even(n, n, transport.rank), transport)
    rounds = iter(range(10**9))

    def exchange() -> None:
        net.begin(next(rounds))
        net.mix(x)

    return exchange


def ring(rank: int, size: int, store: str, d: int, repeat: int, pairs: int) -> None:
    """In every process: seconds of an exchange of d float32 numbers, ours and bare in turn; rank 0 prints the medians."""
    torch.set_num_threads(1)
    transport = gossip.connect(rank, size, store, timeout=60)
    sides = ours(torch.randn(1, d), transport), bare(torch.randn(d), size, rank)
    taken: list[list[float]] = [[], []]
    for _ in range(pairs + 1):
        for side, times in zip(sides, taken):
            transport.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                side()
            times.append((time.perf_counter() - start) / repeat)
    everyone = transport.gather(taken)
    if rank == 0:
        slowest = [[max(s[side][p] for s in everyone) for p in range(1, pairs + 1)] for side in range(2)]
        ratio = median(a / b for a, b in zip(*slowest))
        print("RESULT", json.dumps([ratio, *map(median, slowest)]))
    gossip.disconnect()


def on_loopback(d: int, repeat: int, pairs: int) -> tuple[float, float, float]:
    """(ratio, seconds of ours, seconds of the bare loop)."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        ranks = []
        for rank in range(RANKS):
            code = f"from tests.benchmarks.wire import ring; ring({rank}, {RANKS}, {store!r}, {d}, {repeat}, {pairs})"
            command = [sys.executable, "-c", code]
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(
                subprocess.Popen(
                    command, cwd=netlab.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        return tuple(json.loads(netlab.outputs(ranks, 240)[0].partition("RESULT ")[2]))


class _Nothing:
    """A transport whose messages take no time, to time what is ours."""

    rank, size, staged = 0, 3, False

    def prepare(self, outgoing: dict, incoming: dict) -> dict:
        return incoming

    def start(self, batch: dict, round: int) -> None:
        for peer, buffers in batch.items():  # as if it had come: the header that is expected
            length = sum(buffer.numel() for buffer in buffers)
            HEADER.pack_into(memoryview(buffers[0].numpy()), 0, round, peer, 0, length)

    def finish(self, background: bool = False) -> None:
        pass


def own_python(d: int) -> Callable[[], object]:
    """A round of the network, on a ring of three, without the network."""
    net = gossip.Network(graphs.as_schedule(graphs.ring(3)), gossip.Placement.even(3, 3, 0), cast(Any, _Nothing()))
    x, rounds = torch.randn(1, d), iter(range(10**9))

    def exchange() -> None:
        net.begin(next(rounds))
        net.mix(x)

    return exchange


def step(wrapped: bool, d: int, store: str) -> Callable[[], object]:
    """A step of SGD on one parameter of d numbers; wrapped, with one worker."""
    x = torch.nn.Parameter(torch.randn(d))
    x.grad = torch.randn(d)
    inner = torch.optim.SGD([x], lr=1e-3)
    if not wrapped:
        return inner.step
    transport = gossip.connect(0, 1, store)
    alone = graphs.static(torch.ones(1, 1, dtype=torch.float64))
    optimizer = gossip.wrap(inner, gossip.DPSGD(), alone, transport=transport)
    x.grad = torch.randn(d)
    return optimizer.step


def rows() -> Iterator[Row]:
    """The part of the table about the wire."""
    for d, repeat, pairs, goal in ((10**3, 100, 9, 1.5), (10**6, 5, 9, 1.15), (10**7, 2, 5, 1.15)):
        ratio, mine, theirs = on_loopback(d, repeat, pairs)
        detail = f"{mine * 1e3:.3g} against {theirs * 1e3:.3g} ms"
        yield at_most(
            f"ring exchange, 4 processes, {d:.0e} float32", "bare isend/irecv, same bytes", ratio, goal, detail
        )
    exchange = own_python(1000)
    exchange()
    taken = min(seconds(exchange, 200) for _ in range(5))
    yield at_most("a round without the network, 10³ float32", "100 µs", taken / 1e-4, 1.0, f"{taken * 1e6:.0f} µs")
    d = 10**7
    with tempfile.TemporaryDirectory() as folder:
        wrapped, plain = (step(on, d, f"file://{Path(folder) / 'store'}") for on in (True, False))
        x, y = torch.randn(d), torch.empty(d)
        times = [[seconds(f, 3) for f in (wrapped, plain, lambda: y.copy_(x))] for _ in range(9)]
        gossip.disconnect()
    extra, copy = median(a - b for a, b, _ in times), median(c for _, _, c in times)
    detail = f"{extra * 1e3:.3g} against {copy * 1e3:.3g} ms"
    yield at_most(
        "what wrap adds to SGD's step, n = 1, 10⁷ float32", "a copy of the parameters", extra / copy, 1.0, detail
    )
