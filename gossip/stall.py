"""A stall is explained as who waits for whom, in which round, for how many bytes: long waits are noted where all can read."""

import logging
import time
import weakref
from typing import Any, NamedTuple

logger = logging.getLogger("gossip")


class Leg(NamedTuple):
    """One buffer's way in an exchange, or a collective with everybody."""

    what: str
    peer: int | None = None

    def __str__(self) -> str:
        return self.what

    @property
    def of(self) -> str:
        """Whom it depends on."""
        return "another rank" if self.peer is None else f"rank {self.peer}"


class Waiting(NamedTuple):
    """What a rank is blocked by."""

    since: float
    round: int
    leg: Leg


class Board:
    """One note per rank in a store that all ranks reach: what it is waiting for, if it has waited for long.

    Args:
        store: has `set`, `check` and `get`, such as the one in which the processes met; None for a board that nobody reads.
        name: the same for all ranks of a group.
        rank: this process.

    >>> class Store(dict):
    ...     set, check = dict.__setitem__, lambda self, keys: all(k in self for k in keys)
    ...     get = lambda self, key: self[key].encode()
    >>> store = Store()
    >>> for rank in range(2):
    ...     Board(store, "doc", rank).note(Waiting(0.0, 7, Leg(f"receive 80 bytes from rank {rank + 1}", rank + 1)))
    >>> print(Board(store, "doc", 0).chain(1))
    rank 1 waits in round 7 to receive 80 bytes from rank 2, rank 2 waits for nobody: it computes, is stopped, or has ended
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self.store, self.name, self.rank = store, name, rank

    def note(self, waiting: Waiting | None) -> None:
        """State what this rank waits for; None when that is over."""
        text = "" if waiting is None else f"{waiting.leg.peer}/in round {waiting.round} to {waiting.leg}"
        try:
            if self.store is not None:
                self.store.set(self._key(self.rank), text)
        except Exception:  # the store is gone with its host
            self.store = None

    def chain(self, rank: int | None) -> str:
        """From `rank` on who waits for whom, as far as is known."""
        told, seen = [], {self.rank}
        while rank is not None:
            if rank in seen:
                told.append(
                    f"which waits for rank {rank}: a circle" if rank != self.rank else "for this rank: a circle"
                )
                break
            seen.add(rank)
            text = self._read(rank)
            if text is None:
                break
            if not text:
                told.append(f"rank {rank} waits for nobody: it computes, is stopped, or has ended")
                break
            peer, _, what = text.partition("/")
            told.append(f"rank {rank} waits {what}")
            rank = int(peer) if peer != "None" else None
        return ", ".join(told)

    def _key(self, rank: int) -> str:
        return f"gossip/{self.name}/{rank}"

    def _read(self, rank: int) -> str | None:
        """A rank's note, empty if there is none; None if the store cannot be reached."""
        try:
            key = self._key(rank)
            return self.store.get(key).decode() if self.store is not None and self.store.check([key]) else ""
        except Exception:
            self.store = None
            return None


def watch(ref: weakref.ref, board: Board, timeout: float) -> None:
    """Note each wait that takes a tenth of the bound, and warn of it once, with what the others have noted."""
    noted = warned = None
    while (transport := ref()) is not None:
        now, waits = time.perf_counter(), [w for w in transport._waiting if w is not None]
        long = next((w for w in waits if now - w.since > timeout / 10), None)
        if long is not noted:
            board.note(long)  # and give the others a moment for theirs
            noted = long
        elif long is not None and long is not warned:
            warned = long
            logger.warning(
                "rank %d has waited %.3g s for %s in round %d, to %s; it gives up after %g s%s",
                *(transport.rank, now - long.since, long.leg.of, long.round, long.leg, timeout),
                f" ({chain})" if (chain := board.chain(long.leg.peer)) else "",
            )
        del transport, waits, long
        time.sleep(min(1.0, timeout / 50))
