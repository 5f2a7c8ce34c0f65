"""What an event log says about time: phases of servers, visits of devices, mixes of the
coordinator, and where everyone stands. One fold, for pages, plans, accounts and checks.

A line is taken as plain data (`take`), without the checks of a replay, so that a log of a million
lines is read in seconds; or as a transition (`append`), of a checked log or of a schedule that is
being played. Times and numbers are kept in columns: a phase costs 85 bytes, a visit 44.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any, TypeAlias

from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    Command,
    Event,
    OfflineTrained,
    RetryDue,
    Trained,
    number_of,
)
from fedbcd.record.eventlog import LogReader, encode

Ints: TypeAlias = "array[int]"
Times: TypeAlias = "array[float]"
NEVER = -1.0  # a time that has not come
MISSING = -1  # a phase, device, round or number of steps that is not there
MOST_VISITS = 200_000  # the latest visits of a log that may grow without end


def _ints() -> Ints:
    return array("i")


def _longs() -> Ints:
    return array("q")


def _times() -> Times:
    return array("d")


@dataclass
class Phases:
    """Response-and-update phases of all servers, in the order in which they opened; one entry per
    phase in each column.
    """

    server: Ints = field(default_factory=_ints)
    number: Ints = field(default_factory=_ints)  # by its server's count
    opened: Times = field(default_factory=_times)
    mixes: Ints = field(default_factory=_ints)  # that there had been when it opened
    ended: Times = field(default_factory=_times)  # the q-th upload; NEVER while it goes on
    reported: Ints = field(default_factory=lambda: array("b"))  # 0: isolated before it ended
    mixed: Times = field(default_factory=_times)  # the coordinator's mix; NEVER if there was none
    round: Ints = field(default_factory=_ints)  # of that mix; MISSING: not mixed (yet), or isolated
    released: Times = field(default_factory=_times)  # the next phase of this server opens
    last_device: Ints = field(default_factory=_ints)  # whose upload came last
    last_admitted: Times = field(default_factory=_times)  # when that device was let in

    def __len__(self) -> int:
        return len(self.server)

    def open(self, server: int, number: int, time: float, mixes: int) -> int:
        self.server.append(server)
        self.number.append(number)
        self.opened.append(time)
        self.mixes.append(mixes)
        self.reported.append(0)
        for times in (self.ended, self.mixed, self.released, self.last_admitted):
            times.append(NEVER)
        self.round.append(MISSING)
        self.last_device.append(MISSING)
        return len(self.server) - 1


@dataclass
class Visits:
    """Activations of devices, in the order in which they were let in; of more than `most` the
    latest.
    """

    most: int | None = None
    phase: Ints = field(default_factory=_ints)  # in which the device was let in
    device: Ints = field(default_factory=_ints)
    activation: Ints = field(default_factory=_ints)
    asked: Times = field(default_factory=_times)
    admitted: Times = field(default_factory=_times)
    steps: Ints = field(default_factory=_ints)  # that it trained; MISSING: not yet
    uploaded: Times = field(default_factory=_times)  # NEVER: not yet
    # The phase in which the upload counted: one that comes while its server waits counts in the
    # next phase, if at all.
    counted: Ints = field(default_factory=_ints)
    dropped: int = 0  # older visits that are no longer kept

    def __len__(self) -> int:
        return len(self.phase)

    def open(self, phase: int, device: int, activation: int, asked: float, admitted: float) -> int:
        """A new visit; its number, counted from the beginning of the log."""
        if self.most is not None and len(self) >= 2 * self.most:
            self._drop(self.most)
        self.phase.append(phase)
        self.device.append(device)
        self.activation.append(activation)
        self.asked.append(asked)
        self.admitted.append(admitted)
        self.steps.append(MISSING)
        self.uploaded.append(NEVER)
        self.counted.append(MISSING)
        return self.dropped + len(self) - 1

    def _drop(self, count: int) -> None:
        for times in (self.asked, self.admitted, self.uploaded):
            del times[:count]
        for numbers in (self.phase, self.device, self.activation, self.steps, self.counted):
            del numbers[:count]
        self.dropped += count


@dataclass
class Mixes:
    """Mixes of the coordinator: when, whose models, and how many messages with a model had been
    sent by then.
    """

    time: Times = field(default_factory=_times)
    last_phase: Ints = field(default_factory=_ints)  # whose report completed it; MISSING: not known
    start: Ints = field(default_factory=_ints)  # where its servers begin in `servers`
    servers: Ints = field(default_factory=_ints)
    down: Ints = field(default_factory=_longs)  # server to device
    up: Ints = field(default_factory=_longs)  # device to server
    reports: Ints = field(default_factory=_longs)  # server to coordinator
    answers: Ints = field(default_factory=_longs)  # coordinator to server

    def __len__(self) -> int:
        return len(self.time)

    def members(self, round_: int) -> list[int]:
        stop = self.start[round_ + 1] if round_ + 1 < len(self) else len(self.servers)
        return self.servers[self.start[round_] : stop].tolist()


@dataclass(slots=True)
class ServerStanding:
    """Where a server stands."""

    state: str = "new"  # then: collecting, waiting
    since: float = 0.0
    phases: int = 0
    last_mix: int = MISSING  # the round of its last mix
    uploads: int = 0


@dataclass(slots=True)
class DeviceStanding:
    """Where a device stands, as its server sees it."""

    state: str = "idle"  # asking, working, idle, lost, left
    contact: float = 0.0  # the last message from it
    asked: float = 0.0
    activations: int = 0
    steps: int = 0
    offline: int = 0  # offline rounds (FedBCD-I)
    visit: int = MISSING


class Timeline:
    """What a log says so far. `take` and `append` read one more line of it; those who see a run
    without its log say what they see by `open_phase`, `end_phase` and `mix`.
    """

    def __init__(
        self, header: dict[str, Any] | None = None, most_visits: int | None = None
    ) -> None:
        self.header = header or {}
        self.phases = Phases()
        self.visits = Visits(most_visits)
        self.mixes = Mixes()
        self.servers: dict[int, ServerStanding] = {}
        self.devices: dict[int, DeviceStanding] = {}
        self.moved: set[int] = set()  # devices that joined or left
        # Rounds since its last mix, of a server that is mixed.
        self.staleness: Counter[int] = Counter()
        self.events: Counter[str] = Counter()  # retries, devices lost, joined, left
        self.end: dict[str, Any] | None = None
        self.now = 0.0  # the clock at the last line that was looked into
        self._open: dict[int, int] = {}  # server -> its present phase
        self._sent = dict.fromkeys(("Activated", "ServerReady", "Mixed", "GlobalUpdated"), 0)
        self._uploads = 0

    def take(self, raw: bytes) -> None:
        """One line of the log. Raises ValueError, KeyError or TypeError where it is none."""
        if b'"on":"device/' in raw[:60]:
            self._take_of_device(raw)
            return
        line = _parsed(raw)
        if "end" in line:
            self.end = dict(line["end"])
        else:
            self._transition(float(line["t"]), line["on"], line["event"], line["do"])

    def append(self, time: float, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        self.now = time
        if not actor.startswith("device/"):
            self._transition(time, actor, encode(event), [encode(c) for c in commands])
        elif isinstance(event, Trained | OfflineTrained):
            self._trained(number_of(actor), event.steps, isinstance(event, OfflineTrained))
        elif isinstance(event, RetryDue):
            self.events["retries of devices"] += 1

    def _transition(
        self, time: float, actor: str, event: dict[str, Any], commands: list[dict[str, Any]]
    ) -> None:
        self.now = time
        ((name, fields),) = event.items()
        if actor == COORDINATOR:
            self._coordinator(fields.get("server"), commands)
        elif actor.startswith("server/"):
            self._server(int(actor[7:]), name, fields, commands)
        else:
            raise ValueError(f"unknown actor {actor!r}")

    # ---------------------------------------------------------------------------------------------
    # devices
    def _take_of_device(self, raw: bytes) -> None:
        """Device lines are most of a log, and only two kinds of them say something that the
        server's lines do not.
        """
        offline = b'"event":{"OfflineTrained"' in raw
        if not (offline or b'"event":{"Trained"' in raw):
            if not raw.startswith(b'{"t":') or not raw.endswith(b"}"):
                raise ValueError("not a transition")
            if b'"event":{"RetryDue"' in raw:
                self.events["retries of devices"] += 1
            return
        line = _parsed(raw)
        ((_, fields),) = line["event"].items()
        self._trained(int(line["on"][7:]), int(fields["steps"]), offline)

    def _trained(self, number: int, steps: int, offline: bool) -> None:
        device = self._device(number)
        device.steps += steps
        device.offline += offline
        place = device.visit - self.visits.dropped
        if not offline and place >= 0 and self.visits.uploaded[place] == NEVER:
            self.visits.steps[place] = steps

    def _device(self, device: int) -> DeviceStanding:
        standing = self.devices.get(device)
        if standing is None:
            standing = self.devices[device] = DeviceStanding()
        return standing

    # ---------------------------------------------------------------------------------------------
    # servers
    def _server(
        self, number: int, name: str, fields: dict[str, Any], commands: list[dict[str, Any]]
    ) -> None:
        if name == "UpdateRequested":
            device = self._device(fields["device"])
            device.state, device.asked, device.contact = "asking", self.now, self.now
        elif name == "Uploaded":
            self._uploaded(number, fields["device"])
        elif name in _COUNTED:
            self.events[_COUNTED[name]] += 1
            if "device" in fields:
                self._device(fields["device"]).state = _STATES[name]
        for command in commands:
            ((kind, what),) = command.items()
            if kind == "Send":
                self._send(number, what)
            elif kind == "Absorb":
                self._count(number, what["device"])
            elif kind == "OpenPhase":
                self.open_phase(number, what["phase"], self.now)
            elif kind in ("Admit", "Dismiss"):
                self.moved.add(what["device"])

    def _send(self, server: int, what: dict[str, Any]) -> None:
        ((kind, message),) = what["message"].items()
        if kind == "Activated":
            self._sent[kind] += 1
            self._admit(server, int(what["to"][7:]), message["activation"])
        elif kind == "ServerReady":
            self._sent[kind] += 1
            if message["iteration"] == 0 and self._standing(server).state == "collecting":
                self.end_phase(server, self.now)

    def _admit(self, server: int, device: int, activation: int) -> None:
        state = self._device(device)
        if state.state != "working" and server in self._open:
            phase = self._open[server]
            state.visit = self.visits.open(phase, device, activation, state.asked, self.now)
        state.state = "working"

    def _uploaded(self, server: int, device: int) -> None:
        state = self._device(device)
        state.contact = self.now
        self._uploads += 1
        if state.state not in ("working", "lost"):
            return  # a copy of an upload that was counted before
        state.state = "idle"
        state.activations += 1
        self._standing(server).uploads += 1
        place = state.visit - self.visits.dropped
        if place < 0:
            return
        self.visits.uploaded[place] = self.now
        phase = self.visits.phase[place]
        if phase == self._open.get(server):
            self.phases.last_device[phase] = device
            self.phases.last_admitted[phase] = self.visits.admitted[place]

    def _count(self, server: int, device: int) -> None:
        place = self._device(device).visit - self.visits.dropped
        if place >= 0 and server in self._open:
            self.visits.counted[place] = self._open[server]

    def _standing(self, server: int) -> ServerStanding:
        standing = self.servers.get(server)
        if standing is None:
            standing = self.servers[server] = ServerStanding()
        return standing

    def open_phase(self, server: int, number: int, time: float) -> None:
        """A server begins a phase; one that was still collecting was isolated before, ended its
        phase and stepped alone.
        """
        state, before = self._standing(server), self._open.get(server)
        if before is not None:
            if state.state == "collecting":
                self.phases.ended[before] = time
            self.phases.released[before] = time
        self._open[server] = self.phases.open(server, number, time, len(self.mixes))
        state.state, state.since, state.phases = "collecting", time, state.phases + 1

    def end_phase(self, server: int, time: float) -> None:
        """A server has all its uploads and reports to the coordinator."""
        phase, state = self._open.get(server), self._standing(server)
        if phase is not None:
            self.phases.ended[phase], self.phases.reported[phase] = time, 1
        state.state, state.since = "waiting", time

    # ---------------------------------------------------------------------------------------------
    # coordinator
    def _coordinator(self, reported: int | None, commands: list[dict[str, Any]]) -> None:
        members: list[int] | None = None
        for command in commands:
            ((kind, what),) = command.items()
            if kind == "Send":
                ((message, _),) = what["message"].items()
                if message in self._sent:
                    self._sent[message] += 1
            elif kind == "StepGlobal":
                members = sorted(self._open)
            elif kind == "MixModels" and what["iteration"] == 0:
                members = what["servers"]
        if members is not None:
            self.mix(members, self.now, reported)

    def mix(self, members: Sequence[int], time: float, reported: int | None = None) -> None:
        """The coordinator mixes the models of these servers, on the report of one of them."""
        number, mixes, sent = len(self.mixes), self.mixes, self._sent
        mixes.time.append(time)
        mixes.last_phase.append(MISSING if reported is None else self._open.get(reported, MISSING))
        mixes.start.append(len(mixes.servers))
        mixes.servers.extend(members)
        mixes.down.append(sent["Activated"])
        mixes.up.append(self._uploads)
        mixes.reports.append(sent["ServerReady"])
        mixes.answers.append(sent["Mixed"] + sent["GlobalUpdated"])
        for server in members:
            state, phase = self._standing(server), self._open.get(server)
            if phase is not None:
                self.phases.mixed[phase], self.phases.round[phase] = time, number
            self.staleness[number - state.last_mix - 1] += 1
            state.last_mix = number


_COUNTED = {
    "RetryDue": "retries of servers",
    "Withdrawn": "activations undone",
    "DeviceLost": "devices lost",
    "DeadlinePassed": "deadlines passed",
    "DeviceJoined": "devices joined",
    "DeviceLeft": "devices left",
    "Isolated": "isolated phases",
}
_STATES = {"Withdrawn": "idle", "DeviceLost": "lost", "DeviceJoined": "idle", "DeviceLeft": "left"}


def _parsed(raw: bytes) -> dict[str, Any]:
    line = loads(raw.decode())  # of bytes, loads would first guess the encoding
    if not isinstance(line, dict):
        raise ValueError("not an object")
    return line


def read_timeline(log: Path, unfinished: bool = False) -> tuple[Timeline, int | None]:
    """All that a log says, every line checked, and the number of a last line that is cut off
    (allowed if it may be `unfinished`).
    """
    lines = LogReader(log, unfinished)
    timeline = Timeline(lines.header)
    for line in lines:
        timeline.append(line.time, line.actor, line.event, line.commands)
    return timeline, lines.cut
