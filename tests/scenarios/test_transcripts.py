"""Transcripts: small federations played on a fixed clock, every transition written down beside the
sentence that licenses it.

The texts in `transcripts/` are meant to be read. `pytest tests/scenarios/test_transcripts.py
--record` rewrites them on purpose.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from fedbcd.protocol import Coordinator, Device, DeviceState, Server
from fedbcd.protocol.clouds import AsyncCloud, Cloud, RigorousCloud, SyncCloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    Command,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    Dismiss,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    MixModels,
    OfflineDue,
    OfflineTrained,
    OpenPhase,
    Pull,
    RetryDue,
    Send,
    ServerReady,
    Started,
    StepGlobal,
    StepModel,
    Train,
    Trained,
    TrainOffline,
    UpdateRequested,
    Uploaded,
    Woke,
    device_actor,
    number_of,
    server_actor,
)

TRANSCRIPTS = Path(__file__).parent / "transcripts"
MESSAGE_TAKES = 0.1
OFFLINE_EVERY = 2.0
OFFLINE_TAKES = 0.5

# -------------------------------------------------------------------------------------------------
# short forms
FORMS: Mapping[type[Event] | type[Command], str] = {
    Started: "Started",
    RetryDue: "RetryDue",
    Woke: "Woke",
    OfflineDue: "OfflineDue",
    OfflineTrained: "OfflineTrained session {session}",
    Activated: "Activated {activation} with {model}",
    Trained: "Trained {activation}",
    Acknowledged: "Acknowledged {activation}",
    UpdateRequested: "UpdateRequested {activation} by device/{device}",
    Uploaded: "Uploaded {model}",
    DeviceLost: "DeviceLost device/{device} in {activation}",
    DeviceJoined: "DeviceJoined device/{device}",
    DeviceLeft: "DeviceLeft device/{device}",
    Mixed: "Mixed {phase}.{iteration} {model}",
    GlobalUpdated: "GlobalUpdated {phase} {model}",
    Isolated: "Isolated {phase}",
    ServerReady: "ServerReady {phase}.{iteration} {model}",
    Train: "Train towards {model}",
    TrainOffline: "TrainOffline session {session}",
    Pull: "Pull towards {model}",
    OpenPhase: "OpenPhase {phase}",
    Absorb: "Absorb x/{device}/{activation}",
    Admit: "Admit device/{device} at {model}",
    Dismiss: "Dismiss device/{device}",
    StepModel: "Step {mixed} to {result}",
    AdoptModel: "Adopt {model}",
    StepGlobal: "StepGlobal {model} to {result}",
}


def short(value: Event | Command) -> str:
    """One event or command in a few words."""
    if isinstance(value, Send):
        return f"{value.to}: {short(value.message)}"
    if isinstance(value, MixModels):
        return f"Mix {' + '.join(value.models)} to {', '.join(dict.fromkeys(value.results))}"
    names: tuple[str, ...] = value.__slots__
    return FORMS[type(value)].format(**{name: getattr(value, name) for name in names})


# ------------------------------------------------------------------------------------------------
# the paper
@dataclass(frozen=True)
class Transition:
    """One call of `handle`."""

    time_s: float
    actor: Actor
    before: object  # the state, where the machine has one
    event: Event
    commands: Sequence[Command]
    after: object
    late: bool  # a server hears of a phase that it has left

    def kinds(self) -> set[type]:
        """What it says: the commands, and the messages in them."""
        return {type(c) for c in self.commands} | {
            type(c.message) for c in self.commands if isinstance(c, Send)
        }

    def text(self) -> str:
        """The line, but for the paper."""
        commands = "; ".join(map(short, self.commands)) or "nothing"
        return f"{self.time_s:5.1f}  {self.actor:<11}  {short(self.event):<30} -> {commands}"


@dataclass(frozen=True)
class Licence:
    """A sentence, its place in the paper, and the transitions that it licenses: all of `says` (or,
    if empty, silence).
    """

    place: str
    sentence: str
    actor: str
    event: type[Event]
    says: tuple[type, ...] = ()
    before: object = None
    after: object = None
    mixes: bool | None = None
    late: bool | None = None

    def fits(self, transition: Transition) -> bool:
        """Whether it licenses this transition."""
        return (
            transition.actor.startswith(self.actor)
            and isinstance(transition.event, self.event)
            and (set(self.says) <= transition.kinds() if self.says else not transition.commands)
            and self.before in (None, transition.before)
            and self.after in (None, transition.after)
            and self.mixes in (None, MixModels in transition.kinds())
            and self.late in (None, transition.late)
        )


# Sync-cloud protocol
BEGIN = "A new round t starts with the 'response and update' phase"
REQUEST = (
    "cloud servers accept update requests from edge devices, send the global model z(t) to these"
    " activated edge devices"
)
LOCAL = "wait for them to perform the local update (4)"
END = "this phase ends when it receives x_i(t+1)'s from a pre-determined number of edge devices"
REPLACE = "this cloud server replaces its local copy of x_i(t)'s with x_i(t+1)'s"
ALL = "Once hearing from all cloud servers, this coordinator enters the 'aggregation' phase"
AGAIN = (
    "After receiving z(t+1), the cloud servers become available again for the next round of update"
)
# Async-cloud protocol
SEND_Z = (
    "cloud servers that finished the 'response and update' phase send their model z_n(t)'s to the"
    " coordinator"
)
FIRST_B = "The coordinator waits until it hears from the first B cloud servers V(t)"
MIX = "this coordinator calculates w(t)=[...] and sends w(t) to cloud servers in V(t)"
USE_W = "they use received w(t) as w_n(t) and update z_n(t+1) by (6)"
# Async-cloud protocol (rigorous)
ONLY_T = "only cloud-server models at round t will be accepted"
SEND_Z_AT_T = (
    "finished the 'response and update' phase directly sends its model z_n(t) to the coordinator"
)
ISOLATE = "It will also send an 'isolation' signal to cloud servers not in V(t)"
RIGOROUS_W = "cloud servers in V(t) use received w(t) as w_n(t) and update z_n(t+1) by (6)"
WAIT_ALONE = "the isolated cloud servers will wait until their 'edge-device update' phase ends"
STEP_ALONE = "and then use w_n(t)=z_n(t) in update (6) to obtain z_n(t+1)"
# Sync-cloud protocol (for FedBCD-I)
OFFLINE = "edge devices that are available run local training (for a round) offline"
STABLE = (
    "edge devices that are also in temporarily stable communication condition send their update"
    " requests"
)
MISS = "Edge devices that miss this phase will start the next round of local training"
SUSPEND = "it will stop training until it successfully gets activated"
ADJUST = "wait for them to adjust their local models based on lines 13-19 in Algorithm 2"

S = DeviceState
OURS = "not in the paper"
START = Licence("Sync-cloud (i)", BEGIN, "server", Started, (OpenPhase,))
COPY = Licence("Sync-cloud (i)", REPLACE, "server", Uploaded, (Absorb,))
PERSONAL = [  # FedBCD's devices
    Licence("Sync-cloud (i)", REQUEST, "server", UpdateRequested, (Activated,)),
    Licence("Sync-cloud (i)", LOCAL, "device", Activated, (Train,)),
]
INTUITIVE = [  # FedBCD-I's devices
    Licence("FedBCD-I (i)", OFFLINE, "device", OfflineDue, (TrainOffline,), before=S.IDLE),
    Licence("FedBCD-I (ii)", STABLE, "device", Woke, (UpdateRequested,)),
    Licence("FedBCD-I (ii)", MISS, "device", OfflineDue, (TrainOffline,), before=S.ASKING),
    Licence("FedBCD-I (ii)", SUSPEND, "device", OfflineTrained, after=S.SUSPENDED),
    Licence("FedBCD-I (ii)", SUSPEND, "device", OfflineDue, before=S.SUSPENDED),
    Licence("FedBCD-I (iii)", REQUEST, "server", UpdateRequested, (Activated,)),
    Licence("FedBCD-I (iii)", ADJUST, "device", Activated, (Pull,)),
    Licence("FedBCD-I (iii)", ADJUST, "device", OfflineTrained, (Pull,)),
    Licence(
        OURS, "it finishes its offline round first", "device", Activated, before=S.ASKING_OFFLINE
    ),
]
SYNC = [
    START,
    Licence("Sync-cloud (i)", END, "server", Uploaded, (Absorb, ServerReady)),
    COPY,
    Licence("Sync-cloud (ii)", ALL, COORDINATOR, ServerReady, (StepGlobal,)),
    Licence("Sync-cloud (ii)", AGAIN, "server", GlobalUpdated, (OpenPhase,)),
]
INTUITIVE_SYNC = [
    START,
    *(replace(licence, place="FedBCD-I (iii)") for licence in SYNC[1:]),
]  # both are its (iii)
ASYNC = [
    START,
    Licence("Async-cloud (i)", SEND_Z, "server", Uploaded, (Absorb, ServerReady)),
    Licence("Async-cloud (ii)", MIX, COORDINATOR, ServerReady, (MixModels,)),
    Licence("Async-cloud (iii)", USE_W, "server", Mixed, (StepModel,)),
]
WAIT = Licence("Async-cloud (ii)", FIRST_B, COORDINATOR, ServerReady)
RIGOROUS = [
    START,
    Licence("Appendix A (i)", SEND_Z_AT_T, "server", Uploaded, (Absorb, ServerReady)),
    Licence("Appendix A (i)", ONLY_T, COORDINATOR, ServerReady, (Isolated,), mixes=False),
    Licence("Appendix A (ii)", FIRST_B, COORDINATOR, ServerReady),
    Licence("Appendix A (iii)", ISOLATE, COORDINATOR, ServerReady, (MixModels, Isolated)),
    Licence("Appendix A (iv)", RIGOROUS_W, "server", Mixed, (StepModel,)),
    Licence("Appendix A (iv)", STEP_ALONE, "server", Uploaded, (Absorb, StepModel)),
    Licence("Appendix A (iv)", STEP_ALONE, "server", Isolated, (StepModel,)),
    Licence("Appendix A (iv)", WAIT_ALONE, "server", Isolated, late=False),
    Licence(OURS, "a late copy is normal", "server", Isolated, late=True),
]
MEMBERS = [
    Licence(OURS, "a new device starts from z_n and counts", "server", DeviceJoined, (Admit,)),
    Licence(OURS, "a device that leaves no longer counts", "server", DeviceLeft, (Dismiss,)),
    Licence(OURS, "what a device sent before it left is let go", "server", Uploaded),
    Licence(
        OURS, "a device that comes back finishes what it had begun", "device", RetryDue, (Uploaded,)
    ),
]
FAULTS = [
    Licence(
        OURS,
        "the device had its place; the next in the queue has it now",
        "server",
        DeviceLost,
        (Activated,),
    ),
    Licence(OURS, "a retry repeats the last thing said", "device", RetryDue, (UpdateRequested,)),
    Licence(OURS, "a retry repeats the last thing said", "device", RetryDue, (Uploaded,)),
    Licence(OURS, "a retry repeats the last thing said", "server", RetryDue, (ServerReady,)),
    Licence(OURS, "a lost answer is given again", COORDINATOR, ServerReady, (Mixed,), mixes=False),
    Licence(
        OURS,
        "between phases a copy is let go, and a late upload is held for the next",
        "server",
        Uploaded,
        (Acknowledged,),
    ),
    Licence(OURS, "a late copy is normal", "server", Mixed),
    Licence(OURS, "a late copy is normal", "device", Activated),
]


# ------------------------------------------------------------------------------------------------
# the stage
@dataclass
class Scenario:
    """A federation, its fixed delays, and what the script adds to them."""

    title: str
    cloud: Cloud
    servers: list[list[DeviceId]]
    active: int
    until_s: float
    licences: list[Licence]
    asks_s: dict[DeviceId, float]  # from the start or the last acknowledgement to the next request
    works_s: dict[DeviceId, float]  # from the activation to the upload
    offline_limit: int | None = None
    offline_devices: list[DeviceId] = field(
        default_factory=list
    )  # FedBCD-I: those that are available
    script: list[tuple[float, Actor, Event]] = field(default_factory=list)
    lost: list[str] = field(
        default_factory=list
    )  # "to: message"; each entry loses the message once
    copied: dict[str, float] = field(
        default_factory=dict
    )  # "to: message" -> how much later a copy of it arrives


class Stage:
    """Plays a scenario and writes the transcript."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.coordinator = scenario.cloud.coordinator(len(scenario.servers), 1)
        self.actors: dict[Actor, Coordinator | Server | Device] = {COORDINATOR: self.coordinator}
        for n, members in enumerate(scenario.servers):
            self.actors[server_actor(n)] = Server(
                n, members, scenario.active, sync=scenario.cloud.sync
            )
        for device in scenario.asks_s:
            self.actors[device_actor(device)] = Device(
                device, self._home(device), scenario.offline_limit
            )
        self.lost = list(scenario.lost)
        self.copied = dict(scenario.copied)
        self.quoted: set[str] = set()
        self.lines = [scenario.title, ""]
        self._agenda: list[tuple[float, int, Actor, Event]] = []
        self._order = count()

    def _home(self, device: DeviceId) -> Actor:
        """Devices that join later have the last server as their home."""
        homes = [
            server_actor(n) for n, members in enumerate(self.scenario.servers) if device in members
        ]
        return homes[0] if homes else server_actor(len(self.scenario.servers) - 1)

    def play(self) -> str:
        """The whole transcript."""
        self._prepare()
        while self._agenda and self._agenda[0][0] <= self.scenario.until_s:
            time_s, _, actor, event = heapq.heappop(self._agenda)
            self._step(time_s, actor, event)
        return "\n".join(line.rstrip() for line in self.lines) + "\n"

    def _prepare(self) -> None:
        for n in range(len(self.scenario.servers)):
            self._at(0.0, server_actor(n), Started())
        for device, asks_s in self.scenario.asks_s.items():
            if any(device in members for members in self.scenario.servers):
                self._at(asks_s, device_actor(device), Woke())
        for device in self.scenario.offline_devices:
            for k in range(int(self.scenario.until_s / OFFLINE_EVERY) + 1):
                self._at(k * OFFLINE_EVERY, device_actor(device), OfflineDue())
        for time_s, actor, event in self.scenario.script:
            self._at(time_s, actor, event)

    def _at(self, time_s: float, actor: Actor, event: Event) -> None:
        heapq.heappush(self._agenda, (round(time_s, 6), next(self._order), actor, event))

    def _step(self, time_s: float, actor: Actor, event: Event) -> None:
        machine, rounds = self.actors[actor], self.coordinator.round
        before = getattr(machine, "state", None)
        late = (
            isinstance(machine, Server) and getattr(event, "phase", machine.phase) < machine.phase
        )
        commands = machine.handle(event)
        self._write(
            Transition(
                time_s, actor, before, event, commands, getattr(machine, "state", None), late
            )
        )
        for command in commands:
            self._execute(time_s, actor, command)
        if isinstance(event, Acknowledged):
            self._at(time_s + self.scenario.asks_s[number_of(actor)], actor, Woke())
        if self.coordinator.round > rounds:
            self.lines += ["", f"-- round {self.coordinator.round}"]

    def _execute(self, time_s: float, actor: Actor, command: Command) -> None:
        match command:
            case Send():
                self._send(time_s, command)
            case Train() | Pull():
                done = Trained(activation=command.activation, steps=1)
                self._at(time_s + self.scenario.works_s[number_of(actor)], actor, done)
            case TrainOffline():
                self._at(
                    time_s + OFFLINE_TAKES, actor, OfflineTrained(session=command.session, steps=1)
                )

    def _send(self, time_s: float, send: Send) -> None:
        name = short(send)
        if name in self.lost:
            self.lost.remove(name)
            self.lines.append(f"{time_s:5.1f}  network      loses {name}")
            return
        self._at(time_s + MESSAGE_TAKES, send.to, send.message)
        if name in self.copied:
            self._at(time_s + self.copied.pop(name), send.to, send.message)

    def _write(self, transition: Transition) -> None:
        licence = next(
            (licence for licence in self.scenario.licences if licence.fits(transition)), None
        )
        line = transition.text()
        if licence is not None:
            sentence = licence.sentence if licence.place == OURS else f'"{licence.sentence}"'
            new = licence.sentence not in self.quoted
            self.quoted.add(licence.sentence)
            line = f"{line:<122}  | {licence.place}" + (f": {sentence}" if new else "")
        self.lines.append(line)


