"""The asynchronous clock: its formulas, closed forms of stragglers and of pairwise gossip, placements, checkpoints."""

import math
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from placed import Problem, pushed, sgd
from support import launch, values
from test_trainer import assert_same, config, rows

import gossip
import graphs
from experiments.train import run as run_config
from gossip import DPSGD, SGP, AllReduce, Asynchronous, Choco, Placement, tree
from gossip.asynchronous_run import AsynchronousRun
from gossip.events import EventQueue, Graph

N, D = 8, 13
RING = graphs.as_schedule(graphs.ring(N))
UNEVEN = gossip.Cost(gossip.work.LogNormal(sigma=0.6), gossip.Links(latency=0.05))
RANDOM = gossip.Cost(gossip.work.Exponential())
PROBLEM = Problem.drawn(N, D)
PLAIN = sgd()
OPTIONS: dict[str, dict[str, Any]] = {
    "AD-PSGD": {},
    "adapt first": {"adapt_first": True},
    "no waiting": {"wait": False},
    "bound": {"bound": 1},
    "geometric": {"geometric": True},
    "groups": {"groups": [[0, 1, 2], [3, 4], [5], [6, 7]]},
    "phases": {"phases": [[0, "synchronous"], [3, "asynchronous"], [6, "synchronous"], [8, "asynchronous"]]},
}


def started(algorithm=None, schedule=RING, cost: Any = UNEVEN, local_steps=1, problem=PROBLEM, x=None, **options):
    """A run from 0, and what it asked of the oracle."""
    asked = []

    def oracle(x, workers, steps):
        asked.append((workers.tolist(), steps.tolist()))
        return problem.gradient(x, workers, steps)

    x = torch.zeros(problem.b.shape, dtype=torch.float64) if x is None else x.clone()
    clock = Asynchronous(**options)
    algorithm = algorithm or DPSGD(sgd())
    clock.check(algorithm, schedule)
    run = clock.start(algorithm, oracle, schedule, x, cost=cost, seed=3, local_steps=local_steps)
    return run, asked


def events_of(run: AsynchronousRun, updates: int) -> list:
    """The same events again."""
    t = run.queue
    again = EventQueue(
        t.graph, t.cost, t.seed, meet=t.meet, local_steps=t.local_steps, geometric=t.geometric, adapt_first=t.adapt_first,
        wait=t.wait, bound=t.bound, size=t.size, modes=t.modes,
    )  # fmt: skip
    found = []
    while again.updates < updates:
        found += again.advance()
    return found


def by_formula(run: AsynchronousRun, updates: int, make=PLAIN, problem=PROBLEM) -> torch.Tensor:
    """x ← W x on the rows of each event, and each worker's own torch optimizer along its stale gradient."""
    x = [torch.nn.Parameter(torch.zeros(D, dtype=torch.float64)) for _ in range(N)]
    optimizers = [made if isinstance(made := make([p]), tuple) else (made, None) for p in x]
    begun, steps = [p.detach().clone() for p in x], [0] * N

    def step(w):
        x[w].grad = problem.gradient(begun[w][None], torch.tensor([w]), steps[w])[0]
        optimizer, scheduler = optimizers[w]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        steps[w] += 1

    for event in events_of(run, updates):
        for w in event.steps if event.first else ():
            step(w)
        if event.rows:
            mixed = run.graph.weights(event.link).to_dense() @ torch.stack([x[w].data for w in event.rows])
            for w, row in zip(event.rows, mixed):
                x[w].data = row.clone()
        for w in () if event.first else event.steps:
            step(w)
        for w in event.begins:
            begun[w] = x[w].detach().clone()
    return torch.stack([p.data for p in x])


# -- the events and their formula --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_is_its_formula_event_by_event(options, local_steps):
    run, _ = started(local_steps=local_steps, **options)
    for updates in (7, 60, 200):
        run.advance(updates=updates)
    expected = by_formula(run, 200)
    assert float(expected.abs().max()) > 0.1
    assert torch.allclose(run.models, expected, rtol=0, atol=1e-12)


ADAM = partial(torch.optim.Adam, lr=0.01)
DECAYED = gossip.scheduled(
    sgd(momentum=0.5), partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)
)  # by each worker's own steps


