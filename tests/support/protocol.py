"""What the tests of the protocol machines share: looking at all of a machine, and one sample of
every event.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from fedbcd.errors import ProtocolError
from fedbcd.protocol import Coordinator, Device, Server
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    AnswersLost,
    Command,
    Contributed,
    DeadlinePassed,
    Declined,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Event,
    Failed,
    GlobalUpdated,
    Isolated,
    Mixed,
    OfflineDue,
    OfflineTrained,
    Recalled,
    Recovered,
    Restored,
    Resumed,
    RetryDue,
    Returned,
    ServerReady,
    Started,
    Trained,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    Woke,
)

Machine = Device | Server | Coordinator

EVERY_EVENT: tuple[Event, ...] = (
    Started(),
    RetryDue(),
    Woke(),
    OfflineDue(),
    OfflineTrained(session=0, steps=3),
    Activated(activation=0, model="z/3/0"),
    Trained(activation=0, steps=3),
    Failed(session=0),
    Acknowledged(activation=0),
    Declined(activation=0, reason="finite"),
    UpdateRequested(device=0, activation=0),
    Uploaded(device=0, activation=0, model="x/0/0"),
    Withdrawn(device=0, activation=0, incarnation=0, reason="finite"),
    DeviceLost(device=0, activation=0),
    DeadlinePassed(phase=0),
    DeviceJoined(device=9),
    DeviceLeft(device=0),
    DeviceReset(device=0),
    Resumed(device=0, incarnation=0),
    Restored(incarnation=1, activation=0, session=1 << 32, model="x/0/0"),
    AnswersLost(servers=(3,), models=("w/0/0",)),
    Recovered(generation=1),
    Returned(device=0, activation=0, incarnation=0),
    Recalled(incarnation=1, activation=0),
    Contributed(device=0, incarnation=1, activation=0, model="c/0/1"),
    Mixed(phase=0, iteration=0, model="w/0/0"),
    GlobalUpdated(phase=0, model="z/1"),
    Isolated(phase=0),
    ServerReady(server=3, phase=0, iteration=0, model="z/3/0"),
)


@dataclass(frozen=True, slots=True)
class Nonsense(Event):
    """An event that no machine knows."""


def play(machine: Machine, events: Iterable[Event]) -> list[Command]:
    """Feed events and return the commands of the last one."""
    commands: list[Command] = []
    for event in events:
        commands = machine.handle(event)
    return commands


def snapshot(machine: Machine) -> dict[str, Any]:
    """Every attribute of a machine, copied all the way down; a mapping also remembers its order,
    which is an order of arrival.
    """
    names = getattr(type(machine), "__slots__", None) or vars(machine)
    return {name: _frozen(copy.deepcopy(getattr(machine, name))) for name in names}


def _frozen(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def assert_refused(machine: Machine, event: Event, error: type[ProtocolError], match: str) -> None:
    """The event raises, the message says why, and the machine is what it was."""
    before = snapshot(machine)
    with pytest.raises(error, match=match):
        machine.handle(event)
    assert snapshot(machine) == before


def assert_ignored(machine: Machine, event: Event) -> None:
    """The event is normal, asks for nothing and leaves the machine what it was."""
    before = snapshot(machine)
    assert machine.handle(event) == []
    assert snapshot(machine) == before
