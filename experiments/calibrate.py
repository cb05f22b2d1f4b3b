"""Measure what a local step and a message really take here, and write the cost file that `cost=file` reads.

python -m experiments.calibrate algorithm=dpsgd task=digits n=4 out=cost.yaml
torchrun --nnodes 4 --node-rank $i --master-addr ADDRESS --nproc-per-node 1 -m experiments.calibrate n=4 out=cost.yaml
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import gossip
import graphs
from experiments import launch, schema
from experiments.trainer import Setup, build

USAGE = """python -m experiments.calibrate out=cost.yaml [trace=steps.csv] [seconds=1] [any option of experiments.train]

Times this run's local steps (gradient, optimizer, compression) and the messages between its n workers, each in a process
of its own on this machine, or on the hosts of torchrun, and writes a cost file:

    python -m experiments.train cost=file cost.path=cost.yaml …

out=cost.yaml     the cost file
trace=steps.csv   also the seconds of every step, a column per worker, for cost/work=trace
seconds=1         how long each figure may be measured, about
"""
CONF = Path(__file__).parent / "conf"
OWN = ("out=", "trace=", "seconds=")
LARGE = 4_000_000  # bytes of the largest message that is timed


def read(path: str) -> gossip.Cost:
    """The cost in a file that this command has written.

    Raises ValueError where there is no such file.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"cost.path={path} is no file: python -m experiments.calibrate out={path} measures and writes it"
        )
    return instantiate(OmegaConf.load(path))


class Measured(NamedTuple):
    """Median seconds of exchanges between n processes.

    Attributes:
        bare: (n, n) of pairs, of eight bytes, without our code.
        empty, full: (n, n) of pairs, as the network makes them, of four bytes and of `bytes` bytes.
        empty_all, full_all: the same with everybody at once.
        rested: of pairs and `bytes` / 10 bytes, after a pause: the slowest.
    """

    bare: list[list[float]]
    empty: list[list[float]]
    full: list[list[float]]
    empty_all: float
    full_all: float
    rested: float
    bytes: int


def links(measured: Measured) -> gossip.Links:
    """The link model that these exchanges obey, by solving for one number after the other.

    | exchange | takes |
    |---|---|
    | bare | 2ℓ: gloo's sender waits for word that the receiver is ready |
    | of a pair | 2ℓ + 2o + M/B |
    | of all n | 2ℓ + 2(n − 1)o + (n − 1)(1 + ε(n − 2)) M/N |
    | of a pair after a pause | 2ℓ + 2o + max(0, M/10 − S)/N |

    Where all pairs are alike, one number serves them all, and the file any number of workers; the card's N then is B.

    >>> def pairs(t):
    ...     return [[0.0, t, t], [t, 0.0, t], [t, t, 0.0]]
    >>> found = links(Measured(pairs(0.020), pairs(0.022), pairs(0.062), 0.024, 0.112, 0.026, bytes=4_000_000))
    >>> [round(v, 4) for v in (found.latency, found.per_message, found.nic / 1e6, found.crowding, found.burst / 1e6)]
    [0.01, 0.001, 100.0, 0.1, 0.0]
    """
    bare, empty, full = (torch.tensor(t, dtype=torch.float64) for t in (measured.bare, measured.empty, measured.full))
    n, M = len(bare), measured.bytes
    pairs = ~torch.eye(n, dtype=torch.bool)
    overhead = max(0.0, float((empty - bare)[pairs].median()) / 2)
    gap, spared = empty[pairs], 0.0  # a bucket fills during the gap of an exchange
    for _ in range(50):
        rate = M / (full[pairs] - (gap - spared).clamp(min=0)).clamp(min=1e-9)
        nic = float(rate.median() if _alike(rate) else rate.max())
        burst = M / 10 - nic * (measured.rested - float(gap.max()))
        burst = burst if burst > 0.2 * M / 10 else 0.0
        spared = burst / nic
    bandwidth = torch.full_like(full, 1e15).masked_scatter(pairs, rate)
    crowding = 0.0
    if n > 2:
        crowded = (measured.full_all - max(0.0, measured.empty_all - spared)) / ((n - 1) * M / nic)
        crowding = max(0.0, crowded - 1) / (n - 2)
    return gossip.Links(
        latency=_one_or_all(torch.minimum(bare, empty) / 2, pairs, 1e-3),
        bandwidth=float("inf") if _alike(rate) else bandwidth.tolist(),
        nic=nic,
        crowding=crowding,
        burst=burst,
        per_message=overhead,
        handshake=True,
    )


