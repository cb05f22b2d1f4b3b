"""The command: one run, or a sweep with -m, from a Hydra config to a record on disk.

python -m experiments.train algorithm=choco compressor=topk topology=ring n=16 task=digits
python -m experiments.train -m algorithm=dpsgd,choco topology=ring,torus seed=0,1,2
torchrun --nproc-per-node 4 -m experiments.train launch=blocks n=16
"""

import io
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from tqdm import tqdm

import gossip
from experiments import launch, lively, records, schema, sweep, tracking
from experiments.divergence import Divergence
from experiments.trainer import CHECKPOINT, Setup, build, hosted, resumable, train

log = logging.getLogger(__name__)
CONF = Path(__file__).parent / "conf"
OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)


def run(
    config: dict[str, Any],
    folder: Path,
    keep: bool = False,
    progress: str = "",
    say: Callable[[str], object] = lambda text: None,
    choices: dict[str, str] | None = None,
) -> torch.Tensor | None:
    """One run of a resolved config: checked here, hosted wherever `launch` says, recorded in `folder`.

    Returns the trajectory (evaluations, n, d) if `keep`. `say` gets the task's report before the run and a summary after it.
    `choices` are the files that the config's groups were taken from, for the record.

    Raises:
        gossip.Incompatible: the algorithm refuses the schedule.
        ValueError: the config is wrong; the message names value, rule and remedy.
    """
    schema.check(config)
    processes = launch.world(config)
    threads = launch.threads(config, processes)
    log.info("%d process(es), %d thread(s) each", processes, threads)
    torch.set_num_threads(threads)
    setup = build(config)
    unused = (config.get("compressor") or {}).get("_target_", "gossip.Identity")
    if unused != "gossip.Identity" and "compressor" not in config["algorithm"]:
        say(f"note: {type(setup.algorithm).__name__} takes no compressor, so {unused} is not used")
    config = tuned(config, setup, say)
    begun: list[dict[str, Any]] = []
    if config["resume"] is not None:
        former = Path(config["resume"]).resolve()
        config = config | {"resume": str(former.parent if former.name == CHECKPOINT else former)}
        begun = _begun(config, setup, folder, say)
    recorded = partial(_recorded, config, setup, folder, progress, say, begun, choices or {})
    if launch.under_torchrun():
        try:
            transport = gossip.connect(timeout=config["launch"]["timeout"])
        except RuntimeError as error:  # a paragraph that says how to start the others
            raise launch.WorkerError(str(error)) from error
        try:
            result = recorded(
                transport.rank,
                lambda emit: hosted(transport.rank, transport, emit, config, str(folder), keep),
            )
        except Exception as error:  # no farewell: the others wait in an exchange, not in a barrier
            text = str(error) if isinstance(error, gossip.PeerError) else traceback.format_exc()
            raise launch.WorkerError(f"rank {transport.rank} failed:\n{text}") from error
        gossip.disconnect()
        return result
    if config["launch"]["kind"] == "here":
        return recorded(0, lambda emit: train(config, setup, emit, folder=folder, keep=keep))

    def started(emit: Callable[[Any], None]) -> Any:
        faults, told = setup.faults, lambda worker: None
        if lively.live(config):
            gallery = lively.Gallery(config, setup, emit)
            faults, emit, told = faults or gossip.Faults(), gallery.receive, gallery.lost
        options = config["launch"]["timeout"], threads, folder, faults, told
        return launch.run_processes(hosted, (config, str(folder), keep), processes, emit, *options)[0]

    return recorded(0, started)


def tuned(config: dict[str, Any], setup: Setup, say: Callable[[str], object]) -> dict[str, Any]:
    """The config with the γ that "auto" stands for; of another one, a warning if gossip alone is unstable with it."""
    algorithm: Any = setup.algorithm
    gamma = config["algorithm"].get("gamma")
    if gamma == "auto":
        found = f"algorithm.gamma={algorithm.gamma:g}, found by the probe"
        log.info("%s", found)
        say(found)
        return config | {"algorithm": config["algorithm"] | {"gamma": algorithm.gamma}}
    both = {"gamma", "compressor"} <= config["algorithm"].keys()
    compresses = both and not isinstance(algorithm.compressor, gossip.Identity)
    if compresses and gossip.drifts(algorithm, setup.schedule, len(setup.task.initial())):
        given = f"{gamma:g}" if gamma is not None else f"null, {algorithm.step:g} from the compressor,"
        warning = (
            f"warning: algorithm.gamma={given} is beyond the stability limit of gossip alone with {algorithm.compressor} "
            "on this graph, so the models may drift apart: lower it, or let algorithm.gamma=auto find one"
        )
        log.warning("%s", warning)
        say(warning)
    return config


