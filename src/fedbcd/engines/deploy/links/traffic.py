"""What the connections of one role share, and what is said when one ends."""

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fedbcd.engines.deploy.links.codec import CHUNK_BYTES, LEAST_CHUNK, Arriving, WireLimits
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Part, Refused as RefusedFrame
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import Counts, Refusals
from fedbcd.engines.deploy.links.room import MemoryBudget
from fedbcd.engines.deploy.links.sending import OVERHEARD
from fedbcd.errors import Refused
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.notices import Notice

TEXT_BYTES = 65_536  # of a JSON text in Hello, Welcome or Notice
REASON_CHARACTERS = 500  # characters of a reason that a peer gives

OnLetter = Callable[[Letter], Awaitable[None]]
OnNotice = Callable[[Actor, Notice], Awaitable[None]]
OnConnect = Callable[[Actor, dict[str, Any]], Awaitable[None]]
OnDisconnect = Callable[[Actor], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How patient and how generous links are; times end in `_s` and are seconds."""

    gone_s: float = 10.0  # of silence, pings included, after which a connection is gone
    connect_s: float = 30.0  # for a connection to be made, Hello and Welcome included
    # bytes a second of a model; one that arrives more slowly stands still
    standstill_rate: float = 1000.0
    # the first and the longest pause between two attempts to connect
    backoff_s: tuple[float, float] = (0.25, 30.0)
    letters_per_s: float = 100.0  # from one peer, in the long run
    burst: int = 200  # letters from one peer at once
    queue: int = 16  # letters that wait for one peer; more are dropped
    arriving_bytes: int = (
        1 << 28
    )  # of models that arrive at the same time, over all peers (one always may); the others wait
    least_rate: float = 1e5  # bytes a second of a model, while others wait for its room
    watch_s: float = 1.0  # how often certificates and revocation list are looked at

    def stalled_s(self, version: int) -> float:
        """After so long the next part of a letter is not to be expected any more."""
        chunk = CHUNK_BYTES if version == OVERHEARD else LEAST_CHUNK
        return self.gone_s + chunk / self.standstill_rate


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
        self.kept = Kept(options.arriving_bytes)
        self._buckets: dict[tuple[Actor, str], Bucket] = {}

    def bucket(self, peer: Actor, kind: str) -> Bucket:
        """Of one identity, however often it connects."""
        rate = (self.options.letters_per_s, self.options.burst)
        return self._buckets.setdefault((peer, kind), Bucket(*rate))


class Kept:
    """What connections that broke have brought of letters, until these go on; the oldest go when
    there are too many bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: dict[Actor, Arriving] = {}

    def put(self, peer: Actor, part: Arriving | None) -> None:
        if part is None:
            return
        self.take(peer)
        self._parts[peer] = part
        while len(self._parts) > 1 and self._bytes > self._most:
            del self._parts[next(iter(self._parts))]

    def take(self, peer: Actor) -> Arriving | None:
        return self._parts.pop(peer, None)

    def look(self, peer: Actor) -> Part | None:
        part = self._parts.get(peer)
        return None if part is None else part.part

    @property
    def _bytes(self) -> int:
        return sum(part.message.bytes for part in self._parts.values())


class Closed(Exception):
    """The connection has ended: the peer hung up, or one side refused to go on."""

    def __init__(self, reason: str, sentence: str, by_peer: bool = False) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.by_peer = by_peer  # whether the peer has refused to go on


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
