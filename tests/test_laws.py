"""The eleven laws, over every algorithm in `gossip.algorithms`, every compressor and schedule that it accepts.

Algorithms, compressors and configs are discovered, so that a new file is tested without touching this one. Combinations
are covering: every pair of (options, schedule, optimizer, local steps, overlap) values occurs in some case.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import (
    MIDDLE,
    ROUNDS,
    SCHEDULES,
    Case,
    D,
    N,
    Pairwise,
    Problem,
    advance,
    all_cases,
    begun,
    in_a_process,
    local,
    needed,
    pairs,
    pushed,
    sgd,
    start,
    written,
)
from support import launch, values

import gossip
import gossip.algorithms
import gossip.compress
import graphs
from gossip import Algorithm, Incompatible, Network, Placement, checkpoint, lockstep, rng, tree

CONF = Path(__file__).parent.parent / "experiments" / "conf" / "algorithm"


def discovered(package, keep) -> list[type]:
    """The classes that the modules of a package define."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    classes = [c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if c.__module__ == m.__name__]
    return [c for c in classes if keep(c)]


ALGORITHMS = discovered(gossip.algorithms, lambda c: issubclass(c, Algorithm))
COMPRESSORS = discovered(gossip.compress, lambda c: hasattr(c, "delta") and dataclasses.is_dataclass(c))
KINDS = (gossip.Identity, gossip.TopK, gossip.RandK, gossip.Sign, gossip.LowRank)  # one of each; CHOCO has them all
each_algorithm = pytest.mark.parametrize("cls", ALGORITHMS, ids=lambda c: c.__name__)


# -- what the laws run on ----------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": sgd(),
    "momentum": sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "decayed": gossip.scheduled(
        sgd(momentum=0.5), functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
    ),
}


RING, J = SCHEDULES["ring"], torch.full((N, N), 1 / N, dtype=torch.float64)


def accepts(algorithm: Algorithm, schedule, **options) -> bool:
    try:
        gossip.check(algorithm, schedule, **options)
    except Incompatible:
        return False
    return True


def coarse(cls: type) -> Any:
    """A compressor that keeps a quarter, itself or in what it is made of, where it has a choice."""
    options = {f.name: gossip.TopK(0.25) for f in dataclasses.fields(cls) if hasattr(f.default, "ratio")}
    return cls(**options, **({"ratio": 0.25} if "ratio" in {f.name for f in dataclasses.fields(cls)} else {}))


def variants(cls: type) -> dict[str, Algorithm]:
    """An instance per value of each option: every compressor, both of each flag; the rest as the class has it."""
    choices: dict[str, list] = {}
    for field in dataclasses.fields(cls):
        if field.name == "compressor":
            some = COMPRESSORS if cls is gossip.Choco else KINDS
            choices["compressor"] = [c for c in map(coarse, some) if c.delta(D) > 0]
        elif isinstance(field.default, bool):
            choices[field.name] = [field.default, not field.default]
    found = {}
    for chosen in itertools.product(*choices.values()):
        options = needed(cls) | dict(zip(choices, chosen))
        if "gamma" in {f.name for f in dataclasses.fields(cls)}:
            plain = isinstance(options.get("compressor", gossip.Identity()), gossip.Identity)
            options["gamma"] = 1.0 if plain else 0.05 if cls is gossip.DeepSqueeze else 0.2
        label = ", ".join(v if isinstance(v, str) else type(v).__name__ if k == "compressor" else f"{k}={v}"
                          for k, v in options.items() if k in choices)  # fmt: skip
        found[f"{cls.__name__}({label})"] = cls(**options)
    return found


VARIANTS = {name: algorithm for cls in ALGORITHMS for name, algorithm in variants(cls).items()}
ORDERS = [(name, overlap) for name, a in VARIANTS.items() for overlap in ((False, True) if a.overlaps else (False,))]
each_variant = pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS)
FEW = {name: a for name, a in VARIANTS.items() if isinstance(getattr(a, "compressor", gossip.Identity()), KINDS)}
each_few = pytest.mark.parametrize("algorithm", FEW.values(), ids=FEW)  # where compressors are not the point


def with_optimizer(algorithm: Algorithm, optimizer) -> Algorithm:
    if "optimizer" in {f.name for f in dataclasses.fields(algorithm)}:
        return dataclasses.replace(algorithm, optimizer=optimizer)
    return algorithm


def schedule_for(algorithm: Algorithm, *among: str):
    """The first of some schedules that the algorithm accepts."""
    return SCHEDULES[name_for(algorithm, *among)]


def name_for(algorithm: Algorithm, *among: str) -> str:
    return next(name for name in among or SCHEDULES if accepts(algorithm, SCHEDULES[name]))


def final(algorithm, schedule, problem, rounds, x0=None, **options) -> torch.Tensor:
    """The models after some rounds, all rows here."""
    x0 = torch.zeros(problem.b.shape[1], dtype=torch.float64) if x0 is None else x0
    *_, last = gossip.simulate(problem.gradient, algorithm, schedule, rounds, x0=x0, every=rounds, **options)
    return last.x.clone()


def compressor_of(algorithm: Algorithm) -> Any:
    """What it makes its messages by."""
    return getattr(algorithm, "compressor", getattr(algorithm, "quantiser", gossip.Identity()))


