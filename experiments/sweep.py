"""A sweep as a whole: its definition on disk, config files that stay as they were, and a table of what became of each job."""

import contextlib
import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments import records

DEFINITION = "sweep.json"


class Snapshot(CachingConfigRepository):
    """Config files as they were when the sweep began, of which Hydra composes every job: what is edited meanwhile changes no
    later job, here or in other processes. Hydra makes a copy for each job, and checks them all before the first."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Snapshot":
        return self

    def load_config(self, config_path: str) -> Any:
        return copy.deepcopy(super().load_config(config_path))


class Sweep(Callback):
    """Hydra's hooks around the jobs of `--multirun`; does nothing in a single run."""

    folder: ClassVar[Path | None] = None  # of the sweep that has begun

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A launcher that sends jobs to other processes (joblib) sends the hooks along; the bar stays here."""
        return {"bar": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the config files, write sweep.json, point runs/latest here and start the bar."""
        folder = Path(config.hydra.sweep.dir)
        loader: Any = GlobalHydra.instance().config_loader()
        loader.repository = Snapshot(loader.repository)
        params = config.hydra.sweeper.get("params") or {}
        given = list(config.hydra.overrides.task)
        named = {override.partition("=")[0].lstrip("+") for override in given}
        overrides = given + [f"{k}={v}" for k, v in params.items() if k not in named]
        if "BasicSweeper" in config.hydra.sweeper._target_ and (odd := [o for o in overrides if "=interval(" in o]):
            sys.exit(
                f"error: {odd[0]}: there is nothing to count through in an interval; use range(…,step=…) or a list"
            )
        known = _definition(folder).get("overrides", overrides)
        if known != overrides:
            sys.exit(
                f"error: {folder} holds another sweep, {' '.join(known)}: give this one a folder of its own (hydra.sweep.dir), "
                "or repeat that command, which goes on where it ended"
            )
        total = _jobs(overrides, loader)
        folder.mkdir(parents=True, exist_ok=True)
        point(folder)
        definition = {"overrides": overrides, "jobs": total, "versions": records.versions(), "git": records.git()}
        (folder / DEFINITION).write_text(json.dumps(records.encode(definition), indent=1) + "\n")
        Sweep.folder = folder
        self.bar = tqdm(total=total, desc="sweep", unit="run", disable=not config.get("progress", True))

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Move the bar on."""
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix_str(" ".join(job_return.overrides or []))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Close the bar, print one line per job that did not end well, and the counts; exit with 1 if any failed."""
        folder = Path(config.hydra.sweep.dir)
        if self.bar is not None:
            self.bar.update(len(jobs(folder)) - self.bar.n)
            self.bar.close()
        print(summary(folder), flush=True)
        ended = [run.status["status"] in records.RESULTS for run in jobs(folder).values()]
        if not all(ended) or len(ended) < (_definition(folder)["jobs"] or 0):
            sys.exit(1)


def point(folder: Path) -> None:
    """runs/latest → this run or sweep, where that is how folders are named (runs/date/time)."""
    latest = folder.resolve().parent.parent / "latest"
    if latest.parent.name == "runs" and (latest.is_symlink() or not latest.exists()):
        beside = latest.with_name(f".latest.{os.getpid()}")
        with contextlib.suppress(OSError):  # where links cannot be made: a convenience
            beside.symlink_to(folder.resolve())
            os.replace(beside, latest)


def jobs(folder: Path) -> dict[Path, records.Run]:
    """The records of a sweep, in the order of the jobs."""
    folders = sorted((p.parent for p in folder.rglob(records.RUN)), key=lambda p: (len(str(p)), str(p)))
    return {job: _read(job) for job in folders}


def _read(job: Path) -> records.Run:
    try:
        return records.read(job)
    except ValueError as error:  # one broken record hides no other
        return records.Run(job, {}, [], {"status": "unreadable", "reason": str(error)})


def summary(folder: Path) -> str:
    """Counts by status, and a line with overrides and reason for each run that is not done."""
    counts: dict[str, int] = {}
    runs = jobs(folder)
    lines = []
    for job, run in runs.items():
        status = run.status
        counts[status["status"]] = counts.get(status["status"], 0) + 1
        if status["status"] != "done":
            overrides = job / ".hydra" / "overrides.yaml"
            what = " ".join(OmegaConf.load(overrides)) if overrides.exists() else job.name
            reason = str(status.get("reason") or f"round {status['done']} of {status['planned']}").strip()
            lines.append(f"{status['status']:>12}  {what}: {reason.splitlines()[-1]}")
    if (missing := (_definition(folder).get("jobs") or 0) - len(runs)) > 0:
        counts["without a record"] = missing
    total = ", ".join(f"{v} {k}" for k, v in sorted(counts.items())) or "no runs"
    return "\n".join([*lines, f"sweep: {total}; records: {folder}"])


def _definition(folder: Path) -> dict[str, Any]:
    path = folder / DEFINITION
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _jobs(overrides: list[str], loader: Any = None) -> int | None:
    """How many runs the overrides describe, of which the last for a key counts; None where only Hydra's sweeper knows.

    >>> _jobs(["algorithm=dpsgd,choco", "topology=ring", "seed=range(0,3)", "task.model.hidden=[64,32]"])
    6
    """
    try:
        parsed = {o.get_key_element(): o for o in OverridesParser.create(loader).parse_overrides(overrides)}
        return math.prod(len(list(o.sweep_string_iterator())) for o in parsed.values() if o.is_sweep_override())
    except HydraException:
        return None


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
