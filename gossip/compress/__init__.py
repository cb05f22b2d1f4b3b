"""Compressors: what a message becomes before it travels. One file each."""

from .block_topk import BlockTopK
from .cast import Cast
from .compose import Compose
from .entropy import RangeCoded, entropy
from .identity import Identity
from .linf import LInf
from .lowrank import LowRank
from .moniqua import Moniqua
from .natural import Natural
from .onebit import OneBit
from .payload import Compressor, NotFinite, Payload
from .per_layer import PerLayer
from .qsgd import QSGD
from .randk import RandK
from .sign import Sign
from .stochastic import StochasticRounding
from .terngrad import TernGrad
from .threshold import Threshold
from .topk import TopK
from .warmup import WarmUp

__all__ = [
    "QSGD",
    "BlockTopK",
    "Cast",
    "Compose",
    "Compressor",
    "Identity",
    "LInf",
    "LowRank",
    "Moniqua",
    "Natural",
    "NotFinite",
    "OneBit",
    "Payload",
    "PerLayer",
    "RandK",
    "RangeCoded",
    "Sign",
    "StochasticRounding",
    "TernGrad",
    "Threshold",
    "TopK",
    "WarmUp",
    "entropy",
]
