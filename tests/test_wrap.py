"""`gossip.wrap` in real processes: the engine's trajectory, torch's optimizers as they are, and refusals that name ranks."""

import copy
import io
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support import launch, values
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

import gossip
import graphs

N, STEPS, BATCH = 4, 6, 5
FUNCTIONAL = nn.functional.mse_loss


class Net(nn.Module):
    """Two layers, and possibly a parameter that no loss depends on."""

    def __init__(self, seed: int = 0, unused: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64)) if unused else None

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def _data(worker: int, step: int):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return (
        torch.randn(BATCH, 3, dtype=torch.float64, generator=generator),
        torch.randn(BATCH, 2, dtype=torch.float64, generator=generator) + worker,
    )


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _backward(model, worker, step):
    inputs, targets = _data(worker, step)
    loss = FUNCTIONAL(model(inputs), targets)
    loss.backward()
    return loss


# -- the engine's trajectory ---------------------------------------------------------------------------------------

_PUSH = torch.tensor(  # column stochastic, not doubly: push-sum weights leave 1
    [[0.5, 0.0, 0.25, 0.5], [0.5, 0.5, 0.25, 0.0], [0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 0.25, 0.5]], dtype=torch.float64
)
_momentum = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
_nesterov = partial(SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True)  # writes into the gradients it is given
_RING = graphs.ring(N)
CASES = {
    "dpsgd": (gossip.DPSGD(_momentum), _RING, 1),
    "dpsgd, Adam, local steps": (gossip.DPSGD(partial(Adam, lr=0.01)), _RING, 3),
    "dpsgd, one peer": (gossip.DPSGD(_momentum), graphs.one_peer_exponential(N), 1),
    "allreduce": (gossip.AllReduce(_momentum), _RING, 1),
    "choco, top-k": (gossip.Choco(_momentum, gossip.TopK(0.2), 0.3), _RING, 1),
    "choco, random-k": (gossip.Choco(_momentum, gossip.RandK(0.2), 0.3), _RING, 2),
    "choco, sign": (gossip.Choco(_momentum, gossip.Sign(), 0.3), _RING, 1),
    "choco, threshold": (gossip.Choco(_momentum, gossip.Threshold(), 0.2), _RING, 1),
    "choco, range-coded": (gossip.Choco(_momentum, gossip.RangeCoded(gossip.TopK(0.2)), 0.3), _RING, 1),
    "choco, low rank": (
        gossip.Choco(_momentum, gossip.PerLayer(gossip.LowRank(1), layout=gossip.Layout.of(Net())), 0.1),
        _RING,
        1,
    ),
    "deepsqueeze": (gossip.DeepSqueeze(_momentum, gossip.TopK(0.2), 0.1), graphs.one_peer_exponential(N), 1),
    "ef_dpsgd": (gossip.EFDPSGD(_momentum, gossip.Sign(), 0.3), _RING, 1),
    "moniqua": (gossip.MoniquaSGD(_momentum, theta=2.0, bits=4), _RING, 1),
    "sgp": (gossip.SGP(_momentum), graphs.static(_PUSH), 1),
    "sgp, local steps": (gossip.SGP(_momentum), graphs.exponential(N), 2),
    "gradient tracking": (gossip.GradientTracking(_momentum), _RING, 1),
    "gradient tracking, nesterov": (gossip.GradientTracking(_nesterov), _RING, 1),
    "exact diffusion": (gossip.ExactDiffusion(_momentum), _RING, 1),
    "d2": (gossip.ExactDiffusion(partial(SGD, lr=0.05), lazy=False), (_RING.n, 0.5), 1),
}


def _mixing(mixing):
    if isinstance(mixing, tuple):  # more self weight
        n, share = mixing
        return share * graphs.metropolis(graphs.ring(n)).to_dense() + (1 - share) * torch.eye(n, dtype=torch.float64)
    return mixing


def _wrapped_runs(rank, size, store):
    transport = gossip.connect(rank, size, store)
    said = {}
    for name, (algorithm, mixing, local_steps) in CASES.items():
        model = Net()
        optimizer = gossip.wrap(
            algorithm.optimizer(model.parameters()),
            algorithm,
            _mixing(mixing),
            local_steps=local_steps,
            transport=transport,
            seed=7,
        )
        rows = []
        for step in range(STEPS):
            optimizer.zero_grad()
            _backward(model, rank, step)
            optimizer.step()
            rows.append(_flat(model))
        said[name] = (torch.stack(rows), int(optimizer.net.meter.bits.sum()), optimizer.rounds)
    gossip.disconnect()
    return said


