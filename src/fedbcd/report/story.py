"""An event log, folded line by line into what a reader wants to see: phases, visits, mixes,
traffic, and where everyone stands.

Lines are taken as plain data, without the checks of a replay, so that a log of a million lines is
read in seconds. Times and numbers are kept in arrays: a phase costs 80 bytes, a visit 40, and only
the latest visits are kept.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from json import loads
from typing import Any, TypeAlias

from fedbcd.protocol.messages import COORDINATOR

Numbers: TypeAlias = "array[int]"
Times: TypeAlias = "array[float]"
NEVER = -1.0  # a time that has not come
MOST_VISITS = 200_000  # visits that are kept, the latest ones


@dataclass
class Phases:
    """Response-and-update phases of all servers, in the order in which they opened; one entry per
    phase in each column.
    """

    server: Numbers = field(default_factory=lambda: array("i"))
    opened: Times = field(default_factory=lambda: array("d"))
    ended: Times = field(
        default_factory=lambda: array("d")
    )  # the q-th upload; NEVER while it goes on
    mixed: Times = field(
        default_factory=lambda: array("d")
    )  # the coordinator's mix; NEVER if there was none
    released: Times = field(
        default_factory=lambda: array("d")
    )  # the next phase of this server opens
    round: Numbers = field(
        default_factory=lambda: array("i")
    )  # of that mix; -1: not mixed (yet), or isolated
    last_device: Numbers = field(default_factory=lambda: array("i"))  # whose upload came last
    last_admitted: Times = field(default_factory=lambda: array("d"))  # when that device was let in

    def __len__(self) -> int:
        return len(self.server)

    def open(self, server: int, time: float) -> int:
        """A new phase; its place in the columns."""
        self.server.append(server)
        self.opened.append(time)
        for times in (self.ended, self.mixed, self.released, self.last_admitted):
            times.append(NEVER)
        self.round.append(-1)
        self.last_device.append(-1)
        return len(self.server) - 1


@dataclass
class Visits:
    """Devices in phases: who was let in when, and uploaded when (NEVER: not yet)."""

    phase: Numbers = field(default_factory=lambda: array("i"))
    device: Numbers = field(default_factory=lambda: array("i"))
    asked: Times = field(default_factory=lambda: array("d"))
    admitted: Times = field(default_factory=lambda: array("d"))
    uploaded: Times = field(default_factory=lambda: array("d"))
    dropped: int = 0  # older visits that are no longer kept

    def __len__(self) -> int:
        return len(self.phase)

    def open(self, phase: int, device: int, asked: float, admitted: float) -> int:
        """A new visit; its number, counted from the beginning of the log."""
        if len(self) >= 2 * MOST_VISITS:
            for column in (self.phase, self.device, self.asked, self.admitted, self.uploaded):
                del column[:MOST_VISITS]
            self.dropped += MOST_VISITS
        self.phase.append(phase)
        self.device.append(device)
        self.asked.append(asked)
        self.admitted.append(admitted)
        self.uploaded.append(NEVER)
        return self.dropped + len(self) - 1


@dataclass
class Rounds:
    """Mixes of the coordinator: when, whose models, and how many messages with a model had been
    sent by then.
    """

    time: Times = field(default_factory=lambda: array("d"))
    start: Numbers = field(
        default_factory=lambda: array("i")
    )  # where this round's servers begin in `servers`
    servers: Numbers = field(default_factory=lambda: array("i"))
    down: Numbers = field(default_factory=lambda: array("q"))  # server to device
    up: Numbers = field(default_factory=lambda: array("q"))  # device to server
    reports: Numbers = field(default_factory=lambda: array("q"))  # server to coordinator
    answers: Numbers = field(default_factory=lambda: array("q"))  # coordinator to server

    def __len__(self) -> int:
        return len(self.time)

    def members(self, round_: int) -> list[int]:
        """The servers of one mix."""
        stop = self.start[round_ + 1] if round_ + 1 < len(self) else len(self.servers)
        return self.servers[self.start[round_] : stop].tolist()


@dataclass(slots=True)
class ServerState:
    """Where a server stands."""

    state: str = "new"  # then: collecting, waiting
    since: float = 0.0
    phases: int = 0
    last_mix: int = -1  # the round of its last mix
    uploads: int = 0


@dataclass(slots=True)
class DeviceState:
    """Where a device stands, as its server sees it."""

    state: str = "idle"  # asking, working, idle, lost, left
    contact: float = 0.0  # the last message from it
    asked: float = 0.0
    activations: int = 0
    steps: int = 0
    offline: int = 0  # offline rounds (FedBCD-I)
    visit: int = -1


class Story:
    """What a log says so far. `take` is the only method that changes it."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.phases = Phases()
        self.visits = Visits()
        self.rounds = Rounds()
        self.servers: dict[int, ServerState] = {}
        self.devices: dict[int, DeviceState] = {}
        self.staleness: Counter[int] = (
            Counter()
        )  # rounds since its last mix, of a server that is mixed
        self.events: Counter[str] = Counter()  # retries, devices lost, joined, left
        self.end: dict[str, Any] | None = None
        self.now = 0.0
        self.lines = 0
        self._open: dict[int, int] = {}  # server -> its present phase
        self._sent = dict.fromkeys(("Activated", "ServerReady", "Mixed", "GlobalUpdated"), 0)
        self._uploads = 0

    def take(self, raw: bytes) -> None:
        """One line of the log. Raises ValueError, KeyError or TypeError where it is none."""
        self.lines += 1
        if b'"on":"device/' in raw[:60]:
            self._device(raw)
            return
        line = _parsed(raw)
        if "end" in line:
            self.end = dict(line["end"])
            return
        self.now = float(line["t"])
        actor = line["on"]
        ((name, fields),) = line["event"].items()
        if actor == COORDINATOR:
            self._coordinator(line["do"])
        elif actor.startswith("server/"):
            self._server(int(actor[7:]), name, fields, line["do"])
        else:
            raise ValueError(f"unknown actor {actor!r}")

    # ---------------------------------------------------------------------------------------------
    # devices
    def _device(self, raw: bytes) -> None:
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
        device = self._state_of(int(line["on"][7:]))
        ((_, fields),) = line["event"].items()
        device.steps += int(fields["steps"])
        device.offline += offline

    def _state_of(self, device: int) -> DeviceState:
        found = self.devices.get(device)
        if found is None:
            found = self.devices[device] = DeviceState()
        return found

    # ---------------------------------------------------------------------------------------------
    # servers
    def _server(
        self, number: int, name: str, fields: dict[str, Any], commands: list[dict[str, Any]]
    ) -> None:
        server = self.servers.get(number)
        if server is None:
            server = self.servers[number] = ServerState()
        if name == "UpdateRequested":
            device = self._state_of(fields["device"])
            device.state, device.asked, device.contact = "asking", self.now, self.now
        elif name == "Uploaded":
            self._uploaded(number, server, fields["device"])
        elif name in _COUNTED:
            self.events[_COUNTED[name]] += 1
            if "device" in fields:
                self._state_of(fields["device"]).state = _STATES[name]
        for command in commands:
            ((kind, what),) = command.items()
            if kind == "Send":
                self._send(number, server, what)
            elif kind == "OpenPhase":
                self._open_phase(number, server)

    def _send(self, number: int, server: ServerState, what: dict[str, Any]) -> None:
        ((kind, message),) = what["message"].items()
        if kind == "Activated":
            self._sent[kind] += 1
            self._admit(number, int(what["to"][7:]))
        elif kind == "ServerReady":
            self._sent[kind] += 1
            if message["iteration"] == 0 and server.state == "collecting":
                self._end_phase(number, server)

    def _admit(self, server: int, device: int) -> None:
        state = self._state_of(device)
        if state.state != "working" and server in self._open:
            state.visit = self.visits.open(self._open[server], device, state.asked, self.now)
        state.state = "working"

    def _uploaded(self, number: int, server: ServerState, device: int) -> None:
        state = self._state_of(device)
        state.contact = self.now
        self._uploads += 1
        if state.state not in ("working", "lost"):
            return  # a copy of an upload that was counted before
        state.state = "idle"
        state.activations += 1
        server.uploads += 1
        place = state.visit - self.visits.dropped
        if place < 0:
            return
        self.visits.uploaded[place] = self.now
        phase = self.visits.phase[place]
        if phase == self._open.get(number):
            self.phases.last_device[phase] = device
            self.phases.last_admitted[phase] = self.visits.admitted[place]

    def _open_phase(self, number: int, server: ServerState) -> None:
        if server.state == "collecting":  # isolated: it ended its phase and stepped alone
            self._end_phase(number, server)
        if number in self._open:
            self.phases.released[self._open[number]] = self.now
        self._open[number] = self.phases.open(number, self.now)
        server.state, server.since, server.phases = "collecting", self.now, server.phases + 1

    def _end_phase(self, number: int, server: ServerState) -> None:
        if number in self._open:
            self.phases.ended[self._open[number]] = self.now
        server.state, server.since = "waiting", self.now

    # ---------------------------------------------------------------------------------------------
    # coordinator
    def _coordinator(self, commands: list[dict[str, Any]]) -> None:
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
            self._mix(members)

    def _mix(self, members: list[int]) -> None:
        number = len(self.rounds)
        rounds, sent = self.rounds, self._sent
        rounds.time.append(self.now)
        rounds.start.append(len(rounds.servers))
        rounds.servers.extend(members)
        rounds.down.append(sent["Activated"])
        rounds.up.append(self._uploads)
        rounds.reports.append(sent["ServerReady"])
        rounds.answers.append(sent["Mixed"] + sent["GlobalUpdated"])
        for server in members:
            phase, state = self._open[server], self.servers[server]
            self.phases.mixed[phase], self.phases.round[phase] = self.now, number
            self.staleness[number - state.last_mix - 1] += 1
            state.last_mix = number


_COUNTED = {
    "RetryDue": "retries of servers",
    "Withdrawn": "activations undone",
    "DeviceLost": "devices lost",
    "DeviceJoined": "devices joined",
    "DeviceLeft": "devices left",
    "Isolated": "isolated phases",
}
_STATES = {"Withdrawn": "idle", "DeviceLost": "lost", "DeviceJoined": "idle", "DeviceLeft": "left"}


def _parsed(raw: bytes) -> dict[str, Any]:
    line = loads(raw)
    if not isinstance(line, dict):
        raise ValueError("not an object")
    return line
