"""MNIST and the sets in its format (IDX, plain or gzipped): Fashion-MNIST, KMNIST, EMNIST."""

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedbcd.data.files import check_labels, check_same_shape, data_folder, find_files, read_bytes
from fedbcd.data.samples import BYTES, LoadedDataset, Samples, Scale
from fedbcd.errors import DataError

Loader = Callable[[Path | None], LoadedDataset]

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
EMNIST_CLASSES = {
    "balanced": 47,
    "letters": 26,
    "digits": 10,
    "byclass": 62,
    "bymerge": 47,
    "mnist": 10,
}


def load_mnist(folder: Path | None) -> LoadedDataset:
    """MNIST from its four IDX files, plain or gzipped, in DIR, DIR/mnist or DIR/MNIST/raw."""
    return _load("mnist", folder, "MNIST", MNIST_FILES, transform=Scale(255.0, 0.1307, 0.3081))


def load_fashion_mnist(folder: Path | None) -> LoadedDataset:
    """Fashion-MNIST: 28x28 pictures of 10 kinds of clothes, in the files of MNIST
    (DIR/FashionMNIST/raw).
    """
    return _load("fashion-mnist", folder, "FashionMNIST", MNIST_FILES)


def load_kmnist(folder: Path | None) -> LoadedDataset:
    """KMNIST: 28x28 pictures of 10 cursive Japanese characters, in the files of MNIST
    (DIR/KMNIST/raw).
    """
    return _load("kmnist", folder, "KMNIST", MNIST_FILES)


def emnist(split: str) -> Loader:
    """A reader of one split of EMNIST. Its images are stored transposed; the labels of "letters"
    count from 1, here from 0.
    """
    classes, name = EMNIST_CLASSES[split], "emnist" if split == "balanced" else f"emnist-{split}"

    def load(folder: Path | None) -> LoadedDataset:
        data = _load(
            name, folder, "EMNIST", emnist_files(split), classes, first=int(split == "letters")
        )
        train, test = (
            Samples(part.inputs.transpose(1, 2).contiguous(), part.targets)
            for part in (data.train, data.test)
        )
        return LoadedDataset(train, test, data.transform, classes)

    load.__doc__ = (
        f"EMNIST, split {split}: handwritten characters of {classes} classes, 28x28"
        " (DIR/EMNIST/raw)."
    )
    return load


def emnist_files(split: str) -> tuple[str, ...]:
    return tuple(
        f"emnist-{split}-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )


def _load(
    name: str,
    folder: Path | None,
    home: str,
    files: Sequence[str],
    classes: int = 10,
    first: int = 0,
    transform: Scale = BYTES,
) -> LoadedDataset:
    paths = find_files(
        name, data_folder(folder, name), (f"{home}/raw", name, ""), files, ("", ".gz")
    )
    train, test = (
        _samples(paths[0], paths[1], classes, first),
        _samples(paths[2], paths[3], classes, first),
    )
    check_same_shape((paths[0], train), (paths[2], test))
    return LoadedDataset(train, test, transform, classes)


def _samples(images: Path, labels: Path, classes: int, first: int) -> Samples:
    inputs, targets = (
        torch.from_numpy(read_idx(images, 3)),
        torch.from_numpy(read_idx(labels, 1)).long(),
    )
    if len(inputs) != len(targets):
        raise DataError(
            f"{images} holds {len(inputs)} images, but {labels} {len(targets)} labels; they do not"
            " belong together"
        )
    check_labels(labels, targets, classes, first)
    return Samples(inputs, targets - first)


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """One IDX file: two zero bytes, type 8 (unsigned byte), number of axes, their lengths
    (big-endian), then the values.
    """
    raw = _unzipped(path)
    magic = bytes((0, 0, 8, axes))
    if raw[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of bytes with {axes} axes: it starts with {raw[:4].hex()},"
            f" expected {magic.hex()}"
        )
    start = 4 + 4 * axes
    if len(raw) < start:
        raise DataError(
            f"{path} ends within its header, after {len(raw)} of {start} bytes; it is cut short"
        )
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=axes, offset=4))
    if math.prod(shape) != len(raw) - start:
        raise DataError(
            f"{path} announces shape {shape} but holds {len(raw) - start} values; it is cut short"
            " or damaged"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def _unzipped(path: Path) -> bytes:
    """The content; gzipped or not is told by its first bytes, because browsers unpack files without
    renaming them.
    """
    raw = read_bytes(path)
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be unpacked: {error}; it is cut short or damaged, fetch it again"
        ) from None
