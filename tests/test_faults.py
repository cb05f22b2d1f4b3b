"""Faults: what remains after a loss, restarts, and runs that end by themselves whoever dies, simulated and for real."""

import inspect
import re
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gossip
import gossip.algorithms
import graphs
from experiments import records, schema, train
from experiments.faulty import train as faulty
from experiments.studies import worker_killed
from experiments.trainer import Setup, build
from gossip.faults import Cut, Drop, Faults, Kill, Pause, remains
from tests.placed import Problem, needed, sgd
from tests.placed import start as rows

CONF = Path(train.__file__).parent / "conf"
SMALL = ("n=6", "rounds=60", "evaluate_every=20", "track=off", "progress=false", "partition=iid", "launch.threads=1")
LONGER = ("rounds=150", "evaluate_every=50")  # so that accuracies have settled
ALGORITHMS = [getattr(gossip.algorithms, name) for name in gossip.algorithms.__all__]


def configured(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.resolved(compose("train", [*SMALL, *overrides]))


def ran(folder, *overrides):
    """The record of a run, and how long it took."""
    began = time.monotonic()
    train.run(configured(*overrides), folder)
    return records.read(folder), time.monotonic() - began


# -- what happens when -------------------------------------------------------------------------------------------------


def test_faults_are_functions_of_the_round():
    faults = Faults(
        [Kill(2, round=10, back=30), Kill(0, round=20), Cut((3, 1), 5, 15), Pause(1, 2.0, round=7), Drop(0.1)]
    )
    assert faults.changes(25) == (5, 10, 15, 20)
    assert [faults.alive(4, k) for k in (9, 10, 20, 30)] == [(0, 1, 2, 3), (0, 1, 3), (1, 3), (1, 2, 3)]
    assert [faults.cut(k) for k in (4, 5, 14, 15)] == [frozenset(), {(1, 3)}, {(1, 3)}, frozenset()]
    assert faults.pauses == (Pause(1, 2.0, round=7),)
    assert faults.loss == pytest.approx(0.1)
    assert Faults((Drop(0.5), Drop(0.5))).loss == 0.75
    assert Faults(Kill(1, round=3)) == Faults((Kill(1, round=3),))


@pytest.mark.parametrize(
    "weights_of", [graphs.ring(7), graphs.star(5), graphs.torus(3, 3)], ids=["ring", "star", "torus"]
)
def test_what_remains_mixes_by_a_doubly_stochastic_matrix(weights_of):
    left = remains(weights_of, tuple(range(1, weights_of.n)), frozenset({(1, 2)}))
    assert all(getattr(left.schedule, name) for name in ("doubly_stochastic", "symmetric", "static"))
    if weights_of.n == 7:  # a ring without worker 0 and the link 1–2
        W = torch.zeros(6, 6, dtype=torch.float64)
        W[0, 0] = 1
        W[1:, 1:] = graphs.metropolis(graphs.path(5)).to_dense()
        assert torch.allclose(left.schedule(0).to_dense(), W)
    if weights_of.n == 5:  # a star without its hub
        assert left.parts == ((1,), (2,), (3,), (4,))
        assert left.workers == (1,)


def test_of_several_parts_the_largest_goes_on_and_of_equals_that_of_the_lowest():
    left = remains(graphs.path(6), (0, 1, 3, 4, 5))
    assert (left.workers, left.parts) == ((3, 4, 5), ((0, 1), (3, 4, 5)))
    assert remains(graphs.path(5), (0, 1, 3, 4)).workers == (0, 1)


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (Kill(9, round=1), ValueError, r"names worker 9, and the workers are 0…5"),
        (Kill(1), ValueError, "needs one time: round or seconds"),
        (Kill(1, round=1, seconds=1.0), ValueError, "needs one time"),
        (Kill(1, seconds=1.0), ValueError, "give round, or launch=workers"),
        (Kill(1, round=5, back=5), ValueError, "before that"),
        (Pause(1, 0.0, round=1), ValueError, "positive"),
        (Cut((0, 3), 1, 2), ValueError, r"the link \(0, 3\), which the topology does not have"),
        (Cut((0, 1), 2, 2), ValueError, "before it ends"),
        (Drop(1.0), ValueError, r"lies in \[0, 1\)"),
        (tuple(Kill(w, round=1) for w in range(6)), ValueError, "kill all 6 workers"),
        (Kill(1.5, round=1), ValueError, "worker=1.5: give a whole number"),
        (Kill(1, round=1.5), ValueError, "round=1.5: give a whole number"),
        (Kill(1, round=True), ValueError, "round=True: give a whole number"),
        (Kill(1, round=-1), ValueError, "round=-1: give a whole number"),
        (Kill(1, seconds=-1.0), ValueError, "seconds=-1.0: give a number, at least 0"),
        (Pause(1, "long", round=1), ValueError, "lasting='long': give a number"),
        (Drop(float("nan")), ValueError, "p=nan"),
        (Cut(5, 1, 2), ValueError, r"link=5: give the two workers"),
        (Cut((0,), 1, 2), ValueError, r"link=\(0,\): give the two workers"),
        (Kill(1, round=20), ValueError, "ends after 20 rounds, so that it would never happen"),
        (Kill(1, round=2, back=20), ValueError, "back=20, and the run ends after 20"),
        ((Kill(1, round=1), Kill(1, round=2)), ValueError, "a second time"),
        ((Kill(1, round=1, back=5), Kill(1, round=5)), ValueError, "after it has come back"),
    ],
    ids=str,
)
def test_what_cannot_happen_is_refused(fault, error, told):
    with pytest.raises(error, match=told):
        Faults(fault).check(graphs.ring(6), gossip.DPSGD(), real=False, rounds=20)


