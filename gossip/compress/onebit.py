"""One bit with two means: the coordinates of either sign become their own mean (Seide et al. 2014, "1-bit SGD")."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import Codes, Form, signs
from .measure import bounded, measured, returned, working
from .payload import checked_rows
from .tiles import Room, height, reused, tiles, width


@dataclass(frozen=True)
class OneBit:
    """C(x)_c = μ₊ where x_c ≥ 0, μ₋ elsewhere: the means of the coordinates ≥ 0 and of those < 0.

    The projection onto rows that are constant on either set, so a contraction with ‖C(x) − x‖² = ‖x‖² − n₊ μ₊² − n₋ μ₋²;
    never worse than `Sign`, and much better on rows that are mostly of one sign. δ ≥ 1/d. A message is ⌈d/8⌉ bytes of
    signs and two numbers. Interspeech 2014.

    >>> OneBit()(torch.tensor([[-1.0, -3.0, 0.0, 5.0]])).dense()
    tensor([[-2.0000, -2.0000,  2.5000,  2.5000]])
    """

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Codes:
        """Compress each row of (m, d)."""
        x = checked_rows(x)
        d = x.shape[1]
        x, size, lift = measured(x, _sums)
        count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        packed = signs(x, count)
        above, below = size.unbind(1)
        high, low = above / count.clamp(min=1), -below / (d - count).clamp(min=1)
        both = returned(torch.stack((high - low, low), 1).to(working(x.dtype)), lift)
        return bounded(Codes(packed, both[:, :1], both[:, 1:], Form(d, 2, 0, dtype=x.dtype)), size, lift)

    gamma = 0.7  # on Gaussian rows a ring of 25 stands up to 1.3

    def delta(self, d: int) -> float:
        """δ = 1/d, reached by a row with one positive number and zeros."""
        return 1 / d


def _sums(x: Tensor) -> Tensor:
    """(m, 2) float64: the sum of the numbers ≥ 0, and minus the sum of the others."""
    m, d = x.shape
    found = torch.zeros(m, 2, dtype=torch.float64, device=x.device)
    room = reused(Room, height(m, d) * width(m, d), x.device, working(x.dtype))
    for tile in tiles(m, d):
        part = tile.of(x)
        (scratch,) = room(*part.shape)
        scratch.copy_(part)
        found[tile.rows, 0] += scratch.clamp_(min=0).sum(1)
        found[tile.rows, 1] += scratch.sub_(part).sum(1)
    return found
