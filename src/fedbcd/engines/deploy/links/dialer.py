"""The end of a link that calls: devices, and servers towards the coordinator.

A dialler reconnects for ever, with backoff and jitter, and looks the address up anew each time. If
it is refused at the very first contact, it ends with the reason; later (a list was edited, a peer
is being upgraded) it tries on.
"""

import asyncio
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.links.connection import (
    Closed,
    Connection,
    parse_text,
)
from fedbcd.engines.deploy.links.endpoint import (
    BROKEN,
    NEWEST,
    OLDEST,
    SERVICE,
    LinkEnd,
    Peer,
    part_of,
    software,
    words,
)
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Hello, TensorShape
from fedbcd.engines.deploy.links.refusals import (
    CredentialsError,
    MissingExtra,
    RefusedForGood,
    Replaced,
)
from fedbcd.engines.deploy.links.tls import Certificate, Credentials, Plain, check_plain, host_name
from fedbcd.errors import Refused
from fedbcd.protocol.messages import Actor

try:
    import grpc
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None

PASSING = frozenset(
    {"not_admitted", "ahead"}
)  # reasons that an operator does away with over there: an admission, the newest store

Addresses = Sequence[str] | Callable[[], Sequence[str]]
UNREACHABLE: tuple[type[Exception], ...] = (TimeoutError, *BROKEN)