def test_the_trajectory_of_the_engine_for_every_algorithm(tmp_path):
    assert {type(case[0]).__name__ for case in CASES.values()} == set(gossip.algorithms.__all__)
    said = values(launch(_wrapped_runs, N, tmp_path))
    oracle = gossip.Oracle(Net(), FUNCTIONAL)

    def gradient(x, workers, step):
        batches = [_data(int(w), step) for w in workers]
        return oracle(x, torch.stack([b[0] for b in batches]), torch.stack([b[1] for b in batches]))[0]

    for name, (algorithm, mixing, local_steps) in CASES.items():
        if "nesterov" in name:
            algorithm = gossip.GradientTracking(partial(SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=False))
        start = _flat(Net())
        rounds = STEPS // local_steps
        records = gossip.simulate(
            gradient, algorithm, _mixing(mixing), rounds, x0=start, local_steps=local_steps, seed=7
        )
        for record in records:
            x = torch.stack([said[rank][name][0][record.round * local_steps - 1] for rank in range(N)])
            assert float((x - start).abs().max()) > 1e-3
            torch.testing.assert_close(x, record.x, rtol=0, atol=1e-10, msg=f"{name}, round {record.round}")
        assert [s[name][2] for s in said] == [rounds] * N
        assert sum(s[name][1] for s in said) == record.bits


# -- torch's optimizers as they are, against a loop by hand --------------------------------------------------------


def _groups(make, model):
    """Two groups with learning rates of their own, the unused parameter in the second."""
    return make(
        [
            {"params": model.first.parameters(), "lr": 0.02},
            {"params": [*model.second.parameters(), model.unused], "lr": 0.05},
        ]
    )


OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.1),
    "NAdam": partial(NAdam, lr=0.1),
    "RMSprop": partial(RMSprop, lr=0.1, momentum=0.5),
    "Adagrad": partial(Adagrad, lr=0.1),
}
HAND = {  # optimizer, schedule, local steps, backwards per step
    **{name: (name, graphs.static(graphs.metropolis(graphs.path(N))), 1, 1) for name in OPTIMIZERS},
    "accumulation": ("SGD", graphs.one_peer_exponential(N), 1, 2),
    "three local steps": ("SGD", graphs.one_peer_exponential(N), 3, 1),
    "three local steps, accumulation": ("Adam", graphs.one_peer_exponential(N), 3, 2),
}
HAND_STEPS = 12


def _scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def _by_hand(case):
    """n models, n optimizers, and W X after every so many steps: (steps, n, d)."""
    name, schedule, local_steps, backwards = HAND[case]
    models = [Net(unused=True) for _ in range(N)]
    optimizers = [_groups(OPTIMIZERS[name], model) for model in models]
    schedulers = [_scheduler(optimizer) for optimizer in optimizers]
    rows = []
    for step in range(HAND_STEPS):
        for worker, (model, optimizer, scheduler) in enumerate(zip(models, optimizers, schedulers)):
            optimizer.zero_grad()
            for b in range(backwards):
                _backward(model, worker, step * backwards + b)
            assert model.unused.grad is None
            optimizer.step()
            scheduler.step()
        x = torch.stack([_flat(model) for model in models])
        if (step + 1) % local_steps == 0:
            x = schedule((step + 1) // local_steps - 1).to_dense() @ x
            for model, row in zip(models, x):
                nn.utils.vector_to_parameters(row, model.parameters())
        rows.append(x.clone())  # the parameters are views of x now
    return torch.stack(rows)


def _closure(optimizer, model, worker, steps):
    optimizer.zero_grad()
    return sum(_backward(model, worker, step).detach() for step in steps)


def _wrapped_as_users_do(rank, size, store):
    transport = gossip.connect(rank, size, store)
    said = {}
    for case, (name, schedule, local_steps, backwards) in HAND.items():
        model = Net(unused=True)
        optimizer = _groups(OPTIMIZERS[name], model)
        optimizer = gossip.wrap(optimizer, gossip.DPSGD(), schedule, local_steps=local_steps, transport=transport)
        scheduler = _scheduler(optimizer)
        rows = []
        for step in range(HAND_STEPS):
            closure = partial(_closure, optimizer, model, rank, range(step * backwards, (step + 1) * backwards))
            if case == "Adam":
                assert float(optimizer.step(closure)) > 0
            else:
                closure()
                optimizer.step()
            scheduler.step()
            with torch.no_grad():  # an extra forward, which must count for nothing
                model(_data(rank, 999)[0])
            assert model.unused.grad is None
            rows.append(_flat(model))
        assert optimizer.rounds == HAND_STEPS // local_steps
        assert optimizer.net.meter.edges  # something was sent
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.02 * 0.7**6, 0.05 * 0.7**6])
        optimizer.zero_grad(set_to_none=False)
        assert float(model.first.weight.grad.abs().max()) == 0
        said[case] = torch.stack(rows)
    gossip.disconnect()
    return said


