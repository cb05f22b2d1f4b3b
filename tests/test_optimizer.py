"""Any element-wise torch optimizer on a stack of rows, and no other (gossip/optimizer.py)."""

import copy
import functools
import inspect

import pytest
import torch
from torch.optim import lr_scheduler

import gossip
from gossip import LocalOptimizer

partial = functools.partial
M, D, STEPS = 3, 7, 6
NOT_ELEMENT_WISE = {"Adafactor", "LBFGS", "Muon"}
NOT_FOR_DENSE = {"SparseAdam", "Optimizer"}
CLASSES = {name: cls for name, cls in vars(torch.optim).items() if inspect.isclass(cls)}
FOUND = {name: cls for name, cls in CLASSES.items() if issubclass(cls, torch.optim.Optimizer)}
ELEMENT_WISE = sorted(set(FOUND) - NOT_ELEMENT_WISE - NOT_FOR_DENSE)
SETTINGS = {"": {}, "decay": {"weight_decay": 0.1}, "foreach": {"foreach": True}, "maximize": {"maximize": True}}


def settings_of(cls) -> list[dict]:
    """The settings that an optimizer's signature knows; SGD also with Nesterov momentum."""
    known = inspect.signature(cls).parameters
    out = [s for s in SETTINGS.values() if set(s) <= set(known)]
    if cls is torch.optim.SGD:
        out += [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "foreach": True}]
    return out


CASES = [
    pytest.param(partial(FOUND[n], lr=0.05, **s), id=f"{n} {s}") for n in ELEMENT_WISE for s in settings_of(FOUND[n])
]


