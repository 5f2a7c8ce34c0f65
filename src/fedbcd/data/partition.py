"""Who owns which samples. A partition is a list of sample positions per device, and a pure function of its arguments."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.errors import DataError

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """For each device: positions of its training samples, and the labels it owns (by which its personal test set is chosen)."""

    samples: tuple[Positions, ...]
    labels: tuple[tuple[int, ...], ...]


def diversity(targets: Tensor, devices: int, labels: int, samples: int, seed: int = 0) -> Partition:
    """The paper's split, "diversity d": each device draws d = `labels` labels, then `samples` samples of those labels.

    No sample repeats within a device; two devices may share one.
    """
    values = np.unique(targets.numpy())
    if not 1 <= labels <= len(values):
        raise DataError(f"diversity={labels} must be between 1 and the {len(values)} labels of the data set")
    of_label = {int(v): np.flatnonzero(targets.numpy() == v) for v in values}
    owned = [_smallest(draws.LABELS, seed, device, values, labels) for device in range(devices)]
    positions = []
    for device, mine in enumerate(owned):
        candidates = np.sort(np.concatenate([of_label[int(label)] for label in mine]))
        if samples > len(candidates):
            raise DataError(
                f"device {device} should own {samples} samples of labels {[int(m) for m in mine]}, but there are only "
                f"{len(candidates)}; use samples <= {len(candidates)} or a higher diversity"
            )
        positions.append(_smallest(draws.SAMPLES, seed, device, candidates, samples))
    return Partition(tuple(positions), tuple(tuple(int(label) for label in mine) for mine in owned))


def _smallest(stream: int, seed: int, device: int, items: Positions, count: int) -> Positions:
    """The `count` items with the smallest addressed draws, in ascending order."""
    items = items.astype(np.int64)
    keys = draws.unit(draws.address(seed, stream, np.array([device]), items))
    return np.sort(items[np.argsort(keys, kind="stable")[:count]])


def labels_of(targets: Tensor) -> tuple[int, ...]:
    """The labels that occur, in ascending order."""
    return tuple(int(v) for v in torch.unique(targets))
