"""Gradients of all rows at once equal those of a model after the other (gossip/oracle.py)."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip import Layout, Oracle, rng

M, B = 4, 5


class Tied(nn.Module):
    """One matrix as encoder and decoder, and a parameter that no output depends on."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


class Branching(nn.Module):
    """Control flow that depends on the data: vmap refuses it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else 2 * y


class Scaled(nn.Module):
    """A scalar parameter and a constant buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        return self.scale * self.linear(x) + self.shift


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x[..., 0].abs().long().clamp(max=4)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def mlp(*between):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *between, nn.Linear(8, 3))


def instance_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(64, 3)
    )


MODELS = {
    "mlp": (mlp, (6,), "classes", True),
    "cnn": (cnn, (1, 6, 6), "classes", True),
    "batch statistics": (instance_norm, (1, 6, 6), "classes", True),
    "tied and unused": (Tied, (6,), "vector", True),
    "scalar and buffer": (Scaled, (6,), "classes", True),
    "branching": (Branching, (6,), "classes", False),
    "recurrent": (Recurrent, (6,), "classes", None),
    "sparse gradients": (Embedded, (6,), "classes", None),
}


def problem(name):
    """A model, loss, M different rows, and each row's batch, in float64."""
    make, shape, kind, vectorised = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    d = Layout.of(model).d
    x = Layout.of(model).flatten(model) + 0.1 * torch.randn(M, d, dtype=torch.float64)
    inputs = torch.randn(M, B, *shape, dtype=torch.float64)
    if kind == "classes":
        return model, F.cross_entropy, x, inputs, torch.randint(0, 3, (M, B)), vectorised
    return model, F.mse_loss, x, inputs, torch.randn(M, B, *shape, dtype=torch.float64), vectorised


def one_by_one(model, loss, x, inputs, targets):
    """Ordinary training code: a module per worker, backward, its gradients in the order of its parameters."""
    grads, losses = [], []
    for i in range(len(x)):
        worker = copy.deepcopy(model).train()
        for (_, p), value in zip(worker.named_parameters(), Layout.of(model).views(x[i]).values()):
            p.data.copy_(value)
        value = loss(worker(inputs[i]), targets[i])
        value.backward()
        grads.append(
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten() for p in worker.parameters()]
            )
        )
        losses.append(value.detach())
    return torch.stack(grads), torch.stack(losses)


@pytest.mark.parametrize("name", MODELS)
def test_vmap_loop_and_per_model_autograd_agree(name):
    model, loss, x, inputs, targets, vectorised = problem(name)
    copies = x.clone(), inputs.clone(), targets.clone()
    template = copy.deepcopy(model.state_dict())
    g, losses = one_by_one(model, loss, x, inputs, targets)
    oracle = Oracle(model, loss)
    for _ in range(2):
        found, value = oracle(x, inputs, targets)
        assert torch.allclose(found, g, rtol=0, atol=1e-10)
        assert torch.allclose(value, losses, rtol=0, atol=1e-10)
        assert not found.requires_grad
        assert not value.requires_grad
    assert vectorised in (None, oracle._vectorised)
    looping = Oracle(model, loss)
    looping._vectorised = False
    found, value = looping(x, inputs, targets)
    assert torch.allclose(found, g, rtol=0, atol=1e-10)
    assert torch.allclose(value, losses, rtol=0, atol=1e-10)
    for held, before in zip((x, inputs, targets), copies):
        assert torch.equal(held, before)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in template.items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_those_of_each_model_in_evaluation_mode(name):
    model, loss, x, inputs, targets, _ = problem(name)
    oracle = Oracle(model, loss)
    found = oracle.predict(x, inputs[0])
    assert not found.requires_grad
    for i in range(M):
        worker = copy.deepcopy(model).eval()
        for p, value in zip(worker.parameters(), Layout.of(model).views(x[i]).values()):
            p.data.copy_(value)
        assert torch.allclose(found[i], worker(inputs[0]), rtol=0, atol=1e-10)
    oracle(x, inputs, targets)  # may have turned to the loop
    assert torch.allclose(oracle.predict(x, inputs[0]), found, rtol=0, atol=1e-12)


def test_the_gradient_is_borrowed_until_the_next_call():
    model, loss, x, inputs, targets, _ = problem("mlp")
    oracle = Oracle(model, loss)
    first, _ = oracle(x, inputs, targets)
    second, _ = oracle(x, inputs, targets)
    assert first.data_ptr() == second.data_ptr()
    fewer, _ = oracle(x[:2], inputs[:2], targets[:2])
    assert torch.allclose(fewer, first[:2], rtol=0, atol=1e-12)


def test_rows_of_another_dtype_get_gradients_of_that_dtype():
    model, loss, x, inputs, targets, _ = problem("mlp")
    oracle = Oracle(model, loss)
    exact = oracle(x, inputs, targets)[0].clone()
    g, _ = oracle(x.float(), inputs.float(), targets)
    assert g.dtype == torch.float32
    assert torch.allclose(g.double(), exact, rtol=0, atol=1e-5)
    assert oracle(x, inputs, targets)[0].dtype == torch.float64


def test_the_fallback_is_logged_once_and_works_without_gradients_enabled(caplog):
    model, loss, x, inputs, targets, _ = problem("branching")
    oracle = Oracle(model, loss)
    expected = one_by_one(model, loss, x, inputs, targets)[0]
    with caplog.at_level(logging.INFO, "gossip.oracle"), torch.no_grad():
        for _ in range(3):
            assert torch.allclose(oracle(x, inputs, targets)[0], expected, rtol=0, atol=1e-10)
    assert [r.message for r in caplog.records if "loop over rows" in r.message] == [caplog.records[0].message]


