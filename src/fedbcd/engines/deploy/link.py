"""Connections: `Listener` (servers and the coordinator) and `Dialer` (devices and servers), over gRPC with mutual TLS.

A dialler says Hello: who it is, whom it wants, which versions it speaks, which model it works on. The listener looks at its
certificate, and answers Welcome or Refused. One session per peer; the newest wins and the older process is told and ends. A dialler
reconnects for ever, with backoff and jitter, and looks the address up anew each time. If it is refused at the very first contact, it
ends with the reason; later (a list was edited, a peer is being upgraded) it tries on.
"""

import asyncio
import json
import math
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedbcd.engines.deploy.codec import SAID, Declared, Limits, kind_of
from fedbcd.engines.deploy.exits import AddressError
from fedbcd.engines.deploy.fedbcd_pb2 import ChangeReply, ChangeRequest, Frame, Hello, StatusReply, StatusRequest, TensorShape, Welcome
from fedbcd.engines.deploy.letter import Letter
from fedbcd.engines.deploy.refusals import (
    Counts,
    CredentialsError,
    Journal,
    MissingExtra,
    Refusals,
    Refused,
    RefusedForGood,
    Replaced,
    Silence,
    reason_of,
)
from fedbcd.engines.deploy.session import (
    Closed,
    LinkOptions,
    OnConnect,
    OnDisconnect,
    OnLetter,
    OnNotice,
    Session,
    Traffic,
    parse_text,
    refused_frame,
)
from fedbcd.engines.deploy.tls import Certificate, Credentials, Plain, Security, check_plain, home_of, host_name, identity_of
from fedbcd.errors import ConfigError, ProtocolError
from fedbcd.protocol.messages import Actor

try:
    import grpc
    from cryptography.x509 import load_pem_x509_certificate
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None

OLDEST, NEWEST = 1, 1  # versions of fedbcd.proto that this code speaks
SERVICE = "fedbcd.v1.Federation"
FRAME_BYTES = 1 << 20  # the largest frame that is read: a chunk, or the Hello of a model with thousands of tensors
WINDOW_BYTES = 1 << 18  # what a peer may have under way unread. A ping waits behind it: a line is too slow below WINDOW_BYTES / gone_s
OPERATOR: Actor = "operator"
PASSING = frozenset({"certificate", "not_admitted"})  # reasons that an operator may do away with: a new certificate, an admission

Welcomes = Callable[[Actor, dict[str, Any]], None]
OnError = Callable[[Exception], None]
About = Callable[[], dict[str, Any]]
Change = Callable[[str, int], Awaitable[bool]]
Addresses = Sequence[str] | Callable[[], Sequence[str]]


def only(peers: Iterable[Actor]) -> Welcomes:
    """Welcome these peers and nobody else."""
    known = frozenset(peers)

    def welcomes(peer: Actor, about: dict[str, Any]) -> None:  # noqa: ARG001
        if peer not in known:
            raise Refused("member", f"{peer} does not belong here; add it to the list of this role, or send it to its own server")

    return welcomes


@dataclass
class _Peer:
    """A peer that is connected."""

    session: Session
    instance: bytes
    certificate: Certificate | None


