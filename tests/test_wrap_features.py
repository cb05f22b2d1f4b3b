"""What training loops do around `gossip.wrap`: scalers, half precision, overlap, uneven loops, groups, sharded models."""

import copy
import gc
import io
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import launch, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adam, Muon
from torch.optim.lr_scheduler import StepLR

import gossip
import graphs
from gossip.wire import CHUNK

N, STEPS, BATCH = 4, 5, 6
RING = graphs.ring(N)
W = graphs.metropolis(RING).to_dense()
sgd = partial(SGD, lr=0.1)


class Net(nn.Module):
    """Two layers; with `tied`, one matrix serves twice; one parameter may have no part in the loss."""

    def __init__(self, dtype=torch.float64, tied=False, unused=False, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3, bias, dtype=dtype), nn.Linear(3, 3, bias, dtype=dtype)
        if tied:
            self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype)) if unused else None

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Images(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(3, 4, 3, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        image = x[:, :, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.out(torch.tanh(self.conv(image)).mean((2, 3)))


def data(worker, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x, y = torch.randn(2, BATCH, 3, dtype=torch.float64, generator=generator)
    return x.to(dtype), (y + worker).to(dtype)


def backward(model, worker, step, dtype=torch.float64):
    x, y = data(worker, step, dtype)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(x, workers, step, model=None):
    """Of rows: for `gossip.simulate`."""
    rows = []
    for row, worker in zip(x, workers.tolist()):
        model = Net()
        nn.utils.vector_to_parameters(row.detach().clone(), model.parameters())
        backward(model, worker, step)
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


# -- loops by hand and wrapped: the same function runs in both -----------------------------------------------------


def plain(model, optimizer, worker, step):
    optimizer.zero_grad()
    backward(model, worker, step)
    optimizer.step()


def clipped(model, optimizer, worker, step):
    optimizer.zero_grad()
    for half in (0, 100):
        backward(model, worker, step + half)  # accumulated
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()


def autocast(model, optimizer, worker, step):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(data(worker, step, torch.float32)[0])
        assert out.dtype == torch.bfloat16
    nn.functional.mse_loss(out.float(), data(worker, step, torch.float32)[1]).backward()
    optimizer.step()


def compiled(backend):
    def loop(model, optimizer, worker, step):
        if not hasattr(model, "fast"):
            object.__setattr__(model, "fast", torch.compile(model, backend=backend))
        optimizer.zero_grad()
        backward(model.fast, worker, step)
        optimizer.step()

    return loop


def groups(model):
    return Adam([{"params": model.first.parameters(), "lr": 0.03}, {"params": model.second.parameters()}], lr=0.01)


LOOPS = {  # model, optimizer of a model, loop
    "Muon": (partial(Net, bias=False), lambda m: Muon(m.parameters(), lr=0.1), plain),
    "Adafactor": (Net, lambda m: Adafactor(m.parameters(), lr=0.1), plain),
    "groups with a scheduler": (Net, groups, plain),
    "clipping, accumulation": (Net, lambda m: sgd(m.parameters()), clipped),
    "tied": (partial(Net, tied=True), lambda m: sgd(m.parameters(), momentum=0.9), plain),
    "no gradient": (partial(Net, unused=True), lambda m: sgd(m.parameters(), weight_decay=0.1), plain),
    "channels_last": (Images, lambda m: sgd(m.parameters(), momentum=0.9), plain),
    "autocast": (partial(Net, dtype=torch.float32), lambda m: sgd(m.parameters()), autocast),
    "compiled": (Net, lambda m: sgd(m.parameters()), compiled("eager")),
}


def loops(rank, transport):
    said = {}
    for name, (make, optimize, loop) in LOOPS.items():
        model = make()
        inner = optimize(model)
        scheduler = StepLR(inner, 2, 0.5)  # on the inner one; tests/test_wrap.py has it on the wrapped one
        optimizer = gossip.wrap(inner, gossip.DPSGD(), RING, transport=transport)
        for step in range(STEPS):
            loop(model, optimizer, rank, step)
            scheduler.step()
        if name == "channels_last":
            assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        if name == "tied":
            assert optimizer.row.layout.d == 9 + 3 + 3
            assert model.first.weight is model.second.weight
        if name == "no gradient":
            assert torch.equal(model.unused.detach(), torch.ones(2).double())
        said[name] = flat(model)
    return said


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_equals_the_same_loop_by_hand(world, name):
    make, optimize, loop = LOOPS[name]
    models = [make() for _ in range(N)]
    optimizers = [optimize(m) for m in models]
    schedulers = [StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(STEPS):
        for worker in range(N):
            loop(models[worker], optimizers[worker], worker, step)
            schedulers[worker].step()
        x = torch.stack([flat(m) for m in models])
        for model, row in zip(models, W.to(x.dtype) @ x):
            for p, piece in zip(model.parameters(), row.split([p.numel() for p in model.parameters()])):
                p.data.copy_(piece.view(p.shape))
    got = torch.stack([said["loops"][name] for said in world])
    expected = torch.stack([flat(m) for m in models])
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3
    exact = 1e-6 if got.dtype == torch.float32 else 1e-5 if name == "Muon" else 1e-10  # Muon computes in bfloat16
    torch.testing.assert_close(got, expected, rtol=0, atol=exact)


def _compiled_too(rank, size, store):
    transport = gossip.connect(rank, size, store)
    rows = []
    for loop in (compiled("aot_eager"), plain):
        model = Net()
        optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), graphs.complete(2), transport=transport)
        for step in range(STEPS):
            loop(model, optimizer, rank, step)
        rows.append(flat(model))
    gossip.disconnect()
    return rows


@pytest.mark.slow
def test_a_compiled_backward(tmp_path):
    for fast, eager in values(launch(_compiled_too, 2, tmp_path, timeout=110)):
        torch.testing.assert_close(fast, eager, rtol=0, atol=1e-10)


# -- GradScaler ----------------------------------------------------------------------------------------------------

SCALED = {
    "dpsgd": (gossip.DPSGD(), False),
    "dpsgd, unscaled and clipped": (gossip.DPSGD(), True),
    "tracking": (gossip.GradientTracking(), False),
    "tracking, unscaled and clipped": (gossip.GradientTracking(), True),
    "allreduce": (gossip.AllReduce(), False),
    "allreduce, unscaled and clipped": (gossip.AllReduce(), True),
}
ODD = (1, 2)  # the worker and the step of the overflow
CLIP = 0.5


def scaled(rank, transport):
    said = {}
    for name, (algorithm, clip) in SCALED.items():
        model = Net()
        optimizer = gossip.wrap(sgd(model.parameters()), algorithm, RING, transport=transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data(rank, step)[0]), data(rank, step)[1])
            scaler.scale(loss * (float("inf") if (rank, step) == ODD else 1)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (512 if rank == ODD[0] else 1024)
        said[name] = flat(model), optimizer.skipped, optimizer.rounds
    return said


@pytest.mark.parametrize("name", SCALED)
def test_an_overflow_skips_one_local_update_and_no_exchange(world, name):
    algorithm, clip = SCALED[name]
    x = flat(Net()).expand(N, -1).clone()
    y, before = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(STEPS):
        g = gradient(x, torch.arange(N), step)
        if clip:
            g *= (CLIP / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        steps = torch.tensor([(worker, step) != ODD for worker in range(N)])[:, None]
        if isinstance(algorithm, gossip.DPSGD):
            x = W @ torch.where(steps, x - 0.1 * g, x)
        elif isinstance(algorithm, gossip.AllReduce):
            x = x - 0.1 * torch.where(steps, g, 0).mean(0)
        else:
            y, before = torch.where(steps, y + g - before, y), torch.where(steps, g, before)
            x, y = W @ torch.where(steps, x - 0.1 * y, x), W @ y
    for worker, (row, skipped, rounds) in enumerate(said["scaled"][name] for said in world):
        torch.testing.assert_close(row, x[worker], rtol=0, atol=1e-10)
        assert (skipped, rounds) == (int(worker == ODD[0]), STEPS)


# -- precision -----------------------------------------------------------------------------------------------------


def half(rank, transport):
    said = {}
    for dtype in (torch.bfloat16, torch.float16):
        for name, algorithm in (
            ("dpsgd", gossip.DPSGD()),
            ("sgp", gossip.SGP()),
            ("tracking", gossip.GradientTracking()),
        ):
            model = Net(dtype)
            optimizer = gossip.wrap(sgd(model.parameters(), momentum=0.5), algorithm, RING, transport=transport)
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, rank, step, dtype)
                optimizer.step()
            x = algorithm.params(optimizer.gossip)
            assert x.dtype == torch.float32
            assert torch.equal(flat(model), x[0].to(dtype))
            said[dtype, name] = x[0].clone()
    mixed = nn.ModuleDict({"low": nn.Linear(3, 3, dtype=torch.bfloat16), "high": nn.Linear(3, 3)})
    optimizer = gossip.wrap(sgd(mixed.parameters()), gossip.DPSGD(), RING, transport=transport)
    assert optimizer.row.x.dtype == torch.float32
    assert [p.dtype for p in mixed.parameters()] == 2 * [torch.bfloat16] + 2 * [torch.float32]
    return said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_mixed_by_a_float32_master(world, dtype):
    """Against masters by hand, whose gradients are taken at the rounded model."""

    def rounded(x, workers, step):
        rows = []
        for row, worker in zip(x, workers.tolist()):
            model = Net(dtype)
            nn.utils.vector_to_parameters(row.to(dtype), model.parameters())
            backward(model, worker, step, dtype)
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).float())
        return torch.stack(rows)

    start = flat(Net(dtype)).float()
    make = partial(SGD, lr=0.1, momentum=0.5)
    for name, algorithm in (
        ("dpsgd", gossip.DPSGD(make)), ("sgp", gossip.SGP(make)), ("tracking", gossip.GradientTracking(make))
    ):  # fmt: skip
        *_, last = gossip.simulate(rounded, algorithm, RING, STEPS, x0=start)
        got = torch.stack([said["half"][dtype, name] for said in world])
        torch.testing.assert_close(
            got, last.x, rtol=0, atol=2e-2
        )  # a last bit of the sums may round the model otherwise
        torch.testing.assert_close(got.mean(0), last.x.mean(0), rtol=0, atol=2e-3)


def drifting(rank, transport, mixes=300):
    """Local steps of rate 0, so that only mixing moves the models."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(1 + rank + torch.arange(6.0).view(2, 3) / 7)
    optimizer = gossip.wrap(
        SGD(model.parameters(), lr=0.0), gossip.DPSGD(), graphs.star(N), transport=transport, broadcast=False
    )
    start = optimizer.row.x.clone()
    for _ in range(mixes):
        optimizer.step()
    return start, optimizer.row.x.clone()


def _drift(found):
    """(the largest distance from the mean at the end, the largest relative change of the mean)."""
    start, end = (torch.cat(rows).double() for rows in zip(*found))
    return float((end - end.mean(0)).abs().max()), float((end.mean(0) / start.mean(0) - 1)[:6].abs().max())


def test_the_mean_does_not_drift_in_half_precision(world):
    apart, moved = _drift([said["drifting"] for said in world])
    assert apart < 1e-5
    assert moved < 1e-5


def _drifting_long(rank, size, store):
    found = drifting(rank, gossip.connect(rank, size, store), 10_000)
    gossip.disconnect()
    return found


@pytest.mark.slow
def test_the_mean_does_not_drift_in_ten_thousand_mixes(tmp_path):
    apart, moved = _drift(values(launch(_drifting_long, N, tmp_path, timeout=110)))
    assert apart < 1e-5
    assert moved < 1e-5


# -- buffers -------------------------------------------------------------------------------------------------------


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def buffers(rank, transport):
    said = {}
    for policy in ("local", "mix"):
        model = norm_net()
        model[1].running_mean.fill_(rank)
        optimizer = gossip.wrap(
            sgd(model.parameters()), gossip.DPSGD(), RING, model=model, buffers=policy, transport=transport
        )
        assert float(model[1].running_mean.abs().max()) == 0  # rank 0's
        for step in range(2 + rank):
            model(data(rank, step)[0] + rank)
        before = [b.clone() for b in model.buffers()]
        optimizer.zero_grad()
        optimizer.step()
        said[policy] = before, [b.clone() for b in model.buffers()]
    own = flat(model), [b.clone() for b in model.buffers()]
    batches = [data(9, step)[0] for step in range(3)]
    with optimizer.average_model(batches):
        average = flat(model), [b.clone() for b in model.buffers()]
        assert model.training
    assert torch.equal(flat(model), own[0])
    assert all(torch.equal(b, before) for b, before in zip(model.buffers(), own[1]))
    said["average"] = own[0], *average
    return said


def test_buffers_stay_local_or_are_mixed_and_counters_never(world):
    for policy in ("local", "mix"):
        before, after = zip(*(said["buffers"][policy] for said in world))
        mean, var, count = (torch.stack(b) for b in zip(*before))
        assert count.tolist() == [2, 3, 4, 5]
        if policy == "mix":
            mean, second = W @ mean, W @ (var + mean**2)
            assert float((second - mean**2 - W @ var).min()) > 0.001  # what the workers' means differ by
            var = second - mean**2
        for wanted, got in zip((mean, var, count), zip(*after)):
            torch.testing.assert_close(torch.stack(got), wanted, rtol=0, atol=1e-12)


def test_the_average_model_gets_statistics_of_its_own(world):
    model = norm_net()
    x = torch.stack([said["buffers"]["average"][0] for said in world]).mean(0)
    nn.utils.vector_to_parameters(x, model.parameters())
    torch.optim.swa_utils.update_bn([data(9, step)[0] for step in range(3)], model)
    for _, row, statistics in (said["buffers"]["average"] for said in world):
        torch.testing.assert_close(row, x, rtol=0, atol=1e-14)
        for got, wanted in zip(statistics, model.buffers()):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


# -- what changes after wrap, and hooks ----------------------------------------------------------------------------


def changes(rank, transport):
    def start(model=None):
        model = model or Net()
        inner = sgd(model.parameters())
        optimizer = gossip.wrap(inner, gossip.DPSGD(), RING, transport=transport)
        backward(model, rank, 0)
        return model, inner, optimizer

    said = []

    def refused(optimizer, told):
        with pytest.raises(RuntimeError, match=told + ".*build the optimizer and wrap again"):
            optimizer.step()

    model, _, optimizer = start()
    model.first.weight.requires_grad_(False)
    refused(optimizer, r"parameter 0 of shape \(3, 3\) was frozen after wrap")
    model = Net()
    model.first.requires_grad_(False)
    head, _, optimizer = start(model)
    assert optimizer.row.layout.d == 12
    own = head.first.weight.data_ptr()
    optimizer.step()
    assert head.first.weight.data_ptr() == own
    head.first.weight.requires_grad_(True)
    refused(optimizer, r"parameter 0 of shape \(3, 3\) was unfrozen after wrap")
    model, inner, optimizer = start()
    inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    refused(optimizer, "a parameter group was added")
    model, _, optimizer = start()
    model.to(torch.float32)
    refused(optimizer, r"a parameter of shape \(3, 3\) was given other memory after wrap")

    one = nn.Conv2d(3, 2, 3)
    if rank == 2:
        one.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"ranks 0 and 2 differ in parameter 0: .*in memory by strides"):
        gossip.wrap(sgd(one.parameters()), gossip.DPSGD(), RING, transport=transport)

    model, inner, optimizer = start()
    inner.register_step_pre_hook(lambda *_: said.append("inner before"))
    inner.register_step_post_hook(lambda *_: said.append("inner after"))
    optimizer.register_step_pre_hook(lambda *_: said.append("before"))
    optimizer.register_step_post_hook(lambda *_: said.append("after"))
    model.first.weight.register_hook(lambda g: g * 0)
    optimizer.zero_grad()
    before = model.first.weight.detach().clone()
    backward(model, rank, 1)
    optimizer.step()
    assert torch.allclose(model.first.weight, before)  # all start alike, so mixing does not move it

    _, _, optimizer = start()
    allreduce = gossip.wrap(sgd(Net().parameters()), gossip.AllReduce(), RING, transport=transport)
    with pytest.raises(gossip.Incompatible, match="no_sync.*call backward several times"), allreduce.no_sync():
        pass
    with optimizer.no_sync():
        optimizer.step()
    assert (optimizer.steps, optimizer.rounds, optimizer.net.meter.edges) == (0, 0, {})
    assert optimizer.consensus_distance() > 0
    return said


def test_what_changes_after_wrap_is_refused_and_hooks_run(world):
    assert [said["changes"] for said in world] == N * [["before", "inner before", "inner after", "after"]]


# -- overlap -------------------------------------------------------------------------------------------------------

_momentum = partial(SGD, lr=0.05, momentum=0.9)
OVERLAPPED = {  # algorithm, mixing, local steps
    "dpsgd": (gossip.DPSGD(_momentum), RING, 1),
    "dpsgd, local steps": (gossip.DPSGD(_momentum), graphs.one_peer_exponential(N), 2),
    "choco, top-k": (gossip.Choco(_momentum, gossip.TopK(0.2), 0.3), RING, 1),
    "choco, random-k": (gossip.Choco(_momentum, gossip.RandK(0.2), 0.3), RING, 1),
    "choco, identity": (gossip.Choco(_momentum, gossip.Identity(), 1.0), RING, 2),
    "moniqua": (gossip.MoniquaSGD(_momentum, theta=2.0, bits=4), RING, 1),
    "sgp": (gossip.SGP(_momentum), graphs.one_peer_exponential(N), 1),
}
SAVED, LAST = 3, 7  # with two local steps, in the middle of a round


def _overlapping(name, rank, transport):
    algorithm, mixing, local_steps = OVERLAPPED[name]
    model = Net()
    optimizer = gossip.wrap(
        _momentum(model.parameters()), algorithm, mixing, local_steps=local_steps, overlap=True, transport=transport
    )
    return model, optimizer


def overlapped(rank, transport):
    """All but the last case end with a message in flight, which the next wrap must not trip over."""
    said = {}
    for name in OVERLAPPED:
        model, optimizer = _overlapping(name, rank, transport)
        rows, file = [], io.BytesIO()
        for step in range(LAST):
            plain(model, optimizer, rank, step)
            rows.append(flat(model))
            if step + 1 == SAVED:
                torch.save(optimizer.state_dict(), file)
                with optimizer.average_model():  # a collective beside the exchange in flight
                    average = flat(model)
                assert torch.equal(flat(model), rows[-1])
        bits = int(optimizer.net.meter.bits.sum())
        said[name] = torch.stack(rows), file.getvalue(), bits, average
    optimizer.finish()
    optimizer.finish()
    return said


def _resumed(rank, size, store, saved):
    transport = gossip.connect(rank, size, store)
    said = {}
    for name in OVERLAPPED:
        model, optimizer = _overlapping(name, rank, transport)
        optimizer.load_state_dict(torch.load(io.BytesIO(saved[rank][name]), weights_only=True))
        assert optimizer._in_flight
        rows = [flat(model)]
        for step in range(SAVED, LAST):
            plain(model, optimizer, rank, step)
            rows.append(flat(model))
        said[name] = torch.stack(rows), int(optimizer.net.meter.bits.sum())
    gossip.disconnect()  # with a message in flight
    return said


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_is_the_overlapped_engine(world, name):
    algorithm, mixing, local_steps = OVERLAPPED[name]
    rounds = LAST // local_steps
    records = gossip.simulate(
        gradient, algorithm, mixing, rounds, x0=flat(Net()), local_steps=local_steps, overlap=True
    )  # fmt: skip
    for record in records:
        x = torch.stack([said["overlapped"][name][0][record.round * local_steps - 1] for said in world])
        torch.testing.assert_close(x, record.x, rtol=0, atol=1e-10)
    assert float((record.x[0] - record.x[1]).abs().max()) > 1e-4
    sent = sum(said["overlapped"][name][2] for said in world)
    assert sent == record.bits * (rounds + 1) // rounds  # one message is in flight
    for said in world:
        rows, _, _, average = said["overlapped"][name]
        x = torch.stack([other["overlapped"][name][0][SAVED - 1] for other in world])
        torch.testing.assert_close(average, x.mean(0), rtol=0, atol=1e-12)


def test_a_message_in_flight_is_saved_and_goes_on_in_other_processes(world, tmp_path):
    saved = [{name: said["overlapped"][name][1] for name in OVERLAPPED} for said in world]
    for rank, said in enumerate(values(launch(_resumed, N, tmp_path, saved))):
        for name, (rows, bits) in said.items():
            unbroken = world[rank]["overlapped"][name]
            assert torch.equal(rows, unbroken[0][SAVED - 1 :]), name
            assert bits == unbroken[2]


EXITS = """
import os, sys
import torch, gossip, graphs

def work(rank):
    transport = gossip.connect(rank, 2, sys.argv[1], timeout=20)
    model = torch.nn.Linear(100, 100)
    optimizer = gossip.wrap(torch.optim.SGD(model.parameters(), lr=0.1), gossip.DPSGD(), graphs.complete(2), overlap=True)
    for step in range(3):
        model(torch.ones(100)).sum().backward()
        optimizer.step()
    if sys.argv[2] == "disconnect":
        gossip.disconnect()

child = os.fork()
work(int(child == 0))
os.write(1, b"done ")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("how", ["disconnect", "just end"])
def test_a_script_may_end_with_a_message_in_flight(tmp_path, how):
    root = Path(gossip.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", EXITS, f"file://{tmp_path}/store", how],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done done "), done.stderr
    assert "rror" not in done.stderr


# -- uneven loops --------------------------------------------------------------------------------------------------

BATCHES = [3, 5, 1, 4]
JOINED = {
    "dpsgd": (gossip.DPSGD(), {}),
    "local steps": (gossip.DPSGD(), {"local_steps": 2}),
    "overlap": (gossip.DPSGD(), {"overlap": True}),
    "overlap, local steps": (gossip.SGP(), {"overlap": True, "local_steps": 2}),
    "allreduce": (gossip.AllReduce(), {}),
    "tracking": (gossip.GradientTracking(), {}),
}


def joined(rank, transport):
    said = {}
    for name, (algorithm, options) in JOINED.items():
        model = Net()
        optimizer = gossip.wrap(sgd(model.parameters()), algorithm, RING, transport=transport, **options)
        with optimizer.join():
            for step in range(BATCHES[rank]):
                plain(model, optimizer, rank, step)
        said[name] = flat(model), optimizer.rounds, optimizer.steps
        optimizer.finish()
    began = time.monotonic()
    with pytest.raises(KeyError), optimizer.join():  # on every rank, so that nobody is left waiting
        raise KeyError
    assert time.monotonic() - began < 1
    plain(model, optimizer, rank, 0)
    return said


@pytest.mark.parametrize("name", JOINED)
def test_loops_of_uneven_length(world, name):
    algorithm, options = JOINED[name]
    most, local_steps = max(BATCHES), options.get("local_steps", 1)

    def lasting(x, workers, step):
        g = gradient(x, workers, step)
        return torch.where(torch.tensor(BATCHES)[:, None] > step, g, 0)

    x = flat(Net()).expand(N, -1).clone()
    if name == "tracking":  # leaving is not a gradient of zero: y stays, and is mixed on
        y, before = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(most):
            g, left = gradient(x, torch.arange(N), step), torch.tensor(BATCHES)[:, None] <= step
            y, before = torch.where(left, y, y + g - before), torch.where(left, before, g)
            x, y = W @ torch.where(left, x, x - 0.1 * y), W @ y
    else:
        *_, last = gossip.simulate(lasting, algorithm, RING, most // local_steps, x0=x, **options)
        x = last.x
        if local_steps == 2:  # the fifth step, before its round is over
            g = lasting(x, torch.arange(N), most - 1)
            x = x - 0.1 * g
    for worker, (row, rounds, steps) in enumerate(said["joined"][name] for said in world):
        torch.testing.assert_close(row, x[worker], rtol=0, atol=1e-10)
        assert (rounds, steps) == (most // local_steps, most)


def _one_raises(rank, size, store):
    transport = gossip.connect(rank, size, store, timeout=30)
    model = Net()
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), RING, transport=transport)
    with optimizer.join():
        for step in range(STEPS):
            if (rank, step) == (1, 2):
                raise KeyError("bad batch")
            plain(model, optimizer, rank, step)


def test_an_exception_inside_join_is_seen_at_once(tmp_path):
    began = time.monotonic()
    outcomes = launch(_one_raises, N, tmp_path)
    assert time.monotonic() - began < 20  # below the bound of 30 s
    for rank, outcome in enumerate(outcomes):
        assert ("KeyError: 'bad batch'" if rank == 1 else "PeerError") in outcome.error


# -- some of the ranks ---------------------------------------------------------------------------------------------


def some(rank, transport):
    def run(workers, mixing, group, offset):
        model = Net()
        optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), mixing, process_group=group)
        for step in range(STEPS):
            plain(model, optimizer, rank + offset, step)
        distance = optimizer.consensus_distance()
        return flat(model), distance

    three, pairs = dist.new_group([0, 2, 3]), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    said = {"three": flat(Net()) if rank == 1 else run([0, 2, 3], graphs.complete(3), three, 0)}
    said["pairs"] = run(None, graphs.complete(2), pairs[rank // 2], 10)  # both at once
    return said


def test_groups_of_ranks(world):
    for name, sets, offset in (("three", [[0, 2, 3]], 0), ("pairs", [[0, 1], [2, 3]], 10)):
        for ranks in sets:
            mixing = graphs.complete(len(ranks))
            own = torch.tensor(ranks) + offset
            *_, last = gossip.simulate(
                lambda x, workers, step, own=own: gradient(x, own[workers], step),
                gossip.DPSGD(), mixing, STEPS, x0=flat(Net()),
            )  # fmt: skip
            for rank, row in zip(ranks, last.x):
                got, distance = world[rank]["some"][name]
                torch.testing.assert_close(got, row, rtol=0, atol=1e-10)
                assert distance == pytest.approx(last.consensus, abs=1e-12)


# -- a worker of two processes -------------------------------------------------------------------------------------

INSIDE = {
    "ddp": (gossip.DPSGD(), "ddp"),
    "fsdp2": (gossip.DPSGD(), "fsdp2"),
    "fsdp2, choco": (gossip.Choco(compressor=gossip.Identity(), gamma=0.5), "fsdp2"),
    "fsdp2, tracking": (gossip.GradientTracking(), "fsdp2"),
    "fsdp2, overlap": (gossip.SGP(), "fsdp2"),
}
NODES = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)


def nodes(rank, transport):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    said = {}
    for name, (algorithm, kind) in INSIDE.items():
        model = Net(torch.float32)  # 3 rows on 2 shards
        with torch.no_grad():
            model.first.bias.add_(rank // 2)  # nodes that start apart
        if kind == "ddp":
            model = DistributedDataParallel(model, process_group=mesh["inner"].get_group())
        else:
            fully_shard(model, mesh=mesh["inner"])
        optimizer = gossip.wrap(
            sgd(model.parameters(), momentum=0.9), algorithm, NODES, process_group=mesh["outer"].get_group(),
            overlap="overlap" in name,
        )  # fmt: skip
        distance = optimizer.consensus_distance()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, rank, step, torch.float32)
            optimizer.step()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        saved = optimizer.state_dict()
        optimizer.finish()
        said[name] = distance, torch.cat([p.detach().flatten() for p in whole]), optimizer.row.layout.d
        optimizer.load_state_dict(copy.deepcopy(saved))
        again = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        assert all(torch.equal(p, q) for p, q in zip(whole, again)) or kind == "ddp"
        optimizer.finish()
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh["inner"])
    with pytest.raises(
        ValueError, match="Muon over sharded parameters: each process steps its own shard.*element-wise"
    ):
        gossip.wrap(Muon([sharded.weight]), gossip.DPSGD(), NODES, process_group=mesh["outer"].get_group())
    return said