def _begun(config: dict[str, Any], setup: Setup, folder: Path, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """What the run that is resumed has on record up to its checkpoint, so that the new record is a whole one."""
    before = Path(config["resume"])
    if config["resume_average"] and before == folder.resolve():
        raise ValueError(
            f"resume_average=true in the folder of the run itself, {before}: its record would hold two runs; leave out "
            "hydra.run.dir, and the new run gets a folder of its own"
        )
    round = resumable(config, setup)
    if not (before / records.RUN).exists():
        return []
    record = records.read(before)
    _refuse_other_options(record, config, say)
    return [row for row in record.rows if row["round"] <= round]


def _refuse_other_options(record: records.Run, config: dict[str, Any], say: Callable[[str], object]) -> None:
    """The optimizer's options come with its state from the checkpoint; whatever else is given anew is told."""
    free = {"rounds", "evaluate_every", "launch", "device", *(["n"] if config["resume_average"] else [])}
    differ = {
        key: f"{key}={there} there and {here} here"
        for key, (there, here) in records.differences(record.config, config).items()
        if free.isdisjoint(key.split("."))
    }
    kept = [text for key, text in differ.items() if {"optimizer", "scheduler"} & set(key.split("."))]
    if kept:
        raise ValueError(
            f"resume={config['resume']} with {', '.join(kept)}: the optimizer goes on as it was saved, so give the same options, "
            "or start a run of its own"
        )
    if differ:
        warning = f"warning: the run is resumed with other settings than it had: {', '.join(differ.values())}"
        log.warning("%s", warning)
        say(warning)


def _recorded(
    config: dict[str, Any],
    setup: Setup,
    folder: Path,
    progress: str,
    say: Callable[[str], object],
    begun: list[dict[str, Any]],
    choices: dict[str, str],
    rank: int,
    go: Any,
) -> Any:
    """Run with record, tracker and progress bar at rank 0; `begun` are the rows of the run that is resumed."""
    if rank != 0:
        return go(lambda row: None)
    report = getattr(setup.task, "report", None)
    if report is not None:
        log.info("%s", report())
        say(report())
    topology = setup.topology if hasattr(setup.topology, "edge_index") else None
    header = records.header(config, topology, choices=choices)
    planned = config["rounds"]
    resume = config["resume"] is not None
    quiet = not config["progress"] or (bool(progress) and not sys.stderr.isatty())  # a sweep's log needs no inner bars
    with (
        records.Writer(folder, header, planned, resume=resume) as writer,
        tracking.tracker(config["track"], config, folder) as tracker,
        tqdm(total=planned, desc=progress or "rounds", unit="round", leave=not progress, disable=quiet) as bar,
    ):
        sweep.point(folder)  # not before: resume=runs/latest means the run before this one
        events: list[str] = []
        wrong: list[str] = []
        diverged = Divergence()

        def emit(row: dict[str, Any]) -> None:
            if "event" in row:
                events.append(row["event"])
                log.info("%s", row["event"])
                return
            writer.log(row)
            tracker.log(row)
            if (reason := diverged(row)) is not None:
                wrong.append(reason)
            bar.update(int(row["round"]) - bar.n)
            shown = {k.split("/")[-1]: v for k, v in row.items() if k.startswith("eval/average/")}
            bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()})

        for row in begun:
            emit(row)
        try:
            result = go(emit)
        except (gossip.NotFinite, launch.WorkerError) as error:  # a compressor refuses what is not finite
            refused = re.search(r"(?:NotFinite: |^)(row .* NaN or an infinity[^:]*)", str(error))
            if refused is None:
                raise
            result, wrong = None, [refused[1]]
        last = writer.last
        if wrong:
            reason = f"diverged: {wrong[0]}; lower optimizer.lr"
            writer.finish("diverged", reason + (" or algorithm.gamma" if "gamma" in config["algorithm"] else ""))
        elif events:
            writer.finish("done", "; ".join(events))
    say(_summary(last, folder))
    return result


def _summary(row: dict[str, Any], folder: Path) -> str:
    lines = [f"round {row['round']}, {row['megabytes']:.4g} MB sent per worker, {row['seconds']:.3g} s of training"]
    lines[0] += f", {row['simulated']:.4g} simulated seconds" if "simulated" in row else ""
    shown = {name: value for name, value in row.items() if "/" in name}
    width = max(map(len, shown), default=0)
    lines += [f"  {name:>{width}} {value:.6g}" for name, value in shown.items()]
    status = records.read(folder).status
    reason = [status["reason"]] if status["reason"] else []
    return "\n".join([*lines, *reason, f"record: {folder}"])


