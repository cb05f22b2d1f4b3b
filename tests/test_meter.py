"""Counts per directed edge (gossip/meter.py)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.meter import Meter
from gossip.plan import Edges

N = 6
events = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.integers(0, 5)), min_size=1, max_size=5),
        st.integers(0, 1000),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    max_size=12,
)


def edges(rows) -> Edges:
    return Edges(*torch.tensor(rows).T)


@given(events)
def test_counts_are_sums_per_edge(log):
    meter, expected = Meter(N), {}
    for rows, bits, messages, repeats in log:
        made = edges(rows)
        for _ in range(repeats):
            meter.record(made, bits, messages)
            for i, j, size in rows:
                a, b = expected.get((i, j), (0, 0))
                expected[i, j] = a + messages, b + bits * size
    assert meter.edges == expected
    for worker in range(N):
        assert int(meter.messages[worker]) == sum(a for (i, _), (a, _) in expected.items() if i == worker)
        assert int(meter.bits[worker]) == sum(b for (i, _), (_, b) in expected.items() if i == worker)
    assert meter.edges == expected  # reading changes nothing


def test_a_schedule_that_never_repeats_keeps_memory_bounded_and_counts_right():
    meter = Meter(N)
    for k in range(1000):
        meter.record(edges([(k % N, (k + 1) % N, 1)]), 8)
        assert len(meter._pending) <= 257
    assert sum(a for a, _ in meter.edges.values()) == 1000
    assert int(meter.bits.sum()) == 8000


def test_counts_are_exact_beyond_float_precision():
    meter = Meter(2)
    meter.record(edges([(0, 1, 1)]), 2**53)
    meter.record(edges([(0, 1, 1)]), 1)
    assert meter.edges == {(0, 1): (2, 2**53 + 1)}


@given(events)
def test_a_table_of_several_meters_is_shared_out_again(log):
    """Each process takes over the edges that leave its workers, whoever counted them before."""
    meters = [Meter(N), Meter(N)]
    for rows, bits, messages, _ in log:
        for place, meter in enumerate(meters):
            own = [r for r in rows if r[0] % 2 == place]
            if own:
                meter.record(edges(own), bits, messages)
    states = [m.state_dict() for m in meters]
    table = {"codes": torch.cat([s["codes"] for s in states]), "counts": torch.cat([s["counts"] for s in states], 1)}
    shared = [Meter(N), Meter(N)]
    shared[0].load_state_dict(table, torch.tensor([0, 1, 2]))
    shared[1].load_state_dict(table, torch.tensor([3, 4, 5]))
    assert {i for i, _ in shared[0].edges} <= {0, 1, 2}
    assert shared[0].edges | shared[1].edges == meters[0].edges | meters[1].edges
