"""A checkpoint holds everything, restores anywhere, and refuses what is not its own (gossip/checkpoint.py)."""

import functools
import os
import resource
import signal

import pytest
import torch
from support import in_threads

import gossip
import graphs
from gossip import Network, checkpoint, lockstep, tree

N, D = 6, 5
RING = graphs.static(graphs.metropolis(graphs.ring(N)))
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TARGETS = torch.linspace(-1, 1, N * D, dtype=torch.float64).view(N, D)


def run(algorithm, net, state, start, stop):
    for _, last in lockstep(algorithm, lambda x, step: x - TARGETS[net.rows] + 0.01 * step, net, state, stop, start):
        state = last
    return state


def begun(algorithm, placement=None, transport=None, d=D):
    net = Network(RING, placement, transport, seed=1)
    return net, algorithm.init(torch.zeros(len(net.rows), d, dtype=torch.float64))


def written(algorithm, path, rounds=3):
    net, state = begun(algorithm)
    state = run(algorithm, net, state, 0, rounds)
    checkpoint.write(path, checkpoint.table(state, net, rounds))
    return net, state


def test_another_graph_is_refused_where_memory_depends_on_it_and_warned_of_elsewhere(tmp_path):
    path, other = tmp_path / "c.pt", graphs.static(graphs.metropolis(graphs.star(N)))
    for algorithm in (gossip.Choco(compressor=gossip.TopK(0.5)), gossip.DPSGD()):
        written(algorithm, path)
        table = checkpoint.read(path)
        checkpoint.compare_graphs(table, graphs.static(graphs.metropolis(graphs.ring(N))), algorithm)  # equal weights
        if isinstance(algorithm, gossip.Choco):
            with pytest.raises(ValueError, match=r"another graph.*what Choco remembers.*same topology"):
                checkpoint.compare_graphs(table, other, algorithm)
        else:
            with pytest.warns(UserWarning, match=r"made on another graph or with other weights"):
                checkpoint.compare_graphs(table, other, algorithm)


