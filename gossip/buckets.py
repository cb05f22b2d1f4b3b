"""Buckets by layer: the exchange of the last layers starts while the backward pass still works on the first ones."""

import weakref

import torch
from torch import Tensor

from .network import Network
from .row import ModelRow


class Buckets:
    """Consecutive parameters in groups of about equal size; each is stepped and sent when its gradients are there.

    The last parameters come first, as in backward, and in the same order at every rank. Nothing changes in what is
    computed: x_i ← Σ_j W_ij (x_j − η g_j), column by column.

    Args:
        row: the model's parameters and their optimizer.
        net: the network of the whole row; each bucket gets one like it, with the same meter.
        count: how many buckets, at least 2.
    """

    def __init__(self, row: ModelRow, net: Network, count: int) -> None:
        if row.sharded:
            raise ValueError(
                f"buckets={count} over sharded parameters, whose gradients are reduced after the hooks: leave buckets out"
            )
        self.row, self.enabled = row, True
        self.columns, self.members = _cut([p.numel() for p in row.params], count)
        self.nets = [Network(net.schedule, net.placement, net.transport, net.seed) for _ in self.members]
        for own in self.nets:
            own.meter, own.channel = net.meter, net.channel
            own.begin(net.round)
        self._bucket = {id(row.params[i]): b for b, members in enumerate(self.members) for i in members}
        self._arrived: list[set[int]] = [set() for _ in self.members]
        self._versions: dict[int, int] = {}
        self._stepped = self._sent = 0
        ref = weakref.ref(self)
        for p in row.params:
            p.register_post_accumulate_grad_hook(lambda p: (own := ref()) is not None and own._ready(p))

    def begin(self, round: int) -> None:
        """The round whose W the next exchange is to use."""
        for net in self.nets:
            net.begin(round)

    @torch.no_grad()
    def _ready(self, p: Tensor) -> None:
        """A parameter has its gradient: step and send its bucket if it is complete and its turn has come."""
        if not self.enabled:
            return
        b = self._bucket[id(p)]
        if b < self._stepped:
            raise RuntimeError(
                "a second backward pass before step(): with buckets the first one has stepped already; accumulate gradients "
                "without buckets, or inside no_sync()"
            )
        self._arrived[b].add(id(p))
        while self._stepped < len(self.members) and len(self._arrived[self._stepped]) == len(
            self.members[self._stepped]
        ):
            self._step_and_send()

    def _step_and_send(self) -> None:
        b = self._stepped
        params = [self.row.params[i] for i in self.members[b]]
        self.row.step_some(params)
        self._versions |= {id(p): p.grad._version for p in params if p.grad is not None}
        self._stepped += 1
        self._send()

    def _send(self) -> None:
        start, stop = self.columns[self._sent]
        self.nets[self._sent].send(self.row.x[:, start:stop])
        self._sent += 1

    def step(self) -> None:
        """Step and send what is left: buckets of which a parameter took no part in the loss, and those behind them."""
        changed = [
            p
            for p in self.row.params
            if p.grad is not None and self._versions.get(id(p), p.grad._version) != p.grad._version
        ]
        if changed:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(changed[0].shape)} was changed after backward, and with buckets it "
                "had been used by then: clip gradients and unscale them without buckets"
            )
        while self._stepped < len(self.members):
            self._step_and_send()

    def exchange(self, next: int) -> None:
        """Send what was not sent, and receive everything; then comes the round `next`."""
        while self._sent < len(self.members):
            self._send()
        for net, (start, stop) in zip(self.nets, self.columns):
            net.receive(self.row.x[:, start:stop])
        self.begin(next)
        self._stepped = self._sent = 0
        self._versions.clear()
        for arrived in self._arrived:
            arrived.clear()


def _cut(sizes: list[int], count: int) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """(columns of the row, parameters) of each bucket, from the last parameter to the first.

    >>> _cut([10, 10, 60, 5, 15], 2)
    ([(20, 100), (0, 20)], [[4, 3, 2], [1, 0]])
    """
    columns, members, held = [], [], []
    start = stop = sum(sizes)
    for i in reversed(range(len(sizes))):
        held.append(i)
        start -= sizes[i]
        if stop - start >= sum(sizes) / count or i == 0:
            columns.append((start, stop))
            members.append(held)
            stop, held = start, []
    return columns, members
