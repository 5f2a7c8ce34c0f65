"""One connection between two peers, after Hello and Welcome: letters and notices both ways, whoever
dialled.

Best effort, on purpose: the machines repeat themselves until they are answered. What is bounded:
letters that wait for a slow peer (more are dropped), letters per second from a peer (more are
refused), models under way to this process (more wait, and HTTP/2 flow control makes their senders
wait too). A letter that is refused is answered with the reason and changes nothing.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fedbcd.engines.deploy.links.codec import (
    Assembler,
    WireLimits,
    decode_notice,
    encode,
    encode_notice,
)
from fedbcd.engines.deploy.links.fedbcd_pb2 import (
    Frame,
    Message,
    Notice as NoticeFrame,
    Refused as RefusedFrame,
)
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import Counts, Refusals, reason_of
from fedbcd.engines.deploy.links.room import MemoryBudget, Share
from fedbcd.errors import ProtocolError, Refused
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.notices import Notice

TEXT_BYTES = 65_536  # of a JSON text in Hello, Welcome or Notice
REASON_CHARACTERS = 500  # characters of a reason that a peer gives

OnLetter = Callable[[Letter], Awaitable[None]]
OnNotice = Callable[[Actor, Notice], Awaitable[None]]
OnConnect = Callable[[Actor, dict[str, Any]], Awaitable[None]]
OnDisconnect = Callable[[Actor], Awaitable[None]]
Read = Callable[[], Awaitable[Frame | None]]  # None: the peer has ended the stream
Write = Callable[[Frame], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How patient and how generous links are; times end in `_s` and are seconds."""

    gone_s: float = 20.0  # a peer that does not answer a ping, or a Hello, for this long is gone
    keepalive_s: float = (
        20.0  # a ping after this long without traffic, so that no NAT forgets the connection
    )
    backoff_s: tuple[float, float] = (
        0.25,
        30.0,
    )  # the first and the longest pause between two attempts to connect
    letters_per_s: float = 100.0  # from one peer, in the long run
    burst: int = 200  # letters from one peer at once
    queue: int = 16  # letters that wait for one peer; more are dropped
    arriving_bytes: int = (
        1 << 28
    )  # of models that arrive at the same time, over all peers (one always may); the others wait
    least_rate: float = 1e5  # bytes a second of a model, while others wait for its room
    watch_s: float = 1.0  # how often certificates and revocation list are looked at


class LinkTraffic:
    """What the connections of one role share: counts, refusals, and the places for models under
    way.
    """

    def __init__(
        self, limits: WireLimits, counts: Counts, refusals: Refusals, options: LinkOptions
    ) -> None:
        self.limits = limits
        self.counts = counts
        self.refusals = refusals
        self.options = options
        self.room = MemoryBudget(options.arriving_bytes, options.least_rate, options.gone_s)


class Closed(Exception):
    """The connection has ended: the peer hung up, or one side refused to go on."""

    def __init__(self, reason: str, sentence: str, by_peer: bool = False) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.by_peer = by_peer  # whether the peer has refused to go on


class Bucket:
    """So many letters a second, and a burst of more."""

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


