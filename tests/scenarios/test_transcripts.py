"""Transcripts: small federations played on a fixed clock, every transition written down beside the sentence that licenses it.

The texts in `transcripts/` are meant to be read. `pytest tests/scenarios/test_transcripts.py --record` rewrites them on purpose.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

# ----------------------------------------------------------------------------------------------------------------- short forms
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
    return FORMS[type(value)].format(**{name: getattr(value, name) for name in value.__slots__})


# ---------------------------------------------------------------------------------------------------------------- the paper
@dataclass(frozen=True)
class Transition:
    """One call of `handle`."""

    actor: Actor
    before: object
    event: Event
    commands: Sequence[Command]
    after: object

    def by(self, actor: str, event: type[Event], *said: type[Event] | type[Command]) -> bool:
        """Whether it is this kind of actor and event, and all of these are among the commands or the messages sent."""
        kinds = {type(c) for c in self.commands} | {type(c.message) for c in self.commands if isinstance(c, Send)}
        return self.actor.startswith(actor) and isinstance(self.event, event) and set(said) <= kinds


@dataclass(frozen=True)
class Licence:
    """A sentence of the paper and the transitions that it licenses."""

    step: str
    sentence: str
    when: Callable[[Transition], bool]


BEYOND = "beyond the paper"
ASK = Licence(
    "Sync-cloud (i)",
    "cloud servers accept update requests from edge devices, send the global model z(t) to these activated edge devices",
    lambda t: t.by("server", UpdateRequested, Activated),
)
FEDBCD = [
    ASK,
    Licence("Sync-cloud (i)", "wait for them to perform the local update (4)", lambda t: t.by("device", Activated, Train)),
]
BEGIN = Licence(
    "Sync-cloud (i)",
    "A new round t starts with the 'response and update' phase",
    lambda t: t.by("server", Started, OpenPhase),
)
END_OF_PHASE = Licence(
    "Sync-cloud (i)",
    "this phase ends when it receives x_i(t+1)'s from a pre-determined number of edge devices",
    lambda t: t.by("server", Uploaded, Absorb, ServerReady),
)
REPLACE = Licence(
    "Sync-cloud (i)",
    "this cloud server replaces its local copy of x_i(t)'s with x_i(t+1)'s",
    lambda t: t.by("server", Uploaded, Absorb),
)
SYNC = [
    BEGIN,
    END_OF_PHASE,
    REPLACE,
    Licence(
        "Sync-cloud (ii)",
        "Once hearing from all cloud servers, this coordinator enters the 'aggregation' phase, "
        "where it executes (5) to obtain z(t+1) and broadcasts it back",
        lambda t: t.by(COORDINATOR, ServerReady, StepGlobal),
    ),
    Licence(
        "Sync-cloud (ii)",
        "After receiving z(t+1), the cloud servers become available again for the next round of update",
        lambda t: t.by("server", GlobalUpdated, OpenPhase),
    ),
]
ASYNC = [
    Licence(
        "Async-cloud (i)",
        "cloud servers that finished the 'response and update' phase send their model z_n(t)'s to the coordinator",
        lambda t: t.by("server", Uploaded, ServerReady),
    ),
    Licence(
        "Async-cloud (ii)",
        "this coordinator calculates w(t) [...] and sends w(t) to cloud servers in V(t)",
        lambda t: t.by(COORDINATOR, ServerReady, MixModels),
    ),
    Licence(
        "Async-cloud (ii)",
        "The coordinator waits until it hears from the first B cloud servers V(t)",
        lambda t: t.by(COORDINATOR, ServerReady) and t.before != t.after,
    ),
    Licence(
        "Async-cloud (iii)",
        "use received w(t) as w_n(t) and update z_n(t+1) by (6)",
        lambda t: t.by("server", Mixed, StepModel),
    ),
    BEGIN,
    REPLACE,
]