def message(error: BaseException) -> str:
    """The paragraph that the user needs: of an instantiation, the cause and the config key."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no default here: give {error.full_key}=…"
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = str(error).rpartition("full_key: ")[2].strip()
        return f"{error.__cause__}" + (f" (config key: {key})" if key and key != str(error) else "")
    return str(error)


def _main(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    swept = hydra_config.mode == RunMode.MULTIRUN
    rank = int(os.environ["RANK"]) if launch.under_torchrun() else 0
    if hydra_config.job.chdir:
        os.chdir(hydra_config.runtime.cwd)  # paths are those of the command, and what is written goes to `folder`
    if swept and (foreign := schema.trim(cfg, CONF)):
        log.info("%s: options of other choices of the sweep, not used here", ", ".join(foreign))
    try:
        try:
            config = schema.resolved(cfg)
            files = hydra_config.runtime.choices.items()
            choices = {group: file for group, file in files if file is not None and not group.startswith("hydra/")}
            if swept:
                begun = (folder / records.METRICS).exists()
                job = _repeated(config, folder) if begun else config
                if job is None:
                    return
                run(job, folder, progress=" ".join(hydra_config.overrides.task), choices=choices)
            else:
                run(config, folder, say=partial(print, flush=True), choices=choices)
        finally:
            if not swept and rank == 0:  # one that never began, too
                sweep.point(folder)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        expected = isinstance(cause, (ValueError, FileNotFoundError, MissingMandatoryValue, launch.WorkerError))
        if rank == 0:
            log.error("%s", traceback.format_exc())
            reason = message(error) if expected else f"{traceback.format_exc()}\n{message(error)}"
            _record_failure(folder, cfg.get("rounds"), cause, reason)
        if swept:  # the sweep goes on, and tells at its end
            return
        if not expected and not isinstance(error, (InstantiationException, OmegaConfBaseException)):
            raise
        # Under torchrun all ranks refuse wrong input alike, so that one of them speaks for all.
        if rank == 0 or isinstance(error, launch.WorkerError):
            where = "" if expected else f" (traceback: {folder / 'log.txt'})"
            print(f"error: {message(error)}{where}", file=sys.stderr, flush=True)
        else:
            time.sleep(20.0)  # torchrun ends all ranks as soon as one has left: rank 0 first, when it has spoken
        if launch.under_torchrun():
            os._exit(1)  # gloo's threads may wait for peers that are gone
        sys.exit(1)


def _repeated(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """How a job goes on whose sweep was begun before: None if it has its result, else from its checkpoint or anew.

    A folder that holds the run of another config ends the sweep, which would leave jobs without a record.
    """
    record = records.read(folder)
    asked = config
    if config["algorithm"].get("gamma") == "auto":
        found = record.config.get("algorithm", {}).get("gamma")
        asked = config | {"algorithm": config["algorithm"] | {"gamma": found}}
    if differ := records.differences(record.config, asked):
        key, (there, here) = next(iter(differ.items()))
        sys.exit(
            f"error: {folder} holds a run with {key}={there}, and this job has {key}={here}: give the sweep a folder of its own "
            "(hydra.sweep.dir), and each of its jobs one in there (hydra.sweep.subdir)"
        )
    if record.status["status"] in records.RESULTS:
        return None
    if (folder / CHECKPOINT).exists() and record.status["done"] < config["rounds"]:
        return config | {"resume": str(folder)}
    os.replace(folder / records.METRICS, folder / f"cut.{records.METRICS}")
    return config


def _record_failure(folder: Path, planned: int | None, cause: BaseException, reason: str) -> None:
    """run.json of a run that never began; one that has begun keeps its own, and a former run in this folder too."""
    if not (folder / records.METRICS).exists():
        status = "incompatible" if isinstance(cause, gossip.Incompatible) else "failed"
        records.write_status(folder, {"status": status, "reason": reason, "planned": planned})


def cli() -> None:
    """`python -m experiments.train`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without ‖ ends no run
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # wherever it stands
    for override in (word for word in sys.argv[1:] if "=" in word):
        key, _, value = override.partition("=")
        if value == "null" and key in schema.GROUPS:
            sys.exit(f"error: {override}: a group takes the name of one of its files; --help lists them")
        top = re.split("[./@]", key.lstrip("+"))[0]
        near = schema.suggestion(top, schema.KEYS)
        inside = schema.inside(top, CONF)
        if top.isidentifier() and top not in (*schema.KEYS, "hydra") and (inside or "did you mean" in near):
            sys.exit(f"error: {override}: there is no key {top} in the config; {inside or near}")
    if launch.under_torchrun():
        if any(a in ("-m", "--multirun") for a in sys.argv[1:]):
            sys.exit(
                "error: --multirun under torchrun: every process would sweep on its own, with one process group for all runs; "
                "sweep without torchrun (launch=workers starts the processes of each run), or start torchrun once per run"
            )
        if os.environ["RANK"] != "0":  # only rank 0 makes Hydra's directory
            sys.argv += [
                "hydra.output_subdir=null",
                "hydra/job_logging=none",
                "hydra/hydra_logging=none",
                "hydra.run.dir=.",
            ]
    else:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(_main)()
    except KeyboardInterrupt as stop:
        code = 128 + (signal.SIGTERM if stop.args else signal.SIGINT)
        if sweep.Sweep.folder is not None:
            print(f"\n{sweep.summary(sweep.Sweep.folder)}", flush=True)
            said = f"the same command with hydra.sweep.dir={sweep.Sweep.folder} goes on"
            print(f"interrupted: {said}", file=sys.stderr, flush=True)
        elif not launch.under_torchrun() or os.environ["RANK"] == "0":
            print("\ninterrupted", file=sys.stderr, flush=True)
        if launch.under_torchrun():
            os._exit(code)
        sys.exit(code)


def _terminate(number: int, frame: Any) -> None:
    """The end that Slurm and others ask for is an interrupt: the record says so, the tracker and all processes end."""
    raise KeyboardInterrupt("ended by SIGTERM")


if __name__ == "__main__":
    cli()
