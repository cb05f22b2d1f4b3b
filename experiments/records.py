"""A run's own record on disk, so that no figure ever needs a tracker: `metrics.jsonl` and `run.json` in the run's
folder.

`metrics.jsonl`: the first line is the header (resolved config, what each of its groups was chosen as, git commit, versions,
seeds, hash of the topology), every other line one evaluation, flushed as it is written, so that a crash loses at most one.
`run.json`: status, rounds done and planned, summary; replaced atomically. JSON has no NaN and no infinity: they are
written as the strings "NaN", "Infinity" and "-Infinity", and read back as floats.
"""

import json
import math
import os
import subprocess
import time
import traceback
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from graphs import Topology

METRICS, RUN = "metrics.jsonl", "run.json"
STATUSES = ("running", "done", "failed", "incompatible", "diverged", "interrupted")
RESULTS = ("done", "incompatible", "diverged")  # of a run that ended as its config would have it
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PACKAGES = ("gossip-sgd", "torch", "numpy", "torch-geometric", "hydra-core", "wandb")


class Run(NamedTuple):
    """What `read` found in a folder: the header, the rows in the order of their rounds, and run.json with `status`, `done` and
    `planned`."""

    folder: Path
    header: dict[str, Any]
    rows: list[dict[str, Any]]
    status: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return self.header.get("config", {})

    @property
    def complete(self) -> bool:
        return self.status["status"] == "done"

    @property
    def progress(self) -> str:
        return f"{self.status['done']}/{self.status['planned'] if self.status['planned'] is not None else '?'}"


def encode(value: Any) -> Any:
    """`value` as JSON can hold it: numbers of torch and numpy become Python's, NaN and infinities strings, other
    objects their text.

    >>> encode({"loss": float("nan"), "bits": 3, "worst": (float("-inf"), None)})
    {'loss': 'NaN', 'bits': 3, 'worst': ['-Infinity', None]}
    """
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def decode(value: Any) -> Any:
    """The inverse of `encode` for numbers.

    >>> decode(["-Infinity", {"a": "NaN"}, "text"])
    [-inf, {'a': nan}, 'text']
    """
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def header(config: Mapping[str, Any], topology: Topology | None = None, **more: Any) -> dict[str, Any]:
    """What is needed to repeat a run: the resolved config, the code's commit (and whether files were changed),
    versions, seeds, and the digest of the graph where a topology is given."""
    return {
        "config": encode(config),
        "git": git(),
        "versions": versions(),
        "seeds": seeds(config),
        "topology": None if topology is None else topology.digest,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **encode(more),
    }


