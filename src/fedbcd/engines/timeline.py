"""Who was active when, and who was mixed with whom: read off a planned schedule (no tensors) or a
recorded event log.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcd.data.federation import Federation
from fedbcd.engines.setup import make_machines, make_schedule
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import (
    Absorb,
    Actor,
    Admit,
    Command,
    Dismiss,
    Event,
    MixModels,
    OpenPhase,
    StepGlobal,
    number_of,
)
from fedbcd.record.eventlog import LogReader
from fedbcd.record.runfolder import difference
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
)  # parts of the identity


@dataclass(frozen=True)
class Timeline:
    """What the assumptions need of a schedule. Rounds are those of the theory: coordinator rounds,
    or numbered phases where servers lag.
    """

    rounds: int  # of the coordinator
    mixes: tuple[tuple[int, ...], ...]  # per round, the servers that were mixed
    active: dict[int, list[int]]  # device -> rounds in which it was active
    watched: dict[int, int]  # device -> rounds of its server that are over
    clock: float = 0.0  # when the last round ended, where that was asked for
    cut: bool = False  # read off a log whose last line is not whole


class TimelineRecorder:
    """A `Numbers` that computes nothing and takes note of activations and mixes."""

    def __init__(self, servers: Sequence[Sequence[int]], numbered: bool) -> None:
        """`numbered`: a server's phase counts rounds by itself (Sync-cloud, rigorous Async-cloud);
        otherwise the mix that ends it does.
        """
        self._servers = servers
        self._numbered = numbered
        self._phase = [0] * len(servers)
        self._pending: dict[int, list[int]] = defaultdict(list)
        self._active: dict[int, list[int]] = defaultdict(list)
        self._changed: set[int] = set()  # devices that joined late or left: their waits say nothing
        self.mixes: list[tuple[int, ...]] = []

    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        """Take note of one transition."""
        for command in commands:
            match command:
                case OpenPhase():
                    self._phase[number_of(actor)] = command.phase
                case Absorb():
                    self._pending[number_of(actor)].append(command.device)
                    if self._numbered:
                        self._assign(number_of(actor), self._phase[number_of(actor)])
                case MixModels() if command.iteration == 0:
                    self._mixed(command.servers, command.round)
                case StepGlobal():
                    self._mixed(tuple(range(len(self._servers))), command.round)
                case Admit() | Dismiss():
                    self._changed.add(command.device)

    def _mixed(self, servers: tuple[int, ...], round_: int) -> None:
        self.mixes.append(servers)
        for server in servers:
            self._assign(server, round_)

    def _assign(self, server: int, round_: int) -> None:
        for device in self._pending.pop(server, ()):
            self._active[device].append(round_)

    def timeline(self, clock: float = 0.0, cut: bool = False) -> Timeline:
        """What was seen until `clock`."""
        rounds = len(self.mixes)
        watched = {
            device: min(self._phase[n], rounds) if self._numbered else rounds
            for n, members in enumerate(self._servers)
            for device in members
            if device not in self._changed
        }
        active = {
            device: [t for t in self._active.get(device, ()) if t < watched[device]]
            for device in watched
        }
        return Timeline(rounds, tuple(self.mixes), active, watched, clock, cut)


def planned_timeline(
    spec: RunSpec,
    federation: Federation,
    rounds: int | None,
    until_clock: float | None,
    most: int = 2000,
) -> Timeline:
    """The schedule that a run of these settings will have, played on the virtual clock without any
    tensor; at most `most` rounds of it.
    """
    recorder = TimelineRecorder(federation.servers, _is_numbered(spec.cloud.name))
    simulation = Simulation(
        Driver(make_machines(spec, federation), recorder),
        make_schedule(spec, federation),
    )
    while simulation.round < min(most, rounds or most) and simulation.now < (
        until_clock or float("inf")
    ):
        simulation.play_round()
    return recorder.timeline(simulation.now)


def other_schedule(path: Path, spec: RunSpec, federation: Federation) -> str:
    """In which settings that shape a schedule the run of an event log differs from this one; empty
    if in none.
    """
    there, here = _identity(LogReader(path)), spec.identity(federation)
    return difference({key: there.get(key) for key in SHAPING}, {key: here[key] for key in SHAPING})


def recorded_timeline(path: Path) -> Timeline:
    """The schedule of an event log, as far as it goes: one of a killed or running job will do."""
    reader = LogReader(path, unfinished=True)
    try:
        identity = _identity(reader)
        recorder = TimelineRecorder(identity["servers"], _is_numbered(identity["cloud"]["name"]))
    except (KeyError, TypeError) as error:
        raise RecordError(
            f"{path} does not say how its run was set up ({error}); it is not a log of this version"
        ) from None
    clock = 0.0
    for step in reader:
        recorder.apply(step.actor, step.event, step.commands)
        clock = step.time
    timeline = recorder.timeline(clock, reader.cut is not None)
    if not timeline.rounds:
        raise RecordError(
            f"{path} holds no finished round, so it shows no schedule; give the log of a longer run"
        )
    return timeline


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
