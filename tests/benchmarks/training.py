"""Training across hosts with limited links: what overlap hides, and seconds to an accuracy on Fashion-MNIST.

Four network namespaces at 100 Mbit/s. Skipped, with the reason, where namespaces are not permitted.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gossip
import graphs
from experiments.models import seeded
from experiments.tasks import fashion
from tests import netlab

from .harness import Row, at_least, reported

HOSTS, RATE = 4, "100mbit"
ACCURACY = 0.78  # of the average model, on 2,000 test images
ROUNDS, EVERY, BATCH = 240, 10, 32


def cnn() -> nn.Module:
    """The CNN of federated averaging (McMahan et al. 2017, arXiv 1602.05629): 1,663,370 parameters."""
    return nn.Sequential(
        *(nn.Unflatten(-1, (1, 28, 28)), nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def wrapped(mixing: Any, algorithm: gossip.Algorithm, **options: Any) -> Callable[..., tuple[nn.Module, Any]]:
    """A method that gossips: model → (what is called in the loop, optimizer)."""

    def make(model: nn.Module, transport: gossip.Transport) -> tuple[nn.Module, Any]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return model, gossip.wrap(sgd, algorithm, mixing, transport=transport, **options)

    return make


def data_parallel(model: nn.Module, transport: gossip.Transport) -> tuple[nn.Module, Any]:
    """torch's own: gradients are averaged by all-reduce, in buckets, while the backward pass goes on."""
    return nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


METHODS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "all-reduce": data_parallel,
    "ring": wrapped(graphs.ring(HOSTS), gossip.DPSGD()),
    "one-peer, overlapped": wrapped(graphs.one_peer_exponential(HOSTS), gossip.DPSGD(), overlap=True),
    "CHOCO top-k 1 %": wrapped(graphs.ring(HOSTS), gossip.Choco(compressor=gossip.TopK(0.01), gamma=0.04)),
}


def accuracies(rank: int, size: int) -> None:
    """On every host: train by each method until the average model is accurate; rank 0 prints rounds and seconds."""
    torch.set_num_threads(1)
    transport = gossip.connect(timeout=120)
    (x, y), (x_test, y_test) = fashion.load()
    x, y, x_test, y_test = x[rank::size] / 255, y[rank::size], x_test[:2000] / 255, y_test[:2000]
    found = {}
    for name, make in METHODS.items():
        model = seeded(0, cnn)
        called, optimizer = make(model, transport)
        seconds, rounds, accuracy = 0.0, 0, 0.0
        while rounds < ROUNDS and accuracy < ACCURACY:
            transport.barrier()
            began = time.perf_counter()
            for _ in range(EVERY):
                pick = gossip.rng.integers(gossip.rng.key(0, "batch", rounds, rank)[None], BATCH, len(x))[0]
                optimizer.zero_grad()
                cross_entropy(called(x[pick]), y[pick]).backward()
                optimizer.step()
                rounds += 1
            seconds += time.perf_counter() - began
            average = [transport.sum_(p.detach().clone()) / size for p in model.parameters()]
            if rank == 0:
                with torch.no_grad():
                    names = [n for n, _ in model.named_parameters()]
                    out = torch.func.functional_call(model, dict(zip(names, average)), (x_test,))
                accuracy = float((out.argmax(1) == y_test).double().mean())
            (accuracy,) = transport.broadcast_(torch.tensor([accuracy], dtype=torch.float64)).tolist()
        if isinstance(optimizer, gossip.GossipOptimizer):
            optimizer.finish()
        found[name] = (accuracy, rounds, max(transport.gather(seconds)))
    if rank == 0:
        print("RESULT", json.dumps(found))
    gossip.disconnect()