ALGORITHMS = {
    "dpsgd": gossip.DPSGD(ADAM),
    "choco": gossip.Choco(MOMENTUM, gossip.RandK(0.4), 0.2),
    "sgp": gossip.SGP(ADAM),
    "tracking": gossip.GradientTracking(MOMENTUM),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("blocks", [[range(N)], [[0, 1, 2], [3, 4, 5]], [[5, 0], [3], [4, 1, 2]]], ids=len)
def test_the_table_is_the_same_from_any_placement_and_restores_in_any(name, blocks, tmp_path):
    algorithm = ALGORITHMS[name]
    net, state = written(algorithm, tmp_path / "whole.pt")
    whole = checkpoint.read(tmp_path / "whole.pt")
    end = tree.leaves(run(algorithm, net, state, 3, 6))

    def rank(placement, transport):
        net, state = begun(algorithm, placement, transport)
        state = run(algorithm, net, state, 0, 3)
        table = checkpoint.table(state, net, 3)
        net, state = begun(algorithm, placement, transport)
        assert checkpoint.restore(whole, state, net) == 3
        state = run(algorithm, net, state, 3, 6)
        return table, checkpoint.table(state, net, 6), transport and transport.handed

    results = in_threads(blocks, rank)
    for table, last, _ in results:
        assert table["leaves"].keys() == whole["leaves"].keys()
        for key, leaf in whole["leaves"].items():
            assert torch.allclose(table["leaves"][key], leaf, rtol=0, atol=1e-13), key
        for key, leaf in end.items():
            assert torch.allclose(last["leaves"][key], leaf, rtol=0, atol=1e-12), key
        counted = {}
        for t in (last, checkpoint.table(state, net, 6)):
            codes, counts = t["meter"]["codes"], t["meter"]["counts"]
            counted[id(t)] = dict(zip(codes.tolist(), counts.T.tolist()))
        assert len({str(sorted(c.items())) for c in counted.values()}) == 1


def test_wire_bytes_are_counted_on_not_twice(tmp_path):
    algorithm = ALGORITHMS["dpsgd"]
    blocks = [[0, 1, 2], [3, 4, 5]]

    def rank(placement, transport, rounds=4):
        net, state = begun(algorithm, placement, transport)
        state = run(algorithm, net, state, 0, 2)
        table = checkpoint.table(state, net, 2)
        net, state = begun(algorithm, placement, transport)
        checkpoint.restore(table, state, net)
        run(algorithm, net, state, 2, rounds)
        return net.meter.wire_bytes, transport.handed

    results = in_threads(blocks, rank)
    assert sum(counted for counted, _ in results) == sum(handed for _, handed in results)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_file_holds_tensors_and_plain_types_only(name, tmp_path):
    """torch's safe mode reads it; every tensor of the state is there, the optimizer's too."""
    net, state = written(ALGORITHMS[name], tmp_path / "a" / "b.pt")  # makes the folder
    table = torch.load(tmp_path / "a" / "b.pt", weights_only=True)
    assert table == table | {"n": N, "round": 3, "version": checkpoint.VERSION}
    leaves = tree.leaves(state)
    assert table["leaves"].keys() == leaves.keys()
    assert any(key.startswith("opt.") for key in leaves)
    assert all(torch.equal(table["leaves"][key], leaf) for key, leaf in leaves.items())
    before = {key: leaf.clone() for key, leaf in table["leaves"].items()}
    copied = checkpoint.table(state, net, 3)
    run(ALGORITHMS[name], net, state, 3, 5)
    assert all(torch.equal(copied["leaves"][key], leaf) for key, leaf in before.items()), (
        "the table is a view of the state"
    )


def test_a_crash_while_writing_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    written(ALGORITHMS["dpsgd"], path, rounds=2)
    whole = path.read_bytes()

    def half(table, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        written(ALGORITHMS["dpsgd"], path)
    assert path.read_bytes() == whole
    monkeypatch.undo()
    replaced = []
    monkeypatch.setattr(os, "fsync", lambda fd: replaced.append(path.read_bytes() == whole))
    written(ALGORITHMS["dpsgd"], path)
    assert replaced == [True], "the old file stands until the new one is on disk"
    assert checkpoint.read(path)["round"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt"]


def test_a_full_disk_is_told_and_leaves_the_former_file(tmp_path):
    path, wide = tmp_path / "c.pt", {"version": checkpoint.VERSION, "x": torch.ones(100_000)}
    checkpoint.write(path, wide)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint .*c\.pt could not be written \(.*File too large.*as it was"):
            checkpoint.write(path, wide)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(checkpoint.read(path)["x"], wide["x"])
    with pytest.raises(OSError, match=r"could not be written \(.*in a folder that may be written to"):
        checkpoint.write(path / "below" / "d.pt", wide)
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_bit_that_flipped_is_noticed(tmp_path):
    path = tmp_path / "é ☃" / "c.pt"
    checkpoint.write(path, {"version": checkpoint.VERSION, "x": torch.ones(1000)})
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(1000).numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"c\.pt cannot be read as a checkpoint \(the checksum of its part .* is wrong"
    ):
        checkpoint.read(path)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nothing.pt"):
        checkpoint.read(tmp_path / "nothing.pt")


@pytest.mark.parametrize(
    "content", [{"version": 0}, {"weights": torch.zeros(1)}, [1, 2]], ids=["old", "foreign", "list"]
)
def test_another_version_or_a_foreign_file_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "d.pt")
    with pytest.raises(ValueError, match=r"d\.pt is a checkpoint of version .*reads version 1"):
        checkpoint.read(tmp_path / "d.pt")


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"version": checkpoint.VERSION, "evil": os.system}, tmp_path / "e.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        checkpoint.read(tmp_path / "e.pt")


def test_another_number_of_workers_is_refused(tmp_path):
    written(ALGORITHMS["dpsgd"], tmp_path / "f.pt")
    for n in (4, 9):
        net = Network(graphs.static(graphs.metropolis(graphs.ring(n))))
        state = ALGORITHMS["dpsgd"].init(torch.zeros(n, D, dtype=torch.float64))
        with pytest.raises(ValueError, match=rf"holds n=6 workers and this run has n={n}: resume with the same n"):
            checkpoint.restore(checkpoint.read(tmp_path / "f.pt"), state, net)


def restored(saved, wanted, path, d=D):
    written(saved, path)
    net, state = begun(wanted, d=d)
    before = {k: v.clone() for k, v in tree.leaves(state).items()}
    try:
        checkpoint.restore(checkpoint.read(path), state, net)
    except ValueError:
        assert all(torch.equal(v, before[k]) for k, v in tree.leaves(state).items()), (
            "a refused restore changed the state"
        )
        raise


@pytest.mark.parametrize(
    ("saved", "wanted", "leaf"),
    [("dpsgd", "choco", "hat"), ("choco", "dpsgd", "hat"), ("tracking", "dpsgd", "y"), ("sgp", "tracking", "y")],
)
def test_another_algorithm_is_refused(saved, wanted, leaf, tmp_path):
    algorithms = {k: type(a)() for k, a in ALGORITHMS.items()}
    with pytest.raises(ValueError, match=rf"{leaf}.*resume with the same algorithm"):
        restored(algorithms[saved], algorithms[wanted], tmp_path / "g.pt")


def test_another_model_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"rows of shape \(5,\) for x, and this run needs float64 rows of shape \(7,\): resume with the same",
    ):
        restored(gossip.DPSGD(), gossip.DPSGD(), tmp_path / "h.pt", d=7)


@pytest.mark.parametrize(("saved", "wanted"), [(ADAM, MOMENTUM), (MOMENTUM, ADAM)])
def test_another_optimizer_is_refused(saved, wanted, tmp_path):
    with pytest.raises(ValueError, match="resume with the same optimizer"):
        restored(gossip.DPSGD(saved), gossip.DPSGD(wanted), tmp_path / "i.pt")


def test_with_and_without_a_scheduler_are_not_the_same(tmp_path):
    ticking = gossip.scheduled(MOMENTUM, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2))
    for saved, wanted in ((ticking, MOMENTUM), (MOMENTUM, ticking)):
        with pytest.raises(ValueError, match="scheduler"):
            restored(gossip.DPSGD(saved), gossip.DPSGD(wanted), tmp_path / "j.pt")