class Dialer(LinkEnd):
    """Keeps one connection to a listener, for ever."""

    def __init__(self, me: Actor, peer: Actor, addresses: Addresses, **common: Any) -> None:
        """`addresses` are host:port, tried in turn; a function is asked anew before each attempt.
        For `common` see `LinkEnd`.
        """
        super().__init__(me, **common)
        self.peer = peer
        self._addresses = addresses
        self._instance = os.urandom(16)
        self._was_welcome = False  # once: it was told something, or stayed a while
        self._since = math.inf  # when the connection began
        self._last_trouble = ""

    async def run(self) -> None:
        """Connect, and again whenever the connection ends; until cancelled, or refused for good."""
        watcher = (
            asyncio.create_task(self._watch()) if isinstance(self._security, Credentials) else None
        )
        try:
            failures = 0
            while True:
                lasted_s = await self._try_all()
                low, high = self.options.backoff_s
                failures = (
                    0 if lasted_s > 10 * low else failures + 1
                )  # a connection that breaks at once is a failure as well
                await asyncio.sleep(
                    min(high, low * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0)
                )
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _try_all(self) -> float:
        """Try each address until one answers, and hold that connection until it ends; the seconds
        that it lasted.
        """
        self._since = math.inf
        try:
            for target in await self._targets():
                try:
                    self._judge(await self._connect(target))
                    break
                except UNREACHABLE as error:
                    self._trouble(f"{self.peer} cannot be reached at {target}: {words(error)}")
        except (
            CredentialsError,
            Refused,
        ) as error:  # of our own certificate, or of what the listener says
            self._trouble(str(error))
            if isinstance(error, Refused):
                self._refusals.note(self.peer, error.reason, str(error))
            if not self._was_welcome:
                raise RefusedForGood(str(error)) if isinstance(error, Refused) else error from None
        return self._lasted_s

    @property
    def trouble(self) -> list[str]:
        return [
            *dict.fromkeys(
                [
                    *super().trouble,
                    *([self._last_trouble] if self._last_trouble and not self._peers else []),
                ]
            )
        ]

    @property
    def _lasted_s(self) -> float:
        return max(time.monotonic() - self._since, 0.0)

    def _judge(self, closed: Closed) -> None:
        if closed.reason == "replaced":
            raise Replaced(str(closed))
        self._trouble(str(closed))
        if closed.by_peer:
            self._refusals.note_from_peer(self.peer, closed.reason, str(closed))
            self._was_welcome |= closed.reason in PASSING
            if not self._was_welcome:
                raise RefusedForGood(f"{self.peer} refuses {self.me}: {closed}")

    def _trouble(self, sentence: str) -> None:
        if sentence != self._last_trouble:
            self._last_trouble = sentence
            self._log.warning("not_connected", peer=self.peer, sentence=sentence)

    async def _targets(self) -> list[str]:
        addresses = self._addresses() if callable(self._addresses) else self._addresses
        found: list[str] = []
        for address in addresses:
            host, port = split_address(address)
            if isinstance(self._security, Plain):
                check_plain(host)
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )
            except OSError as error:
                self._trouble(f"the address {address} of {self.peer} cannot be looked up: {error}")
                continue
            found += [_target(info[4][0], port) for info in infos]
        return list(dict.fromkeys(found))

    async def _connect(self, target: str) -> Closed:
        channel, own = self._channel(target)
        async with channel:
            call = channel.stream_stream(
                f"/{SERVICE}/Link", Frame.SerializeToString, Frame.FromString
            )()  # type: ignore[call-arg]

            async def read() -> Frame | None:
                frame = await call.read()
                return frame if isinstance(frame, Frame) else None  # EOF

            hello = self._hello()
            async with asyncio.timeout(self.options.connect_s):
                await call.write(Frame(hello=hello))
                answer = await read()
            if answer is None:
                await call.code()
                return Closed("hung up", f"{self.peer} hung up instead of an answer")
            if answer.HasField("refused"):
                return Closed(answer.refused.reason, answer.refused.sentence, by_peer=True)
            certificate, about = self._check_welcome(answer, hello.nonce, own)
            self._last_trouble, self._since = "", time.monotonic()
            welcome = answer.welcome
            connection = Connection(
                *(self.me, self.peer, self._traffic, read, call.write),
                *(self._on_letter, self._on_notice, welcome.version, part_of(welcome)),
            )
            try:
                closed = await self._hold(self.peer, Peer(connection, b"", certificate), about)
            finally:
                self._was_welcome |= connection.has_heard or self._lasted_s > self.options.gone_s
            self._was_welcome |= (
                closed.reason == "certificate"
            )  # it was good until now; a new one may come
            return closed

    def _channel(self, target: str) -> tuple[grpc.aio.Channel, Certificate | None]:
        options = [
            *self._channel_options(),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if isinstance(self._security, Plain):
            return grpc.aio.insecure_channel(target, options=options), None
        options.append(("grpc.ssl_target_name_override", host_name(self.peer)))
        credentials, own = self._security.for_dialler()
        return grpc.aio.secure_channel(target, credentials, options=options), own

    def _hello(self) -> Hello:
        return Hello(
            oldest=OLDEST,
            newest=NEWEST,
            software=software(),
            actor=self.me,
            to=self.peer,
            instance=self._instance,
            about=json.dumps(self._about()),
            model=[TensorShape(name=name, shape=shape) for name, shape in self._model.tensors],
            nonce=os.urandom(32),
            part=self._traffic.kept.look(self.peer),
        )

    def _check_welcome(
        self, answer: Frame, nonce: bytes, own: Certificate | None
    ) -> tuple[Certificate | None, dict[str, Any]]:
        if not answer.HasField("welcome"):
            raise Refused("frame", f"{self.peer} answered with neither Welcome nor Refused")
        welcome = answer.welcome
        if not OLDEST <= welcome.version <= NEWEST:
            raise Refused(
                "version",
                f"{self.peer} wants version {welcome.version} of the protocol; this is {OLDEST} to"
                f" {NEWEST}",
            )
        if welcome.actor != self.peer:
            raise Refused(
                "identity", f"{self.peer} was dialled, but {welcome.actor!r:.80} answered"
            )
        certificate = None
        if isinstance(self._security, Credentials):
            assert own is not None
            certificate = self._security.check_signature(
                welcome.certificate, welcome.signature, nonce, self.peer, own
            )
        return certificate, parse_text(welcome.about)


def _target(ip: str | int, port: int) -> str:
    return f"ipv6:[{ip}]:{port}" if ":" in str(ip) else f"ipv4:{ip}:{port}"