class _End:
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
        journal: Journal | None = None,
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
        self._journal: Journal = journal or Silence()
        self._refusals = Refusals(self.counts, self._journal)
        self._traffic = Traffic(Limits.of(model), self.counts, self._refusals, self.options)
        self._peers: dict[Actor, _Peer] = {}

    @property
    def connected(self) -> frozenset[Actor]:
        """The peers that are connected now."""
        return frozenset(self._peers)

    async def send(self, letter: Letter) -> bool:
        """Send a letter, without waiting for its arrival; False if it is dropped, since the peer is away or too slow."""
        peer = self._peers.get(letter.to)
        sent = peer is not None and peer.session.send(letter)
        self.counts.dropped += not sent
        return sent

    async def notice(self, to: Actor, kind: str, body: dict[str, Any]) -> bool:
        """Tell a peer something that is not part of the protocol; on the same terms as `send`."""
        peer = self._peers.get(to)
        return peer is not None and peer.session.notice(kind, body)

    def moved_at(self, peer: Actor) -> float:
        """When something last moved between a peer and us, by the monotonic clock; see `Session.moved_at`."""
        entry = self._peers.get(peer)
        return -math.inf if entry is None else entry.session.moved_at

    def model_sent_at(self, peer: Actor) -> float:
        """When a part of a model last went to a peer on this connection."""
        entry = self._peers.get(peer)
        return -math.inf if entry is None else entry.session.model_sent_at

    def refuse(self, peer: Actor, reason: str, sentence: str) -> None:
        """Tell a peer why, and hang up."""
        entry = self._peers.get(peer)
        if entry is not None:
            self._end(peer, entry, reason, sentence)

    def _end(self, peer: Actor, entry: _Peer, reason: str, sentence: str) -> None:
        self._refusals.note(peer, reason, sentence)
        entry.session.end(reason, sentence)

    async def _hold(self, peer: Actor, entry: _Peer, about: dict[str, Any], welcome: Frame | None = None) -> Closed:
        """Keep a session until it ends; the latest of a peer is the one that letters go to."""
        self.counts.connections += 1
        self._peers[peer] = entry
        self._journal.info("connected", peer=peer)
        try:
            if welcome is not None:
                await entry.session.write(welcome)
            await self._tell_connected(peer, entry, about)
            return await entry.session.run()
        finally:
            if self._peers.get(peer) is entry:
                del self._peers[peer]
                self._journal.info("disconnected", peer=peer)
                if self._on_disconnect is not None:
                    await self._on_disconnect(peer)

    async def _tell_connected(self, peer: Actor, entry: _Peer, about: dict[str, Any]) -> None:
        if self._on_connect is None:
            return
        try:
            await self._on_connect(peer, about)
        except ProtocolError as error:
            self._end(peer, entry, reason_of(error), str(error))

    async def _watch(self) -> None:
        """End sessions whose certificate has been revoked or has expired."""
        credentials, seen = self._security, -1
        assert isinstance(credentials, Credentials)
        while True:
            await asyncio.sleep(self.options.watch_s)
            credentials.refresh()
            now = time.time()
            for name, peer in list(self._peers.items()):
                certificate = peer.certificate
                assert certificate is not None
                if credentials.generation != seen or now > certificate.not_valid_after_utc.timestamp():
                    objection = credentials.objection(certificate)
                    if objection is not None:
                        self._end(name, peer, "certificate", f"the certificate of {name} {objection}")
            seen = credentials.generation

    def _channel_options(self) -> list[tuple[str, int | str]]:
        options = self.options
        return [
            ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(options.gone_s * 10_000)),  # also TCP_USER_TIMEOUT, which would cut slow lines off
            ("grpc.http2.ping_timeout_ms", int(options.gone_s * 1000)),  # the one that finds silent peers
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", FRAME_BYTES),
            ("grpc.max_send_message_length", FRAME_BYTES),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.http2.bdp_probe", 0),
        ]


