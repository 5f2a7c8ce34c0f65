"""What both ends of a link have in common: a gRPC stream with mutual TLS, one connection per peer.
`listener.py` and `dialer.py` are the ends.

A dialler says Hello: who it is, whom it wants, which versions it speaks, which model it works on.
The listener looks at its certificate, and answers Welcome or Refused. One connection per peer; the
newest wins and the older process is told and ends.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedbcd.engines.deploy.links.codec import Declared, WireLimits
from fedbcd.engines.deploy.links.connection import Connection
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Hello, Part, Welcome
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import (
    Counts,
    MissingExtra,
    Refusals,
    reason_of,
)
from fedbcd.engines.deploy.links.tls import Certificate, Credentials, Security
from fedbcd.engines.deploy.links.traffic import (
    Closed,
    LinkOptions,
    LinkTraffic,
    OnConnect,
    OnDisconnect,
    OnLetter,
    OnNotice,
)
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.errors import ProtocolError
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.notices import Notice

try:
    import grpc
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None

OLDEST, NEWEST = 1, 2  # versions of fedbcd.proto that this code speaks
SERVICE = "fedbcd.v1.Federation"
FRAME_BYTES = (
    1 << 20
)  # the largest frame that is read: a chunk, or the Hello of a model with thousands of tensors
WINDOW_BYTES = 1 << 18  # what a peer may have under way unread
TOLD = 5  # sentences of trouble in a status, at most

About = Callable[[], dict[str, Any]]


@dataclass
class Peer:
    """A peer that is connected."""

    connection: Connection
    instance: bytes
    certificate: Certificate | None


class LinkEnd:
    """What both ends of a link have in common."""

    def __init__(
        self,
        me: Actor,
        *,
        model: Declared,
        security: Security,
        on_letter: OnLetter,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
        on_notice: OnNotice | None = None,
        about: About = dict,
        options: LinkOptions | None = None,
        log: RoleLog | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.me = me
        self.counts = counts or Counts()
        self.options = options or LinkOptions()
        self._model = model
        self._security = security
        self._on_letter, self._on_notice = on_letter, on_notice
        self._on_connect, self._on_disconnect = on_connect, on_disconnect
        self._about = about
        self._log = log or RoleLog(me)
        self._refusals = Refusals(self.counts, self._log)
        self._traffic = LinkTraffic(WireLimits.of(model), self.counts, self._refusals, self.options)
        self._peers: dict[Actor, Peer] = {}
        # of connections that have ended: when a model moved, when anything was heard
        self._moved: dict[Actor, float] = {}
        self._heard: dict[Actor, float] = {}

    @property
    def connected(self) -> frozenset[Actor]:
        return frozenset(self._peers)

    async def send(self, letter: Letter) -> bool:
        """Send a letter, without waiting for its arrival; False if it is dropped, since the peer is
        away or too slow.
        """
        peer = self._peers.get(letter.to)
        sent = peer is not None and peer.connection.send(letter)
        self.counts.dropped += not sent
        return sent

    async def notice(self, to: Actor, notice: Notice) -> bool:
        """Tell a peer something that is not part of the protocol; on the same terms as `send`."""
        peer = self._peers.get(to)
        return peer is not None and peer.connection.notice(notice)

    @property
    def trouble(self) -> list[str]:
        """What stands between this role and its peers, a sentence each."""
        return [*self._refusals.trouble.values()]

    @property
    def silent_s(self) -> dict[Actor, float]:
        """Peers that were connected and are not, and how long nothing has been heard of them."""
        now = time.monotonic()
        return {peer: now - at for peer, at in self._heard.items() if peer not in self._peers}

    def moved_at(self, peer: Actor) -> float:
        """When something last moved between a peer and us, by the monotonic clock; see
        `Connection.moved_at`.
        """
        entry = self._peers.get(peer)
        return -math.inf if entry is None else entry.connection.moved_at

    def model_sent_at(self, peer: Actor) -> float:
        entry = self._peers.get(peer)
        return -math.inf if entry is None else entry.connection.model_sent_at

    def model_moved_at(self, peer: Actor) -> float:
        """When a part of a model last arrived, here or there; now, if one is under way."""
        entry = self._peers.get(peer)
        last = self._moved.get(peer, -math.inf)
        return last if entry is None else max(last, entry.connection.model_moved_at)

    def model_began_at(self, peer: Actor) -> float:
        """When the latest model from a peer began to come."""
        entry = self._peers.get(peer)
        return math.inf if entry is None else entry.connection.model_began_at

    def refuse(self, peer: Actor, reason: str, sentence: str) -> None:
        entry = self._peers.get(peer)
        if entry is not None:
            self._end(peer, entry, reason, sentence)

    def _end(self, peer: Actor, entry: Peer, reason: str, sentence: str) -> None:
        self._refusals.note(peer, reason, sentence)
        entry.connection.end(reason, sentence)

    async def _hold(
        self, peer: Actor, entry: Peer, about: dict[str, Any], welcome: Frame | None = None
    ) -> Closed:
        """Keep a connection until it ends; the latest of a peer is the one that letters go to."""
        self.counts.connections += 1
        self._peers[peer] = entry
        self._refusals.trouble.pop(peer, None)
        self._log.info("connected", peer=peer)
        try:
            if welcome is not None:
                await entry.connection.write(welcome)
            await self._tell_connected(peer, entry, about)
            return await entry.connection.run()
        finally:
            self._moved[peer] = entry.connection.model_moved_at
            self._heard[peer] = entry.connection.heard_at
            if self._peers.get(peer) is entry:
                del self._peers[peer]
                self._log.info("disconnected", peer=peer)
                if self._on_disconnect is not None:
                    await self._on_disconnect(peer)

    async def _tell_connected(self, peer: Actor, entry: Peer, about: dict[str, Any]) -> None:
        if self._on_connect is None:
            return
        try:
            await self._on_connect(peer, about)
        except ProtocolError as error:
            self._end(peer, entry, reason_of(error), str(error))

    async def _watch(self) -> None:
        """End connections whose certificate has been revoked or has expired."""
        credentials, seen = self._security, -1
        assert isinstance(credentials, Credentials)
        while True:
            await asyncio.sleep(self.options.watch_s)
            credentials.refresh()
            now = time.time()
            for name, peer in list(self._peers.items()):
                certificate = peer.certificate
                assert certificate is not None
                if (
                    credentials.generation != seen
                    or now > certificate.not_valid_after_utc.timestamp()
                ):
                    objection = credentials.objection(certificate)
                    if objection is not None:
                        self._end(
                            name, peer, "certificate", f"the certificate of {name} {objection}"
                        )
            seen = credentials.generation

    def _channel_options(self) -> list[tuple[str, int | str]]:
        """gRPC itself asks who is silent, from the first moment and also while Python is busy."""
        gone_ms = int(self.options.gone_s * 1000)
        return [
            ("grpc.keepalive_time_ms", gone_ms // 4),
            ("grpc.http2.ping_timeout_ms", gone_ms * 3 // 4),
            # only TCP_USER_TIMEOUT: that nothing arrives of what was sent
            ("grpc.keepalive_timeout_ms", gone_ms * 3 // 4),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", FRAME_BYTES),
            ("grpc.max_send_message_length", FRAME_BYTES),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.http2.bdp_probe", 0),
        ]


def trouble_of(*ends: LinkEnd | None) -> list[str]:
    found = [sentence for end in ends if end is not None for sentence in end.trouble]
    return found if len(found) <= TOLD else [*found[:TOLD], f"... and {len(found) - TOLD} more"]


def part_of(greeting: Hello | Welcome) -> Part | None:
    """What a peer has of a letter that broke off."""
    return greeting.part if greeting.HasField("part") else None


def words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}, {error.details()}"
    return str(error) or type(error).__name__


def software() -> str:
    from importlib.metadata import version

    return version("fedbcd")


BROKEN: tuple[type[Exception], ...] = (
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
)
