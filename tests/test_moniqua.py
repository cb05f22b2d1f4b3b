"""Moniqua: what it computes, how near the workers come, and that a θ that is too small does not go unnoticed."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from placed import SCHEDULES, D, N, Problem, sgd
from support import launch, values

import gossip
import graphs
from experiments import records, schema, train
from gossip import MoniquaSGD, Network
from gossip.compress.identity import Dense
from gossip.events import HALF
from gossip.meeting import Meeting

RING = SCHEDULES["ring"]


PROBLEM = Problem.drawn(curvature=0.8)


def trajectory(algorithm, rounds=12, x0=None, **options) -> torch.Tensor:
    x0 = torch.zeros(D, dtype=torch.float64) if x0 is None else x0
    records = gossip.simulate(PROBLEM.gradient, algorithm, RING, rounds, x0=x0, **options)
    return torch.stack([r.x.clone() for r in records])


def gossiped(algorithm, x, rounds) -> list[torch.Tensor]:
    """The models after each round without gradients."""
    net, state, found = Network(RING), algorithm.init(x.clone()), []
    for k in range(rounds):
        net.begin(k)
        state = algorithm.communicate(state, net)
        found.append(state.x.clone())
    return found


def mod(x, a):
    return torch.remainder(x + a / 2, a) - a / 2


# -- the rule ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("bits", "gamma"), [(8, 1.0), (2, 0.1)])
def test_moniqua_is_its_formula(bits, gamma, overlap):
    """x̂_ij = (q_j − x_i) mod B + x_i, x̂_ii = q_i − x_i mod B + x_i, x_i += γ Σ_j W_ij (x̂_ij − x̂_ii) − η g_i."""
    W, lr, net = RING(0).to_dense(), 0.05, Network(RING)
    algorithm = MoniquaSGD(sgd(lr), 4.0, bits, gamma)
    q, B = algorithm.quantiser, algorithm.quantiser.modulus
    x = torch.full((N, D), 50.0, dtype=torch.float64)
    found = trajectory(algorithm, x0=x[0].clone(), overlap=overlap)
    for k in range(12):
        net.begin(k)
        g = PROBLEM.gradient(x, torch.arange(N), k)
        stepped = x - lr * g
        sent = x if overlap else stepped
        circle = q(sent, net.keys(shared=True)).dense()
        own = circle - mod(sent, B)
        own = mod(own, B) + sent  # q and x mod B may lie at either end of the circle
        x = stepped.clone()
        for i in range(N):
            read = mod(circle - sent[i], B) + sent[i]
            x[i] += gamma * sum(W[i, j] * (read[j] - own[i]) for j in range(N) if j != i)
        assert torch.allclose(found[k], x, rtol=0, atol=1e-11)


class Circle(Dense):
    """Numbers as they are, read as codes are."""

    rows = property(lambda self: len(self.dense()))
    d = property(lambda self: self.dense().shape[1])

    def reader(self, most):
        return lambda tile: (tile.across(self.dense()).clone(), 1.0)


class Exact:
    """A circle that is not rounded: δ → 0."""

    modulus, theta, bits = 8.0, 4.0, 64

    def __call__(self, x, key):
        return Circle(mod(x, self.modulus))


class Fine(MoniquaSGD):
    quantiser = Exact()


@pytest.mark.parametrize("overlap", [False, True])
def test_without_rounding_it_is_dpsgd_in_both_orders(overlap):
    x0 = torch.full((D,), 100.0, dtype=torch.float64)
    a, b = Fine(sgd(0.05), 4.0), gossip.DPSGD(sgd(0.05))
    assert torch.allclose(
        trajectory(a, 30, x0, overlap=overlap), trajectory(b, 30, x0, overlap=overlap), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_distance_to_dpsgd_is_that_of_the_grid(bits):
    algorithm = MoniquaSGD(sgd(0.05), 4.0, bits)
    apart = (trajectory(algorithm, overlap=True) - trajectory(gossip.DPSGD(sgd(0.05)), overlap=True)).abs().amax((1, 2))
    unit = algorithm.quantiser.modulus / 2**bits
    assert 0.05 * unit < apart[-1] < 1.5 * unit


# -- how near the workers come --------------------------------------------------------------------------------------------


def floor(bits, gamma, rounds) -> float:
    """Of gossip on a ring of 8 from σ = 0.3 with θ = 2: the mean square distance from the mean per coordinate."""
    x = 0.3 * gossip.rng.normal(gossip.rng.key(0, "floor", torch.arange(8)), 300)
    found = gossiped(MoniquaSGD(sgd(), 2.0, bits, gamma), x, rounds)
    assert (found[-1].mean(0) - x.mean(0)).abs().max() < 1e-13
    return float(torch.stack([(x - x.mean(0)).square().mean() for x in found[rounds // 2 :]]).mean())


@pytest.mark.parametrize(
    ("delta", "published", "bits", "gamma", "rounds"),
    [
        (1 / 3, 9.7e-3, 2, 0.1, 800),
        (1 / 15, 5.9e-3, 4, 1.0, 200),
        (1 / 15, 5.9e-5, 4, 0.1, 800),
        (1 / 255, 1.6e-5, 8, 1.0, 300),
    ],
)
def test_the_consensus_distance_stops_at_the_published_numbers(delta, published, bits, gamma, rounds):
    """Those of algorithms.md 1.13 are for a grid of 2^k − 1 steps; both are 0.061 (γ δ B)², and 2^k steps are finer."""
    coarse, fine = 4 * delta / (1 - 2 * delta), 4 * 2.0**-bits / (1 - 2 * 2.0**-bits)
    assert floor(bits, gamma, rounds) == pytest.approx(published * (fine / coarse) ** 2, rel=0.09)


def test_dither_that_is_not_shared_doubles_it(monkeypatch):
    """5.9e-3 against 1.14e-2 (algorithms.md 1.13)."""
    shared, keys = floor(4, 1.0, 200), Network.keys
    monkeypatch.setattr(Network, "keys", lambda net, shared=False: keys(net))
    assert floor(4, 1.0, 200) / shared == pytest.approx(1.14e-2 / 5.9e-3, rel=0.06)


def test_two_who_meet_share_their_dither_too():
    """Under the asynchronous clock; the mean stays, and the models agree on it."""
    net = Meeting(graphs.as_schedule(graphs.ring(6)))
    net.enter(0, (5, 2, 4, 3), [(HALF, (0, 2)), (HALF, (1, 3))], events=(8, 9, 8, 9))
    one, two, also_one, also_two = net.keys(shared=True).tolist()
    assert (one, two) == (also_one, also_two)
    assert one != two
    assert len(net.keys().unique()) == 4
    x = gossip.rng.normal(gossip.rng.key(0, "meet", torch.arange(6)), 50)
    zero, clock = lambda x, workers, step: torch.zeros_like(x), gossip.Asynchronous()
    *_, last = gossip.simulate(zero, MoniquaSGD(theta=8.0), graphs.ring(6), 60, x0=x, clock=clock)
    assert (last.x.mean(0) - x.mean(0)).abs().max() < 1e-12
    assert last.consensus < 1e-3 * gossip.consensus_distance(x)


# -- a θ that is too small ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_nearer_than_theta_is_read_and_what_is_farther_than_it_can_be_read_stops_the_run(bits):
    """One coordinate of 40 is `apart`, both models are around 100 B or around 0; in between, chance decides."""
    algorithm = MoniquaSGD(sgd(), 1.0, bits)
    B, unit = algorithm.quantiser.modulus, algorithm.quantiser.modulus / 2**bits
    for offset in (0.0, 100.3 * B):
        for apart in (0.99, -0.99, 1 + 2.01 * unit, -1 - 2.01 * unit, 0.9 * B, B, -2 * B, 7.3 * B):
            x = torch.full((N, 40), offset, dtype=torch.float64)
            x[5, 17] += apart
            if abs(apart) < 1:
                assert (gossiped(algorithm, x, 1)[0].mean(0) - x.mean(0)).abs().max() < 1e-12
            else:
                with pytest.raises(
                    ValueError, match=r"worker [456] cannot read a neighbour's model in round 0: .*theta=1 "
                ):
                    gossiped(algorithm, x, 1)


def test_a_lap_up_and_a_lap_down_do_not_cancel():
    x = torch.zeros(N, 40, dtype=torch.float64)
    x[5, 17], x[5, 18] = 1.5, -1.5
    with pytest.raises(ValueError, match="larger theta, a smaller learning rate or gamma, or more bits than 8"):
        gossiped(MoniquaSGD(theta=1.0), x, 1)


def test_models_that_drift_apart_stop_the_run_in_the_round_in_which_they_do():
    """Worker 2 alone is pulled away, harder from round to round."""
    pull, zero = torch.zeros(N, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    pull[2] = -1.0

    def models(theta):
        algorithm, gradient = MoniquaSGD(sgd(0.1), theta), lambda x, workers, step: pull * (1 + step / 5)
        return (r.x.clone() for r in gossip.simulate(gradient, algorithm, RING, 30, x0=zero))

    assert len(list(models(2.0))) == 30
    reached = [zero.expand(N, 3)]
    with pytest.raises(ValueError, match=r"in round (\d+): .*theta=0.25 ") as caught:
        reached.extend(models(0.25))
    assert f"in round {len(reached) - 1}:" in str(caught.value)
    sent = [x - 0.1 * pull * (1 + k / 5) for k, x in enumerate(reached)]
    apart = [max(float((x[2] - x[j]).abs().max()) for j in (1, 3)) for x in sent]
    assert max(apart[:-1]) < 0.26
    assert 0.25 <= apart[-1] < 0.3


def _misread(rank, size, store):
    transport = gossip.connect(rank, size, store, timeout=20)
    net = Network(graphs.as_schedule(graphs.ring(4)), gossip.Placement(((0, 1), (2, 3)), rank), transport)
    x = torch.zeros(2, 5)
    x[:, 3] = 1.2 * rank
    algorithm = MoniquaSGD(theta=1.0)
    state = algorithm.init(x)
    net.begin(7)
    try:
        algorithm.communicate(state, net)
    except ValueError as error:
        return str(error)
    finally:
        gossip.disconnect()


def test_messages_from_other_processes_are_checked(tmp_path):
    first, second = values(launch(_misread, 2, tmp_path))
    assert "worker 0 cannot read" in first
    assert "worker 2 cannot read" in second
    assert all("in round 7" in said and "theta=1 " in said for said in (first, second))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"theta=None: MoniquaSGD needs a bound on how far apart neighbours ever are"),
        ({"theta": -1.0}, "theta=-1.0 is not a positive number"),
        ({"theta": 1.0, "bits": 1}, "bits=1 is not a whole number from 2 to 8"),
        ({"theta": 1.0, "gamma": 0.0}, r"gamma=0.0 is not in \(0, 1\]"),
        ({"theta": 1.0, "gamma": "auto"}, r"gamma='auto' is not in \(0, 1\]"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoniquaSGD(**options)


# -- the command ----------------------------------------------------------------------------------------------------------


def configured(*overrides):
    with initialize_config_dir(str(Path(train.__file__).parent / "conf"), version_base="1.3"):
        return schema.resolved(compose("train", ["task=quadratic", "n=4", "track=off", "progress=false", *overrides]))


def test_the_command_wants_theta_and_runs(tmp_path):
    with pytest.raises(Exception, match="theta=None") as caught:
        train.run(configured("algorithm=moniqua"), tmp_path)
    assert "MoniquaSGD needs a bound" in train.message(caught.value)
    train.run(configured("algorithm=moniqua", "algorithm.theta=20", "rounds=20"), tmp_path, say=(said := []).append)
    assert records.read(tmp_path).status["status"] == "done"
    assert not [line for line in said if "warning" in line]
