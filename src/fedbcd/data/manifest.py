"""A partition: which device owns which samples of a pool; and its manifest, JSON that another
machine can check and use.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.errors import DataError

FORMAT = "fedbcd partition 1"
Positions = npt.NDArray[np.int64]
Labels = tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """How a partition was made and of which data: what its manifest records besides the indices."""

    partitioner: Mapping[str, Any]
    seed: int | None
    targets: int
    targets_sha256: str


@dataclass(frozen=True)
class Partition:
    """For each device: positions of its training samples, and the labels it owns (by which its
    personal test set is chosen).
    """

    samples: tuple[Positions, ...]
    labels: tuple[Labels, ...]
    origin: Origin | None = field(default=None, compare=False)

    def of_devices(self, who: slice) -> "Partition":
        """The part of some of its devices."""
        return replace(self, samples=self.samples[who], labels=self.labels[who])

    @classmethod
    def of(
        cls,
        targets: Tensor,
        samples: Sequence[Positions],
        labels: Sequence[Labels] | None = None,
        *,
        partitioner: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> "Partition":
        """A partition of the data set with these targets; a device owns the labels of its samples
        unless `labels` says otherwise.
        """
        owned = tuple(np.asarray(positions, dtype=np.int64) for positions in samples)
        _check_positions(owned, len(targets))
        names = (
            [labels_of(targets[torch.from_numpy(positions)]) for positions in owned]
            if labels is None
            else labels
        )
        origin = Origin(
            partitioner or {"name": "given"}, seed, len(targets), hash_of_targets(targets)
        )
        return cls(owned, tuple(names), origin)

    def counts(self, targets: Tensor, classes: int | None = None) -> npt.NDArray[np.int64]:
        labels, width = targets.numpy(), classes or int(targets.max()) + 1
        return np.stack(
            [np.bincount(labels[positions], minlength=width) for positions in self.samples]
        )

    def save(self, path: Path | str) -> None:
        """Write the manifest: device -> indices and labels, how it was made, and hashes of the
        targets, the indices and all of it.
        """
        if self.origin is None:
            raise DataError(
                "this partition does not know its data set; make it with a partitioner, or with"
                " Partition.of(targets, samples)"
            )
        made = {"partitioner": dict(self.origin.partitioner), "seed": self.origin.seed}
        hashes = {"targets": self.origin.targets, "targets_sha256": self.origin.targets_sha256}
        devices = [
            {"device": device, "labels": list(labels), "indices": positions.tolist()}
            for device, (positions, labels) in enumerate(
                zip(self.samples, self.labels, strict=True)
            )
        ]
        _write(
            Path(path),
            {
                **made,
                **hashes,
                "indices_sha256": hash_of_indices(self.samples),
                "devices": devices,
            },
        )

    @classmethod
    def load(cls, path: Path | str, targets: Tensor) -> "Partition":
        """The split that a manifest describes, if it is of the data set with these labels."""
        table = _read(Path(path))
        mine = hash_of_targets(targets)
        if table.get("targets_sha256") != mine:
            raise DataError(
                f"{path} splits another data set: {table.get('targets')} targets with sha256"
                f" {str(table.get('targets_sha256'))[:12]}, but these are {len(targets)} with"
                f" {mine[:12]}; load the data set that it was made of"
            )
        try:
            samples = tuple(
                np.array(device["indices"], dtype=np.int64) for device in table["devices"]
            )
            labels = tuple(
                tuple(int(label) for label in device["labels"]) for device in table["devices"]
            )
            origin = Origin(table["partitioner"], table["seed"], len(targets), mine)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path} is not a manifest: {error!r}") from None
        if table.get("indices_sha256") != hash_of_indices(samples):
            raise DataError(
                f"{path} was edited or damaged: its indices do not match their sha256; make the"
                " split again, or restore the file"
            )
        _check_positions(samples, len(targets))
        return cls(samples, labels, origin)


def labels_of(targets: Tensor) -> Labels:
    return tuple(int(v) for v in torch.unique(targets))


def _check_positions(samples: Sequence[Positions], count: int) -> None:
    for device, positions in enumerate(samples):
        if len(positions) == 0:
            raise DataError(f"device {device} has no samples; leave it out, or give it data")
        if positions.min() < 0 or positions.max() >= count:
            raise DataError(
                f"device {device} owns a sample outside 0 .. {count - 1}: {positions.min()} .."
                f" {positions.max()}"
            )


# ------------------------------------------------------------------------------------------------
# the file
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


def _write(path: Path, content: Mapping[str, Any]) -> None:
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


def _read(path: Path) -> dict[str, Any]:
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