def test_a_worker_dies_twice_in_a_simulation_only_and_may_die_at_round_0():
    twice = Faults((Kill(1, round=0, back=2), Kill(1, round=3)))
    twice.check(graphs.ring(6), gossip.DPSGD(), real=False)
    with pytest.raises(ValueError, match="a second time only in a simulation"):
        twice.check(graphs.ring(6), gossip.DPSGD(), real=True)
    shown, _ = simulated(twice.events, graphs.ring(6), rounds=5)
    assert [row["workers"] for row in shown] == [5, 5, 5, 6, 5, 5]


def test_directed_graphs_algorithms_that_cannot_restart_and_things_that_are_no_faults_are_refused():
    class Stubborn(gossip.DPSGD):
        restarts = False

    with pytest.raises(gossip.Incompatible, match="undirected"):
        Faults(Kill(1, round=1)).check(graphs.exponential(6), gossip.DPSGD(), real=False)
    with pytest.raises(gossip.Incompatible, match="Stubborn cannot go on after the loss"):
        Faults(Kill(1, round=1)).check(graphs.ring(6), Stubborn(), real=False)
    Faults(Drop(0.1)).check(graphs.ring(6), Stubborn(), real=False)
    with pytest.raises(ValueError, match="'storm' is no fault"):
        Faults(("storm",))
    with pytest.raises(ValueError, match="None is no fault"):
        Faults(None)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "faults").glob("*.yaml")))
def test_every_config_is_a_fault_with_all_its_fields(name):
    made = instantiate(configured(f"faults={name}")["faults"])
    if name == "none":
        assert made == {}
        return
    assert isinstance(made, Kill | Pause | Cut | Drop | Faults)


