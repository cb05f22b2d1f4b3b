"""The engine's speed: D-PSGD on a ring, MLP 64-128-10, batch 32, all rows in one process, one thread."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import gossip
import graphs
from gossip.layout import Layout

from .harness import Row, at_least, at_most, side_by_side

BATCH, LR, SAMPLES = 32, 0.1, 128


def mlp() -> nn.Module:
    """9,610 parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data(n: int) -> tuple[Tensor, Tensor]:
    """128 samples of 64 features a worker."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, SAMPLES, 64, generator=generator), torch.randint(10, (n, SAMPLES), generator=generator)


def batches(inputs: Tensor, targets: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The same consecutive batches for every side."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        start = (step * BATCH) % SAMPLES
        return inputs[:, start : start + BATCH], targets[:, start : start + BATCH]

    return batch


def ours(n: int) -> Callable[[], object]:
    """The engine as a user runs it: oracle, torch's SGD on the stack, network."""
    oracle, batch = gossip.Oracle(mlp(), cross_entropy), batches(*data(n))
    algorithm = gossip.DPSGD(partial(torch.optim.SGD, lr=LR))
    net = gossip.Network(graphs.as_schedule(graphs.ring(n)))
    x = oracle.layout.flatten(oracle.model).expand(n, -1).clone()
    rounds = gossip.lockstep(algorithm, lambda x, step: oracle(x, *batch(step))[0], net, algorithm.init(x), 10**9)

    def round() -> None:
        with torch.no_grad():
            next(rounds)

    return round


def by_hand(n: int) -> Callable[[], object]:
    """The same computation with `torch.bmm` and `roll`, gradients derived on paper."""
    batch = batches(*data(n))
    layout = Layout.of(mlp())
    x = layout.flatten(mlp()).expand(n, -1).clone()
    W1, b1, W2, b2 = layout.views(x).values()
    g = torch.empty_like(x)
    gW1, gb1, gW2, gb2 = layout.views(g).values()
    minus = torch.full((n, BATCH, 1), -1.0)
    step = 0

    def round() -> None:
        nonlocal step
        inputs, targets = batch(step)
        step += 1
        h = torch.baddbmm(b1[:, None], inputs, W1.transpose(1, 2))
        a = h.relu()
        p = torch.baddbmm(b2[:, None], a, W2.transpose(1, 2)).softmax(-1)
        p.scatter_add_(2, targets[..., None], minus).div_(BATCH)
        gW2.copy_(torch.bmm(p.transpose(1, 2), a))
        gb2.copy_(p.sum(1))
        dh = torch.bmm(p, W2).mul_(h > 0)
        gW1.copy_(torch.bmm(dh.transpose(1, 2), inputs))
        gb1.copy_(dh.sum(1))
        x.add_(g, alpha=-LR)
        x.copy_((x + x.roll(1, 0) + x.roll(-1, 0)) / 3)

    return round


def loop(n: int) -> Callable[[], object]:
    """n modules, n optimizers, a Python loop; mixing by stacking the parameters."""
    batch = batches(*data(n))
    models = [mlp() for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in models]
    step = 0

    def round() -> None:
        nonlocal step
        inputs, targets = batch(step)
        step += 1
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            cross_entropy(model(inputs[i]), targets[i]).backward()
            optimizer.step()
        with torch.no_grad():
            rows = [torch.cat([p.reshape(-1) for p in m.parameters()]) for m in models]
            for i, model in enumerate(models):
                mixed = (rows[i - 1] + rows[i] + rows[(i + 1) % n]) / 3
                torch.nn.utils.vector_to_parameters(mixed, model.parameters())

    return round


def vmap_grad(n: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Gradients alone: our oracle, and `vmap(grad(...))` written into the same flat rows."""
    oracle, batch = gossip.Oracle(mlp(), cross_entropy), batches(*data(n))
    x = oracle.layout.flatten(oracle.model).expand(n, -1).clone()
    views, g = oracle.layout.views(x), torch.empty_like(x)
    out = list(oracle.layout.views(g).values())
    model = mlp()

    def loss(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, params, (inputs,)), targets)

    def theirs() -> None:
        torch._foreach_copy_(out, list(vmap(grad(loss))(views, *batch(0)).values()))

    return lambda: oracle(x, *batch(0)), theirs


def memory(n: int) -> float:
    """Peak resident GB of a fresh process that runs a few rounds."""
    code = f"from tests.benchmarks.engine import peak; print(peak({n}))"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def peak(n: int) -> float:
    """Run a few rounds here and return the process's peak resident GB."""
    torch.set_num_threads(1)
    round = ours(n)
    for _ in range(5):
        round()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def rows() -> Iterator[Row]:
    """The engine's part of the table."""
    torch.set_num_threads(1)
    for n in (64, 256):
        ratio, a, b = side_by_side(ours(n), by_hand(n))
        detail = f"{n / a:,.0f} against {n / b:,.0f} worker-steps/s"
        yield at_least(f"worker-steps/s, D-PSGD ring n={n}", "the same by hand, torch.bmm and roll", ratio, 0.6, detail)
    for n in (64, 256):
        ratio, a, b = side_by_side(ours(n), loop(n), pairs=3)
        detail = f"{n / a:,.0f} against {n / b:,.0f} worker-steps/s"
        yield at_least(f"worker-steps/s, D-PSGD ring n={n}", "loop over n modules and optimizers", ratio, 3.5, detail)
    for n in (64, 256):
        ratio, a, b = side_by_side(*vmap_grad(n))
        detail = f"{n / a:,.0f} against {n / b:,.0f} gradients/s"
        yield at_least(f"gradients/s, forward under vmap + backward, n={n}", "vmap(grad)", ratio, 0.9, detail)
    gigabytes = memory(1024)
    yield at_most("peak GB, n=1024 workers of that MLP", "1 GB", gigabytes, 1.5)