# --------------------------------------------------------------------------------------------------------------------- listener
class Listener(_End):
    """Serves the peers of one role. `send` never waits: a letter for a peer that is away or too slow is dropped.

    `welcomes(peer, about)` raises `Refused` for a peer that does not belong here. `on_connect` follows the Welcome; what it sends goes
    out first. `on_error` is told what a callback raised that is no refusal: the disk is full, or there is a bug; the session has ended.
    When a peer connects anew while its old session lasts, `on_connect` is called again without `on_disconnect` between.
    """

    def __init__(
        self,
        me: Actor,
        address: str,
        *,
        welcomes: Welcomes,
        status: About = dict,
        change: Change | None = None,
        on_error: OnError | None = None,
        **common: Any,
    ) -> None:
        """`address` is host:port, port 0 for any that is free; for `common` see `_End`: model, security, on_letter and so on."""
        super().__init__(me, **common)
        self.address = address
        self.port = 0
        self._welcomes = welcomes
        self._status = status
        self._change = change
        self._on_error = on_error
        self._server: grpc.aio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._handlers: set[asyncio.Task[Any]] = set()

    async def start(self) -> int:
        """Listen; the port."""
        host, _ = split_address(self.address)
        handlers = {
            "Link": grpc.stream_stream_rpc_method_handler(self._link, Frame.FromString, Frame.SerializeToString),
            "Status": grpc.unary_unary_rpc_method_handler(self._answer_status, StatusRequest.FromString, StatusReply.SerializeToString),
        }
        if self._change is not None:
            handlers["Change"] = grpc.unary_unary_rpc_method_handler(
                self._answer_change, ChangeRequest.FromString, ChangeReply.SerializeToString
            )
        server = grpc.aio.server(options=self._server_options())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if isinstance(self._security, Plain):
                check_plain(host)
                self.port = server.add_insecure_port(self.address)
            else:
                self._security.check_own()
                self.port = server.add_secure_port(self.address, self._security.for_listener())
        except RuntimeError:
            raise AddressError(f"{self.address} cannot be listened at; it is in use or not an address of this machine") from None
        await server.start()
        self._server = server
        if isinstance(self._security, Credentials):
            self._watcher = asyncio.create_task(self._watch())
        return self.port

    async def stop(self) -> None:
        """Hang up on everybody and stop listening."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self.options.gone_s)

    def _server_options(self) -> list[tuple[str, int | str]]:
        gone_ms = int(self.options.gone_s * 1000)
        return [
            *self._channel_options(),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.server_handshake_timeout_ms", gone_ms),
            ("grpc.max_connection_idle_ms", 3 * gone_ms),  # a connection without a stream
            ("grpc.max_concurrent_streams", 4),
            ("grpc.so_reuseport", 0),  # a second listener at the same port is a mistake
        ]

    async def _link(self, requests: AsyncIterator[Frame], context: "grpc.aio.ServicerContext[Frame, Frame]") -> None:
        """One connection; `stop` waits for all of them to end."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._serve(requests, context)
        finally:
            self._handlers.discard(task)

    async def _serve(self, _requests: AsyncIterator[Frame], context: "grpc.aio.ServicerContext[Frame, Frame]") -> None:
        async def read() -> Frame | None:
            frame = await context.read()
            return frame if isinstance(frame, Frame) else None  # EOF

        try:
            hello = await asyncio.wait_for(read(), self.options.gone_s)
        except TimeoutError:
            return
        peer, certificate = f"unknown at {context.peer().rpartition(':')[0]}", None
        try:
            certificate = self._certificate(context)
            peer = identity_of(certificate) if certificate is not None else peer
            self._check_certificate(certificate)
            peer, about, welcome = self._greet(hello, certificate)
        except (ProtocolError, CredentialsError) as error:
            self._refusals.note(peer, reason_of(error), str(error))
            await context.write(refused_frame(reason_of(error), str(error), final=True))
            return
        assert hello is not None
        session = Session(self.me, peer, self._traffic, read, context.write, self._on_letter, self._on_notice)
        self._retire(peer, hello.hello.instance)
        try:
            await self._hold(peer, _Peer(session, hello.hello.instance, certificate), about, Frame(welcome=welcome))
        except _BROKEN:
            pass
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)

    def _certificate(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Certificate | None:
        if isinstance(self._security, Plain):
            return None
        (pem,) = context.auth_context()["x509_pem_cert"]
        return load_pem_x509_certificate(pem)

    def _check_certificate(self, certificate: Certificate | None) -> None:
        if certificate is None or isinstance(self._security, Plain):
            return
        self._security.refresh()
        objection = self._security.objection(certificate)
        if objection is not None:
            raise Refused("certificate", f"the certificate of {identity_of(certificate)} {objection}")

    def _greet(self, frame: Frame | None, certificate: Certificate | None) -> tuple[Actor, dict[str, Any], Welcome]:
        """Check a Hello; who it is, what it says of itself, and the answer."""
        if frame is None or not frame.HasField("hello"):
            raise Refused("frame", "a connection begins with Hello")
        hello = frame.hello
        version = negotiate(hello, self.me)
        self._check_identity(hello, certificate)
        declared = Declared(tuple((tensor.name, tuple(tensor.shape)) for tensor in hello.model))
        difference = self._model.difference(declared)
        if difference is not None:
            raise Refused("model", f"{hello.actor} works on another model than {self.me}: {difference}")
        about = parse_text(hello.about)
        self._welcomes(hello.actor, about)
        welcome = Welcome(version=version, software=_software(), actor=self.me, about=json.dumps(self._about()))
        if isinstance(self._security, Credentials):
            assert certificate is not None
            welcome.certificate, welcome.signature = self._security.sign(hello.nonce, certificate)
        return hello.actor, about, welcome

    def _check_identity(self, hello: Hello, certificate: Certificate | None) -> None:
        if certificate is not None:
            identity, home = identity_of(certificate), home_of(certificate)
            if hello.actor != identity:
                raise Refused("identity", f"{identity} says that it is {hello.actor!r:.80}; a process acts as its certificate says")
            if home not in (None, self.me):
                raise Refused("identity", f"the certificate of {identity} is for {home}, not for {self.me}")
        if hello.to != self.me:
            raise Refused("identity", f"{hello.actor!r:.80} wants {hello.to!r:.80}, but this is {self.me}; look at its addresses")
        if (kind_of(hello.actor), kind_of(self.me)) not in SAID:
            raise Refused("identity", f"{hello.actor!r:.80} has nothing to say to {self.me}")

    def _retire(self, peer: Actor, instance: bytes) -> None:
        """The newest connection of a peer wins; an older process is told."""
        old = self._peers.get(peer)
        if old is None:
            return
        if old.instance == instance:
            old.session.end("reconnected", f"{peer} has connected anew")
            return
        sentence = f"another process has connected as {peer} since; the newest wins, so this one must end"
        self._end(peer, old, "replaced", sentence)

    async def _answer_status(self, _request: StatusRequest, context: "grpc.aio.ServicerContext[Any, Any]") -> StatusReply:
        await self._check_operator(context, "ask for status")
        return StatusReply(body=json.dumps(self._status()))

    async def _answer_change(self, request: ChangeRequest, context: "grpc.aio.ServicerContext[Any, Any]") -> ChangeReply:
        await self._check_operator(context, "change who belongs here")
        assert self._change is not None
        try:
            return ChangeReply(changed=await self._change(request.what, request.device))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError from error  # abort has raised

    async def _check_operator(self, context: "grpc.aio.ServicerContext[Any, Any]", what: str) -> None:
        """In plain text, which is for loopback only, whoever is on this machine may."""
        try:
            certificate = self._certificate(context)
            self._check_certificate(certificate)
            if certificate is not None and identity_of(certificate) != OPERATOR:
                raise Refused("identity", f"{identity_of(certificate)} may not {what}; use the certificate of {OPERATOR}")
        except (ProtocolError, CredentialsError) as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))


