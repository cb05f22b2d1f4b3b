"""The one object through which rows may meet: everything else in an algorithm is row-wise."""

from collections import OrderedDict
from typing import cast

import torch
from torch import Tensor

from graphs import Schedule

from . import rng
from .compress.payload import Payload
from .meter import Meter
from .placement import Placement
from .plan import Edges, Plan
from .transport import Transport
from .wire import Packet, row_bits, spec

_PLANS = 64  # compiled rounds that are kept: the period of any schedule in use, and little memory for one without


class Network:
    """Messages between workers along W of the current round, wherever their rows live.

    Messages are tensors whose first axis is the hosted rows, or a compressed `Payload`. `send` then `receive` is an
    exchange; `mix` is both at once. Nothing is allocated per round once the buffers exist.

    Args:
        schedule: the mixing matrix of each round.
        placement: which rows this process hosts; all of them if None.
        transport: how bytes reach the other processes; needed unless the placement hosts all rows.
        seed: of the randomness that algorithms and compressors draw.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement | None = None,
        transport: Transport | None = None,
        seed: int = 0,
    ) -> None:
        placement = placement or Placement.here(schedule.n)
        if placement.n != schedule.n:
            raise ValueError(
                f"the schedule connects {schedule.n} workers and the placement hosts {placement.n}: give both the same n"
            )
        if not placement.alone and transport is None:
            raise ValueError(
                f"the placement spreads {placement.n} workers over {len(placement.blocks)} processes, which needs a "
                "transport: pass gossip.connect()"
            )
        self.schedule, self.placement, self.transport, self.seed = schedule, placement, transport, seed
        self.rows, self.n = placement.rows, placement.n
        self.meter = Meter(self.n)
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._packets: dict[tuple, Packet] = {}
        self._copies: dict[tuple, Tensor] = {}
        self._sent: tuple[Tensor, ...] | Payload | None = None
        self._arriving: dict[int, Packet] = {}
        self._rings: dict[int, Edges] = {}
        self.begin(0)

    def begin(self, round: int) -> None:
        """Enter a round: its W becomes current and its random stream starts afresh."""
        self.round, self._draws, self._sequence = round, 0, 0
        W = self.schedule(round)
        plan = self._plans.get(id(W))
        if plan is None:
            plan = self._plans[id(W)] = Plan(W, self.placement)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self.plan = plan

    # -- messages along W ------------------------------------------------------------------------------------------

    def send(self, *message: Tensor | Payload) -> None:
        """Hand this round's message to the network: private copies, so the tensors may change at once.

        Several tensors travel as one message. It reaches every j with W[j, i] ≠ 0.
        """
        if self._sent is not None:
            raise RuntimeError(
                f"a second message was sent in round {self.round} before the first was received: send several tensors "
                "as one message, net.send(x, y)"
            )
        payload = message[0] if isinstance(message[0], Payload) else None
        parts = payload.parts() if payload is not None else cast("tuple[Tensor, ...]", message)
        specs = spec(parts)
        packed = self._post(parts, specs)
        if payload is not None:
            self._sent = payload
        elif packed is not None:
            self._sent = packed.parts
        else:
            self._sent = tuple(self._copy(place, p) for place, p in enumerate(parts))
        self.meter.record(self.plan.edges, row_bits(specs))

    def receive(self, *into: Tensor, scale: float = 1.0) -> None:
        """Apply what arrived: into_i += scale · (Σ_j W_ij sent_j − sent_i), one buffer per tensor of the message.

        With `into` the sent tensor and scale 1 that is x ← W x; if x moved meanwhile (overlap), the move is kept.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            raise RuntimeError(f"nothing was sent in round {self.round}: call net.send before net.receive")
        if isinstance(sent, Payload):
            sent.add_into(into[0], self.plan.local, scale)
        else:
            for buffer, part in zip(into, sent, strict=True):
                self.plan.local.add(buffer, part, scale)
        for q, packet in self._arrived():
            block = self.plan.remote[q]
            if isinstance(sent, Payload):
                sent.like(packet.parts).add_into(into[0], block, scale)
            else:
                for buffer, part in zip(into, packet.parts, strict=True):
                    block.add(buffer, part, scale)

    @property
    def in_flight(self) -> tuple[Tensor, ...]:
        """The parts of the message that was sent and not received yet; none if there is no such message."""
        if self._sent is None:
            return ()
        return self._sent.parts() if isinstance(self._sent, Payload) else self._sent

    def mix(self, *rows: Tensor) -> None:
        """One exchange: each tensor x becomes W x in place. Several tensors are one message."""
        self.send(*rows)
        self.receive(*rows)

    def exchange(self, messages: Tensor) -> Tensor:
        """A message of its own for every edge: (E_out, …) along `plan.out_edges` to (E_in, …) along `plan.in_edges`."""
        if self._sent is not None:
            raise RuntimeError(
                f"an exchange in round {self.round} while a sent message waits to be received: call net.receive first"
            )
        (leave, enter), out, into = self.plan.edge_routes
        arrived = messages.new_empty((self.plan.in_edges.shape[1], *messages.shape[1:]))
        arrived[enter] = messages[leave]
        specs = spec((messages,))
        outgoing = {}
        for q, edges in out.items():
            outgoing[q] = self._packet("edges out", q, specs, len(edges))
            torch.index_select(messages, 0, edges, out=outgoing[q].parts[0])
        self._start(outgoing, {q: self._packet("edges in", q, specs, len(edges)) for q, edges in into.items()})
        for q, packet in self._arrived():
            arrived[into[q]] = packet.parts[0]
        self.meter.record(self.plan.edges, row_bits(specs))
        return arrived

    # -- baselines and metrics -------------------------------------------------------------------------------------

    def average(self, x: Tensor) -> None:
        """Every row becomes the exact average over all workers, in place; metered as a ring all-reduce."""
        self._record_all_reduce(x)
        x.copy_(self.mean(x).expand_as(x))

    def mean(self, x: Tensor) -> Tensor:
        """The average row (1, …) over all workers; not metered, for metrics."""
        total = x.sum(0, keepdim=True)
        if self.transport is not None and not self.placement.alone:
            self.transport.sum_(total)
        return total.div_(self.n)

    def gather(self, values: Tensor) -> Tensor:
        """One entry per hosted row to one per worker, (m, …) → (n, …), at every process; not metered, for metrics."""
        parts = [values] if self.transport is None or self.placement.alone else self.transport.gather(values)
        everything = values.new_empty((self.n, *values.shape[1:]))
        for block, part in zip(self.placement.blocks, parts):
            everything[list(block)] = part
        return everything

    # -- randomness ------------------------------------------------------------------------------------------------

    def keys(self) -> Tensor:
        """(m,) int64: a fresh key per hosted row, from (seed, round, worker, how many were drawn in this round)."""
        self._draws += 1
        return rng.key(self.seed, "network", self.round, self._draws, self.rows)

    def uniform(self, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """(m, d) numbers in [0, 1), the same for a worker whichever process hosts it."""
        return rng.uniform(self.keys(), d, dtype)

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _post(self, parts: tuple[Tensor, ...], specs: tuple) -> Packet | None:
        """Start sending; returns the packet that holds all hosted rows, if one was made."""
        if self.placement.alone:
            return None
        made: dict[tuple[int, ...], Packet] = {}
        outgoing, everything = {}, tuple(range(len(self.rows)))
        for q, rows in self.plan.sends.items():
            key = tuple(rows.tolist())
            if key not in made:
                packet = made[key] = self._packet("out", len(made), specs, len(rows))
                for part, place in zip(parts, packet.parts):
                    if key == everything:
                        place.copy_(part)
                    else:
                        torch.index_select(part, 0, rows, out=place)
            outgoing[q] = made[key]
        incoming = {
            q: self._packet("in", slot, specs, block.shape[1])
            for slot, (q, block) in enumerate(self.plan.remote.items())
        }
        self._start(outgoing, incoming)
        return made.get(everything)

    def _start(self, outgoing: dict[int, Packet], incoming: dict[int, Packet]) -> None:
        if self.transport is None:
            return
        for packet in outgoing.values():
            packet.seal(self.round, self.placement.rank, self._sequence)
            self.meter.wire_bytes += packet.buffer.numel()
        self._arriving = incoming
        self.transport.start(
            {q: p.buffer for q, p in outgoing.items()}, {q: p.buffer for q, p in incoming.items()}, self.round
        )

    def _arrived(self) -> list[tuple[int, Packet]]:
        arriving, self._arriving = self._arriving, {}
        if self.transport is not None:
            self.transport.finish()
            for q, packet in arriving.items():
                packet.check(self.round, q, self._sequence)
            self._sequence += 1
        return list(arriving.items())

    def _packet(self, *key) -> Packet:
        """A persistent buffer; by slot, not by peer, so that a schedule of many peers holds only one round's worth."""
        if key not in self._packets:
            self._packets[key] = Packet(*key[2:])
        return self._packets[key]

    def _copy(self, place: int, x: Tensor) -> Tensor:
        key = place, x.dtype, x.shape
        if key not in self._copies:
            self._copies[key] = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._copies[key].copy_(x)

    def _record_all_reduce(self, x: Tensor) -> None:
        """Worker i sends every chunk but one twice round the ring: 2 (n − 1) messages, 2 (n − 1) / n rows."""
        if self.n == 1:
            return
        d = x[0].numel()
        if d not in self._rings:
            chunks = torch.tensor([len(c) for c in torch.arange(d).tensor_split(self.n)])
            i = self.rows
            sizes = 2 * d - chunks[(i + 1) % self.n] - chunks[(i + 2) % self.n]
            self._rings[d] = Edges(i, (i + 1) % self.n, sizes)
        self.meter.record(self._rings[d], 8 * x.element_size(), messages=2 * (self.n - 1))
