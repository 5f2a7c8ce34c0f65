"""Pictures in Parquet, as the Hugging Face Hub lays them out. Needs pyarrow and Pillow, which the
extra `parquet` brings.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.data.files import check_labels, check_same_shape, data_folder
from fedbcd.data.samples import BYTES, LoadedDataset, Samples
from fedbcd.errors import DataError

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels", "target")
HINT = (
    "put train-*.parquet and test-*.parquet of an image data set there, as the Hugging Face Hub"
    " offers them"
)
GREY, COLOUR = ("1", "L"), ("RGB", "RGBA", "P", "LA", "CMYK", "YCbCr")


def load_parquet(folder: Path | None) -> LoadedDataset:
    """Pictures in train-*.parquet and test-*.parquet with columns image (or img) and label, in DIR
    or DIR/data.
    """
    root = data_folder(folder, "parquet", HINT)
    train_paths, test_paths = _find(root, "train"), _find(root, "test")
    try:
        import PIL  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError:
        raise DataError(
            f"{train_paths[0]} needs pyarrow and Pillow to be read: pip install 'fedbcd[parquet]'"
            " brings them"
        ) from None
    tables = [_table(path) for path in train_paths]
    image, label = (
        _column(train_paths[0], tables[0], IMAGE_COLUMNS),
        _column(train_paths[0], tables[0], LABEL_COLUMNS),
    )
    mode = _mode(train_paths[0], tables[0][image])
    train = _samples(train_paths, tables, image, label, mode)
    classes = _declared_classes(tables[0], label) or int(train.targets.max()) + 1
    test_tables = [_table(path) for path in test_paths]
    test = _samples(test_paths, test_tables, image, label, mode)
    for path, table in zip((*train_paths, *test_paths), (*tables, *test_tables), strict=True):
        check_labels(path, _labels(path, table, label), classes)
    check_same_shape((train_paths[0], train), (test_paths[0], test))
    return LoadedDataset(train, test, BYTES, classes, _further(tables, (image, label)))


def _find(root: Path, part: str) -> list[Path]:
    for folder in (root, root / "data"):
        if paths := sorted(folder.glob(f"{part}-*.parquet")):
            return paths
    raise DataError(
        f"parquet was not found: looked for {part}-*.parquet in {root}, {root / 'data'}; {HINT}"
    )


def _table(path: Path) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(
            f"{path} is not a Parquet file, or is cut short: {str(error).splitlines()[0]}"
        ) from None
    if table.num_rows == 0:
        raise DataError(f"{path} holds no rows; leave the file out")
    return table


def _column(path: Path, table: Any, known: Sequence[str]) -> str:
    for name in known:
        if name in table.column_names:
            return name
    raise DataError(
        f"{path} has no column {' or '.join(known)}; its columns are"
        f" {', '.join(table.column_names)}"
    )


def _samples(
    paths: Sequence[Path], tables: Sequence[Any], image: str, label: str, mode: str
) -> Samples:
    pictures: list[npt.NDArray[np.uint8]] = []
    labels = []
    for path, table in zip(paths, tables, strict=True):
        labels.append(_labels(path, table, label))
        _column(path, table, (image,))
        for row, content in enumerate(_contents(table[image])):
            picture = _picture(path, row, content, mode)
            if pictures and picture.shape != pictures[0].shape:
                raise DataError(
                    f"{path} row {row}: a picture of {picture.shape}, others are of"
                    f" {pictures[0].shape}; bring them to one size"
                )
            pictures.append(picture)
    return Samples(torch.from_numpy(np.stack(pictures)), torch.cat(labels))


def _labels(path: Path, table: Any, label: str) -> Tensor:
    _column(path, table, (label,))
    values = table[label].to_pylist()
    for row, value in enumerate(values):
        if type(value) is not int:
            raise DataError(
                f"{path} row {row}: {label} is {value!r}; labels must be whole numbers from 0"
            )
    return torch.tensor(values, dtype=torch.int64)


def _contents(column: Any) -> list[bytes | None]:
    """The encoded pictures: of a column of bytes, or of structs with a field `bytes`."""
    values = column.to_pylist()
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


def _mode(path: Path, column: Any) -> str:
    """L or RGB, whichever the first picture is; all are brought to it."""
    mode = _open(path, 0, _contents(column.slice(0, 1))[0]).mode
    if mode not in GREY + COLOUR:
        raise DataError(
            f"{path} row 0: a picture of mode {mode} has no bytes per pixel; convert the set to"
            " 8-bit grey or RGB"
        )
    return "L" if mode in GREY else "RGB"


def _picture(path: Path, row: int, content: bytes | None, mode: str) -> npt.NDArray[np.uint8]:
    try:
        values = np.asarray(_open(path, row, content).convert(mode), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises on damaged pixels
        raise DataError(f"{path} row {row}: the picture cannot be decoded: {error}") from None
    return values if mode == "L" else np.ascontiguousarray(values.transpose(2, 0, 1))


def _open(path: Path, row: int, content: bytes | None) -> Any:
    from PIL import Image

    if not isinstance(content, bytes):
        raise DataError(
            f"{path} row {row}: the picture is not in the file; save the data set with its pictures"
            " embedded"
        )
    try:
        return Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP", "BMP"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} row {row}: the picture cannot be decoded: {error}") from None


def _declared_classes(table: Any, label: str) -> int | None:
    """How many names the label has in the metadata that Hugging Face writes, if it wrote any."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return len(features[label]["names"]) or None
    except (KeyError, TypeError, ValueError):
        return None


def _further(tables: Sequence[Any], used: Sequence[str]) -> dict[str, Tensor]:
    """Further columns of whole numbers or texts; distinct values are numbered in ascending
    order.
    """
    columns = {}
    for name in tables[0].column_names:
        if name in used or not all(name in table.column_names for table in tables):
            continue
        values = [value for table in tables for value in table[name].to_pylist()]
        if {type(value) for value in values} in ({int}, {str}):
            number = {value: k for k, value in enumerate(sorted(set(values)))}
            columns[name] = torch.tensor([number[value] for value in values], dtype=torch.int64)
    return columns
