"""The only place that knows `torch.distributed`: byte buffers per peer out, byte buffers per peer in."""

import contextlib
import datetime
import math
import os
import re
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import torch
import torch.distributed as dist
from torch import Tensor

from .stall import Board, Leg, Waiting, watch

TIMEOUT = 300.0  # seconds; a slow worker is not a dead one
_CLOSED = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE)

_OPEN: "weakref.WeakSet[Transport]" = weakref.WeakSet()
FAREWELLS: dict[int, Callable[[], Any]] = {}  # what all do together before they part, oldest first: live runs end


class PeerError(RuntimeError):
    """An exchange that did not complete: names the rank, the peer, the round and the message."""


class Batch(NamedTuple):
    """Buffers that are posted together; made once by `Transport.prepare` and posted every round."""

    legs: list[Leg]
    buffers: list[list[Tensor]]
    receives: int  # the first so many are received, the others sent
    sent: int  # bytes


class Transport:
    """Point-to-point messages between the processes of a group, and the few collectives that metrics need.

    Exchanges and collectives run in groups of their own, so that an average may be taken while an exchange is in flight.
    Every wait is bounded; one that takes a tenth of the bound is reported by a warning of the logger `gossip`.

    Args:
        group: the processes that take part; the default group if None. It must be initialised.
        timeout: bound of every wait in seconds.

    Attributes:
        messages, bytes: buffers and bytes handed to other processes.
        waited: seconds for which the caller was blocked by exchanges.
        waited_for: peer → seconds of those for which its message was the next to come or go; peers are waited for in the order
            of their ranks, so one that is late beside an earlier one counts with what it takes longer.
        exchanging: seconds during which an exchange was in flight.
        staged: whether messages must lie in main memory.
        stretches: whether a message may be shorter than the buffer in which it is received.
        spans: (name, start, end, round, `waited_for` by then) of every exchange and wait while it is a list, for a timeline.
        agreements: how often all ranks have stated the same facts.
        whole: False once a live run, which stands it, has lost somebody: `disconnect` then waits for nobody.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call gossip.connect() first, or start the script with "
                "`torchrun --nproc-per-node N script.py`"
            )
        _refuse_timeout(timeout)
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group that was given: call wrap or Transport at its members only, "
                "or give each rank the group that it is in, as DeviceMesh.get_group does"
            )
        self.timeout = timeout
        self.messages, self.bytes, self.waited, self.exchanging = 0, 0, 0.0, 0.0
        self.waited_for: dict[int, float] = {}
        self._waited_before: dict[int, float] = {}  # the timeline began
        self._blocked = math.inf  # since when the caller waits for an exchange that is finished in the background
        self.spans: list[tuple[str, float, float, int, dict[int, float]]] | None = None
        if group is not None:
            _level(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # A timed-out wait closes a gloo pair for good, so the bound belongs to the groups and is never polled.
        bound, local = datetime.timedelta(seconds=timeout), group is not None
        self._exchanges: Any = dist.new_group(ranks, timeout=bound, use_local_synchronization=local)
        self._collectives: Any = dist.new_group(ranks, timeout=bound, use_local_synchronization=local)
        self.whole, self.agreements = True, 0
        self.staged = self.stretches = dist.get_backend(group) == "gloo"
        self._pending: deque[tuple[int, Batch, list[dist.Work]]] = deque()
        self._began = self._recorded_from = 0.0
        self._round = -1
        self._waiting: list[Waiting | None] = [None, None]  # in an exchange, in a collective
        self._board = Board(_store(), str(getattr(self._exchanges, "group_name", "")), self.rank)
        watching = weakref.ref(self), self._board, timeout
        threading.Thread(target=watch, args=watching, name="gossip watchdog", daemon=True).start()
        self.unfinished: dict[int, Callable[[], None]] = {}  # what completes an exchange that somebody left in flight
        _OPEN.add(self)
        self.barrier()  # every rank is here, and NCCL's first batched exchange needs all of them warmed up

    def prepare(self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]) -> Batch:
        """Compile an exchange of contiguous byte buffers: receives first, peers in rank order, a peer's buffers in theirs."""
        into, out = ([(peer, b) for peer in sorted(side) for b in side[peer]] for side in (incoming, outgoing))
        legs = [Leg(f"receive {b.numel():,} bytes from rank {peer}", peer) for peer, b in into]
        legs += [Leg(f"send {b.numel():,} bytes to rank {peer}", peer) for peer, b in out]
        return Batch(legs, [[b] for _, b in into + out], len(into), sum(b.numel() for _, b in out))

    def start(self, batch: Batch, round: int) -> None:
        """Post an exchange; several may be in flight. Its buffers must be left alone until `finish`."""
        now = time.perf_counter()
        if not self._pending:
            self._began = now
        self._round = round
        works: list[dist.Work] = []
        legs, receives, group = batch.legs, batch.receives, self._exchanges
        leg = Leg("post an exchange")
        try:
            if not legs:  # a rank that is idle in this round
                pass
            elif self.staged:  # one by one, to know which failed
                for place, (leg, buffer) in enumerate(zip(legs, batch.buffers)):
                    peer: Any = leg.peer
                    works.append(group.recv(buffer, peer, 0) if place < receives else group.send(buffer, peer, 0))
            else:
                ops = [
                    dist.P2POp(dist.irecv if i < receives else dist.isend, b[0], group=group, group_peer=leg.peer)
                    for i, (leg, b) in enumerate(zip(legs, batch.buffers))
                ]
                works = dist.batch_isend_irecv(ops)
        except (RuntimeError, ValueError) as error:
            raise self._explained(leg, round, now, error) from error
        self._pending.append((round, batch, works))
        self.messages += len(legs) - receives
        self.bytes += batch.sent

    def finish(self, background: bool = False) -> None:
        """Wait until every buffer of the oldest exchange in flight has arrived or left.

        In the `background` the seconds are not counted as waited.
        """
        round, batch, works = self._pending.popleft()
        begun = since = time.perf_counter()
        legs = batch.legs if len(works) == len(batch.legs) else [Leg("; ".join(map(str, batch.legs)))] * len(works)
        for work, leg in zip(works, legs):
            self._waiting[0] = Waiting(begun, round, leg)
            try:
                work.wait()
            except (RuntimeError, ValueError) as error:
                raise self._explained(leg, round, begun, error) from error
            now = time.perf_counter()
            if leg.peer is not None:
                blocked = now - (max(since, self._blocked) if background else since)
                self.waited_for[leg.peer] = self.waited_for.get(leg.peer, 0.0) + max(0.0, blocked)
            since = now
        self._waiting[0] = None
        now = time.perf_counter()
        if works and not background:
            self._waited("wait", begun, now, round)
        if not self._pending and batch.legs:
            self.exchanging += now - self._began
            if self.spans is not None:
                self.spans.append(("exchange", self._began, now, round, {}))

    def wait(self, future: Future, round: int) -> None:
        """Wait for an exchange that is finished in the background."""
        begun = self._blocked = time.perf_counter()
        future.result()
        self._blocked = math.inf
        self._waited("wait", begun, time.perf_counter(), round)

    def record(self) -> None:
        """Begin a timeline, at the same moment on every rank."""
        self.barrier()
        self._recorded_from, self._waited_before = time.perf_counter(), self.waited_for.copy()
        self.spans = []

    def timeline(self) -> list[dict[str, Any]]:
        """End it, and return all ranks' events in Chrome's trace format; between two waits a rank computes."""
        spans, self.spans, zero = self.spans or [], None, self._recorded_from
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]

        def event(name: str, begin: float, end: float, track: int, **told: float) -> None:
            times = {"ts": (begin - zero) * 1e6, "dur": (end - begin) * 1e6}
            events.append({"name": name, "ph": "X", "pid": self.rank, "tid": track, "args": told, **times})

        free, before = zero, self._waited_before
        for name, begin, end, round, waited in spans:
            if name == "exchange":
                event(name, max(begin, zero), end, 0, round=round)
            else:
                event("compute", free, max(begin, free), 1, round=round)
                each = {f"seconds for {peer}": total - before.get(peer, 0.0) for peer, total in waited.items()}
                event(name, max(begin, free), end, 1, round=round, **{what: s for what, s in each.items() if s})
                free, before = end, waited
        return [e for each in self.gather(events) for e in each]

    def _waited(self, name: str, begun: float, now: float, round: int) -> None:
        self.waited += now - begun
        if self.spans is not None:
            self.spans.append((name, begun, now, round, self.waited_for.copy()))

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        dense = x.contiguous()  # gloo takes the memory of others as it lies, gaps included
        with self._collective("all-reduce a sum"):
            dist.all_reduce(dense, group=self._collectives)
        return x if dense is x else x.copy_(dense)

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite a tensor by that of rank `source`, in place."""
        dense = x.contiguous()
        with self._collective(f"broadcast from rank {source}"):  # as bytes, whatever the dtype
            dist.broadcast(
                dense.as_strided((dense.numel(),), (1,)).view(torch.uint8), group=self._collectives, group_src=source
            )
        return x if dense is x else x.copy_(dense)

    def gather(self, item: Any) -> list[Any]:
        """One picklable object from each rank, in rank order, at every rank."""
        items: list[Any] = [None] * self.size
        with self._collective("gather"):
            dist.all_gather_object(items, item, group=self._collectives)
        return items

    def collect(self, item: Any) -> list[Any]:
        """One picklable object from each rank, in rank order, at rank 0; nothing elsewhere."""
        items: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._collective("collect"):
            dist.gather_object(item, items or None, group=self._collectives, group_dst=0)
        return items

    def deal(self, items: list[Any]) -> Any:
        """To each rank its own of the picklable objects that rank 0 has a list of."""
        mine: list[Any] = [None]
        with self._collective("deal"):
            dist.scatter_object_list(mine, items if self.rank == 0 else None, group=self._collectives, group_src=0)
        return mine[0]

    def store(self, name: str) -> Any:
        """The key-value store in which the processes met, with the keys of this name apart from all others."""
        return dist.PrefixStore(name, _store())

    def settle(self) -> None:
        """Complete what was left in flight, so that nobody's messages are waited for in vain; every rank must do it."""
        while self.unfinished:
            self.unfinished.pop(next(iter(self.unfinished)))()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(self.rank)

    def agree(self, facts: dict[str, Any]) -> None:
        """Refuse to start unless every rank states the same facts; the error names both ranks and the first difference."""
        theirs = self.gather(facts)
        for rank, other in enumerate(theirs):
            for name in theirs[0] | other:
                first, second = (f.get(name, "nothing") for f in (theirs[0], other))
                if first != second:
                    raise ValueError(
                        f"ranks 0 and {rank} differ in {name}: {first} at rank 0, {second} at rank {rank}; "
                        "every rank must build the same model, algorithm and schedule"
                    )
        self.agreements += 1

    @contextlib.contextmanager
    def _collective(self, what: str):
        begun, leg = time.perf_counter(), Leg(what)
        self._waiting[1] = Waiting(begun, self._round, leg)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self._explained(leg, self._round, begun, error) from error
        finally:
            self._waiting[1] = None

    def _explained(self, leg: Leg, round: int, begun: float, error: Exception) -> PeerError:
        """A peer that is gone is told from one that is slow, by how long it took to find out."""
        late = time.perf_counter() - begun > 0.9 * self.timeout
        chain = self._board.chain(leg.peer) if late else ""
        when = f"in round {round}" if round >= 0 else "before the first round"
        self._waiting[0] = None
        if late:
            return PeerError(
                f"rank {self.rank} could not {leg} {when}: no answer within {self.timeout:g} s; {leg.of} is stuck "
                f"or slower than the bound{f' ({chain})' if chain else ''}: look at its log, or raise the timeout. {error}"
            )
        closed = "connection closed" if _CLOSED.search(str(error)) else "the exchange failed"
        return PeerError(
            f"rank {self.rank} lost {leg.of} {when} ({closed}) and could not {leg}: that process ended or gave up; "
            f"look at its log first. {error}"
        )


