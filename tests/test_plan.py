"""A round's W compiled for a placement (gossip/plan.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphs
from gossip import Placement
from gossip.plan import Block, Plan, _run, verify


@st.composite
def matrices(draw, most=7):
    """A random directed W, some entries zero, diagonal included, dense or sparse (with explicit zeros and duplicates)."""
    n = draw(st.integers(1, most))
    entries = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, -0.5, 0.7]), min_size=n * n, max_size=n * n))
    W = torch.tensor(entries, dtype=torch.float64).view(n, n)
    form = draw(st.sampled_from(["dense", "sparse", "explicit zeros", "duplicates"]))
    if form == "dense":
        return W
    if form == "sparse":
        return W.to_sparse_coo().coalesce()
    every = torch.ones(n, n).nonzero().T
    if form == "explicit zeros":
        return torch.sparse_coo_tensor(every, W.flatten(), (n, n), check_invariants=True).coalesce()
    return torch.sparse_coo_tensor(
        torch.cat((every, every), 1), W.flatten().repeat(2) / 2, (n, n), check_invariants=True
    )


@st.composite
def partitions(draw, n):
    """Workers in random order, cut into blocks."""
    order = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    return tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n]))


@given(st.data())
def test_the_blocks_of_all_processes_are_w_minus_the_identity(data):
    W = data.draw(matrices())
    dense = W.to_dense()
    n = len(dense)
    blocks = data.draw(partitions(n))
    plans = [Plan(W, Placement(blocks, rank)) for rank in range(len(blocks))]
    found = torch.zeros(n, n, dtype=torch.float64)

    def write(block: Block, rows: list[int], columns: list[int]) -> None:
        assert block.shape == (len(rows), len(columns))
        for i, j, w in zip(block.dst.tolist(), block.src.tolist(), block.weight.tolist()):
            found[rows[i], columns[j]] += w

    for rank, plan in enumerate(plans):
        write(plan.local, list(blocks[rank]), list(blocks[rank]))
        for q, block in plan.remote.items():
            travels = [blocks[q][i] for i in plans[q].sends[rank].tolist()]  # in the order in which q sends them
            write(block, list(blocks[rank]), travels)
            assert len(set(travels)) == len(travels)
        assert set(plan.sends) == {q for q, other in enumerate(plans) if rank in other.remote}
        assert rank not in plan.sends
        assert rank not in plan.remote
    assert torch.allclose(found, dense - torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-15)


@given(st.data())
def test_edges_are_the_nonzeros_off_the_diagonal_sorted_by_source_and_target(data):
    W = data.draw(matrices())
    dense = W.to_dense()
    n = len(dense)
    blocks = data.draw(partitions(n))
    every = sorted((j, i) for i, j in (dense != 0).nonzero().tolist() if i != j)
    for rank, block in enumerate(blocks):
        plan = Plan(W, Placement(blocks, rank))
        assert plan.out_edges.T.tolist() == [list(e) for e in every if e[0] in block]
        assert plan.in_edges.T.tolist() == [list(e) for e in every if e[1] in block]
        assert torch.equal(torch.stack((plan.edges.src, plan.edges.dst)), plan.out_edges)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("filled", [1.0, 0.1])
def test_a_block_adds_its_product(dtype, shape, filled):
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 4), (6, 9)):
        dense = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
        dense *= torch.rand(rows, columns, generator=generator) < filled
        dst, src = dense.nonzero().T
        block = Block(dst, src, dense[dst, src], (rows, columns))
        into = torch.rand(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
        source = torch.rand(columns, *shape, generator=generator, dtype=torch.float64).to(dtype)
        expected = into.double() + 0.5 * torch.tensordot(dense, source.double(), 1)
        block.add(into, source, 0.5)
        assert into.dtype == dtype
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
        assert torch.allclose(into.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 3)], ids=str)
def test_a_block_adds_into_rows_of_any_memory_layout_or_refuses(shape):
    """Never into a silent copy."""
    block = Block(torch.arange(6), torch.arange(6).flip(0), torch.full((6,), 0.5, dtype=torch.float64), (6, 6))
    turned = torch.zeros(*shape[:1], *shape[1:][::-1], dtype=torch.float64)
    into = turned.transpose(-1, -2) if len(shape) == 3 else torch.zeros(5, 6, dtype=torch.float64).T
    source = torch.arange(float(into.numel()), dtype=torch.float64).view(shape)
    assert not into.is_contiguous()
    if len(shape) == 3:
        with pytest.raises(RuntimeError, match="view"):
            block.add(into, source)
    else:
        block.add(into, source)
        assert torch.equal(into, 0.5 * source.flip(0))


# -- the checker ---------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "ring": lambda: graphs.as_schedule(graphs.ring(8)),
    "star": lambda: graphs.as_schedule(graphs.star(8)),
    "directed": lambda: graphs.static(graphs.uniform(graphs.exponential(8))),
    "one peer": lambda: graphs.one_peer_exponential(8),
    "matchings": lambda: graphs.matchings(graphs.torus(2, 4)),
    "base": lambda: graphs.base_graph(8, 1),
    "drop": lambda: graphs.drop(0.3, graphs.as_schedule(graphs.complete(8)), seed=0),
    "every": lambda: graphs.every(3, graphs.as_schedule(graphs.ring(8))),
    "idle": lambda: graphs.cycle([torch.eye(8, dtype=torch.float64), graphs.metropolis(graphs.path(8))]),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("blocks", [tuple((i,) for i in range(8)), ((5, 0), (3,), (4, 1, 2), (6, 7))], ids=len)
def test_every_schedule_passes_in_any_placement_also_in_packets(make, blocks):
    schedule = make()
    rounds = verify(schedule, blocks, ((torch.float32, (100,)), (torch.float64, ())), chunk=256, plans=40)
    assert rounds == min(schedule.period or 64, 40 // len(blocks))


@given(st.data())
def test_any_matrix_passes(data):
    W = data.draw(matrices())
    blocks = data.draw(partitions(len(W)))
    assert verify(graphs.static(W), blocks, ((torch.float32, (70,)),), chunk=64) == 1


def test_a_schedule_that_changes_its_mind_is_refused():
    """As one would that draws from a generator of its own."""
    answers = iter([graphs.metropolis(graphs.ring(4)), *[graphs.metropolis(graphs.path(4))] * 9])

    class Fickle:
        n, period = 4, None

        def __call__(self, k):
            return next(answers)

    with pytest.raises(
        ValueError, match=r"in round 0 process 0 sends 1 rows to process 3, which awaits 0: schedule\(k\)"
    ):
        verify(Fickle(), ((0,), (1,), (2,), (3,)), plans=4)


def test_who_waits_for_whom_is_said_of_a_deadlock():
    """Process 1 awaits what process 0 sends only in its second round, before it sends what process 0 awaits in its first."""
    work = [[(0, 0, {}, {1: 4}), (1, 0, {1: 8}, {})], [(0, 0, {}, {0: 8}), (1, 0, {0: 4}, {})]]
    with pytest.raises(
        ValueError, match=r"process 0 waits for \[1\] in round 0, chunk 0 \(4 bytes\); process 1 waits for \[0\]"
    ):
        _run(work, window=2)


def test_transfers_of_different_lengths_are_refused():
    work = [[(0, 0, {1: 8}, {})], [(0, 0, {}, {0: 4})]]
    with pytest.raises(
        ValueError, match=r"differ in what passes from 0 to 1: .* = \(0, 0, 4\) at 1 and \(0, 0, 8\) at 0"
    ):
        _run(work, window=2)