@pytest.mark.parametrize("make", [sgd(momentum=0.9, nesterov=True, weight_decay=0.01), ADAM, DECAYED])
def test_every_worker_has_an_optimizer_of_its_own(make):
    run, _ = started(DPSGD(make))
    run.advance(updates=160)
    assert len(set(run.queue.steps)) > 1
    assert torch.allclose(run.models, by_formula(run, 160, make), rtol=0, atol=1e-12)


def test_every_gradient_is_asked_for_once_and_many_together():
    run, asked = started()
    run.advance(updates=400)
    pairs = Counter(p for workers, steps in asked for p in zip(workers, steps))
    assert set(pairs.values()) == {1}
    for w in range(N):
        assert sorted(s for v, s in pairs if v == w)[: run.queue.steps[w]] == list(range(run.queue.steps[w]))
    assert 400 / len(asked) > 2.5  # gradients in one call; one by one it would be 1
    whole, asked = started(cost=gossip.Cost())
    whole.advance(updates=400)
    assert max(len(workers) for workers, _ in asked) == N


def test_where_a_run_pauses_changes_nothing():
    one, _ = started(Choco(sgd(), gossip.RandK(0.3), gamma=0.2))
    one.advance(updates=150)
    other, _ = started(Choco(sgd(), gossip.RandK(0.3), gamma=0.2))
    for updates in range(1, 151):
        other.advance(updates=updates)
    assert torch.allclose(one.models, other.models, rtol=0, atol=1e-13)
    assert one.net.meter.edges == other.net.meter.edges
    assert one.queue.state_dict() == other.queue.state_dict()


def test_the_same_seed_is_the_same_run_and_another_one_is_not():
    runs = [started()[0] for _ in range(2)]
    for run in runs:
        run.advance(updates=100)
    assert torch.equal(runs[0].models, runs[1].models)
    other = Asynchronous().start(DPSGD(sgd()), PROBLEM.gradient, RING, torch.zeros(N, D).double(), cost=UNEVEN, seed=4)
    other.advance(updates=100)
    assert not torch.allclose(other.models, runs[0].models)


# -- closed forms ------------------------------------------------------------------------------------------------------


def throughput(cost, schedule, seconds, **options) -> float:
    """Gradients a second."""
    queue = EventQueue(Graph(schedule), cost, **options)
    while queue.next_time <= seconds:
        queue.advance()
    return queue.updates / seconds