def _store() -> Any:
    """Where the processes met, if torch tells."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):
        return None


def _level(group: dist.ProcessGroup) -> None:
    """Let all ranks of a group be in equally many groups.

    torch names a group that some ranks make on their own by their ranks and by how many groups a process has, and waits
    for ever where ranks differ in that because one of them is in another group as well.
    """
    counts: list[Any] = [None] * dist.get_world_size(group)
    own = len(dist.distributed_c10d._world.pg_names)
    dist.all_gather_object(counts, own, group=group)
    for _ in range(max(counts) - own):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def connect(
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    backend: str = "gloo",
    timeout: float = TIMEOUT,
    group: dist.ProcessGroup | None = None,
) -> Transport:
    """Join the other processes and return the transport.

    Under `torchrun` no argument is needed; on several hosts the network interface that leads to the master is used unless
    GLOO_SOCKET_IFNAME names another. Processes on one machine may instead meet in a file: `store="file:///…"`,
    with `rank` and `size`; no port is opened for the rendezvous then. An initialised process group is used as it is.
    """
    _refuse_timeout(timeout)
    _refuse_few_files(size or int(os.environ.get("WORLD_SIZE") or 1))
    if not dist.is_initialized():
        if rank is not None and size is not None and not 0 <= rank < size:
            raise ValueError(f"rank={rank} of size={size}: ranks count from 0 to {size - 1}, each once")
        if store is None and "RANK" not in os.environ:
            raise RuntimeError(
                "no process group: RANK is not set and no store was given; start the script with "
                "`torchrun --nproc-per-node N script.py`, or pass rank, size and store='file:///path'"
            )
        host = os.environ.get("MASTER_ADDR", "") if store is None else urlparse(store).hostname or "localhost"
        if not os.environ.get("GLOO_SOCKET_IFNAME") and (found := interface(host)):
            # gloo binds where the host's own name resolves, which need not be where the others are, nor exist.
            os.environ["GLOO_SOCKET_IFNAME"] = found
        bound = datetime.timedelta(seconds=timeout)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            place: dict[str, Any] = {"init_method": store or "env://"}
            if store is not None and store.startswith("file:"):
                place = {"store": _file_store(store, rank, size, bound)}
            elif store is None and attempt != "0" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
                # torchrun keeps the store of the processes that failed, whose addresses gloo would take for those of now.
                # Between several nodes the attempts are not numbered alike.
                kept, rank, size = next(dist.rendezvous("env://", timeout=bound))
                place = {"store": dist.PrefixStore(f"attempt {attempt}", kept)}
            own, count = (-1 if number is None else number for number in (rank, size))
            dist.init_process_group(backend, **place, rank=own, world_size=count, timeout=bound)
        except (RuntimeError, ValueError) as error:
            own, count = os.environ.get("RANK", rank), os.environ.get("WORLD_SIZE", size)
            start = f"start all {count} processes within {timeout:g} s, each with a rank of its own"
            raise RuntimeError(
                f"rank {own} of {count} could not meet the others at {store or host or 'MASTER_ADDR, which is not set,'} by the "
                f"network interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of its own name')}: {_remedy(store, start, error)}. "
                f"{error}"
            ) from error
    return Transport(group, timeout)


def _remedy(store: str | None, start: str, error: Exception) -> str:
    if store is not None and store.startswith("file:"):
        return f"{start}, and with a file that no former run has left there"
    if "already in use" in str(error):
        port = os.environ.get("MASTER_PORT")
        return f"another run listens at port {port}: give torchrun --standalone, or another --master-port"
    return (
        f"{start} and all with the same MASTER_ADDR; if they lie on several hosts, set GLOO_SOCKET_IFNAME on every host to the "
        "interface that reaches the others (`ip route get ADDRESS` names it), let no firewall stop the ports above 1024 between "
        "them, and start a torchrun that is to restart processes with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def _file_store(url: str, rank: int | None, size: int | None, bound: datetime.timedelta) -> dist.Store:
    """A store in a file, whose name may be quoted (`Path.as_uri`) or not; torch would wait for minutes for a lacking folder."""
    path = Path(unquote(urlparse(url).path))
    if rank is None or size is None or not path.parent.is_dir():
        wrong = "needs rank and size as well" if rank is None or size is None else f"has no folder {path.parent}"
        raise ValueError(
            f'store="{url}" {wrong}: give connect(rank, size, "file:///folder/file") with a folder that exists'
        )
    store = dist.FileStore(str(path), size)
    store.set_timeout(bound)
    return store


def _refuse_timeout(timeout: float) -> None:
    if not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
        raise ValueError(f"timeout={timeout!r} bounds every wait: give a positive number of seconds, such as 300")


def _refuse_few_files(size: int) -> None:
    """gloo ends the process without a word where it may not open another connection."""
    try:
        import resource

        opened, most = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return
    if opened + 3 * size + 16 > most > 0:
        raise RuntimeError(
            f"{size} processes need about {opened + 3 * size + 16} open files each, three to everybody, and `ulimit -n` "
            f"allows {most}: raise it, for example `ulimit -n 4096`, or start fewer processes (launch=here or blocks)"
        )


def interface(host: str) -> str | None:
    """The network interface by which this machine reaches a host, or None where the system does not tell.

    >>> interface("localhost") in ("lo", "lo0")
    True
    """
    if host in ("localhost", "127.0.0.1"):
        return "lo0" if sys.platform == "darwin" else "lo"
    with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        probe.connect((host, 9))  # sends nothing, only looks up the way
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # an interface without an address
                if fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20:24] == own:  # SIOCGIFADDR
                    return name
    return None


def disconnect() -> None:
    """Leave the process group, after a last barrier so that nobody leaves while another still waits for its message.

    Live optimizers that have not finished do so first; where they have lost somebody there is no barrier.
    """
    while FAREWELLS:
        FAREWELLS.pop(next(iter(FAREWELLS)))()
    if not all(transport.whole for transport in _OPEN):
        abandon()
    if dist.is_initialized():
        try:
            while _OPEN:
                _OPEN.pop().settle()
            dist.barrier()
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()} ended its work, and another rank was gone by then or did not come: every rank must take "
                f"equally many steps, or loop inside optimizer.join(), and call disconnect. {error}"
            ) from error
        dist.destroy_process_group()


def abandon() -> None:
    """Leave without a farewell because somebody is gone: closes every connection, so that whoever waits here hears of it."""
    while _OPEN:
        transport = _OPEN.pop()
        transport._exchanges = transport._collectives = None
        transport._pending.clear()
        transport.unfinished.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
