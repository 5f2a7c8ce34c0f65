"""Data by name, or made by a function of one's own: `package.module:function`, called without
arguments, or with the folder that a job names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedbcd.algorithm.trees import leaves
from fedbcd.data.datasets import LoadedDataset, load_dataset
from fedbcd.data.federation import Transform, as_dtype, as_samples, with_test
from fedbcd.data.lazy import partitions_of
from fedbcd.data.samples import Pool, Samples
from fedbcd.errors import DataError, FedBCDError
from fedbcd.own import imported_function

KEYS = ("devices", "test", "transform")


@dataclass(frozen=True)
class DealtData:
    """Data that come by device."""

    devices: list[tuple[Pool, Pool | None]]
    test: Pool | None = None
    transform: Transform = as_dtype


Data = LoadedDataset | DealtData


def load_data(name: str, folder: Path | None) -> Data:
    """A data set by name, or what somebody's function returns."""
    if ":" not in name:
        return load_dataset(name, folder)
    make = imported_function(name, "data.name", "returns the data")
    said = f"data.name = {name!r}"
    try:
        found = make() if folder is None else make(folder)
    except FedBCDError:
        raise
    except Exception as error:
        raise DataError(
            f"{said} failed ({type(error).__name__}: {error}); it is called without arguments, or"
            " with the folder that [data] or --data names"
        ) from error
    return _as_data(found, said)


def _as_data(found: Any, said: str) -> Data:
    if isinstance(found, LoadedDataset):
        train = _tensors(f"{said}: the training set", found.train)
        return replace(found, train=train, test=_tensors(f"{said}: the test set", found.test))
    parts = found if isinstance(found, Mapping) else {"devices": found}
    devices = partitions_of(parts.get("devices"))
    if not (isinstance(devices, list) and devices and set(parts) <= {*KEYS}):
        what = f"keys {', '.join(map(str, parts))}" if parts is found else type(found).__name__
        raise DataError(
            f"{said} returns {what}; return a list with the data of each device, (inputs, targets)"
            " or a pair (train, test) of such; or a mapping with that list as devices, and test"
            " and transform; or a fedbcd.data.LoadedDataset, to be split"
        )
    pairs = [with_test(data) for data in devices]
    tests = {f"{said}: the test set of device {i}": own for i, (_, own) in enumerate(pairs)}
    kept = [None if own is None else as_samples(name, own) for name, own in tests.items()]
    trains = [as_samples(f"{said}: device {i}", data) for i, (data, _) in enumerate(pairs)]
    test = parts.get("test")
    return DealtData(
        list(zip(trains, kept, strict=True)),
        None if test is None else as_samples(f"{said}: the test set", test),
        parts.get("transform") or as_dtype,
    )


def sizes_of(data: Data) -> tuple[int, int]:
    """How many numbers a network for these data takes in, and how many it gives."""
    if isinstance(data, LoadedDataset):
        return data.train.inputs[0].numel(), data.classes
    known = [samples for pair in data.devices for samples in pair if samples is not None]
    inputs, targets = known[0].take(torch.tensor([0]))
    width = sum(part[0].numel() for part in leaves(inputs))
    if targets.is_floating_point() or targets.ndim > 1:
        return width, targets[0].numel()
    labels = max(int(samples.all_targets.max()) for samples in known if len(samples))
    return width, labels + 1


def targets_of(data: Data) -> Any:
    """Of a sample."""
    pool = data.train if isinstance(data, LoadedDataset) else data.devices[0][0]
    return pool.take(torch.tensor([0]))[1]


def _tensors(name: str, data: Any) -> Samples:
    found = as_samples(name, data)
    if not isinstance(found, Samples):
        raise DataError(
            f"{name} is no tensor in memory, as a LoadedDataset has them; return a list with the"
            " data of each device"
        )
    return found
