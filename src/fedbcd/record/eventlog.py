"""The event log: an append-only record (JSON lines, versioned) of every event that a machine
handled and every command it gave.

Line 1 is the header: format version and the settings of the run. Each further line is one
transition,
    {"t": 3.25, "on": "server/3", "event": {"Uploaded": {...}}, "do": [{"Absorb": {...}}, ...]}
and the last, once the run has ended, is {"end": {"transitions": ..., "rounds": ..., "clock": ...,
"digest": ...}}. The log is the schedule: replay needs nothing else.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, get_args, get_origin, get_type_hints

from fedbcd.errors import RecordError
from fedbcd.protocol import messages
from fedbcd.protocol.messages import Actor, Command, Event
from fedbcd.record.names import LOG

VERSION = 1
_TYPES: dict[str, type] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Event | Command) and kind not in (Event, Command)
}
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(getattr(kind, "__slots__", ())) for kind in _TYPES.values()
}
_HINTS: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in _TYPES.values()}

BEFORE: dict[str, dict[str, Any]] = {
    "Failed": {"reason": messages.NOT_FINITE},
    "DeviceJoined": {"by": ""},
    "DeviceLeft": {"anew": False, "by": ""},
    "Dismiss": {"anew": False},
    "ServerReady": {"journal": ""},
    "Mixed": {"among": []},
}  # fields that 0.1.0 did not have


@dataclass(frozen=True, slots=True)
class Transition:
    """One machine handled one event."""

    time: float
    actor: Actor
    event: Event
    commands: tuple[Command, ...]


def encode(message: Event | Command) -> dict[str, Any]:
    kind = type(message)
    fields = {name: getattr(message, name) for name in _FIELDS[kind]}
    if "message" in fields:
        fields["message"] = encode(fields["message"])
    for name in ("by", "journal", "among"):  # nobody's wish or log, as in all logs of before
        if name in fields and not fields[name]:
            del fields[name]
    return {kind.__name__: fields}


def decode(data: Any) -> Event | Command:
    """The inverse of `encode`; anything unexpected is a ValueError."""
    if not (isinstance(data, dict) and len(data) == 1):
        raise ValueError("a message is one name with its fields")
    ((name, fields),) = data.items()
    kind = _TYPES.get(name)
    if isinstance(fields, dict):
        fields = BEFORE.get(name, {}) | fields
    if kind is None or not isinstance(fields, dict) or set(fields) != set(_FIELDS[kind]):
        raise ValueError(f"unknown message or fields: {name}")
    values = {key: _decode_field(_HINTS[kind][key], value) for key, value in fields.items()}
    message = kind(**values)
    assert isinstance(message, Event | Command)
    return message


def _decode_field(hint: Any, value: Any) -> Any:
    if hint is Event:
        message = decode(value)
        if not isinstance(message, Event):
            raise ValueError(f"{message!r} is not an event")
        return message
    if (
        get_origin(hint) is tuple
        and isinstance(value, list)
        and all(type(v) is get_args(hint)[0] for v in value)
    ):
        return tuple(value)
    if type(value) is not hint:
        raise ValueError(f"{value!r} is not of type {hint}")
    return value


class Log(Protocol):
    """Where transitions go: a file (`LogWriter`), or a comparison with what was recorded before
    (`replay`).
    """

    def append(self, time: float, actor: Actor, event: Event, commands: list[Command]) -> None: ...


_json = json.JSONEncoder(separators=(",", ":"))  # made once: there are hundreds of lines a round


class LogWriter:
    """Appends to a log file. Lines are buffered; `sync` makes what was written so far durable and
    returns its length.
    """

    def __init__(self, path: Path, header: dict[str, Any] | None = None, keep: int = 0) -> None:
        """Start a new log with `header`, or go on with an old one after its first `keep` bytes."""
        self._file: BinaryIO = path.open("xb" if header is not None else "r+b")
        if header is not None:
            self._file.write(header_line(header))
            self.sync()  # a run that is killed right away can still be told from a foreign file
        else:
            self._file.truncate(keep)
            self._file.seek(keep)

    def append(self, time: float, actor: Actor, event: Event, commands: list[Command]) -> None:
        self._file.write(transition_line(time, actor, event, commands))

    def end(self, summary: dict[str, Any]) -> None:
        self._write({"end": summary})

    def sync(self) -> int:
        """Make everything durable; the log's length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(_as_line(line))


