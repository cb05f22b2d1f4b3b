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
from typing import Any, NamedTuple

import pytest
import torch
from support import launch, values

import gossip
import gossip.algorithms
import gossip.compress
import graphs
from gossip import Algorithm, Incompatible, Network, Placement, checkpoint, lockstep, rng, tree

N, D, ROUNDS, MIDDLE = 8, 13, 5, 3
CONF = Path(__file__).parent.parent / "experiments" / "conf" / "algorithm"


def discovered(package, keep) -> list[type]:
    """The classes that the modules of a package define."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    classes = [c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if c.__module__ == m.__name__]
    return [c for c in classes if keep(c)]


ALGORITHMS = discovered(gossip.algorithms, lambda c: issubclass(c, Algorithm))
COMPRESSORS = discovered(gossip.compress, lambda c: hasattr(c, "delta") and dataclasses.is_dataclass(c))
each_algorithm = pytest.mark.parametrize("cls", ALGORITHMS, ids=lambda c: c.__name__)


# -- what the laws run on ----------------------------------------------------------------------------------------------


def sgd(lr=0.05, **options):
    return functools.partial(torch.optim.SGD, lr=lr, **options)


OPTIMIZERS = {
    "sgd": sgd(),
    "momentum": sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "decayed": gossip.scheduled(
        sgd(momentum=0.5), functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
    ),
}


def pushed(n: int = N) -> torch.Tensor:
    """A column-stochastic W of an irregular directed graph."""
    W = torch.eye(n, dtype=torch.float64)
    for i in range(n):
        W[(i + 1) % n, i] = 1
        if i % 2 == 0:
            W[(i + 3) % n, i] = 1
    return W / W.sum(0)


def pairs(n: int, *matched: tuple[int, int]) -> torch.Tensor:
    """Matched workers average in pairs, the others are idle."""
    W = torch.eye(n, dtype=torch.float64)
    for i, j in matched:
        W[[i, i, j, j], [i, j, i, j]] = 0.5
    return W


SCHEDULES = {
    "ring": graphs.static(graphs.metropolis(graphs.ring(N))),
    "dense": graphs.static(0.4 * torch.eye(N, dtype=torch.float64) + 0.6 / N),
    "directed": graphs.static(graphs.uniform(graphs.exponential(N))),
    "one peer": graphs.one_peer_exponential(N),
    "idle": graphs.cycle([pairs(N, (0, 1), (2, 7)), graphs.metropolis(graphs.star(N))]),
    "push": graphs.static(pushed()),
}
RING, J = SCHEDULES["ring"], torch.full((N, N), 1 / N, dtype=torch.float64)


def accepts(algorithm: Algorithm, schedule, **options) -> bool:
    try:
        gossip.check(algorithm, schedule, **options)
    except Incompatible:
        return False
    return True


def variants(cls: type) -> dict[str, Algorithm]:
    """An instance per value of each option: every compressor, both of each flag; the rest as the class has it."""
    choices: dict[str, list] = {}
    for field in dataclasses.fields(cls):
        if field.name == "compressor":
            made = [
                c(**({"ratio": 0.25} if "ratio" in {f.name for f in dataclasses.fields(c)} else {})) for c in COMPRESSORS
            ]
            choices["compressor"] = [c for c in made if c.delta(D) > 0]
        elif isinstance(field.default, bool):
            choices[field.name] = [field.default, not field.default]
    found = {}
    for chosen in itertools.product(*choices.values()):
        options = dict(zip(choices, chosen))
        if "gamma" in {f.name for f in dataclasses.fields(cls)}:
            plain = isinstance(options.get("compressor", gossip.Identity()), gossip.Identity)
            options["gamma"] = 1.0 if plain else 0.2
        label = ", ".join(v if isinstance(v, str) else type(v).__name__ if k == "compressor" else f"{k}={v}"
                          for k, v in options.items() if k != "gamma")  # fmt: skip
        found[f"{cls.__name__}({label})"] = cls(**options)
    return found


VARIANTS = {name: algorithm for cls in ALGORITHMS for name, algorithm in variants(cls).items()}
each_variant = pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS)


def with_optimizer(algorithm: Algorithm, optimizer) -> Algorithm:
    if "optimizer" in {f.name for f in dataclasses.fields(algorithm)}:
        return dataclasses.replace(algorithm, optimizer=optimizer)
    return algorithm


def schedule_for(algorithm: Algorithm, *among: str):
    """The first of some schedules that the algorithm accepts."""
    return next(SCHEDULES[name] for name in among or SCHEDULES if accepts(algorithm, SCHEDULES[name]))


@dataclasses.dataclass(frozen=True)
class Problem:
    """f_i(x) = Σ_c h_ic (x_c − b_ic)² / 2, its gradients noisy with amplitude `noise`; a row of `workers` for each row."""

    h: torch.Tensor
    b: torch.Tensor
    noise: float = 0.0

    @classmethod
    def drawn(cls, n=N, d=D, noise=0.3, curvature=None) -> "Problem":
        u = rng.uniform(rng.key(7, "problem", torch.arange(2 * n)), d)
        h = 0.5 + u[:n] if curvature is None else torch.full((n, d), curvature, dtype=torch.float64)
        return cls(h, 4 * u[n:] - 2, noise)

    def gradient(self, x, workers, step):
        u = rng.uniform(rng.key(7, "noise", step, workers), x.shape[1])
        return ((self.h[workers] * (x - self.b[workers])) + self.noise * (u - 0.5)).to(x.dtype)

    @property
    def optimum(self) -> torch.Tensor:
        return (self.h * self.b).sum(0) / self.h.sum(0)


def start(n=N, d=D) -> torch.Tensor:
    """Rows that differ, as far as an algorithm takes them."""
    return rng.uniform(rng.key(7, "start", torch.arange(n)), d) - 0.5


def final(algorithm, schedule, problem, rounds, x0=None, **options) -> torch.Tensor:
    """The models after some rounds, all rows here."""
    x0 = torch.zeros(problem.b.shape[1], dtype=torch.float64) if x0 is None else x0
    *_, last = gossip.simulate(problem.gradient, algorithm, schedule, rounds, x0=x0, every=rounds, **options)
    return last.x.clone()


# -- law 1 and law 8: one launch per placement runs all cases ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pairwise(Algorithm):
    """A user's algorithm with a message of its own for every edge: x_i += c Σ_j (m_ji / (1 + i) − x_i), m_ji = (1 + i) x_j."""

    optimizer: Any = sgd()

    def init(self, x):
        return gossip.algorithm.Rows(x, gossip.LocalOptimizer(self.optimizer, x))

    def compute(self, state, grad):
        state.opt.step(state.x, grad(state.x))
        return state

    def send(self, state, net):
        pass

    def receive(self, state, net):
        place = {w: i for i, w in enumerate(net.rows.tolist())}
        source = torch.tensor([place[w] for w in net.plan.out_edges[0].tolist()], dtype=torch.int64)
        target = torch.tensor([place[w] for w in net.plan.in_edges[1].tolist()], dtype=torch.int64)
        arrived = net.exchange(state.x[source] * (1 + net.plan.out_edges[1])[:, None].to(state.x))
        arrived = arrived / (1 + net.plan.in_edges[1])[:, None].to(state.x)
        state.x.index_add_(0, target, arrived - state.x[target], alpha=0.2)
        return state


