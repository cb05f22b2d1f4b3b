"""What a sweep leaves behind: its definition, a progress bar over its jobs, and a table of what became of each."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments import records


class Sweep(Callback):
    """Hydra's hooks around the jobs of `--multirun`; does nothing in a single run."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write sweep.json and start the bar."""
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        params = OmegaConf.to_container(config.hydra.sweeper.get("params") or {})
        overrides = list(config.hydra.overrides.task) + [f"{k}={v}" for k, v in dict(params).items()]
        definition = {"overrides": overrides, "versions": records.versions(), "git": records.git()}
        (folder / "sweep.json").write_text(json.dumps(records.encode(definition), indent=1) + "\n")
        jobs = math.prod(_choices(o) for o in overrides)
        self.bar = tqdm(total=jobs, desc="sweep", unit="run", disable=not config.get("progress", True))

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Move the bar on."""
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix_str(" ".join(job_return.overrides or []))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Close the bar and print one line per job that did not end well, and the counts."""
        if self.bar is not None:
            self.bar.close()
        print(summary(Path(config.hydra.sweep.dir)), flush=True)


def summary(folder: Path) -> str:
    """Counts by status, and a line with overrides and reason for each run that is not done."""
    counts: dict[str, int] = {}
    lines = []
    jobs = sorted((p.parent for p in folder.glob(f"*/{records.RUN}")), key=lambda p: (len(p.name), p.name))
    for job in jobs:
        status = records.read(job).status
        counts[status["status"]] = counts.get(status["status"], 0) + 1
        if status["status"] != "done":
            overrides = job / ".hydra" / "overrides.yaml"
            what = " ".join(OmegaConf.load(overrides)) if overrides.exists() else job.name
            reason = str(status.get("reason") or f"round {status['done']} of {status['planned']}").strip()
            lines.append(f"{status['status']:>12}  {what}: {reason.splitlines()[-1]}")
    total = ", ".join(f"{v} {k}" for k, v in sorted(counts.items())) or "no runs"
    return "\n".join([*lines, f"sweep: {total}; records: {folder}"])


def _choices(override: str) -> int:
    """How many values an override sweeps over: commas outside of brackets, plus one."""
    depth, count = 0, 1
    for c in override.partition("=")[2]:
        depth += (c in "([{") - (c in ")]}")
        count += c == "," and depth == 0
    return count


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
