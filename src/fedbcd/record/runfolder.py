"""The folder of a run: what was run, what happened, and how far it is. Nothing is overwritten that
is not this run's own.

config.toml          the job as run            history.csv             one row per evaluation
devices.csv          scores of each device at the end
events.jsonl         the event log             models.safetensors      all x_i and z_n at the end
checkpoint.safetensors   where to resume       curves.png, personal.png   accuracy against the
clock, and over devices
report.html          what happened, to look at       failure.txt   why it could not go on, if so
best-ROUND.safetensors   the models of the best look, where they are kept (`best`)
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcd.config import dump_toml, read_toml
from fedbcd.describe import flat
from fedbcd.errors import ConfigError, NumericalError, RecordError
from fedbcd.record.eventlog import LogReader, LogWriter, header_line
from fedbcd.record.history import History
from fedbcd.record.names import CHECKPOINT, FAILURE, JOB, LOG
from fedbcd.record.tensorfile import read_tensors, write_tensors, write_whole
from fedbcd.recorded import completed

FINGERPRINTS = ("data", "model")  # parts of the identity that say nothing to a reader
ANOTHER = "choose another folder (--out, in Python out=...)"
GO_ON = "to go on with it: --resume, in Python resume=True"
LOCK_S = 0.2  # how long to try for the lock of a folder


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """What goes wrong with files meanwhile is a sentence about this folder."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write to {folder}: {error.strerror}; {ANOTHER}") from None


def is_at_work(folder: Path) -> bool:
    """Whether a process writes a run into this folder; what it holds is the lock of
    `RunFolder.locked`, or of a growing log.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def lock(folder: Path, patience_s: float = LOCK_S) -> int | None:
    """Lock a folder: a handle to close, or None where somebody else keeps it for longer. Somebody
    who asks `is_at_work` has it for a moment only.
    """
    handle, until = os.open(folder, os.O_RDONLY), time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() > until:
                os.close(handle)
                return None
            time.sleep(0.01)


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood between two rounds."""

    round: int
    log_bytes: int
    seconds: float
    digest: str
    history: History
    tensors: Mapping[str, Any]  # tensors, or `tensorfile.Blocks` to be written
    notes: Mapping[str, str] = field(
        default_factory=dict
    )  # for those who look on: scores of devices and the like; resuming needs none
    engine: str = ""  # that added up sums in an order of its own until here, if one did


