"""Which model is "the model"? The average, the mean, the worst and the best of the workers are four numbers, four keys.

Under heterogeneous data they differ by tens of percent, so every evaluation reports all of them, with the consensus
distance and every x-axis, in one row. Pure functions of per-row metrics, whoever hosts the rows.

| key | is |
|---|---|
| `eval/average/<name>` | the metric of the average model x̄ = (1/n) Σ xᵢ |
| `eval/mean/<name>` | the mean over workers of their own models' metric |
| `eval/worst/<name>` | the worst worker's: the lowest accuracy (or `GROWING`), the highest of anything else |
| `eval/best/<name>` | the best worker's |
| `consensus/distance` | (1/n) Σ ‖xᵢ − x̄‖² |
| `train/loss` | mean over workers of the last batch loss |
| `workers` | how many are left, in a run with faults or under the live clock |
| `live/…` | what the live clock's exchanges took, mean over workers, and each worker's share of all steps; in the last row |
| `staleness/mean`, `staleness/worst` | gradients that others applied while one was computed (clock=asynchronous) |
| `idle/mean`, `idle/worst` | the share of the simulated seconds for which a worker computes nothing |
| `round`, `epoch`, `samples`, `bits`, `megabytes`, `seconds`, `simulated` | x-axes; work and traffic are means per worker |
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GROWING = ("accuracy", "acc", "auc", "f1", "precision", "recall", "r2")
AXES = ("round", "epoch", "samples", "bits", "megabytes", "seconds", "simulated")


def higher_is_better(name: str) -> bool:
    """Accuracies and their like grow as models improve; every other metric (loss, error, distance) shrinks.

    >>> higher_is_better("eval/worst/accuracy"), higher_is_better("test_auc"), higher_is_better("loss")
    (True, True, False)
    """
    return name.rsplit("/", 1)[-1].lower().endswith(GROWING)


def squared_distances(x: Tensor, center: Tensor, chunk: int = 64) -> Tensor:
    """(m, d) rows and (d,) -> (m,) float64 ‖xᵢ − center‖²; their mean over all workers is the consensus distance.

    >>> squared_distances(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1.0, 0.0])).tolist()
    [4.0, 4.0]
    """
    pieces = [(part.double() - center.double()).square().sum(1) for part in x.split(chunk)]
    return torch.cat(pieces) if pieces else x.new_zeros(0, dtype=torch.float64)


def summary(workers: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> dict[str, float]:
    """Per-worker metrics {name: (n,)} and those of the average model {name: (1,)} -> the `eval/…` keys. NaN is the
    worst there is.

    >>> accuracy, loss = torch.tensor([0.5, 0.75]), torch.tensor([1.0, 2.0])
    >>> row = summary({"accuracy": accuracy, "loss": loss}, {"accuracy": torch.tensor([0.875])})
    >>> row["eval/average/accuracy"], row["eval/mean/accuracy"], row["eval/worst/accuracy"], row["eval/worst/loss"]
    (0.875, 0.625, 0.5, 2.0)
    """
    row = {f"eval/average/{name}": float(value.reshape(())) for name, value in averaged.items()}
    for name, values in workers.items():
        values = values.double()
        sign = 1.0 if higher_is_better(name) else -1.0
        score = (sign * values).nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        row[f"eval/mean/{name}"] = float(values.mean())
        row[f"eval/worst/{name}"] = float(values[score.argmin()]) if not values.isnan().any() else float("nan")
        row[f"eval/best/{name}"] = float(values[score.argmax()])
    return row


def axes(
    task: Any,
    round: float,
    steps: float,
    bits: float,
    seconds: float,
    n: int = 1,
    simulated: float | None = None,
) -> dict[str, float]:
    """Every x-axis of one evaluation.

    Args:
        task: samples and epochs follow from its `batch_size`, of a step, and its `size`, of all workers' data, where it has them.
        round: rounds done.
        steps: local steps done, mean over workers.
        bits: bits sent so far, mean over workers; a megabyte is 8·10⁶ of them.
        seconds: wall time of training, without evaluation.
        n: workers.
        simulated: seconds that it would have taken by `cost`, until the last worker is through.

    >>> from types import SimpleNamespace
    >>> axes(SimpleNamespace(batch_size=32, size=1280), 10, steps=20, bits=16e6, seconds=1.5, n=4)
    {'round': 10, 'bits': 16000000.0, 'megabytes': 2.0, 'seconds': 1.5, 'samples': 640, 'epoch': 2.0}
    """
    row: dict[str, float] = {"round": round, "bits": bits, "megabytes": bits / 8e6, "seconds": seconds}
    batch, size = getattr(task, "batch_size", None), getattr(task, "size", None)
    if batch is not None:
        row["samples"] = steps * batch
        if size:
            row["epoch"] = steps * batch * n / size
    if simulated is not None:
        row["simulated"] = simulated
    return row


def idleness(idle: Tensor, seconds: float) -> dict[str, float]:
    """(n,) seconds for which each worker has computed nothing, of so many -> the `idle/…` keys; none at the start.

    >>> idleness(torch.tensor([1.0, 3.0]), seconds=4.0)
    {'idle/mean': 0.5, 'idle/worst': 0.75}
    """
    if not seconds:
        return {}
    return {"idle/mean": float(idle.mean()) / seconds, "idle/worst": float(idle.max()) / seconds}


def staleness(counts: Mapping[int, int]) -> dict[str, float]:
    """How stale gradients were -> how often: the `staleness/…` keys; none before the first.

    >>> staleness({0: 1, 2: 3})
    {'staleness/mean': 1.5, 'staleness/worst': 2.0}
    """
    if not counts:
        return {}
    total = sum(counts.values())
    return {
        "staleness/mean": sum(stale * often for stale, often in counts.items()) / total,
        "staleness/worst": float(max(counts)),
    }


def evaluation(
    workers: Mapping[str, Tensor], averaged: Mapping[str, Tensor], squared: Tensor, losses: Tensor | None = None
) -> dict[str, float]:
    """One row without its axes: `summary`, `consensus/distance` from all workers' ‖xᵢ − x̄‖², and `train/loss` from
    their last losses."""
    row = summary(workers, averaged) | {"consensus/distance": float(squared.double().mean())}
    if losses is not None:
        row["train/loss"] = float(losses.double().mean())
    return row


def measured(task: Any, net: Any, x: Tensor, losses: Tensor) -> dict[str, float]:
    """`evaluation` of all workers' models, of which the rows x (m, d) are here; every process must call it."""
    average = net.mean(x.double())  # in float32 the mean of equal rows is not one of them
    squared = squared_distances(x, average[0])
    average = average.to(x.dtype)
    own = {name: net.gather(values) for name, values in task.evaluate(x).items()}
    return evaluation(own, task.evaluate(average), net.gather(squared), net.gather(losses))
