"""Compressors: what a message becomes before it travels. One file each."""

from .identity import Identity
from .payload import Compressor, Payload
from .randk import RandK
from .sign import Sign
from .topk import TopK

__all__ = ["Compressor", "Identity", "Payload", "RandK", "Sign", "TopK"]
