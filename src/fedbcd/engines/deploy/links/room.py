"""Memory for models under way to one role: who finds none waits, and who has some and does not use
it loses it to those who wait.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

LOOK_S = 0.5  # how often those who wait look at those who have room

Cut = Callable[[str], None]


@dataclass(eq=False)
class Share:
    """The room of one letter."""

    peer: str
    size: int
    until: float = 0.0  # when it should have come, by the monotonic clock
    cut: Cut = field(default=lambda _: None, repr=False)


class MemoryBudget:
    """So many bytes over all peers, one letter at a time of each; the longest of all always finds
    room when there is nobody else.
    """

    def __init__(self, total: int, least_rate: float = 1e5, grace_s: float = 20.0) -> None:
        """While others wait, a letter has `grace_s` and what it takes at `least_rate` bytes a
        second.
        """
        self._total = self._free = total
        self._least_rate, self._grace_s = least_rate, grace_s
        self._held: list[Share] = []
        self._waiting: list[tuple[Share, asyncio.Future[None]]] = []
        self._cuts: Counter[str] = Counter()  # peers that have lost theirs come after the others

    async def take(self, size: int, peer: str = "", cut: Cut = lambda _: None) -> Share:
        """Wait for room; it is to be given back. `cut` is told why it is lost before that."""
        share = Share(peer, min(size, self._total), cut=cut)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((share, future))
        self._serve()
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=LOOK_S)
                self._look()
        except asyncio.CancelledError:
            self.give_back(share)
            raise
        return share

    def give_back(self, share: Share) -> None:
        """Once or more often."""
        if share in self._held:
            self._held.remove(share)
            self._free += share.size
        self._waiting = [entry for entry in self._waiting if entry[0] is not share]
        self._serve()

    def _serve(self) -> None:
        """In order of arrival, but for those that were cut; a peer has one share at a time."""
        self._waiting.sort(key=lambda entry: self._cuts[entry[0].peer])
        for share, future in [*self._waiting]:
            if share.peer and any(other.peer == share.peer for other in self._held):
                continue
            if share.size > self._free:
                return
            self._waiting.remove((share, future))
            self._free -= share.size
            share.until = time.monotonic() + self._grace_s + share.size / self._least_rate
            self._held.append(share)
            if not future.done():
                future.set_result(None)

    def _look(self) -> None:
        """Somebody waits: cut off the one that is the most overdue."""
        late = min(self._held, key=lambda share: share.until, default=None)
        if self._waiting and late is not None and late.until < time.monotonic():
            self._cuts[late.peer] += 1
            self.give_back(late)
            late.cut(
                f"{late.peer} sends a model of {late.size} bytes with less than"
                f" {self._least_rate:g} bytes a second, while others wait for its room"
            )
