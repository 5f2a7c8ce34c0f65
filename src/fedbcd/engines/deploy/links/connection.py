"""One connection between two peers, after Hello and Welcome: letters and notices both ways, whoever
dialled.

Best effort, on purpose: the machines repeat themselves until they are answered. What is bounded:
letters that wait for a slow peer (more are dropped), letters per second from a peer (more are
refused), models under way to this process (more wait, and HTTP/2 flow control makes their senders
wait too). A letter that is refused is answered with the reason and changes nothing.
"""

import asyncio
import time

from fedbcd.engines.deploy.links.codec import Assembler, encode_notice
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Part
from fedbcd.engines.deploy.links.hearing import Hearing, Read
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.sending import OVERHEARD, Sending, Write
from fedbcd.engines.deploy.links.traffic import (
    Closed,
    LinkTraffic,
    OnLetter,
    OnNotice,
    refused_frame,
)
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.notices import Notice

LISTENS_S = 3.0  # that a peer has to take the reason why a connection ends


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
        version: int = OVERHEARD,
        part: Part | None = None,
    ) -> None:
        """`part` is what the peer has of a letter that broke off."""
        self.me, self.peer = me, peer
        self._traffic = traffic
        self._write = write
        self._version = version
        self._assembler = Assembler(peer, me, traffic.limits, traffic.kept.take(peer))
        self._out = Sending(self.write, traffic.counts, traffic.options.queue, version, part)
        stalled_s = traffic.options.stalled_s(version)
        self._in = Hearing(
            *(peer, traffic, read, self._assembler, stalled_s, self._out),
            *(on_letter, on_notice, self.end),
        )
        self._cut = asyncio.Event()  # a peer that does not listen to the reason is cut off
        self._ending: Closed | None = None

    @property
    def has_heard(self) -> bool:
        return self._in.has_heard

    @property
    def heard_at(self) -> float:
        return self._in.heard_at

    @property
    def moved_at(self) -> float:
        """When a frame last came, or a part of a model last arrived there; now, while a frame is
        dealt with.
        """
        return max(self._in.heard_at, self.model_sent_at)

    @property
    def model_sent_at(self) -> float:
        """When a part of a model last arrived at the peer, by the monotonic clock."""
        return self._out.flow.moved_at

    @property
    def model_began_at(self) -> float:
        """When the latest model from the peer began to come."""
        return self._in.model_began_at

    @property
    def model_moved_at(self) -> float:
        """When a part of a model last arrived, here or there; now, if it may go on."""
        moved, now = max(self.model_sent_at, self._in.part_at), time.monotonic()
        is_under_way = self._out.is_under_way or self._assembler.is_open
        return now if is_under_way and now - moved < self._in.stalled_s else moved

    # ---------------------------------------------------------------------------------------------
    # sending
    def send(self, item: Letter) -> bool:
        """Queue a letter, unless it is on its way already; False if it is dropped: too many wait,
        or the connection is ending.
        """
        return self._out.letter(item)

    def notice(self, notice: Notice) -> bool:
        return self._out.notice(encode_notice(notice))

    def keep(self) -> None:
        """What has come of a letter, for it to go on by another connection."""
        if self._version > OVERHEARD:
            self._traffic.kept.put(self.peer, self._assembler.take())

    def end(self, reason: str, sentence: str) -> None:
        """Tell the peer why, then end; what still waits for it is dropped."""
        if self._ending is None:
            self._ending = Closed(reason, sentence)
            self._out.end(refused_frame(reason, sentence, final=True))
            asyncio.get_running_loop().call_later(LISTENS_S, self._cut.set)

    async def write(self, frame: Frame) -> None:
        await self._write(frame)
        self._traffic.counts.bytes_out += frame.ByteSize()

    async def _send_all(self) -> None:
        await self._out.run()
        assert self._ending is not None
        raise self._ending

    # ---------------------------------------------------------------------------------------------
    # running
    async def run(self) -> Closed:
        """Send and receive until the connection ends; why it did. Errors of gRPC, and bugs, come
        through.
        """
        tasks = [
            asyncio.create_task(work)
            for work in (
                *(self._send_all(), self._in.run(), self._in.notices.run(), self._cut.wait()),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._in.give_room_back()
            self.keep()
            self._ending = self._ending or Closed("gone", f"the connection to {self.peer} is gone")
        errors = [e for e in results if isinstance(e, Exception)]
        closed = next((e for e in errors if isinstance(e, Closed)), None)
        if closed is None and errors:
            raise errors[0]
        return closed or self._ending
