"""What travels: one buffer per message, aligned parts, a header that is verified (gossip/wire.py)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.wire import HEADER, Packet, row_bits, spec

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
]
parts_of = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=2).map(tuple)), min_size=1, max_size=4
)


def filled(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@given(parts_of, st.integers(1, 4))
def test_parts_are_separate_views_of_one_buffer(specs, rows):
    packet = Packet(tuple(specs), rows)
    wanted = [filled(dtype, (rows, *shape), i) for i, (dtype, shape) in enumerate(specs)]
    packet.seal(3, 1, 2)
    for place, part in zip(packet.parts, wanted, strict=True):
        place.copy_(part)
    packet.check(3, 1, 2)  # no part overlaps the header
    for place, part in zip(packet.parts, wanted):
        assert torch.equal(place, part)
        assert place.dtype == part.dtype
        assert place.untyped_storage().data_ptr() == packet.buffer.untyped_storage().data_ptr()
    payload = sum(p.numel() * p.element_size() for p in wanted)
    assert HEADER + payload <= packet.length == packet.buffer.numel() <= HEADER + payload + 7 * len(specs)


@given(parts_of, st.integers(1, 4))
def test_a_packet_arrives_as_bytes(specs, rows):
    """Copying the buffer alone carries everything."""
    sent, got = Packet(tuple(specs), rows), Packet(tuple(specs), rows)
    for i, part in enumerate(sent.parts):
        part.copy_(filled(part.dtype, part.shape, i))
    sent.seal(7, 0, 1)
    got.buffer.copy_(sent.buffer)
    got.check(7, 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(sent.parts, got.parts))


@given(parts_of, st.integers(1, 4))
def test_row_bits_are_the_bits_of_one_row(specs, rows):
    parts = tuple(torch.zeros((rows, *shape), dtype=dtype) for dtype, shape in specs)
    assert spec(parts) == tuple((d, tuple(s)) for d, s in specs)
    assert rows * row_bits(spec(parts)) == 8 * sum(p.numel() * p.element_size() for p in parts)
    assert row_bits(spec(parts)) == 8 * sum(d.itemsize * math.prod(s) for d, s in specs)


@pytest.mark.parametrize("wrong", [(4, 1, 2), (3, 0, 2), (3, 1, 3), (2, 1, 2)])
def test_another_round_sender_or_place_is_out_of_step(wrong):
    packet = Packet(((torch.float32, (3,)),), 2)
    packet.seal(*wrong)
    with pytest.raises(RuntimeError, match=r"from rank 1 is out of step.*\(3, 1, 2, 88\), got"):
        packet.check(3, 1, 2)


def test_a_message_of_another_length_is_out_of_step():
    packet, longer = Packet(((torch.float32, (3,)),), 2), Packet(((torch.float32, (30,)),), 2)
    longer.seal(3, 1, 2)
    packet.buffer.copy_(longer.buffer[: packet.buffer.numel()])
    with pytest.raises(RuntimeError, match="out of step"):
        packet.check(3, 1, 2)


def test_a_buffer_that_nobody_filled_is_out_of_step():
    with pytest.raises(RuntimeError, match="out of step"):
        Packet(((torch.float32, (3,)),), 2).check(0, 0, 0)
