"""The algorithms of the field, one file each."""

from .allreduce import AllReduce
from .choco import Choco
from .dpsgd import DPSGD
from .exact_diffusion import ExactDiffusion
from .gradient_tracking import GradientTracking
from .sgp import SGP

__all__ = ["SGP", "AllReduce", "Choco", "DPSGD", "ExactDiffusion", "GradientTracking"]
