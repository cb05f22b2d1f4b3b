"""Runs in a notebook: published trajectories of consensus, records, and refusals (gossip/simulate.py, gossip/lockstep.py)."""

import math

import numpy as np
import pytest
import torch

import gossip
import graphs
from gossip import consensus, consensus_distance, simulate

RING = graphs.ring(16)


class Task:
    """f_i(x) = ‖x − b_i‖² / 2, and which steps and workers were asked for."""

    def __init__(self, n=6, d=3):
        self.n, self.b, self.asked = n, torch.linspace(-1, 1, n * d, dtype=torch.float64).view(n, d), []

    def initial(self):
        return torch.zeros(self.b.shape[1], dtype=torch.float64)

    def gradient(self, x, workers, step):
        self.asked.append((step, workers.tolist()))
        g = x - self.b[workers]
        return g, g.square().sum(1) / 2


# -- consensus -----------------------------------------------------------------------------------------------------------


def test_the_deterministic_trajectory_of_a_ring_of_sixteen():
    """(1/n) Σ (x − 7.5)² after 1, 10, 50 and 100 rounds from x_i = i (algorithms.md 5.3)."""
    x, distance = consensus(torch.arange(16.0, dtype=torch.float64), RING, rounds=100, history=True)
    assert distance.dtype == torch.float64
    assert distance.shape == (100,)
    published = [14.8055556, 4.680283131, 0.0718947847, 0.000393456031]
    assert distance[[0, 9, 49, 99]].tolist() == pytest.approx(published, rel=1e-8)
    assert float(consensus(torch.arange(16.0, dtype=torch.float64), RING, rounds=10)[0]) == pytest.approx(
        6.787041271, rel=1e-9
    )
    assert x.shape == (16,)


@pytest.fixture(scope="module")
def unit_rows():
    """25 unit Gaussian rows of 2000 numbers: the setting of CHOCO-Gossip's figures 2 and 3 (algorithms.md 6.6)."""
    x = np.random.default_rng(0).standard_normal((25, 2000))  # noqa: NPY002
    return torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True))


def test_exact_gossip_on_the_choco_ring(unit_rows):
    """From .9605: 1.18e-3 after 100 rounds, 3.61e-9 after 400, and asymptotically λ₂² = .9585495560669 a round."""
    assert consensus_distance(unit_rows) == pytest.approx(0.9605, abs=5e-5)
    _, distance = consensus(unit_rows, graphs.ring(25), rounds=400, history=True)
    assert float(distance[99]) == pytest.approx(1.18e-3, rel=5e-3)
    assert float(distance[399]) == pytest.approx(3.61e-9, rel=5e-3)
    assert float((distance[399] / distance[299]) ** 0.01) == pytest.approx(0.9585495560669, rel=1e-4)


@pytest.mark.parametrize(
    ("compressor", "gamma", "published"),
    [
        (gossip.Identity(), 1.0, {100: 1.18e-3}),
        (gossip.TopK(0.01), 0.046, {100: 0.218, 400: 0.0474}),
        (gossip.TopK(0.01), 0.06, {100: 0.231, 400: 0.0449}),
        (gossip.RandK(0.01), 0.011, {100: 0.636, 400: 0.295}),
    ],
    ids=["identity", "top 1 %", "top 1 %, faster", "random 1 %"],
)
def test_choco_gossip_reaches_the_published_distances(unit_rows, compressor, gamma, published):
    rounds = max(published)
    _, distance = consensus(unit_rows, graphs.ring(25), rounds, compressor=compressor, gamma=gamma, history=True)
    for t, value in published.items():
        drawn = isinstance(compressor, gossip.RandK)
        assert float(distance[t - 1]) == pytest.approx(value, rel=0.03 if drawn else 0.01)


@pytest.mark.parametrize(
    ("k", "gamma", "converges"),
    [
        (1, 1.0, False),
        (4, 1.0, False),
        (4, 0.3, True),
        (1, 0.3, False),
        (1, 0.1, True),
        (4, 0.1, True),
        (20, 1.0, True),
    ],
)
def test_the_consensus_step_has_a_stability_limit(k, gamma, converges):
    """CHOCO on a ring of 8, d = 20, top-k (epfml/ChocoSGD issue 7)."""
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, distance = consensus(x, graphs.ring(8), 600, compressor=gossip.TopK(k / 20), gamma=gamma, history=True)
    assert bool(distance[-1] < 1e-2 * consensus_distance(x)) == converges


