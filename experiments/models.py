"""Models are plain functions that return an `nn.Module`; `seeded` builds one the same way in every process."""

from collections.abc import Callable, Sequence

import torch
from torch import nn


def seeded(seed: int, make: Callable[..., nn.Module], *args, **kwargs) -> nn.Module:
    """``make(*args, **kwargs)`` with initial parameters from ``seed``; torch's global random state is left as it was.

    >>> a, b = seeded(3, mlp, 64, 10), seeded(3, mlp, 64, 10)
    >>> all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make(*args, **kwargs)


def logreg(inputs: int, classes: int) -> nn.Module:
    """Multinomial logistic regression: (inputs + 1) · classes parameters.

    >>> sum(p.numel() for p in logreg(64, 10).parameters())
    650
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Linear layers with ReLU between them.

    >>> sum(p.numel() for p in mlp(64, 10).parameters())
    9610
    """
    widths = [inputs, *hidden]
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


def cnn(inputs: int, classes: int, channels: Sequence[int] = (16, 32), groups: int = 4) -> nn.Module:
    """A small CNN for square grey images, ``inputs`` = side² pixels: per width a 3×3 convolution, GroupNorm, ReLU and
    2×2 max-pooling, then one linear layer. 20,586 parameters for 28×28 and 10 classes.

    GroupNorm and not BatchNorm: it has no running statistics, which a mean of models does not average (Hsieh et al.
    2020, arXiv 1910.00189).
    Raises ValueError where ``inputs`` is no square, or ``groups`` does not divide the channels.

    >>> sum(p.numel() for p in cnn(784, 10).parameters())
    20586
    """
    side = round(inputs**0.5)
    if side * side != inputs:
        raise ValueError(
            f"inputs = {inputs}: the cnn needs square images, and {inputs} is no square. Use the mlp or logreg."
        )
    odd = [c for c in channels if c % groups]
    if odd:
        raise ValueError(
            f"groups = {groups} does not divide {odd[0]} channels: GroupNorm needs groups of equal size. Use groups=1."
        )
    layers: list[nn.Module] = [nn.Unflatten(-1, (1, side, side))]
    for a, b in zip([1, *channels], channels):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(groups, b), nn.ReLU(), nn.MaxPool2d(2)]
        side //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side * side, classes))
