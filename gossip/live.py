"""The live clock: real asynchronous gossip, pair by pair, each at its own speed (AD-PSGD, Lian et al. 2018, arXiv 1710.06952)."""

import atexit
import contextlib
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphs import Incompatible, Schedule, Topology, from_edges, metropolis, slem

from . import rng
from .algorithm import Algorithm
from .algorithms import DPSGD, Choco
from .compress import Compressor, Identity
from .gamma import check_gamma, step_size
from .transport import TIMEOUT, PeerError, interface
from .wire import Packet, row_bits, spec

ASK, REPLY, GIVE, GIVEN, NOTE, END = range(6)  # kinds of messages; REPLY answers ASK, GIVEN answers GIVE
HEAD, BODY, MIX, NEVER = range(4)  # tags: what kind it is and what is known, then the rows; the last rounds; unused
# Of a worker; each life of a restarted one adds AGAIN + 1, so the largest is newest.
WORKING, FINISHED, LOST, AGAIN = range(4)

_OPEN: "weakref.WeakSet[Live]" = weakref.WeakSet()


class Edge:
    """One neighbour: a process group of its own, so that its loss closes nothing else; a thread; its buffers.

    Attributes:
        open: whether messages can cross.
        pending: whether an answer is awaited, since `asked` (seconds) and `step` (own local steps).
        spoke: when something was last sent.
    """

    def __init__(self, own: int, peer: int, x: Tensor, body: Callable[[], Packet], head: int, compressed: bool) -> None:
        self.peer, self.here, self.there = peer, int(own > peer), int(own < peer)
        self.pair = (min(own, peer), max(own, peer))
        self.heads = {kind: torch.zeros(head, dtype=torch.int64) for kind in (ASK, REPLY)}
        self.bodies = {kind: body() for kind in (ASK, REPLY)}
        self.head, self.body = torch.zeros(head, dtype=torch.int64), body()
        self.replicas = [torch.zeros_like(x) for _ in range(3)] if compressed else []  # ours, ours when asked, theirs
        self.life = 0  # which life of the peer this is
        self.reset()

    def reset(self) -> None:
        """As before the first message."""
        self.group: Any = None
        self.open = self.pending = False
        self.works: dict[int, list[Any]] = {}
        self.notes: list[Any] = []  # what is posted and its handle: a dropped handle closes the connection
        self.asked = self.spoke = time.monotonic()
        self.step = 0
        for replica in self.replicas:
            replica.zero_()

    def connect(self, store: Any, lives: str, timeout: float) -> None:
        """Meet the neighbour in a group that bounds every wait; `lives` keeps the groups of restarted workers apart."""
        name = f"{self.pair[0]}-{self.pair[1]}/{lives}"
        bound = datetime.timedelta(seconds=timeout)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), self.here, 2, bound)

    def receive(self, buffer: Tensor, tag: int) -> None:
        """Wait for the neighbour's next message of this tag."""
        self.group.recv([buffer], self.there, tag).wait()

    def send(self, buffer: Tensor, tag: int) -> Any:
        """Post a message; its buffer and the handle must be kept until it has left."""
        self.spoke = time.monotonic()
        return self.group.send([buffer], self.there, tag)

    def sever(self) -> None:
        """Close the connection, so that whoever waits for a message at either end hears of it; a timed-out wait does that."""
        with contextlib.suppress(RuntimeError):
            self.group.recv([torch.empty(1)], self.there, NEVER).wait(datetime.timedelta(milliseconds=1))


