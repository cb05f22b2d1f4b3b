"""Compressors: time in copies of the same tensor, bytes on the wire against the formulas, memory, and the README's table.

`python -m tests.benchmarks.compress` prints the table of README, section "Compressors".
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gossip
from experiments import models
from experiments.tasks.digits import digits
from experiments.tasks.fashion import fashion
from gossip import rng
from gossip.compress.entropy import entropy
from gossip.plan import Block

from .harness import Row, at_most, side_by_side

SIZES = (10**6, 10**7, 10**8)
EIGHT_BITS, FOUR_BITS = gossip.QSGD(levels=127), gossip.QSGD(levels=7)
HALF, FULL = gossip.Cast("float16"), gossip.Cast("bfloat16")
E4M3, E5M2 = gossip.Cast("float8_e4m3fn"), gossip.Cast("float8_e5m2")

COPIES = [  # copies of time that compressing and adding what arrived may take
    (gossip.Sign(), 4),
    (HALF, 4),
    (FULL, 4),
    (E4M3, 4),
    (E5M2, 4),
    (FOUR_BITS, 12),
    (EIGHT_BITS, 12),
]

WIRE: list[tuple[Any, Callable[[int], float], str]] = [  # bits of a message of d numbers in float32
    (gossip.TopK(0.01, indices="plain"), lambda d: 64 * round(0.01 * d), "(32 + 32) k"),
    (gossip.RandK(0.01), lambda d: 32 * round(0.01 * d) + 64, "32 k + 64"),
    (gossip.Sign(), lambda d: d + 32, "d + 32"),
    (gossip.OneBit(), lambda d: d + 64, "d + 64"),
    (FOUR_BITS, lambda d: (math.log2(7 + 1) + 1) * d + 32, "(log2(s + 1) + 1) d + 32"),
    (EIGHT_BITS, lambda d: (math.log2(127 + 1) + 1) * d + 32, "(log2(s + 1) + 1) d + 32"),
    (gossip.QSGD(7, bucket=512), lambda d: 4 * d + 32 * d / 512, "4 d + 32 d / 512"),
    (gossip.LInf(4), lambda d: 4 * d + 32, "b d + 32"),
    (gossip.TernGrad(), lambda d: math.log2(3) * d + 32, "log2(3) d + 32"),
    (gossip.Natural(), lambda d: 9 * d, "9 d"),
    (gossip.StochasticRounding(8), lambda d: 8 * d + 64, "k d + 64"),
    (gossip.Moniqua(bits=4), lambda d: 4 * d + 32, "k d + 32"),
    (HALF, lambda d: 16 * d + 32, "16 d + 32"),
    (E4M3, lambda d: 8 * d + 32, "8 d + 32"),
]

CODED = [gossip.TopK(0.01), FOUR_BITS, EIGHT_BITS, gossip.TernGrad(), gossip.Compose(gossip.TopK(0.01), FOUR_BITS)]

TABLE: list[tuple[str, Any]] = [
    ("TopK(0.01)", gossip.TopK(0.01)),
    ("RandK(0.01)", gossip.RandK(0.01)),
    ("Threshold()", gossip.Threshold()),
    ("BlockTopK(0.01)", gossip.BlockTopK(0.01)),
    ("Sign()", gossip.Sign()),
    ("OneBit()", gossip.OneBit()),
    ("QSGD(levels=7)", FOUR_BITS),
    ("QSGD(levels=7, bucket=512)", gossip.QSGD(7, bucket=512)),
    ("QSGD(levels=7, bucket=512, rescaled=True)", gossip.QSGD(7, bucket=512, rescaled=True)),
    ("QSGD(levels=127)", EIGHT_BITS),
    ("LInf(bits=4)", gossip.LInf(4)),
    ("TernGrad()", gossip.TernGrad()),
    ("Natural()", gossip.Natural()),
    ("StochasticRounding(bits=8)", gossip.StochasticRounding(8)),
    ('Cast("float16")', HALF),
    ('Cast("bfloat16")', FULL),
    ('Cast("float8_e4m3fn")', E4M3),
    ('Cast("float8_e5m2")', E5M2),
    ("Compose(TopK(0.01), Sign())", gossip.Compose(gossip.TopK(0.01), gossip.Sign())),
]


def keys(m: int = 1, seed: int = 0) -> Tensor:
    """One key a row."""
    return rng.key(seed, "benchmark", torch.arange(m))


def neighbour() -> Block:
    """One message, weighed 0.3, into one row."""
    return Block(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.3], dtype=torch.float64), (1, 1))


def there_and_back(compressor, x: Tensor, into: Tensor) -> Callable[[], None]:
    """Compress, and add what a neighbour would."""
    key, block = keys(), neighbour()
    return lambda: compressor(x, key).add_into(into, block)


def copies(compressor, d: int) -> float:
    """Processor time of compressing a row of d numbers and adding the message, in copies of the row; median of pairs."""
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(0))
    into, target = torch.zeros_like(x), torch.empty_like(x)
    work, ratios = there_and_back(compressor, x, into), []
    work()
    for _ in range(max(5, min(101, 10**8 // d))):
        start = time.thread_time()
        work()
        middle = time.thread_time()
        target.copy_(x)
        ratios.append((middle - start) / (time.thread_time() - middle))
    return median(ratios)


def rows_of(d: int) -> dict[str, Tensor]:
    """Rows (1, d) on which a search by a sampled threshold may fail."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, d, generator=g)
    return {
        "normal": x,
        "sorted": x.sort().values,
        "heavy-tailed": x**5,
        "99.5 % zeros": x * (torch.rand(1, d, generator=g) < 0.005),
        "zeros": torch.zeros(1, d),
        "of one magnitude": x.sign(),
    }


