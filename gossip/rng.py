"""Counter-based randomness: a draw depends on (seed, stream, counters) alone, never on the process or device that asks.

A key is one int64; `key` derives it by hashing, so that streams never meet by arithmetic accident (``seed + rank``
schemes collide: seed 0 at rank 1 is seed 1 at rank 0). The generator is SplitMix64 with MurmurHash3's finaliser
(Steele, Lea and Flood 2014), in wrap-around int64 arithmetic that every torch device has.
"""

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_ODD = 0x0001000100010001
_SHIFT = np.uint64(33)
_M1, _M2 = -49064778989728563, -4265267296055464877  # MurmurHash3's fmix64 multipliers, as int64


def key(seed: int, stream: str, *counters: int | Tensor) -> Tensor:
    """One int64 key per counter value, for the named stream of a seed.

    Args:
        seed: the run's seed.
        stream: what the numbers are for ("data", "compressor", …); streams are independent.
        counters: any number of ints or int64 tensors (broadcast together), for example the round and the workers.

    >>> key(0, "data", torch.arange(3)).unique().numel()
    3
    >>> bool(key(0, "data", 1) == key(1, "data", 0))
    False
    """
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    z = torch.tensor(int.from_bytes(digest, "little", signed=True))
    for c in counters:
        z = _finish(z + torch.as_tensor(c, dtype=torch.int64) * _GOLDEN)
    return z


