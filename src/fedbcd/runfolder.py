"""The folder of a run: what was run, what happened, and how far it is. Nothing is overwritten that is not this run's own.

config.toml          the job as run            history.csv             one row per evaluation
events.jsonl         the event log             models.safetensors      all x_i and z_n at the end
checkpoint.safetensors   where to resume       curves.png              accuracy against rounds and clock
"""

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedbcd.errors import RecordError
from fedbcd.eventlog import LogReader, LogWriter
from fedbcd.history import History, Row


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood between two rounds."""

    round: int
    log_bytes: int
    seconds: float
    digest: str
    history: History
    tensors: Mapping[str, Tensor]


class RunFolder:
    """One run on disk. `identity` is what makes it this run and no other: federation, algorithm, cloud, clock, seed."""

    def __init__(self, path: Path, identity: dict[str, Any], job: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity
        self.header = {"identity": identity, "job": job}
        self.events = path / "events.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"

    def start(self) -> LogWriter:
        """Begin a new run in an empty or new folder."""
        if self.events.exists():
            hint = "resume it with --resume" if self._is_mine() else "it is another run"
            raise RecordError(f"{self.path} holds a run already ({hint}); choose another folder with --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(p.name != "config.toml" for p in self.path.iterdir()):
                raise RecordError(f"{self.path} is not empty; choose a new folder with --out")
            return LogWriter(self.events, self.header)
        except OSError as error:
            raise RecordError(f"cannot write to {self.path}: {error.strerror}; choose another folder with --out") from None

    def resume(self) -> tuple[LogWriter, Checkpoint | None]:
        """Go on with this run: from its last checkpoint, or from the start if it had none."""
        if not self.events.exists():
            return self.start(), None
        if not self._is_mine():
            raise RecordError(
                f"{self.path} holds another run ({self._difference()}); give the same settings to resume it, or another folder"
            )
        if not self.checkpoint.exists():
            self.events.unlink()
            return LogWriter(self.events, self.header), None
        checkpoint = self._read_checkpoint()
        if self.events.stat().st_size < checkpoint.log_bytes:
            raise RecordError(
                f"{self.events} is shorter than when the checkpoint was made ({self.events.stat().st_size} of "
                f"{checkpoint.log_bytes} bytes); restore it, or start again in another folder"
            )
        return LogWriter(self.events, keep=checkpoint.log_bytes), checkpoint

    def _is_mine(self) -> bool:
        return bool(LogReader(self.events).header.get("identity") == json.loads(json.dumps(self.identity)))

    def _difference(self) -> str:
        theirs = _flat(LogReader(self.events).header.get("identity", {}))
        mine = _flat(json.loads(json.dumps(self.identity)))
        changed = [f"{k}: {theirs.get(k)} there, {mine.get(k)} here" for k in sorted(theirs | mine) if theirs.get(k) != mine.get(k)]
        return "; ".join(changed[:3])

    # -------------------------------------------------------------------------------------------------------------- checkpoints
    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint in one step: a crash leaves the old one or the new one."""
        metadata = {
            "fedbcd_checkpoint": "1",
            "round": str(checkpoint.round),
            "log_bytes": str(checkpoint.log_bytes),
            "seconds": repr(checkpoint.seconds),
            "digest": checkpoint.digest,
            "history": json.dumps([astuple(row) for row in checkpoint.history]),
        }
        write_tensors(self.checkpoint, checkpoint.tensors, metadata)

    def _read_checkpoint(self) -> Checkpoint:
        tensors, metadata = read_tensors(self.checkpoint)
        try:
            history = History([Row(*values) for values in json.loads(metadata["history"])])
            numbers = int(metadata["round"]), int(metadata["log_bytes"]), float(metadata["seconds"])
            return Checkpoint(*numbers, metadata["digest"], history, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{self.checkpoint} is not a checkpoint of this version ({error}); remove it to start over") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that a crash leaves the old one or the new one, whole."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file whole; a damaged one is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path} is missing or damaged ({error}); restore it, or remove it to start over") from None


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for key, value in data.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()}