def test_any_optimizer_groups_scheduler_closure_accumulation_and_local_steps(tmp_path):
    said = values(launch(_wrapped_as_users_do, N, tmp_path))
    for case in HAND:
        expected = _by_hand(case)
        got = torch.stack([s[case] for s in said], 1)
        assert float((expected[-1] - expected[-1, 0]).abs().max()) > 1e-3  # disagreement: mixing is partial
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10, msg=case)


# -- state ----------------------------------------------------------------------------------------------------------


RESUMED = {
    "choco": gossip.Choco(compressor=gossip.TopK(0.2), gamma=0.3),
    "sgp": gossip.SGP(),
    "gradient tracking": gossip.GradientTracking(),
    "exact diffusion": gossip.ExactDiffusion(),
    "allreduce": gossip.AllReduce(),
}


def _resumes(rank, size, store):
    transport = gossip.connect(rank, size, store)
    for name, algorithm in RESUMED.items():
        local_steps = 1 if name == "allreduce" else 2
        mixing = graphs.static(_PUSH) if name == "sgp" else _RING

        def start(seed, make=_momentum, algorithm=algorithm, mixing=mixing, local_steps=local_steps):
            model = Net(seed)
            inner = make(model.parameters())
            return model, gossip.wrap(inner, algorithm, mixing, local_steps=local_steps, transport=transport)

        def go(model, optimizer, steps):
            rows = []
            for step in steps:
                optimizer.zero_grad()
                _backward(model, rank, step)
                optimizer.step()
                rows.append(_flat(model))
            return torch.stack(rows)

        model, optimizer = start(0)
        go(model, optimizer, range(5))  # in the middle of two local steps
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        kept = copy.deepcopy(optimizer.state_dict())
        unbroken = go(model, optimizer, range(5, 11))
        assert {k: v.tolist() for k, v in kept["gossip"].items()} != {
            k: v.tolist() for k, v in optimizer.state_dict()["gossip"].items()
        }

        model, optimizer = start(3)  # another model, which the state replaces
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(go(model, optimizer, range(5, 11)), unbroken), name
        optimizer.load_state_dict(kept)  # back, in place
        assert torch.equal(go(model, optimizer, range(5, 11)), unbroken), name

    _, other = start(0)
    with pytest.raises(ValueError, match="load it into the same algorithm"):
        other.load_state_dict({**kept, "gossip": {"x": kept["gossip"]["x"]}})
    gossip.disconnect()
    return True


def test_state_dict_continues_identically(tmp_path):
    assert values(launch(_resumes, N, tmp_path)) == [True] * N