@pytest.mark.parametrize(("n", "s"), [(16, 2), (16, 10), (16, 100), (128, 2), (7, 3.5), (40, 25), (2, 8), (5, 1)])
def test_what_a_straggler_costs(n, s):
    """s (n − 1 + 1/s)/n times the gradients of a synchronous run, whose round takes s (algorithms.md 1.8)."""
    cost = gossip.Cost(gossip.work.Slow(gossip.work.Constant(), factor=s, workers=(n // 2,)))
    fast = throughput(cost, graphs.as_schedule(graphs.complete(n)), 10 * s + 1e-9)
    assert fast / (n / s) == pytest.approx(s * (n - 1 + 1 / s) / n, rel=0.01)
    modes = Asynchronous(phases=[[0, "synchronous"]]).mode
    slow = throughput(cost, graphs.as_schedule(graphs.complete(n)), 10 * s + 1e-9, modes=modes)
    assert slow == pytest.approx(n / s, rel=1e-6)


def chances(topology) -> list[tuple[int, int, float]]:
    """Edges, and how often two meet: workers are equally fast, and each asks a neighbour uniformly."""
    found: Counter = Counter()
    degree = Counter(topology.edge_index[0].tolist())
    for i, j in topology.edge_index.T.tolist():
        found[min(i, j), max(i, j)] += 1 / (topology.n * degree[i])
    return [(i, j, p) for (i, j), p in found.items()]


def moments(topology) -> tuple[torch.Tensor, torch.Tensor, float]:
    """E[W]; the matrix M ⪰ 0 with E[W M W] = ρ M on the disagreement space; and ρ."""
    n, edges = topology.n, chances(topology)
    first, second = torch.zeros(n, n).double(), torch.zeros(n * n, n * n).double()
    J = torch.full((n, n), 1 / n, dtype=torch.float64)
    for i, j, p in edges:
        W = torch.eye(n, dtype=torch.float64)
        W[[i, i, j, j], [i, j, i, j]] = 0.5
        first += p * W
        second += p * torch.kron(W - J, W - J)
    values, vectors = torch.linalg.eigh(second)
    M = vectors[:, -1].reshape(n, n)
    return first, M * M.trace().sign(), float(values[-1])


@pytest.mark.parametrize(
    "topology",
    [graphs.ring(8), graphs.star(6), graphs.barbell(3), graphs.complete(5)],
    ids=["ring", "star", "barbell", "all"],
)
def test_pairwise_gossip_shrinks_as_the_spectral_radius_says(topology):
    """1 − the mean-square contraction per event against 1 − ρ(E[W ⊗ W]) within 2 %; and E[x_t] = E[W]^t x_0."""
    n = topology.n
    first, M, rho = moments(topology)
    if len(set(torch.bincount(topology.edge_index[0]).tolist())) == 1:  # regular
        m = topology.edge_index.shape[1] / 2
        assert torch.allclose(first, torch.eye(n).double() - graphs.laplacian(topology).to_dense() / (2 * m))
        assert 1 - rho >= graphs.gap(first) - 1e-12  # algorithms.md 1.8: at least λ₂(L)/2m
    length, repeats = round(1.5 / (1 - rho)), 3000
    queue = EventQueue(Graph(graphs.as_schedule(topology)), RANDOM, seed=5)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < length * repeats:
        pairs += [e.rows for e in queue.advance() if e.rows]
    met = torch.tensor(pairs[: length * repeats]).view(repeats, length, 2)  # the clock is memoryless: runs from anew
    values, vectors = torch.linalg.eigh(M)
    x0 = vectors * values.clamp(min=0).sqrt()  # Σ over columns of x xᵀ is M
    start = torch.arange(n).double()
    x, every = torch.cat((x0, start[:, None]), 1).expand(repeats, n, n + 1).clone(), torch.arange(repeats)
    for t in range(length):
        i, j = met[:, t].T
        x[every, i] = x[every, j] = (x[every, i] + x[every, j]) / 2
    shrunk = float(x[:, :, :n].square().sum((1, 2)).mean()) / float(x0.square().sum())
    assert 1 - shrunk ** (1 / length) == pytest.approx(1 - rho, rel=0.02)
    expected = torch.linalg.matrix_power(first, length) @ start
    noise = x[:, :, n].std(0) / math.sqrt(repeats)
    assert bool(((x[:, :, n].mean(0) - expected).abs() < 5 * noise + 1e-12).all())


def zero(x, workers, steps):
    return torch.zeros_like(x)


START = torch.linspace(-1, 2, N * D, dtype=torch.float64).view(N, D) ** 3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "algorithm",
    [DPSGD(), Choco(compressor=gossip.TopK(0.3), gamma=0.3), gossip.GradientTracking()],
    ids=["dpsgd", "choco", "gradient tracking"],
)
def test_without_gradients_the_mean_stays_and_agreement_grows(algorithm, options):
    run = Asynchronous(**options).start(algorithm, zero, RING, START.clone(), cost=UNEVEN, local_steps=2)
    before = gossip.consensus_distance(START)
    run.advance(updates=1500)
    assert torch.allclose(run.models.mean(0), START.mean(0), rtol=0, atol=1e-13)
    assert gossip.consensus_distance(run.models) < 0.05 * before


def test_push_sum_keeps_its_sums_and_finds_the_average_on_a_directed_graph():
    schedule = graphs.static(pushed())
    run = Asynchronous().start(SGP(), zero, schedule, START.clone(), cost=UNEVEN)
    run.advance(updates=2500)
    state = run.progress.state
    assert torch.allclose(state.x.sum(0), START.sum(0), rtol=0, atol=1e-12)
    assert float(state.w.sum()) == pytest.approx(N, abs=1e-12)
    assert float(state.w.std()) > 0.01
    assert torch.allclose(run.models, START.mean(0).expand(N, -1), rtol=0, atol=1e-6)
    edges = {(j, i) for i, j in pushed().nonzero().tolist() if i != j}
    assert set(run.net.meter.edges) == edges
    assert sum(messages for messages, _ in run.net.meter.edges.values()) == 2500  # one way each
    assert {bits / messages for messages, bits in run.net.meter.edges.values()} == {(D + 1) * 64}


def test_push_sum_needs_its_gradients_weighed_where_weights_become_small():
    problem, schedule = Problem.drawn(N, D, noise=0.0, curvature=1.0), graphs.as_schedule(graphs.exponential(N))
    found = []
    for weigh in (False, True):
        run, _ = started(SGP(sgd(0.3)), schedule, RANDOM, problem=problem, weigh=weigh)
        run.advance(updates=1600)
        found.append(float((run.models.mean(0) - problem.optimum).norm() / problem.optimum.norm()))
    assert found[0] > 100  # η h = 0.3 is far above 2 min w
    assert found[1] < 0.5


def test_choco_with_identity_and_gamma_one_is_ad_psgd():
    plain, _ = started()
    choco, _ = started(Choco(sgd(), gossip.Identity(), gamma=1.0))
    for run in (plain, choco):
        run.advance(updates=200)
    assert torch.allclose(plain.models, choco.models, rtol=0, atol=1e-12)
    assert plain.net.meter.edges == choco.net.meter.edges


def test_choco_keeps_a_public_copy_for_each_neighbour():
    """On edge (i, j) both know x̂_ij and x̂_ji: q_ij = C(x_i − x̂_ij), x̂_ij += q_ij, x_i += γ (x̂_ji − x̂_ij)/2."""
    compressor, gamma = gossip.TopK(0.3), 0.4
    run, _ = started(Choco(sgd(), compressor, gamma))
    run.advance(updates=150)
    x, hat = torch.zeros(N, D).double(), {}
    begun, steps = x.clone(), [0] * N
    for event in events_of(run, 150):
        if event.rows:
            i, j = event.rows
            for a, b in ((i, j), (j, i)):
                known = hat.get((a, b), torch.zeros(D).double())
                hat[a, b] = known + compressor((x[a] - known)[None]).dense()[0]
            pull = gamma * (hat[j, i] - hat[i, j]) / 2
            x[i] += pull
            x[j] -= pull
        for w in event.steps:
            x[w] -= 0.05 * PROBLEM.gradient(begun[w][None], torch.tensor([w]), steps[w])[0]
            steps[w] += 1
        for w in event.begins:
            begun[w] = x[w]
    assert len(hat) == 2 * N
    assert torch.allclose(run.models, x, rtol=0, atol=1e-12)


# -- time and staleness ------------------------------------------------------------------------------------------------


def test_equal_workers_are_stale_by_all_others():
    run, _ = started(cost=gossip.Cost())
    run.advance(updates=10 * N)
    assert run.queue.time == 10
    assert run.queue.steps == [10] * N
    assert run.queue.idle == [0] * N
    first = dict(Counter(range(N)))  # of the common start
    later = {N - 1: 9 * N}
    assert run.queue.staleness == {k: first.get(k, 0) + later.get(k, 0) for k in first | later}


def test_answers_take_time_unless_nobody_waits_for_them():
    cost = gossip.Cost(gossip.work.Constant(1.0), gossip.Links(latency=0.25))
    run, _ = started(cost=cost)
    run.advance(seconds=15 + 1e-9)
    assert run.queue.steps == [10] * N  # there and back
    assert run.queue.idle == pytest.approx([5.0] * N)
    run, _ = started(cost=cost, wait=False)
    run.advance(seconds=15 + 1e-9)
    assert run.queue.steps == [15] * N
    assert run.queue.idle == [0] * N


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_nobody_is_farther_ahead_than_the_bound(bound):
    cost = gossip.Cost(gossip.work.Slow(gossip.work.Exponential(), factor=20))
    for options in ({}, {"groups": 3}):
        run, _ = started(cost=cost, bound=bound, **options)
        for updates in range(1, 150):
            run.advance(updates=updates)
            assert max(run.queue.steps) - min(run.queue.steps) <= bound + 1
        assert max(run.queue.steps) - min(run.queue.steps) > 0
        assert max(run.queue.idle) > 10


def test_local_steps_are_as_many_as_said():
    fixed, _ = started(cost=RANDOM, local_steps=4)
    drawn, _ = started(cost=RANDOM, local_steps=4, geometric=True)
    for run in (fixed, drawn):
        run.advance(updates=4000)
    exchanges = [int(run.net.meter.messages.sum()) / 2 for run in (fixed, drawn)]
    assert exchanges[0] == sum(s // 4 for s in fixed.queue.steps)
    assert exchanges[1] == pytest.approx(1000, rel=0.08)


# -- the two ends of the hybrid, and the server ------------------------------------------------------------------------


def synchronous(algorithm, schedule, rounds, local_steps=1):
    net = gossip.Network(schedule, seed=3)
    state = algorithm.init(torch.zeros(N, D).double())
    oracle = lambda x, step: PROBLEM.gradient(x, net.rows, step)  # noqa: E731
    for _, last in gossip.lockstep(algorithm, oracle, net, state, rounds, 0, local_steps):
        state = last
    return algorithm.params(state), net.meter.edges


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [
        (DPSGD(sgd(momentum=0.5)), RING),
        (SGP(sgd()), graphs.one_peer_exponential(N)),
        (Choco(sgd(), gossip.TopK(0.3), 0.4), RING),
        (gossip.GradientTracking(sgd()), RING),
    ],
    ids=["dpsgd", "sgp", "choco", "gradient tracking"],
)
def test_one_synchronous_phase_is_lockstep(algorithm, schedule, local_steps):
    run, _ = started(algorithm, schedule, phases=[[0, "synchronous"]], local_steps=local_steps)
    run.advance(updates=12 * N * local_steps)
    expected, edges = synchronous(algorithm, schedule, 12, local_steps)
    assert torch.allclose(run.models, expected, rtol=0, atol=1e-12)
    assert run.net.meter.edges == edges
    assert run.queue.staleness == {0: 12 * N} if local_steps == 1 else True


def test_groups_reach_from_lockstep_to_ad_psgd():
    whole, _ = started(groups=1, cost=RANDOM)
    whole.advance(updates=10 * N)
    expected, edges = synchronous(DPSGD(sgd()), RING, 10)
    assert torch.allclose(whole.models, expected, rtol=0, atol=1e-12)
    assert whole.net.meter.edges == edges
    single, _ = started(groups=N)
    plain, _ = started()
    for run in (single, plain):
        run.advance(updates=200)
    assert torch.equal(single.models, plain.models)
    assert single.queue.time == plain.queue.time


def test_within_a_group_lost_weight_goes_to_the_diagonal():
    graph = Graph(RING, ((0, 1, 2), (3, 4, 5, 6, 7)))
    W = graph.weights(("group", 0))
    assert torch.allclose(W, torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]]).double() / 3)
    P = Graph(graphs.static(pushed()), ((0, 1, 2), (3, 4, 5, 6, 7)), by_columns=True).weights(("group", 1))
    assert torch.allclose(P.sum(0), torch.ones(5).double())


