"""Where the files of a data set are looked for, and the sentences for when they are missing or do
not belong together.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedbcd.data.samples import Samples
from fedbcd.errors import DataError

VARIABLE = "FEDBCD_DATA"


def data_folder(folder: Path | None, name: str, hint: str | None = None) -> Path:
    """`folder`, or else the one that the variable FEDBCD_DATA names; `hint` says how else to come
    by the set than by `data fetch`.
    """
    if folder is None and os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE])
    if folder is None:
        raise DataError(
            f"{name} does not ship with fedbcd; say where its files are with --data DIR or"
            f" {VARIABLE}=DIR; {hint or how_to_get(name)}"
        )
    return folder


def how_to_get(name: str, folder: Path | None = None) -> str:
    """The last words of every complaint about a missing or damaged file."""
    return f"get it with: fedbcd data fetch {name} --data {folder or 'DIR'}"


def find_files(
    name: str,
    root: Path,
    places: Sequence[str],
    files: Sequence[str],
    suffixes: Sequence[str] = ("",),
) -> list[Path]:
    """The paths of `files`, all from the first of the folders `places` under `root` that holds
    every one of them.

    All from one folder: Fashion-MNIST and KMNIST use the very file names of MNIST, and a mixture
    would go unnoticed.
    """
    folders = [root / place for place in places]
    found = [[_first(folder, file, suffixes) for file in files] for folder in folders]
    for paths in found:
        complete = [path for path in paths if path is not None]
        if len(complete) == len(files):
            return complete
    nearest = max(range(len(folders)), key=lambda k: sum(path is not None for path in found[k]))
    missing = [file for file, path in zip(files, found[nearest], strict=True) if path is None]
    lacks = f"; {folders[nearest]} lacks {', '.join(missing)}" if len(missing) < len(files) else ""
    either = f" (each as it is or with {suffixes[-1]})" if len(suffixes) > 1 else ""
    raise DataError(
        f"{name} was not found: looked for {', '.join(files)}{either} in"
        f" {', '.join(map(str, folders))}{lacks}; {how_to_get(name, root)}"
    )


def _first(folder: Path, file: str, suffixes: Sequence[str]) -> Path | None:
    return next(
        (path for suffix in suffixes if (path := folder / f"{file}{suffix}").is_file()), None
    )


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def check_labels(path: Path, targets: Tensor, classes: int, first: int = 0) -> None:
    """Refuse labels outside first .. first + classes - 1, by file and sample."""
    wrong = ((targets < first) | (targets >= first + classes)).nonzero()
    if len(wrong):
        sample = int(wrong[0])
        raise DataError(
            f"{path} has label {int(targets[sample])} at sample {sample}; the {classes} classes are"
            f" numbered {first} to {first + classes - 1}. It is damaged or belongs to another"
            " data set"
        )


def check_same_shape(train: tuple[Path, Samples], test: tuple[Path, Samples]) -> None:
    """Refuse empty sets, and a test set whose inputs are of another shape than the training
    set's.
    """
    for path, samples in (train, test):
        if len(samples) == 0:
            raise DataError(f"{path} holds no samples; it is damaged or was cut short")
    mine, other = (tuple(samples.inputs.shape[1:]) for _, samples in (train, test))
    if mine != other:
        raise DataError(
            f"{test[0]} has inputs of shape {other}, but {train[0]} of {mine}; they belong to"
            " different data sets"
        )