def _starts(rank, size, store):
    gossip.connect(rank, size, store)  # the user's own process group: wrap finds it
    said = {}
    for broadcast in (True, False):
        model = Net(rank)
        own = _flat(model)
        optimizer = gossip.wrap(SGD(model.parameters(), lr=0.1), gossip.DPSGD(), _RING, broadcast=broadcast)
        assert torch.equal(_flat(model), _flat(Net(0)) if broadcast else own)
        said[broadcast] = (optimizer.consensus_distance(), own)

    for broadcast in (
        True,
        False,
    ):  # what is not in the row: a frozen backbone, in the optimizer or not, and any buffer
        model = Net(rank)
        model.first.requires_grad_(False)
        model.register_buffer("order", torch.tensor([rank, 3, 5]))
        frozen = [model.first.weight.clone(), model.first.bias.clone(), model.order.clone()]
        params = [model.first.weight, *model.second.parameters()]
        gossip.wrap(SGD(params, lr=0.1), gossip.DPSGD(), _RING, model=model, broadcast=broadcast)
        told = [Net(0).first.weight, Net(0).first.bias, torch.tensor([0, 3, 5])] if broadcast else frozen
        for p, wanted in zip((model.first.weight, model.first.bias, model.order), told):
            assert torch.equal(p, wanted)

    for name, algorithm in (("dpsgd", gossip.DPSGD()), ("sgp", gossip.SGP())):
        model = Net(rank)
        mixing = graphs.static(_PUSH) if name == "sgp" else _RING
        optimizer = gossip.wrap(SGD(model.parameters(), lr=0.1), algorithm, mixing)
        for step in range(3):
            optimizer.zero_grad()
            _backward(model, rank, step)
            optimizer.step()
        own = _flat(model)
        with optimizer.average_model():
            average = _flat(model)
        assert torch.equal(_flat(model), own)
        with pytest.raises(KeyError), optimizer.average_model():
            model.state_dict()["no such parameter"]
        assert torch.equal(_flat(model), own)
        with optimizer.average_model():  # also after an exception, on all ranks
            assert torch.equal(_flat(model), average)
        said[name] = (own, average, optimizer.consensus_distance())

    with pytest.raises(TypeError, match="got a GossipOptimizer, and takes a torch optimizer that is not wrapped yet"):
        gossip.wrap(optimizer, gossip.DPSGD(), _RING)
    embedding = nn.Embedding(5, 2, sparse=True)
    sparse = gossip.wrap(SGD(embedding.parameters(), lr=0.1), gossip.DPSGD(), _RING)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    sparse.step()
    moved = before - embedding.weight.detach()
    torch.testing.assert_close(moved, torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0])[:, None].expand(5, 2), rtol=0, atol=1e-6)

    with pytest.raises(ValueError, match="parameters cannot be added after wrap: add the group to the optimizer first"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    gossip.disconnect()
    return said


def test_broadcast_average_model_and_consensus_distance(tmp_path):
    said = values(launch(_starts, N, tmp_path))
    assert all(s[True][0] == 0 for s in said)
    apart = gossip.consensus_distance(torch.stack([s[False][1] for s in said]))
    assert apart > 0.1
    assert all(s[False][0] == pytest.approx(apart, rel=1e-12) for s in said)
    for name in ("dpsgd", "sgp"):
        own = torch.stack([s[name][0] for s in said])
        assert float((own - own[0]).abs().max()) > 1e-3
        for _, average, distance in (s[name] for s in said):
            torch.testing.assert_close(average, own.mean(0), rtol=0, atol=1e-14)
            assert distance == pytest.approx(gossip.consensus_distance(own), rel=1e-12)


# -- refusals -------------------------------------------------------------------------------------------------------


DIFFERENT = {  # what one rank does otherwise, and what every rank is told
    "shape": (1, {"model": lambda: nn.Linear(3, 4)}, r"ranks 0 and 1 differ in parameter 0: \(3, 3\).*\(4, 3\)"),
    "number": (3, {"model": lambda: nn.Linear(3, 3, bias=False)}, r"ranks 0 and 3 differ in parameter 1: .*nothing"),
    "dtype": (
        2,
        {"model": lambda: nn.Linear(3, 3).double()},
        r"ranks 0 and 2 differ in parameter 0: .*float32.*float64",
    ),
    "frozen": (1, {"frozen": True}, r"ranks 0 and 1 differ in parameter 0: .*frozen"),
    "model": (1, {"model_of_buffers": nn.BatchNorm1d(3)}, r"ranks 0 and 1 differ in model=: not given at rank 0"),
    "broadcast": (1, {"broadcast": False}, r"ranks 0 and 1 differ in broadcast: True at rank 0, False at rank 1"),
    "gamma": (1, {"algorithm": gossip.Choco(gamma=0.5)}, r"ranks 0 and 1 differ in algorithm: .*gamma=1.*gamma=0.5"),
    "algorithm": (2, {"algorithm": gossip.DPSGD()}, r"ranks 0 and 2 differ in algorithm: Choco.*DPSGD"),
    "schedule": (3, {"mixing": graphs.complete(N)}, r"ranks 0 and 3 differ in schedule"),
    "local steps": (1, {"local_steps": 2}, r"ranks 0 and 1 differ in local_steps: 1 at rank 0, 2 at rank 1"),
    "seed": (1, {"seed": 5}, r"ranks 0 and 1 differ in seed: 0 at rank 0, 5 at rank 1"),
}


def _disagrees(rank, size, store):
    transport = gossip.connect(rank, size, store)

    def wrapped(
        model=lambda: nn.Linear(3, 3), algorithm=None, mixing=_RING, frozen=False, model_of_buffers=None, **options
    ):
        module = model()
        options["model"] = model_of_buffers
        module.weight.requires_grad_(not frozen)
        algorithm = algorithm or gossip.Choco(lambda params: SGD(params, lr=0.1), gamma=1.0)  # its repr has an address
        return gossip.wrap(SGD(module.parameters(), lr=0.1), algorithm, mixing, transport=transport, **options)

    for name, (odd, changes, told) in DIFFERENT.items():
        with pytest.raises(ValueError) as caught:
            wrapped(**(changes if rank == odd else {}))
        assert re.search(told, str(caught.value)), (name, str(caught.value))
        assert "every rank must build the same" in str(caught.value)

    for options, kind, told in (
        ({"mixing": graphs.ring(5)}, ValueError, "5 workers and there are 4 processes.*start 5 processes"),
        ({"mixing": graphs.one_peer_exponential(N)}, gossip.Incompatible, "Choco.*static.*W.1. differs from W.0."),
        ({"mixing": graphs.exponential(N)}, gossip.Incompatible, "symmetric"),
        ({"local_steps": 0}, ValueError, "local_steps=0 is no whole number of at least 1"),
        ({"algorithm": gossip.AllReduce(), "local_steps": 2}, gossip.Incompatible, "AllReduce averages every gradient"),
    ):
        with pytest.raises(kind) as caught:
            wrapped(**options)
        assert re.search(told, str(caught.value)), str(caught.value)

    named = list(nn.LayerNorm(3).named_parameters())
    with pytest.raises(ValueError, match=r"ranks 0 and 2 differ in parameter 0: weight \(3,\).*at rank 0, bias \(3,\)"):
        gossip.wrap(SGD(named[::-1] if rank == 2 else named), gossip.DPSGD(), _RING, transport=transport)
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("odd", torch.zeros(3 + rank // 3))
    with pytest.raises(ValueError, match=r"ranks 0 and 3 differ in frozen parameter or buffer 3: \(3,\).*\(4,\)"):
        gossip.wrap(SGD(norm.parameters()), gossip.DPSGD(), _RING, transport=transport, model=norm)

    wrapped()  # all of that has left the processes in step
    gossip.disconnect()
    return True


def test_ranks_that_differ_are_named_and_wrong_options_refused(tmp_path):
    assert values(launch(_disagrees, N, tmp_path)) == [True] * N


def test_without_processes():
    with pytest.raises(RuntimeError, match="RANK is not set.*torchrun --nproc-per-node"):
        gossip.wrap(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), gossip.DPSGD(), _RING)


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "told"),
    [
        (nn.Linear(2, 2), gossip.DPSGD(), "got a Linear, and takes a torch optimizer"),
        (torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]), gossip.DPSGD(), "LBFGS evaluates the loss several times"),
        (SGD([nn.Parameter(torch.zeros(2))], lr=0.1), gossip.DPSGD, "pass an instance, such as gossip.DPSGD()"),
    ],
)
def test_what_is_no_optimizer_or_algorithm(optimizer, algorithm, told):
    with pytest.raises(TypeError, match=re.escape(told)):
        gossip.wrap(optimizer, algorithm, _RING)


