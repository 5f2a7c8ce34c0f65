"""The end of a link that calls: devices, and servers towards the coordinator.

A dialler reconnects for ever, with backoff and jitter, and looks the address up anew each time. If
it is refused at the very first contact, it ends with the reason; later (a list was edited, a peer
is being upgraded) it tries on. Where nobody answers it knocks again and again, so that it is back
soon after the network is.
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
from fedbcd.engines.deploy.links.connection import Connection
from fedbcd.engines.deploy.links.endpoint import (
    BROKEN,
    NEWEST,
    OLDEST,
    SERVICE,
    LinkEnd,
    Peer,
    part_of,
    software,
)
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Hello, TensorShape
from fedbcd.engines.deploy.links.reaching import explain, knock, no_answer, silent
from fedbcd.engines.deploy.links.refusals import (
    CredentialsError,
    MissingExtra,
    RefusedForGood,
    Replaced,
)
from fedbcd.engines.deploy.links.tls import Certificate, Credentials, Plain, check_plain, host_name
from fedbcd.engines.deploy.links.traffic import Closed, parse_text
from fedbcd.errors import Refused
from fedbcd.protocol.messages import Actor

try:
    import grpc
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None

PASSING = frozenset(
    {"not_admitted", "ahead"}
)  # reasons that an operator does away with over there: an admission, the newest store

AWAY_S = 3.0  # the longest pause while nobody accepts a connection; each attempt takes time as well
TRIPS = 10  # of what a knock takes, for a connection with its handshakes
SAID = 20  # sentences that are logged while it is not connected

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
        self._said: set[str] = set()  # troubles, since it was connected
        self._is_away = False  # nobody accepted a connection at the latest attempt
        self._slow = 0  # attempts that took longer than they were given, in a row
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Connect, and again whenever the connection ends; until cancelled, or refused for good."""
        watcher = (
            asyncio.create_task(self._watch()) if isinstance(self._security, Credentials) else None
        )
        try:
            failures = 0
            while True:
                lasted_s = await self._try_all()
                # a connection that breaks at once is a failure as well
                long = lasted_s > 10 * self.options.backoff_s[0]
                failures = 0 if long else failures + 1
                if await self._pause(failures):
                    failures = 0
        finally:
            if watcher is not None:
                watcher.cancel()

    def hurry(self) -> None:
        """Try now, if it is to try again: somebody else has got through, so the peer may be there
        as well.
        """
        self._hurry.set()

    async def _pause(self, failures: int) -> bool:
        """Before the next attempt; whether it was cut short."""
        low, high = self.options.backoff_s
        most = min(high, AWAY_S) if self._is_away else high
        self._hurry.clear()
        seconds = min(most, low * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0)
        waits = [
            asyncio.ensure_future(wait) for wait in (asyncio.sleep(seconds), self._hurry.wait())
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
        return self._hurry.is_set()

    async def _try_all(self) -> float:
        """Try each address until one answers, and hold that connection until it ends; the seconds
        that it lasted.
        """
        self._since, self._is_away = math.inf, False
        try:
            for host, port in await self._targets():
                if await self._try(host, port):
                    break
        # of our own certificate, or of what the listener says
        except (CredentialsError, Refused) as error:
            self._trouble(str(error))
            if isinstance(error, Refused):
                self._refusals.note(self.peer, error.reason, str(error))
            if not self._was_welcome:
                raise RefusedForGood(str(error)) if isinstance(error, Refused) else error from None
        return self._lasted_s

    async def _try(self, host: str, port: int) -> bool:
        """Whether somebody has answered there."""
        patience_s, began = self.options.gone_s, time.monotonic()
        try:
            near_s = await knock(host, port, patience_s)
        except OSError as error:  # TimeoutError as well
            waited_s = time.monotonic() - began
            self._is_away = True
            self._trouble(silent(self.peer, f"{host}:{port}", error, waited_s))
            return False
        self._is_away = False
        # as long as the line takes, and longer each time that this was not enough
        patience_s = max(patience_s, TRIPS * near_s) * 2.0 ** min(self._slow, 10)
        try:
            self._judge(await self._connect(_target(host, port), min(patience_s, self._most_s)))
        except UNREACHABLE as error:
            if self._since < math.inf:
                self._trouble(f"the connection to {self.peer} has broken; is it the network?")
                return True
            if isinstance(error, TimeoutError):
                self._slow, self._is_away = self._slow + 1, True
                self._trouble(no_answer(self.peer, f"{host}:{port}"))
            else:
                security = self._security
                self._trouble(await explain(host, port, self.me, self.peer, security, patience_s))
            return False
        return True

    @property
    def _most_s(self) -> float:
        return max(self.options.connect_s, self.options.gone_s)

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
        self._last_trouble = sentence
        if sentence not in self._said and len(self._said) < SAID:
            self._said.add(sentence)
            self._log.warning("not_connected", peer=self.peer, sentence=sentence)

    async def _targets(self) -> list[tuple[str, int]]:
        addresses = self._addresses() if callable(self._addresses) else self._addresses
        found: list[tuple[str, int]] = []
        for address in addresses:
            host, port = split_address(address)
            if isinstance(self._security, Plain):
                check_plain(host)
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )
            except OSError as error:
                self._is_away = True
                self._trouble(f"the address {address} of {self.peer} cannot be looked up: {error}")
                continue
            found += [(str(info[4][0]), port) for info in infos]
        return list(dict.fromkeys(found))

    async def _connect(self, target: str, patience_s: float) -> Closed:
        channel, own = self._channel(target)
        async with channel:
            call = channel.stream_stream(
                f"/{SERVICE}/Link", Frame.SerializeToString, Frame.FromString
            )()  # type: ignore[call-arg]

            async def read() -> Frame | None:
                frame = await call.read()
                return frame if isinstance(frame, Frame) else None  # EOF

            hello = self._hello()
            async with asyncio.timeout(patience_s):
                await call.write(Frame(hello=hello))
                answer = await read()
            if answer is None:
                await call.code()
                return Closed("hung up", f"{self.peer} hung up instead of an answer")
            if answer.HasField("refused"):
                return Closed(answer.refused.reason, answer.refused.sentence, by_peer=True)
            certificate, about = self._check_welcome(answer, hello.nonce, own)
            self._last_trouble, self._since, self._slow = "", time.monotonic(), 0
            self._said.clear()
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
            ("grpc.min_reconnect_backoff_ms", int(self._most_s * 1000)),  # of one attempt
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


def _target(ip: str, port: int) -> str:
    return f"ipv6:[{ip}]:{port}" if ":" in ip else f"ipv4:{ip}:{port}"
