"""Compressors: what a message becomes before it travels. One file each."""

from .block_topk import BlockTopK
from .compose import Compose
from .entropy import RangeCoded, entropy
from .identity import Identity
from .lowrank import LowRank
from .payload import Compressor, Payload
from .per_layer import PerLayer
from .randk import RandK
from .sign import Sign
from .threshold import Threshold
from .topk import TopK
from .warmup import WarmUp

__all__ = [
    "BlockTopK",
    "Compose",
    "Compressor",
    "Identity",
    "LowRank",
    "Payload",
    "PerLayer",
    "RandK",
    "RangeCoded",
    "Sign",
    "Threshold",
    "TopK",
    "WarmUp",
    "entropy",
]