# ------------------------------------------------------------------------------------------------
# the scenarios
SCENARIOS: dict[str, Scenario] = {
    "sync": Scenario(
        title=(
            "FedBCD, Sync-cloud: 2 servers of 3 devices, a phase needs 2 uploads. Server 0 waits"
            " for server 1."
        ),
        cloud=SyncCloud(),
        servers=[[0, 1, 2], [3, 4, 5]],
        active=2,
        until_s=7.0,
        licences=[*PERSONAL, *SYNC],
        asks_s={0: 0.5, 1: 0.8, 2: 1.0, 3: 0.5, 4: 1.0, 5: 4.0},
        works_s={0: 1.0, 1: 1.0, 2: 1.0, 3: 2.5, 4: 1.0, 5: 1.0},
    ),
    "async": Scenario(
        title=(
            "FedBCD, Async-cloud: 3 servers of 2 devices, B = 2, a phase needs 1 upload. Nobody"
            " waits for the slow server 2, and server 1, third in round 1, comes first in round 2."
        ),
        cloud=AsyncCloud(first=2),
        servers=[[0, 1], [2, 3], [4, 5]],
        active=1,
        until_s=5.9,
        licences=[*PERSONAL, *ASYNC, WAIT],
        asks_s={0: 0.5, 1: 2.0, 2: 1.0, 3: 3.0, 4: 0.5, 5: 9.0},
        works_s={0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0, 4: 3.0, 5: 1.0},
    ),
    "rigorous": Scenario(
        title=(
            "FedBCD, rigorous Async-cloud: 3 servers of 2 devices, B = 2, a phase needs 1 upload."
            " Server 2 is isolated in round 0, a moment too late, and in round 1, in the middle of"
            " its phase."
        ),
        cloud=RigorousCloud(first=2),
        servers=[[0, 1], [2, 3], [4, 5]],
        active=1,
        until_s=6.0,
        licences=[*PERSONAL, *RIGOROUS],
        asks_s={0: 0.5, 1: 2.0, 2: 1.0, 3: 3.0, 4: 0.5, 5: 0.6},
        works_s={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.6, 5: 2.4},
    ),
    "fedbcd-i-sync": Scenario(
        title=(
            "FedBCD-I, Sync-cloud: 2 servers of 3 and 2 devices, a phase needs 2 uploads, at most 2"
            " offline rounds in a row. Device 2 is out of reach."
        ),
        cloud=SyncCloud(),
        servers=[[0, 1, 2], [3, 4]],
        active=2,
        until_s=8.5,
        licences=[*INTUITIVE, *INTUITIVE_SYNC],
        asks_s={0: 1.0, 1: 1.2, 2: 99.0, 3: 2.2, 4: 1.5},
        works_s={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5, 4: 1.0},
        offline_limit=2,
        offline_devices=[0, 1, 2, 3, 4],
    ),
    "fedbcd-i-async": Scenario(
        title=(
            "FedBCD-I, Async-cloud: 3 servers of 2 devices, B = 2, a phase needs 1 upload, at most"
            " 2 offline rounds in a row. Devices 1 and 3 are not available, device 5 is out of"
            " reach."
        ),
        cloud=AsyncCloud(first=2),
        servers=[[0, 1], [2, 3], [4, 5]],
        active=1,
        until_s=6.2,
        licences=[*INTUITIVE, *ASYNC, WAIT],
        asks_s={0: 1.0, 1: 1.2, 2: 1.5, 3: 4.0, 4: 2.2, 5: 99.0},
        works_s={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 2.5, 5: 1.0},
        offline_limit=2,
        offline_devices=[0, 2, 4, 5],
    ),
    "join-and-leave": Scenario(
        title=(
            "Devices come and go (Async-cloud, B = 1, a phase needs 2 uploads). Device 1 leaves at"
            " work and comes back, device 4 is new, device 2 leaves for good."
        ),
        cloud=AsyncCloud(first=1),
        servers=[[0, 1, 2], [3]],
        active=2,
        until_s=5.9,
        licences=[*MEMBERS, *PERSONAL, *ASYNC, COPY],
        asks_s={0: 0.5, 1: 0.6, 2: 1.0, 3: 0.5, 4: 0.5},
        works_s={0: 3.0, 1: 1.5, 2: 2.5, 3: 1.0, 4: 1.0},
        script=[
            (1.5, "server/0", DeviceLeft(device=1)),
            (2.0, "server/1", DeviceJoined(device=4)),
            (2.1, "device/4", Woke()),
            (3.0, "server/0", DeviceJoined(device=1)),
            (3.1, "device/1", RetryDue()),
            (4.0, "server/0", DeviceLeft(device=2)),
        ],
    ),
    "lost-messages": Scenario(
        title=(
            "Losses, copies and a device that seems to vanish (Async-cloud, B = 2, 2 servers, a"
            " phase needs 1 upload). All is counted, and nothing twice."
        ),
        cloud=AsyncCloud(first=2),
        servers=[[0, 1, 2], [3, 4]],
        active=1,
        until_s=6.7,
        licences=[*PERSONAL, *ASYNC, WAIT, *FAULTS],
        asks_s={0: 0.5, 1: 0.7, 2: 2.5, 3: 0.5, 4: 9.0},
        works_s={0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0, 4: 1.0},
        lost=[
            "device/0: Activated 0 with z/0/0",
            "server/0: Uploaded x/0/0",
            "device/0: Acknowledged 0",
            "coordinator: ServerReady 0.0 z/0/0",
            "server/1: Mixed 0.0 w/0/0",
        ],
        copied={"device/3: Activated 0 with z/1/0": 0.6, "server/0: Mixed 0.0 w/0/0": 1.0},
        script=[
            (1.5, "device/0", RetryDue()),
            (2.0, "server/0", DeviceLost(device=0, activation=0)),
            (3.0, "device/0", RetryDue()),
            (3.5, "device/0", RetryDue()),
            (4.5, "server/0", RetryDue()),
            (5.0, "server/1", RetryDue()),
        ],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_machines_speak_as_the_transcript_says(name: str, record: bool) -> None:
    """Paper, section 'Sync-Cloud and Async-Cloud Communication Protocols for FedBCD' and Appendix
    A, step by step.
    """
    played = Stage(SCENARIOS[name]).play()
    path = TRANSCRIPTS / f"{name}.txt"
    if record:
        path.parent.mkdir(exist_ok=True)
        path.write_text(played, encoding="utf-8")
    assert played == path.read_text(encoding="utf-8"), (
        "if this is meant, run again with --record and read the difference"
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_sentence_of_a_scenario_is_played(name: str) -> None:
    """A sentence beside which nothing happens would be a promise without a test."""
    played = Stage(SCENARIOS[name]).play()
    unplayed = {
        licence.sentence for licence in SCENARIOS[name].licences if licence.sentence not in played
    }
    assert unplayed == set()


def test_every_loss_and_copy_of_the_script_happens() -> None:
    """A message that is never sent cannot be lost."""
    for scenario in SCENARIOS.values():
        stage = Stage(scenario)
        stage.play()
        assert (stage.lost, stage.copied) == ([], {})


def test_every_transcript_has_its_scenario() -> None:
    """No text is left behind."""
    assert {path.stem for path in TRANSCRIPTS.glob("*.txt")} == set(SCENARIOS)
