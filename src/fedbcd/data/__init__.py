"""Inputs: data sets on disk or in the package, and how they are split over devices."""

from fedbcd.data.datasets import DATASETS, LoadedDataset, Samples, load_dataset
from fedbcd.data.federation import Federation
from fedbcd.data.partition import (
    IID,
    PARTITIONS,
    Dirichlet,
    Diversity,
    Natural,
    Partition,
    QuantitySkew,
    Shards,
    diversity,
)

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONS",
    "Dirichlet",
    "Diversity",
    "Federation",
    "LoadedDataset",
    "Natural",
    "Partition",
    "QuantitySkew",
    "Samples",
    "Shards",
    "diversity",
    "load_dataset",
]
