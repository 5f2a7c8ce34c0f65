"""Who may say what to whom, and what it may hold: written once, asked wherever a message arrives.

A link asks before it takes memory for a model, a role before its machine sees an event.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from fedbcd.errors import Refused
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    Actor,
    Contributed,
    Declined,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    Recalled,
    Restored,
    Resumed,
    ServerReady,
    UpdateRequested,
    Uploaded,
    Withdrawn,
)
from fedbcd.protocol.notices import Notice, PhaseNotice, RoundNotice

MOST = (1 << 53) - 1  # of any number: beyond, JSON readers and float clocks go astray
MODEL = re.compile(r"[a-z]+(/[0-9]{1,18}){1,4}")
WORD = re.compile(r"[a-z_]{1,32}")

# message -> the kinds of actors that may say it, and to which; nothing else comes from the network,
# but for the pings of any two that have something to say to each other
SENDERS: Mapping[type[Event | Notice], tuple[str, str]] = {
    **dict.fromkeys(
        (UpdateRequested, Uploaded, Withdrawn, Resumed, Contributed), ("device", "server")
    ),
    **dict.fromkeys((Activated, Acknowledged, Declined, Restored, Recalled), ("server", "device")),
    ServerReady: ("server", COORDINATOR),
    **dict.fromkeys((Mixed, GlobalUpdated, Isolated), (COORDINATOR, "server")),
    PhaseNotice: ("server", "device"),
    RoundNotice: (COORDINATOR, "server"),
}
PAIRS = frozenset(SENDERS.values())  # who has anything to say to whom


def kind_of(actor: Actor) -> str:
    return actor.partition("/")[0]


def check_sender(event: Any, sender: Actor, to: Actor, home: Actor | None = None) -> None:
    """Whether the receiver takes such an event from the network, and from this sender.

    A peer speaks only for itself. A device listens to its `home` only, where that is known.
    """
    name, (kind, takes) = type(event).__name__, SENDERS.get(type(event), ("", ""))
    if takes != kind_of(to):
        raise Refused(
            "event", f"{sender} may not send {name} to {to}, which takes no {name} from the network"
        )
    speaker = f"{kind}/{getattr(event, kind)}" if hasattr(event, kind) else home or kind
    if speaker != (kind_of(sender) if speaker == "server" else sender):
        raise Refused("identity", f"{sender} sent {event}, which only {speaker} may say")


def check_values(message: Any) -> None:
    """Numbers in range, reasons that are a word, and model names that fit a file name."""
    name = type(message).__name__
    for field in message.__slots__:
        value = getattr(message, field)
        if isinstance(value, int) and not 0 <= value <= MOST:
            raise Refused(
                "range", f"{name} has {field}={value!s:.30}; it must be from 0 to 2^53 - 1"
            )
        if field == "reason" and WORD.fullmatch(value) is None:
            raise Refused(
                "event", f"{field} is {value!r:.80}; it must be a word of at most 32 letters"
            )
        if field == "model" and MODEL.fullmatch(value) is None:
            raise Refused(
                "event", f"{field} is {value!r:.80}, which names no model (such as x/7/2)"
            )


def is_counter(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST


def is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def check_clock(sent: float) -> None:
    """Whether a letter says when it was sent; a clock that is wrong is no reason to refuse it."""
    if not 0 <= sent < math.inf:
        raise Refused(
            "clock", f"the letter was sent at {sent}, which is no time; clocks are finite and >= 0"
        )
