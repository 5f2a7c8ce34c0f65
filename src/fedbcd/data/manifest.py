"""Manifests: who owns which samples of which data set, as JSON that another machine can check and
use.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedbcd.errors import DataError

FORMAT = "fedbcd partition 1"


def hash_of_targets(targets: Tensor) -> str:
    """By which a data set is known again: SHA-256 of its labels, in order, as 64-bit little-endian
    integers.
    """
    return hashlib.sha256(targets.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def hash_of_indices(samples: Sequence[npt.NDArray[np.int64]]) -> str:
    """By which a split is known again: SHA-256 of each device's number of samples and positions, as
    64-bit little-endian integers.
    """
    digest = hashlib.sha256()
    for positions in samples:
        digest.update(
            np.array([len(positions)], "<i8").tobytes() + positions.astype("<i8").tobytes()
        )
    return digest.hexdigest()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` with its hash, one device per line; the file appears whole or not at all."""
    whole = {"format": FORMAT, **content}
    whole = {"format": FORMAT, "sha256": _seal(whole), **content}
    head = [
        f"{json.dumps(key)}: {json.dumps(value)},"
        for key, value in whole.items()
        if key != "devices"
    ]
    devices = ",\n".join(json.dumps(device) for device in whole["devices"])
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(
            "\n".join(["{", *head, '"devices": [', devices, "]}", ""]), encoding="utf-8"
        )
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; choose another place") from None


def read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is not a manifest, or is cut short: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest: its format is not {FORMAT!r}")
    seal = table.pop("sha256", None)
    if seal != _seal(table):
        raise DataError(
            f"{path} was edited or damaged: its content does not match its sha256; make the split"
            " again, or restore the file"
        )
    return table


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
