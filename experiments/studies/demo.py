"""`make demo`: four tuned methods on two graphs as one Hydra sweep, one table, one figure, and one run in two placements.

python -m experiments.studies.demo [overrides of the sweep, for example seed=0 rounds=100]
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from experiments import schema, train
from experiments.studies import compared, sweep

TARGET = 0.9
CONF = Path(__file__).parents[1] / "conf"


def table(folder: Path) -> None:
    """The comparison table and the figure."""
    compared(
        "demo",
        folder,
        x=["megabytes", "round"],
        y=["eval/average/accuracy", "eval/mean/accuracy", "eval/worst/accuracy", "consensus/distance"],
        by=["recipe", "topology"],
        target=TARGET,
        plot="eval/average/accuracy",
    )
    print("± is the standard error over seeds. AllReduce uses no graph: its rows differ by nothing.\n")


def placements(overrides: list[str]) -> float:
    """D-PSGD in float64, all rows here and spread over four processes: the largest difference of any parameter."""
    trajectories = []
    with initialize_config_dir(str(CONF), version_base="1.3"), tempfile.TemporaryDirectory() as temporary:
        for launch in ("here", "blocks"):
            chosen = [
                "study=demo",
                "recipe=dpsgd",
                "dtype=float64",
                f"launch={launch}",
                *(["launch.processes=4"] if launch == "blocks" else []),
                "progress=false",
                *overrides,
            ]
            config = schema.resolved(compose("train", chosen))
            start = time.perf_counter()
            trajectories.append(train.run(config, Path(temporary, launch), keep=True))
            where = "one process" if launch == "here" else "four processes over torch.distributed"
            print(f"float64, {where}: {config['rounds']} rounds in {time.perf_counter() - start:.1f} s", flush=True)
    here, blocks = trajectories
    assert here is not None
    assert blocks is not None
    assert here.shape == blocks.shape
    assert bool(here.isfinite().all())
    return float((here - blocks).abs().max())


def main(overrides: list[str]) -> None:
    """Sweep, compare, and check the placements."""
    torch.set_num_threads(1)
    folder = sweep("demo", overrides)
    table(folder)
    gap = placements([o for o in overrides if o.startswith("rounds=")])
    print(f"largest difference between the two trajectories: {gap:.1e}")
    if not gap < 1e-10:
        sys.exit("error: the placements drifted apart by more than 1e-10, which they must not")


if __name__ == "__main__":
    main(sys.argv[1:])