class Case(NamedTuple):
    """One run of law 1."""

    name: str
    algorithm: Algorithm
    schedule: graphs.Schedule
    local_steps: int = 1
    overlap: bool = False
    dtype: torch.dtype = torch.float64


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
            "optimizer": list(OPTIMIZERS),
            "local_steps": [1, 2] if cls.steps_locally else [1],
            "overlap": [False, True] if cls.overlaps else [False],
        }
        for row in covering(factors):
            algorithm = with_optimizer(own[row["variant"]], OPTIMIZERS[row["optimizer"]])
            schedule = row["schedule"]
            if not accepts(algorithm, SCHEDULES[schedule]):  # D² stands fewer graphs than exact diffusion
                schedule = next(s for s in SCHEDULES if accepts(algorithm, SCHEDULES[s]))
            name = f"{row['variant']} {schedule} {row['optimizer']} steps={row['local_steps']} overlap={row['overlap']}"
            found.append(Case(name, algorithm, SCHEDULES[schedule], row["local_steps"], row["overlap"]))
        found.append(Case(f"{cls.__name__} float32", cls(), schedule_for(cls(), "directed", "ring"), dtype=torch.float32))
    return found


def advance(case: Case, net: Network, state, begin: int, end: int):
    problem = Problem.drawn()

    def oracle(x, step):
        return problem.gradient(x, net.rows, step)

    loop = lockstep(case.algorithm, oracle, net, state, end, begin, case.local_steps, case.overlap)
    with torch.no_grad():
        for _, state in loop:
            pass
    return state