def header_line(header: dict[str, Any]) -> bytes:
    return _as_line({"fedbcd_log": VERSION, **header})


def transition_line(time: float, actor: Actor, event: Event, commands: Sequence[Command]) -> bytes:
    return _as_line(
        {"t": time, "on": actor, "event": encode(event), "do": [encode(c) for c in commands]}
    )


def _as_line(line: dict[str, Any]) -> bytes:
    return _json.encode(line).encode() + b"\n"


class LogReader:
    """Reads a log; every complaint names the file and the line.

    With `unfinished` a last line without its newline is left out, as of a run that goes on or was
    killed; `cut` is then its number. A run folder stands for the log in it.
    """

    def __init__(self, path: Path, unfinished: bool = False) -> None:
        self.path = path = path / LOG if path.is_dir() else path
        self.unfinished = unfinished
        self.cut: int | None = None
        self.end: dict[str, Any] | None = None
        if not path.is_file():
            raise RecordError(
                f"there is no event log at {path}; a run folder holds one as events.jsonl"
            )
        self.header = self._header()

    def _header(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            header = self._parse(1, file.readline())
        if "fedbcd_log" not in header:
            raise RecordError(
                f"{self.path} is not a fedbcd event log: its first line has no 'fedbcd_log' field"
            )
        if header["fedbcd_log"] != VERSION:
            raise RecordError(
                f"{self.path} is an event log of version {header['fedbcd_log']}; this fedbcd reads"
                f" version {VERSION}"
            )
        return header

    def __iter__(self) -> Iterator[Transition]:
        self.end, self.cut = None, None
        with self.path.open("rb") as file:
            file.readline()
            for number, raw in enumerate(file, start=2):
                if self.unfinished and not raw.endswith(b"\n"):
                    self.cut = number
                    return
                if self.end is not None:
                    raise RecordError(
                        f"{self.path} line {number} comes after the end of the run; the log was"
                        " tampered with"
                    )
                line = self._parse(number, raw)
                if "end" in line:
                    self.end = self._end(number, line["end"])
                    continue
                yield self._transition(number, line)

    def _parse(self, number: int, raw: bytes) -> dict[str, Any]:
        try:
            if not raw.endswith(b"\n"):
                raise ValueError("no newline at its end")
            line = json.loads(raw.decode())
            if not isinstance(line, dict):
                raise ValueError("not an object")
            return line
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{self.path} line {number} is damaged or cut short ({error}); resume the run, or"
                " replay an undamaged copy"
            ) from None

    def _end(self, number: int, end: Any) -> dict[str, Any]:
        if not isinstance(end, dict):
            raise RecordError(
                f"{self.path} line {number} is damaged: the end of a run is an object, not {end!r}"
            )
        if end.get("transitions") != number - 2:
            raise RecordError(
                f"{self.path} line {number} ends a run of {end.get('transitions')} transitions, but"
                f" {number - 2} are recorded; lines were removed or added"
            )
        return end

    def _transition(self, number: int, line: dict[str, Any]) -> Transition:
        try:
            event = decode(line["event"])
            commands = tuple(decode(c) for c in line["do"])
            if not isinstance(event, Event) or not all(isinstance(c, Command) for c in commands):
                raise ValueError("an event and commands are expected")
            return Transition(float(line["t"]), str(line["on"]), event, commands)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RecordError(
                f"{self.path} line {number} is not a transition that this version knows: {error}"
            ) from None