def test_a_straggler_turns_a_run_asynchronous_and_even_workers_turn_it_back():
    def changing(workers, steps):
        """Worker 0 is ten times slower from its step 5 to its step 8."""
        return torch.where((workers == 0) & (steps >= 5) & (steps < 8), 10.0, 1.0).double()

    run, _ = started(cost=gossip.Cost(changing), waiting=(0.2, 0.5))
    modes = []
    while run.queue.time < 60:
        run.advance(updates=run.queue.updates + 1)
        if not modes or modes[-1] != run.queue.mode:
            modes.append(run.queue.mode)
    assert modes == ["synchronous", "asynchronous", "synchronous"]
    assert torch.allclose(run.models, by_formula(run, run.queue.updates), rtol=0, atol=1e-12)


def test_a_server_whose_workers_keep_step_is_all_reduce():
    run, _ = started(AllReduce(sgd()), bound=0, cost=gossip.Cost(gossip.work.Slow(factor=3.0)))
    expected, _ = synchronous(AllReduce(sgd()), RING, 10)
    run.advance(updates=10 * N)
    assert torch.allclose(run.progress.state.s[0], expected[0], rtol=0, atol=1e-12)
    assert run.queue.time == 30
    edges = run.net.meter.edges
    assert set(edges) == {(i, 0) for i in range(1, N)} | {(0, i) for i in range(1, N)}
    assert {edges[i, 0] for i in range(1, N)} == {(10, 10 * D * 64)}