# -- the script of the README ---------------------------------------------------------------------------------------


def test_own_loop_under_torchrun(tmp_path):
    """The very script that the README shows."""
    root = Path(gossip.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        + ["-m", "experiments.own_loop"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy ([\d.]+), consensus distance ([\d.e-]+), (\d+) rounds", done.stdout)
    assert found, done.stdout
    accuracy, distance, rounds = float(found[1]), float(found[2]), int(found[3])
    assert accuracy > 0.8
    assert 0 < distance < 10
    assert rounds == 10 * (375 // 32)


def _diverges(rank, size, store):
    transport = gossip.connect(rank, size, store)
    model, algorithm = Net(), gossip.Choco(compressor=gossip.TopK(0.5))
    optimizer = gossip.wrap(SGD(model.parameters(), lr=0.1), algorithm, graphs.ring(size), transport=transport)
    if rank == 1:
        _backward(model, 0, 0)
        model.second.weight.grad[1, 2] = torch.nan
        with pytest.raises(gossip.NotFinite, match=r"\(worker 1\).* first in parameter 2 of shape \(2, 4\)"):
            optimizer.step()
    return True


def test_who_diverged_is_named_with_the_parameter(tmp_path):
    assert values(launch(_diverges, 2, tmp_path)) == [True] * 2
