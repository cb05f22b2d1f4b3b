"""What was sent: messages and bits per directed edge of workers, the same in every placement, and bytes on the wire."""

import torch
from torch import Tensor

from .plan import Edges


class Meter:
    """Counts of the messages that leave the hosted workers.

    `bits` counts payloads as they travel, per edge of *workers*, whether or not both share a process; `wire_bytes` counts
    what really crossed between processes, headers and padding included, so it depends on the placement.

    Attributes:
        log: while it is a list, what `record` is told is appended to it, one exchange after the other.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.wire_bytes = 0
        self.log: list[tuple[Edges, int, int]] | None = None
        self._pending: dict[int, list] = {}  # id of Edges → [Edges, messages, bits]: O(1) per round
        self._codes = torch.empty(0, dtype=torch.int64)  # source · n + target, sorted
        self._counts = torch.empty(2, 0, dtype=torch.int64)  # messages, bits

    def record(self, edges: Edges, bits: int, messages: int = 1) -> None:
        """Each edge e carried `messages` messages of bits · edges.size[e] in all."""
        if self.log is not None:
            self.log.append((edges, bits, messages))
        entry = self._pending.setdefault(id(edges), [edges, 0, 0])
        entry[1] += messages
        entry[2] += bits
        if len(self._pending) > 256:  # a schedule that never repeats
            self._fold()

    def _fold(self) -> None:
        pending, self._pending = self._pending, {}
        codes = [self._codes] + [e.src * self.n + e.dst for e, _, _ in pending.values()]
        counts = [self._counts] + [
            torch.stack((torch.full_like(e.size, messages), e.size * bits)) for e, messages, bits in pending.values()
        ]
        self._codes, place = torch.cat(codes).unique(return_inverse=True)
        self._counts = torch.zeros(2, len(self._codes), dtype=torch.int64).index_add_(1, place, torch.cat(counts, 1))

    @property
    def edges(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(source, target) → (messages, bits) for every edge that carried something."""
        self._fold()
        return {(c // self.n, c % self.n): (a, b) for c, a, b in zip(self._codes.tolist(), *self._counts.tolist())}

    def _per_worker(self, which: int) -> Tensor:
        self._fold()
        return torch.zeros(self.n, dtype=torch.int64).index_add_(0, self._codes // self.n, self._counts[which])

    @property
    def messages(self) -> Tensor:
        """(n,) int64: messages sent by each worker that this process hosts (0 for the others)."""
        return self._per_worker(0)

    @property
    def bits(self) -> Tensor:
        """(n,) int64: bits sent by each worker that this process hosts (0 for the others)."""
        return self._per_worker(1)

    def state_dict(self) -> dict[str, Tensor]:
        """The counts per edge, for a checkpoint."""
        self._fold()
        return {"codes": self._codes, "counts": self._counts}

    def load_state_dict(self, state: dict[str, Tensor], owned: Tensor) -> None:
        """Take over the counts of the edges that leave the workers `owned`."""
        mine = torch.isin(state["codes"] // self.n, owned)
        self._pending, self._codes, self._counts = {}, state["codes"][mine], state["counts"][:, mine]
