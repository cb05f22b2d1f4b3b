"""What a quantiser has to know of rows before it can round them: norms, tile by tile, of rows of any magnitude."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .payload import refuse_non_finite
from .tiles import TILE, Room, buckets, height, is_long, reused, tiles, width


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of a dtype are computed with: half precision in float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def reach(dtype: torch.dtype) -> float:
    """Numbers between its inverse and itself can be squared and inverted."""
    return 2.0**60 if working(dtype) == torch.float32 else 2.0**500


def norms(x: Tensor, p: float, bucket: int | None = None) -> Tensor:
    """(m, d) to (m, buckets) float64: the p-norm of each, p in 1, 2, ∞; summed up in the rows' own precision, tile by tile."""
    m, d = x.shape
    kind, many = working(x.dtype), buckets(d, bucket)
    if is_long(d) and many == 1:
        (room,) = reused(Room, TILE, x.device, kind)(TILE)
        return torch.stack([_norm(row, p, room) for row in x])[:, None]
    found = torch.zeros(m, many, dtype=torch.float64, device=x.device)
    room = reused(Room, height(m, d) * width(m, d), x.device, kind)
    for tile in tiles(m, d, bucket):
        part, into = tile.of(x), found[tile.rows, tile.first : tile.last]
        if p == 1 or x.dtype != kind:
            (scratch,) = room(*part.shape)
            part = torch.abs(part, out=scratch) if x.dtype == kind else scratch.copy_(part).abs_()
        if p == 1:
            into.add_(part.sum(-1).view(into.shape))
        elif p == 2:
            into.add_(torch.linalg.vector_norm(part, 2, dim=-1).double().square_().view(into.shape))
        else:
            size = torch.maximum(part.amax(-1), part.amin(-1).neg_()).double().abs_()
            torch.maximum(into, size.view(into.shape), out=into)
    return found.sqrt_() if p == 2 else found


def magnitudes(part: Tensor, start: int | None) -> Any:
    """(r, n) to (r, 1), on a CPU an array: the 1-norm of each.

    BLAS reads a part of a long row, which begins at `start`, once, and writes nothing. It adds up in an order that depends
    on the alignment in memory, so that is made the same for every row.
    """
    if start is None or part.device.type != "cpu":
        found = part.abs().sum(1, keepdim=True)
        return found if found.device.type != "cpu" else found.numpy()
    array, begin = part.numpy()[0], start * part.itemsize
    if (part.data_ptr() - begin) % 64:
        (room,) = reused(Room, TILE + 16, part.device, part.dtype)(TILE + 16)
        aligned = room.numpy()[begin % 64 // part.itemsize :][: array.size]
        np.copyto(aligned, array)
        array = aligned
    return _asum(part.dtype)(array)


@cache
def _asum(dtype: torch.dtype) -> Callable[[np.ndarray], float]:
    from scipy.linalg import blas  # up to 10⁵ numbers in one thread

    return getattr(blas, "sasum" if dtype == torch.float32 else "dasum")


def _norm(row: Tensor, p: float, room: Tensor) -> Tensor:
    """The same of one long row, with few calls."""
    sizes = []
    for part in row.split(TILE):
        if p == 1 or part.dtype != room.dtype:
            scratch = room[: len(part)]
            part = torch.abs(part, out=scratch) if part.dtype == room.dtype else scratch.copy_(part).abs_()
        if p == torch.inf:
            sizes.append(torch.maximum(part.amax(), part.amin().neg_()))
        else:
            sizes.append(part.sum() if p == 1 else torch.dot(part, part))
    total = torch.stack(sizes).double()
    return total.amax().abs() if p == torch.inf else total.sum() if p == 1 else total.sum().sqrt()


def measured(x: Tensor, measure: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows, `measure` of them (m, buckets), and exponents e (m,) if some rows had to be multiplied by 2^−e.

    Squares of 1e-30 vanish and those of 1e30 overflow in float32; a power of two takes a row out of that exactly.

    Raises:
        NotFinite: a row holds inf or nan, which is seen at its measure, without another pass.
    """
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    size, far = measure(x), reach(x.dtype)
    if size.numel():
        least, most = size.abs().aminmax()
        if far**-0.5 <= float(least) and float(most) <= far:
            return x, size, None
    top = size.abs().amax(1)
    odd = ~((top >= far**-0.5) & (top <= far))
    lift = None
    if x.shape[1] and odd.any():
        rows = odd.nonzero()[:, 0]
        peak = x[rows].abs().amax(1).double()
        finite = torch.ones(len(x), dtype=torch.bool, device=x.device)
        finite[rows] = peak.isfinite()
        refuse_non_finite(finite)
        if peak.any():
            lift = torch.zeros(len(x), dtype=torch.int32, device=x.device)
            lift[rows] = torch.frexp(peak).exponent
            x = ldexp(x, -lift[:, None])
            size = measure(x)
    return x, size, lift


def returned(scale: Tensor, lift: Tensor | None) -> Tensor:
    """scale · 2^lift: a scale of the rows that `measured` had multiplied by 2^−lift, for the rows as they were."""
    return scale if lift is None else ldexp(scale, lift[:, None])


def ldexp(x: Tensor, e: Tensor) -> Tensor:
    """x · 2^e in two steps, neither of which overflows before the result does."""
    half = e // 2
    kind = working(x.dtype)
    return (x * torch.exp2(half.to(kind)) * torch.exp2((e - half).to(kind))).to(x.dtype)


def refuse_infinite(payload: Any) -> Any:
    """The payload, unless a number so near the end of its dtype was rounded to infinity; decodes it, so for large rows only."""
    if not payload.dense().isfinite().all():
        most = torch.finfo(payload.dtype).max
        raise ValueError(
            f"a row holds a number so near {most:.4g}, the end of {payload.dtype}, that it would be rounded to infinity: scale "
            "the rows down"
        )
    return payload


def bounded(payload: Any, size: Tensor, lift: Tensor | None) -> Any:
    """The same, for rows that `measured` has measured: looks at those that may be too large."""
    large = payload.dtype == torch.float16 and bool((size.abs() > torch.finfo(torch.float16).max / 4).any())
    return refuse_infinite(payload) if large or lift is not None else payload
