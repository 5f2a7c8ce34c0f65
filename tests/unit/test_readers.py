"""Readers, on small files generated in each format; every refusal names the file."""

import builtins
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbcd.data.cifar import ROW, read_batch
from fedbcd.data.datasets import DATASETS, load_dataset
from fedbcd.data.idx import EMNIST_CLASSES, MNIST_FILES, emnist_files
from fedbcd.data.samples import LoadedDataset
from fedbcd.errors import DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"
HOMES = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "kmnist": "KMNIST/raw"}


def idx(values: np.ndarray) -> bytes:
    """An IDX file, as its definition says."""
    head = bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.astype(np.uint8).tobytes()


def images(count: int, start: int = 0) -> np.ndarray:
    """Pictures of 4 x 3 pixels; picture k is filled with start + k, but for its corner (0, 2),
    which is 200.
    """
    values = np.broadcast_to((start + np.arange(count))[:, None, None], (count, 4, 3)).copy()
    values[:, 0, 2] = 200
    return values


def write_idx(
    folder: Path, files: tuple[str, ...] = MNIST_FILES, first: int = 0, zipped: bool = False
) -> Path:
    """Twelve pictures to train on and five to test on, with labels first .. first + 9 in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = (images(12), first + np.arange(12) % 10, images(5, 50), first + np.arange(5))
    for name, values in zip(files, contents, strict=True):
        raw = idx(values)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(raw) if zipped else raw
        )
    return folder


def write_cifar(folder: Path, rows: int = 4) -> Path:
    """Batches of a few rows; in each row the label is its number, and the planes are 10, 20 and
    30.
    """
    folder.mkdir(parents=True, exist_ok=True)
    row = np.repeat(np.array([10, 20, 30], np.uint8), 1024)
    batch = np.stack([np.concatenate([np.array([k % 10], np.uint8), row]) for k in range(rows)])
    for name in (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"):
        batch.tofile(folder / name)
    return folder


def refusal(load: Callable[[], LoadedDataset]) -> str:
    with pytest.raises(DataError) as caught:
        load()
    return str(caught.value)


# ------------------------------------------------------------------------------------------------
# IDX
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", HOMES)
@pytest.mark.parametrize("place", ["", "own", "raw"])
def test_mnist_and_its_kin_are_read_from_every_layout(
    name: str, place: str, zipped: bool, tmp_path: Path
) -> None:
    write_idx(tmp_path / {"": "", "own": name, "raw": HOMES[name]}[place], zipped=zipped)
    data = load_dataset(name, tmp_path)
    assert (data.train.inputs.dtype, tuple(data.train.inputs.shape), data.classes) == (
        torch.uint8,
        (12, 4, 3),
        10,
    )
    assert data.train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test.inputs[2, 1, 1] == 52
    assert data.train.targets.dtype == torch.int64


def test_mnist_is_normalised_by_its_own_mean_and_deviation_and_the_others_to_one_around_zero(
    tmp_path: Path,
) -> None:
    write_idx(tmp_path)
    batch = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert load_dataset("mnist", tmp_path).transform(batch, torch.float64).tolist() == [
        [-0.1307 / 0.3081, (1 - 0.1307) / 0.3081]
    ]
    assert load_dataset("kmnist", tmp_path).transform(batch, torch.float64).tolist() == [
        [-1.0, 1.0]
    ]


def test_its_own_folder_goes_before_files_of_the_same_name_beside_it(tmp_path: Path) -> None:
    write_idx(tmp_path)
    own = write_idx(tmp_path / "FashionMNIST" / "raw")
    (own / MNIST_FILES[1]).write_bytes(idx(np.full(12, 7)))
    assert load_dataset("fashion-mnist", tmp_path).train.targets.unique().tolist() == [7]
    assert load_dataset("mnist", tmp_path).train.targets[3] == 3


@pytest.mark.parametrize("split", EMNIST_CLASSES)
def test_emnist_is_turned_upright_and_its_labels_count_from_zero(
    split: str, tmp_path: Path
) -> None:
    """EMNIST stores columns as rows; "letters" numbers its classes from 1."""
    write_idx(
        tmp_path / "EMNIST" / "raw", emnist_files(split), first=int(split == "letters"), zipped=True
    )
    data = load_dataset("emnist" if split == "balanced" else f"emnist-{split}", tmp_path)
    assert tuple(data.train.inputs.shape) == (12, 3, 4)
    assert data.train.inputs[5, 2, 0] == 200
    assert data.train.inputs.is_contiguous()
    assert data.train.targets.tolist()[:3] == [0, 1, 2]
    assert data.classes == EMNIST_CLASSES[split]


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path)
    monkeypatch.setenv("FEDBCD_DATA", str(tmp_path))
    assert len(load_dataset("mnist").train) == 12
    monkeypatch.delenv("FEDBCD_DATA")
    assert "--data DIR or FEDBCD_DATA=DIR; get it with: fedbcd data fetch mnist" in refusal(
        lambda: load_dataset("mnist")
    )


def test_a_missing_set_names_the_files_the_folders_and_the_remedy(tmp_path: Path) -> None:
    said = refusal(lambda: load_dataset("kmnist", tmp_path))
    for part in (
        *MNIST_FILES,
        ".gz",
        str(tmp_path / "KMNIST" / "raw"),
        f"fedbcd data fetch kmnist --data {tmp_path}",
    ):
        assert part in said


def test_a_file_that_is_missing_among_others_is_named(tmp_path: Path) -> None:
    (write_idx(tmp_path / "MNIST" / "raw") / MNIST_FILES[2]).unlink()
    assert f"{tmp_path / 'MNIST' / 'raw'} lacks {MNIST_FILES[2]};" in refusal(
        lambda: load_dataset("mnist", tmp_path)
    )


def test_files_of_two_folders_are_not_mixed(tmp_path: Path) -> None:
    (write_idx(tmp_path / "MNIST" / "raw") / MNIST_FILES[2]).unlink()
    (write_idx(tmp_path) / MNIST_FILES[0]).unlink()
    assert "was not found" in refusal(lambda: load_dataset("mnist", tmp_path))


DAMAGES: dict[str, tuple[int, Callable[[bytes], bytes], str]] = {
    "truncated": (0, lambda raw: raw[:-1], "announces shape (12, 4, 3) but holds 143 values"),
    "longer than announced": (
        0,
        lambda raw: raw + b"\0",
        "announces shape (12, 4, 3) but holds 145 values",
    ),
    "cut within its header": (
        2,
        lambda raw: raw[:9],
        "ends within its header, after 9 of 16 bytes",
    ),
    "empty": (1, lambda raw: b"", "starts with , expected 00000801"),
    "wrong magic": (
        0,
        lambda raw: b"\x00\x00\x0d\x03" + raw[4:],
        "starts with 00000d03, expected 00000803",
    ),
    "labels in place of images": (
        0,
        lambda raw: idx(np.arange(12)),
        "starts with 00000801, expected 00000803",
    ),
    "a web page": (3, lambda raw: b"<!DOCTYPE html>", "starts with 3c21444f"),
    "label outside the classes": (
        1,
        lambda raw: raw[:-1] + b"\x0a",
        "has label 10 at sample 11; the 10 classes are numbered 0 to 9",
    ),
    "one label too few": (
        1,
        lambda raw: idx(np.arange(11) % 10),
        "11 labels; they do not belong together",
    ),
    "gz cut short": (0, lambda raw: gzip.compress(raw)[:-9], "cannot be unpacked"),
    "gz damaged": (
        0,
        lambda raw: gzip.compress(raw)[:20] + b"\xff" * 9 + gzip.compress(raw)[29:],
        "cannot be unpacked",
    ),
    "a shape beyond all bounds": (
        0,
        lambda raw: raw[:4] + b"\xff" * 12 + raw[16:],
        "announces shape (4294967295, 4294967295, 4294967295)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_idx_files_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    number, change, sentence = DAMAGES[damage]
    path = write_idx(tmp_path) / MNIST_FILES[number]
    path.write_bytes(change(path.read_bytes()))
    said = refusal(lambda: load_dataset("mnist", tmp_path))
    assert str(path) in said
    assert sentence in said


def test_a_gz_that_was_unpacked_but_not_renamed_is_read(tmp_path: Path) -> None:
    for path in list(write_idx(tmp_path).iterdir()):
        path.rename(path.with_name(path.name + ".gz"))
    assert len(load_dataset("mnist", tmp_path).train) == 12


def test_test_pictures_of_another_shape_and_empty_sets_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / MNIST_FILES[2]).write_bytes(idx(np.zeros((5, 4, 4))))
    assert f"{tmp_path / MNIST_FILES[2]} has inputs of shape (4, 4)" in refusal(
        lambda: load_dataset("mnist", tmp_path)
    )
    (tmp_path / MNIST_FILES[2]).write_bytes(idx(np.zeros((0, 4, 3))))
    (tmp_path / MNIST_FILES[3]).write_bytes(idx(np.zeros(0)))
    assert f"{tmp_path / MNIST_FILES[2]} holds no samples" in refusal(
        lambda: load_dataset("mnist", tmp_path)
    )


# ------------------------------------------------------------------------------------------------
# CIFAR
@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar_batches_are_read_as_planes(place: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / place)
    data = load_dataset("cifar10", tmp_path)
    assert (tuple(data.train.inputs.shape), data.train.inputs.dtype) == (
        (20, 3, 32, 32),
        torch.uint8,
    )
    assert data.train.inputs[7, :, 31, 0].tolist() == [10, 20, 30]
    assert data.train.targets.tolist() == [0, 1, 2, 3] * 5
    assert len(data.test) == 4
    assert data.transform(torch.tensor([0, 255], dtype=torch.uint8), torch.float64).tolist() == [
        -1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda raw: raw[:-1], "not a whole number of rows of 3073"),
        (lambda raw: raw[:-ROW], "holds 3 pictures, but data_batch_1.bin 4"),
        (lambda raw: bytes([10]) + raw[1:], "has label 10 at sample 0"),
    ],
    ids=["truncated", "a row missing", "mislabelled"],
)
def test_damaged_cifar_batches_are_refused_by_name(
    change: Callable[[bytes], bytes], sentence: str, tmp_path: Path
) -> None:
    path = write_cifar(tmp_path) / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    said = refusal(lambda: load_dataset("cifar10", tmp_path))
    assert str(path) in said
    assert sentence in said


def test_missing_and_empty_cifar_batches_are_named(tmp_path: Path) -> None:
    path = write_cifar(tmp_path) / "test_batch.bin"
    path.write_bytes(b"")
    assert f"{path} holds no samples" in refusal(lambda: load_dataset("cifar10", tmp_path))
    path.unlink()
    said = refusal(lambda: load_dataset("cifar10", tmp_path))
    assert f"{tmp_path} lacks test_batch.bin" in said
    assert "fedbcd data fetch cifar10" in said


# ------------------------------------------------------------------------------------------------
# Parquet
def encoded(
    value: int | tuple[int, int, int],
    size: tuple[int, int] = (5, 4),
    mode: str = "L",
    form: str = "PNG",
) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, size, value).save(file, form)
    return file.getvalue()


def write_parquet(path: Path, columns: dict[str, list[Any]], names: int | None = None) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(columns)
    if names is not None:
        features = {"label": {"names": [str(k) for k in range(names)], "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)
    return path


def grey(count: int, start: int = 0) -> dict[str, list[Any]]:
    return {
        "image": [{"bytes": encoded(start + k), "path": f"{k}.png"} for k in range(count)],
        "label": [k % 3 for k in range(count)],
    }


@pytest.mark.parametrize("place", ["", "data"])
def test_parquet_in_the_layout_of_the_hub_is_read(place: str, tmp_path: Path) -> None:
    write_parquet(
        tmp_path / place / "train-00000-of-00002.parquet",
        grey(6) | {"writer": ["b", "a", "b", "c", "a", "b"]},
        names=4,
    )
    write_parquet(
        tmp_path / place / "train-00001-of-00002.parquet",
        grey(2, 6) | {"writer": ["c", "c"]},
        names=4,
    )
    write_parquet(tmp_path / place / "test-00000-of-00001.parquet", grey(3, 90), names=4)
    data = load_dataset("parquet", tmp_path)
    assert (tuple(data.train.inputs.shape), data.train.inputs.dtype, data.classes) == (
        (8, 4, 5),
        torch.uint8,
        4,
    )
    assert data.train.inputs[:, 3, 4].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert data.train.targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert {name: column.tolist() for name, column in data.columns.items()} == {
        "writer": [1, 0, 1, 2, 0, 1, 2, 2]
    }
    assert data.test.inputs[1, 0, 0] == 91


def test_parquet_in_colour_may_be_jpeg_and_its_columns_img_and_fine_label(tmp_path: Path) -> None:
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    columns = {
        "img": [{"bytes": encoded(c, mode="RGB", form="JPEG"), "path": None} for c in colours],
        "fine_label": [0, 1, 2],
        "coarse_label": [4, 9, 4],
    }
    write_parquet(tmp_path / "train-0.parquet", columns)
    write_parquet(tmp_path / "test-0.parquet", columns)
    data = load_dataset("parquet", tmp_path)
    assert tuple(data.train.inputs.shape) == (3, 3, 4, 5)
    assert data.train.inputs[:, :, 2, 2].argmax(1).tolist() == [0, 1, 2]
    assert data.classes == 3
    assert data.columns["coarse_label"].tolist() == [0, 1, 0]


def test_palette_pictures_and_plain_columns_of_bytes_are_read(tmp_path: Path) -> None:
    columns = {"image": [encoded(1, mode="P"), encoded((1, 2, 3), mode="RGB")], "label": [0, 1]}
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}-0.parquet", columns)
    data = load_dataset("parquet", tmp_path)
    assert tuple(data.train.inputs.shape) == (2, 3, 4, 5)
    assert data.train.inputs[1, :, 0, 0].tolist() == [1, 2, 3]


PARQUET_DAMAGES: dict[str, tuple[dict[str, list[Any]], str]] = {
    "label outside the classes": (
        grey(3) | {"label": [0, 1, 4]},
        "has label 4 at sample 2; the 4 classes are numbered 0 to 3",
    ),
    "unlabelled": (grey(3) | {"label": [0, -1, 1]}, "has label -1 at sample 1"),
    "no label": (grey(3) | {"label": [0, None, 1]}, "row 1: label is None"),
    "labels of text": (grey(3) | {"label": ["a", "b", "c"]}, "row 0: label is 'a'"),
    "no image column": (
        {"picture": [1], "label": [0]},
        "has no column image; its columns are picture, label",
    ),
    "no label column": ({"image": grey(1)["image"]}, "has no column label"),
    "another size": (
        grey(2) | {"image": [{"bytes": encoded(1)}, {"bytes": encoded(1, (6, 4))}]},
        "row 1: a picture of (4, 6), others are of (4, 5)",
    ),
    "no picture": (
        grey(1) | {"image": [{"bytes": encoded(1)[:40]}]},
        "row 0: the picture cannot be decoded",
    ),
    "picture cut short": (
        grey(1) | {"image": [{"bytes": encoded(1)[:-30]}]},
        "row 0: the picture cannot be decoded",
    ),
    "picture elsewhere": (
        {"image": [{"bytes": None, "path": "a.png"}], "label": [0]},
        "row 0: the picture is not in the file",
    ),
    "no rows": ({"image": [], "label": []}, "holds no rows"),
}


@pytest.mark.parametrize("damage", PARQUET_DAMAGES)
def test_damaged_parquet_files_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    columns, sentence = PARQUET_DAMAGES[damage]
    write_parquet(tmp_path / "train-0.parquet", grey(6), names=4)
    path = write_parquet(tmp_path / "test-0.parquet", columns, names=4)
    said = refusal(lambda: load_dataset("parquet", tmp_path))
    assert str(path) in said
    assert sentence in said


def test_truncated_parquet_and_wrong_magic_are_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train-0.parquet", grey(6))
    write_parquet(tmp_path / "test-0.parquet", grey(2))
    whole = path.read_bytes()
    for raw in (whole[:-20], b"XXXX" + whole[4:-4] + b"XXXX", b""):
        path.write_bytes(raw)
        assert f"{path} is not a Parquet file, or is cut short" in refusal(
            lambda: load_dataset("parquet", tmp_path)
        )


def test_pictures_of_more_than_a_byte_per_pixel_are_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(
            tmp_path / f"{part}-0.parquet", {"image": [encoded(1, mode="I;16")], "label": [0]}
        )
    assert "convert the set to 8-bit grey or RGB" in refusal(
        lambda: load_dataset("parquet", tmp_path)
    )


def test_missing_parquet_files_and_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "train-0.parquet", grey(2))
    said = refusal(lambda: load_dataset("parquet", tmp_path))
    assert f"looked for test-*.parquet in {tmp_path}, {tmp_path / 'data'}" in said
    monkeypatch.delenv("FEDBCD_DATA", raising=False)
    assert "Hugging Face Hub" in refusal(lambda: load_dataset("parquet"))


@pytest.mark.parametrize("library", ["pyarrow", "PIL"])
def test_without_the_library_a_sentence_says_what_to_install(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}-0.parquet", grey(2))
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'fedbcd[parquet]'" in refusal(lambda: load_dataset("parquet", tmp_path))


# ------------------------------------------------------------------------------------------------
# all of them
def test_an_unknown_set_is_refused_with_the_nearest_name() -> None:
    assert "did you mean 'fashion-mnist'?" in refusal(lambda: load_dataset("fashon-mnist"))


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_says_what_it_is(name: str) -> None:
    assert len((DATASETS[name].__doc__ or "").splitlines()[0]) > 20


def test_no_reader_can_unpickle() -> None:
    """Nothing on disk is trusted: no reader imports pickle, calls torch.load or lets NumPy
    unpickle.
    """
    for path in sorted((Path(__file__).parents[2] / "src" / "fedbcd" / "data").glob("*.py")):
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path


@pytest.mark.skipif(not (SHARED / "mnist").is_dir(), reason="the real MNIST is not here")
def test_the_real_mnist() -> None:
    data = load_dataset("mnist", SHARED)
    assert (tuple(data.train.inputs.shape), len(data.test)) == ((60_000, 28, 28), 10_000)
    assert torch.bincount(data.train.targets).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    pixels = data.transform(data.train.inputs[:20_000], torch.float32)
    assert abs(float(pixels.mean())) < 0.01
    assert abs(float(pixels.std()) - 1) < 0.01


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="the real CIFAR-10 is not here")
def test_one_batch_of_the_real_cifar(tmp_path: Path) -> None:
    """The first hundred pictures of the set at hand, written as a batch and read again."""
    from PIL import Image

    with np.load(SHARED / "cifar10" / "cifar10-jpeg.npz", allow_pickle=False) as archive:
        jpeg, ends, labels = (
            archive["train_jpeg"],
            archive["train_offsets"],
            archive["train_labels"][:100],
        )
    pictures = [
        np.asarray(Image.open(io.BytesIO(jpeg[ends[k] : ends[k + 1]].tobytes())).convert("RGB"))
        for k in range(100)
    ]
    rows = [
        bytes([label]) + picture.transpose(2, 0, 1).tobytes()
        for label, picture in zip(labels, pictures, strict=True)
    ]
    (tmp_path / "data_batch_1.bin").write_bytes(b"".join(rows))
    batch = read_batch(tmp_path / "data_batch_1.bin")
    assert batch.targets.tolist() == labels.tolist()
    assert torch.equal(batch.inputs.permute(0, 2, 3, 1), torch.from_numpy(np.stack(pictures)))