class Live:
    """Pairwise gossip in real time: the row x of this worker, and the threads that answer for it.

    .. math:: x_i ← x_i + \\tfrac γ2 (b − a), \\quad x_j ← x_j + \\tfrac γ2 (a − b)

    An initiator i sends the snapshot a = x_i and goes on. The thread of j that serves this edge answers with b = x_j as it is
    then, and applies its half at once; that of i applies the other half when the answer arrives. Both use the same two
    snapshots, so Σ x is conserved although both models move meanwhile; no graph needs to be bipartite, and nothing can
    deadlock. A worker has one question of its own in flight, for with more the models overshoot: if on a ring all ask both
    neighbours at once, the sharpest disagreement doubles. One that takes far longer than they did so far (a paused
    neighbour) keeps only its own edge busy.

    With a compressor, q = C(x − x̂) travels, where x̂ is what the neighbour knows of x already; a and b are the public copies
    x̂ at both ends, which hold the same numbers, so that the sum is conserved as well. Three rows per edge.

    Every message also carries what its sender knows of all workers' steps and ends; so all learn the sum of steps, who is
    lost and when everybody has finished, without a server.

    Args:
        x: the row (1, d), updated in place; touch it inside `hold()` only.
        topology: undirected; who may meet whom.
        rank: this worker.
        store: where the processes meet: a path in a folder that all can reach, or a `torch.distributed.Store`.
        compressor: what travels; the rows themselves if None.
        gamma: step size γ in (0, 2]; None is the compressor's start value, 1 without one.
        seed: of the choice of neighbours, of compressors and of losses.
        drop: probability that an exchange is lost on its way. Both halves are, so the sum is conserved.
        cut: tells which links (i, j), i < j, may not be used now.
        life: how often this worker was restarted; a restarted one begins with a neighbour's model.
        returning: workers that may be restarted, so that their edges are kept for them.
        timeout: a neighbour that says nothing for so many seconds is lost; above the longest local step.

    Attributes:
        known: (n,) steps of each worker, as far as is known here.
        lost: neighbours that were lost, and why.
        whole: whether all have finished, after `finish`; somebody was lost if not.
        adopted: whether a restarted worker found a neighbour that gave it a model; else it came too late.

    >>> import graphs, tempfile
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> place = tempfile.mkdtemp() + "/store"
    >>> def work(rank):                               # real workers are processes; here two threads meet
    ...     worker = Live(torch.full((1, 3), 2.0 * rank), graphs.path(2), rank, place)
    ...     began = rank == 0 and worker.exchange()
    ...     return worker.finish(rounds=0), worker.x.tolist()
    >>> with ThreadPoolExecutor(2) as pool:
    ...     (one, x), (two, y) = pool.map(work, range(2))
    >>> x, y, one["exchanges"], two["answers"]
    ([[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]], 1, 1)
    """

    def __init__(
        self,
        x: Tensor,
        topology: Topology,
        rank: int,
        store: Any,
        *,
        compressor: Compressor | None = None,
        gamma: float | None = None,
        seed: int = 0,
        drop: float = 0.0,
        cut: Callable[[], frozenset[tuple[int, int]]] = frozenset,
        life: int = 0,
        returning: frozenset[int] = frozenset(),
        timeout: float = TIMEOUT,
    ) -> None:
        _refuse(topology, rank, drop)
        check_gamma(gamma, compressor or Identity())
        self.gamma = step_size(gamma, compressor or Identity())
        if isinstance(compressor, Identity):
            compressor = None
        if isinstance(store, str | os.PathLike):
            if not os.environ.get("GLOO_SOCKET_IFNAME") and (found := interface("localhost")):
                os.environ["GLOO_SOCKET_IFNAME"] = found
            store = dist.FileStore(os.fspath(store), -1)
        self.x, self.topology, self.rank, self.store, self.timeout = x, topology, rank, store, timeout
        self.compressor = compressor
        self.seed, self.drop, self.cut, self.life, self.returning = seed, drop, cut, life, returning
        self.known = torch.zeros(topology.n, dtype=torch.int64)
        self.states = torch.zeros(topology.n, dtype=torch.int64)
        self.states[rank] = life * (AGAIN + 1)
        self.lost: dict[int, str] = {}
        self.exchanges = self.answers = self.busy = self.dropped = self._count = self._landed = 0
        self.bits, self.waited, self._replies = 0, 0.0, 0.0
        self._stale = {"gradient": [0, 0, 0], "exchange": [0, 0, 0]}  # number, sum, largest
        self._lock = threading.Condition()
        self._error: BaseException | None = None
        self._ending = self._news = self._averaged = False
        self.adopted = self.whole = False
        self._made = compressor(torch.zeros_like(x), self._key()) if compressor is not None else None
        self._specs = spec((x,) if self._made is None else self._made.parts())
        peers = topology.target[topology.source == rank].tolist()
        head = 3 + 2 * topology.n

        def body() -> Packet:
            return Packet(self._specs, 1)

        self.edges = {peer: Edge(rank, peer, x, body, head, self._made is not None) for peer in peers}
        if life:
            store.set(f"life/{rank}", str(life))
        self._threads = [
            threading.Thread(target=self._serve, args=(edge,), name=f"gossip with {peer}", daemon=True)
            for peer, edge in self.edges.items()
        ]
        _OPEN.add(self)
        for thread in self._threads:
            thread.start()
        self._await(lambda: not any(e.group is None and p not in self.lost for p, e in self.edges.items()), timeout)
        if life:
            self._await(lambda: self.adopted or len(self.lost) == len(peers), timeout)

    # -- the worker's side -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[Tensor]:
        """Inside, nobody else touches x; the seconds that this took to get are counted."""
        begun = time.perf_counter()
        with self._lock:
            self.waited += time.perf_counter() - begun
            yield self.x

    def stepped(self, snapshot: Tensor | None = None) -> None:
        """Count a local step; call it inside `hold()`. `snapshot` becomes x, for the next gradient."""
        self.known[self.rank] += 1
        self._record("gradient", self._landed)
        self._landed = 0
        if snapshot is not None:
            snapshot.copy_(self.x)

    def exchange(self) -> bool:
        """Begin an exchange with a random neighbour that is free, and go on; False if none can begin now."""
        if self._error is not None:
            raise RuntimeError("a thread of the live clock failed") from self._error
        with self.hold():
            now = time.monotonic()
            pending = [now - e.asked for e in self.edges.values() if e.pending]
            patience = 1.0 + 4 * self._replies / max(1, self.exchanges)
            if any(age < patience for age in pending):
                self.busy += 1
                return False
            cut = self.cut()
            free = [e for e in self.edges.values() if e.open and not e.pending and e.pair not in cut]
            if not free:
                return False
            quiet = min(free, key=lambda e: e.spoke)
            self._count += 1
            lost, choice = rng.uniform(self._key(), 2)[0].tolist()
            edge = quiet if now - quiet.spoke > self.timeout / 3 else free[int(choice * len(free))]
            if lost < self.drop:
                self.dropped += 1
                return False
            edge.pending, edge.asked, edge.step = True, now, int(self.known[self.rank])
            self._write(edge, ASK)
            self._post(edge, ASK)
            return edge.pending  # unless it is gone

    @property
    def total(self) -> int:
        """Local steps of all workers together, as far as is known here: compare it with a budget to know when to end."""
        return int(self.known.sum())

    @property
    def share(self) -> list[float]:
        """(n,) the share of each worker in all local steps: AD-PSGD leans towards the data of those who step often."""
        return (self.known.double() / max(1, self.total)).tolist()

    def scale(self, most: float = 8.0) -> float:
        """mean steps / own steps, in [1/most, most]: the factor for a local step with which all workers' data count alike."""
        own = int(self.known[self.rank])
        return min(most, max(1 / most, self.total / len(self.known) / own)) if own else 1.0

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, rounds: int | None = None, average: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """End together: answer until everybody has finished, then agree, and return the report.

        Args:
            rounds: of synchronous gossip by Metropolis weights on the edges that are left; None: as many as bring the
                disagreement down to 1 %. 0 leaves the models apart.
            average: gives the exact average of all workers' x (a collective); it follows the rounds, unless these are 0
                or somebody was lost. The report's `averaged` tells whether it was reached.

        A second call changes nothing.
        """
        if self._ending:
            return self.report() | {"averaged": self._averaged}
        begun = time.perf_counter()
        self._await(lambda: not any(e.pending for e in self.edges.values()), self.timeout)
        with self._lock:
            for edge in self.edges.values():
                if edge.pending:
                    self._lose(edge, "it did not answer")
            self.states[self.rank] += FINISHED
            self._news = True
            heartbeat = time.monotonic()
            while self._unfinished():
                if self._news or time.monotonic() - heartbeat > self.timeout / 4:
                    self._news, heartbeat = False, time.monotonic()
                    for edge in self.edges.values():
                        if edge.open:
                            self._post(edge, NOTE)
                if self._error is not None:
                    raise RuntimeError("a thread of the live clock failed") from self._error
                if not self._news:
                    self._lock.wait(min(1.0, self.timeout / 8))
            self.whole = bool(((self.states % (AGAIN + 1)) == FINISHED).all())
            self._ending = True
            if self.returning:
                self.store.set(f"over/{self.rank}", "")
            for edge in self.edges.values():
                if edge.open:
                    self._post(edge, NOTE)  # first, for it may be the last news that the neighbour needs
                    self._post(edge, END)
        for thread in self._threads:
            thread.join(self.timeout)
        for work in [w for e in self.edges.values() if e.open for *_, works in e.notes for w in works]:
            with contextlib.suppress(RuntimeError):
                work.wait()  # nobody leaves before its last word has
        self.waited += time.perf_counter() - begun
        if rounds is None:
            rounds = self._rounds()
        self._mix(rounds)
        if rounds and self.whole and average is not None:
            with contextlib.suppress(PeerError):  # somebody was lost just now: what the rounds made stays
                self.x.copy_(average(self.x))
                self._averaged = True
        return self.report() | {"averaged": self._averaged}

    def leave(self) -> None:
        """End at once, without the others, to whom this worker is lost. Nothing happens after `finish`."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
        for edge in self.edges.values():
            if edge.open:
                edge.sever()
        deadline = time.monotonic() + 5.0  # one that still looks for its neighbour cannot be woken
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def report(self) -> dict[str, Any]:
        """Counts, staleness and seconds of this worker.

        `staleness/gradient`: exchanges that landed between the snapshot of a gradient and its step; `staleness/exchange`:
        local steps between a question and its answer.
        """
        steps = int(self.known[self.rank])
        said: dict[str, Any] = {"steps": steps, "exchanges": self.exchanges, "answers": self.answers}
        said |= {"busy": self.busy, "dropped": self.dropped, "bits": self.bits, "seconds waited": self.waited}
        said["seconds per exchange"] = self._replies / max(1, self.exchanges)
        for name, (number, total, most) in self._stale.items():
            said |= {f"staleness/{name}/mean": total / max(1, number), f"staleness/{name}/max": most}
        return said | {"share": self.share, "lost": dict(self.lost)}

    def _unfinished(self) -> list[int]:
        """Workers within reach that are not known to have finished."""
        states = (self.states % (AGAIN + 1)).tolist()
        seen, todo = {self.rank}, [self.rank]
        ways = self.topology.edge_index.T.tolist()
        while todo:
            i = todo.pop()
            for source, target in ways:
                way = source == i and (i != self.rank or self.edges[target].open)
                if way and target not in seen and states[target] != LOST:
                    seen.add(target)
                    todo.append(target)
        return [i for i in seen if states[i] != FINISHED]

    def _rounds(self) -> int:
        if self.topology.n == 1:
            return 0
        rate = slem(metropolis(self.topology))
        least = self.topology.n if rate >= 1 else torch.tensor(0.01).log() / torch.tensor(max(rate, 1e-9)).log()
        return min(1000, max(2, int(least) + 1))

    def _mix(self, rounds: int) -> None:
        """x_i += Σ_j (x_j − x_i) / (1 + max(d_i, d_j)) over the edges that are left, in step."""
        left = [e for e in self.edges.values() if e.open]
        d = self.x.shape[1]
        own = torch.empty(d + 1, dtype=self.x.dtype)
        theirs = {e.peer: torch.empty_like(own) for e in left}
        for _ in range(rounds):
            own[:d].copy_(self.x[0])
            own[d] = len(left)
            posted, arrived = [], []
            for e in left:
                try:
                    into = e.group.recv([theirs[e.peer]], e.there, MIX)
                    posted.append((e, into, e.send(own, MIX)))
                except RuntimeError as error:
                    with self._lock:
                        self._lose(e, str(error))
            for e, into, out in posted:
                try:
                    into.wait()
                    arrived.append(e)
                    out.wait()
                except RuntimeError as error:
                    with self._lock:
                        self._lose(e, str(error))
            degree = len(left)
            for e in arrived:
                other = theirs[e.peer].to(self.x.device)
                weight = 1 / (1 + max(degree, float(other[d])))
                self.x[0].add_(other[:d] - own[:d].to(self.x.device), alpha=weight)
            left = [e for e in left if e.open]

    # -- the threads' side -----------------------------------------------------------------------------------------

    def _serve(self, edge: Edge) -> None:
        """Serve one neighbour for as long as it, or another life of it, is there."""
        try:
            with torch.no_grad():
                while not self._ending:
                    try:
                        self._open(edge)
                        while self._next(edge):
                            pass
                        return
                    except _Closed as closed:
                        with self._lock:
                            self._lose(edge, str(closed))
                    if not self._back(edge):
                        return
        except BaseException as error:  # told by the worker's next call
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _open(self, edge: Edge) -> None:
        if (key := f"life/{edge.peer}") and self.store.check([key]):
            edge.life = int(self.store.get(key))
        lives = "{}-{}".format(*((self.life, edge.life) if self.rank < edge.peer else (edge.life, self.life)))
        if lives != "0-0":
            self._greet(edge, lives)
        with _closing():
            edge.connect(self.store, lives, self.timeout)
        with self._lock:
            edge.open, edge.spoke = True, time.monotonic()
            self.lost.pop(edge.peer, None)
            if self.life and not self.adopted:
                self._post(edge, GIVE)
            self._lock.notify_all()

    def _greet(self, edge: Edge, lives: str) -> None:
        """Where one was restarted, let each see that the other is there before they connect, which would wait for it."""
        key = f"there/{edge.pair[0]}-{edge.pair[1]}/{lives}/"
        self.store.set(f"{key}{self.rank}", "")
        deadline = time.monotonic() + self.timeout
        while not self.store.check([f"{key}{edge.peer}"]):
            if self.store.check([f"over/{edge.peer}"]) or time.monotonic() > deadline or self._ending:
                raise _Closed("it has ended")
            time.sleep(0.02)

    def _next(self, edge: Edge) -> bool:
        """Receive a message and act on it; False if it was the last."""
        with _closing():
            edge.receive(edge.head, HEAD)
        kind, sender, _, *told = edge.head.tolist()
        if sender != edge.peer:
            raise RuntimeError(
                f"worker {self.rank} heard {sender} on its edge to {edge.peer}: they met at the wrong place"
            )
        given = None
        with _closing():
            if kind in (ASK, REPLY):
                edge.receive(edge.body.buffer, BODY)
            elif kind == GIVEN:
                given = torch.empty(self.x.shape, dtype=self.x.dtype)
                edge.receive(given, BODY)
        with self._lock:
            self._hear(told)
            if kind == ASK:
                self._answer(edge)
            elif kind == REPLY:
                self._apply(edge)
            elif kind == GIVE:
                self._post(edge, GIVEN, self.x.cpu().clone())
            elif kind == GIVEN and not self.adopted and given is not None:
                self.x.copy_(given)
                self.adopted = True
            self._lock.notify_all()
        return kind != END

    def _hear(self, told: list[int]) -> None:
        heard = torch.tensor(told).view(2, -1)
        torch.maximum(self.known, heard[0], out=self.known)
        if bool((heard[1] > self.states).any()):
            own = self.states[self.rank].clone()
            torch.maximum(self.states, heard[1], out=self.states)
            self.states[self.rank] = own
            self._news = True

    def _write(self, edge: Edge, kind: int) -> Tensor:
        """This worker's part of an exchange into its buffer; returns the row that stands for it at both ends."""
        for work in edge.works.pop(kind, ()):  # over: the neighbour has answered, or asked again
            with contextlib.suppress(RuntimeError):
                work.wait()
        parts = edge.bodies[kind].parts
        if self._made is None or self.compressor is None:
            parts[0].copy_(self.x)
            return parts[0].to(self.x.device)
        ours, asked, _ = edge.replicas
        q = self.compressor(self.x - ours, self._key())
        if spec(q.parts()) != self._specs:
            raise ValueError(
                f"{self.compressor!r} makes messages of changing length, {spec(q.parts())} after {self._specs}, and live "
                "messages have a fixed one: use a compressor whose length depends on d only"
            )
        q.add_to(ours)
        for part, own in zip(parts, q.parts()):
            part.copy_(own)
        if kind == ASK:
            asked.copy_(ours)
        return ours

    def _read(self, edge: Edge) -> Tensor:
        """The row that stands for the neighbour at both ends."""
        if self._made is None:
            return edge.body.parts[0].to(self.x.device)
        theirs = edge.replicas[2]
        self._made.like(tuple(part.to(self.x.device) for part in edge.body.parts)).add_to(theirs)
        return theirs

    def _answer(self, edge: Edge) -> None:
        a, b = self._read(edge), self._write(edge, REPLY)
        self.x.add_(a, alpha=self.gamma / 2).add_(b, alpha=-self.gamma / 2)
        self._landed += 1
        self.answers += 1
        self._post(edge, REPLY)

    def _apply(self, edge: Edge) -> None:
        b = self._read(edge)
        a = edge.bodies[ASK].parts[0].to(self.x.device) if self._made is None else edge.replicas[1]
        self.x.add_(b, alpha=self.gamma / 2).add_(a, alpha=-self.gamma / 2)
        edge.pending = False
        self._landed += 1
        self.exchanges += 1
        self._replies += time.monotonic() - edge.asked
        self._record("exchange", int(self.known[self.rank]) - edge.step)

    def _post(self, edge: Edge, kind: int, given: Tensor | None = None) -> None:
        """Send without waiting: the neighbour may be paused. Under the lock, so that a head and its rows stay together."""
        head = edge.heads[kind] if kind in edge.heads else torch.zeros_like(edge.head)
        head[:3] = torch.tensor((kind, self.rank, self._count))
        head[3:] = torch.cat((self.known, self.states))
        try:
            works = [edge.send(head, HEAD)]
            if kind in edge.bodies:
                works.append(edge.send(edge.bodies[kind].buffer, BODY))
                self.bits += row_bits(self._specs)
            elif given is not None:
                works.append(edge.send(given, BODY))
        except RuntimeError as error:
            self._lose(edge, str(error))
            return
        if kind in edge.heads:
            edge.works[kind] = works
        else:
            edge.notes.append((head, given, works))

    def _lose(self, edge: Edge, reason: str) -> None:
        """The neighbour is gone: its edge is closed, everybody will hear of it, and nothing else changes."""
        if edge.peer in self.lost:
            return
        self.lost[edge.peer] = reason.partition("\n")[0]
        edge.open = edge.pending = False
        self.states[edge.peer] = edge.life * (AGAIN + 1) + LOST
        self._news = True
        self._lock.notify_all()

    def _back(self, edge: Edge) -> bool:
        """Wait for another life of a lost neighbour; False if none can come, or this worker ends."""
        key = f"life/{edge.peer}"
        while edge.peer in self.returning and not self._ending:
            if self.store.check([key]) and int(self.store.get(key)) > edge.life:
                with self._lock:
                    edge.reset()
                return True
            time.sleep(0.05)
        return False

    def _await(self, ready: Callable[[], bool], timeout: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: ready() or self._error is not None, timeout)
            if self._error is not None:
                raise RuntimeError("a thread of the live clock failed") from self._error

    def _record(self, what: str, value: int) -> None:
        number, total, most = self._stale[what]
        self._stale[what] = [number + 1, total + value, max(most, value)]

    def _key(self) -> Tensor:
        return rng.key(self.seed, "live", self.life, self._count, torch.tensor([self.rank]))