class Connection:
    """The two streams of one connection."""

    def __init__(
        self,
        me: Actor,
        peer: Actor,
        traffic: LinkTraffic,
        read: Read,
        write: Write,
        on_letter: OnLetter,
        on_notice: OnNotice | None,
    ) -> None:
        self.me, self.peer = me, peer
        self._traffic = traffic
        self._read, self.write = read, write
        self._on_letter, self._on_notice = on_letter, on_notice
        self._assembler = Assembler(peer, me, traffic.limits)
        self._bucket = Bucket(traffic.options.letters_per_s, traffic.options.burst)
        self._outgoing: deque[Letter | Frame] = deque()
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()  # a peer that does not listen to the reason is cut off
        self.has_heard = False  # a letter or a notice
        self._ending: Closed | None = None
        self._number = 0
        self._room: Share | None = None  # for the model that arrives
        self.model_sent_at = (
            -math.inf
        )  # when a part of a model last went out, by the monotonic clock
        self._heard_at = time.monotonic()
        self._is_listening = True

    @property
    def moved_at(self) -> float:
        """When a frame last came, or a part of a model last went; now, while a frame is dealt with,
        since nobody listens meanwhile.
        """
        return max(self._heard_at, self.model_sent_at) if self._is_listening else time.monotonic()

    # ---------------------------------------------------------------------------------------------
    # sending
    def send(self, item: Letter | Frame) -> bool:
        """Queue a letter; False if it is dropped: too many wait, or the connection is ending."""
        if self._ending is not None or len(self._outgoing) >= self._traffic.options.queue:
            return False
        self._put(item)
        return True

    def notice(self, notice: Notice) -> bool:
        return self.send(encode_notice(notice))

    def end(self, reason: str, sentence: str) -> None:
        """Tell the peer why, then end; what still waits for it is dropped."""
        if self._ending is None:
            self._ending = Closed(reason, sentence)
            self._outgoing.clear()
            self._put(refused_frame(reason, sentence, final=True))
            asyncio.get_running_loop().call_later(self._traffic.options.gone_s, self._cut.set)

    def _put(self, item: Letter | Frame) -> None:
        self._outgoing.append(item)
        self._wake.set()

    async def _send_all(self) -> None:
        while True:
            while self._outgoing:
                await self._send_one(self._outgoing.popleft())
            if self._ending is not None:
                raise self._ending
            self._wake.clear()
            await self._wake.wait()

    async def _send_one(self, item: Letter | Frame) -> None:
        if isinstance(item, Frame):
            await self._write_counted(item)
            return
        self._number += 1
        for frame in encode(item, self._number):
            await self._write_counted(frame)
            if frame.HasField(
                "chunk"
            ):  # those of a peer that does not read soon find no room; small frames always do
                self.model_sent_at = time.monotonic()
            if self._ending is not None:
                return  # the peer is told in the middle of a letter, not after it
        self._traffic.counts.letters_out += 1

    async def _write_counted(self, frame: Frame) -> None:
        await self.write(frame)
        self._traffic.counts.bytes_out += frame.ByteSize()

    # ---------------------------------------------------------------------------------------------
    # receiving
    async def _receive_all(self) -> None:
        while True:
            frame = await self._read_in_time()
            if frame is None:
                raise Closed("hung up", f"{self.peer} has ended the connection")
            self._traffic.counts.bytes_in += frame.ByteSize()
            self._is_listening = False
            try:
                await self._receive(frame)
            # what the peer said cannot be; other errors are our own and end the connection
            except ProtocolError as error:
                self._refuse(reason_of(error), str(error))
            finally:
                self._heard_at, self._is_listening = time.monotonic(), True
                if not self._assembler.is_open:
                    self._give_room_back()

    async def _read_in_time(self) -> Frame | None:
        """The next frame; in the middle of a letter, which takes room, it has to come within the
        time of a peer that is gone.
        """
        if not self._assembler.is_open:
            return await self._read()
        try:
            async with asyncio.timeout(self._traffic.options.gone_s):
                return await self._read()
        except TimeoutError:
            raise Closed("stalled", f"{self.peer} stopped in the middle of a letter") from None

    async def _receive(self, frame: Frame) -> None:
        kind = frame.WhichOneof("kind")
        if kind == "message":
            await self._receive_message(frame.message)
        elif kind == "chunk":
            await self._deliver(self._assembler.chunk(frame.chunk))
        elif kind == "notice":
            await self._receive_notice(frame.notice)
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
            self._refuse(
                "rate",
                f"{self.peer} sends more than {self._traffic.options.letters_per_s:g} letters a"
                " second; slow down",
            )
            await asyncio.sleep(pause_s)
            return
        letter = self._assembler.message(message)
        if letter is None and self._room is None:
            self._room = await self._traffic.room.take(message.bytes, self.peer, self._stall)
        await self._deliver(letter)

    def _stall(self, sentence: str) -> None:
        self._refuse("stalled", sentence)
        self.end("stalled", sentence)

    async def _deliver(self, letter: Letter | None) -> None:
        if letter is not None and self._ending is None:
            self.has_heard = True
            self._traffic.counts.letters_in += 1
            await self._on_letter(letter)

    async def _receive_notice(self, frame: NoticeFrame) -> None:
        if not self._bucket.take():
            raise Refused(
                "rate",
                f"{self.peer} sends more than {self._traffic.options.letters_per_s:g} notices a"
                " second; slow down",
            )
        body = parse_text(frame.body)
        self.has_heard = True
        notice = decode_notice(frame.kind, body, self.peer, self.me)
        if notice is not None and self._on_notice is not None:
            await self._on_notice(self.peer, notice)

    def _receive_refused(self, refused: RefusedFrame) -> None:
        reason, sentence = refused.reason[:REASON_CHARACTERS], refused.sentence[:REASON_CHARACTERS]
        if refused.final:
            raise Closed(reason, sentence, by_peer=True)
        if not self._bucket.take():
            return
        self._traffic.refusals.note_from_peer(self.peer, reason, sentence)

    def _refuse(self, reason: str, sentence: str) -> None:
        self._traffic.refusals.note(self.peer, reason, sentence)
        if self._ending is None and len(self._outgoing) < self._traffic.options.queue:
            self._put(refused_frame(reason, sentence, final=False))

    def _give_room_back(self) -> None:
        if self._room is not None:
            self._traffic.room.give_back(self._room)
            self._room = None

    # ---------------------------------------------------------------------------------------------
    # running
    async def run(self) -> Closed:
        """Send and receive until the connection ends; why it did. Errors of gRPC, and bugs, come
        through.
        """
        tasks = [
            asyncio.create_task(work)
            for work in (self._send_all(), self._receive_all(), self._cut.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._give_room_back()
            self._ending = self._ending or Closed("gone", f"the connection to {self.peer} is gone")
        errors = [e for e in results if isinstance(e, Exception)]
        closed = next((e for e in errors if isinstance(e, Closed)), None)
        if closed is None and errors:
            raise errors[0]
        return closed or self._ending


def refused_frame(reason: str, sentence: str, final: bool) -> Frame:
    return Frame(
        refused=RefusedFrame(
            reason=reason[:REASON_CHARACTERS], sentence=sentence[:REASON_CHARACTERS], final=final
        )
    )


def parse_text(text: str) -> dict[str, Any]:
    """The JSON object in a Hello, Welcome or Notice; empty stands for {}."""
    if len(text) > TEXT_BYTES:
        raise Refused("size", f"a text of {len(text)} characters exceeds {TEXT_BYTES}")
    try:
        body = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Refused("frame", f"a text is not JSON: {error!s:.100}") from None
    if not isinstance(body, dict):
        raise Refused("frame", "a text must hold a JSON object")
    return body
