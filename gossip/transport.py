"""The only place that knows `torch.distributed`: byte buffers per peer out, byte buffers per peer in."""

import contextlib
import datetime
import os
import socket
import struct
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

TIMEOUT = 300.0  # seconds; a slow worker is not a dead one


class PeerError(RuntimeError):
    """An exchange that did not complete: names the rank, the peer, the round and the message."""


class Transport:
    """Point-to-point messages between the processes of a group, and the few collectives that metrics need.

    Exchanges and collectives run in groups of their own, so that an average may be taken while an exchange is in flight.

    Args:
        group: the processes that take part; the default group if None. It must be initialised.
        timeout: bound of every wait in seconds.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call gossip.connect() first, or start the script with "
                "`torchrun --nproc-per-node N script.py`"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # A timed-out wait closes a gloo pair for good, so the bound belongs to the group and is never polled.
        self._collectives = dist.new_group(
            ranks, timeout=datetime.timedelta(seconds=timeout), use_local_synchronization=group is not None
        )
        self._works: list[tuple[dist.Work, str]] = []
        self._round = -1
        self.barrier()  # every rank is here, and NCCL's first batched exchange needs all of them warmed up

    def start(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], round: int) -> None:
        """Post an exchange: receives first, peers in rank order, one contiguous buffer each way per peer.

        The buffers must be left alone until `finish`.
        """
        self._round = round
        ops, notes = [], []
        for peer, buffer in sorted(incoming.items()):
            ops.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer))
            notes.append(f"receive {buffer.numel()} bytes from rank {peer}")
        for peer, buffer in sorted(outgoing.items()):
            ops.append(dist.P2POp(dist.isend, buffer, group=self.group, group_peer=peer))
            notes.append(f"send {buffer.numel()} bytes to rank {peer}")
        if not ops:  # a rank that is idle in this round; batch_isend_irecv refuses an empty list
            return
        with self._explained("; ".join(notes)):
            works = dist.batch_isend_irecv(ops)
        whole = ["; ".join(notes)] * len(works)
        self._works = list(zip(works, notes if len(works) == len(notes) else whole))

    def finish(self) -> None:
        """Wait until every buffer of the last `start` has arrived or left."""
        works, self._works = self._works, []
        for work, note in works:
            with self._explained(note):
                work.wait()

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        with self._explained("all-reduce a sum"):
            dist.all_reduce(x, group=self._collectives)
        return x

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite a tensor by that of rank `source`, in place."""
        with self._explained(f"broadcast from rank {source}"):
            dist.broadcast(x, group=self._collectives, group_src=source)  # pyrefly: ignore[bad-argument-type]
        return x

    def gather(self, item: Any) -> list[Any]:
        """One picklable object from each rank, in rank order, at every rank."""
        items: list[Any] = [None] * self.size
        with self._explained("gather"):
            dist.all_gather_object(items, item, group=self._collectives)
        return items

    def collect(self, item: Any) -> list[Any]:
        """One picklable object from each rank, in rank order, at rank 0; nothing elsewhere."""
        items: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._explained("collect"):
            dist.gather_object(item, items or None, group=self._collectives, group_dst=0)
        return items

    def deal(self, items: list[Any]) -> Any:
        """To each rank its own of the picklable objects that rank 0 has a list of."""
        mine: list[Any] = [None]
        with self._explained("deal"):
            dist.scatter_object_list(mine, items if self.rank == 0 else None, group=self._collectives, group_src=0)
        return mine[0]

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

    @contextlib.contextmanager
    def _explained(self, note: str):
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PeerError(
                f"rank {self.rank} could not {note} in round {self._round} (bound {self.timeout:g} s): the peer is dead, "
                f"stuck or slower than the bound; look at that rank's log, or raise the timeout. {error}"
            ) from error


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
    if not dist.is_initialized():
        if store is None and "RANK" not in os.environ:
            raise RuntimeError(
                "no process group: RANK is not set and no store was given; start the script with "
                "`torchrun --nproc-per-node N script.py`, or pass rank, size and store='file:///path'"
            )
        host = "localhost" if store is not None else os.environ.get("MASTER_ADDR", "")
        if not os.environ.get("GLOO_SOCKET_IFNAME") and (found := _interface(host)):
            # gloo binds where the host's own name resolves, which need not be where the others are, nor exist.
            os.environ["GLOO_SOCKET_IFNAME"] = found
        try:
            dist.init_process_group(
                backend,
                init_method=store or "env://",
                rank=-1 if rank is None else rank,
                world_size=-1 if size is None else size,
                timeout=datetime.timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {os.environ.get('RANK', rank)} could not meet the others at {host or store} by the network interface "
                f"{os.environ.get('GLOO_SOCKET_IFNAME', 'of its own name')}: set GLOO_SOCKET_IFNAME on every host to the "
                "interface that reaches the others (`ip route get ADDRESS` names it), and let no firewall stop the ports "
                f"above 1024 between them. {error}"
            ) from error
    return Transport(group, timeout)


def _interface(host: str) -> str | None:
    """The network interface by which this machine reaches a host, or None where the system does not tell."""
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
    """Leave the process group, after a last barrier so that nobody leaves while another still waits for its message."""
    if dist.is_initialized():
        try:
            dist.barrier()
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()} ended its work and another rank was gone by then. {error}"
            ) from error
        dist.destroy_process_group()
