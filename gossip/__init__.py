"""Gossip optimizers: decentralized SGD on any communication graph, one engine for simulation and real processes."""

from graphs import Incompatible

from . import rng, work
from .algorithm import Algorithm, Gradient, Rows, State, check
from .algorithms import DPSGD, EFDPSGD, SGP, AllReduce, Choco, DeepSqueeze, ExactDiffusion, GradientTracking, MoniquaSGD
from .asynchronous import Asynchronous
from .compress import (
    QSGD,
    BlockTopK,
    Cast,
    Compose,
    Compressor,
    Identity,
    LInf,
    LowRank,
    Moniqua,
    Natural,
    NotFinite,
    OneBit,
    Payload,
    PerLayer,
    RandK,
    RangeCoded,
    Sign,
    StochasticRounding,
    TernGrad,
    Threshold,
    TopK,
    WarmUp,
    entropy,
)
from .cost import Cost
from .faults import Faults
from .layout import Layout
from .links import Links, fibre, two_level
from .live import Live
from .live_wrap import LiveOptimizer
from .lockstep import lockstep
from .lockstep_wrap import GossipOptimizer
from .meter import Meter
from .network import Network
from .optimizer import LocalOptimizer, OptimizerFactory, scheduled, sgd
from .oracle import Oracle
from .placement import Placement
from .probe import Probe, drifts, probe, resolved, stable
from .resume import load, save
from .simulate import Record, Task, consensus, consensus_distance, simulate
from .timeline import Sent, Timeline, Watch, seconds_per_round
from .transport import PeerError, Transport, connect, disconnect
from .wrap import wrap

__all__ = [
    "DPSGD",
    "EFDPSGD",
    "QSGD",
    "SGP",
    "Algorithm",
    "AllReduce",
    "Asynchronous",
    "BlockTopK",
    "Cast",
    "Choco",
    "Compose",
    "Compressor",
    "Cost",
    "DeepSqueeze",
    "ExactDiffusion",
    "Faults",
    "GossipOptimizer",
    "Gradient",
    "GradientTracking",
    "Identity",
    "Incompatible",
    "LInf",
    "Layout",
    "Links",
    "Live",
    "LiveOptimizer",
    "LocalOptimizer",
    "LowRank",
    "Meter",
    "Moniqua",
    "MoniquaSGD",
    "Natural",
    "Network",
    "NotFinite",
    "OneBit",
    "OptimizerFactory",
    "Oracle",
    "Payload",
    "PeerError",
    "PerLayer",
    "Placement",
    "Probe",
    "RandK",
    "RangeCoded",
    "Record",
    "Rows",
    "Sent",
    "Sign",
    "State",
    "StochasticRounding",
    "Task",
    "TernGrad",
    "Threshold",
    "Timeline",
    "TopK",
    "Transport",
    "WarmUp",
    "Watch",
    "check",
    "connect",
    "consensus",
    "consensus_distance",
    "disconnect",
    "drifts",
    "entropy",
    "fibre",
    "load",
    "lockstep",
    "probe",
    "resolved",
    "rng",
    "save",
    "scheduled",
    "seconds_per_round",
    "sgd",
    "simulate",
    "stable",
    "two_level",
    "work",
    "wrap",
]
