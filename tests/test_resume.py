"""`gossip.save` and `gossip.load`: a loop of one's own goes on bit by bit, elsewhere, with other numbers, or not at all."""

import copy
import os
import random
import re
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from support import launch, values
from torch import nn
from torch.optim import SGD, Adam

import gossip
import graphs
from gossip import checkpoint, tree

N, MIDDLE, END = 4, 5, 9
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """With dropout, which draws from torch's global random state, and with statistics of each worker's own."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return self.second(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.3))


def ring(n=N):
    return graphs.static(graphs.metropolis(graphs.ring(n)))


PUSH = graphs.static(  # column stochastic, not doubly: push-sum weights leave 1
    torch.tensor([[0.5, 0, 0.25, 0.5], [0.5, 0.5, 0.25, 0], [0, 0.5, 0.25, 0], [0, 0, 0.25, 0.5]], dtype=torch.float64)
)
CASES = {
    "choco": (gossip.Choco(compressor=gossip.RandK(0.2), gamma=0.3), {}, MOMENTUM),
    "choco, overlapped": (gossip.Choco(compressor=gossip.TopK(0.2), gamma=0.3), {"overlap": True}, MOMENTUM),
    "sgp": (gossip.SGP(), {"local_steps": 2}, partial(Adam, lr=0.01)),
    "sgp, overlapped": (gossip.SGP(), {"overlap": True}, MOMENTUM),
    "gradient tracking": (gossip.GradientTracking(), {}, MOMENTUM),
    "buffers mixed": (gossip.DPSGD(), {"buffers": "mix"}, partial(Adam, lr=0.01)),
}


def started(case, transport, seed=0):
    algorithm, options, make = CASES[case]
    model = Net(seed)
    schedule = PUSH if "sgp" in case and transport.size == N else ring(transport.size)
    optimizer = gossip.wrap(make(model.parameters()), algorithm, schedule, model=model, transport=transport, **options)
    return model, optimizer


def trained(model, optimizer, steps, generator):
    """Steps on data from a generator of the worker's own; every step's loss, and the numbers of two global generators."""
    losses = []
    for _ in steps:
        optimizer.zero_grad()
        inputs = torch.randn(6, 3, dtype=torch.float64, generator=generator)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), random.random(), numpy.random.random()))  # noqa: NPY002
    return losses


def seeded(rank):
    random.seed(rank)
    numpy.random.seed(rank)  # noqa: NPY002
    torch.manual_seed(100 + rank)
    return torch.Generator().manual_seed(rank)


def end(model, optimizer):
    bits = optimizer.net.meter.bits.sum()
    return [t.clone() for t in (*model.state_dict().values(), bits, torch.tensor(optimizer.net.meter.wire_bytes))]


def _unbroken(rank, size, store, folder):
    transport = gossip.connect(rank, size, store)
    said = {}
    for case in CASES:
        model, optimizer = started(case, transport)
        generator = seeded(rank)
        trained(model, optimizer, range(MIDDLE), generator)
        gossip.save(Path(folder, f"{case}.pt"), optimizer, rank=rank, generator=generator.get_state())
        said[case] = trained(model, optimizer, range(MIDDLE, END), generator), end(model, optimizer)
        said[case] += ([g["lr"] for g in optimizer.param_groups],)
    gossip.disconnect()
    return said


def _goes_on(rank, size, store, folder):
    """Other processes, seeded otherwise, with another model until the file is loaded; only rank 0 sees the folder."""
    transport = gossip.connect(rank, size, store)
    folder = folder if rank == 0 else "/nowhere"
    said = {}
    for case in CASES:
        model, optimizer = started(case, transport, seed=7)
        seeded(50 + rank)
        extra = gossip.load(Path(folder, f"{case}.pt"), optimizer)
        assert extra["rank"] == rank
        assert optimizer.steps == MIDDLE
        generator = torch.Generator()
        generator.set_state(extra["generator"])
        said[case] = trained(model, optimizer, range(MIDDLE, END), generator), end(model, optimizer)
        said[case] += ([g["lr"] for g in optimizer.param_groups],)

    _refusals(rank, transport, folder)
    gossip.disconnect()
    return said


def _told(kind, pattern, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def _refusals(rank, transport, folder):
    """Every rank is told the same, nothing has changed, and the ranks are in step afterwards."""
    model, optimizer = started("choco", transport)
    before = end(model, optimizer)
    path = Path(folder, "choco.pt")
    _told(FileNotFoundError, "no checkpoint at .*none.pt", gossip.load, Path(folder, "none.pt"), optimizer)
    assert gossip.load(Path(folder, "none.pt"), optimizer, optional=True) is None
    _told(ValueError, "Adam, and this run has SGD", gossip.load, Path(folder, "sgp.pt"), optimizer)
    other = gossip.wrap(MOMENTUM(Net().parameters()), gossip.DPSGD(), ring(), transport=transport)
    _told(ValueError, r"does not fit \(rank 0: hat is .*rank 3: hat is", gossip.load, path, other)
    without = gossip.wrap(MOMENTUM(Net().parameters()), CASES["choco"][0], ring(), transport=transport)
    _told(ValueError, r"other buffers here, or model=", gossip.load, path, without)
    wider = gossip.wrap(MOMENTUM(nn.Linear(3, 4).parameters()), CASES["choco"][0], ring(), transport=transport)
    _told(
        ValueError,
        r"x is \(\(1, 34\), torch.float64\) as saved and \(\(1, 16\), torch.float32\)",
        gossip.load,
        path,
        wider,
    )
    if rank == 2:  # a rank that cannot restore its part
        model.norm.register_buffer("odd", torch.zeros(1))
    _told(ValueError, r"does not fit \(rank 2: the model has other buffers", gossip.load, path, optimizer)
    if rank == 2:
        del model.norm.odd

    written = path.read_bytes() if rank == 0 else None
    _told(TypeError, r"got a SGD.*save the state_dict\(\)", gossip.save, path, optimizer.inner)
    _told(TypeError, r"got a SGD.*save the state_dict\(\)", gossip.load, path, optimizer.inner)
    made = (lambda: 0) if rank == 1 else None  # not even to be sent
    _told(TypeError, "rank 1: made is of type function", gossip.save, path, optimizer, made=made)
    optimizer.steps += rank == 1
    _told(ValueError, r"the ranks have taken \[0, 1, 0, 0\] steps", gossip.save, path, optimizer)
    optimizer.steps -= rank == 1
    extra = numpy.float64(1) if rank == 1 else 1.0
    _told(TypeError, "rank 1: loss is of type float64.*item", gossip.save, path, optimizer, loss=extra)
    if rank == 0:
        fsync, os.fsync = os.fsync, lambda fd: (_ for _ in ()).throw(OSError("disk full"))
    _told(OSError, "disk full", gossip.save, path, optimizer)
    if rank == 0:
        os.fsync = fsync
        assert path.read_bytes() == written
        path.with_name("torn.pt").write_bytes(written[: len(written) // 2])
    _told(ValueError, "torn.pt cannot be read as a checkpoint", gossip.load, Path(folder, "torn.pt"), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(end(model, optimizer), before))
    gossip.load(path, optimizer)


def _with_fewer(rank, size, store, folder):
    transport = gossip.connect(rank, size, store)
    said = {}
    for case in ("choco, overlapped", "sgp", "buffers mixed"):
        model, optimizer = started(case, transport)
        path = Path(folder, f"{case}.pt")
        _told(ValueError, f"holds n=4 workers and this run has n={size}: .*average=True", gossip.load, path, optimizer)
        seeded(rank)
        drawn = torch.rand(1)
        seeded(rank)
        with pytest.warns() if rank == 0 else torch.no_grad() as caught:
            extra = gossip.load(path, optimizer, average=True)
        assert torch.rand(1) == drawn, "the random state of another run's rank"
        assert extra["rank"] == 0
        warned = str(caught[0].message) if rank == 0 else ""
        said[case] = warned, optimizer.steps, optimizer.consensus_distance(), end(model, optimizer)
        said[case] += (copy.deepcopy(optimizer.state_dict()["inner"]),)
        trained(model, optimizer, range(3), torch.Generator())
        assert optimizer.consensus_distance() < 1
    gossip.disconnect()
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, values(launch(_unbroken, N, folder, str(folder)))


def test_a_run_goes_on_bit_by_bit_in_other_processes(saved, tmp_path):
    folder, unbroken = saved
    resumed = values(launch(_goes_on, N, tmp_path, str(folder)))
    for case in CASES:
        for rank in range(N):
            assert resumed[rank][case][0] == unbroken[rank][case][0], (case, rank)
            assert resumed[rank][case][2] == unbroken[rank][case][2]
            for a, b in zip(resumed[rank][case][1], unbroken[rank][case][1]):
                assert torch.equal(a, b), (case, rank)
        assert len({str(said[case][0]) for said in unbroken}) == N, "the ranks draw the same"
    assert not list(folder.glob("*.part"))


def test_a_file_holds_tensors_and_plain_types_only(saved):
    table = torch.load(saved[0] / "choco, overlapped.pt", weights_only=True)
    assert table == table | {"version": checkpoint.VERSION, "n": N, "round": MIDDLE, "steps": MIDDLE}
    assert {name: len(leaf) for name, leaf in table["leaves"].items()} == dict.fromkeys(["x", "hat", "lag", "r"], N)
    assert all(worker["in_flight"] is not None for worker in table["workers"])
    assert len({worker["random"]["python"] for worker in table["workers"]}) == N


def test_another_number_of_workers_starts_at_the_average(saved, tmp_path):
    said = values(launch(_with_fewer, 2, tmp_path, str(saved[0])))
    for case, (warned, steps, distance, state, inner) in said[0].items():
        table = checkpoint.read(saved[0] / f"{case}.pt")
        assert "n=4 workers is resumed by n=2: every worker starts at their average model" in warned
        assert ("memory of Choco (hat, lag, r) starts anew" in warned) == ("choco" in case)
        assert (steps, distance) == (MIDDLE, 0.0)
        leaves = table["leaves"]
        models = leaves["x"] / leaves["w"] if case == "sgp" else leaves["x"]
        torch.testing.assert_close(torch.cat([t.flatten() for t in state[:4]]), models.mean(0)[:26], rtol=0, atol=1e-14)
        key = next(iter(inner["state"][0]))
        for i, buffers in inner["state"].items():
            expected = torch.stack([worker["inner"]["state"][i][key] for worker in table["workers"]]).mean(0)
            torch.testing.assert_close(buffers[key], expected, rtol=0, atol=1e-15)
        running = torch.stack([worker["buffers"][0] for worker in table["workers"]]).mean(0)
        assert any(torch.allclose(t, running, rtol=0, atol=1e-15) for t in state if t.shape == running.shape)
        per_worker = sum(table["meter"]["counts"][1].tolist()) // N
        assert int(said[0][case][3][-2]) == per_worker


def _plain_loop(rank, size, store, folder):
    """Without dropout and statistics: a trajectory that a simulation can continue."""
    transport = gossip.connect(rank, size, store)
    said = {}
    for name, make in {"momentum": MOMENTUM, "adam": partial(Adam, lr=0.01)}.items():
        torch.manual_seed(0)
        model = nn.Conv2d(2, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
        algorithm = gossip.Choco(compressor=gossip.TopK(0.3), gamma=0.3)
        optimizer = gossip.wrap(make(model.parameters()), algorithm, ring(), transport=transport)
        for step in range(END):
            if step == MIDDLE:
                gossip.save(Path(folder, f"{name}.pt"), optimizer)
            optimizer.zero_grad()
            sum((p.square().sum() * (1 + rank + 0.1 * step)) for p in model.parameters()).backward()
            optimizer.step()
        said[name] = optimizer.row.x[0].clone()
    gossip.disconnect()
    return said


def test_a_simulation_goes_on_from_real_workers(tmp_path):
    said = values(launch(_plain_loop, N, tmp_path, str(tmp_path)))
    for name, make in {"momentum": MOMENTUM, "adam": partial(Adam, lr=0.01)}.items():
        algorithm = gossip.Choco(make, gossip.TopK(0.3), 0.3)
        net = gossip.Network(ring())
        state = algorithm.init(torch.zeros(N, 27, dtype=torch.float64))
        begin = checkpoint.restore(checkpoint.read(tmp_path / f"{name}.pt"), state, net)
        assert begin == MIDDLE
        factor = torch.arange(N, dtype=torch.float64)[:, None] + 1
        clock = gossip.lockstep(algorithm, lambda x, t, f=factor: 2 * x * (f + 0.1 * t), net, state, END, begin)
        for _, last in clock:
            state = last
        torch.testing.assert_close(state.x, torch.stack([s[name] for s in said]), rtol=0, atol=1e-12)
        assert len(tree.leaves(state)) > 4


@pytest.mark.parametrize(
    ("case", "reason"),
    [("choco, overlapped", "a message is in flight"), ("sgp", "step 5, in the middle of a round")],
)
def test_a_simulation_refuses_what_rows_do_not_have(saved, case, reason):
    table, state = checkpoint.read(saved[0] / f"{case}.pt"), gossip.DPSGD().init(torch.zeros(N, 34))
    with pytest.raises(ValueError, match=f"{reason}.*load it by gossip.load"):
        checkpoint.restore(table, state, gossip.Network(ring()))