@atexit.register
def _leave() -> None:
    """A thread that still waits for a message when the interpreter ends would abort the process."""
    for live in list(_OPEN):
        if any(thread.is_alive() for thread in live._threads):
            live.leave()


class _Closed(Exception):
    """The way to a neighbour is closed."""


@contextlib.contextmanager
def _closing() -> Iterator[None]:
    """Errors of the transport, as opposed to mistakes, are losses."""
    try:
        yield
    except RuntimeError as error:
        raise _Closed(str(error)) from error


def _refuse(topology: Topology, rank: int, drop: float) -> None:
    if topology.directed:
        raise Incompatible(
            "the live clock needs an undirected topology, for both ends of an edge average, and this one is directed: add the "
            "reverse of each edge"
        )
    if not topology.connected:
        raise Incompatible(
            f"the live clock needs a connected topology, and this one has {len(topology.components)} parts: add edges"
        )
    if not 0 <= rank < topology.n:
        raise ValueError(f"rank {rank} is outside 0…{topology.n - 1}, the workers of the topology")
    if not 0 <= drop < 1:
        raise ValueError(f"drop={drop!r} is not in [0, 1): it is the probability that an exchange is lost")


def live_options(algorithm: Algorithm) -> dict[str, Any]:
    """What the live clock does in an algorithm's place: options of `Live`.

    >>> live_options(DPSGD())
    {'compressor': None, 'gamma': 1.0}
    """
    refuse_unless_averaging(algorithm)
    if isinstance(algorithm, Choco):
        return {"compressor": algorithm.compressor, "gamma": algorithm.step}
    return {"compressor": None, "gamma": 1.0}


def refuse_unless_averaging(algorithm: Algorithm) -> None:
    """`Incompatible` for an algorithm that pairs cannot stand for."""
    if not isinstance(algorithm, DPSGD | Choco):
        raise Incompatible(
            f"the live clock averages pairs, and {type(algorithm).__name__} does more than average: use DPSGD, or Choco for "
            "compressed exchanges; the asynchronous clock has others"
        )


def edges_of(schedule: Schedule) -> Topology:
    """The undirected graph behind a fixed symmetric W."""
    for name in ("static", "symmetric"):
        if (offence := schedule.offence(name)) is not None:
            raise Incompatible(
                f"the live clock takes the edges of one W that is {name}, and {offence}: pass an undirected topology"
            )
    W = schedule(0)
    i, j = (W if W.is_sparse else W.to_sparse_coo()).coalesce().indices().tolist()
    return from_edges([(a, b) for a, b in zip(i, j) if a < b], n=schedule.n)