def test_faults_without_a_time_happen_at_half_of_a_run_however_short():
    times = {"kill": {"round": 15}, "pause": {"round": 15}, "rejoin": {"round": 15, "back": 22}}
    times["cut"] = {"round": 15, "until": 22}
    for name, expected in times.items():
        (event,) = build(configured(f"faults={name}", "rounds=30")).faults.events
        assert {key: getattr(event, key) for key in expected} == expected
    options = ("faults=kill", "launch=workers", "rounds=30", "faults.seconds=1.5")
    assert build(configured(*options)).faults.events == (Kill(1, seconds=1.5),)
    assert build(configured("faults=kill", "rounds=30", "faults.round=7")).faults.events == (Kill(1, round=7),)
    events = "faults.events=[{_target_: gossip.faults.Kill, worker: 2}, {_target_: gossip.faults.Drop}]"
    assert build(configured("faults=list", events)).faults.events == (Kill(2, round=30), Drop())


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__)
def test_after_a_restart_the_survivors_agree_on_their_average(kind):
    """A ring of six loses worker 2 amid training; then gradients are zero. Without a restart memory of the old W spoils it."""
    if not kind.restarts:
        pytest.skip("refuses faults")
    options = {"optimizer": sgd()} if "optimizer" in inspect.signature(kind).parameters else {}
    algorithm, problem = kind(**options, **needed(kind)), Problem.drawn(n=6)
    net = gossip.Network(graphs.as_schedule(graphs.ring(6)))
    state = algorithm.init(rows(6))
    with torch.no_grad():
        clock = gossip.lockstep(algorithm, lambda x, t: problem.gradient(x, net.rows, t), net, state, 4)
        for _, last in clock:
            state = last
        left = torch.tensor([0, 1, 3, 4, 5])
        x = algorithm.params(state)[left].clone()
        state = algorithm.restart(state, x.clone(), left)
        net = gossip.Network(remains(graphs.ring(6), tuple(left.tolist())).schedule)
        for _, last in gossip.lockstep(algorithm, lambda x, t: torch.zeros_like(x), net, state, 300):
            state = last
    assert torch.allclose(algorithm.params(state).mean(0), x.mean(0), rtol=0, atol=1e-12)
    if algorithm.steps_locally:
        least = 0.05 if isinstance(algorithm, gossip.MoniquaSGD) else 1e-6  # models that are rounded
        assert gossip.consensus_distance(algorithm.params(state)) < least * gossip.consensus_distance(x)


def test_the_optimizers_buffers_outlive_a_restart():
    algorithm = gossip.DPSGD(sgd(momentum=0.9))
    state = algorithm.init(torch.zeros(3, 2))
    algorithm.compute(state, lambda x: torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 2))
    again = algorithm.restart(state, torch.zeros(2, 2), torch.tensor([2, 0]))
    assert again.opt.tensors["momentum_buffer"][:, 0].tolist() == [3.0, 1.0]


# -- simulated runs ----------------------------------------------------------------------------------------------------


class Task:
    """Noisy quadratics of which every row is its own worker's."""

    batch_size = size = None

    def __init__(self, n):
        self.n, self.problem = n, Problem.drawn(n=n)

    def initial(self):
        return torch.linspace(-1, 1, 13, dtype=torch.float64)

    def gradient(self, x, workers, step):
        return self.problem.gradient(x, workers, step), torch.zeros(len(x))

    def evaluate(self, x):
        return {"first": x[:, 0]}


def simulated(faults, topology, rounds=12, algorithm=None, every=1):
    config = {"n": topology.n, "rounds": rounds, "seed": 0, "local_steps": 1, "evaluate_every": every}
    algorithm = algorithm or gossip.DPSGD(sgd())
    said = []
    setup = Setup(Task(topology.n), algorithm, graphs.as_schedule(topology), topology, None, Faults(faults))
    faulty(config, setup, said.append)
    return [s for s in said if "event" not in s], [s["event"] for s in said if "event" in s]


def test_a_simulated_death_is_a_run_of_all_and_then_of_the_others():
    shown, events = simulated(Kill(2, round=5), graphs.ring(6))
    algorithm, task = gossip.DPSGD(sgd()), Task(6)
    x, workers = task.initial().expand(6, -1).clone(), torch.arange(6)
    state = algorithm.init(x)
    net = gossip.Network(graphs.as_schedule(graphs.ring(6)))
    for k in range(12):
        if k == 5:  # what is left of the ring is the path 2 – 3 – 4 – 0 – 1 of rows
            left = torch.tensor([0, 1, 3, 4, 5])
            state, workers = algorithm.init(state.x[left].clone()), left
            net = gossip.Network(graphs.as_schedule(graphs.from_edges([(2, 3), (3, 4), (4, 0), (0, 1)])))
        net.begin(k)
        state = algorithm.compute(state, lambda x, k=k, w=workers: task.gradient(x, w, k)[0])
        state = algorithm.communicate(state, net)
    assert shown[-1]["eval/mean/first"] == pytest.approx(float(state.x[:, 0].mean()), abs=1e-12)
    assert shown[-1]["consensus/distance"] == pytest.approx(gossip.consensus_distance(state.x), rel=1e-9)
    assert [row["workers"] for row in shown] == [6] * 6 + [5] * 7
    assert events == ["worker 2 lost at round 5; 5 of 6 go on"]