class RunFolder:
    """One run on disk. `identity` is what makes it this run and no other: federation, model,
    algorithm, cloud, clock, seed. `functions`: loss and metric, as `data.functions` names them.
    """

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        job: dict[str, Any],
        functions: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.identity = identity
        self.functions = dict(functions or {})
        self.header = {"identity": identity, "job": job, "functions": self.functions}
        try:
            json.dumps(self.header)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"what makes this run cannot be written down: {error}; let kinds of your own be"
                " frozen dataclasses whose fields are numbers, texts and tuples, and `record` plain"
                " data"
            ) from None
        self.events = path / LOG
        self.checkpoint = path / CHECKPOINT

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of this folder; the lock goes with the process, however it
        ends.
        """
        with writing_to(self.path):
            existed = self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            handle = lock(self.path)
        if handle is None:
            raise RecordError(
                f"another process is at work in {self.path}; wait for it, stop it, or {ANOTHER}"
            )
        try:
            yield
        except NumericalError as error:
            with writing_to(self.path):
                write_whole(self.path / FAILURE, f"{error}\n".encode())
            raise
        finally:
            os.close(handle)
            if not existed and not any(self.path.iterdir()):
                self.path.rmdir()  # a refused run leaves nothing behind

    def inspect(self, resume: bool) -> Checkpoint | None:
        """Refuse a folder that is not ours to write; otherwise where to go on, if there is a
        checkpoint. Changes nothing.
        """
        with writing_to(self.path):
            if self.events.exists():
                return self._inspect_run(resume)
            allowed = (
                (JOB, "config.tmp") if resume else ()
            )  # all that a run leaves that is killed before its first event
            if self.path.exists() and any(p.name not in allowed for p in self.path.iterdir()):
                raise RecordError(f"{self.path} is not empty; {ANOTHER}")
        return None

    def _inspect_run(self, resume: bool) -> Checkpoint | None:
        difference = self._difference()
        if not resume:
            hint = "it is another run" if difference else GO_ON
            raise RecordError(f"{self.path} holds a run already ({hint}); {ANOTHER}")
        if difference:
            raise RecordError(
                f"{self.path} holds another run ({difference}); give the same settings to resume"
                " it, or another folder"
            )
        if not self.checkpoint.exists():
            return None
        checkpoint = self._read_checkpoint()
        if self.events.stat().st_size < checkpoint.log_bytes:
            raise RecordError(
                f"{self.events} is shorter than when the checkpoint was made"
                f" ({self.events.stat().st_size} of {checkpoint.log_bytes} bytes); restore it, or"
                " start again in another folder"
            )
        return checkpoint

    def open(self, checkpoint: Checkpoint | None, resume: bool) -> LogWriter:
        """After `inspect`: begin the log, or go on with it from the checkpoint."""
        with writing_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / FAILURE).unlink(missing_ok=True)
            if self.header["job"]:
                write_whole(self.path / JOB, dump_toml(self.header["job"]).encode())
            if checkpoint is not None:
                return LogWriter(self.events, keep=checkpoint.log_bytes)
            if resume:
                self.events.unlink(missing_ok=True)
            return LogWriter(self.events, self.header)

    def _difference(self) -> str:
        """In which settings the run that is there differs from this one; empty if it is this
        one.
        """
        with self.events.open("rb") as file:
            first = file.readline()
        if not first.endswith(b"\n") and header_line(self.header).startswith(first):
            return ""  # killed while it wrote its first line
        header = LogReader(self.events).header
        others = _other_functions(header.get("functions"), self.functions)
        return difference(header.get("identity", {}), self.identity) or others

    # ---------------------------------------------------------------------------------------------
    # checkpoints
    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint in one step: a crash leaves the old one or the new one."""
        metadata = {
            **checkpoint.notes,
            "fedbcd_checkpoint": "1",
            "identity": self._fingerprint(),
            "round": str(checkpoint.round),
            "log_bytes": str(checkpoint.log_bytes),
            "seconds": repr(checkpoint.seconds),
            "digest": checkpoint.digest,
            "history": json.dumps(checkpoint.history.plain()),
            "engine": checkpoint.engine,
        }
        write_tensors(self.checkpoint, checkpoint.tensors, metadata)

    def _read_checkpoint(self) -> Checkpoint:
        tensors, metadata = read_tensors(self.checkpoint)
        if metadata.get("identity") != self._fingerprint():
            raise RecordError(
                f"{self.checkpoint} is not a checkpoint of this run; restore the right one, or"
                " remove it to start over"
            )
        try:
            history = History.of_plain(json.loads(metadata["history"])).known_by(metadata)
            numbers = int(metadata["round"]), int(metadata["log_bytes"]), float(metadata["seconds"])
            return Checkpoint(
                *numbers, metadata["digest"], history, tensors, engine=metadata.get("engine", "")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"{self.checkpoint} is not a checkpoint of this version ({error}); remove it to"
                " start over"
            ) from None

    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


def recorded_in(folder: Path) -> dict[str, Any]:
    """What the run in a folder was set to, by its log, or by its config.toml where the log was not
    begun; empty where there is neither.
    """
    log, config = folder / LOG, folder / JOB
    try:
        with log.open("rb") as file:
            begun = file.readline().endswith(b"\n")
    except FileNotFoundError:
        begun = False
    if begun:
        identity = LogReader(log).header.get("identity")
        return identity if isinstance(identity, dict) else {}
    return read_toml(config) if config.is_file() else {}


def difference(there: Any, here: Any) -> str:
    """In which settings two identities differ, three of them at most; empty if they are the
    same.
    """
    theirs, mine = (
        flat(_spelled_out(identity)) for identity in (there, json.loads(json.dumps(here)))
    )
    changed = [
        key
        for key in sorted(theirs | mine, key=lambda k: (k in FINGERPRINTS, k))
        if theirs.get(key) != mine.get(key)
    ]
    return "; ".join(_compared(key, theirs.get(key), mine.get(key)) for key in changed[:3])


def _other_functions(there: Any, here: Mapping[str, str]) -> str:
    """Of which kinds others are given than a record names; records of old name none. Functions that
    answer alike are the same under any name.
    """
    known = there if isinstance(there, dict) else {}
    found = []
    for kind, mine in here.items():
        theirs = str(known.get(kind, mine))
        answers = [text.partition(" ")[2] for text in (theirs, mine)]
        same = answers[0] == answers[1] if all(answers) else theirs == mine
        found += (
            [] if same else [f"another {kind}: {theirs} there, {mine} here (what a probe gives)"]
        )
    return "; ".join(found)


def _spelled_out(identity: Any) -> Any:
    spelled = isinstance(identity, dict) and isinstance(identity.get("algorithm"), dict)
    return (
        completed(identity, "run") | {"algorithm": completed(identity["algorithm"])}
        if spelled
        else identity
    )


def _compared(key: str, theirs: Any, mine: Any) -> str:
    if key in FINGERPRINTS:
        return f"another {key}" if key == "model" else f"other {key}"
    there, here = (
        text if len(text) <= 40 else f"{text[:37]}..." for text in map(str, (theirs, mine))
    )
    return f"{key}: {there} there, {here} here"
