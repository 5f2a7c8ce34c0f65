"""Data sets. The digits ship with the package; others are read from the user's disk. Nothing is ever unpickled."""

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbcd.errors import DataError


@dataclass(frozen=True)
class Samples:
    """Inputs and targets with a common first axis. Inputs stay in their small dtype; `transform` makes a batch ready for the model."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs but {len(self.targets)} targets; each input needs one target")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Scale:
    """A transform: (value / divisor - mean) / deviation, as the model's dtype."""

    divisor: float
    mean: float = 0.0
    deviation: float = 1.0

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply to a batch."""
        return (inputs.to(dtype) / self.divisor - self.mean) / self.deviation


@dataclass(frozen=True)
class LoadedDataset:
    """A training set, a test set and the transform that goes with them."""

    train: Samples
    test: Samples
    transform: Scale
    classes: int


def load_digits(_: Path | None = None) -> LoadedDataset:
    """1,797 handwritten digits of 8x8 pixels that ship with the package; every third one is for testing."""
    with (files("fedbcd.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        images, labels = torch.from_numpy(archive["images"]), torch.from_numpy(archive["labels"]).long()
    test = torch.arange(len(labels)) % 3 == 2
    return LoadedDataset(Samples(images[~test], labels[~test]), Samples(images[test], labels[test]), Scale(16.0, 0.5, 0.5), 10)


def load_mnist(folder: Path | None) -> LoadedDataset:
    """MNIST from its four IDX files, plain or gzipped, in `folder` or in `folder/MNIST/raw`."""
    root = _data_folder(folder, "mnist")
    parts = {name: _read_idx(root, name) for name in _MNIST_FILES}
    train, test = (
        Samples(
            torch.from_numpy(parts[f"{split}-images-idx3-ubyte"]),
            torch.from_numpy(parts[f"{split}-labels-idx1-ubyte"]).long(),
        )
        for split in ("train", "t10k")
    )
    return LoadedDataset(train, test, Scale(255.0, 0.1307, 0.3081), 10)


DATASETS: dict[str, Callable[[Path | None], LoadedDataset]] = {"digits": load_digits, "mnist": load_mnist}


def load_dataset(name: str, folder: Path | None = None) -> LoadedDataset:
    """A data set by name; `folder`, or else the variable FEDBCD_DATA, says where the files are."""
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}; known: {', '.join(sorted(DATASETS))}")
    return DATASETS[name](folder)


_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _data_folder(folder: Path | None, name: str) -> Path:
    if folder is None and "FEDBCD_DATA" in os.environ:
        folder = Path(os.environ["FEDBCD_DATA"])
    if folder is None:
        raise DataError(f"{name} does not ship with fedbcd; say where its files are with --data DIR or FEDBCD_DATA=DIR")
    return folder


def _read_idx(root: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One IDX file: two zero bytes, type 8 (unsigned byte), number of axes, their lengths (big-endian), then the values."""
    candidates = [folder / f"{name}{suffix}" for folder in (root, root / "MNIST" / "raw") for suffix in ("", ".gz")]
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise DataError(f"no {name} or {name}.gz in {root} or {root / 'MNIST' / 'raw'}; MNIST is four such files")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch it again") from None
    axes = raw[3] if len(raw) > 4 and raw[:3] == b"\x00\x00\x08" else 0
    if not axes:
        raise DataError(f"{path} is not an IDX file of bytes: it starts with {raw[:4].hex()}, expected 000008xx")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=axes, offset=4)) if len(raw) >= 4 + 4 * axes else (-1,)
    values = np.frombuffer(raw, np.uint8, offset=min(len(raw), 4 + 4 * axes))
    if int(np.prod(shape, dtype=np.int64)) != len(values):
        raise DataError(f"{path} announces shape {shape} but holds {len(values)} values; it is cut short or damaged")
    return values.reshape(shape).copy()
