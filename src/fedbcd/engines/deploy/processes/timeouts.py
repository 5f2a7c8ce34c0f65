"""The three timeouts, from what was observed: say it again, give a device up, call a peer gone.

Each is a multiple of a high quantile of the latest durations, within bounds that the user may set.
Before anything has been observed, to say it again and to call a peer gone take their time (a part
of the upper bound); a device is given up from the lower bound on, since that costs little (its
upload counts all the same), and waiting for one that is gone stops its phase.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

WINDOW = 64  # durations that are remembered
QUANTILE = 0.95
MULTIPLE = 4.0
GROWTH = 2.0  # what took longer than so many times the patience of then counts as that much


@dataclass
class AdaptiveTimeout:
    """How long to wait for one kind of thing."""

    least: float
    most: float
    first: float | None = None  # before anything was observed; None: a quarter of the most
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, seconds: float, attempt: int = 0) -> None:
        """One of them makes patience grow by GROWTH * MULTIPLE at most, whatever a peer does."""
        self.seen.append(min(max(seconds, 0.0), GROWTH * self.seconds(attempt)))

    def seconds(self, attempt: int = 0) -> float:
        """How long to wait, twice as long for each attempt before."""
        first = self.most / MULTIPLE if self.first is None else self.first
        usual = quantile(self.seen, QUANTILE) if self.seen else first / MULTIPLE
        return min(max(MULTIPLE * usual * 2.0 ** min(attempt, 30), self.least), self.most)


class LostTimeout:
    """How long to wait for an activated device: by what all took of late, and by what this one took
    last.

    Twice as long after a device was given up that had been given all of the time, until an upload
    comes: if all are slow, whoever is let in next has longer, and none is given up for ever.
    """

    def __init__(self, least: float, most: float) -> None:
        self._all = AdaptiveTimeout(least, most, first=least)
        self._last: dict[int, float] = {}  # of each device
        self._attempt = 0
        self._given: dict[int, int] = {}  # device -> the attempt that its time was of

    def seconds(self, device: int) -> float:
        self._given[device] = self._attempt
        return max(
            self._all.seconds(self._attempt),
            min(MULTIPLE * self._last.get(device, 0.0), self._all.most),
        )

    def given_up(self, device: int) -> None:
        self._attempt = max(self._attempt, self._given.get(device, 0) + 1)

    def observe(self, device: int, seconds: float) -> None:
        self._last[device] = min(seconds, GROWTH * self.seconds(device))
        self._all.observe(seconds, self._attempt)
        self._attempt = 0


class Timeouts:
    """The three, by name; what is said again is timed for each kind of message apart, since an
    answer to a request may wait for a phase.
    """

    def __init__(
        self, retry_s: tuple[float, float], lost_s: tuple[float, float], peer_s: tuple[float, float]
    ) -> None:
        self._retry_bounds = retry_s
        self._retry: dict[Hashable, AdaptiveTimeout] = {}
        self.lost = LostTimeout(*lost_s)
        self.peer = AdaptiveTimeout(*peer_s)

    def retry(self, kind: Hashable) -> AdaptiveTimeout:
        return self._retry.setdefault(kind, AdaptiveTimeout(*self._retry_bounds))


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
