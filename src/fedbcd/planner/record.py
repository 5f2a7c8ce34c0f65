"""What an event log says about time: each phase of each server with the devices that took part, and
each mix of the coordinator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedbcd.errors import RecordError
from fedbcd.protocol.messages import (
    COORDINATOR,
    Activated,
    MixModels,
    OpenPhase,
    Send,
    ServerReady,
    StepGlobal,
    Trained,
    UpdateRequested,
    Uploaded,
    number_of,
)
from fedbcd.record.eventlog import LogReader, Transition


@dataclass(slots=True)
class Visit:
    """One device in one phase: when it asked, was let in and uploaded; how many steps it took."""

    device: int
    asked: float
    admitted: float | None = None
    uploaded: float | None = None
    steps: int | None = None


@dataclass(slots=True)
class Phase:
    """One response-and-update phase of a server; `ended` is None while it goes on."""

    server: int
    number: int
    opened: float
    ended: float | None = None
    visits: dict[int, Visit] = field(default_factory=dict)

    @property
    def complete(self) -> list[Visit]:
        """The visits that were counted, in order of arrival."""
        return sorted(
            (v for v in self.visits.values() if v.uploaded is not None), key=lambda v: v.asked
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """A round of the coordinator: when it ended, and whose models of which phases were mixed
    (Sync-cloud: all).
    """

    round: int
    time: float
    servers: tuple[int, ...]


@dataclass
class Record:
    """All phases and mixes of a log, in order of time."""

    path: Path
    phases: list[Phase] = field(default_factory=list)
    mixes: list[Mix] = field(default_factory=list)
    end: float = 0.0  # the clock at its last line

    @property
    def servers(self) -> int:
        """How many servers opened a phase."""
        return len({phase.server for phase in self.phases})


def read_record(log: Path, on_notice: Callable[[str], None] = lambda _: None) -> Record:
    """Read an event log, or the one in a run folder. A last line that is cut off, as of a run that
    goes on or was killed, is left out.
    """
    path = _log_in(log) if log.is_dir() else log
    reader, lines = _Reader(Record(path)), LogReader(path, unfinished=True)
    for transition in lines:
        reader.take(transition)
    if lines.cut is not None:
        on_notice(
            f"{path} is cut off in line {lines.cut}, which is left out: the run goes on, or was"
            " killed"
        )
    if not any(phase.visits for phase in reader.record.phases):
        raise RecordError(
            f"{path} has no arrivals: no device asked to take part; record at least one round"
        )
    return reader.record


def _log_in(folder: Path) -> Path:
    path = folder / "events.jsonl"
    inside = sorted(str(found.parent) for found in folder.glob("*/events.jsonl"))
    if inside and not path.exists():
        raise RecordError(
            f"{folder} has no event log of its own but holds runs; name one of them:"
            f" {', '.join(inside)}"
        )
    return path


class _Reader:
    """Follows a log, line by line."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.open: dict[int, Phase] = {}  # server -> its present phase
        self.asked: dict[int, float] = {}  # device -> when it last asked
        self.visits: dict[int, Visit] = {}  # device -> its present visit
        self.finished: set[int] = set()

    def take(self, line: Transition) -> None:
        """One transition."""
        self.record.end = line.time
        if line.actor == COORDINATOR:
            self._coordinator(line)
        elif line.actor.startswith("server/"):
            self._server(line, number_of(line.actor))
        elif isinstance(line.event, Trained) and number_of(line.actor) in self.visits:
            self.visits[number_of(line.actor)].steps = line.event.steps

    def _server(self, line: Transition, server: int) -> None:
        if isinstance(line.event, UpdateRequested):
            self.asked[line.event.device] = line.time
        elif isinstance(line.event, Uploaded) and line.event.device in self.visits:
            self.visits.pop(line.event.device).uploaded = line.time
        for command in line.commands:
            match command:
                case OpenPhase():
                    self._end(server, line.time)
                    self.open[server] = phase = Phase(server, command.phase, line.time)
                    self.record.phases.append(phase)
                case Send(message=Activated()) if server in self.open:
                    self._admit(self.open[server], number_of(command.to), line.time)
                case Send(message=ServerReady(iteration=0)):
                    self._end(server, line.time)

    def _admit(self, phase: Phase, device: int, time: float) -> None:
        visit = Visit(device, self.asked.get(device, time), time)
        phase.visits[device] = self.visits[device] = visit

    def _end(self, server: int, time: float) -> None:
        if server in self.open and self.open[server].ended is None:
            self.open[server].ended = time

    def _coordinator(self, line: Transition) -> None:
        for command in line.commands:
            match command:
                case MixModels(iteration=0):
                    self.record.mixes.append(Mix(command.round, line.time, command.servers))
                case StepGlobal():
                    self.record.mixes.append(
                        Mix(command.round, line.time, tuple(sorted(self.open)))
                    )
