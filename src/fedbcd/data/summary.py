"""Data sets and partitions in a few numbers."""

from typing import Any

import numpy as np
import torch

from fedbcd.data.manifest import hash_of_indices
from fedbcd.data.ownership import Partition
from fedbcd.data.samples import LoadedDataset


def summarise(data: LoadedDataset) -> dict[str, Any]:
    return {
        "train": len(data.train),
        "test": len(data.test),
        "input": list(data.train.inputs.shape[1:]),
        "dtype": str(data.train.inputs.dtype).removeprefix("torch."),
        "classes": data.classes,
        "per_class": torch.bincount(data.train.targets, minlength=data.classes).tolist(),
        "columns": sorted(data.columns),
    }


def summarise_partition(partition: Partition) -> dict[str, Any]:
    """How even a partition is: samples and labels per device as least, median and most, and how
    many samples are used and shared.
    """
    sizes = [len(positions) for positions in partition.samples]
    labels = [len(owned) for owned in partition.labels]
    used = len(np.unique(np.concatenate(partition.samples)))
    return {
        "devices": len(sizes),
        "samples": _spread(sizes),
        "labels": _spread(labels),
        "used": used,
        "in_all": sum(sizes),
        "indices_sha256": hash_of_indices(partition.samples),
    }


def _spread(values: list[int]) -> list[float]:
    return [min(values), float(np.median(values)), max(values)]
