"""What `cost=` predicts against what happens: seconds per round of training on four hosts with limited links.

Four network namespaces on this machine: 100 Mbit/s, 1 Gbit/s, and 1 Gbit/s with 10 ms one way. The model is calibrated by
`experiments.calibrate` on the same hosts: exchanges between pairs and among all of no bytes and of a few MB, and each
method's local step without a network. The rounds that it predicts are not among what it is fitted to.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir

import gossip
from experiments import calibrate, schema, train
from experiments.trainer import build
from gossip.placement import Placement
from tests import netlab

from .harness import Row

HOSTS = 4
COMMON = (f"n={HOSTS}", "task=digits", "task.model.hidden=[1000,930]", "batch=32", "track=off", "progress=false")
METHODS = {
    "D-PSGD ring": ("algorithm=dpsgd",),
    "D-PSGD one-peer": ("algorithm=dpsgd", "schedule=one_peer_exponential"),
    "all-reduce": ("algorithm=allreduce",),
    "CHOCO top-k 1 %": ("algorithm=choco", "compressor=topk"),
}
TURNS, SECONDS = 7, 1.0  # calibrating a method's steps and measuring its rounds take turns, so many times, so long


def config(method: str) -> dict[str, Any]:
    """The run of a method: a million parameters on the digits."""
    with initialize_config_dir(str(train.CONF), version_base="1.3"):
        return schema.resolved(compose("train", [*COMMON, *METHODS[method]]))


def stopwatch(setup: Any, transport: gossip.Transport) -> Callable[[], float]:
    """A run on all hosts, which goes on at each call: seconds per round, until the last host is through."""
    task, algorithm, schedule = setup[:3]
    n = transport.size
    net = gossip.Network(schedule, Placement.even(n, n, transport.rank), transport)
    state = algorithm.init(task.initial()[None].clone())
    clock = gossip.lockstep(algorithm, lambda x, t: task.gradient(x, net.rows, t)[0], net, state, 10**9)

    @torch.no_grad()
    def rounds(count: int) -> float:
        transport.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            next(clock)
        return max(transport.gather(time.perf_counter() - begun)) / count

    rounds(2)
    count = 2 * max(1, min(20, int(SECONDS / rounds(2) / 2)))  # whole periods
    return lambda: rounds(count)


def everything() -> None:
    """On every host: measure all, and print it at rank 0."""
    torch.set_num_threads(1)
    transport = gossip.connect(timeout=100)
    exchanges = calibrate.exchanges(transport)
    found: dict[str, Any] = {"exchanges": exchanges, "methods": {}}
    for method in METHODS:
        setup = build(config(method))
        measure = stopwatch(setup, transport)
        found["methods"][method] = [
            (transport.gather(calibrate.steps(setup, transport.rank, transport, SECONDS / 3)), measure())
            for _ in range(TURNS)
        ]
    if transport.rank == 0:
        print("RESULT", json.dumps(found))
    gossip.disconnect()


def predictions(found: Mapping[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """Method → of each turn: predicted and measured seconds per round, and those of the slowest host's step."""
    links = calibrate.links(calibrate.Measured(*found["exchanges"]))
    result: dict[str, list[tuple[float, float, float]]] = {}
    for method, turns in found["methods"].items():
        setup = build(config(method))
        for every, measured in turns:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "steps.csv")
                path.write_text("\n".join(" ".join(map(str, line)) for line in zip(*every)))
                ours = predicted(setup, gossip.Cost(gossip.work.Trace(path), links))
            step = max(sum(s) / len(s) for s in every)
            result.setdefault(method, []).append((ours, measured, step))
    return result


def predicted(setup: Any, cost: gossip.Cost, rounds: int = 20) -> float:
    """Simulated seconds per round of the run, its bytes as metered."""
    task, algorithm, schedule = setup[:3]
    net = gossip.Network(schedule)
    watch = gossip.Watch(gossip.Timeline(cost, net.n), net)
    state = algorithm.init(task.initial().expand(net.n, -1).clone())
    zero = torch.zeros_like(algorithm.params(state))
    half = 0.0
    for k, _ in gossip.lockstep(algorithm, lambda x, t: zero, net, state, 2 * rounds):
        watch.round(k - 1)
        if k == rounds:
            half = watch.timeline.seconds
    return (watch.timeline.seconds - half) / rounds


def rows() -> Iterator[Row]:
    """The part of the table about predictions: predicted / measured, which is to lie within a quarter of 1."""
    reason = netlab.unavailable()
    if reason is not None:
        print(f"cost: skipped, {reason}")
        return
    networks = {
        "100 Mbit/s": lambda: netlab.bridged(HOSTS, "100mbit"),
        "1 Gbit/s": lambda: netlab.bridged(HOSTS, "1000mbit"),
        "1 Gbit/s, 10 ms": lambda: netlab.delayed(HOSTS, 1000, 10),
    }
    for network, hosts in networks.items():
        yield from on(network, hosts)


def on(network: str, hosts: Any) -> Iterator[Row]:
    """The rows of one network."""
    with hosts() as up:
        code = "from tests.benchmarks.cost import everything; everything()"
        printed = up.everywhere([sys.executable, "-c", code], timeout=170)[0]
    for method, turns in predictions(json.loads(printed.partition("RESULT ")[2])).items():
        ours, truth, step = (1e3 * median(turn[i] for turn in turns) for i in range(3))
        ratio = median(p / m for p, m, _ in turns)
        detail = f"{ours:.0f} predicted, {truth:.0f} ms measured, of which a step {step:.0f} ms"
        figure = f"seconds per round, {method}, {network}"
        yield Row(figure, "the same round, measured", ratio, "1 ± ¼", 0.75 <= ratio <= 1.25, detail)
