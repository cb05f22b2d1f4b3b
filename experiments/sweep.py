"""What a sweep leaves behind: its definition, a progress bar over its jobs, and a table of what became of each."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments import records


class Sweep(Callback):
    """Hydra's hooks around the jobs of `--multirun`; does nothing in a single run."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A launcher that sends jobs to other processes (joblib) sends the hooks along; the bar stays here."""
        return {"bar": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write sweep.json, point runs/latest here and start the bar."""
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        point(folder)
        params = config.hydra.sweeper.get("params") or {}
        given = list(config.hydra.overrides.task)
        named = {override.partition("=")[0].lstrip("+") for override in given}
        overrides = given + [f"{k}={v}" for k, v in params.items() if k not in named]
        definition = {"overrides": overrides, "versions": records.versions(), "git": records.git()}
        (folder / "sweep.json").write_text(json.dumps(records.encode(definition), indent=1) + "\n")
        self.bar = tqdm(total=_jobs(overrides), desc="sweep", unit="run", disable=not config.get("progress", True))

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
        if any(run.status["status"] not in records.RESULTS for run in jobs(folder).values()):
            sys.exit(1)


def point(folder: Path) -> None:
    """runs/latest → this run or sweep, where that is how folders are named (runs/date/time)."""
    latest = folder.resolve().parent.parent / "latest"
    if latest.parent.name == "runs" and (latest.is_symlink() or not latest.exists()):
        beside = latest.with_name(f".latest.{os.getpid()}")
        beside.symlink_to(folder.resolve())
        os.replace(beside, latest)


def jobs(folder: Path) -> dict[Path, records.Run]:
    """The records of a sweep, in the order of the jobs."""
    folders = sorted((p.parent for p in folder.glob(f"*/{records.RUN}")), key=lambda p: (len(p.name), p.name))
    return {job: records.read(job) for job in folders}


def summary(folder: Path) -> str:
    """Counts by status, and a line with overrides and reason for each run that is not done."""
    counts: dict[str, int] = {}
    lines = []
    for job, run in jobs(folder).items():
        status = run.status
        counts[status["status"]] = counts.get(status["status"], 0) + 1
        if status["status"] != "done":
            overrides = job / ".hydra" / "overrides.yaml"
            what = " ".join(OmegaConf.load(overrides)) if overrides.exists() else job.name
            reason = str(status.get("reason") or f"round {status['done']} of {status['planned']}").strip()
            lines.append(f"{status['status']:>12}  {what}: {reason.splitlines()[-1]}")
    total = ", ".join(f"{v} {k}" for k, v in sorted(counts.items())) or "no runs"
    return "\n".join([*lines, f"sweep: {total}; records: {folder}"])


def _jobs(overrides: list[str]) -> int | None:
    """How many runs the overrides describe; None where only Hydra's sweeper knows.

    >>> _jobs(["algorithm=dpsgd,choco", "topology=ring", "seed=range(0,3)", "task.model.hidden=[64,32]"])
    6
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        return math.prod(len(list(o.sweep_string_iterator())) for o in parsed if o.is_sweep_override())
    except HydraException:
        return None


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
