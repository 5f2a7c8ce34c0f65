"""FedBCD: personal and global models at once, across many devices and several servers (Wu et al.,
AAAI 2021).
"""

import warnings

from fedbcd import trackers as trackers
from fedbcd.algorithm.augment import Augment, FlipCrop
from fedbcd.algorithm.methods import (
    Algorithm,
    FedAvg,
    FedBCD,
    FedBCDI,
    FedProx,
    FineTuned,
    Local,
)
from fedbcd.algorithm.optimizers import SGD, Adam, Cosine, Stairs
from fedbcd.algorithm.projection import Ball, Box, NoProjection, Projection, Simplex, TensorBoxes
from fedbcd.algorithm.trees import module_loss
from fedbcd.algorithm.wire import Clip, Integers
from fedbcd.data.datasets import Samples, load_dataset
from fedbcd.data.federation import Federation
from fedbcd.data.holdout import Holdout
from fedbcd.data.lazy import LazySamples
from fedbcd.data.measures import Measure, accuracy
from fedbcd.data.partition import (
    IID,
    Dirichlet,
    Diversity,
    Natural,
    Partition,
    QuantitySkew,
    Shards,
    diversity,
)
from fedbcd.data.samples import Scale
from fedbcd.engines.progress import Progress
from fedbcd.engines.replay import replay
from fedbcd.engines.result import Best, Run
from fedbcd.engines.run import train
from fedbcd.errors import RenamedWarning as _RenamedWarning
from fedbcd.experiments.compare import compare
from fedbcd.experiments.comparison import Against, Comparison
from fedbcd.experiments.job import Job, load_job
from fedbcd.newcomers import Newcomer, personalise
from fedbcd.protocol.clouds import (
    AsyncCloud,
    Cloud,
    DynamicGraph,
    GraphCloud,
    RigorousCloud,
    SyncCloud,
)
from fedbcd.record.history import History, Row
from fedbcd.record.stopping import Plateau
from fedbcd.schedule.availability import Availability, Chance
from fedbcd.schedule.churn import Churn
from fedbcd.schedule.deadline import Deadline
from fedbcd.schedule.delays import (
    Bandwidth,
    Clock,
    Constant,
    Day,
    DeviceClass,
    Exponential,
    Gamma,
    LogNormal,
    Trace,
    Traces,
    Uniform,
    Weibull,
)
from fedbcd.spec import Cluster, RunSpec


def __getattr__(name: str) -> type[RunSpec]:
    """Names that have been given up, for one version more."""
    if name == "Settings":
        warnings.warn("fb.Settings is now fb.RunSpec", _RenamedWarning, stacklevel=2)
        return RunSpec
    raise AttributeError(f"module 'fedbcd' has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "Adam",
    "Against",
    "Algorithm",
    "AsyncCloud",
    "Augment",
    "Availability",
    "Ball",
    "Bandwidth",
    "Best",
    "Box",
    "Chance",
    "Churn",
    "Clip",
    "Clock",
    "Cloud",
    "Cluster",
    "Comparison",
    "Constant",
    "Cosine",
    "Day",
    "Deadline",
    "DeviceClass",
    "Dirichlet",
    "Diversity",
    "DynamicGraph",
    "Exponential",
    "FedAvg",
    "FedBCD",
    "FedBCDI",
    "FedProx",
    "Federation",
    "FineTuned",
    "FlipCrop",
    "Gamma",
    "GraphCloud",
    "History",
    "Holdout",
    "IID",
    "Integers",
    "Job",
    "LazySamples",
    "Local",
    "LogNormal",
    "Measure",
    "Natural",
    "Newcomer",
    "NoProjection",
    "Partition",
    "Plateau",
    "Progress",
    "Projection",
    "QuantitySkew",
    "RigorousCloud",
    "Row",
    "Run",
    "RunSpec",
    "SGD",
    "Samples",
    "Scale",
    "Shards",
    "Simplex",
    "Stairs",
    "SyncCloud",
    "TensorBoxes",
    "Trace",
    "Traces",
    "Uniform",
    "Weibull",
    "accuracy",
    "compare",
    "diversity",
    "load_dataset",
    "load_job",
    "module_loss",
    "personalise",
    "replay",
    "train",
]