@pytest.mark.parametrize("bound", [None, 3])
def test_a_server_steps_along_each_gradient_as_it_comes(bound):
    make = sgd(momentum=0.9)
    run, _ = started(AllReduce(make), bound=bound)
    run.advance(updates=120)
    s = torch.nn.Parameter(torch.zeros(D).double())
    optimizer, begun, steps = make([s]), torch.zeros(N, D).double(), [0] * N
    for event in events_of(run, 120):
        for w in event.steps:
            s.grad = PROBLEM.gradient(begun[w][None], torch.tensor([w]), steps[w])[0] / N
            optimizer.step()
            steps[w] += 1
        for w in event.begins:
            begun[w] = s.data
    assert torch.allclose(run.progress.state.s[0], s.data, rtol=0, atol=1e-12)
    assert torch.allclose(run.models, begun, rtol=0, atol=1e-12)


def test_with_many_gradients_ad_psgd_finds_the_neighbourhood_of_the_optimum():
    run, _ = started(DPSGD(sgd(0.02)), problem=Problem.drawn(N, D, noise=0.0))
    run.advance(updates=6000)
    optimum = Problem.drawn(N, D).optimum
    assert float((run.models.mean(0) - optimum).norm()) < 0.1 * float(optimum.norm())


# -- placements and checkpoints ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A run over processes; schedules hold functions, which do not travel."""

    algorithm: Any
    options: dict
    schedule: str = "ring"
    local_steps: int = 1