def begun(case: Case, placement: Placement, transport):
    net = Network(case.schedule, placement, transport, seed=3)
    x = torch.linspace(-1, 1, D, dtype=torch.float64)
    return net, case.algorithm.init(x.to(case.dtype).expand(len(net.rows), -1).clone())


def local(state, net) -> dict[str, Any]:
    """What this process knows at the end: its rows of every leaf, and its edges of the meter."""
    return {"leaves": {k: v.clone() for k, v in tree.leaves(state).items()}, "edges": net.meter.edges}


def written(number: int, placement: Placement) -> bool:
    """Whether a case writes a checkpoint: all of the reference's do, one in three of those in real processes."""
    return placement.alone or number % 3 == 0


def all_cases(placement: Placement, transport, resume: Path, write: Path) -> list[tuple[dict, dict]]:
    """Every case, in one placement: straight through (writing a checkpoint midway), and resumed from another's checkpoint."""
    results = []
    for number, case in enumerate(cases()):
        net, state = begun(case, placement, transport)
        state = advance(case, net, state, 0, MIDDLE)
        if written(number, placement):
            table = checkpoint.table(state, net, MIDDLE)
            if placement.rank == 0:
                checkpoint.save(write / f"{number}.pt", table)
        through = local(advance(case, net, state, MIDDLE, ROUNDS), net)
        resumed = None
        if resume.is_dir():
            net, state = begun(case, placement, transport)
            begin = checkpoint.restore(checkpoint.load(resume / f"{number}.pt"), state, net)
            resumed = local(advance(case, net, state, begin, ROUNDS), net)
        results.append((through, resumed))
    return results


def in_a_process(rank, size, store, blocks, resume, write):
    transport = gossip.connect(rank, size, store, timeout=30)
    results = all_cases(Placement(blocks, rank), transport, resume, write)
    gossip.disconnect()
    return results


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
    results = all_cases(Placement.here(N), None, folder / "none", folder)
    return folder, [assembled([through], [range(N)]) for through, _ in results]


@pytest.fixture(scope="module", params=PLACEMENTS)
def placed(request, here, tmp_path_factory):
    """The same in real processes: [straight through], [resumed from the reference's checkpoints], and their checkpoints."""
    folder = tmp_path_factory.mktemp("placed")
    blocks = PLACEMENTS[request.param]
    outcomes = values(launch(in_a_process, len(blocks), folder, blocks, here[0], folder, timeout=100))
    runs = [assembled([o[i][which] for o in outcomes], blocks) for which in (0, 1) for i in range(len(cases()))]
    return folder, runs[: len(cases())], runs[len(cases()) :]


def differences(found: list[dict], wanted: list[dict], of: list[Case] | None = None) -> list[str]:
    """The cases in which a leaf or a metered edge differs, with what differs."""
    out = []
    for case, a, b in zip(of or cases(), found, wanted, strict=True):
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
    for case, run in zip(cases(), here[1], strict=True):
        x = run["leaves"]["x"]
        assert (x - torch.linspace(-1, 1, D, dtype=x.dtype)).abs().max() > 1e-3, case.name
        assert x.isfinite().all(), case.name
        assert run["edges"], case.name
    assert {type(c.algorithm) for c in cases()} == {*ALGORITHMS, Pairwise}
    compressors = {type(c.algorithm.compressor) for c in cases() if hasattr(c.algorithm, "compressor")}
    assert compressors == set(COMPRESSORS)


def test_law_8_resumed_in_another_placement(here, placed):
    """A checkpoint of 1×8, restored in real processes, gives the end of the unbroken run."""
    assert differences(placed[2], here[1]) == []


def test_law_8_resumed_here_from_real_processes(here, placed):
    """A checkpoint written by real processes, restored in 1×8."""
    ends, wanted, some = [], [], []
    for number, case in enumerate(cases()):
        if not written(number, Placement(PLACEMENTS["2×4"])):
            continue
        net, state = begun(case, Placement.here(N), None)
        begin = checkpoint.restore(checkpoint.load(placed[0] / f"{number}.pt"), state, net)
        assert begin == MIDDLE
        ends.append(assembled([local(advance(case, net, state, begin, ROUNDS), net)], [range(N)]))
        wanted.append(here[1][number])
        some.append(case)
    assert {type(c.algorithm) for c in some} == {*ALGORITHMS, Pairwise}
    assert differences(ends, wanted, some) == []
