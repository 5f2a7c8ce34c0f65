"""Which devices took part in which rounds, and who was mixed with whom: read off a planned schedule
(no tensors) or a recorded event log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcd.data.federation import Federation
from fedbcd.engines.setup import make_machines, make_schedule
from fedbcd.errors import RecordError
from fedbcd.record.eventlog import LogReader
from fedbcd.record.runfolder import difference
from fedbcd.record.timeline import MISSING, Timeline, read_timeline
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation
from fedbcd.spec import RunSpec

SHAPING = (
    "servers",
    "cloud",
    "algorithm",
    "active",
    "seed",
    "clock",
    "joins",
    "leaves",
    "churn",
    "deadline",
)  # parts of the identity


@dataclass(frozen=True)
class Participation:
    """What the assumptions need of a schedule. Rounds are those of the theory: coordinator rounds,
    or numbered phases where servers lag.
    """

    rounds: int  # of the coordinator
    mixes: tuple[tuple[int, ...], ...]  # per round, the servers that were mixed
    active: dict[int, list[int]]  # device -> rounds in which it was active
    watched: dict[int, int]  # device -> rounds of its server that are over
    clock: float = 0.0  # when the last round ended, where that was asked for
    cut: bool = False  # read off a log whose last line is not whole


def participation(
    timeline: Timeline,
    servers: Sequence[Sequence[int]],
    numbered: bool,
    clock: float = 0.0,
    cut: bool = False,
) -> Participation:
    """What a timeline shows until `clock`. `numbered`: a server's phase counts rounds by itself
    (Sync-cloud, rigorous Async-cloud); otherwise the mix that ends it does.

    Devices that joined late or left are not watched: their waits say nothing.
    """
    phases, visits, mixes = timeline.phases, timeline.visits, timeline.mixes
    rounds = len(mixes)
    reached = dict(zip(phases.server, phases.number, strict=True))  # the present phase of each
    watched = {
        device: min(reached.get(n, 0), rounds) if numbered else rounds
        for n, members in enumerate(servers)
        for device in members
        if device not in timeline.moved
    }
    active: dict[int, list[int]] = {device: [] for device in watched}
    round_of = phases.number if numbered else phases.round
    for device, phase in zip(visits.device, visits.counted, strict=True):
        if device in watched and phase != MISSING and 0 <= round_of[phase] < watched[device]:
            active[device].append(round_of[phase])
    mixed = tuple(tuple(mixes.members(k)) for k in range(rounds))
    return Participation(rounds, mixed, active, watched, clock, cut)


def planned_participation(
    spec: RunSpec,
    federation: Federation,
    rounds: int | None,
    until_clock: float | None,
    most: int = 2000,
) -> Participation:
    """The schedule that a run of these settings will have, played on the virtual clock without any
    tensor; at most `most` rounds of it.
    """
    timeline = Timeline()
    simulation = Simulation(
        Driver(make_machines(spec, federation), None, timeline),
        make_schedule(spec, federation),
    )
    while simulation.round < min(most, rounds or most) and simulation.now < (
        until_clock or float("inf")
    ):
        simulation.play_round()
    numbered = _is_numbered(spec.cloud.name)
    return participation(timeline, federation.servers, numbered, simulation.now)


def other_schedule(path: Path, spec: RunSpec, federation: Federation) -> str:
    """In which settings that shape a schedule the run of an event log differs from this one; empty
    if in none.
    """
    there, here = _identity(LogReader(path)), spec.identity(federation)
    return difference(
        {key: there.get(key) for key in SHAPING}, {key: here.get(key) for key in SHAPING}
    )


def recorded_participation(path: Path) -> Participation:
    """The schedule of an event log, as far as it goes: one of a killed or running job will do."""
    identity = _identity(LogReader(path))
    try:
        servers, numbered = identity["servers"], _is_numbered(identity["cloud"]["name"])
    except (KeyError, TypeError) as error:
        raise RecordError(
            f"{path} does not say how its run was set up ({error}); it is not a log of this version"
        ) from None
    timeline, cut = read_timeline(path, unfinished=True)
    if not len(timeline.mixes):
        raise RecordError(
            f"{path} holds no finished round, so it shows no schedule; give the log of a longer run"
        )
    return participation(timeline, servers, numbered, timeline.now, cut is not None)


def _identity(reader: LogReader) -> dict[str, Any]:
    identity = reader.header.get("identity")
    if not isinstance(identity, dict):
        raise RecordError(
            f"{reader.path} does not say how its run was set up (no 'identity'); it is not a log of"
            " this version"
        )
    return identity


def _is_numbered(cloud: str) -> bool:
    return cloud in ("sync", "rigorous")