@pytest.mark.parametrize(
    "compressor", [None, gossip.TopK(0.2), gossip.RandK(0.2), gossip.Sign(), gossip.Identity()], ids=repr
)
def test_the_average_is_kept_and_the_argument_left_alone(compressor):
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, gamma = x.clone(), 1.0 if compressor is None else 0.2
    after = consensus(x, RING, 30, compressor=compressor, gamma=gamma)
    assert torch.equal(x, before)
    assert torch.allclose(after.mean(0), x.mean(0), rtol=0, atol=1e-14)
    assert consensus_distance(after) < consensus_distance(x)


@pytest.mark.parametrize(
    "compressor", [gossip.TopK(0.2), gossip.RandK(0.2), gossip.Sign(), gossip.Identity()], ids=repr
)
@pytest.mark.parametrize("shape", [(16,), (16, 1), (16, 3, 2), (16, 20)], ids=str)
def test_rows_of_any_shape_and_memory_layout(compressor, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    strided = torch.stack((x, x), -1)[..., 0]
    turned = x.T.contiguous().T if len(shape) == 2 else strided
    options = {"compressor": compressor, "gamma": 0.2}
    expected = consensus(x, RING, 5, **options)
    assert expected.shape == shape
    assert torch.allclose(consensus(strided, RING, 5, **options), expected, rtol=0, atol=1e-14)
    assert torch.allclose(consensus(turned, RING, 5, **options), expected, rtol=0, atol=1e-14)
    for other in (strided, turned):
        assert torch.allclose(consensus(other, RING, 5), consensus(x, RING, 5), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "mixing", [RING, graphs.metropolis(RING), graphs.static(graphs.metropolis(RING))], ids=lambda m: type(m).__name__
)
def test_a_topology_a_matrix_and_a_schedule_are_all_mixing(mixing):
    x = torch.arange(16.0, dtype=torch.float64)
    assert torch.equal(consensus(x, mixing, 10), consensus(x, RING, 10))


def test_one_peer_exponential_averages_exactly_in_log_n_rounds():
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(consensus(x, graphs.one_peer_exponential(16), 4), x.mean(0).expand(16, 3), rtol=0, atol=1e-14)


def test_no_rounds_one_worker_and_parameters_that_require_gradients():
    x = torch.randn(16, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(consensus(x, RING, 0), x)
    out, distance = consensus(x, RING, 0, history=True)
    assert distance.shape == (0,)
    assert not consensus(x, RING, 2).requires_grad
    one = torch.ones(1, 1, dtype=torch.float64)
    assert torch.equal(consensus(torch.tensor([[3.0]]), one, 5), torch.tensor([[3.0]]))
    assert not out.requires_grad


def test_consensus_refuses_what_it_cannot_mean():
    x = torch.zeros(16)
    with pytest.raises(ValueError, match="x has 5 rows and the mixing 16 workers: pass one row per worker"):
        consensus(torch.zeros(5), RING, 1)
    with pytest.raises(ValueError, match=r"gamma=0\.5 without a compressor.*compressor=gossip\.Identity\(\)"):
        consensus(x, RING, 1, gamma=0.5)
    with pytest.raises(ValueError, match="gamma=3 is not in"):
        consensus(x, RING, 1, compressor=gossip.Sign(), gamma=3)
    with pytest.raises(ValueError, match=r"int64.*rows\.double"):
        consensus(torch.arange(16), RING, 1)
    with pytest.raises(gossip.Incompatible, match="doubly stochastic"):
        consensus(torch.zeros(5), graphs.uniform(graphs.star(5)), 1)
    with pytest.warns(UserWarning, match="doubly stochastic"):
        forced = consensus(torch.arange(5.0), graphs.uniform(graphs.star(5)), 300, force=True)
    assert float(forced[0]) != pytest.approx(2.0, abs=0.05)  # the hub counts too much
    with pytest.raises(gossip.Incompatible, match="does not connect"):
        consensus(torch.zeros(3), torch.eye(3, dtype=torch.float64), 1)


# -- simulate ------------------------------------------------------------------------------------------------------------


def test_records_say_what_happened():
    task = Task()
    records = list(simulate(task, gossip.DPSGD(), graphs.ring(6), 5, every=2))
    assert [r.round for r in records] == [2, 4, 5]
    last = records[-1]
    assert last.messages == 5 * 12
    assert last.bits == 5 * 12 * 3 * 64
    assert last.consensus == pytest.approx(consensus_distance(last.x))
    assert task.asked == [(k, list(range(6))) for k in range(5)]
    (only,) = simulate(task, gossip.DPSGD(), graphs.ring(6), 1)
    assert only.loss == pytest.approx(float(task.b.square().sum(1).mean()) / 2)  # at the common start


def test_local_steps_are_numbered_through_and_messages_are_not():
    task = Task()
    *_, last = simulate(task, gossip.DPSGD(), graphs.ring(6), 4, local_steps=3)
    assert [step for step, _ in task.asked] == list(range(12))
    assert last.messages == 4 * 12


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_in_two_halves_is_the_run(local_steps, overlap):
    task, schedule = Task(), graphs.one_peer_exponential(6)

    def rounds(*parts):
        net = gossip.Network(schedule)
        algorithm = gossip.DPSGD()
        state, done = algorithm.init(torch.zeros(6, 3, dtype=torch.float64)), 0
        for stop in parts:
            loop = gossip.lockstep(
                algorithm, lambda x, t: task.gradient(x, net.rows, t)[0], net, state, stop, done, local_steps, overlap
            )
            for done, last in loop:  # noqa: B007
                state = last
        return state.x, [step for step, _ in task.asked]

    x, steps = rounds(7)
    task.asked.clear()
    again, steps_again = rounds(3, 7)
    assert torch.equal(x, again)
    assert steps == steps_again == list(range(7 * local_steps))


def test_a_function_is_a_task_when_the_start_is_given():
    b = Task().b
    *_, last = simulate(
        lambda x, workers, step: x - b[workers], gossip.DPSGD(), graphs.ring(6), 5, x0=torch.zeros(3).double()
    )
    *_, same = simulate(Task(), gossip.DPSGD(), graphs.ring(6), 5)
    assert torch.equal(last.x, same.x)
    assert math.isnan(last.loss)


def test_the_start_may_differ_between_workers_and_is_left_alone():
    x0 = torch.arange(18.0, dtype=torch.float64).view(6, 3)
    before = x0.clone()
    *_, last = simulate(lambda x, *_: torch.zeros_like(x), gossip.DPSGD(), graphs.ring(6), 3, x0=x0)
    assert torch.equal(x0, before)
    W = graphs.metropolis(graphs.ring(6)).to_dense()
    assert torch.allclose(last.x, torch.linalg.matrix_power(W, 3) @ x0, rtol=0, atol=1e-12)
    turned = x0.T.contiguous().T
    *_, strided = simulate(
        lambda x, *_: torch.zeros_like(x),
        gossip.Choco(compressor=gossip.TopK(0.4), gamma=0.2),
        graphs.ring(6),
        3,
        x0=turned,
    )
    assert strided.x.isfinite().all()


def test_the_callers_gradient_mode_is_left_alone():
    """Between two records the caller may train something of their own; and the task may use autograd."""
    b = Task().b

    def gradient(x, workers, step):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(((x - b[workers]) ** 2).sum() / 2, x)
        return g

    run = simulate(gradient, gossip.GradientTracking(), graphs.ring(6), 4, x0=torch.zeros(3, dtype=torch.float64))
    for record in run:
        assert torch.is_grad_enabled()
        assert not record.x.requires_grad
        assert (torch.ones(2, requires_grad=True) * 2).requires_grad
    *_, same = simulate(Task(), gossip.GradientTracking(), graphs.ring(6), 4)
    assert torch.allclose(record.x, same.x, rtol=0, atol=1e-14)
    next(iter(simulate(Task(), gossip.DPSGD(), graphs.ring(6), 4)))  # abandoned
    assert torch.is_grad_enabled()


def test_a_start_that_requires_gradients_and_gradients_that_carry_a_graph():
    b = Task().b
    x0 = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    *_, last = simulate(lambda x, w, step: scale * (x - b[w]), gossip.GradientTracking(), graphs.ring(6), 4, x0=x0)
    assert not last.x.requires_grad
    *_, same = simulate(Task(), gossip.GradientTracking(), graphs.ring(6), 4)
    assert torch.allclose(last.x, same.x, rtol=0, atol=1e-14)


def test_simulate_refuses_what_cannot_run():
    def start(*args, **options):
        return next(simulate(*args, **options))

    function = lambda x, *_: x  # noqa: E731
    with pytest.raises(ValueError, match=r"x0=None, and the task is a function.*pass x0"):
        start(function, gossip.DPSGD(), graphs.ring(6), 1)
    with pytest.raises(ValueError, match=r"x0 has shape \(4, 3\) and the mixing 6 workers"):
        start(function, gossip.DPSGD(), graphs.ring(6), 1, x0=torch.zeros(4, 3))
    for options, told in [
        ({"rounds": -1}, "rounds is -1"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": 0}, "every is 0; it must be an integer of at least 1"),
        ({"x0": torch.zeros(6, 2, 2)}, r"x0 has shape \(6, 2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=told):
            start(function, gossip.DPSGD(), graphs.ring(6), **{"rounds": 1, "x0": torch.zeros(3)} | options)
    for gradient, told in [
        (lambda *_: None, "is NoneType: return a tensor like the rows"),  # a forgotten return trained nothing
        (lambda x, *_: x.double(), r"at torch.float32 rows \(6, 3\) is torch.float64 \(6, 3\)"),
        (lambda x, *_: x[:1], r"is torch.float32 \(1, 3\)"),
    ]:
        with pytest.raises(ValueError, match=told):
            start(gradient, gossip.DPSGD(), graphs.ring(6), 1, x0=torch.zeros(3))
    with pytest.raises(TypeError, match="pass an instance, such as"):
        start(function, gossip.DPSGD, graphs.ring(6), 1, x0=torch.zeros(3))
    assert start(function, gossip.DPSGD(), graphs.ring(6), 1, x0=[0.0, 1.0]).x.shape == (6, 2)
    assert gossip.consensus(torch.arange(6.0).numpy(), graphs.complete(6), 1)[0] == 2.5
    with pytest.raises(ValueError, match="the task has 6 workers and the mixing 8"):
        start(Task(), gossip.DPSGD(), graphs.ring(8), 1)
    with pytest.raises(gossip.Incompatible, match="overlap=True, and GradientTracking"):
        start(Task(), gossip.GradientTracking(), graphs.ring(6), 1, overlap=True)
    with pytest.raises(ValueError, match="local_steps=0"):
        start(Task(), gossip.DPSGD(), graphs.ring(6), 1, local_steps=0)
    with pytest.raises(
        gossip.Incompatible, match="DPSGD requires a schedule that is doubly stochastic, and column 0 of"
    ):
        start(Task(), gossip.DPSGD(), graphs.uniform(graphs.star(6)), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mixed_in_float32(dtype):
    """Mixed in bfloat16 the mean of these rows moves by 0.3, and they stay 0.6 apart."""
    x = (torch.randn(16, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3).to(dtype)
    mixed, distance = gossip.consensus(x, graphs.ring(16), 300, history=True)
    assert mixed.dtype == dtype
    assert float(distance[-1]) < 1e-9
    assert torch.allclose(mixed.double(), x.double().mean(0), rtol=torch.finfo(dtype).eps, atol=0)
    *_, last = simulate(lambda x, *_: torch.zeros_like(x), gossip.SGP(), graphs.ring(16), 50, x0=x)
    assert last.x.dtype == torch.float32


@pytest.mark.parametrize("clock", [None, gossip.Asynchronous()], ids=["lockstep", "asynchronous"])
@pytest.mark.parametrize("algorithm", [gossip.DPSGD(), gossip.AllReduce(), gossip.GradientTracking()], ids=repr)
@pytest.mark.parametrize("row", [lambda x: x[0], lambda x: x[:1], lambda x: x.double(), lambda x: x.tolist()])
def test_a_gradient_is_never_broadcast_or_cast(clock, algorithm, row):
    with pytest.raises(
        ValueError, match=r"the task's gradient at torch.float32 rows \(6, 3\) is .*: return a tensor like"
    ):
        list(simulate(lambda x, *_: row(x), algorithm, graphs.ring(6), 2, x0=torch.zeros(3), clock=clock))


@pytest.mark.parametrize("clock", [None, gossip.Asynchronous(), gossip.Asynchronous(groups=2)], ids=repr)
def test_whoever_diverges_is_named_under_any_clock(clock):
    def gradient(x, workers, step):
        late = (workers == 5) & (torch.as_tensor(step) == 3)
        return torch.where(late[:, None], torch.nan, x)

    algorithm = gossip.Choco(compressor=gossip.TopK(0.5))
    with pytest.raises(gossip.NotFinite, match=r"row \d+ \(worker 5\) of the \d+ rows"):
        list(simulate(gradient, algorithm, graphs.ring(8), 10, x0=torch.zeros(4), clock=clock))


@pytest.mark.parametrize("cls", [gossip.Choco, gossip.DeepSqueeze, gossip.EFDPSGD])
@pytest.mark.parametrize("compressor", [gossip.TopK, None, "topk", gossip.Moniqua()], ids=repr)
def test_what_is_no_compressor_or_no_contraction_is_refused(cls, compressor):
    with pytest.raises(ValueError, match=r"compressor=.* is no (compressor: pass an instance|contraction: )"):
        cls(compressor=compressor, gamma=0.5)


@pytest.mark.parametrize("gamma", [0, -1, 2.5, float("nan")])
def test_a_consensus_step_outside_zero_to_two_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma=.* is not in \(0, 2\]"):
        gossip.Choco(gamma=gamma)


def test_a_cost_that_is_none_is_refused_by_name():
    with pytest.raises(TypeError, match=r"cost='lan' is no gossip.Cost"):
        next(simulate(lambda x, workers, step: x, gossip.DPSGD(), graphs.ring(4), 3, x0=torch.zeros(2), cost="lan"))
