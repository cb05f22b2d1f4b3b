"""Processes that may die: what the launcher does to them, and how those that are left meet again, by files in its folder."""

import json
import multiprocessing.process
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gossip

PATIENCE = 10.0  # seconds in which the launcher notices a death


@dataclass(frozen=True)
class Seat:
    """A worker's place in a run with faults: how it meets the others again, by files in a folder of the launcher.

    Args:
        home: the folder.
        worker: which worker this is.
        life: how often it was restarted.
        timeout: bound of the waits in exchanges.
        send: to the launcher; a `Pause` asks for it.
    """

    home: str
    worker: int
    life: int
    timeout: float
    send: Callable[[Any], None]

    def befall(self, faults: gossip.Faults, round: float, past: set[int]) -> None:
        """Die, or ask to be paused, if that is due by round. `past` holds the pauses that have been."""
        due = (k for k in faults.kills if k.worker == self.worker and k.round is not None and k.round <= round)
        if self.life == 0 and any(due):
            os.kill(os.getpid(), signal.SIGKILL)
        for number, pause in enumerate(faults.pauses):
            if pause.worker == self.worker and pause.round is not None and pause.round <= round and number not in past:
                past.add(number)
                self.send(pause)

    def losses(self, beyond: int = 0) -> list[int]:
        """The workers lost so far, in order; waits a while until they are more than `beyond`."""
        deadline = time.monotonic() + PATIENCE
        while len(gone := _read(Path(self.home, "lost.json")) or []) <= beyond and time.monotonic() < deadline:
            time.sleep(0.02)
        return gone

    def meet(self, workers: tuple[int, ...], name: str) -> gossip.Transport:
        """A world of these workers, who all come with the same name."""
        place = Path(self.home, f"{name}-{'-'.join(map(str, workers))}")
        try:
            return gossip.connect(workers.index(self.worker), len(workers), place.as_uri(), timeout=self.timeout)
        except RuntimeError as error:
            raise gossip.PeerError(f"worker {self.worker} could not meet {workers}: {error}") from error

    def invite(self, back: list[int], workers: tuple[int, ...], round: int, losses: int) -> None:
        """Let restarted workers come: `invitation` returns the rest."""
        for worker in back:
            _write(Path(self.home, f"back-{worker}.json"), (workers, round, losses))

    def invitation(self) -> tuple[tuple[int, ...], int, int] | None:
        """Wait to be invited, as long as the run goes on: (workers, round, losses known); None if it went on without."""
        while (said := _read(Path(self.home, f"back-{self.worker}.json"))) is None:
            if Path(self.home, "over.json").exists():
                return None
            time.sleep(0.02)
        return tuple(said[0]), said[1], said[2]


class Crew:
    """The launcher's side of faults: kills and pauses processes at their seconds, restarts them, and writes down who is lost.

    Args:
        faults: what happens when.
        home: the folder where workers look for each other.
        start: starts a process for (worker, life).
        told: hears of each loss, (worker).
    """

    def __init__(
        self, faults: gossip.Faults, home: Path, start: Callable[[int, int], None], told: Callable[[int], None]
    ) -> None:
        self.faults, self.home, self.start, self.told = faults, home, start, told
        self.processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self.gone: list[int] = []
        self.restarted: set[int] = set()
        self._due: list[tuple[float, int, int]] = []  # when, whom, which signal

    def begin(self) -> None:
        """All have started: seconds are counted from now on."""
        now = time.monotonic()
        for kill in self.faults.kills:
            if kill.seconds is not None:
                self._due.append((now + kill.seconds, kill.worker, signal.SIGKILL))
        for pause in self.faults.pauses:
            if pause.seconds is not None:
                self._stop(pause.worker, now + pause.seconds, pause.lasting)

    def pause(self, worker: int, lasting: float) -> None:
        """Stop a process from now on."""
        self._stop(worker, time.monotonic(), lasting)
        self.tick()

    def _stop(self, worker: int, when: float, lasting: float) -> None:
        self._due += [(when, worker, signal.SIGSTOP), (when + lasting, worker, signal.SIGCONT)]

    def tick(self) -> float:
        """Do what is due; returns the seconds until the next thing is."""
        now = time.monotonic()
        due = sorted(d for d in self._due if d[0] <= now)
        for _, worker, what in due:
            process = self.processes[worker]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, what)
        self._due = [d for d in self._due if d not in due]
        return max(0.0, min((when - now for when, _, _ in self._due), default=1.0))

    def died(self, worker: int, code: int | None) -> bool:
        """Whether a process that ended without a word was killed, which the others survive."""
        if code is None or code >= 0 or len(self.gone) + 1 >= len(self.processes):
            return False
        self.gone.append(worker)
        _write(self.home / "lost.json", self.gone)
        self.told(worker)
        if worker not in self.restarted and any(k.worker == worker and k.back is not None for k in self.faults.kills):
            self.restarted.add(worker)
            self.start(worker, 1)
        return True

    def left(self, workers: set[int]) -> None:
        """These have not ended yet: if all of them were restarted, those that still wait for an invitation get none."""
        if workers <= self.restarted and self.restarted:
            _write(self.home / "over.json", True)


def _write(path: Path, value: Any) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
