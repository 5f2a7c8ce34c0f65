"""The three timeouts, from what was observed: say it again, give a device up, call a peer gone.

Each is a multiple of a high quantile of the latest durations, within bounds that the user may set. Before anything has been
observed it is the upper bound divided by the multiple, so that a slow start is not mistaken for a loss.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

WINDOW = 64  # durations that are remembered
QUANTILE = 0.95
MULTIPLE = 4.0


@dataclass
class Patience:
    """How long to wait for one kind of thing."""

    least: float
    most: float
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, seconds: float) -> None:
        """It took this long."""
        self.seen.append(max(seconds, 0.0))

    def seconds(self, attempt: int = 0) -> float:
        """How long to wait, twice as long for each attempt before."""
        usual = quantile(self.seen, QUANTILE) if self.seen else self.most / MULTIPLE**2
        return min(max(MULTIPLE * usual * 2.0 ** min(attempt, 30), self.least), self.most)


class Timeouts:
    """The three, by name; what is said again is timed for each kind of message apart, since an answer to a request may wait for a phase."""

    def __init__(self, retry_s: tuple[float, float], lost_s: tuple[float, float], peer_s: tuple[float, float]) -> None:
        self._retry_bounds = retry_s
        self._retry: dict[Hashable, Patience] = {}
        self.lost = Patience(*lost_s)
        self.peer = Patience(*peer_s)

    def retry(self, kind: Hashable) -> Patience:
        """When to say a message of this kind again."""
        return self._retry.setdefault(kind, Patience(*self._retry_bounds))


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