SCHEDULES = {"ring": RING, "push": graphs.static(pushed()), "one peer": graphs.one_peer_exponential(N)}
CASES = [
    Case(DPSGD(sgd()), {}),
    Case(DPSGD(DECAYED), {"geometric": True, "wait": False}, local_steps=2),
    Case(DPSGD(ADAM), {"groups": [[0, 3], [1, 2, 4], [5, 6, 7]], "bound": 2}),
    Case(SGP(sgd(momentum=0.5)), {}, "push"),
    Case(SGP(sgd()), {"phases": [[0, "synchronous"], [2, "asynchronous"], [5, "synchronous"]]}, "one peer"),
    Case(Choco(sgd(), gossip.TopK(0.3), 0.3), {"adapt_first": True}),
    Case(Choco(sgd(), gossip.RandK(0.3), 0.2), {"waiting": (0.3, 0.6)}),
    Case(gossip.GradientTracking(sgd()), {"bound": 3}),
    Case(AllReduce(sgd(momentum=0.9)), {"bound": 2}),
]
MIDDLE, END = 20, 52


def begun(case: Case, placement, transport) -> AsynchronousRun:
    x = torch.linspace(-1, 1, D, dtype=torch.float64).expand(len(placement.rows), -1).clone()
    return Asynchronous(**case.options).start(
        case.algorithm,
        PROBLEM.gradient,
        SCHEDULES[case.schedule],
        x,
        cost=UNEVEN,
        seed=3,
        local_steps=case.local_steps,
        placement=placement,
        transport=transport,
    )


def outcome(run: AsynchronousRun) -> dict[str, Any]:
    leaves = {k: v.clone() for k, v in tree.leaves(run.progress).items()}
    return {"leaves": leaves, "edges": run.net.meter.edges, "trace": run.queue.state_dict()}


def all_cases(placement, transport, folder) -> list[tuple[dict, dict | None]]:
    """Every case straight through, and half of them from the reference's checkpoint."""
    found = []
    for number, case in enumerate(CASES):
        run = begun(case, placement, transport)
        run.advance(updates=MIDDLE)
        table = run.table()
        if placement.alone:
            gossip.checkpoint.write(folder / f"{number}.pt", table)
        run.advance(updates=END)
        run.table()  # evaluates what is begun, so that gradients can be compared
        resumed = None
        if placement.alone or (number + len(placement.blocks)) % 2:
            again = begun(case, placement, transport)
            again.restore(gossip.checkpoint.read(folder / f"{number}.pt"))
            again.advance(updates=END)
            again.table()
            resumed = outcome(again)
        found.append((outcome(run), resumed))
    return found


def in_a_process(rank, size, store, blocks, folder):
    transport = gossip.connect(rank, size, store, timeout=30)
    with torch.no_grad():
        found = all_cases(Placement(blocks, rank), transport, folder)
    gossip.disconnect()
    return found


def scratch(name: str) -> bool:
    return name.split(".")[-1] in ("r", "z")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asynchronous")
    return folder, all_cases(Placement.here(N), None, folder)


def compare(expected, parts, blocks):
    for name, leaf in expected["leaves"].items():
        if scratch(name):
            continue
        for block, part in zip(blocks, parts):
            assert torch.allclose(part["leaves"][name], leaf[list(block)], rtol=0, atol=1e-10, equal_nan=True), name
    edges: dict = {}
    for part in parts:
        edges |= part["edges"]
        assert part["trace"] == expected["trace"]
    assert edges == expected["edges"]


