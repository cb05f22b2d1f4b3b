"""The command: one run, or a sweep with -m, from a Hydra config to a record on disk.

python -m experiments.train algorithm=choco compressor=topk topology=ring n=16 task=digits
python -m experiments.train -m algorithm=dpsgd,choco topology=ring,torus seed=0,1,2
torchrun --nproc-per-node 4 -m experiments.train launch=blocks n=16
"""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

import gossip
from experiments import launch, records, schema, tracking
from experiments.trainer import Setup, build, hosted, train

log = logging.getLogger(__name__)
OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)


def run(config: dict[str, Any], folder: Path, keep: bool = False, progress: str = "") -> torch.Tensor | None:
    """One run of a resolved config: checked here, hosted wherever `launch` says, recorded in `folder`.

    Returns the trajectory (evaluations, n, d) if `keep`.

    Raises:
        gossip.Incompatible: the algorithm refuses the schedule.
        ValueError: the config is wrong; the message names value, rule and remedy.
    """
    schema.check(config)
    processes = launch.world(config)
    torch.set_num_threads(launch.threads(config, 1 if config["launch"]["kind"] == "here" else processes))
    setup = build(config)
    if launch.under_torchrun():
        transport = gossip.connect(timeout=config["launch"]["timeout"])
        try:
            return _recorded(
                config,
                setup,
                folder,
                progress,
                transport.rank,
                lambda emit: hosted(transport.rank, transport, emit, config, str(folder), keep),
            )
        finally:
            gossip.disconnect()
    if config["launch"]["kind"] == "here":
        return _recorded(
            config, setup, folder, progress, 0, lambda emit: train(config, setup, emit, folder=folder, keep=keep)
        )
    return _recorded(
        config,
        setup,
        folder,
        progress,
        0,
        lambda emit: launch.run_processes(
            hosted,
            (config, str(folder), keep),
            processes,
            emit,
            config["launch"]["timeout"],
            launch.threads(config, processes),
            folder,
        )[0],
    )


def _recorded(config: dict[str, Any], setup: Setup, folder: Path, progress: str, rank: int, go: Any) -> Any:
    """Run with record, tracker and progress bar at rank 0."""
    if rank != 0:
        return go(lambda row: None)
    report = getattr(setup.task, "report", None)
    if report is not None:
        log.info("%s", report())
        if config["progress"] and not progress:
            print(report(), flush=True)
    header = records.header(config, setup.topology if hasattr(setup.topology, "edge_index") else None)
    planned = config["rounds"]
    resume = config["resume"] is not None
    with (
        records.Writer(folder, header, planned, resume=resume) as writer,
        tracking.tracker(config["track"], config, folder) as tracker,
        tqdm(
            total=planned, desc=progress or "rounds", unit="round", leave=not progress, disable=not config["progress"]
        ) as bar,
    ):

        def emit(row: dict[str, float]) -> None:
            writer.log(row)
            tracker.log(row)
            bar.update(int(row["round"]) - bar.n)
            shown = {k.split("/")[-1]: v for k, v in row.items() if k.startswith("eval/average/")}
            bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()})

        result = go(emit)
    if config["progress"] and not progress:
        print(_summary(writer.last, folder), flush=True)
    return result


def _summary(row: dict[str, Any], folder: Path) -> str:
    lines = [f"round {row['round']}, {row['megabytes']:.4g} MB sent per worker, {row['seconds']:.3g} s of training"]
    lines += [f"{name:>24} {value:.6g}" for name, value in row.items() if "/" in name]
    return "\n".join([*lines, f"record: {folder}"])


def message(error: BaseException) -> str:
    """The paragraph that the user needs: of an instantiation, the cause and the config key."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = str(error).rpartition("full_key: ")[2].strip()
        return f"{error.__cause__}" + (f" (config key: {key})" if key and key != str(error) else "")
    return str(error)


def _main(cfg: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    sweep = hydra_config.mode == RunMode.MULTIRUN
    try:
        config = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(config, dict)
        if not sweep and int(os.environ.get("RANK", 0)) == 0:
            _point(folder)
        run(config, folder, progress=" ".join(hydra_config.overrides.task) if sweep else "")
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        incompatible = isinstance(cause, gossip.Incompatible)
        status = records.read(folder).status if (folder / records.RUN).exists() else {}
        if status.get("status") != "failed":
            status = {
                "status": "incompatible" if incompatible else "failed",
                "reason": message(error) if isinstance(cause, ValueError) else traceback.format_exc(),
                "planned": cfg.rounds,
            }
            records.write_status(folder, status)
        if incompatible and sweep:
            log.warning("incompatible: %s", message(error))
            return None
        log.error("%s", traceback.format_exc())
        if sweep or not isinstance(cause, (ValueError, FileNotFoundError, launch.WorkerError)):
            raise
        print(f"error: {message(error)}", file=sys.stderr)
        sys.exit(1)
    return None


def _point(folder: Path) -> None:
    """runs/latest → this run."""
    latest = folder.parents[1] / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.resolve())


def cli() -> None:
    """`python -m experiments.train`."""
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
    hydra.main(version_base="1.3", config_path=str(Path(__file__).parent / "conf"), config_name="train")(_main)()


if __name__ == "__main__":
    cli()
