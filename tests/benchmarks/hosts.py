"""Across hosts with limited links: seconds per exchange of gossip against an all-reduce of the same model.

Four network namespaces; 100 Mbit/s, or 100 Mbit/s with 10 ms one way. Skipped, with the reason, where namespaces are not
permitted. On such links bytes and delays decide, so the figures hold although the hosts share two cores.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

import gossip
import graphs
from tests import netlab

from .harness import Row, at_least

HOSTS = 4


def exchanges(d: int, repeat: int) -> None:
    """On every host: median seconds of one exchange of d float32 numbers, per method; rank 0 prints them."""
    transport = gossip.connect(timeout=120)
    n, rank = transport.size, transport.rank
    x = torch.randn(1, d)

    def gossiped(mixing: object, algorithm: gossip.Algorithm) -> Callable[[int], None]:
        net = gossip.Network(graphs.as_schedule(mixing), gossip.Placement.even(n, n, rank), transport)
        state = algorithm.init(x.clone())

        def exchange(k: int) -> None:
            net.begin(k)
            algorithm.communicate(state, net)

        return exchange

    ring, compressor = graphs.ring(n), gossip.TopK(0.01)
    methods = {
        "all-reduce": lambda k: transport.sum_(x),
        "ring": gossiped(ring, gossip.DPSGD()),
        "one-peer": gossiped(graphs.one_peer_exponential(n), gossip.DPSGD()),
        "choco": gossiped(ring, gossip.Choco(compressor=compressor, gamma=0.1)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for k in range(repeat + 1):
        for name, exchange in methods.items():
            transport.barrier()
            start = time.perf_counter()
            exchange(k)
            seconds[name].append(time.perf_counter() - start)
    everyone = transport.gather(seconds)
    if rank == 0:
        per_method = {name: median(max(s[name][k] for s in everyone) for k in range(1, repeat + 1)) for name in methods}
        print("RESULT", json.dumps(per_method))
    gossip.disconnect()


def measured(hosts: netlab.Hosts, d: int, repeat: int) -> dict[str, float]:
    """Run `exchanges` on all hosts."""
    code = f"from tests.benchmarks.hosts import exchanges; exchanges({d}, {repeat})"
    printed = hosts.everywhere([sys.executable, "-c", code], timeout=300)[0]
    return json.loads(printed.partition("RESULT ")[2])


def rows() -> Iterator[Row]:
    """The part of the table about several hosts."""
    reason = netlab.unavailable()
    if reason is not None:
        print(f"hosts: skipped, {reason}")
        return
    with netlab.bridged(HOSTS, "100mbit") as hosts:
        seconds = measured(hosts, 10**6, 5)
    base = seconds["all-reduce"]
    where = "4 hosts, 100 Mbit/s, 10⁶ parameters"
    for name, goal in (("one-peer", 1.4), ("choco", 8.0), ("ring", 0.6)):
        detail = f"{seconds[name] * 1e3:.0f} against {base * 1e3:.0f} ms"
        yield at_least(f"exchange, {name}, {where}", "all-reduce", base / seconds[name], goal, detail)
    with netlab.delayed(HOSTS, 100, 10) as hosts:
        seconds = measured(hosts, 10**4, 20)
    base = seconds["all-reduce"]
    where = "4 hosts, 10 ms one way, 10⁴ parameters"
    for name, goal in (("ring", 4.0), ("one-peer", 4.0)):
        detail = f"{seconds[name] * 1e3:.0f} against {base * 1e3:.0f} ms"
        yield at_least(f"exchange, {name}, {where}", "all-reduce", base / seconds[name], goal, detail)
