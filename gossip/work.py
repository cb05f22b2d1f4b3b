"""How long a local step takes: models of compute time, each a pure function of (seed, worker, number of its step)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from . import rng


class Work(Protocol):
    """Workers (m,) and the numbers of their steps (m,) to the seconds (m,) float64 that these steps take."""

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor: ...


def _at_least_zero(name: str, value: float, what: str = "it is in seconds") -> None:
    """Refuse what is no time."""
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ValueError(f"{name}={value!r} is not a finite number of at least 0: {what}")


@dataclass(frozen=True)
class Constant:
    """Every step takes the same time, or each worker its own.

    .. math:: T_i^t = s_i

    Args:
        seconds: of a step; a list holds one number per worker.

    >>> Constant((1.0, 3.0, 5.0, 7.0))(torch.tensor([3, 0]), torch.tensor([0, 9])).tolist()
    [7.0, 1.0]
    """

    seconds: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        for value in self.seconds if isinstance(self.seconds, Sequence) else (self.seconds,):
            _at_least_zero("seconds", value)

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor:
        if not isinstance(self.seconds, Sequence):
            return torch.full(workers.shape, float(self.seconds), dtype=torch.float64)
        return _column(self._table, workers, "Constant has seconds of")

    @cached_property
    def _table(self) -> Tensor:
        return torch.tensor(list(self.seconds), dtype=torch.float64)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Exponential:
    """Independent exponential times, on top of a least time.

    .. math:: T_i^t = s_0 + (s − s_0) E_i^t, \\quad E_i^t ∼ \\mathrm{Exp}(1)

    The mean of the slowest of n is s₀ + (s − s₀)(1 + 1/2 + … + 1/n).

    Args:
        seconds: the mean s.
        least: the least s₀ ≤ s (a shifted exponential).
        seed: of the draws.

    >>> n, T = 16, Exponential(2.0)
    >>> draws = torch.stack([T(torch.arange(n), torch.full((n,), t)) for t in range(2000)])
    >>> bool(abs(draws.mean() - 2) < 0.05), bool(abs(draws.amax(1).mean() / 2 - sum(1 / k for k in range(1, 17))) < 0.1)
    (True, True)
    """

    seconds: float = 1.0
    least: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_zero("least", self.least)
        if not self.least <= self.seconds < math.inf:
            raise ValueError(
                f"seconds={self.seconds!r} is below least={self.least!r}, or not finite: it is the mean of a step's time, "
                "so give at least that"
            )

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor:
        u = rng.uniform(rng.key(self.seed, "work", workers, steps), 1)[:, 0]
        return u.neg_().log1p_().mul_(self.least - self.seconds).add_(self.least)


@dataclass(frozen=True)
class LogNormal:
    """Independent log-normal times: most steps alike, some several times longer.

    .. math:: T_i^t = s \\exp(σ Z_i^t − σ²/2), \\quad Z_i^t ∼ N(0, 1)

    Args:
        seconds: the mean s.
        sigma: spread σ of the logarithm; at 0.5 one step in a hundred takes 2.8 s.
        seed: of the draws.

    >>> T = LogNormal(3.0, sigma=0.5)(torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000))
    >>> bool(abs(T.mean() - 3) < 0.05), bool(abs(T.log().std() - 0.5) < 0.01), bool(abs(T.quantile(0.99) / 3 - 2.8) < 0.1)
    (True, True, True)
    """

    seconds: float = 1.0
    sigma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_zero("seconds", self.seconds)
        _at_least_zero("sigma", self.sigma, "it is the spread of the times' logarithm, such as 0.5")

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor:
        z = rng.normal(rng.key(self.seed, "work", workers, steps), 1)[:, 0]
        return z.mul_(self.sigma).sub_(self.sigma**2 / 2).exp_().mul_(self.seconds)


@dataclass(frozen=True)
class Slow:
    """Stragglers: some workers take a factor longer.

    .. math:: T_i^t = s \\, T_i'^t \\; (i ∈ S), \\quad T_i'^t \\; (i ∉ S)

    Args:
        work: the others' times T′.
        factor: how many times slower, s.
        workers: which ones, S.

    >>> Slow(Constant(2.0), factor=10, workers=(1,))(torch.arange(3), torch.zeros(3, dtype=torch.int64)).tolist()
    [2.0, 20.0, 2.0]
    """

    work: Work = Constant()
    factor: float = 10.0
    workers: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(
                f"factor={self.factor!r} is not a positive number: it says how many times slower, such as 10"
            )
        if any(w < 0 for w in self.workers):
            raise ValueError(f"workers={list(self.workers)} holds a negative number: workers are numbered 0 … n − 1")

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor:
        times = self.work(workers, steps)
        return torch.where(torch.isin(workers, self._slow), times * self.factor, times)

    @cached_property
    def _slow(self) -> Tensor:
        return torch.tensor(list(self.workers), dtype=torch.int64)


@dataclass(frozen=True)
class Trace:
    """Times recorded somewhere, from a file with a line per step and a column per worker; repeated when used up.

    .. math:: T_i^t = \\mathrm{table}[t \\bmod \\mathrm{lines}, i]

    Args:
        path: a text file (numbers separated by comma or space, # starts a comment), or a .npy of shape (lines, workers).
            A single column serves all workers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "steps.csv").write_text("# two workers\\n0.1, 0.2\\n0.3, 0.4\\n")
    ...     Trace(f"{folder}/steps.csv")(torch.tensor([1, 1, 0]), torch.tensor([0, 1, 2])).tolist()
    [0.2, 0.4, 0.1]
    """

    path: str | Path

    def __post_init__(self) -> None:
        self._table  # noqa: B018  a wrong file is told at once

    @cached_property
    def _table(self) -> Tensor:
        import numpy as np

        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"path={str(path)!r} is no file: a trace has a line per step and a column per worker")
        try:
            if path.suffix == ".npy":
                table = np.load(path)
            else:
                lines = [line.split("#")[0].replace(",", " ") for line in path.read_text(encoding="utf-8").splitlines()]
                table = np.array([[float(word) for word in line.split()] for line in lines if line.strip()])
            times = torch.from_numpy(np.asarray(table, dtype=np.float64))
        except ValueError as error:
            raise ValueError(
                f"{path.name} is no table of seconds ({error}): give equally many numbers in every line, a column per worker"
            ) from error
        times = times[:, None] if times.ndim == 1 else times
        if times.ndim != 2 or not times.numel() or not bool((times.isfinite() & (times >= 0)).all()):
            raise ValueError(
                f"{path.name} holds a table of shape {tuple(times.shape)} with a number below 0 or none at all: a trace holds "
                "seconds, a line per step and a column per worker"
            )
        return times

    def __call__(self, workers: Tensor, steps: Tensor) -> Tensor:
        table = self._table
        line = torch.as_tensor(steps).remainder(len(table))
        if table.shape[1] == 1:
            return table[line, 0].expand(workers.shape).clone()
        return _column(table.T, workers, f"{Path(self.path).name} has columns of", line)


def _column(table: Tensor, workers: Tensor, what: str, *index: Tensor) -> Tensor:
    if len(workers) and int(workers.max()) >= len(table):
        raise ValueError(
            f"{what} {len(table)} workers, and worker {int(workers.max())} takes a step: give one for each"
        )
    return table[(workers, *index)]
