"""What comes in on one connection, and how much of it: so many letters a second, and of notices
that come in a burst the latest of each kind.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fedbcd.engines.deploy.links.fedbcd_pb2 import Notice

KINDS = 16  # of notices that are held at the same time
READ_S = 0.001  # for each notice that is passed over, so that nobody floods


class Bucket:
    """So many a second, and a burst of more."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._last = float(burst), time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._last) * self._rate, self._burst)
        self._last = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    @property
    def pause_s(self) -> float:
        return max((1 - self._tokens) / self._rate, 0.0)


class Notices:
    """Hands notices on. A burst is no fault of who sends: a line or a process has stood still."""

    def __init__(self, bucket: Bucket, hand_on: Callable[[Notice], Awaitable[None]]) -> None:
        self._bucket = bucket
        self._hand_on = hand_on
        self._held: dict[str, Notice] = {}
        self._wake = asyncio.Event()

    async def hear(self, notice: Notice) -> None:
        if not self._held and self._bucket.take():
            await self._hand_on(notice)
            return
        is_news = self._held.pop(notice.kind, None) is None
        if len(self._held) < KINDS:
            self._held[notice.kind] = notice
        self._wake.set()
        await asyncio.sleep(0.0 if is_news else READ_S)

    async def run(self) -> None:
        """Hand on what was held, at the rate."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._held:
                while not self._bucket.take():
                    await asyncio.sleep(self._bucket.pause_s)
                await self._hand_on(self._held.pop(next(iter(self._held))))
