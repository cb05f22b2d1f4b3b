"""k ascending indices below d in a fixed number of bits, near their information (Elias 1974, Fano 1971)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def low_bits(d: int, k: int) -> int:
    """The number l of low bits that are sent as they are; 0 means a plain bitmap of d bits."""
    return min(range((d // k).bit_length() + 1), key=lambda l: _bytes(d, k, l))


def packed_bytes(d: int, k: int) -> int:
    """Bytes of a packed row: about k (2 + log₂(d/k)) bits, whatever the indices are; more for a larger k.

    >>> packed_bytes(10**6, 10**4), 4 * 10**4
    (10703, 40000)
    """
    return _bytes(d, k, low_bits(d, k))


def pack(index: Tensor, d: int) -> Tensor:
    """(m, k) int64 ascending indices to (m, bytes) uint8.

    The i-th index, without its l low bits, is a one at place (index_i >> l) + i of a bitmap; the low bits follow, plane by
    plane.

    >>> pack(torch.tensor([[3, 900, 901]]), 1000).shape, packed_bytes(1000, 3)
    (torch.Size([1, 4]), 4)
    """
    m, k = index.shape
    l = low_bits(d, k)
    if l == 0:
        return pack_bits(_marks(index, d))
    high = _marks((index >> l) + torch.arange(k, device=index.device), _high_bits(d, k, l))
    small = index.to(torch.int32) if l < 31 else index  # the low bits are all that matters
    planes = (small[:, None] & (1 << torch.arange(l, dtype=small.dtype, device=index.device))[:, None]).bool()
    return torch.cat((pack_bits(high), pack_bits(planes.flatten(1))), 1)


def unpack(packed: Tensor, d: int, k: int) -> Tensor:
    """(m, bytes) back to (m, k) int64 ascending indices.

    >>> unpack(pack(torch.tensor([[3, 900, 901]]), 1000), 1000, 3)
    tensor([[  3, 900, 901]])
    """
    m, l = len(packed), low_bits(d, k)
    if l == 0:
        return _places(unpack_bits(packed, d)).view(m, k)
    size = _high_bits(d, k, l)
    split = -(-size // 8)
    index = _places(unpack_bits(packed[:, :split], size)).view(m, k)
    index -= torch.arange(k, device=index.device)
    index <<= l
    planes = unpack_bits(packed[:, split:], l * k).view(m, l, k)
    for j in range(l):
        index += planes[:, j].long() << j
    return index


def pack_bits(bits: Tensor) -> Tensor:
    """(m, b) bool to (m, ⌈b/8⌉) uint8, lowest bit first."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    octets = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """(m, ⌈b/8⌉) uint8 to (m, b) zeros and ones in uint8."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=count, bitorder="little"))
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(1)[:, :count]


def _high_bits(d: int, k: int, l: int) -> int:
    return ((d - 1) >> l) + k


def _bytes(d: int, k: int, l: int) -> int:
    return -(-d // 8) if l == 0 else -(-_high_bits(d, k, l) // 8) - (-l * k // 8)


def _marks(place: Tensor, size: int) -> Tensor:
    marks = torch.zeros(len(place), size, dtype=torch.bool, device=place.device)
    return marks.scatter_(1, place, True)


def _places(bits: Tensor) -> Tensor:
    """The columns of all ones, row by row."""
    if bits.device.type == "cpu":  # far faster than torch.nonzero
        columns = np.flatnonzero(bits.numpy())
        return torch.from_numpy(columns if len(bits) == 1 else columns % bits.shape[1])
    return bits.nonzero()[:, 1]