def gradients(step: int, dtype=torch.float64) -> torch.Tensor:
    g = torch.randn(M, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return g.to(dtype)


def start(dtype=torch.float64) -> torch.Tensor:
    return gradients(100, dtype)


def test_the_optimizers_in_use_are_among_those_tested():
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"} <= set(ELEMENT_WISE)


@pytest.mark.parametrize("factory", CASES)
def test_a_stack_steps_as_each_row_alone_with_its_own_torch_optimizer(factory):
    x = start()
    local = LocalOptimizer(factory, x)
    alone = [torch.nn.Parameter(row.clone()) for row in x]
    own = [factory([p]) for p in alone]
    for optimizer in own:
        optimizer.param_groups[0]["foreach"] = False  # torch's two forms of ASGD differ in the last digits of float32
    for step in range(STEPS):
        g = gradients(step)
        local.step(x, g)
        assert torch.equal(g, gradients(step)), "the gradient was written to"
        for p, optimizer, row in zip(alone, own, g):
            p.grad = row.clone()
            optimizer.step()
    assert torch.allclose(x, torch.stack([p.detach() for p in alone]), rtol=1e-12, atol=1e-12)
    assert (x - start()).abs().max() > 1e-4


@pytest.mark.parametrize("factory", CASES)
def test_buffers_are_rows_and_some_rows_can_be_taken_along(factory):
    x = start()
    local = LocalOptimizer(factory, x)
    for step in range(3):
        local.step(x, gradients(step))
    assert all(v.ndim == 0 or v.shape == (M, D) for v in local.tensors.values())
    some = torch.tensor([2, 0])
    mine, part = x[some], local.take(some)
    for step in range(3, STEPS):
        part.step(mine, gradients(step)[some])
    for step in range(3, STEPS):
        local.step(x, gradients(step))
    assert torch.allclose(mine, x[some], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("factory", CASES)
def test_saved_and_loaded_midway_it_goes_on_as_before(factory, tmp_path):
    x = start()
    local = LocalOptimizer(factory, x)
    for step in range(3):
        local.step(x, gradients(step))
    torch.save({"x": x, "tensors": local.tensors, "plain": local.plain}, tmp_path / "saved.pt")
    for step in range(3, STEPS):
        local.step(x, gradients(step))
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = LocalOptimizer(factory, saved["x"])
    again.load(saved["tensors"], saved["plain"])
    for step in range(3, STEPS):
        again.step(saved["x"], gradients(step))
    assert torch.equal(saved["x"], x)


@pytest.mark.parametrize("name", sorted(NOT_ELEMENT_WISE & set(FOUND)))
def test_what_would_leak_between_workers_is_refused_by_name(name):
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"{name}.*use an element-wise torch\.optim optimizer"):
            LocalOptimizer(FOUND[name], torch.zeros(rows, 8))


class Clipped(torch.optim.SGD):
    """SGD on gradients clipped by their global norm."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_clipping_by_global_norm_is_refused():
    with pytest.raises(ValueError, match="Clipped is not element-wise: stepping two workers' rows together differs"):
        LocalOptimizer(partial(Clipped, lr=0.1), torch.zeros(2, 3))


def test_a_refusal_comes_when_the_algorithm_starts():
    with pytest.raises(ValueError, match="Muon"):
        gossip.DPSGD(optimizer=torch.optim.Muon).init(torch.zeros(4, 3))


def test_the_probe_leaves_the_rows_alone():
    x = start()
    LocalOptimizer(partial(torch.optim.Adam, lr=0.1), x)
    assert torch.equal(x, start())


def test_rows_are_stepped_in_place():
    x = start()
    pointer = x.data_ptr()
    LocalOptimizer(gossip.sgd, x).step(x, torch.ones_like(x))
    assert x.data_ptr() == pointer
    assert torch.allclose(x, start() - 0.1)
    assert not x.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_other_dtypes(dtype):
    x = start(dtype)
    local = LocalOptimizer(partial(torch.optim.SGD, lr=0.5, momentum=0.5), x)
    local.step(x, gradients(0, dtype))
    assert x.dtype == dtype
    assert torch.allclose(x.double(), start(dtype).double() - 0.5 * gradients(0, dtype).double(), rtol=1e-2, atol=1e-2)


def test_integer_rows_are_refused_by_dtype():
    with pytest.raises(ValueError, match=r"dtype torch\.int64 cannot.*rows\.double\(\)"):
        LocalOptimizer(gossip.sgd, torch.zeros(2, 3, dtype=torch.int64))


# -- schedulers ----------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: 1 / (1 + k)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=10),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "multi step": partial(lr_scheduler.MultiStepLR, milestones=[1, 4]),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's own SequentialLR causes it
def test_a_scheduler_ticks_once_per_local_step_and_is_saved(name, tmp_path):
    scheduler, optimizer = SCHEDULERS[name], partial(torch.optim.SGD, lr=0.2, momentum=0.5)
    p = torch.nn.Parameter(start())
    plain = optimizer([p])
    ticking = scheduler(plain)
    x = start()
    local = LocalOptimizer(gossip.scheduled(optimizer, scheduler), x)
    for step in range(STEPS):
        assert local.lr == pytest.approx(plain.param_groups[0]["lr"], rel=1e-14)
        if step == 3:
            saved = {"x": x.clone(), "tensors": copy.deepcopy(local.tensors), "plain": local.plain}
            torch.save(saved, tmp_path / "saved.pt")
        local.step(x, gradients(step))
        p.grad = gradients(step)
        plain.step()
        ticking.step()
    assert torch.allclose(x, p.detach(), rtol=1e-13, atol=1e-13)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = LocalOptimizer(gossip.scheduled(optimizer, scheduler), saved["x"])
    again.load(saved["tensors"], saved["plain"])
    for step in range(3, STEPS):
        again.step(saved["x"], gradients(step))
    assert torch.equal(saved["x"], x)
    assert again.lr == local.lr


def test_local_steps_tick_the_scheduler_each():
    import graphs

    factory = gossip.scheduled(partial(torch.optim.SGD, lr=1.0), partial(lr_scheduler.StepLR, step_size=1, gamma=0.5))
    records = gossip.simulate(
        lambda x, *_: torch.ones_like(x), gossip.DPSGD(factory), graphs.ring(4), 2, x0=torch.zeros(2), local_steps=3
    )
    *_, last = records
    assert torch.allclose(last.x, torch.full((4, 2), -sum(0.5**k for k in range(6))))


def test_taken_rows_tick_on_their_own():
    x = start()
    local = LocalOptimizer(gossip.scheduled(gossip.sgd, SCHEDULERS["step"]), x)
    part = local.take(torch.tensor([1]))
    mine = x[[1]]
    for step in range(4):
        part.step(mine, gradients(step)[[1]])
    assert part.lr == pytest.approx(0.025)
    assert local.lr == pytest.approx(0.1)
