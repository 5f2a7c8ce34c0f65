"""Time: a clock that no jump of the machine's own can move back or far ahead, and the hybrid
logical time of what happens.

Nothing that a peer says, and nothing that was recorded while a clock was wrong, makes a role wait:
it goes on, and says how far off it is.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from fedbcd.protocol.messages import Actor

TICK_S = 1e-6  # seconds between two events of one role at least, and between cause and effect
AHEAD_S = 5.0  # a peer's clock may carry ours ahead by this
OFF_S = 2 * AHEAD_S  # a clock that is further off than this is told of
# a wall clock that has been further ahead than that for this long is believed
LASTING_S = 60.0
# for tests: a file with lines `ACTOR SECONDS`, by how much the wall clock of that role is wrong
FALSE_CLOCKS = "FEDBCD_FALSE_CLOCKS"


def wall(actor: Actor = "") -> float:
    file = os.environ.get(FALSE_CLOCKS)
    lines = [] if file is None else [line.split() for line in Path(file).read_text().splitlines()]
    return time.time() + sum(float(seconds) for one, seconds in lines if one == actor)


class SteadyClock:
    """Seconds since the run began, for one process: what the wall said when it began, and on from
    there at the rate of time.

    Where the wall gets ahead, a little of it is followed at once, and more once it has lasted: the
    machine slept, or was set right. When the wall goes back this clock goes on; a process that
    begins later reads the wall anew.
    """

    def __init__(
        self,
        epoch: float,
        read_wall: Callable[[], float] = wall,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._read_wall = read_wall
        self._steady = steady
        self._seen = steady()
        self._now = self.on_the_wall()
        self._ahead_since: float | None = None  # the wall

    def begin_at(self, time: float) -> None:
        """Go on from this time, if it is earlier now."""
        self._now = max(self._now, time)

    def now(self) -> float:
        seen = self._steady()
        self._now, self._seen = self._now + seen - self._seen, seen
        lead = self.on_the_wall() - self._now
        since = seen if self._ahead_since is None else self._ahead_since
        self._ahead_since = since if lead > AHEAD_S and seen - since < LASTING_S else None
        if self._ahead_since is None:
            self._now += max(lead, 0.0)
        return self._now

    def on_the_wall(self) -> float:
        return self._read_wall() - self._epoch


class HybridClock:
    """The time of events. In order of this time causes come before effects, as far as clocks are
    right within `AHEAD_S`.

    `last` is the time of the latest event; who takes a time for an event says so by setting it.
    While `last` is ahead of the local clock, time is a counter: it goes on by the smallest steps
    until the clock has caught up.
    """

    def __init__(self, last: float = 0.0) -> None:
        self.last = last

    def at(self, now: float) -> float:
        """The time of an event that comes from within, at local time `now`."""
        return max(now, self.last + TICK_S, math.nextafter(self.last, math.inf))

    def after(self, sent: float, now: float) -> float:
        """The time of an event that a letter brings which was sent at `sent`: after that, but not
        far ahead of `now`.
        """
        return self.at(max(now, min(sent, now + AHEAD_S) + TICK_S))


def said_at(time: float, now: float) -> float:
    """What a letter says of the time at which it was sent: a role that counts does not carry its
    peers along.
    """
    return max(min(time, now + AHEAD_S), 0.0)
