"""What comes in on one connection, and how much of it: so many letters a second, and of notices
that come in a burst the latest of each kind.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from fedbcd.engines.deploy.links.codec import Assembler, decode_notice
from fedbcd.engines.deploy.links.fedbcd_pb2 import (
    Chunk,
    Frame,
    Got,
    Message,
    Notice,
    Refused as RefusedFrame,
)
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import reason_of
from fedbcd.engines.deploy.links.room import Share
from fedbcd.engines.deploy.links.sending import Sending
from fedbcd.engines.deploy.links.traffic import (
    REASON_CHARACTERS,
    Bucket,
    Closed,
    LinkTraffic,
    OnLetter,
    OnNotice,
    parse_text,
    refused_frame,
)
from fedbcd.errors import ProtocolError, Refused
from fedbcd.protocol.messages import Actor

Read = Callable[[], Awaitable[Frame | None]]  # None: the peer has ended the stream

KINDS = 16  # of notices that are held at the same time
READ_S = 0.001  # for each notice that is passed over, so that nobody floods


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


class Hearing:
    """The way in of one connection."""

    def __init__(
        self,
        peer: Actor,
        traffic: LinkTraffic,
        read: Read,
        assembler: Assembler,
        stalled_s: float,
        out: Sending,
        on_letter: OnLetter,
        on_notice: OnNotice | None,
        end: Callable[[str, str], None],
    ) -> None:
        """The next part of a letter has to come within `stalled_s`; `end` ends the connection."""
        self.peer = peer
        self.stalled_s = stalled_s
        self._traffic = traffic
        self._read = read
        self._assembler = assembler
        self._out = out
        self._on_letter, self._on_notice = on_letter, on_notice
        self._end = end
        self._bucket = traffic.bucket(peer, "letters")
        self.notices = Notices(traffic.bucket(peer, "notices"), self._receive_notice)
        self.has_heard = False  # a letter or a notice
        self._room: Share | None = None  # for the model that arrives
        self._heard_at = time.monotonic()
        self.part_at = -math.inf  # when a part of a model last came
        self.model_began_at = math.inf  # when the latest model began to come
        self._is_listening = True

    @property
    def heard_at(self) -> float:
        """When a frame last came; now, while one is dealt with, since nobody listens meanwhile."""
        return self._heard_at if self._is_listening else time.monotonic()

    async def run(self) -> None:
        while True:
            frame = await self._next()
            if frame is None:
                raise Closed("hung up", f"{self.peer} has ended the connection")
            self._traffic.counts.bytes_in += frame.ByteSize()
            self._is_listening = False
            try:
                await self._receive(frame)
            # what the peer said cannot be; other errors are our own and end the connection
            except ProtocolError as error:
                self.refuse(reason_of(error), str(error))
            finally:
                self._heard_at, self._is_listening = time.monotonic(), True
                if not self._assembler.is_open:
                    self.give_room_back()

    async def _next(self) -> Frame | None:
        """The next frame; in the middle of a letter, which takes room, its next part has to come in
        time.
        """
        if not self._assembler.is_open:
            return await self._read()
        left_s = self.part_at + self.stalled_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await self._read()
        except TimeoutError:
            raise Closed("stalled", f"{self.peer} stopped in the middle of a letter") from None

    async def _receive(self, frame: Frame) -> None:
        kind = frame.WhichOneof("kind")
        if kind == "message":
            await self._receive_message(frame.message)
        elif kind == "chunk":
            await self._receive_chunk(frame.chunk)
        elif kind == "got":
            await self._receive_got(frame.got)
        elif kind == "notice":
            await self.notices.hear(frame.notice)
        elif kind == "refused":
            self._receive_refused(frame.refused)
        else:
            raise Refused(
                "frame",
                f"a frame of kind {kind} came; after the Welcome it must be message, chunk, notice"
                " or refused",
            )

    async def _receive_message(self, message: Message) -> None:
        if not self._bucket.take():
            self._assembler.pass_over(message.number)
            pause_s = self._bucket.pause_s
            self.refuse(
                "rate",
                f"{self.peer} sends more than {self._traffic.options.letters_per_s:g} letters a"
                " second; slow down",
            )
            await asyncio.sleep(pause_s)
            return
        letter = self._assembler.message(message)
        if letter is None and self._room is None:
            self._room = await self._traffic.room.take(message.bytes, self.peer, self._stall)
        if letter is None:
            self.part_at = self.model_began_at = time.monotonic()
        await self._deliver(letter)

    def _stall(self, sentence: str) -> None:
        self.refuse("stalled", sentence)
        self._end("stalled", sentence)

    async def _receive_chunk(self, chunk: Chunk) -> None:
        """That it has arrived is said whatever comes of it."""
        self.part_at = time.monotonic()
        self._out.has_arrived(chunk.number, chunk.offset + len(chunk.data))
        await self._deliver(self._assembler.chunk(chunk))

    async def _receive_got(self, got: Got) -> None:
        if not self._out.heard(got) and not self._bucket.take():
            await asyncio.sleep(self._bucket.pause_s)

    async def _deliver(self, letter: Letter | None) -> None:
        if letter is not None and not self._out.is_ending:
            self.has_heard = True
            self._traffic.counts.letters_in += 1
            await self._on_letter(letter)

    async def _receive_notice(self, frame: Notice) -> None:
        try:
            body = parse_text(frame.body)
            self.has_heard = True
            notice = decode_notice(frame.kind, body, self.peer, self._assembler.to)
        except ProtocolError as error:
            self.refuse(reason_of(error), str(error))
            return
        if notice is not None and self._on_notice is not None:
            await self._on_notice(self.peer, notice)

    def _receive_refused(self, refused: RefusedFrame) -> None:
        reason, sentence = refused.reason[:REASON_CHARACTERS], refused.sentence[:REASON_CHARACTERS]
        if refused.final:
            raise Closed(reason, sentence, by_peer=True)
        if not self._bucket.take():
            return
        self._traffic.refusals.note_from_peer(self.peer, reason, sentence)

    def refuse(self, reason: str, sentence: str) -> None:
        self._traffic.refusals.note(self.peer, reason, sentence)
        self._out.refusal(refused_frame(reason, sentence, final=False))

    def give_room_back(self) -> None:
        if self._room is not None:
            self._traffic.room.give_back(self._room)
            self._room = None
