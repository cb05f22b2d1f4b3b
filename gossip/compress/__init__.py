"""Compressors: what a message becomes before it travels. One file each."""

from .block_topk import BlockTopK
from .compose import Compose
from .identity import Identity
from .payload import Compressor, Payload
from .randk import RandK
from .sign import Sign
from .topk import TopK
from .warmup import WarmUp

__all__ = ["BlockTopK", "Compose", "Compressor", "Identity", "Payload", "RandK", "Sign", "TopK", "WarmUp"]