def hidden(d: int, repeat: int) -> None:
    """On every host: median seconds of a step of computing alone, with an exchange after it, and with it overlapped."""
    torch.set_num_threads(1)
    transport = gossip.connect(timeout=120)
    n = transport.size
    a = torch.randn(200, 200)

    products = 50

    def busy() -> None:
        for _ in range(products):
            a @ a

    def optimizer(overlap: bool) -> Any:
        x = torch.nn.Parameter(torch.randn(d))
        x.grad = torch.zeros(d)
        mixing = graphs.one_peer_exponential(n)
        return gossip.wrap(torch.optim.SGD([x], lr=0.1), gossip.DPSGD(), mixing, transport=transport, overlap=overlap)

    def timed(step: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            transport.barrier()
            began = time.perf_counter()
            step()
            taken.append(max(transport.gather(time.perf_counter() - began)))
        return median(taken)

    plain = optimizer(False)
    exchange = timed(plain.step, 5)
    for _ in range(3):  # until computing takes about as long, on all hosts at once
        products = max(1, round(products * exchange / timed(busy, 3)))
    overlapped = optimizer(True)
    sides: dict[str, list[float]] = {"compute": [], "in turn": [], "overlapped": []}
    for _ in range(repeat):
        for name, step in (("compute", None), ("in turn", plain.step), ("overlapped", overlapped.step)):
            if step is not None:
                step()  # with overlap the first exchange is only posted here
            transport.barrier()
            began = time.perf_counter()
            for _ in range(4):
                busy()
                if step is not None:
                    step()
            sides[name].append(max(transport.gather((time.perf_counter() - began) / 4)))
            overlapped.finish()
    if transport.rank == 0:
        print("RESULT", json.dumps({name: median(times) for name, times in sides.items()}))
    gossip.disconnect()


def early(repeat: int) -> None:
    """On every host: median seconds of a training step whose heavy layers come first and whose many parameters last.

    Without and with buckets, in turn.
    """
    torch.set_num_threads(1)
    transport = gossip.connect(timeout=120)
    images = torch.randn(8, 32, 48, 48)
    steps: dict[str, Callable[[], None]] = {}
    for name, buckets in (("whole", 1), ("buckets", 2)):
        heavy = [layer for _ in range(6) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
        model = nn.Sequential(*heavy, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4608, 217))
        inner, mixing = torch.optim.SGD(model.parameters(), lr=1e-4), graphs.one_peer_exponential(transport.size)
        optimizer = gossip.wrap(inner, gossip.DPSGD(), mixing, transport=transport, buckets=buckets)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

        steps[name] = step
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            transport.barrier()
            began = time.perf_counter()
            for _ in range(3):
                step()
            taken[name].append(max(transport.gather((time.perf_counter() - began) / 3)))
    if transport.rank == 0:
        print("RESULT", json.dumps({name: median(times) for name, times in taken.items()}))
    gossip.disconnect()


def rows() -> Iterator[Row]:
    """The part of the table about training across hosts."""
    reason = netlab.unavailable()
    if reason is not None:
        print(f"training: skipped, {reason}")
        return
    with netlab.bridged(HOSTS, RATE) as hosts:
        code = "from tests.benchmarks.training import hidden; hidden(10**6, 5)"
        printed = hosts.everywhere([sys.executable, "-c", code], timeout=300)[0]
    found = json.loads(printed.partition("RESULT ")[2])
    exchange = found["in turn"] - found["compute"]
    share = (found["in turn"] - found["overlapped"]) / exchange
    detail = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in found.items())
    where = "4 hosts, 100 Mbit/s"
    yield at_least(f"share of the exchange hidden by overlap, {where}", "the exchange", share, 0.7, detail)
    with netlab.bridged(HOSTS, RATE) as hosts:
        code = "from tests.benchmarks.training import early; early(5)"
        printed = hosts.everywhere([sys.executable, "-c", code], timeout=300)[0]
    found = json.loads(printed.partition("RESULT ")[2])
    detail = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in found.items())
    yield at_least(f"a step with buckets, {where}", "without", found["whole"] / found["buckets"], 1.1, detail)
    if not Path("/usr/share/datasets/fashion-mnist").exists():
        print("training: Fashion-MNIST is not here; apt-get install dataset-fashion-mnist")
        return
    with netlab.bridged(HOSTS, RATE) as hosts:
        code = "import os; from tests.benchmarks.training import accuracies"
        code += f"; accuracies(int(os.environ['RANK']), {HOSTS})"
        printed = hosts.everywhere([sys.executable, "-c", code], timeout=1200)[0]
    methods = json.loads(printed.partition("RESULT ")[2])
    _, rounds, seconds = methods["all-reduce"]
    for name, (accuracy, own_rounds, own) in methods.items():
        detail = f"{own / own_rounds * 1e3:.0f} against {seconds / rounds * 1e3:.0f} ms"
        yield reported(f"a round of training, CNN, {name}, {where}", "DDP", seconds / rounds * own_rounds / own, detail)
        reached = f"{own:.0f} s, {own_rounds} rounds" if accuracy >= ACCURACY else f"only {accuracy:.3f} in {own:.0f} s"
        yield reported(f"to accuracy {ACCURACY:g}, CNN, {name}, {where}", "DDP", seconds / own, reached)
