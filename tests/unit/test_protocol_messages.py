"""The vocabulary, and the promise that the protocol half needs nothing but the standard library."""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

import fedbcd.protocol
from fedbcd.protocol import messages
from fedbcd.protocol.messages import (
    Command,
    Event,
    Started,
    Woke,
    device_actor,
    number_of,
    ref,
    server_actor,
)
from support.protocol import EVERY_EVENT

SOURCES = sorted(Path(fedbcd.protocol.__file__).parent.glob("*.py"))


def imported_modules(source: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_protocol_imports_only_the_standard_library_errors_and_itself(source: Path) -> None:
    """The machines are pure: 'standard library only', so that any engine can drive them. Beside
    errors, the hash by which a graph's links fail is plain integers, and what reads plain tables
    checks the settings of clouds.
    """
    ours = {
        name
        for name in imported_modules(source)
        if name.partition(".")[0] not in sys.stdlib_module_names
    }
    plain = {"fedbcd.errors", "fedbcd.addressed", "fedbcd.config"}
    assert {name for name in ours - plain if not name.startswith("fedbcd.protocol")} == set()


def test_the_import_test_sees_all_files() -> None:
    """Guards the test above against an empty list."""
    expected = {
        "__init__.py",
        "clouds.py",
        "coordinator.py",
        "device.py",
        "messages.py",
        "server.py",
    }
    assert {source.name for source in SOURCES} >= expected


def subclasses(base: type) -> list[type]:
    """The vocabulary below `base`."""
    return [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    ]


@pytest.mark.parametrize(
    "kind", [*subclasses(Event), *subclasses(Command)], ids=lambda kind: kind.__name__
)
def test_events_and_commands_are_frozen_values_without_room_for_more(kind: type) -> None:
    """An event is a past fact: nobody changes it."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(kind)


def test_the_samples_cover_every_event() -> None:
    """The tests that feed 'every event' feed every one."""
    assert {type(event) for event in EVERY_EVENT} == set(subclasses(Event))


def test_two_facts_are_the_same_if_they_say_the_same() -> None:
    """Machines and logs compare by value; two kinds of event without fields still differ."""
    assert len({Started(), Started()}) == 1
    assert len({Started(), Woke()}) == 2


def test_addresses_and_handles_read_as_the_module_says() -> None:
    """`z/3/17` is version 17 of server 3's model."""
    assert (device_actor(42), server_actor(3)) == ("device/42", "server/3")
    assert (number_of("device/42"), number_of("server/3")) == (42, 3)
    assert (ref("x", 42, 9), ref("z", 3, 17), ref("z", 17), ref("w", 5, 0, 3)) == (
        "x/42/9",
        "z/3/17",
        "z/17",
        "w/5/0/3",
    )
