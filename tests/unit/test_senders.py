"""Who may say what: one table, and everything that is not in it is refused."""

import itertools
from contextlib import suppress

import pytest

from fedbcd.errors import Refused
from fedbcd.protocol.messages import Event, Uploaded, Withdrawn
from fedbcd.protocol.senders import MOST, SENDERS, check_clock, check_sender, check_values
from fedbcd.record.eventlog import _TYPES, decode

ACTORS = ["device/1", "device/2", "server/1", "server/2", "coordinator", "operator"]
EVENTS = [kind for kind in _TYPES.values() if issubclass(kind, Event)]


def said_of_number_1(kind: type) -> Event:
    """Any event of this kind, about device 1 and server 1."""
    texts = {"model": "x/1/0", "reason": "word", "by": "operator", "journal": "0:"}
    texts |= {"among": [1], "servers": [1], "models": ["z/1/0"]}
    event = decode({kind.__name__: {name: texts.get(name, 1) for name in kind.__slots__}})
    assert isinstance(event, Event)
    return event


@pytest.mark.parametrize("kind", [k for k in EVENTS if k.__name__ != "DeviceLeft"])
def test_an_event_is_taken_from_those_in_the_table_and_from_nobody_else(kind: type) -> None:
    event, taken = said_of_number_1(kind), set()
    for sender, to in itertools.product(ACTORS, ACTORS):
        with suppress(Refused):
            check_sender(event, sender, to)
            taken.add((sender, to))
    speaks, hears = SENDERS.get(kind, ("nobody", "nobody"))
    speakers = [a for a in ACTORS if a.startswith(speaks)]
    if hasattr(event, speaks):
        speakers = [f"{speaks}/1"]
    assert taken == {(s, to) for s in speakers for to in ACTORS if to.startswith(hears)}


def test_a_device_listens_to_its_home_only() -> None:
    (kind,) = [k for k in SENDERS if k.__name__ == "Acknowledged"]
    check_sender(said_of_number_1(kind), "server/1", "device/1", home="server/1")
    with pytest.raises(Refused, match=r"server/2 sent Ackn.*, which only server/1 may say"):
        check_sender(said_of_number_1(kind), "server/2", "device/1", home="server/1")


@pytest.mark.parametrize("number", [-1, MOST + 1, 1 << 80])
def test_a_number_out_of_range_is_refused_with_the_range(number: int) -> None:
    with pytest.raises(Refused, match=r"activation=.*must be from 0 to 2\^53 - 1") as refused:
        check_values(Uploaded(device=0, activation=number, model="x/0/0"))
    assert refused.value.reason == "range"
    check_values(Uploaded(device=0, activation=MOST, model="x/0/0"))


@pytest.mark.parametrize("reason", ["", "two words", "UP", "a" * 33, "../x", "word\n"])
def test_a_reason_is_a_word(reason: str) -> None:
    with pytest.raises(Refused, match="must be a word"):
        check_values(Withdrawn(device=0, activation=0, incarnation=0, reason=reason))


@pytest.mark.parametrize("clock", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_clock_is_a_time(clock: float) -> None:
    with pytest.raises(Refused, match="is no time"):
        check_clock(clock)
