"""Named places at which a test can end a role: before and after each step that makes something
durable or visible.

`FEDBCD_FAILPOINT=before_commit` kills this process (SIGKILL) when it first comes to that place;
`before_commit:3` at the third time, `before_commit@Uploaded:3` at the third that concerns an
`Uploaded`. Off, a place costs one comparison.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fedbcd.errors import ConfigError

VARIABLE = "FEDBCD_FAILPOINT"


class Failpoint(Enum):
    """The places. `what` is the name of the tensor that is written, or of the event that is
    handled.
    """

    BEFORE_WRITE = "before_write"  # of a tensor's temporary file
    AFTER_WRITE = "after_write"
    AFTER_SYNC = "after_sync"
    AFTER_RENAME = "after_rename"  # the file is whole under its own name; nothing refers to it yet
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"
    AFTER_REMOVE = "after_remove"  # of files that nothing refers to any more
    BEFORE_SEND = "before_send"
    AFTER_SEND = "after_send"


class Stopped(BaseException):
    """Raised at a place instead of a kill, in tests that run several roles in one process."""


@dataclass
class _Armed:
    point: Failpoint
    what: str
    left: int
    action: Callable[[], None]


_armed: _Armed | None = None


def hit(point: Failpoint, what: str = "") -> None:
    if _armed is not None and point is _armed.point and _armed.what in ("", what):
        _count(_armed)


def _count(armed: _Armed) -> None:
    armed.left -= 1
    if armed.left == 0:
        armed.action()


def arm(
    point: Failpoint, what: str = "", times: int = 1, action: Callable[[], None] | None = None
) -> None:
    """From now on, act when the place is reached for the `times`-th time; by default raise
    `Stopped`.
    """
    global _armed
    _armed = _Armed(point, what, times, action or _stop)


def disarm() -> None:
    global _armed
    _armed = None


def arm_from_environment(environment: str | None = None) -> None:
    """What the variable FEDBCD_FAILPOINT asks for, if it is set; `NAME[@WHAT][:TIMES]`."""
    text = os.environ.get(VARIABLE, "") if environment is None else environment
    if not text:
        return
    place, _, times = text.partition(":")
    name, _, what = place.partition("@")
    known = {point.value: point for point in Failpoint}
    if name not in known or not (times or "1").isdecimal():
        raise ConfigError(
            f"{VARIABLE}={text!r} must be NAME[@WHAT][:TIMES], NAME one of {', '.join(known)}"
        )
    arm(known[name], what, int(times or 1), _kill)


def _stop() -> None:
    raise Stopped


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