def _alike(values: torch.Tensor, noise: float = 0.0) -> bool:
    return float(values.max() - values.min()) <= max(noise, 0.25 * float(values.min()))


def _one_or_all(table: torch.Tensor, pairs: torch.Tensor, noise: float) -> Any:
    return float(table[pairs].median()) if _alike(table[pairs], noise) else table.tolist()


def exchanges(transport: gossip.Transport, seconds: float = 1.0) -> Measured:
    """Time exchanges between the processes; every process must call it."""
    n, rank = transport.size, transport.rank
    if n < 2:
        raise ValueError("there is one process, and links need two: give n=2 or more")
    placement = gossip.Placement.even(n, n, rank)

    def bare(partner: int) -> Callable[[], None]:
        out, into = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
        batch = transport.prepare(*({partner: [b]} if partner != rank else {} for b in (out, into)))

        def once() -> None:
            transport.start(batch, 0)
            transport.finish()

        return once

    def mixed(weights: torch.Tensor, bytes: int) -> Callable[[], None]:
        net, x = gossip.Network(graphs.static(weights), placement, transport), torch.zeros(1, max(1, bytes // 4))
        rounds = iter(range(10**9))

        def once() -> None:
            net.begin(next(rounds))
            net.mix(x)

        return once

    def timed(once: Callable[[], None], pause: float = 0.0) -> float:
        """Median seconds of exchanges one after the other, once warm, at this process."""
        once()
        first = max(transport.gather(_seconds(once, 1)))
        once()  # now all of them are here
        times = []
        for _ in range(max(3, min(50, int(seconds / (first + pause) / 2)))):
            time.sleep(pause)
            times.append(_seconds(once, 1))
        return median(times)

    everybody = torch.full((n, n), 1 / n, dtype=torch.float64)
    first = max(transport.gather(_seconds(mixed(everybody, LARGE // 40), 2)))
    bytes = LARGE if first < 0.1 * seconds else LARGE // 10
    matches = _tournament(n)
    matrices = []
    for partner in matches:
        W = torch.eye(n, dtype=torch.float64)
        for i, j in enumerate(partner):
            W[i] = (torch.arange(n) == i).double() / 2 + (torch.arange(n) == j).double() / 2
        matrices.append(W)
    mine = [[timed(bare(partner[rank])) for partner in matches]]
    mine += [[timed(mixed(W, size)) for W in matrices] for size in (0, bytes)]
    mine += [[timed(mixed(matrices[0], bytes // 10), pause=0.1)]]
    taken = transport.gather(mine)
    tables = [torch.zeros(n, n, dtype=torch.float64) for _ in range(3)]
    for t, table in enumerate(tables):
        for m, partner in enumerate(matches):
            for i, j in enumerate(partner):
                table[i, j] = max(taken[i][t][m], taken[j][t][m]) if i != j else 0.0
    all_empty, all_full = (max(transport.gather(timed(mixed(everybody, size)))) for size in (0, bytes))
    one, two, three = (table.tolist() for table in tables)
    return Measured(one, two, three, all_empty, all_full, max(t[3][0] for t in taken), bytes)


def _tournament(n: int) -> list[list[int]]:
    """Rounds in which everybody meets everybody: partner[i] of each, i itself where there is none (circle method).

    >>> _tournament(4)
    [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 2]]
    """
    m = n + n % 2
    rounds = []
    for r in range(m - 1):
        seats = [0, *(1 + (k + r) % (m - 1) for k in range(m - 1))]
        partner = list(range(n))
        for a, b in zip(seats[: m // 2], reversed(seats[m // 2 :])):
            if a < n and b < n:
                partner[a], partner[b] = b, a
        rounds.append(partner)
    return sorted(rounds, reverse=True)


def _seconds(f: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        f()
    return (time.perf_counter() - start) / repeat


def steps(
    setup: Setup,
    worker: int,
    transport: gossip.Transport | None = None,
    seconds: float = 1.0,
    local_steps: int = 1,
) -> list[float]:
    """Seconds of each of one worker's local steps: gradient, optimizer, and what the algorithm does before it sends.

    With a transport, all processes begin together, so that cores and memory are shared as in a real run.
    """
    task, algorithm = setup.task, setup.algorithm
    net = gossip.Network(graphs.as_schedule(graphs.complete(1)))
    me, taken = torch.tensor([worker % task.n]), []

    def oracle(x: torch.Tensor, step: int) -> torch.Tensor:
        return task.gradient(x, me, step)[0]

    with torch.no_grad():
        state = algorithm.init(task.initial()[None].clone())
        clock = gossip.lockstep(algorithm, oracle, net, state, 10**9, 0, local_steps)
        for _ in range(3):  # the first steps compile and allocate
            next(clock)
        if transport is not None:
            transport.barrier()
        begun = time.perf_counter()
        while len(taken) < 10 or (time.perf_counter() - begun < seconds and len(taken) < 1000):
            taken.append(_seconds(lambda: next(clock), 1) / local_steps)
    return taken


def measure(
    rank: int, transport: gossip.Transport, send: Any, config: Mapping[str, Any], seconds: float
) -> tuple[Any, Measured]:
    """One process's share: its steps, then the exchanges with the others. Returns all workers' steps."""
    every = transport.gather(steps(build(config), rank, transport, seconds, config["local_steps"]))
    return every, exchanges(transport, seconds)


def document(every: Sequence[Sequence[float]], found: gossip.Links, config: Mapping[str, Any]) -> str:
    """The cost file."""
    means = torch.tensor([sum(s) / len(s) for s in every], dtype=torch.float64)
    alike = float(means.max()) <= 1.25 * float(means.min())
    seconds = float(means.mean()) if alike else means.tolist()
    names = ("latency", "bandwidth", "nic", "crowding", "burst", "per_message", "handshake")
    node = {
        "_target_": "gossip.Cost",
        "work": {"_target_": "gossip.work.Constant", "seconds": seconds},
        "links": {"_target_": "gossip.Links", **{name: getattr(found, name) for name in names}},
        "average": "ring",
    }
    name, task = (str(config[k]["_target_"]).rsplit(".", 1)[-1] for k in ("algorithm", "task"))
    head = [
        f"Measured {time.strftime('%Y-%m-%d')} by experiments.calibrate: {len(every)} processes, {os.cpu_count()} cores here.",
        f"Steps of {name} on {task}; seconds, and bytes per second.",
    ]
    return "".join(f"# {line}\n" for line in head) + OmegaConf.to_yaml(OmegaConf.create(node))


def summary(cost: gossip.Cost, n: int, d: int) -> str:
    """What the cost file says, in words: the step, the message, and a round of some methods on a model of d float32."""
    work = cost.compute(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    empty, full = (cost.message(0, 1, bytes) for bytes in (0, 4 * d))
    lines = [
        f"a local step {float(work.mean()) * 1e3:.3g} ms, a message {empty * 1e3:.3g} ms, with {d:,} float32 {full * 1e3:.3g} ms"
    ]
    ring, peer = graphs.ring(n), graphs.one_peer_exponential(n)
    for name, graph, average in (("ring", ring, False), ("one-peer", peer, False), ("all-reduce", ring, True)):
        seconds = gossip.seconds_per_round(cost, graph, 4 * d, all_reduce=average)
        lines.append(f"{name:>10} {seconds * 1e3:.3g} ms a round")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    if {"-h", "--help"} & set(arguments) or not any(a.startswith("out=") for a in arguments):
        print(USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    own = dict(a.split("=", 1) for a in arguments if a.startswith(OWN))
    overrides = [a for a in arguments if not a.startswith(OWN)]
    try:
        seconds = float(own.get("seconds", 1.0))
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = schema.resolved(compose("train", ["n=2", *overrides]))
        schema.check(config)
        if launch.under_torchrun():
            transport = gossip.connect(timeout=120)
            every, measured = measure(transport.rank, transport, None, config, seconds)
            rank = transport.rank
            gossip.disconnect()
        else:
            rank = 0
            every, measured = launch.run_processes(measure, (config, seconds), config["n"], timeout=120)[0]
    except (ValueError, HydraException, OmegaConfBaseException, launch.WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if rank:
        return 0
    text = document(every, links(measured), config)
    Path(own["out"]).write_text(text, encoding="utf-8")
    if "trace" in own:
        lines = [", ".join(f"{s:.6g}" for s in line) for line in zip(*every)]
        Path(own["trace"]).write_text("# seconds of a local step, a column per worker\n" + "\n".join(lines) + "\n")
    task = build(config).task
    print(summary(read(own["out"]), len(every), task.initial().numel()))
    print(f"cost file: {own['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
