"""The consensus step size γ of algorithms that compress: a number, the compressor's start value, or a probe's."""

from typing import Any

import torch
from torch import Tensor

from graphs import slem

from .compress import Identity, Moniqua


def check_gamma(gamma: float | str | None, compressor: Any) -> None:
    """A consensus step size: a number in (0, 2], None where the compressor has a start value, or "auto"."""
    if isinstance(compressor, type) or not callable(compressor):
        raise ValueError(
            f"compressor={compressor!r} is no compressor: pass an instance, such as gossip.TopK(0.01) or gossip.Identity()"
        )
    if isinstance(compressor, Moniqua):
        raise ValueError(
            f"compressor={compressor!r} is no contraction: differences beyond θ would be read modulo 2θ; use "
            "gossip.MoniquaSGD, or a compressor that states δ, such as gossip.LInf(8)"
        )
    if gamma == "auto":
        return
    if gamma is None and not hasattr(compressor, "gamma"):
        shared = getattr(compressor, "rescaled", False) and getattr(compressor, "bucket", 0) is None
        raise ValueError(
            f"gamma=None, and {type(compressor).__name__} names no start value (a property `gamma`): pass gamma, "
            'near the compressor\'s δ at first, or gamma="auto"' + (", or take a bucket, such as 512" if shared else "")
        )
    if isinstance(gamma, str) or not 0 < step_size(gamma, compressor) <= 2:
        raise ValueError(
            f"gamma={gamma!r} is not in (0, 2]: it is the consensus step size; start at 1 for light compression and near the "
            'compressor\'s δ for heavy compression, or let "auto" find it'
        )


def step_size(gamma: float | str | None, compressor: Any) -> float:
    """γ as a number: as given, or the compressor's start value.

    >>> import gossip
    >>> step_size(0.3, gossip.TopK(0.01)), step_size(None, gossip.TopK(0.01))
    (0.3, 0.04)
    """
    if isinstance(gamma, str):
        raise ValueError(
            f'gamma="{gamma}" is found by a probe before the run: call gossip.resolved(algorithm, mixing, d), as '
            "gossip.simulate, gossip.wrap and the command do"
        )
    return compressor.gamma if gamma is None else gamma


def damped_rate(W: Tensor, gamma: float, compressor: Any) -> float | None:
    """The SLEM of I − γ (I − W), the rate without compression; None with it, where only bounds are known.

    >>> import gossip, graphs
    >>> W = graphs.metropolis(graphs.complete(4))
    >>> round(damped_rate(W, 0.25, gossip.Identity()), 12), damped_rate(W, 0.25, gossip.Sign())
    (0.75, None)
    """
    if not isinstance(compressor, Identity):
        return None
    W = W.to_dense()
    return slem(W.mul(gamma) + (1 - gamma) * torch.eye(len(W), dtype=W.dtype))
