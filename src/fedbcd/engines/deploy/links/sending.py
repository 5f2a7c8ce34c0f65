"""What goes out on one connection: letters in order, and notices between their parts.

A notice says how something stands, so of each kind only the latest waits. Of a model as much is
under way as the line carries in about a second more than an empty one would take, by what the
receiver says has arrived: what is said between the parts is not late, and both ends see that it
moves.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from fedbcd.engines.deploy.links.codec import CHUNK_BYTES, LEAST_CHUNK, Parcel
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Got, Part
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import Counts
from fedbcd.protocol.messages import Event

FIRST_WINDOW = 2 * LEAST_CHUNK  # bytes of models under way, on a line that is not known yet
LEAST_WINDOW, MOST_WINDOW = LEAST_CHUNK, 1 << 22
BEHIND_S = 1.0  # how much later than on the empty line something may arrive
OVERHEARD = 1  # the version of the protocol in which receivers do not say what has arrived

Write = Callable[[Frame], Awaitable[None]]


class Flow:
    """How much of models may be under way on one line, and how much is."""

    def __init__(self, is_told: bool) -> None:
        """`is_told`: the receiver says what has arrived; otherwise all that is sent has."""
        self.is_told = is_told
        self.moved_at = -math.inf  # when it was last seen that something arrives
        self._window = float(FIRST_WINDOW)
        self._under_way = 0
        self._quickest_s = math.inf
        self._marks: deque[tuple[tuple[int, int], float, int]] = deque()  # where, when, how much

    @property
    def chunk(self) -> int:
        size = int(self._window) // 4 if self.is_told else CHUNK_BYTES
        return min(max(size, LEAST_CHUNK), CHUNK_BYTES)

    @property
    def has_room(self) -> bool:
        return self._under_way == 0 or self._under_way + self.chunk <= self._window

    def sent(self, letter: int, offset: int, size: int) -> None:
        if self.is_told:
            self._under_way += size
            self._marks.append(((letter, offset), time.monotonic(), size))

    def taken(self) -> None:
        """The line has taken a part: those of a receiver that does not read soon find no room."""
        if not self.is_told:
            self.moved_at = time.monotonic()

    def got(self, letter: int, offset: int) -> bool:
        """The receiver has this much of a letter; whether that is news."""
        arrived, at, now = 0, 0.0, time.monotonic()
        while self._marks and self._marks[0][0] <= (letter, offset):
            _, at, size = self._marks.popleft()
            arrived += size
        if arrived == 0:
            return False
        self.moved_at = now
        self._under_way -= arrived
        self._quickest_s = min(self._quickest_s, now - at)
        late = (now - at) / (self._quickest_s + BEHIND_S)
        window = self._window / late if late > 1 else self._window + arrived
        self._window = min(max(window, LEAST_WINDOW), MOST_WINDOW)
        return True


class Sending:
    """The way out of one connection."""

    def __init__(
        self, write: Write, counts: Counts, queue: int, version: int, part: Part | None
    ) -> None:
        """At most `queue` letters wait, and as many refusals; `part` is what the peer has of a
        letter from a connection that broke.
        """
        self.flow = Flow(version > OVERHEARD)
        self._counts = counts
        self._write = write
        self._queue = queue
        self._part = part
        self._letters: deque[Letter] = deque()
        self._notices: dict[str, Frame] = {}
        self._refusals: deque[Frame] = deque()
        self._got: Frame | None = None
        self._last: Frame | None = None
        self._number = 0
        # of letters with a model that have not all arrived: what, and how long they are
        self._under_way: dict[int, tuple[Event, int]] = {}
        self._wake = asyncio.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether some letter with a model has not arrived."""
        return bool(self._under_way)

    @property
    def is_ending(self) -> bool:
        return self._last is not None

    def letter(self, letter: Letter) -> bool:
        """False: too many wait, or this is the end. What is said already is not said twice."""
        if self._last is not None:
            return False
        said = [one.event for one in self._letters] + [e for e, _ in self._under_way.values()]
        if letter.event in said:
            return True
        if len(self._letters) >= self._queue:
            return False
        self._letters.append(letter)
        self._wake.set()
        return True

    def notice(self, frame: Frame) -> bool:
        if self._last is not None:
            return False
        self._notices.pop(frame.notice.kind, None)
        self._notices[frame.notice.kind] = frame
        self._wake.set()
        return True

    def refusal(self, frame: Frame) -> None:
        if len(self._refusals) < self._queue:
            self._refusals.append(frame)
            self._wake.set()

    def has_arrived(self, letter: int, offset: int) -> None:
        """Tell the peer how much of its letter is here."""
        if self.flow.is_told:
            self._got = Frame(got=Got(number=letter, bytes=offset))
            self._wake.set()

    def heard(self, got: Got) -> bool:
        """The peer has told us; whether that is news."""
        is_news = self.flow.got(got.number, got.bytes)
        if is_news:
            here = (got.number, got.bytes)
            self._under_way = {n: it for n, it in self._under_way.items() if (n, it[1]) > here}
            self._wake.set()
        return is_news

    def end(self, frame: Frame) -> None:
        """Say this and nothing more."""
        self._last = frame
        self._wake.set()

    async def run(self) -> None:
        """Until the end has been said."""
        while await self._say_rest():
            if self._letters:
                await self._send(self._letters.popleft())
            else:
                await self._woken()

    async def _woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    async def _say_rest(self) -> bool:
        """Everything beside letters; False: the end has been said."""
        while self._last is None and (self._got is not None or self._refusals or self._notices):
            if self._got is not None:
                frame, self._got = self._got, None
            elif self._refusals:
                frame = self._refusals.popleft()
            else:
                frame = self._notices.pop(next(iter(self._notices)))
            await self._write(frame)
        if self._last is not None:
            await self._write(self._last)
        return self._last is None

    async def _send(self, letter: Letter) -> None:
        self._number += 1
        parcel = Parcel(letter, self._number)
        if parcel.total:
            self._under_way[self._number] = (letter.event, parcel.total)
            part, self._part = self._part, None
            if part is not None:
                await asyncio.to_thread(parcel.go_on_from, part)
        await self._write(parcel.message())
        while not parcel.is_whole and await self._say_rest():
            if self.flow.has_room:
                chunk = parcel.chunk(self.flow.chunk)
                self.flow.sent(self._number, parcel.filled, len(chunk.chunk.data))
                await self._write(chunk)
                self.flow.taken()
            else:
                await self._woken()
        self._counts.letters_out += parcel.is_whole
        if not self.flow.is_told:
            self._under_way.clear()