# -- dropout -------------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_the_keys_alone():
    torch.manual_seed(0)
    model = mlp(nn.Dropout(0.5)).double()
    d = Layout.of(model).d
    x = Layout.of(model).flatten(model).expand(M, d).clone()
    inputs, targets = torch.randn(1, 64, 6).double().expand(M, 64, 6), torch.randint(0, 3, (1, 64)).expand(M, 64)
    keys = rng.key(0, "dropout", 3, torch.arange(M))
    oracle = Oracle(model, F.cross_entropy)
    first = oracle(x, inputs, targets, keys)[0].clone()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = oracle(x, inputs, targets, keys)[0].clone()
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was consumed"
    part = oracle(x[[2, 0]], inputs[:2], targets[:2], keys[[2, 0]])[0].clone()
    assert torch.equal(part, first[[2, 0]])
    assert not torch.allclose(first[0], first[1], atol=1e-3)  # masks differ between workers
    other = oracle(x, inputs, targets, rng.key(0, "dropout", 4, torch.arange(M)))[0]
    assert not torch.allclose(other, first, atol=1e-3)


class Noisy(nn.Module):
    """A random layer that is no dropout, as stochastic depth is none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x + torch.randn_like(x))


def test_any_randomness_depends_on_the_keys_alone():
    oracle = Oracle(Noisy(), F.cross_entropy)
    x = Layout.of(Noisy()).flatten(Noisy()).expand(M, -1).clone()
    inputs, targets, keys = torch.zeros(M, B, 6), torch.zeros(M, B).long(), rng.key(0, "noise", torch.arange(M))
    first = oracle(x, inputs, targets, keys)[0].clone()
    assert oracle.draws
    torch.manual_seed(7)
    assert torch.equal(oracle(x[1:2], inputs[:1], targets[:1], keys[1:2])[0][0], first[1])
    plain = Oracle(mlp(nn.ReLU()), F.cross_entropy)
    plain(Layout.of(plain.model).flatten(plain.model)[None], inputs[:1], targets[:1])
    assert not plain.draws


def test_dropout_is_off_in_predictions():
    model = mlp(nn.Dropout(0.5))
    oracle, x = Oracle(model, F.cross_entropy), Layout.of(model).flatten(model)[None]
    inputs = torch.randn(8, 6)
    assert torch.allclose(oracle.predict(x, inputs)[0], model.eval()(inputs), atol=1e-6)
    assert torch.equal(oracle.predict(x, inputs), oracle.predict(x, inputs))


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_running_statistics_are_refused_by_name(norm):
    name = type(norm).__name__
    with pytest.raises(ValueError, match=rf"module '2' \({name}\) keeps running statistics.*use nn\.GroupNorm"):
        Oracle(mlp(norm), F.cross_entropy)


class Remembering(nn.Module):
    """A running value: in place (refused by vmap), assigned (escapes from vmap), or cached by the first forward."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(6, 3), how
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x):
        if self.how == "in place":
            self.center.mul_(0.9).add_(0.1 * x.mean(0))
        elif self.how == "assigned":
            self.center = 0.9 * self.center + 0.1 * x.mean(0)
        elif not self.center.any():
            self.center = torch.ones(6)
        return self.linear(x - self.center)


@pytest.mark.parametrize("how", ["in place", "assigned", "cached", "spectral_norm"])
def test_what_a_model_remembers_would_be_shared_by_all_workers(how):
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)) if how == "spectral_norm" else Remembering(how)
    x = Layout.of(model).flatten(model).expand(M, -1).clone()
    oracle, batch = Oracle(model, F.cross_entropy), (torch.randn(M, B, 6), torch.zeros(M, B).long())

    def several():
        for _ in range(3):
            oracle(x, *batch)

    if how == "cached":
        several()
    else:
        with pytest.raises(ValueError, match=r"buffer '.*' is written by every forward.*gossip.wrap"):
            several()


@pytest.mark.parametrize(
    ("inputs", "targets", "error", "message"),
    [
        (torch.zeros(M, B, 7).double(), torch.zeros(M, B).long(), RuntimeError, "shapes cannot be multiplied"),
        (torch.zeros(M, B, 6).double(), torch.zeros(M, B + 1).long(), ValueError, "batch_size"),
        (torch.zeros(M, B, 6), torch.zeros(M, B).long(), RuntimeError, "dtype"),
    ],
    ids=["width", "targets", "dtype"],
)
def test_the_users_own_mistake_surfaces_and_does_not_disable_vmap(inputs, targets, error, message):
    model, loss, x, good, labels, _ = problem("mlp")
    oracle = Oracle(model, loss)
    with pytest.raises(error, match=message):
        oracle(x, inputs, targets)
    oracle(x, good, labels)
    assert oracle._vectorised


def test_a_mistake_in_the_loss_surfaces_as_it_is():
    model, _, x, inputs, targets, _ = problem("mlp")

    def loss(outputs, targets):
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        Oracle(model, loss)(x, inputs, targets)


def test_a_loss_that_is_no_scalar_is_refused():
    model, _, x, inputs, targets, _ = problem("mlp")
    with pytest.raises(ValueError, match=r"shape \(5,\) and must be a scalar.*reduction='mean'"):
        Oracle(model, lambda o, t: F.cross_entropy(o, t, reduction="none"))(x, inputs, targets)