def test_a_simulated_return_starts_from_the_lowest_neighbour():
    shown, events = simulated(Kill(3, round=4, back=8), graphs.ring(6))
    assert [row["workers"] for row in shown] == [6] * 5 + [5] * 4 + [6] * 4
    assert events[1] == "worker 3 is back at round 8"
    assert shown[-1]["consensus/distance"] < 10 * shown[4]["consensus/distance"]


def test_a_graph_that_falls_apart_is_told_and_its_largest_part_goes_on():
    shown, events = simulated(Kill(2, round=4), graphs.path(6))
    assert events == ["worker 2 lost at round 4; 3 of 6 go on; the graph fell into 2 parts, and worker 0, 1 is cut off"]
    assert shown[-1]["workers"] == 3


def test_while_a_bridge_is_cut_both_sides_go_on_alone():
    shown, events = simulated(Cut((2, 3), 2, 10), graphs.path(6), rounds=30)
    whole, _ = simulated((), graphs.path(6), rounds=30)
    assert shown[9]["consensus/distance"] > 1.05 * whole[9]["consensus/distance"]
    assert shown[-1]["consensus/distance"] == pytest.approx(whole[-1]["consensus/distance"], rel=0.2)
    assert events == []


# -- real runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run without a death."""
    return ran(tmp_path_factory.mktemp("whole"), "launch=workers", *LONGER)


@pytest.mark.parametrize("worker", [1, *(pytest.param(w, marks=pytest.mark.slow) for w in (0, 2, 3, 5))])
def test_a_killed_worker_costs_neither_the_run_nor_the_accuracy(tmp_path, whole, worker):
    unhurt, _ = whole
    hurt, _ = ran(tmp_path, "launch=workers", "faults=kill", f"faults.worker={worker}", "faults.round=75", *LONGER)
    for name in ("eval/average/accuracy", "eval/mean/accuracy"):
        assert hurt.rows[-1][name] > unhurt.rows[-1][name] - 0.02
    assert hurt.rows[-1]["seconds"] < unhurt.rows[-1]["seconds"] + 10
    assert hurt.rows[-1]["round"] == 150
    assert hurt.rows[-1]["workers"] == 5
    assert hurt.status["status"] == "done"
    assert hurt.status["reason"] == f"worker {worker} lost at round 75; 5 of 6 go on"


def test_a_real_death_part_and_return(tmp_path):
    """On a path the second worker's death cuts off the first; CHOCO restarts, twice."""
    faults = "faults.events=[{_target_: gossip.faults.Kill, worker: 1, round: 10, back: 40}]"
    options = ("topology=path", "algorithm=choco", "compressor=topk", "launch=workers", "faults=list", faults)
    record, _ = ran(tmp_path, *options)
    first, second = record.status["reason"].split("; worker 1 is")
    assert first == ("worker 1 lost at round 10; 4 of 6 go on; the graph fell into 2 parts, and worker 0 is cut off")
    assert second == " back at round 40"
    assert [row["workers"] for row in record.rows][-1] == 5
    assert record.rows[-1]["eval/average/accuracy"] > 0.7


def test_a_pause_makes_the_others_wait_and_changes_nothing(tmp_path):
    options = ("dtype=float64", "n=4", "rounds=20")
    usual, _ = ran(tmp_path / "usual", *options)
    paused, took = ran(
        tmp_path / "paused", *options, "launch=workers", "faults=pause", "faults.round=5", "faults.lasting=1.5"
    )
    assert paused.rows[-1]["eval/mean/loss"] == pytest.approx(usual.rows[-1]["eval/mean/loss"], abs=1e-10)
    assert took > 1.5


