"""Warm-up of the sparsity: the first messages keep more (Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .payload import Payload, compress, memory_of
from .topk import TopK


@dataclass(frozen=True)
class WarmUp:
    """The sparsifier's ratio in message t is ratio · factor^max(0, stages − ⌊t / rounds⌋), at most 1.

    With 4 stages and a factor of 4 the paper's 25 %, 6.25 %, 1.6 %, 0.4 %, then 0.1 % for good. Messages have the size of
    their stage. The number of the message is the compressor's memory, a leaf of the algorithm's state, so a checkpoint holds
    it; δ, ω and γ are those after the warm-up.

    Args:
        compressor: a sparsifier with a `ratio`, the final one.
        stages: how many.
        rounds: messages per stage.
        factor: between the ratios of two stages.

    >>> warm = WarmUp(TopK(0.001), stages=4, rounds=1)
    >>> [round(warm.ratio(t), 4) for t in range(6)]
    [0.256, 0.064, 0.016, 0.004, 0.001, 0.001]
    """

    compressor: Any = TopK()
    stages: int = 4
    rounds: int = 100
    factor: float = 4.0

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.compressor, "ratio", None), int | float):
            raise ValueError(
                f"{type(self.compressor).__name__} has no `ratio` to warm up: take TopK, RandK, BlockTopK or Threshold"
            )
        if self.stages < 0 or self.rounds < 1 or self.factor <= 1:
            raise ValueError(
                f"stages={self.stages}, rounds={self.rounds}, factor={self.factor:g}: there are stages ≥ 0 of rounds ≥ 1 "
                "messages, and the ratio falls by a factor > 1 after each"
            )

    def ratio(self, message: int) -> float:
        """The ratio of a message, counted from 0."""
        return min(1.0, self.compressor.ratio * self.factor ** max(0, self.stages - message // self.rounds))

    def memory(self, x: Tensor) -> Any:
        """The number of messages so far (m, 1), and what the sparsifier remembers."""
        return torch.zeros((len(x), 1), dtype=torch.int64, device=x.device), memory_of(self.compressor, x)

    def __call__(self, x: Tensor, key: Tensor | None = None, memory: Any = None) -> Payload:
        """Compress each row of (m, d); without memory, as after the warm-up."""
        if memory is None:
            return self.compressor(x, key)
        count, inner = memory
        message = int(count.max()) if len(count) else 0  # rows differ under the asynchronous clock only
        payload = compress(replace(self.compressor, ratio=self.ratio(message)), x, key, inner)
        count.add_(1)
        return payload

    @property
    def gamma(self) -> float:
        """Start value of γ: the sparsifier's, which the warm-up stands too."""
        return self.compressor.gamma

    def omega(self, d: int) -> float:
        """ω after the warm-up, if the sparsifier is unbiased."""
        return self.compressor.omega(d)

    def delta(self, d: int) -> float:
        """δ after the warm-up, the smallest."""
        return self.compressor.delta(d)
