"""CECA-2P: exact averaging in ⌈log₂ n⌉ one-peer rounds for every n, at the price of two states per worker."""

import torch
from torch import Tensor

from graphs.properties import matrix
from graphs.topology import sized

__all__ = ["ceca"]


def ceca(n: int) -> list[Tensor]:
    """The rounds of CECA-2P as mixing matrices of two states: (2n, 2n) sparse, acting on the stack of x (n rows) and x̂ (n rows).

    With the binary digits of n − 1, highest first, and e = 0 at the start: digit 1 sends x to i + e + 1,

        x ← (x + r)/2,  x̂ ← e/(2e+1) x̂ + (e+1)/(2e+1) r,

    digit 0 sends x̂ to i + e,

        x ← (e+1)/(2e+1) x + e/(2e+1) r,  x̂ ← (x̂ + r)/2,

    and e becomes 2e + digit. x is then the mean of the e + 1 workers up to i, x̂ that of the e before i. After the last
    round x is the average of all, whatever n is; x̂ may start anywhere. One message per worker and round.

    Two states need two rows per worker, so this is no `Schedule` that D-PSGD could mix by.

    Source: Ding et al. 2023, arXiv 2306.00256.

    >>> x = torch.cat([torch.arange(6.0, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)])[:, None]
    >>> for W in ceca(6):
    ...     x = W @ x
    >>> len(ceca(6)), x[:6, 0].tolist()
    (3, [2.5, 2.5, 2.5, 2.5, 2.5, 2.5])
    """
    n = sized(n)
    i, e, rounds = torch.arange(n), 0, []
    for digit in f"{n - 1:b}" if n > 1 else "":
        one = digit == "1"
        sent = (i - e - 1) % n if one else n + (i - e) % n  # the row of the stack that arrives at i
        new, old = (e + 1) / (2 * e + 1), e / (2 * e + 1)
        x_own, x_sent, hat_own, hat_sent = (0.5, 0.5, old, new) if one else (new, old, 0.5, 0.5)
        rows = torch.cat([i, i, n + i, n + i])
        columns = torch.cat([i, sent, n + i, sent])
        weights = torch.tensor([x_own, x_sent, hat_own, hat_sent], dtype=torch.float64).repeat_interleave(n)
        rounds.append(matrix(rows, columns, weights, 2 * n))
        e = 2 * e + int(one)
    return rounds
