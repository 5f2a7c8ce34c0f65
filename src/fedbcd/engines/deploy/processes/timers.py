"""Timers by key, and the first timeout: what was said last and has no answer yet is said again."""

import asyncio
import math
import time
from collections.abc import Callable

from fedbcd.engines.deploy.processes.timeouts import Timeouts
from fedbcd.protocol.messages import RetryDue

# kinds of messages that a peer answers without waiting for anybody else
IMMEDIATE = frozenset({"upload"})


class Timers:
    """Calls that are due later, one for each key."""

    def __init__(self) -> None:
        self._timers: dict[object, asyncio.TimerHandle] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._timers

    def set(self, key: object, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` after `seconds`; a timer of the same key is replaced."""
        self.drop(key)

        def fire() -> None:
            self._timers.pop(key, None)
            then()

        self._timers[key] = asyncio.get_running_loop().call_later(seconds, fire)

    def drop(self, key: object) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def drop_all(self) -> None:
        for key in [*self._timers]:
            self.drop(key)


class Retry:
    """Says the last thing again and again until it is answered; how long that took teaches the
    timeout.
    """

    def __init__(
        self,
        timers: Timers,
        timeouts: Timeouts,
        say_again: Callable[[], None],
        moved_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`moved_at`: when a model last moved between the peer and us, by the monotonic clock; the
        time that it takes is not one of silence.
        """
        self._timers = timers
        self._timeouts = timeouts
        self._say = say_again
        self._moved_at = moved_at
        self._unanswered: tuple[str, object] | None = None  # a kind of message, and which
        self._since = 0.0
        self._attempt = 0

    def expect(self, said: tuple[str, object] | None) -> None:
        if said == self._unanswered:
            return
        now = time.monotonic()
        if self._unanswered is not None:
            kind, took_s = self._unanswered[0], now - max(self._since, min(self._moved_at(), now))
            self._timeouts.retry(kind).observe(took_s)
            if kind in IMMEDIATE:
                self._timeouts.peer.observe(took_s)
        self._unanswered, self._since, self._attempt = said, now, 0
        self._arm()

    def say_again(self, is_new: bool = False) -> None:
        """Now, if there is something: the time is over, or (`is_new`) what was said on an old
        connection may be lost, and the peer is there.
        """
        if self._unanswered is not None:
            self._attempt = 0 if is_new else self._attempt + 1
            self._arm()
            self._say()

    def _due(self) -> None:
        quiet_s = time.monotonic() - self._moved_at()
        if quiet_s < self._seconds():
            self._timers.set(RetryDue, self._seconds() - quiet_s, self._due)
        else:
            self.say_again()

    def _seconds(self) -> float:
        assert self._unanswered is not None
        return self._timeouts.retry(self._unanswered[0]).seconds(self._attempt)

    def _arm(self) -> None:
        if self._unanswered is None:
            self._timers.drop(RetryDue)
        else:
            self._timers.set(RetryDue, self._seconds(), self._due)