@pytest.mark.parametrize("name", INSIDE)
def test_two_nodes_of_two_shards_equal_two_workers(world, name):
    def of_nodes(x, workers, step):
        return torch.stack([gradient(x[[i, i]], 2 * w + torch.arange(2), step).mean(0) for i, w in enumerate(workers)])

    algorithm = copy.deepcopy(INSIDE[name][0])
    object.__setattr__(algorithm, "optimizer", partial(SGD, lr=0.1, momentum=0.9))
    start = flat(Net(torch.float32)).double()
    *_, last = gossip.simulate(of_nodes, algorithm, NODES, STEPS, x0=start, overlap="overlap" in name)
    assert float((last.x[0] - last.x[1]).abs().max()) > 1e-3
    for rank, (distance, got, d) in enumerate(said["nodes"][name] for said in world):
        torch.testing.assert_close(got.double(), last.x[rank // 2], rtol=0, atol=1e-5)
        assert distance == 0
        assert d == (24 if name == "ddp" else [16, 8][rank % 2])


# -- buckets by layer ----------------------------------------------------------------------------------------------

BUCKETED = {  # model, mixing
    "ring": (Net, RING),
    "one-peer": (Net, graphs.one_peer_exponential(N)),
    "tied": (partial(Net, tied=True), RING),
    "no gradient": (partial(Net, unused=True), RING),
}


def bucketed(rank, transport):
    """With and without buckets; and how many messages had left before `step`."""
    said = {}
    for name, (make, mixing) in BUCKETED.items():
        for buckets in (1, 3):
            model = make()
            inner = sgd(model.parameters(), momentum=0.9)
            optimizer = gossip.wrap(inner, gossip.DPSGD(), mixing, transport=transport, buckets=buckets)
            early = 0
            for step in range(6):
                optimizer.zero_grad()
                before = transport.messages
                if step == 3:
                    with optimizer.no_sync():
                        backward(model, rank, step)
                        optimizer.step()
                    continue
                backward(model, rank, step)
                early += transport.messages - before
                optimizer.step()
            said[name, buckets] = flat(model), early, int(optimizer.net.meter.bits.sum())
    return said


@pytest.mark.parametrize("name", BUCKETED)
def test_buckets_compute_the_same_and_leave_during_backward(world, name):
    peers = 2 if BUCKETED[name][1] is RING else 1
    for said in world:
        (x, early, bits), (same, none, all_at_once) = said["bucketed"][name, 3], said["bucketed"][name, 1]
        torch.testing.assert_close(x, same, rtol=0, atol=1e-14)
        assert none == 0
        assert early == 5 * 2 * peers  # two buckets; a third, of the parameter without a gradient, leaves in `step`
        assert bits == all_at_once


@pytest.fixture
def alone(tmp_path):
    """A transport of one process."""
    yield gossip.connect(0, 1, f"file://{tmp_path / 'store'}")
    gossip.disconnect()


ONE = graphs.static(torch.ones(1, 1, dtype=torch.float64))
SHARED = torch.ones(3)


class Centred(nn.Module):
    """Its buffer is another tensor after every call, as DINO's center is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("center", torch.zeros(2))

    def forward(self, x):
        self.center = 0.9 * self.center + 0.1 * self.linear(x).mean(0).detach()
        return self.linear(x) - self.center


def test_a_buffer_that_is_assigned_anew_is_the_one_that_is_mixed(alone):
    model = Centred()
    inner = sgd(model.parameters())
    optimizer = gossip.wrap(inner, gossip.DPSGD(), ONE, transport=alone, model=model, buffers="mix")
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert model.center.abs().max() > 0
    assert torch.equal(optimizer._buffers.row[0], model.center)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_the_vectors_of_spectral_norm_stay_local(
    alone, norm
):  # their means made a norm 6 % too small, layer after layer
    model = nn.Sequential(norm(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    inner = sgd(model.parameters())
    optimizer = gossip.wrap(inner, gossip.DPSGD(), ONE, transport=alone, model=model, buffers="mix")
    assert optimizer._buffers.names == ["1.running_mean", "1.running_var"]


def test_statistics_of_no_batch_are_refused(alone):
    model = norm_net()
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone, model=model)
    before = model[1].running_mean.clone()
    used_up = iter([torch.ones(2, 3)])
    next(used_up)
    with pytest.raises(ValueError, match="got no batch: pass a loader"), optimizer.average_model(used_up):
        pass
    assert torch.equal(model[1].running_mean, before)


def test_buckets_refuse_what_would_come_too_late(alone):
    model = Net()
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone, buckets=2)
    backward(model, 0, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match=r"of shape \(3, 3\) was changed after backward.*clip gradients and unscale"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a second backward pass before step\(\).*inside no_sync\(\)"):
        backward(model, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": gossip.SGP()}, r"buckets=2, and an exchange of SGP is more than x ← W x"),
        ({"overlap": True}, r"buckets=2 with overlap=True"),
        ({"local_steps": 3}, r"buckets=2 with local_steps=3"),
        ({"buckets": 0}, r"buckets=0 is no whole number of at least 1"),
        ({"buckets": "2"}, r"buckets='2' is no whole number of at least 1"),
        ({"local_steps": 2.5}, r"local_steps=2.5 is no whole number"),
        ({"clock": "live"}, r"with overlap, buckets or mixed buffers"),
    ],
)
def test_buckets_are_refused_where_they_have_no_meaning(alone, options, message):
    options = {"algorithm": gossip.DPSGD(), "buckets": 2} | options
    with pytest.raises((ValueError, gossip.Incompatible), match=message):
        gossip.wrap(sgd(Net().parameters()), options.pop("algorithm"), ONE, transport=alone, **options)


def test_two_overlapping_optimizers_need_a_transport_each(alone):
    models = Net(), Net()
    first, second = (
        gossip.wrap(sgd(m.parameters()), gossip.DPSGD(), ONE, transport=alone, overlap=True) for m in models
    )
    plain(models[0], first, 0, 0)
    with pytest.raises(RuntimeError, match=r"another optimizer is in flight on the same transport.*finish\(\)"):
        plain(models[1], second, 0, 0)
    first.finish()
    plain(models[1], second, 0, 0)


def _twins(rank, size, store, options):
    transport = gossip.connect(rank, size, store)
    models = Net(), Net()
    twins = [
        gossip.wrap(sgd(m.parameters()), gossip.DPSGD(), graphs.complete(2), transport=transport, **options)
        for m in models
    ]
    for _ in range(2):
        for model, optimizer in zip(models, twins):
            plain(model, optimizer, rank, 0)
    with pytest.raises(RuntimeError, match=r"out of step: .*, 1000, .*, and step several optimizers in the same order"):
        plain(models[rank], twins[rank], rank, 1)
    return True


@pytest.mark.parametrize("options", [{}, {"buckets": 2}], ids=["whole", "buckets"])
def test_two_optimizers_of_one_shape_are_not_mixed_with_each_other(options, tmp_path):
    assert values(launch(_twins, 2, tmp_path, options)) == [True] * 2


@pytest.mark.parametrize(
    ("dtype", "algorithm"), [(torch.bfloat16, gossip.DPSGD()), (torch.float64, gossip.SGP())], ids=str
)
def test_a_model_loaded_after_wrap_is_noticed_where_it_would_be_lost(alone, dtype, algorithm):
    """Half-precision parameters are copies of the row, and SGP's show x / w."""
    model, other = Net(dtype=dtype), Net(dtype=dtype)
    optimizer = gossip.wrap(sgd(model.parameters()), algorithm, ONE, transport=alone)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, 0, step, dtype)
        optimizer.step()
    with optimizer.average_model():
        pass
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    backward(model, 0, 2, dtype)
    optimizer.step()
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"was written to after wrap \(model.load_state_dict\).*wrap again"):
        optimizer.step()


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (
            [nn.Parameter(torch.ones(2, dtype=torch.complex64))],
            r"parameter 0 of shape \(2,\) is torch.complex64.*view_as_real",
        ),
        ([("w", nn.LazyLinear(2).weight)], r"parameter 0, w, is lazy.*run one batch"),
        ([nn.Parameter(torch.ones(2, device="meta"))], r"parameter 0 is on the meta device.*initialise or load"),
        (
            [nn.Parameter(SHARED), nn.Parameter(SHARED)],
            r"parameter 1 lies in the same memory as parameter 0.*one nn.Parameter",
        ),
    ],
    ids=["complex", "lazy", "meta", "tied by data"],
)
def test_parameters_that_cannot_be_a_row(alone, params, told):
    with pytest.raises(ValueError, match=told):
        gossip.wrap(sgd(params), gossip.DPSGD(), ONE, transport=alone)


