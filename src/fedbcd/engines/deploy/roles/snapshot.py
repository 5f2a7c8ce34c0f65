"""The state of a role as plain data, so that a recovery need not begin at the beginning: a
snapshot, and the events after it.

Events, enumerations and containers are written with their kind. A snapshot of another form than
today's objects is not used; then all events are handled again, which gives the same.
"""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from fedbcd.protocol.messages import Command, Event
from fedbcd.record.eventlog import decode, encode

VERSION = 1
Parts = Mapping[
    str, tuple[object, tuple[str, ...]]
]  # name -> an object, and those of its attributes that change


def names_of(machine: object) -> tuple[str, ...]:
    """All attributes of a protocol machine."""
    return tuple(getattr(machine, "__slots__", None) or vars(machine))


def take(parts: Parts, number: int, time: float) -> str:
    """A snapshot after `number` transitions, the last at `time`."""
    state = {
        part: {name: _packed(getattr(thing, name)) for name in names}
        for part, (thing, names) in parts.items()
    }
    return json.dumps(
        {"version": VERSION, "number": number, "time": time, "state": state}, separators=(",", ":")
    )


def put_back(parts: Parts, snapshot: str, most: int) -> tuple[int, float]:
    """Give these objects the state of a snapshot; how many transitions are in it, and the time of
    the last one.

    One that does not fit, or is ahead of the `most` transitions that there are, changes nothing and
    counts none.
    """
    try:
        data = json.loads(snapshot)
        number, time = int(data["number"]), float(data["time"])
        if data["version"] != VERSION or number > most or {*data["state"]} != {*parts}:
            return 0, 0.0
        values = [*_values(parts, data["state"])]
    except (KeyError, TypeError, ValueError):
        return 0, 0.0
    for thing, name, value in values:
        setattr(thing, name, value)
    return number, time


def _values(parts: Parts, state: dict[str, Any]) -> Iterator[tuple[object, str, Any]]:
    for part, (thing, names) in parts.items():
        if {*state[part]} != {*names}:
            raise ValueError(f"another form of {part}")
        for name in names:
            yield thing, name, _unpacked(state[part][name], type(getattr(thing, name)))


def _packed(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case Enum():
            return {"state": value.name}
        case Event() | Command():
            return {"message": encode(value)}
        case dict():
            return {"dict": [[_packed(key), _packed(item)] for key, item in value.items()]}
        case set() | frozenset():
            return {type(value).__name__: sorted(value)}
        case list() | tuple():
            return {type(value).__name__: [_packed(item) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot be part of a snapshot")


def _unpacked(data: Any, before: type) -> Any:
    """`before` is the kind of what was there: it knows the names of an enumeration."""
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    match kind:
        case "state":
            return before[inner]  # type: ignore[index]
        case "message":
            return decode(inner)
        case "dict":
            return {_unpacked(key, object): _unpacked(item, object) for key, item in inner}
        case "set" | "frozenset":
            return {"set": set, "frozenset": frozenset}[kind](inner)
        case "list" | "tuple":
            return {"list": list, "tuple": tuple}[kind](_unpacked(item, object) for item in inner)
    raise ValueError(f"unknown kind {kind}")
