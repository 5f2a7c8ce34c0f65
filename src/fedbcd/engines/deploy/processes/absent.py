"""Devices that belong to a server and have not been connected for long: proposed for dismissal, or
dismissed by rule.
"""

import time
from collections.abc import Callable, Iterable

MOST_NAMED = 20  # devices in one sentence


class Absent:
    """Of one server. Time counts from its start, since nobody knows what was before."""

    def __init__(self, after_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._now = after_s, now
        self._seen: dict[int, float] = {}
        self._told: frozenset[int] = frozenset()
        self.devices: tuple[int, ...] = ()

    def look(self, members: Iterable[int], connected: Iterable[int]) -> list[int]:
        """Those who have been away for too long since this was asked last."""
        now, here = self._now(), frozenset(connected)
        self._seen = {i: now if i in here else self._seen.get(i, now) for i in members}
        self.devices = tuple(
            sorted(i for i, seen in self._seen.items() if now - seen >= self._after_s)
        )
        news = [i for i in self.devices if i not in self._told]
        self._told = frozenset(self.devices)
        return news

    @property
    def trouble(self) -> list[str]:
        """A proposal, in a sentence."""
        if not self.devices:
            return []
        named = ", ".join(map(str, self.devices[:MOST_NAMED]))
        more = len(self.devices) - MOST_NAMED
        return [
            f"not connected for {self._after_s:g} s or more: device {named}"
            f"{f' and {more} more' if more > 0 else ''}; 'fedbcd dismiss' ends their membership"
        ]
