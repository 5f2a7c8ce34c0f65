"""Inputs: data sets on disk or in the package, and how they are split over devices."""

from fedbcd.data.datasets import DATASETS, Samples, load_dataset
from fedbcd.data.federation import Federation
from fedbcd.data.partition import Partition, diversity

__all__ = ["DATASETS", "Federation", "Partition", "Samples", "diversity", "load_dataset"]