def lossy(algorithm: Algorithm) -> bool:
    """Whether its messages lose something."""
    compressor, x = compressor_of(algorithm), start()
    return not torch.equal(compressor(x, rng.key(0, "lossy", torch.arange(N))).dense(), x)


def settles(algorithm: Algorithm) -> bool:
    """Whether compression errors die out, as they do where differences are compressed; models never stop to be lossy."""
    return not (isinstance(algorithm, gossip.DeepSqueeze | gossip.MoniquaSGD) and lossy(algorithm))


# -- law 1 and law 8: one launch per placement runs all cases ------------------------------------------------------------


def covering(factors: dict[str, list]) -> list[dict[str, Any]]:
    """Rows that hold every pair of values of every two factors (greedy)."""
    names = list(factors)
    rows = list(itertools.product(*(range(len(factors[k])) for k in names)))

    def held(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    wanted = set().union(*map(held, rows))
    chosen = []
    while wanted:
        row = max(rows, key=lambda r: len(held(r) & wanted))
        wanted -= held(row)
        chosen.append({k: factors[k][i] for k, i in zip(names, row)})
    return chosen


@functools.cache
def cases() -> list[Case]:
    found = []
    for cls in (*ALGORITHMS, Pairwise):
        own = variants(cls)
        factors = {
            "variant": list(own),
            "schedule": sorted({s for s in SCHEDULES for a in own.values() if accepts(a, SCHEDULES[s])}),
            "optimizer": [name for name in OPTIMIZERS if name != "sgd"],
            "local_steps": [1, 2] if cls.steps_locally else [1],
            "overlap": [False, True] if cls.overlaps else [False],
        }
        for row in covering(factors):
            algorithm = with_optimizer(own[row["variant"]], OPTIMIZERS[row["optimizer"]])
            schedule = row["schedule"]
            if not accepts(algorithm, SCHEDULES[schedule]):  # D² stands fewer graphs than exact diffusion
                schedule = name_for(algorithm)
            name = f"{row['variant']} {schedule} {row['optimizer']} steps={row['local_steps']} overlap={row['overlap']}"
            found.append(Case(name, algorithm, schedule, row["local_steps"], row["overlap"]))
        plain = cls(**needed(cls))
        found.append(Case(f"{cls.__name__} float32", plain, name_for(plain, "directed", "ring"), dtype=torch.float32))
    return found


def assembled(parts: list[dict], blocks) -> dict[str, Any]:
    """One table of what the processes of a placement know; leaves without axes must be equal everywhere."""
    leaves = {}
    for name, first in parts[0]["leaves"].items():
        if first.ndim:
            leaves[name] = first.new_empty((N, *first.shape[1:]))
            for block, part in zip(blocks, parts):
                leaves[name][list(block)] = part["leaves"][name]
        else:
            assert all(torch.equal(part["leaves"][name], first) for part in parts), name
            leaves[name] = first
    edges: dict = {}
    for part in parts:
        assert not edges.keys() & part["edges"].keys(), "two processes meter the same directed edge"
        edges |= part["edges"]
    return {"leaves": leaves, "edges": edges}


PLACEMENTS = {
    "2×4": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "8×1": tuple((i,) for i in range(N)),
    "uneven": ((6,), (0, 3, 5, 7), (4, 1, 2)),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The reference, 1×8: all rows in this process; and its checkpoints."""
    folder = tmp_path_factory.mktemp("here")
    results = all_cases(cases(), Placement.here(N), None, folder / "none", folder)
    return folder, {number: assembled([through], [range(N)]) for number, (through, _) in enumerate(results)}


@pytest.fixture(scope="module", params=PLACEMENTS)
def placed(request, here, tmp_path_factory):
    """The same in real processes: their checkpoints, {case: straight through}, {case: resumed from the reference}."""
    folder = tmp_path_factory.mktemp("placed")
    blocks = PLACEMENTS[request.param]
    outcomes = values(launch(in_a_process, len(blocks), folder, cases(), blocks, here[0], folder, timeout=100))
    through, resumed = (
        {number: assembled(list(parts), blocks) for number, parts in enumerate(zip(*runs)) if parts[0]}
        for runs in ([[run[which] for run in outcome] for outcome in outcomes] for which in (0, 1))
    )
    assert len(through) == len(cases())
    assert len(resumed) >= len(cases()) // 2
    return folder, through, resumed


def differences(found: dict[int, dict], wanted: dict[int, dict]) -> list[str]:
    """The cases in which a leaf or a metered edge differs, with what differs."""
    out = []
    for number, a in found.items():
        case, b = cases()[number], wanted[number]
        tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
        if a["leaves"].keys() != b["leaves"].keys():
            out.append(f"{case.name}: leaves {list(a['leaves'])}, not {list(b['leaves'])}")
            continue
        gaps = {k: float((a["leaves"][k] - v).abs().max()) for k, v in b["leaves"].items()}
        out += [f"{case.name}: {k} differs by {gap:.2g}" for k, gap in gaps.items() if not gap <= tolerance]
        if a["edges"] != b["edges"]:
            odd = [e for e in a["edges"].keys() | b["edges"].keys() if a["edges"].get(e) != b["edges"].get(e)]
            out.append(f"{case.name}: meter differs on edges {sorted(odd)[:3]}")
    return out


def test_law_1_placement(here, placed):
    assert differences(placed[1], here[1]) == []


def test_law_1_the_cases_move_mix_and_meter(here):
    """Guards the law against vacuity: models leave the start, differ between workers, and every case sends something."""
    for case, run in zip(cases(), here[1].values(), strict=True):
        x = run["leaves"]["x"]
        assert (x - torch.linspace(-1, 1, D, dtype=x.dtype)).abs().max() > 1e-3, case.name
        assert x.isfinite().all(), case.name
        assert run["edges"], case.name
    assert {type(c.algorithm) for c in cases()} == {*ALGORITHMS, Pairwise}
    compressors = {type(c.algorithm.compressor) for c in cases() if hasattr(c.algorithm, "compressor")}
    assert compressors == {type(c) for c in map(coarse, COMPRESSORS) if c.delta(D) > 0}


def test_law_8_resumed_in_another_placement(here, placed):
    """A checkpoint of 1×8, restored in real processes, gives the end of the unbroken run."""
    assert differences(placed[2], here[1]) == []


def test_law_8_resumed_here_from_real_processes(here, placed):
    """A checkpoint written by real processes, restored in 1×8."""
    ends = {}
    for number, case in enumerate(cases()):
        if not written(number, Placement(PLACEMENTS["2×4"])):
            continue
        net, state = begun(case, Placement.here(N), None)
        begin = checkpoint.restore(checkpoint.read(placed[0] / f"{number}.pt"), state, net)
        assert begin == MIDDLE
        ends[number] = assembled([local(advance(case, net, state, begin, ROUNDS), net)], [range(N)])
    assert {type(cases()[number].algorithm) for number in ends} == {*ALGORITHMS, Pairwise}
    assert differences(ends, here[1]) == []


# -- law 2 and law 3 -----------------------------------------------------------------------------------------------------


@each_few
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_law_2_compute_on_some_rows_is_those_rows_of_compute_on_all(algorithm, optimizer):
    algorithm = with_optimizer(algorithm, OPTIMIZERS[optimizer])
    case = Case("", algorithm, name_for(algorithm, "ring", "dense"))
    net, state = begun(case, Placement.here(N), None)
    state = advance(case, net, state, 0, 3)  # buffers exist and rows differ
    some, problem = torch.tensor([5, 0, 3]), Problem.drawn()
    part = tree.take(state, some)
    algorithm.compute(part, lambda x: problem.gradient(x, some, 9))
    algorithm.compute(state, lambda x: problem.gradient(x, net.rows, 9))
    whole, part = tree.leaves(state), tree.leaves(part)
    assert whole.keys() == part.keys()
    for name, leaf in whole.items():
        assert torch.allclose(part[name], leaf[some] if leaf.ndim else leaf, rtol=0, atol=1e-13), name


def draws(algorithm: Algorithm) -> bool:
    """Whether its compressor is random; then workers are not interchangeable, unless they share what is drawn (Moniqua)."""
    compressor, x = compressor_of(algorithm), start()
    first, second = (compressor(x.clone(), rng.key(s, "draws", torch.arange(N))).dense() for s in (1, 2))
    return not torch.equal(first, second)


@pytest.mark.parametrize("name", [k for k, a in VARIANTS.items() if not draws(a) or isinstance(a, gossip.MoniquaSGD)])
def test_law_3_relabelling_the_workers_permutes_the_result(name):
    algorithm = with_optimizer(VARIANTS[name], OPTIMIZERS["momentum"])
    permutation = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])  # new worker i is old worker permutation[i]
    problem = Problem.drawn(noise=0.0)
    permuted = Problem(problem.h[permutation], problem.b[permutation])
    for schedule in (s for s in SCHEDULES.values() if accepts(algorithm, s)):
        moved = graphs.cycle([schedule(k).to_dense()[permutation][:, permutation] for k in range(schedule.period)])
        before = final(algorithm, schedule, problem, 7, local_steps=2 if algorithm.steps_locally else 1)
        after = final(algorithm, moved, permuted, 7, local_steps=2 if algorithm.steps_locally else 1)
        assert torch.allclose(after, before[permutation], rtol=0, atol=1e-11)
        assert not torch.allclose(after, before, rtol=0, atol=1e-3) or not algorithm.requires


# -- law 4 and law 5 -----------------------------------------------------------------------------------------------------


@each_variant
def test_law_4_without_gradients_sums_are_conserved(algorithm):
    for schedule in (s for s in SCHEDULES.values() if accepts(algorithm, s)):
        net, x = Network(schedule, seed=1), start()
        total = x.sum(0)
        first = algorithm.init(x)
        oracle = lambda x, step: torch.zeros_like(x)  # noqa: E731
        for _, state in lockstep(algorithm, oracle, net, first, 40):
            assert (state.x.sum(0) - total).abs().max() < 1e-12
            if hasattr(state, "w"):
                assert abs(float(state.w.sum()) - N) < 1e-12
                assert (algorithm.params(state) * state.w).sum(0).allclose(total, rtol=0, atol=1e-12)


@each_few
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "foreach"])
def test_law_4_the_mean_of_a_tracked_gradient_is_the_mean_gradient(algorithm, optimizer):
    """Wherever a state keeps y beside g; and whatever keeps a correction c keeps its mean at zero."""
    foreach = sgd(0.02, momentum=0.9, nesterov=True, foreach=True)
    algorithm = with_optimizer(algorithm, OPTIMIZERS.get(optimizer, foreach))
    problem = Problem.drawn()
    for schedule in (s for s in SCHEDULES.values() if accepts(algorithm, s)):
        net = Network(schedule)
        last = {}

        def oracle(x, step, net=net, last=last):
            last["g"] = problem.gradient(x, net.rows, step)
            return last["g"]

        first = algorithm.init(torch.zeros(N, D, dtype=torch.float64))
        for _, state in lockstep(algorithm, oracle, net, first, 8):
            if "y" in state._fields:
                assert (state.y.mean(0) - last["g"].mean(0)).abs().max() < 1e-12
            if "c" in state._fields:
                assert state.c.mean(0).abs().max() < 1e-12
            assert state.x.isfinite().all()


RATED = {
    f"{name} {s}": (algorithm, SCHEDULES[s])
    for name, algorithm in VARIANTS.items()
    for s in SCHEDULES
    if accepts(algorithm, SCHEDULES[s]) and SCHEDULES[s].static and algorithm.rate(SCHEDULES[s](0)) is not None
}


@pytest.mark.parametrize("case", RATED)
def test_law_4_disagreement_shrinks_at_the_declared_rate(case):
    algorithm, schedule = RATED[case]
    rate = algorithm.rate(schedule(0))
    assert 0 < rate < 1
    rounds = int(-26 / torch.tensor(rate).log())  # by a factor e^-26 in all
    records = gossip.simulate(lambda x, *_: torch.zeros_like(x), algorithm, schedule, rounds, x0=start())
    distance = torch.tensor([r.consensus for r in records], dtype=torch.float64).sqrt()
    window, half = rounds // 4, rounds // 2  # the peak over a window, for modes that oscillate
    shrunk = distance[-window:].max() / distance[-window - half : -half].max()
    assert float(shrunk ** (1 / half)) == pytest.approx(rate, rel=0.03)
    assert distance[-1] < 1e-5 * distance[0]


CENTRAL = {k: a for k, a in VARIANTS.items() if not a.requires or (a.rate(J) or 0) < 1e-6 and a.rate(J) is not None}


def test_law_5_is_declared_by_the_algorithms_that_are_known_to_have_it():
    known = {gossip.DPSGD, gossip.GradientTracking, gossip.Choco, gossip.SGP, gossip.AllReduce, gossip.ExactDiffusion}
    assert {type(a) for a in CENTRAL.values()} >= known & set(ALGORITHMS)


@pytest.mark.parametrize("name", CENTRAL)
@pytest.mark.parametrize("optimizer", [sgd(), sgd(momentum=0.9, nesterov=True)], ids=["sgd", "momentum"])
def test_law_5_at_complete_averaging_it_is_mini_batch_sgd(name, optimizer):
    problem = Problem.drawn()
    x = torch.nn.Parameter(torch.zeros(1, D, dtype=torch.float64))
    central = optimizer([x])
    records = gossip.simulate(
        problem.gradient, with_optimizer(CENTRAL[name], optimizer), graphs.static(J), 12, x0=x.detach()[0].clone()
    )
    for k, record in enumerate(records):
        x.grad = problem.gradient(x.detach().expand(N, D), torch.arange(N), k).mean(0, keepdim=True)
        central.step()
        assert (record.x - x.detach()).abs().max() < 1e-7 * 10 ** (-5 * (CENTRAL[name].rate(J) in (None, 0)))


# -- law 6 ---------------------------------------------------------------------------------------------------------------


@each_variant
def test_law_6_exact_algorithms_reach_the_optimum_and_the_others_do_not(algorithm):
    problem = Problem.drawn(noise=0.0)
    schedule = schedule_for(algorithm, "ring", "dense")
    gamma = getattr(algorithm, "gamma", 1.0)
    x = final(with_optimizer(algorithm, sgd(0.1)), schedule, problem, 800 if gamma == 1 else 400)
    error = float((x - problem.optimum).abs().max())
    if algorithm.exact:
        assert error < 1e-6
    else:
        assert 1e-3 < error < (2 if settles(algorithm) else 3)


def test_law_6_tracking_is_exact_on_a_directed_schedule_too():
    problem = Problem.drawn(noise=0.0)
    for cls in ALGORITHMS:
        for name in ("directed", "one peer"):
            if cls.exact and accepts(cls(**needed(cls)), SCHEDULES[name]):
                x = final(with_optimizer(cls(**needed(cls)), sgd(0.1)), SCHEDULES[name], problem, 600)
                assert (x - problem.optimum).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "local_steps", "exact"),
    [
        (gossip.GradientTracking, sgd(0.05, momentum=0.5, nesterov=True), 1, True),
        (gossip.ExactDiffusion, sgd(0.05, momentum=0.5, nesterov=True), 1, True),
        (gossip.GradientTracking, sgd(0.03), 3, True),
        (gossip.ExactDiffusion, sgd(0.03), 3, False),  # c knows of no drift between exchanges
        (gossip.GradientTracking, functools.partial(torch.optim.Adam, lr=0.02), 1, True),
        (
            gossip.ExactDiffusion,
            functools.partial(torch.optim.Adam, lr=0.02),
            1,
            False,
        ),  # Σ c = 0 balances steps, not gradients
    ],
)
def test_law_6_where_exactness_ends(algorithm, optimizer, local_steps, exact):
    problem = Problem.drawn(noise=0.0)
    x = final(algorithm(optimizer), SCHEDULES["ring"], problem, 700, local_steps=local_steps)
    error = float((x - problem.optimum).abs().max())
    assert error < 1e-6 if exact else error > 1e-3


def fixed_point(W, b, step: float, overlap: bool) -> torch.Tensor:
    """Of D-SGD on f_i = h ‖x − b_i‖² / 2 with η h = `step`, mode by mode (algorithms.md 1.0)."""
    lam, v = torch.linalg.eigh(W.to_dense())
    gain = step / (1 - lam + step) if overlap else step * lam / (1 - lam * (1 - step))
    return v @ (gain[:, None] * (v.T @ b))


@pytest.mark.parametrize(
    ("name", "overlap"), [o for o in ORDERS if not VARIANTS[o[0]].exact and settles(VARIANTS[o[0]])]
)
def test_law_6_biased_algorithms_stop_at_the_closed_form(name, overlap):
    """With consensus step size γ the mixing matrix is I − γ (I − W), whatever the compressor: q = 0 at a fixed point."""
    algorithm, problem = VARIANTS[name], Problem.drawn(noise=0.0, curvature=0.8)
    gamma = getattr(algorithm, "gamma", 1.0)
    W = RING(0).to_dense()
    W = torch.eye(N, dtype=torch.float64) - gamma * (torch.eye(N, dtype=torch.float64) - W)
    rounds = 300 if gamma == 1 else 2500 if isinstance(algorithm, gossip.EFDPSGD) and draws(algorithm) else 700
    x = final(with_optimizer(algorithm, sgd(0.25)), RING, problem, rounds, overlap=overlap)
    while_combining = overlap or isinstance(algorithm, gossip.EFDPSGD)
    assert (x - fixed_point(W, problem.b, 0.2, while_combining)).abs().max() < 1e-8


@pytest.mark.parametrize(("lr", "overlap", "stable"), [
    (0.65, True, True), (0.68, True, False), (1.95, False, True), (2.05, False, False),
])  # fmt: skip
def test_law_6_overlap_is_stable_below_one_plus_the_smallest_eigenvalue(lr, overlap, stable):
    """η h < 1 + λ_n = 2/3 on an even ring with overlap, and η h < 2 without (algorithms.md 1.0)."""
    problem = Problem.drawn(noise=0.0, curvature=1.0)
    x = final(gossip.DPSGD(optimizer=sgd(lr)), RING, problem, 600, overlap=overlap)
    assert bool(x.abs().max() < 100) == stable


def test_law_6_local_momentum_amplifies_the_bias():
    """The fixed point of momentum (η, β) is that of plain steps with η / (1 − β)."""
    problem = Problem.drawn(noise=0.0)
    slow = final(gossip.DPSGD(optimizer=sgd(0.05, momentum=0.5)), RING, problem, 600)
    plain = final(gossip.DPSGD(optimizer=sgd(0.1)), RING, problem, 600)
    assert torch.allclose(slow, plain, rtol=0, atol=1e-10)


# -- law 7 ---------------------------------------------------------------------------------------------------------------

GREEDY = {
    "nesterov foreach": sgd(momentum=0.9, nesterov=True, foreach=True),
    "adam foreach": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, foreach=True),
    "adamw maximize": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
}


@each_few
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *GREEDY])
def test_law_7_gradients_are_borrowed_not_written(algorithm, optimizer):
    algorithm = with_optimizer(algorithm, (OPTIMIZERS | GREEDY)[optimizer])
    net = Network(schedule_for(algorithm, "ring", "dense"))
    buffer, problem = torch.empty(N, D, dtype=torch.float64), Problem.drawn()
    copy = buffer.clone()

    def oracle(x, step):
        if step:
            assert torch.equal(buffer, copy), "the gradient was written to"
        x_before = x.clone()
        copy.copy_(buffer.copy_(problem.gradient(x, net.rows, step)))
        assert torch.equal(x, x_before)
        return buffer

    first = algorithm.init(torch.zeros(N, D, dtype=torch.float64))
    for _ in lockstep(algorithm, oracle, net, first, 5):
        assert torch.equal(buffer, copy), "the gradient was written to"


@each_variant
def test_law_7_same_seed_same_bits(algorithm):
    schedule, problem = schedule_for(algorithm), Problem.drawn()
    first, again, other = (final(algorithm, schedule, problem, 10, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert torch.equal(first, other) != draws(algorithm)


@each_variant
def test_communicate_is_send_then_receive(algorithm):
    """Also where an algorithm says so in one word, `net.mix`."""
    problem, results = Problem.drawn(), []
    for apart in (False, True):
        net = Network(schedule_for(algorithm))
        state = algorithm.init(torch.zeros(N, D, dtype=torch.float64))
        for k in range(4):
            net.begin(k)
            state = algorithm.compute(state, lambda x, k=k, rows=net.rows: problem.gradient(x, rows, k))
            if apart:
                algorithm.send(state, net)
                state = algorithm.receive(state, net)
            else:
                state = algorithm.communicate(state, net)
        results.append((algorithm.params(state).clone(), net.meter.edges))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@each_variant
def test_states_are_updated_in_place(algorithm):
    """No leaf is another tensor after a round than before: nothing is allocated per round."""
    net = Network(schedule_for(algorithm, "ring", "dense"))
    problem = Problem.drawn()
    first = algorithm.init(torch.zeros(N, D, dtype=torch.float64))
    oracle = lambda x, step: problem.gradient(x, net.rows, step)  # noqa: E731
    held = {k: v.data_ptr() for k, v in tree.leaves(first).items()}
    for _, state in lockstep(algorithm, oracle, net, first, 3):
        assert {k: v.data_ptr() for k, v in tree.leaves(state).items() if k in held} == held
        assert algorithm.params(state).data_ptr() == algorithm.params(state).data_ptr()


# -- few workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overlap"),
    [o for o in ORDERS if not (isinstance(VARIANTS[o[0]], gossip.EFDPSGD) and lossy(VARIANTS[o[0]]))],
)
@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_workers(name, n, overlap):
    """At equal curvature the mean model is gradient descent on the mean problem, and one worker is just that."""
    algorithm, problem = VARIANTS[name], Problem.drawn(n=n, noise=0.0, curvature=0.8)
    schedule = graphs.static(torch.full((n, n), 1 / n, dtype=torch.float64))
    x = final(with_optimizer(algorithm, sgd(0.25)), schedule, problem, 10, overlap=overlap)
    assert x.shape == (n, D)
    expected = problem.b.mean(0) * (1 - (1 - 0.2) ** 10)
    assert (x.mean(0) - expected).abs().max() < 1e-12


# -- law 9 and law 10 ----------------------------------------------------------------------------------------------------

VIOLATIONS = {
    "doubly_stochastic": graphs.static(0.9 * graphs.metropolis(graphs.ring(N)).to_dense()),
    "column_stochastic": graphs.static(graphs.uniform(graphs.star(N))),
    "row_stochastic": graphs.static(graphs.uniform(graphs.star(N)).to_dense().T),
    "symmetric": graphs.static(graphs.uniform(graphs.ring(N, directed=True))),
    "static": graphs.cycle([graphs.metropolis(graphs.ring(N)), graphs.metropolis(graphs.star(N))]),
    "contractive": graphs.static(pairs(N, (0, 1), (2, 3), (4, 5), (6, 7))),
}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [pytest.param(a, p, id=f"{k} {p}") for k, a in VARIANTS.items() for p in sorted(a.requires)],
)
def test_law_9_a_violated_property_is_named_with_offender_and_remedy(algorithm, name):
    schedule = VIOLATIONS[name]
    assert getattr(schedule, name) is False
    with pytest.raises(Incompatible) as caught:
        next(gossip.simulate(Problem.drawn().gradient, algorithm, schedule, 1, x0=torch.zeros(D)))
    message = str(caught.value)
    assert type(algorithm).__name__ in message
    assert name.replace("_", " ") in message
    assert schedule.offence(name) in message
    assert gossip.algorithm.REMEDIES[name] in message


NEEDY = {name: a for name, a in FEW.items() if a.requires}


@pytest.mark.parametrize("algorithm", NEEDY.values(), ids=NEEDY)
def test_law_9_what_is_accepted_leads_to_the_average(algorithm):
    """The other side of honesty: `requires` leaves out no property without which gossip stalls or misses the average."""
    x, compressed = start(), algorithm.rate(RING(0)) is None
    for schedule in (s for s in (SCHEDULES | VIOLATIONS).values() if accepts(algorithm, s)):
        *_, last = gossip.simulate(lambda x, *_: torch.zeros_like(x), algorithm, schedule, 600, x0=x, every=600)
        assert (last.x - x.mean(0)).abs().max() < (1e-6 if not compressed else 1e-2 if settles(algorithm) else 0.3)


@pytest.mark.parametrize("algorithm", NEEDY.values(), ids=NEEDY)
def test_law_9_force_warns_and_runs(algorithm):
    for name in algorithm.requires:
        with pytest.warns(UserWarning, match=name.replace("_", " ")):
            x = final(algorithm, VIOLATIONS[name], Problem.drawn(), 3, force=True)
        assert x.isfinite().all()


@each_algorithm
def test_law_9_overlap_and_local_steps_are_refused_where_undefined(cls):
    algorithm = cls(**needed(cls))
    schedule = schedule_for(algorithm)
    for option, allowed in (("overlap", cls.overlaps), ("local_steps", cls.steps_locally)):
        value = {"overlap": True, "local_steps": 2}[option]
        if allowed:
            gossip.check(algorithm, schedule, **{option: value})
            assert option != "overlap" or "With `overlap`" in cls.__doc__, "an overlapped formula must be documented"
        else:
            with pytest.raises(Incompatible, match=f"{option}={value}.*{cls.__name__}.*set {option}="):
                gossip.check(algorithm, schedule, **{option: value})
    with pytest.raises(ValueError, match="local_steps=0"):
        gossip.check(algorithm, schedule, local_steps=0)


def test_law_9_d2_refuses_an_eigenvalue_at_or_below_a_third():
    """Even rings have λ_n = −1/3 exactly; a 2×4 torus −0.384 (Bluefog issue 26). Exact diffusion stands both."""
    for topology, smallest in ((graphs.ring(8), -1 / 3), (graphs.from_edges([(0, 1), (1, 2), (2, 3), (4, 5), (5, 6),
                               (6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]), None)):  # fmt: skip
        W = graphs.metropolis(topology)
        lowest = float(torch.linalg.eigvalsh(W.to_dense())[0])
        if smallest is not None:
            assert lowest == pytest.approx(smallest)
        if lowest <= -1 / 3 + 1e-9:
            with pytest.raises(Incompatible, match=f"λ_min = {lowest:.6f}.*lazy=True"):
                gossip.check(gossip.ExactDiffusion(lazy=False), graphs.static(W))
        problem = Problem.drawn(noise=0.0)
        x = final(gossip.ExactDiffusion(optimizer=sgd(0.1)), graphs.static(W), problem, 1200)
        assert (x - problem.optimum).abs().max() < 1e-6


def configs() -> dict[str, Path]:
    from omegaconf import OmegaConf

    return {str(OmegaConf.load(path)["_target_"]): path for path in sorted(CONF.glob("*.yaml"))}


def test_law_10_exactly_one_config_per_algorithm():
    files = sorted(CONF.glob("*.yaml"))
    assert sorted(configs()) == sorted(f"gossip.{cls.__name__}" for cls in ALGORITHMS)
    assert len(files) == len(ALGORITHMS)


@each_algorithm
def test_law_10_its_keys_are_the_fields_and_it_instantiates(cls):
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    loaded = OmegaConf.load(configs()[f"gossip.{cls.__name__}"])
    assert set(loaded) - {"_target_"} == {f.name for f in dataclasses.fields(cls)}
    loaded = OmegaConf.merge(loaded, needed(cls))
    for compressor in sorted((CONF.parent / "compressor").glob("*.yaml")):
        for optimizer in sorted((CONF.parent / "optimizer").glob("*.yaml")):
            config = {
                "algorithm": loaded,
                "optimizer": OmegaConf.load(optimizer),
                "compressor": OmegaConf.load(compressor),
            }
            made = instantiate(OmegaConf.create(config).algorithm)
            assert isinstance(made, cls)
            x = final(made, schedule_for(made), Problem.drawn(), 2)
            assert x.isfinite().all()


def test_law_10_every_algorithm_and_compressor_is_exported():
    for cls in (*ALGORITHMS, *COMPRESSORS):
        assert getattr(gossip, cls.__name__) is cls
        assert cls.__name__ in gossip.__all__
    files = {p.stem for p in (CONF.parent / "compressor").glob("*.yaml")}
    assert len(files) == len(COMPRESSORS)


# -- law 11: identities (algorithms.md, section 2) -----------------------------------------------------------------------


def trajectory(algorithm, schedule, rounds=12, problem=None, x0=None, **options) -> torch.Tensor:
    problem = problem or Problem.drawn()
    x0 = torch.zeros(D, dtype=torch.float64) if x0 is None else x0
    records = gossip.simulate(problem.gradient, algorithm, schedule, rounds, x0=x0, **options)
    return torch.stack([r.x.clone() for r in records])


def recursion(step, rounds=12, problem=None) -> torch.Tensor:
    """x_{k+1} = step(k, x_k, g_k) in plain matrix algebra."""
    problem = problem or Problem.drawn()
    x, out = torch.zeros(N, D, dtype=torch.float64), []
    for k in range(rounds):
        x = step(k, x, problem.gradient(x, torch.arange(N), k))
        out.append(x)
    return torch.stack(out)


def same(a, b) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if SCHEDULES[s].doubly_stochastic])
def test_law_11_dpsgd_is_its_formula_in_both_orders(schedule):
    schedule, lr = SCHEDULES[schedule], 0.05
    W = [schedule(k).to_dense() for k in range(12)]
    assert same(trajectory(gossip.DPSGD(sgd(lr)), schedule), recursion(lambda k, x, g: W[k] @ (x - lr * g)))
    assert same(trajectory(gossip.DPSGD(sgd(lr)), schedule, overlap=True), recursion(lambda k, x, g: W[k] @ x - lr * g))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_law_11_choco_with_identity_and_gamma_one_is_dpsgd(overlap, optimizer):
    a = gossip.Choco(OPTIMIZERS[optimizer], gossip.Identity(), 1.0)
    b = gossip.DPSGD(OPTIMIZERS[optimizer])
    assert same(trajectory(a, RING, overlap=overlap), trajectory(b, RING, overlap=overlap))


@pytest.mark.parametrize("compressor", [gossip.TopK(0.25), gossip.Sign(), gossip.Identity()], ids=repr)
@pytest.mark.parametrize("overlap", [False, True])
def test_law_11_choco_is_its_replica_form(compressor, overlap):
    """With x̂ written out: q_i = C(x_i − x̂_i), x̂_i += q_i, x_i += γ Σ_j W_ij (x̂_j − x̂_i)."""
    W, lr, gamma = RING(0).to_dense(), 0.05, 0.3
    hat = torch.zeros(N, D, dtype=torch.float64)

    def step(k, x, g):
        nonlocal hat
        stepped = x - lr * g
        hat = hat + compressor((x if overlap else stepped) - hat).dense()
        return stepped + gamma * (W @ hat - hat)

    assert same(trajectory(gossip.Choco(sgd(lr), compressor, gamma), RING, overlap=overlap), recursion(step))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("schedule", ["ring", "directed", "one peer", "idle"])
def test_law_11_sgp_on_doubly_stochastic_weights_is_dpsgd(schedule, overlap):
    schedule = SCHEDULES[schedule]
    for optimizer in OPTIMIZERS.values():
        a, b = gossip.SGP(optimizer), gossip.DPSGD(optimizer)
        assert same(trajectory(a, schedule, overlap=overlap), trajectory(b, schedule, overlap=overlap))
    net = Network(schedule)
    first = gossip.SGP().init(start())
    for _, state in lockstep(gossip.SGP(), lambda x, step: x, net, first, 20):
        assert (state.w - 1).abs().max() < 1e-13


@pytest.mark.parametrize("overlap", [False, True])
def test_law_11_sgp_is_its_formula_on_an_irregular_digraph(overlap):
    P, lr, problem = pushed(), 0.05, Problem.drawn()
    x, w, out = torch.zeros(N, D, dtype=torch.float64), torch.ones(N, 1, dtype=torch.float64), []
    for k in range(12):
        g = problem.gradient(x / w, torch.arange(N), k)
        x, w = (P @ x - lr * g if overlap else P @ (x - lr * g)), P @ w
        out.append(x / w)
    assert same(trajectory(gossip.SGP(sgd(lr)), SCHEDULES["push"], overlap=overlap), torch.stack(out))
    assert (w - 1).abs().max() > 0.1


def test_law_11_push_sum_finds_the_average_where_plain_mixing_does_not():
    """Digraph 0→1, 0→2, 1→2, 2→0 with self loops, x = (0, 3, 6): raw limit (3, 2, 4), weights (1, 2/3, 4/3), truth 3."""
    P = torch.tensor([[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]], dtype=torch.float64)
    net = Network(graphs.static(P))
    first = gossip.SGP().init(torch.tensor([[0.0], [3.0], [6.0]], dtype=torch.float64))
    *_, (_, state) = lockstep(gossip.SGP(), lambda x, step: torch.zeros_like(x), net, first, 100)
    assert state.x[:, 0].tolist() == pytest.approx([3, 2, 4])
    assert state.w[:, 0].tolist() == pytest.approx([1, 2 / 3, 4 / 3])
    assert gossip.SGP().params(state)[:, 0].tolist() == pytest.approx([3, 3, 3])


@pytest.mark.parametrize("lazy", [False, True])
def test_law_11_exact_diffusion_is_its_two_term_form(lazy):
    """x^{t+1} = W̄ (2x^t − x^{t−1} − η g^t + η g^{t−1}), first W̄ (x^0 − η g^0)."""
    schedule, lr = SCHEDULES["dense"], 0.05
    W = schedule(0).to_dense()
    W = (W + torch.eye(N, dtype=torch.float64)) / 2 if lazy else W
    before: list = []

    def step(k, x, g):
        past = 2 * x - before[0] + lr * before[1] if before else x
        before[:] = x, g
        return W @ (past - lr * g)

    assert same(trajectory(gossip.ExactDiffusion(sgd(lr), lazy), schedule), recursion(step))


@pytest.mark.parametrize("schedule", ["ring", "directed", "one peer"])
def test_law_11_gradient_tracking_is_its_formula(schedule):
    """y^k = W y^{k−1} + g^k − g^{k−1}, x^{k+1} = W (x^k − η y^k)."""
    schedule, lr = SCHEDULES[schedule], 0.05
    y = past = torch.zeros(N, D, dtype=torch.float64)

    def step(k, x, g):
        nonlocal y, past
        y = (schedule(k - 1).to_dense() @ y if k else y) + g - past
        past = g
        return schedule(k).to_dense() @ (x - lr * y)

    assert same(trajectory(gossip.GradientTracking(sgd(lr)), schedule), recursion(step))


def test_law_11_local_steps_at_complete_averaging_are_local_sgd():
    problem, lr = Problem.drawn(), 0.05
    x = torch.zeros(N, D, dtype=torch.float64)
    for k in range(5):
        for t in range(3):
            x = x - lr * problem.gradient(x, torch.arange(N), 3 * k + t)
        x = x.mean(0).expand(N, D)
    assert same(final(gossip.DPSGD(sgd(lr)), graphs.static(J), problem, 5, local_steps=3), x)


def test_law_11_adapt_then_combine_and_while_combine_stop_at_the_published_points():
    """Two workers, f_i = a_i (x − b_i)² / 2, a = (1, 3), b = (0, 4), W = 1/2, η = 0.1 (Bluefog PR 63)."""
    problem = Problem(torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[0.0], [4.0]]).double())
    W = torch.full((2, 2), 0.5, dtype=torch.float64)
    algorithm, x0 = gossip.DPSGD(sgd(0.1)), torch.zeros(1, dtype=torch.float64)
    then = final(algorithm, graphs.static(W), problem, 300, x0)
    meanwhile = final(algorithm, graphs.static(W), problem, 300, x0, overlap=True)
    assert then[:, 0].tolist() == pytest.approx([3, 3], abs=1e-6)
    assert meanwhile[:, 0].tolist() == pytest.approx([2.6087, 3.1304], abs=1e-4)


def test_law_11_exact_diffusion_is_its_correction_form_when_the_learning_rate_changes():
    """x^{t+1} = W̄ (x^t − η_t g + c), c ← c + x^{t+1} − (x^t − η_t g + c), and it still finds the exact optimum."""
    W = (RING(0).to_dense() + torch.eye(N, dtype=torch.float64)) / 2
    c = torch.zeros(N, D, dtype=torch.float64)
    decay = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)

    def step(k, x, g):
        nonlocal c
        phi = x - 0.2 * 0.5 ** (k // 5) * g + c
        c = c + W @ phi - phi
        return W @ phi

    assert same(trajectory(gossip.ExactDiffusion(gossip.scheduled(sgd(0.2), decay)), RING), recursion(step))
    problem, once = Problem.drawn(noise=0.0), functools.partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[20])
    x = final(gossip.ExactDiffusion(gossip.scheduled(sgd(0.8), once)), RING, problem, 700)
    assert (x - problem.optimum).abs().max() < 1e-6
