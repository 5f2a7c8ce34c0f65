"""Timers by key, and the first timeout: what was said last and has no answer yet is said again."""

import asyncio
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

    def __init__(self, timers: Timers, timeouts: Timeouts, say_again: Callable[[], None]) -> None:
        self._timers = timers
        self._timeouts = timeouts
        self._say = say_again
        self._unanswered: tuple[str, object] | None = None  # a kind of message, and which
        self._since = 0.0
        self._attempt = 0

    def expect(self, said: tuple[str, object] | None) -> None:
        if said == self._unanswered:
            return
        now = time.monotonic()
        if self._unanswered is not None:
            kind, took_s = self._unanswered[0], now - self._since
            self._timeouts.retry(kind).observe(took_s)
            if kind in IMMEDIATE:
                self._timeouts.peer.observe(took_s)
        self._unanswered, self._since, self._attempt = said, now, 0
        self._arm()

    def say_again(self) -> None:
        """Now, if there is something: the time is over, or what was said on an old connection may
        be lost.
        """
        if self._unanswered is not None:
            self._attempt += 1
            self._arm()
            self._say()

    def _arm(self) -> None:
        if self._unanswered is None:
            self._timers.drop(RetryDue)
        else:
            seconds = self._timeouts.retry(self._unanswered[0]).seconds(self._attempt)
            self._timers.set(RetryDue, seconds, self.say_again)
