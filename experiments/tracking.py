"""W&B as a guest: one run per job, opened in the process that started it, and no error of it ever ends a training.

`tracker` gives an object with `log` and `finish`, or one of the same face that does nothing. The run's own record
(`experiments.records`) does not need it. W&B's variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, WANDB_NAME,
WANDB_RUN_GROUP, …) are honoured.
"""

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiments import metrics, records

_MODES = ("off", "offline", "online")
log = logging.getLogger(__name__)


def group(config: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that the runs of one setting (`records.setting`) share, so that W&B can average them.

    >>> group({"n": 4, "seed": 0, "task": {"seed": 0}}) == group({"n": 4, "seed": 1, "task": {"seed": 1}})
    True
    """
    text = json.dumps(records.encode(records.setting(config)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Off:
    """A tracker that does nothing: for ``track=off``, and for every process but the one that tracks."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def finish(self, failed: bool = False) -> None:
        """Nothing."""

    def __enter__(self) -> "Off":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.finish(failed=error is not None)


class Tracker(Off):
    """A W&B run, bound to the process that opened it.

    Calls from another process or after `finish` are ignored, and whatever W&B raises is too, each with one warning in
    the log. Leaving a ``with`` block finishes the run, as failed where an exception passes.
    """

    def __init__(self, run: Any, folder: Path) -> None:
        self._run, self._folder, self._pid = run, folder, os.getpid()
        self._warned: set[str] = set()
        self._finished = False

    def log(self, row: Mapping[str, Any]) -> None:
        """One evaluation, with all its x-axes, in one call: metrics logged apart lose their points on another axis. The
        numbers that are NaN or infinite are counted under ``nonfinite``."""
        if self._usable("log"):
            odd = sum(isinstance(v, float) and not math.isfinite(v) for v in row.values())
            self._safely(lambda: self._run.log({**row, "nonfinite": odd} if odd else dict(row)))

    def finish(self, failed: bool = False) -> None:
        """Closes the run; a second call is harmless."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        self._safely(lambda: self._run.finish(exit_code=int(failed)))
        if parts := offline_parts(self._folder) or self._elsewhere():
            log.info("to upload: wandb sync %s", " ".join(map(str, parts)))

    def _elsewhere(self) -> list[str]:
        """This run's own folder where WANDB_DIR, which many runs share, holds it."""
        settings = getattr(self._run, "settings", None)
        return [settings.sync_dir] if settings is not None and self._run.offline else []

    def _usable(self, what: str) -> bool:
        if os.getpid() != self._pid:
            self._warn(f"{what} in another process than the one that opened the W&B run is ignored")
        elif self._finished:
            self._warn(f"{what} after the W&B run was finished is ignored")
        else:
            return True
        return False

    def _safely(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._warn(f"W&B failed, training goes on ({type(error).__name__}: {error})")

    def _warn(self, text: str) -> None:
        kind = text.partition("(")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text)


def tracker(track: str, config: Mapping[str, Any], folder: str | Path, timeout: float = 60.0) -> Off:
    """The tracker of a run, to be called once per run and in its parent process only.

    Args:
        track: "off", "offline" (needs no account; files in ``folder``/wandb) or "online". Unless it is "off", the
            variable WANDB_MODE counts more.
        config: the resolved config.
        folder: the run's folder.
        timeout: seconds for W&B to start.

    W&B's own failure to start (no network, no login) is one warning. What was meant to be online is then offline, for this
    process and those that it starts (WANDB_MODE), so that a sweep waits once; else the run goes on without it.

    >>> tracker("off", {}, ".").log({"round": 1})
    """
    if track not in _MODES:
        raise ValueError(f"track={track!r} is not one of {', '.join(_MODES)}")
    mode = os.environ.get("WANDB_MODE") or track
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    if track == "off" or mode in ("off", "disabled"):
        return Off()
    former = offline_parts(folder)  # of the run that is resumed here, whose record is sent again
    try:
        import wandb

        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "gossip-sgd",
            entity=os.environ.get("WANDB_ENTITY") or None,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            group=os.environ.get("WANDB_RUN_GROUP") or group(config),
            name=os.environ.get("WANDB_NAME") or _name(config),
            id=former[-1].name.rpartition("-")[2] if former else None,
            config=records.encode(config),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=timeout,
                login_timeout=timeout,
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        for axis in metrics.AXES:
            run.define_metric(axis)
        for names in ("eval/*", "consensus/*", "train/*"):
            run.define_metric(names, step_metric="round")
    except Exception as error:
        without = "offline" if mode == "online" else "without it"
        text = f"W&B did not start, the run goes on {without} ({type(error).__name__}: {error})"
        log.warning("%s. Its record is in %s all the same; track=off silences this.", text, folder)
        _tell(text)
        if mode != "online":
            return Off()
        os.environ["WANDB_MODE"] = "offline"
        return tracker(track, config, folder, timeout)
    if not run.offline:
        log.info("W&B: %s", run.url)
    return Tracker(run, Path(folder))


@cache
def _tell(text: str) -> None:
    """On the console, where a log file would not be looked at until it is too late; once, also in a sweep."""
    print(f"warning: {text}; track=off silences this", file=sys.stderr, flush=True)


def offline_parts(folder: str | Path) -> list[Path]:
    """The W&B folders of an offline run, several after a resume; `wandb sync` takes them all."""
    return sorted(Path(folder).glob("wandb/offline-run-*"))


def _name(config: Mapping[str, Any]) -> str | None:
    """Such as "Choco ring n16 seed0"."""
    parts = [
        str(part["_target_"]).rsplit(".", 1)[-1]
        for part in (config.get("algorithm"), config.get("topology"))
        if isinstance(part, Mapping) and "_target_" in part
    ]
    parts += [f"{key}{config[key]}" for key in ("n", "seed") if key in config]
    return " ".join(parts) or None