def seeds(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every seed of a nested config, by its dotted key.

    >>> seeds({"seed": 1, "n": 4, "task": {"split_seed": 0}})
    {'seed': 1, 'task.split_seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= seeds(value, f"{prefix}{key}.")
        elif key == "seed" or key.endswith("_seed"):
            found[f"{prefix}{key}"] = value
    return found


def setting(config: Any, seeds: bool = False) -> Any:
    """The config without its seeds (unless ``seeds``), and without what only says how a run is shown or kept: runs with
    equal ones are repetitions of one setting.

    >>> setting({"n": 4, "seed": 1, "track": "off", "task": {"seed": 1, "batch": 32}})
    {'n': 4, 'task': {'batch': 32}}
    """
    left_out = {"track", "progress", "resume", "resume_average", "checkpoint_every"} | (set() if seeds else {"seed"})
    if isinstance(config, Mapping):
        return {k: setting(v, seeds) for k, v in config.items() if k not in left_out}
    return [setting(v, seeds) for v in config] if isinstance(config, (list, tuple)) else config


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where the settings and seeds of two configs differ: {dotted key: (one's, other's)}; copies of an option, such as n in
    the topology, are under its shortest key.

    >>> differences({"n": 4, "seed": 0, "task": {"n": 4}}, {"n": 8, "seed": 0, "task": {"n": 8, "d": 3}, "track": "off"})
    {'n': (4, 8), 'task.d': (None, 3)}
    """
    both = [flat(decode(encode(setting(config, seeds=True)))) for config in (one, other)]
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(both[0].keys() | both[1].keys(), key=lambda key: (key.count("."), key)):
        pair = both[0].get(key), both[1].get(key)
        copies = (found[k] for k in found if k.rpartition(".")[2] == key.rpartition(".")[2])
        if repr(pair[0]) != repr(pair[1]) and pair not in copies:
            found[key] = pair
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The options of a config and its components: {dotted key: value}."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def git(folder: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository that holds this code; None where there is none, or no git."""
    try:

        def ask(*words: str) -> str:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
            )
            return done.stdout.strip()

        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class Writer:
    """Writes one run's record; to be used by one process only.

    ```
    with Writer(folder, records.header(config), planned=500) as record:
        record.log({"round": 10, "eval/average/accuracy": 0.7})
    ```
    Leaving the block writes status "done", or "failed" with the traceback; `finish` sets another.
    Raises ValueError where the folder already holds a run, unless ``resume``: then rows are appended, a half-written
    last line is cut off, and rounds that are on record are not written again.
    """

    def __init__(
        self, folder: str | Path, header: Mapping[str, Any], planned: int | None = None, resume: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / METRICS
        self._rounds: set[int] = set()
        self.last: dict[str, Any] = {}
        kept = b""
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ValueError(
                    f"{self.folder} already holds a run: a record is never overwritten. Choose another folder, or "
                    "resume."
                )
            kept = path.read_bytes()
            kept = kept[: kept.rfind(b"\n") + 1]
            with path.open("r+b") as file:
                file.truncate(len(kept))
            rows = read(self.folder).rows if kept else []
            self._rounds = {row["round"] for row in rows if "round" in row}
            self.last = rows[-1] if rows else {}
        if not kept:
            self._write(header)
        self._status: dict[str, Any] = {
            "status": "running",
            "started": time.time(),
            "planned": planned,
            "pid": os.getpid(),
        }
        self._save()

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one evaluation and flushes it. A row of a round that is on record already is left out."""
        if (at := row.get("round")) is not None:
            if at in self._rounds:
                return
            self._rounds.add(at)
        self._write(row)
        self.last = decode(encode(row))

    def finish(self, status: str = "done", reason: str | None = None, **more: Any) -> None:
        """Writes the final run.json, once: ``reason`` is a sentence or a traceback; further keywords are added to it."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}.")
        if self._status["status"] != "running":
            return
        self._status.update(status=status, reason=reason, ended=time.time(), **more)
        self._save()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, KeyboardInterrupt):
            self.finish("interrupted", str(error) or "interrupted by the user")
        else:
            self.finish("failed", "".join(traceback.format_exception(kind, error, trace)))

    def _write(self, line: Mapping[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(encode(line), allow_nan=False) + "\n")

    def _save(self) -> None:
        self._status.update(done=max(self._rounds, default=0), summary=self.last)
        write_status(self.folder, self._status)


def write_status(folder: str | Path, status: Mapping[str, Any]) -> None:
    """run.json, whole or not at all: written beside and renamed. Also for a run that never began, such as an
    incompatible pair."""
    path = Path(folder) / RUN
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{RUN}.{os.getpid()}")
    beside.write_text(json.dumps(encode(status), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read(folder: str | Path) -> Run:
    """The record in `folder`. The last line may be torn by a crash, and is then left out; of two rows of a round the
    later counts.

    `status` always has "status", "done" and "planned"; without a run.json the status is "unknown". For a run that was
    killed, run.json still says "running", and "done" is the last round on record.
    Raises FileNotFoundError where there is neither file, ValueError for a broken line that is not the last.
    """
    folder = Path(folder)
    if not (folder / METRICS).exists() and not (folder / RUN).exists():
        raise FileNotFoundError(f"{folder} has no {METRICS}: it is no run's folder.")
    status: dict[str, Any] = {"status": "unknown", "planned": None, "done": 0}
    if (folder / RUN).exists():
        try:
            status.update(decode(_object((folder / RUN).read_text(encoding="utf-8"))))
        except ValueError as error:
            raise ValueError(f"{folder / RUN} is no JSON object ({error}): mend it, or remove it.") from None
    lines: list[dict[str, Any]] = []
    text = (folder / METRICS).read_text(encoding="utf-8", errors="replace") if (folder / METRICS).exists() else ""
    for number, line in enumerate(broken := text.split("\n")):
        if not line:
            continue
        try:
            lines.append(decode(_object(line)))
        except ValueError:
            if number == len(broken) - 1:
                break
            raise ValueError(
                f"{folder / METRICS}, line {number + 1} is no JSON object: {line[:60]!r}. Mend or remove the line."
            ) from None
    head, rows = (lines[0], lines[1:]) if lines else ({}, [])
    by_round = {row.get("round", -1 - i): row for i, row in enumerate(rows)}
    rows = sorted(by_round.values(), key=lambda row: row.get("round", 0))
    if rows:
        status["done"] = max(status["done"] or 0, rows[-1].get("round", 0))
    return Run(folder, head, rows, status)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is {text[:20]}")
    return found
