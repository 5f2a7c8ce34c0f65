"""Data sets by name. The digits ship with the package; others are read from the user's disk.
Nothing is ever unpickled.
"""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from fedbcd.config import convert, nearest
from fedbcd.data.cifar import load_cifar10
from fedbcd.data.idx import EMNIST_CLASSES, emnist, load_fashion_mnist, load_kmnist, load_mnist
from fedbcd.data.parquet import load_parquet
from fedbcd.data.samples import LoadedDataset, Samples, Scale
from fedbcd.errors import DataError

__all__ = [
    "DATASETS",
    "LoadedDataset",
    "Samples",
    "Scale",
    "load_dataset",
    "load_digits",
    "load_mnist",
]


def load_digits(_: Path | None = None) -> LoadedDataset:
    """1,797 handwritten digits of 8x8 pixels that ship with the package; every third one is for
    testing.
    """
    with (
        (files("fedbcd.data") / "digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        images, labels = (
            torch.from_numpy(archive["images"]),
            torch.from_numpy(archive["labels"]).long(),
        )
    test = torch.arange(len(labels)) % 3 == 2
    return LoadedDataset(
        Samples(images[~test], labels[~test]),
        Samples(images[test], labels[test]),
        Scale(16.0, 0.5, 0.5),
        10,
    )


DATASETS: dict[str, Callable[[Path | None], LoadedDataset]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "kmnist": load_kmnist,
    **{
        "emnist" if split == "balanced" else f"emnist-{split}": emnist(split)
        for split in EMNIST_CLASSES
    },
    "cifar10": load_cifar10,
    "parquet": load_parquet,
}


def load_dataset(name: str, folder: str | Path | None = None) -> LoadedDataset:
    """A data set by name; `folder`, or else the variable FEDBCD_DATA, says where the files are."""
    name, folder = convert(name, str, "name"), convert(folder, str | Path | None, "folder")
    if name not in DATASETS:
        raise DataError(
            f"unknown data set {name!r}{nearest(name, DATASETS)}; known:"
            f" {', '.join(sorted(DATASETS))}"
        )
    return DATASETS[name](None if folder is None else Path(folder))