@pytest.mark.slow
def test_a_death_at_seconds(tmp_path):
    options = (
        "launch=workers",
        "faults=kill",
        "faults.seconds=1.0",
        "rounds=2000",
        "evaluate_every=500",
    )
    record, _ = ran(tmp_path, *options)
    assert record.rows[-1]["workers"] == 5
    assert "worker 1 lost at round" in record.status["reason"]


def test_a_death_at_round_0_and_a_return_one_round_later(tmp_path):
    options = ("launch=workers", "n=4", "rounds=4", "evaluate_every=1", "task=quadratic", "partition=iid")
    record, _ = ran(tmp_path / "first", *options, "faults=kill", "faults.round=0")
    assert record.status["reason"] == "worker 1 lost at round 0; 3 of 4 go on"
    assert record.rows[-1]["workers"] == 3
    options = (*options, "n=6", "topology=path", "faults=rejoin", "faults.worker=5", "faults.round=1", "faults.back=2")
    record, _ = ran(tmp_path / "second", *options)  # worker 0 is rounds ahead when it hears of the death of worker 5
    assert " worker 5 is back at round " in record.status["reason"] or "too late" in record.status["reason"]


def test_live_runs_stand_deaths_and_returns(tmp_path):
    options = ("clock=live", "clock.pace=0.02", "launch=workers", "faults=rejoin", "faults.round=15", "faults.back=25")
    record, _ = ran(tmp_path, *options)
    last = record.rows[-1]
    assert last["eval/average/accuracy"] > 0.75
    assert record.status["reason"].startswith("worker 1 lost after round")
    assert re.search(r"worker 1 is back|too late", record.status["reason"])
    assert last["workers"] in (5, 6)  # on a busy machine it may be back just after the last look
    assert last["live/exchanges"] > 5
    assert last["consensus/distance"] < record.rows[-2]["consensus/distance"] + 1e-9
    assert 0 < last["live/share/smallest"] <= 1 / 6 <= last["live/share/largest"] < 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("faults=kill", "overlap=true"), "faults together with overlap=True"),
        (("faults=kill", "checkpoint_every=5"), "checkpoint_every=5"),
        (("faults=kill", "cost=wan"), "faults together with cost"),
        (("faults=kill", "resume=somewhere"), "resume=somewhere"),
        (("faults=kill", "clock=asynchronous"), "faults with clock=asynchronous"),
        (("overlap=true", "clock=asynchronous"), "overlap=true with clock=asynchronous"),
        (("faults=kill", "launch=blocks"), "launch=blocks, where a death takes several"),
        (("faults=drop", "algorithm=choco"), "Choco requires a schedule that is static"),
        (("clock=live",), "clock=live is real time: it needs launch=workers"),
        (("clock=live", "launch=workers", "overlap=true"), "exchanges always overlap"),
        (("clock=live", "launch=workers", "algorithm=sgp"), "SGP does more than average"),
    ],
)
def test_what_does_not_go_together_is_incompatible_before_any_process_starts(options, told):
    with pytest.raises(gossip.Incompatible, match=told):
        build(configured(*options))


def test_a_wrong_pace_is_refused():
    with pytest.raises(ValueError, match="one for each of the 6 workers"):
        build(configured("clock=live", "launch=workers", "clock.pace=[1,2]"))


# -- study -------------------------------------------------------------------------------------------------------------


def test_the_study_of_a_killed_worker_can_be_made(tmp_path):
    for more in worker_killed.runs(200).values():
        for split in worker_killed.DATA.values():
            build(configured("study=worker_killed", "n=6", "rounds=200", *split, *more))
    curves = {
        "nobody dies": [[(0, 0.1), (10, 0.9)], [(0, 0.1), (10, 0.7)]],
        "killed": [[(0, 0.1), (7, 0.2), (10, 0.5)]],
    }
    assert [line.split()[-1] for line in worker_killed.table({"like data": curves}).splitlines()] == [
        "data",
        "80.0",
        "50.0",
    ]
    worker_killed.draw({"like data": curves, "unlike data": curves}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
