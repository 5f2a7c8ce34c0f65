"""What an event log says about time: each phase of each server with the devices that took part, and
each mix of the coordinator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcd.errors import RecordError
from fedbcd.record.names import LOG
from fedbcd.record.timeline import MISSING, NEVER, Timeline, read_timeline


@dataclass(slots=True)
class RecordedVisit:
    """One device in one phase: when it asked, was let in and uploaded; how many steps it took."""

    device: int
    asked: float
    admitted: float | None = None
    uploaded: float | None = None
    steps: int | None = None


@dataclass(slots=True)
class RecordedPhase:
    """One response-and-update phase of a server; `ended` is None while it goes on."""

    server: int
    number: int
    opened: float
    ended: float | None = None
    visits: dict[int, RecordedVisit] = field(default_factory=dict)

    @property
    def complete(self) -> list[RecordedVisit]:
        """The visits that were counted, in order of arrival."""
        return sorted(
            (v for v in self.visits.values() if v.uploaded is not None), key=lambda v: v.asked
        )


@dataclass(frozen=True, slots=True)
class RecordedMix:
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
    phases: list[RecordedPhase] = field(default_factory=list)
    mixes: list[RecordedMix] = field(default_factory=list)
    end: float = 0.0  # the clock at its last line
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def servers(self) -> int:
        return len({phase.server for phase in self.phases})


def read_record(log: Path, on_notice: Callable[[str], None] = lambda _: None) -> Record:
    """Read an event log, or the one in a run folder. A last line that is cut off, as of a run that
    goes on or was killed, is left out.
    """
    path = _log_in(log) if log.is_dir() else log
    timeline, cut = read_timeline(path, unfinished=True)
    if cut is not None:
        on_notice(
            f"{path} is cut off in line {cut}, which is left out: the run goes on, or was killed"
        )
    phases, mixes = _phases(timeline), timeline.mixes
    if not any(phase.visits for phase in phases):
        raise RecordError(
            f"{path} has no arrivals: no device asked to take part; record at least one round"
        )
    mixed = [RecordedMix(k, time, tuple(mixes.members(k))) for k, time in enumerate(mixes.time)]
    return Record(path, phases, mixed, timeline.now, timeline.header)


def _log_in(folder: Path) -> Path:
    path = folder / LOG
    inside = sorted(str(found.parent) for found in folder.glob(f"*/{LOG}"))
    if inside and not path.exists():
        raise RecordError(
            f"{folder} has no event log of its own but holds runs; name one of them:"
            f" {', '.join(inside)}"
        )
    return path


def _phases(timeline: Timeline) -> list[RecordedPhase]:
    columns = timeline.phases
    found = [
        RecordedPhase(server, number, opened, _time(ended))
        for server, number, opened, ended in zip(
            columns.server, columns.number, columns.opened, columns.ended, strict=True
        )
    ]
    visits = timeline.visits
    for k, (phase, device) in enumerate(zip(visits.phase, visits.device, strict=True)):
        steps = visits.steps[k]
        found[phase].visits[device] = RecordedVisit(
            device,
            visits.asked[k],
            visits.admitted[k],
            _time(visits.uploaded[k]),
            None if steps == MISSING else steps,
        )
    return found


def _time(time: float) -> float | None:
    return None if time == NEVER else time
