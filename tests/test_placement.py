"""Placements partition the workers (gossip/placement.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip import Placement


@given(st.integers(1, 40), st.data())
def test_even_blocks_are_consecutive_complete_and_level(n, data):
    processes = data.draw(st.integers(1, n))
    placements = [Placement.even(n, processes, rank) for rank in range(processes)]
    assert torch.cat([p.rows for p in placements]).tolist() == list(range(n))
    sizes = [len(p.rows) for p in placements]
    assert max(sizes) - min(sizes) <= 1
    for rank, p in enumerate(placements):
        assert p.n == n
        assert p.rank == rank
        assert p.alone == (processes == 1)
        assert bool((p.owner[p.rows] == rank).all())


def test_rows_keep_the_order_of_their_block():
    p = Placement(((2, 0), (1,)), 0)
    assert p.rows.tolist() == [2, 0]
    assert p.owner.tolist() == [0, 1, 0]


def test_here_hosts_everyone():
    p = Placement.here(4)
    assert p.alone
    assert p.rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("blocks", "rank", "message"),
    [
        (((0, 1), (1, 2)), 0, "exactly once"),
        (((0,), (2,)), 0, "exactly once"),
        (((1, 2),), 0, "exactly once"),
        (((0, 1), ()), 0, "process 1 without a worker"),
        (((0,), (1,)), 2, "rank 2 is outside 0…1"),
        (((0,), (1,)), -1, "rank -1 is outside"),
    ],
)
def test_what_is_no_partition_is_refused(blocks, rank, message):
    with pytest.raises(ValueError, match=message):
        Placement(blocks, rank)


def test_more_processes_than_workers_are_refused():
    with pytest.raises(ValueError, match="n=3 workers cannot fill 4 processes; use at most 3"):
        Placement.even(3, 4, 0)