def against_topk(x: Tensor) -> float:
    """Time of exact top-k at 1 % against `torch.topk` of the magnitudes."""
    d = x.shape[1]
    ours, theirs = gossip.TopK(0.01), lambda: x.abs().topk(d // 100, dim=1, sorted=False)
    ratio, _, _ = side_by_side(lambda: ours(x), theirs, 3, 0.05)
    return 1 / ratio


def extra(name: str, d: int) -> float:
    """Memory that compressing and adding take, over the bound of 1.5 payloads and a boolean mask; in a fresh process."""
    code = f"from tests.benchmarks.compress import peak; print(peak({name!r}, {d}))"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def peak(name: str, d: int) -> float:
    """The same in this process."""
    import scipy.linalg.blas  # noqa: F401  (no part of a message, and Sign imports it at its first long row)

    torch.set_num_threads(1)
    compressor = dict(TABLE)[name]
    x, into = torch.randn(1, d), torch.zeros(1, d)
    there_and_back(compressor, x[:, :100_000].clone(), into[:, :100_000].clone())()
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the peak starts from here
    q = compressor(x, keys())
    q.add_into(into, neighbour())
    return (_resident("VmHWM") - before) / (1.5 * q.bits / 8 + d)


def _resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


def gradients() -> dict[str, Tensor]:
    """A stochastic gradient (1, d) of each task at its start, batch of 32."""
    tasks = {"digits MLP": digits(1, model=models.mlp), "Fashion-MNIST CNN": fashion(1, model=models.cnn)}
    return {
        name: task.gradient(task.initial()[None].clone(), torch.tensor([0]), 0)[0].clone()
        for name, task in tasks.items()
    }


def error(compressor, g: Tensor, draws: int = 10) -> float:
    """E‖C(g) − g‖² / ‖g‖²."""
    found = [(compressor(g, keys(1, s)).dense() - g).double().square().sum() for s in range(draws)]
    return float(torch.stack(found).mean() / g.double().square().sum())


def constant(compressor, d: int) -> str:
    """δ of a contraction, ω of what is unbiased."""
    if not getattr(compressor, "rescaled", False) and getattr(compressor, "unbiased", True):
        try:
            return f"ω = {compressor.omega(d):.3g}"
        except AttributeError:  # it has none, or is made of something that has none
            pass
    delta = compressor.delta(d)
    return f"δ = {delta:.3g}" if delta < 0.99 else f"δ = 1 − {1 - delta:.2g}"


def markdown(d: int = 10**7) -> Iterator[str]:
    """The README's table, line by line."""
    torch.set_num_threads(1)
    found = gradients()
    size = found["digits MLP"].shape[1]
    yield f"| compressor | δ or ω, d = {size:,} | bits per number | error, digits | error, Fashion-MNIST | copies of time |"
    yield "|---|---|---:|---:|---:|---:|"
    for name, compressor in TABLE:
        errors = [f"{error(compressor, g):.2g}" for g in found.values()]
        bits = compressor(torch.randn(1, d, generator=torch.Generator().manual_seed(0)), keys()).bits / d
        spent = copies(compressor, d)
        yield f"| `{name}` | {constant(compressor, size)} | {bits:.3g} | {' | '.join(errors)} | {spent:.1f} |"


def rows() -> Iterator[Row]:
    """The compressors' part of the table."""
    torch.set_num_threads(1)
    for d in SIZES:
        for compressor, goal in COPIES:
            yield at_most(f"{_short(compressor)}, there and back, d={d:.0e}", "copy", copies(compressor, d), goal)
        yield at_most(f"RandK 1 %, there and back, d={d:.0e}", "copy", copies(gossip.RandK(0.01), d), 3)
        if d <= 10**7:
            share = 1 / 6 if d == 10**7 else 1 / 4
            for name, x in rows_of(d).items():
                yield at_most(
                    f"TopK 1 % of a row that is {name}, d={d:.0e}", "torch.topk of |x|", against_topk(x), share
                )
        yield at_most(f"TopK 1 %, there and back, d={d:.0e}", "copy", copies(gossip.TopK(0.01), d), 8)
    d = 10**6
    x = torch.randn(1, d)
    for compressor, formula, text in WIRE:
        share = compressor(x, keys()).bits / formula(d)
        yield at_most(f"bits of {_short(compressor)}", text, share, 1.01)
    for compressor in CODED:
        coded = gossip.RangeCoded(compressor)(x, keys()).bits / entropy(compressor(x, keys()))
        yield at_most(f"bits of RangeCoded({_short(compressor)}), d={d:.0e}", "its empirical entropy", coded, 1.05)
    for name, _ in TABLE:
        yield at_most(f"memory of {name} at d=1e7", "1.5 payloads and a mask", extra(name, 10**7), 1)


def _short(compressor) -> str:
    text = str(compressor)
    for default in (", bucket=None", ", bucket=81920", ", rescaled=False", ", indices='auto'"):
        text = text.replace(default, "")
    return text.replace("norm='l2'", "l2")


if __name__ == "__main__":
    for line in markdown():
        print(line, flush=True)
