"""The algorithms of the field, one file each."""

from .allreduce import AllReduce
from .choco import Choco
from .deepsqueeze import DeepSqueeze
from .dpsgd import DPSGD
from .ef_dpsgd import EFDPSGD
from .exact_diffusion import ExactDiffusion
from .gradient_tracking import GradientTracking
from .moniqua import MoniquaSGD
from .sgp import SGP

__all__ = [
    "DPSGD",
    "EFDPSGD",
    "SGP",
    "AllReduce",
    "Choco",
    "DeepSqueeze",
    "ExactDiffusion",
    "GradientTracking",
    "MoniquaSGD",
]