def test_a_resumed_run_is_the_unbroken_one(here):
    assert here[1]
    for through, resumed in here[1]:
        compare(through, [resumed], [range(N)])


@pytest.mark.parametrize(
    "blocks", [tuple((i,) for i in range(N)), ((0, 1, 2, 3, 4), (5,), (6, 7)), ((7, 2, 4), (0, 1, 3, 5, 6))]
)
def test_real_processes_replay_the_trace(here, blocks, tmp_path):
    folder, expected = here
    ranks = values(launch(in_a_process, len(blocks), tmp_path, blocks, folder))
    for number, (through, _) in enumerate(expected):
        for which in (0, 1):  # straight through, and resumed from a checkpoint of one process
            if ranks[0][number][which] is not None:
                compare(through, [rank[number][which] for rank in ranks], blocks)
    assert any(resumed is not None for _, resumed in ranks[0])


def test_in_a_notebook():
    cost = gossip.Cost(gossip.work.Slow(factor=4.0))
    start = torch.zeros(D, dtype=torch.float64)
    options: dict[str, Any] = {"x0": start, "every": 4, "seed": 3, "cost": cost, "clock": Asynchronous()}
    records = list(gossip.simulate(PROBLEM.gradient, DPSGD(sgd()), graphs.ring(N), 10, **options))
    assert [r.round for r in records] == [4, 8, 10]
    run, _ = started(cost=cost)
    run.advance(updates=10 * N)
    assert torch.equal(records[-1].x, run.models)
    assert records[-1].seconds == run.queue.time == pytest.approx(80 / 7.25, abs=1)
    assert records[-1].messages == 2 * 80
    with pytest.raises(ValueError, match="overlap=True under an asynchronous clock"):
        next(gossip.simulate(PROBLEM.gradient, DPSGD(), graphs.ring(N), 1, overlap=True, **options))
    with pytest.warns(UserWarning, match="forced although incompatible"):
        next(gossip.simulate(PROBLEM.gradient, gossip.ExactDiffusion(), graphs.ring(N), 1, force=True, **options))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bound": -1}, r"bound=-1 is below 0"),
        ({"every_seconds": 0}, r"every_seconds=0 is not positive"),
        ({"phases": [[0, "lazy"]]}, r"each phase is \[round, mode\], with a mode of synchronous"),
        ({"phases": [[0, "hybrid"]]}, r"groups=None: say which workers"),
        ({"waiting": (0.5, 0.2)}, r"0 ≤ low ≤ high ≤ 1"),
        ({"waiting": (0.1, 0.2), "phases": [[0, "synchronous"]]}, r"both say when to switch"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ValueError, match=says):
        Asynchronous(**options)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "options", "says"),
    [
        (
            DPSGD(),
            graphs.static(pushed()),
            {},
            r"DPSGD .* averages two workers, and 0 → 1 is an edge without a way back",
        ),
        (gossip.ExactDiffusion(), RING, {}, r"ExactDiffusion requires mixing that is static"),
        (Choco(), graphs.one_peer_exponential(N), {"groups": 2}, r"Choco"),
        (AllReduce(), RING, {"groups": 2}, r"parameter server, which has no groups"),
        (DPSGD(), graphs.static(torch.eye(N).double()), {}, r"needs a connected graph"),
    ],
)
def test_what_cannot_run_is_refused_with_a_remedy(algorithm, schedule, options, says):
    with pytest.raises(gossip.Incompatible, match=says):
        Asynchronous(**options).check(algorithm, schedule)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"groups=9 for n=8 workers: give 1 to 8"):
        Asynchronous(groups=9).parted(8)
    with pytest.raises(ValueError, match=r"do not hold each of the workers 0…3 exactly once"):
        Asynchronous(groups=[[0, 1], [1, 2, 3]]).parted(4)
    run, _ = started()
    with pytest.raises(ValueError, match="updates and seconds are both infinite"):
        run.advance()
    net = gossip.Network(RING)
    table = gossip.checkpoint.table(DPSGD().init(torch.zeros(N, D).double()), net, 1)
    with pytest.raises(ValueError, match="saved by a synchronous run.*clock=lockstep"):
        run.restore(table)


# -- from a config -----------------------------------------------------------------------------------------------------


SLOW = ("clock=asynchronous", "cost=stragglers", "algorithm=dpsgd", "optimizer=momentum")