def uniform(key: Tensor, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(m,) keys to (m, d) numbers in [0, 1), with as many random bits as `dtype` can hold.

    >>> u = uniform(key(0, "doc", torch.arange(2)), 100_000)
    >>> bool(((u.mean(1) - 0.5).abs() < 5e-3).all()), bool(u.min() >= 0), bool(u.max() < 1)
    (True, True, True)
    """
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return _shift(_stream(key, d), 64 - bits).to(dtype).mul_(2.0**-bits)


class Bits:
    """Keyed dither: odd 16-bit integers, 2^15 of them, uniform and symmetric about 0; cheap, and a tile at a time.

    The 64-bit words of `uniform`, each cut into four numbers: a tenth of its price, and the same numbers on every device.

    Args:
        key: (m,) int64.
        most: the largest count per call.
        rows: the largest number of rows per call; all if None.

    >>> w = Bits(key(0, "doc", torch.arange(2)), 50_000)(slice(0, 2), 0, 50_000)
    >>> w.dtype, bool(w.double().mean(1).abs().max() < 300), int(w.min()) < -32760, int(w.max()) > 32760
    (torch.int16, True, True, True)
    """

    def __init__(self, key: Tensor, most: int, rows: int | None = None) -> None:
        words = -(-most // 4)
        self._base = _finish(key)[:, None]
        self._ramp = _ramp(words, key.device)
        size = (len(key) if rows is None else rows) * words
        self._room = [torch.empty(size, dtype=torch.int64, device=key.device) for _ in range(2)]
        if key.device.type == "cpu":
            self._arrays = [part.numpy().view(np.uint64) for part in (*self._room, self._ramp, self._base)]

    def __call__(self, rows: slice, start: int, count: int) -> Tensor:
        """(r, count) int16, numbers `start` (a multiple of 4) and on of the rows' streams; overwritten by the next call."""
        r, words = rows.stop - rows.start, -(-count // 4)
        z = self._room[0][: r * words].view(r, words)
        offset = start // 4 * _GOLDEN % 2**64
        if z.device.type == "cpu":
            u, v, ramp, base = self._arrays
            u, v = u[: r * words].reshape(r, words), v[: r * words].reshape(r, words)
            _dither(u, v, ramp[:words], base[rows] + np.uint64(offset))
        else:
            signed = torch.tensor(offset - 2**64 if offset >= 2**63 else offset, device=z.device)
            z.copy_(_finish(self._ramp[:words] + (self._base[rows] + signed)) | _ODD)
        return z.view(torch.int16)[:, :count]


@lru_cache(maxsize=4)
def _ramp(words: int, device: torch.device) -> Tensor:
    return torch.arange(1, words + 1, device=device) * _GOLDEN


def _dither(z: np.ndarray, t: np.ndarray, ramp: np.ndarray, base: np.ndarray) -> None:
    """`_finish` in numpy, whose unsigned shifts need no mask: a third of the time, half of it saved calls."""
    np.add(ramp, base, out=z)
    for factor in (_M1, _M2, None):
        np.bitwise_xor(z, np.right_shift(z, _SHIFT, out=t), out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor % 2**64), out=z)
    np.bitwise_or(z, np.uint64(_ODD), out=z)


def integers(key: Tensor, d: int, high: int | Tensor) -> Tensor:
    """(m,) keys to (m, d) int64 numbers in [0, high), `high` below 2**53, an int or one per row.

    >>> integers(key(0, "doc", torch.arange(4)), 1000, 7).unique().tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    high = torch.as_tensor(high, device=key.device)
    return (uniform(key, d) * (high[:, None] if high.ndim else high)).long()


def normal(key: Tensor, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(m,) keys to (m, d) standard normal numbers, by Box and Muller.

    >>> z = normal(key(0, "doc", torch.arange(1)), 100_000)
    >>> bool(abs(z.mean()) < 0.02), bool(abs(z.var() - 1) < 0.03)
    (True, True)
    """
    u = uniform(key, 2 * d)
    radius = (-2 * torch.log1p(-u[:, :d])).sqrt_()
    return (radius * (2 * math.pi * u[:, d:]).cos_()).to(dtype)


def sample(key: Tensor, d: int, k: int) -> Tensor:
    """(m,) keys to (m, k) distinct int64 indices below d, every such set equally likely.

    A permutation of all d costs far more than the k that are wanted, so above 4,096 they are the first k different ones
    of a stream of draws (NumPy's Philox, whose words are the same in every version), in ascending order.

    >>> i = sample(key(0, "doc", torch.arange(2)), 100_000, 1000)
    >>> i.shape, [len(set(row)) for row in i.tolist()], int(i.max()) < 100_000
    (torch.Size([2, 1000]), [1000, 1000], True)
    """
    if d <= 4096:
        return uniform(key, d).topk(k, dim=1).indices
    rows = [torch.from_numpy(_distinct(one, d, k)) for one in key.tolist()]
    return torch.stack(rows).to(key.device) if rows else key.new_empty((0, k))


def _distinct(key: int, d: int, k: int) -> np.ndarray:
    """The first k different ones of a stream of draws below d, ascending; of more than d/2, what fewer leave over."""
    if 2 * k > d:
        keep = np.ones(d, bool)
        keep[_distinct(key, d, d - k)] = False
        return np.flatnonzero(keep)
    words = np.random.Philox(key=key % 2**64)

    def draw(count: int) -> np.ndarray:
        return ((words.random_raw(count) >> np.uint64(11)) * (2.0**-53 * d)).astype(np.int32 if d < 2**31 else np.int64)

    if 16 * k > d:
        found = np.zeros(d, bool)
        while missing := k - int(np.count_nonzero(found)):
            found[draw(missing)] = True
        return np.flatnonzero(found)
    index = np.sort(draw(k))
    while missing := k - len(index := index[np.diff(index, prepend=-1) > 0]):
        index = np.sort(np.concatenate((index, draw(missing))))
    return index.astype(np.int64)


def _stream(key: Tensor, d: int) -> Tensor:
    counter = torch.arange(1, d + 1, device=key.device) * _GOLDEN
    return _finish(_finish(key)[:, None] + counter)


def _shift(z: Tensor, k: int) -> Tensor:
    """Logical right shift: torch's `>>` copies the sign bit."""
    return (z >> k) & ((1 << (64 - k)) - 1)


def _finish(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 33)) * _M1
    z = (z ^ _shift(z, 33)) * _M2
    return z ^ _shift(z, 33)