@pytest.mark.parametrize("buckets", [1, 3])
def test_numbers_without_axes_and_parameters_without_numbers(alone, buckets):
    for algorithm in (
        (gossip.DPSGD(),)
        if buckets > 1
        else (
            gossip.SGP(),
            gossip.Choco(compressor=gossip.PerLayer(gossip.LowRank(1)), gamma=0.1),
        )
    ):
        params = [nn.Parameter(torch.full(shape, 2.0)) for shape in ((), (0, 4), (3, 2))]
        fixed = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        options = {"transport": alone, "buckets": buckets}
        optimizer = gossip.wrap(sgd([*params, fixed]), algorithm, ONE, **options)
        for _ in range(2):
            optimizer.zero_grad()
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
        assert [p.shape for p in params] == [(), (0, 4), (3, 2)]
        for p in params:
            torch.testing.assert_close(p.detach(), torch.full_like(p, 2 * 0.8**2))


def test_a_wrapped_optimizer_is_stepped_copied_and_wrapped_by_nobody_else(alone):
    model = Net()
    inner = sgd(model.parameters(), momentum=0.9)
    optimizer = gossip.wrap(inner, gossip.DPSGD(), ONE, transport=alone)
    plain(model, optimizer, 0, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) of the SGD that was wrapped.*what gossip.wrap returned"):
        inner.step()
    with pytest.raises(ValueError, match="this SGD was wrapped before.*build a new optimizer"):
        gossip.wrap(inner, gossip.DPSGD(), ONE, transport=alone)
    for copied in (copy.deepcopy, partial(torch.save, f=io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copied(optimizer)
    plain(model, optimizer, 0, 1)


def test_nothing_is_trained_or_saved_inside_average_model(alone):
    model = Net()
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone)
    for forbidden in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.average_model().__enter__(),
    ):
        with (
            pytest.raises(RuntimeError, match=r"inside average_model\(\).*leave the block first"),
            optimizer.average_model(),
        ):
            forbidden()
    plain(model, optimizer, 0, 0)