def test_a_config_runs_and_resumes_in_any_launch(tmp_path):
    unbroken = run_config(config(*SLOW), tmp_path / "unbroken", keep=True)
    assert unbroken.shape == (5, 4, 10)
    found = rows(tmp_path / "unbroken")
    assert [row["round"] for row in found] == [0, 2, 4, 6, 8]
    assert [row["samples"] for row in found] == [0, 2, 4, 6, 8]
    times = [row["simulated"] for row in found]
    assert times == sorted(set(times))
    assert found[-1]["staleness/worst"] > found[-1]["staleness/mean"] > 1
    blocks = ("launch=blocks", "launch.processes=3")
    run_config(config(*SLOW, *blocks, "rounds=5", "checkpoint_every=3"), tmp_path / "first")
    resumed = run_config(config(*SLOW, f"resume={tmp_path / 'first'}"), tmp_path / "second", keep=True)
    torch.testing.assert_close(resumed, unbroken[-2:], rtol=0, atol=1e-10)
    assert_same([row for row in rows(tmp_path / "second") if row["round"] != 5], found)


def test_evaluations_lie_on_a_grid_of_virtual_seconds(tmp_path):
    run_config(config(*SLOW, "clock.every_seconds=0.02"), tmp_path)
    found = rows(tmp_path)
    times = [row["simulated"] for row in found]
    assert times[:-1] == pytest.approx([0.02 * k for k in range(len(times) - 1)])
    assert found[-1]["round"] == 8
    assert len(found) > 4


def test_a_grid_finer_than_events_are_apart_is_evaluated_where_something_happened(tmp_path):
    run_config(config(*SLOW, "clock.every_seconds=1e-9"), tmp_path)
    times = [row["simulated"] for row in rows(tmp_path)]
    assert 3 < len(times) < 500
    assert all(b > a for a, b in zip(times, times[1:-1]))


def test_options_of_the_algorithm_reach_the_clock(tmp_path):
    for clock in ("swarm", "hybrid", "adaptive"):
        extra = ["clock.groups=2"] if clock == "hybrid" else []
        run_config(config(f"clock={clock}", "local_steps=2", *extra), tmp_path / clock)
        last = rows(tmp_path / clock)[-1]
        assert last["eval/average/suboptimality"] < 0.1 * rows(tmp_path / clock)[0]["eval/average/suboptimality"]
        assert last["samples"] == pytest.approx(16, abs=1)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["overlap=true"], r"overlap=true with clock=asynchronous.*set overlap=false"),
        (["topology=exponential", "weights=uniform"], r"DPSGD .* averages two workers.*SGP, which pushes"),
        (["algorithm=exact_diffusion"], r"ExactDiffusion requires mixing that is static"),
        (["clock.groups=5"], r"groups=5 for n=4 workers: give 1 to 4"),
        (["clock.bound=x"], r"clock.bound=x is text"),
        (["+clock.bounds=1"], r"clock.bounds is no option of gossip.Asynchronous: did you mean bound\?"),
        (["resume=/nowhere"], r"no checkpoint at /nowhere"),
    ],
)
def test_a_config_that_cannot_run_is_refused(tmp_path, overrides, says):
    with pytest.raises(Exception, match=says):  # noqa: PT011  Hydra wraps some
        run_config(config("clock=asynchronous", *overrides), tmp_path)


def test_a_checkpoint_of_the_other_clock_is_refused(tmp_path):
    run_config(config("rounds=2", "checkpoint_every=2"), tmp_path / "lockstep")
    run_config(config("clock=asynchronous", "rounds=2", "checkpoint_every=2"), tmp_path / "asynchronous")
    with pytest.raises(ValueError, match="saved by a synchronous run"):
        run_config(config("clock=asynchronous", f"resume={tmp_path / 'lockstep'}"), tmp_path / "a")
    with pytest.raises(ValueError, match="saved under the asynchronous clock"):
        run_config(config(f"resume={tmp_path / 'asynchronous'}"), tmp_path / "b")


def test_a_warm_up_of_the_messages_is_refused():
    algorithm = gossip.Choco(compressor=gossip.RangeCoded(gossip.WarmUp(gossip.TopK(0.1))))
    with pytest.raises(gossip.Incompatible, match="WarmUp under the asynchronous clock"):
        gossip.Asynchronous().check(algorithm, graphs.as_schedule(graphs.ring(4)))
