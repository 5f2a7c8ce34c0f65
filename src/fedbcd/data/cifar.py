"""CIFAR-10 from its binary batches."""

from pathlib import Path

import numpy as np
import torch

from fedbcd.data.files import check_labels, check_same_shape, data_folder, find_files, read_bytes
from fedbcd.data.samples import BYTES, LoadedDataset, Samples
from fedbcd.errors import DataError

FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
TEST = "test_batch.bin"
SHAPE = (3, 32, 32)
ROW = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


def load_cifar10(folder: Path | None) -> LoadedDataset:
    """CIFAR-10: 32x32 colour pictures of 10 kinds, from its binary batches
    (DIR/cifar-10-batches-bin or DIR).
    """
    *paths, last = find_files(
        "cifar10", data_folder(folder, "cifar10"), (FOLDER, ""), (*TRAIN, TEST)
    )
    batches = [read_batch(path) for path in paths]
    for path, batch in zip(paths, batches, strict=True):
        if len(batch) != len(batches[0]):
            raise DataError(
                f"{path} holds {len(batch)} pictures, but {paths[0].name} {len(batches[0])}; "
                "training batches are of one size, so one of them is cut short"
            )
    train = Samples(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
    )
    test = read_batch(last)
    check_same_shape((paths[0], train), (last, test))
    return LoadedDataset(train, test, BYTES, 10)


def read_batch(path: Path) -> Samples:
    """One file: rows of 1 + 3072 bytes, a label and a picture."""
    raw = read_bytes(path)
    if len(raw) % ROW:
        raise DataError(
            f"{path} holds {len(raw)} bytes, not a whole number of rows of {ROW}; it is cut short"
            " or no CIFAR-10 batch"
        )
    rows = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, ROW).copy())
    targets = rows[:, 0].long()
    check_labels(path, targets, 10)
    return Samples(rows[:, 1:].reshape(-1, *SHAPE).contiguous(), targets)