def test_state_dicts_of_other_things_are_refused_and_change_nothing(alone):
    def norm(stats):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=stats))
        return gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone, model=model)

    optimizer, other = norm(True), norm(False)
    before = optimizer.row.x.clone()
    two = gossip.wrap(
        sgd([{"params": [p]} for p in norm(True)._model.parameters()]), gossip.DPSGD(), ONE, transport=alone, model=None
    )
    for saved, told in (
        (sgd(Net().parameters()).state_dict(), "state, param_groups and no gossip state.*loaded before wrap"),
        (other.state_dict() | {"gossip": {"x": before + 1}}, "the model has other buffers here"),
        (two.state_dict(), r"parameter groups of \[1, 1, 1, 1\] parameters as saved and \[4\] here"),
    ):
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.row.x, before)

    pair = [("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.ones(2)))]
    saved = gossip.wrap(sgd(pair), gossip.DPSGD(), ONE, transport=alone).state_dict()
    pair = [(name, nn.Parameter(p.detach().clone())) for name, p in pair]
    turned = gossip.wrap(sgd(pair[::-1]), gossip.DPSGD(), ONE, transport=alone)
    with pytest.raises(ValueError, match="the parameters are in another order, a, b as saved and b, a here"):
        turned.load_state_dict(saved)


def test_a_model_beside_the_run_is_saved_once(alone, tmp_path):
    """Its parameters are views of one row, which must not travel with each of them."""
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(10)))
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone)
    gossip.save(tmp_path / "a.pt", optimizer)
    gossip.save(tmp_path / "b.pt", optimizer, model=model.state_dict())
    without, beside = ((tmp_path / name).stat().st_size for name in ("a.pt", "b.pt"))
    assert beside - without == pytest.approx(4 * optimizer.row.layout.d, rel=0.1)


