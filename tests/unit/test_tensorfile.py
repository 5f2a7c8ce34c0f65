"""Files of tensors: the same bytes as ever, on disk and on the wire; whole after a crash; refused
by name where they are damaged.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from fedbcd.engines.deploy.links.codec import encode
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Uploaded
from fedbcd.record.tensorfile import (
    CODES,
    DTYPES,
    FLOATS,
    pack,
    read_head,
    read_tensors,
    unpack,
    write_tensors,
)


class Rows:
    """A tensor of four rows that is never in memory whole."""

    shape = (4, 2)
    dtype = torch.bfloat16

    def blocks(self) -> Iterator[torch.Tensor]:
        for k in range(4):
            yield torch.full((1, 2), float(k), dtype=self.dtype)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_the_bytes_on_disk_and_on_the_wire_are_those_of_0_1_0(tmp_path: Path) -> None:
    x, path = torch.arange(6, dtype=torch.float64).reshape(2, 3), tmp_path / "a.safetensors"
    assert _sha(b"".join(pack(x))) == "20ef7516be339d94"
    assert _sha(b"".join(pack(torch.empty(0)))) == "cabdb60fc6b14ef6"
    said = Uploaded(device=7, activation=2, model="x/7/2")
    frames = encode(Letter("device/7", "server/0", said, torch.arange(5.0), 0.5), 3)
    assert _sha(b"".join(f.SerializeToString() for f in frames)) == "af418ced7b9b9e55"
    notes = {"note": "Grüße", "a": "1"}
    write_tensors(path, {"x": Rows(), "z": x, "n": torch.tensor([3])}, notes)
    assert _sha(path.read_bytes()) == "1d92967f2d9f0548"
    assert read_head(path)["__metadata__"] == notes
    assert torch.equal(read_tensors(path)[0]["x"][:, 0], torch.arange(4).bfloat16())
    write_tensors(path, {"z": x, "n": torch.tensor([3])}, {"note": "Grüße"})
    assert _sha(path.read_bytes()) == "78e09dd8b3982072"


@pytest.mark.parametrize("dtype", CODES, ids=CODES.values())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_a_packed_tensor_is_a_file_of_the_format_and_comes_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    data = b"".join(pack(tensor))
    assert torch.equal(unpack(bytearray(data)), tensor)
    assert torch.equal(load(data)["tensor"], tensor)
    assert unpack(bytearray(data)).dtype == dtype
    assert list(FLOATS.values()) == [d for d in DTYPES.values() if d.is_floating_point]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
    ],
)
def test_a_packed_tensor_whose_head_lies_is_refused(entry: dict[str, object]) -> None:
    head = json.dumps({"tensor": entry}).encode()
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
        unpack(bytearray(len(head).to_bytes(8, "little") + head + bytes(8)))


def some_tensors() -> dict[str, torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    return {
        "x": x,
        "view": x[:, 1],
        "z": torch.tensor([math.nan, math.inf], dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors, metadata = read_tensors(path)
    assert metadata == {"note": "Grüße"}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_tensors_survive_being_written(tmp_path: Path) -> None:
    path = tmp_path / "models.safetensors"
    write_tensors(path, some_tensors(), {"note": "Grüße"})
    assert_holds(path, some_tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["models.safetensors"], (
        "no temporary file stays behind"
    )


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "models.safetensors"
    write_tensors(path, some_tensors(), {"note": "Grüße"})

    def crash(*_: object) -> None:
        raise OSError("power cut")

    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", crash)
    else:
        monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        write_tensors(path, {"x": torch.zeros(3)}, {})
    monkeypatch.undo()
    assert_holds(path, some_tensors())


def test_a_new_file_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "models.safetensors"
    write_tensors(path, {"x": torch.zeros(100)}, {})
    write_tensors(path, some_tensors(), {"note": "Grüße"})
    assert_holds(path, some_tensors())


def test_a_tensor_file_cut_at_any_byte_is_refused_by_name(tmp_path: Path) -> None:
    whole = save(some_tensors() | {"view": torch.ones(2)}, {"note": "Grüße"})
    path = tmp_path / "cut.safetensors"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(RecordError, match=r"cut.safetensors is missing or damaged"):
            read_tensors(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, this is not a file of tensors", b"\xff" * 64, b"PK\x03\x04" + b"\x00" * 60],
)
def test_a_foreign_tensor_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"foreign.safetensors is missing or damaged"):
        read_tensors(path)


def test_a_missing_tensor_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.safetensors", tmp_path):
        with pytest.raises(RecordError, match="is missing or damaged"):
            read_tensors(path)