def negotiate(hello: Hello, me: Actor) -> int:
    """The newest version that both sides speak."""
    version = min(hello.newest, NEWEST)
    if version < max(hello.oldest, OLDEST):
        older = hello.newest < OLDEST
        raise Refused(
            "version",
            f"{hello.actor!r:.80} (fedbcd {hello.software:.20}) speaks versions {hello.oldest} to {hello.newest} of the protocol, {me} "
            f"(fedbcd {_software()}) speaks {OLDEST} to {NEWEST}; upgrade {hello.actor if older else me}",
        )
    return version


# ----------------------------------------------------------------------------------------------------------------------- dialler
class Dialer(_End):
    """Keeps one connection to a listener, for ever."""

    def __init__(self, me: Actor, peer: Actor, addresses: Addresses, **common: Any) -> None:
        """`addresses` are host:port, tried in turn; a function is asked anew before each attempt. For `common` see `_End`."""
        super().__init__(me, **common)
        self.peer = peer
        self._addresses = addresses
        self._instance = os.urandom(16)
        self._was_welcome = False  # once: it was told something, or stayed a while
        self._since = math.inf  # when the connection began
        self._last_trouble = ""

    async def run(self) -> None:
        """Connect, and again whenever the connection ends; until cancelled, or refused for good."""
        watcher = asyncio.create_task(self._watch()) if isinstance(self._security, Credentials) else None
        try:
            failures = 0
            while True:
                lasted_s = await self._try_all()
                low, high = self.options.backoff_s
                failures = 0 if lasted_s > 10 * low else failures + 1  # a connection that breaks at once is a failure as well
                await asyncio.sleep(min(high, low * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0))
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _try_all(self) -> float:
        """Try each address until one answers, and hold that connection until it ends; the seconds that it lasted."""
        self._since = math.inf
        try:
            for target in await self._targets():
                try:
                    self._judge(await self._connect(target))
                    break
                except _UNREACHABLE as error:
                    self._trouble(f"{self.peer} cannot be reached at {target}: {_words(error)}")
        except (CredentialsError, Refused) as error:  # of our own certificate, or of what the listener says
            self._trouble(str(error))
            if isinstance(error, Refused):
                self._refusals.note(self.peer, error.reason, str(error))
            if not self._was_welcome:
                raise RefusedForGood(str(error)) if isinstance(error, Refused) else error from None
        return self._lasted_s

    @property
    def _lasted_s(self) -> float:
        return max(time.monotonic() - self._since, 0.0)

    def _judge(self, closed: Closed) -> None:
        if closed.reason == "replaced":
            raise Replaced(str(closed))
        self._trouble(str(closed))
        if closed.by_peer:
            self._refusals.note_from_peer(self.peer, closed.reason, str(closed))
            if not self._was_welcome:
                raise RefusedForGood(f"{self.peer} refuses {self.me}: {closed}")

    def _trouble(self, sentence: str) -> None:
        if sentence != self._last_trouble:
            self._last_trouble = sentence
            self._journal.warning("not_connected", peer=self.peer, sentence=sentence)

    async def _targets(self) -> list[str]:
        """Where to dial, looked up anew."""
        addresses = self._addresses() if callable(self._addresses) else self._addresses
        found: list[str] = []
        for address in addresses:
            host, port = split_address(address)
            if isinstance(self._security, Plain):
                check_plain(host)
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                self._trouble(f"the address {address} of {self.peer} cannot be looked up: {error}")
                continue
            found += [_target(info[4][0], port) for info in infos]
        return list(dict.fromkeys(found))

    async def _connect(self, target: str) -> Closed:
        """One connection, from its beginning to its end."""
        channel, own = self._channel(target)
        async with channel:
            call = channel.stream_stream(f"/{SERVICE}/Link", Frame.SerializeToString, Frame.FromString)()  # type: ignore[call-arg]

            async def read() -> Frame | None:
                frame = await call.read()
                return frame if isinstance(frame, Frame) else None  # EOF

            hello = self._hello()
            async with asyncio.timeout(self.options.gone_s):
                await call.write(Frame(hello=hello))
                answer = await read()
            if answer is None:
                await call.code()
                return Closed("hung up", f"{self.peer} hung up instead of an answer")
            if answer.HasField("refused"):
                return Closed(answer.refused.reason, answer.refused.sentence, by_peer=True)
            certificate, about = self._check_welcome(answer, hello.nonce, own)
            self._last_trouble, self._since = "", time.monotonic()
            session = Session(self.me, self.peer, self._traffic, read, call.write, self._on_letter, self._on_notice)
            try:
                closed = await self._hold(self.peer, _Peer(session, b"", certificate), about)
            finally:
                self._was_welcome |= session.has_heard or self._lasted_s > self.options.gone_s
            self._was_welcome |= closed.reason in PASSING
            return closed

    def _channel(self, target: str) -> tuple[grpc.aio.Channel, Certificate | None]:
        options = [*self._channel_options(), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if isinstance(self._security, Plain):
            return grpc.aio.insecure_channel(target, options=options), None
        options.append(("grpc.ssl_target_name_override", host_name(self.peer)))
        credentials, own = self._security.for_dialler()
        return grpc.aio.secure_channel(target, credentials, options=options), own

    def _hello(self) -> Hello:
        return Hello(
            oldest=OLDEST,
            newest=NEWEST,
            software=_software(),
            actor=self.me,
            to=self.peer,
            instance=self._instance,
            about=json.dumps(self._about()),
            model=[TensorShape(name=name, shape=shape) for name, shape in self._model.tensors],
            nonce=os.urandom(32),
        )

    def _check_welcome(self, answer: Frame, nonce: bytes, own: Certificate | None) -> tuple[Certificate | None, dict[str, Any]]:
        if not answer.HasField("welcome"):
            raise Refused("frame", f"{self.peer} answered with neither Welcome nor Refused")
        welcome = answer.welcome
        if not OLDEST <= welcome.version <= NEWEST:
            raise Refused("version", f"{self.peer} wants version {welcome.version} of the protocol; this is {OLDEST} to {NEWEST}")
        if welcome.actor != self.peer:
            raise Refused("identity", f"{self.peer} was dialled, but {welcome.actor!r:.80} answered")
        certificate = None
        if isinstance(self._security, Credentials):
            assert own is not None
            certificate = self._security.check_signature(welcome.certificate, welcome.signature, nonce, self.peer, own)
        return certificate, parse_text(welcome.about)


# ------------------------------------------------------------------------------------------------------------------------ helpers
async def ask_status(peer: Actor, address: str, security: Security, timeout_s: float = 10.0) -> dict[str, Any]:
    """How a listener is doing."""
    async with _operator_channel(peer, address, security) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/Status", StatusRequest.SerializeToString, StatusReply.FromString)
        reply: StatusReply = await _answered(ask(StatusRequest(), timeout=timeout_s), peer, address)
    return parse_text(reply.body)


async def ask_change(peer: Actor, address: str, security: Security, what: str, device: int, timeout_s: float = 30.0) -> bool:
    """Let a server admit or dismiss a device; whether that changed anything. Once it returns it is durable."""
    async with _operator_channel(peer, address, security) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/Change", ChangeRequest.SerializeToString, ChangeReply.FromString)
        reply: ChangeReply = await _answered(ask(ChangeRequest(what=what, device=device), timeout=timeout_s), peer, address)
    return bool(reply.changed)


async def _answered(call: Awaitable[Any], peer: Actor, address: str) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            raise RefusedForGood(str(error.details())) from None
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise Refused("change", str(error.details())) from None
        raise Refused("unreachable", f"{peer} does not answer at {address}: {_words(error)}") from None


def _operator_channel(peer: Actor, address: str, security: Security) -> grpc.aio.Channel:
    host, _ = split_address(address)
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if isinstance(security, Plain):
        check_plain(host)
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", host_name(peer)))
    return grpc.aio.secure_channel(address, security.for_dialler()[0], options=options)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `127.0.0.1:7400` or `[::1]:7400`."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65_536):
        raise ConfigError(f"{address!r} is not an address; write host:port, such as 10.0.0.5:7400 or [::1]:7400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _target(ip: str | int, port: int) -> str:
    return f"ipv6:[{ip}]:{port}" if ":" in str(ip) else f"ipv4:{ip}:{port}"


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}, {error.details()}"
    return str(error) or type(error).__name__


def _software() -> str:
    from importlib.metadata import version

    return version("fedbcd")


_BROKEN: tuple[type[Exception], ...] = (
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
)
_UNREACHABLE: tuple[type[Exception], ...] = (TimeoutError, *_BROKEN)
