"""The safetensors format: the length of a JSON head in 8 bytes, the head, then the values one after
another. All that is read or written in it by this package goes through here: run folders, stores of
deployments, and models on their way.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedbcd.errors import RecordError

LENGTH_BYTES = 8  # before the head
MOST_HEAD_BYTES = 100_000_000  # the limit of the format
COMPACT = (",", ":")
Piece = bytes | memoryview

_DTYPES = (  # as jobs and logs call them, as the format does, and as torch does
    ("float64", "F64", torch.float64),
    ("float32", "F32", torch.float32),
    ("float16", "F16", torch.float16),
    ("bfloat16", "BF16", torch.bfloat16),
    ("int64", "I64", torch.int64),
    ("int32", "I32", torch.int32),
)
FLOATS = {name: dtype for name, _, dtype in _DTYPES if dtype.is_floating_point}
DTYPES = {code: dtype for _, code, dtype in _DTYPES}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Blocks(Protocol):
    """A large tensor that is read a few rows at a time."""

    shape: tuple[int, int]
    dtype: torch.dtype

    def blocks(self) -> Iterator[Tensor]: ...


def file_head(
    tensors: Mapping[str, Tensor | Blocks],
    metadata: Mapping[str, str] | None = None,
    separators: tuple[str, str] = COMPACT,
) -> bytes:
    """How a file with these tensors begins, padded to a multiple of 8 bytes."""
    head: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        head[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(head, separators=separators).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def values_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in memory, of which no copy is made."""
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def digest_of(tables: Iterable[tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]]) -> str:
    """A hash of tables of models, bit for bit: dtype and shape of each, then its rows."""
    digest = hashlib.sha256()
    for dtype, shape, blocks in tables:
        digest.update(repr((str(dtype), shape)).encode())
        for block in blocks:
            digest.update(values_of(block.cpu()))
    return digest.hexdigest()


def sole_tensor(head: bytes) -> tuple[str, Any, Any, Any, Any]:
    """Name, dtype, shape, begin and end of the one tensor that a head declares, none of them
    checked. Raises ValueError, TypeError, KeyError, AttributeError or RecursionError where it does
    not.
    """
    ((name, entry),) = json.loads(head).items()
    begin, end = entry["data_offsets"]
    return name, entry["dtype"], entry["shape"], begin, end


# ------------------------------------------------------------------------------------------------
# one tensor in memory
def pack(tensor: Tensor) -> list[Piece]:
    return [_head_of(tuple(tensor.shape), tensor.dtype), values_of(tensor)]


@lru_cache(maxsize=64)
def _head_of(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    return file_head({"tensor": torch.empty(shape, dtype=dtype, device="meta")})


def unpack(data: bytearray) -> Tensor:
    """The tensor of such a file; it lives in the memory that was read."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    _, code, lengths, begin, end = sole_tensor(bytes(data[LENGTH_BYTES:start]))
    if begin != 0 or start + end != len(data):
        raise ValueError("it is not as long as it says")
    dtype, shape = DTYPES[code], [int(length) for length in lengths]
    values = (
        torch.frombuffer(data, dtype=dtype, offset=start)
        if len(data) > start
        else torch.empty(0, dtype=dtype)
    )
    return values.reshape(shape)


# ------------------------------------------------------------------------------------------------
# files
def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Blocks], metadata: dict[str, str]
) -> None:
    """Write a file so that a crash leaves the old one or the new one, whole."""
    at_once = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }
    in_blocks = {name: blocks for name, blocks in tensors.items() if not isinstance(blocks, Tensor)}
    write_whole(
        path,
        _in_pieces({**at_once, **in_blocks}, metadata) if in_blocks else (save(at_once, metadata),),
    )


def _in_pieces(tensors: Mapping[str, Tensor | Blocks], metadata: dict[str, str]) -> Iterator[Piece]:
    yield file_head(tensors, metadata, separators=(", ", ": "))
    for tensor in tensors.values():
        for block in (tensor,) if isinstance(tensor, Tensor) else tensor.blocks():
            yield values_of(block.detach().cpu())


def write_whole(path: Path, data: bytes | Iterable[Piece]) -> None:
    """Write a file so that a crash leaves the old one or the new one, whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for piece in (data,) if isinstance(data, bytes) else data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file, to take tensors from. Raises OSError, or ValueError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file whole; a damaged one is refused."""
    try:
        with opened(path) as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} is missing or damaged ({error}); restore it, or remove it to start over"
        ) from None


def read_head(path: Path) -> dict[str, Any]:
    """Names, shapes and metadata of a file, without its values. Raises OSError, ValueError or
    RecursionError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        head = json.loads(file.read(length)) if 0 < length <= MOST_HEAD_BYTES else None
    if not isinstance(head, dict):
        raise ValueError("its head is no object")
    return head
