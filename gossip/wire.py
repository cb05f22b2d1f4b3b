"""What travels: one message per peer and round, a header and the parts fused in one persistent byte buffer."""

import math

import torch
from torch import Tensor

HEADER = 32  # bytes: round, sender, sequence number within the round, length
Spec = tuple[torch.dtype, tuple[int, ...]]  # of a part: dtype and the shape of one row


def spec(parts: tuple[Tensor, ...]) -> tuple[Spec, ...]:
    """Dtype and row shape of each part."""
    return tuple((p.dtype, tuple(p.shape[1:])) for p in parts)


def row_bits(specs: tuple[Spec, ...]) -> int:
    """Bits of one worker's message: its parts as they travel, without the header.

    >>> row_bits(((torch.float32, (10,)), (torch.int32, (10,))))
    640
    """
    return 8 * sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)


class Packet:
    """A header and `rows` rows of some parts in one byte buffer, which is allocated once and used every round.

    >>> packet = Packet(((torch.float32, (3,)), (torch.int32, (1,))), rows=2)
    >>> packet.buffer.numel(), [tuple(p.shape) for p in packet.parts]
    (64, [(2, 3), (2, 1)])
    """

    def __init__(self, specs: tuple[Spec, ...], rows: int, device: torch.device | str = "cpu") -> None:
        sizes = [rows * dtype.itemsize * math.prod(shape) for dtype, shape in specs]
        starts = [HEADER]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 8) * 8)  # a view needs its offset aligned to the dtype
        self.buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self.header = self.buffer[:HEADER].view(torch.int64)
        self.parts = tuple(
            self.buffer[start : start + size].view(dtype).view(rows, *shape)
            for start, size, (dtype, shape) in zip(starts, sizes, specs)
        )

    def seal(self, round: int, sender: int, sequence: int) -> None:
        """Write the header."""
        self.header.copy_(torch.tensor((round, sender, sequence, self.buffer.numel())))

    def check(self, round: int, sender: int, sequence: int) -> None:
        """Refuse a message of another round, sender, place in the round, or length."""
        want, got = [round, sender, sequence, self.buffer.numel()], self.header.tolist()
        if got != want:
            raise RuntimeError(
                f"a message from rank {sender} is out of step: expected (round, sender, sequence, bytes) = {want}, "
                f"got {got}; every rank must run the same algorithm and schedule from the same round"
            )