def test_expanded_and_transposed_buffers_are_kept(alone):
    model = Net()
    model.register_buffer("mask", torch.ones(1).expand(3))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    optimizer = gossip.wrap(sgd(model.parameters()), gossip.DPSGD(), ONE, transport=alone, model=model)
    saved = optimizer.state_dict()
    with optimizer.average_model():
        model.mask.data[0], model.turned[0, 1] = 5, 7
    assert model.mask.tolist() == [1, 1, 1]
    assert model.turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    model.turned.zero_()
    optimizer.load_state_dict(saved)
    assert model.turned.tolist() == [[0, 3], [1, 4], [2, 5]]


# -- memory --------------------------------------------------------------------------------------------------------

WIDE = 6 * 2**20  # 24 MiB a row
HELD = {  # rows beyond the model, its gradients and the optimizer's buffers
    "dpsgd": (gossip.DPSGD(), {}, 0),
    "dpsgd, overlap": (gossip.DPSGD(), {"overlap": True}, 2),
    "choco": (gossip.Choco(compressor=gossip.TopK(0.01), gamma=0.1), {}, 3),
    "sgp": (gossip.SGP(), {}, 1),
}


def _held(model, optimizer):
    """Bytes of all storages that some tensor is a view of."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [t for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _memory(rank, size, store):
    transport = gossip.connect(rank, size, store)
    said = {}
    for name, (algorithm, options, _) in HELD.items():
        model = nn.Linear(WIDE // 4, 4, bias=False)
        inner = sgd(model.parameters(), momentum=0.9)
        x = torch.ones(WIDE // 4)

        def step(optimizer, model=model, x=x):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        gc.collect()
        before = _held(model, inner) + 4 * WIDE  # the momentum
        optimizer = gossip.wrap(inner, algorithm, RING, transport=transport, **options)
        for _ in range(2):
            step(optimizer)
        gc.collect()
        said[name] = (_held(model, inner) - before) / (4 * WIDE)
        optimizer.finish()
        del optimizer, inner, model, x, step
        gc.collect()
    gossip.disconnect()
    return said


@pytest.mark.slow
def test_no_row_per_neighbour_is_held(tmp_path):
    """Two neighbours, two chunks of each, and room for payloads."""
    chunks = 2 * 2 * CHUNK / (4 * WIDE)
    for said in values(launch(_memory, N, tmp_path, timeout=110)):
        for name, (_, _, rows) in HELD.items():
            assert said[name] < rows + chunks + 0.1, name


# -- one start of four processes for all of these ------------------------------------------------------------------

PARTS = [bucketed, loops, scaled, half, drifting, buffers, changes, overlapped, joined, some, nodes]


def _run(rank, size, store):
    transport = gossip.connect(rank, size, store)
    said = {}
    for part in PARTS:
        began = time.monotonic()
        said[part.__name__] = part(rank, transport)
        said[part.__name__, "seconds"] = time.monotonic() - began
    gossip.disconnect()
    return said


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What every rank found, by part."""
    return values(launch(_run, N, tmp_path_factory.mktemp("world"), timeout=100))
