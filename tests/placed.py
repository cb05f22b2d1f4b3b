"""What the laws run on, and the runs that also happen in other processes: kept light, for every process imports it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gossip
import graphs
from gossip import Algorithm, Network, Placement, checkpoint, lockstep, rng, tree

N, D, ROUNDS, MIDDLE = 8, 13, 5, 3


def sgd(lr=0.05, **options):
    return functools.partial(torch.optim.SGD, lr=lr, **options)


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


NEEDED = {"theta": 4.0}  # options that have no value for all cases


def needed(cls: type) -> dict[str, float]:
    """The options without which a class refuses to be made."""
    return {f.name: NEEDED[f.name] for f in dataclasses.fields(cls) if f.name in NEEDED}


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
    """One run of law 1; schedules hold functions, which do not travel to a process, so they go by name."""

    name: str
    algorithm: Algorithm
    schedule: str
    local_steps: int = 1
    overlap: bool = False
    dtype: torch.dtype = torch.float64


def advance(case: Case, net: Network, state, begin: int, end: int):
    problem = Problem.drawn()

    def oracle(x, step):
        return problem.gradient(x, net.rows, step)

    loop = lockstep(case.algorithm, oracle, net, state, end, begin, case.local_steps, case.overlap)
    with torch.no_grad():
        for _, last in loop:
            state = last
    return state


def begun(case: Case, placement: Placement, transport):
    net = Network(SCHEDULES[case.schedule], placement, transport, seed=3)
    x = torch.linspace(-1, 1, D, dtype=torch.float64)
    return net, case.algorithm.init(x.to(case.dtype).expand(len(net.rows), -1).clone())


def local(state, net) -> dict[str, Any]:
    """What this process knows at the end: its rows of every leaf, and its edges of the meter."""
    return {"leaves": {k: v.clone() for k, v in tree.leaves(state).items()}, "edges": net.meter.edges}


def written(number: int, placement: Placement) -> bool:
    """Whether a case writes a checkpoint: all of the reference's do, one in three of those in real processes."""
    return placement.alone or number % 3 == 0


def resumes(number: int, blocks) -> bool:
    """Whether a case is resumed from the reference's checkpoint: half of them, the other half where processes are odd."""
    return (number + len(blocks)) % 2 == 0


def all_cases(
    cases: list[Case], placement: Placement, transport, resume: Path, write: Path
) -> list[tuple[dict, dict | None]]:
    """Every case, in one placement: straight through (writing a checkpoint midway), and resumed from another's checkpoint."""
    results = []
    for number, case in enumerate(cases):
        net, state = begun(case, placement, transport)
        state = advance(case, net, state, 0, MIDDLE)
        if written(number, placement):
            table = checkpoint.table(state, net, MIDDLE)
            if placement.rank == 0:
                checkpoint.write(write / f"{number}.pt", table)
        through = local(advance(case, net, state, MIDDLE, ROUNDS), net)
        resumed = None
        if resume.is_dir() and resumes(number, placement.blocks):
            net, state = begun(case, placement, transport)
            begin = checkpoint.restore(checkpoint.read(resume / f"{number}.pt"), state, net)
            resumed = local(advance(case, net, state, begin, ROUNDS), net)
        results.append((through, resumed))
    return results


def in_a_process(rank, size, store, cases, blocks, resume, write):
    transport = gossip.connect(rank, size, store, timeout=30)
    results = all_cases(cases, Placement(blocks, rank), transport, resume, write)
    gossip.disconnect()
    return results
