"""The end of a link that waits: servers and the coordinator."""

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.connection import Connection
from fedbcd.engines.deploy.links.endpoint import (
    BROKEN,
    NEWEST,
    OLDEST,
    SERVICE,
    About,
    LinkEnd,
    Peer,
    part_of,
    software,
)
from fedbcd.engines.deploy.links.fedbcd_pb2 import (
    ChangeReply,
    ChangeRequest,
    Frame,
    Hello,
    StatusReply,
    StatusRequest,
    Welcome,
)
from fedbcd.engines.deploy.links.refusals import CredentialsError, MissingExtra, reason_of
from fedbcd.engines.deploy.links.strangers import Knocks, Strangers
from fedbcd.engines.deploy.links.tls import (
    Certificate,
    Credentials,
    Plain,
    check_plain,
    home_of,
    identity_of,
)
from fedbcd.engines.deploy.links.traffic import parse_text, refused_frame
from fedbcd.engines.deploy.processes.descriptors import places
from fedbcd.engines.deploy.processes.exit_codes import AddressError
from fedbcd.errors import FedBCDError, ProtocolError, Refused
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.senders import PAIRS, kind_of

try:
    import grpc
    from cryptography.x509 import load_pem_x509_certificate
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None

OPERATOR: Actor = "operator"
QUIET_S, CROWDED_S = 1.0, 0.1  # how often connections of strangers are looked at

Welcomes = Callable[[Actor, dict[str, Any]], None]
OnError = Callable[[Exception], None]
Change = Callable[[str, int, Actor], Awaitable[bool]]  # what, a device, by whom


def only(peers: Iterable[Actor], check: Welcomes | None = None) -> Welcomes:
    """Welcome these peers, as far as `check` does not refuse them, and nobody else."""
    known = frozenset(peers)

    def welcomes(peer: Actor, about: dict[str, Any]) -> None:
        if peer not in known:
            raise Refused(
                "member",
                f"{peer} does not belong here; add it to the list of this role, or send it to its"
                " own server",
            )
        if check is not None:
            check(peer, about)

    return welcomes


class Listener(LinkEnd):
    """Serves the peers of one role. `send` never waits: a letter for a peer that is away or too
    slow is dropped.

    `welcomes(peer, about)` raises `Refused` for a peer that does not belong here; it is asked
    before an older process with the same identity is told to end, so that only one that may take
    its place does. `on_connect` follows the Welcome; what it sends goes out first. `on_error` is
    told what a callback raised that is no refusal: the disk is full, or there is a bug; the
    connection has ended. When a peer connects anew while its old connection lasts, `on_connect` is
    called again without `on_disconnect` between.
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
        """`address` is host:port, port 0 for any that is free; for `common` see `LinkEnd`: model,
        security, on_letter and so on.
        """
        super().__init__(me, **common)
        self.address = address
        self.port = 0
        self._welcomes = welcomes
        self._status = status
        self._change = change
        self._on_error = on_error or self._note_error
        self._server: grpc.aio.Server | None = None
        self._places = places()
        self._strangers = Strangers(self._places, lambda: self.options.connect_s)
        self._knocks = Knocks()
        self._watchers: list[asyncio.Task[None]] = []
        self._handlers: set[asyncio.Task[Any]] = set()

    async def start(self) -> int:
        host, _ = split_address(self.address)
        handlers = {
            "Link": grpc.stream_stream_rpc_method_handler(
                self._link, Frame.FromString, Frame.SerializeToString
            ),
            "Status": grpc.unary_unary_rpc_method_handler(
                self._answer_status, StatusRequest.FromString, StatusReply.SerializeToString
            ),
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
            raise AddressError(
                f"{self.address} cannot be listened at; it is in use or not an address of this"
                " machine"
            ) from None
        await server.start()
        self._server = server
        self._watchers = [asyncio.create_task(self._look_at_strangers())]
        if isinstance(self._security, Credentials):
            self._watchers.append(asyncio.create_task(self._watch()))
        return self.port

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self.options.gone_s)

    async def _look_at_strangers(self) -> None:
        """More often while there are many."""
        while True:
            left = self._strangers.look(self.port)
            await asyncio.sleep(CROWDED_S if left > self._strangers.most // 4 else QUIET_S)

    def _server_options(self) -> list[tuple[str, int | str]]:
        options = self.options
        return [
            *self._channel_options(),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.server_handshake_timeout_ms", int(options.connect_s * 1000)),
            # a connection without a stream
            ("grpc.max_connection_idle_ms", int(options.gone_s * 3000)),
            ("grpc.max_allowed_incoming_connections", self._places),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.so_reuseport", 0),  # a second listener at the same port is a mistake
        ]

    async def _link(
        self, requests: AsyncIterator[Frame], context: "grpc.aio.ServicerContext[Frame, Frame]"
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._serve(requests, context)
        except BROKEN:
            pass
        except Exception as error:  # noqa: BLE001  gRPC would print it
            self._on_error(error)
        finally:
            self._handlers.discard(task)

    def _note_error(self, error: Exception) -> None:
        """What ends the process has been said by then."""
        if not isinstance(error, FedBCDError):
            trace = "".join(traceback.format_exception(error))
            self._log.error("bug", sentence=f"a connection has ended: {error}", trace=trace)

    async def _serve(
        self, _requests: AsyncIterator[Frame], context: "grpc.aio.ServicerContext[Frame, Frame]"
    ) -> None:
        async def read() -> Frame | None:
            frame = await context.read()
            return frame if isinstance(frame, Frame) else None  # EOF

        try:
            hello = await asyncio.wait_for(read(), self.options.connect_s)
        except TimeoutError:
            return
        peer, certificate = f"unknown at {context.peer().rpartition(':')[0]}", None
        try:
            certificate = self._certificate(context)
            peer = identity_of(certificate) if certificate is not None else peer
            self._check_certificate(certificate)
            if not await self._knocks.wait(peer):
                self._refusals.note(peer, "rate", f"{peer} says Hello too often; slow down")
                return
            peer, about, welcome = self._greet(hello, certificate)
            known = self._strangers.known(context.peer())
        except (ProtocolError, CredentialsError) as error:
            self._refusals.note(peer, reason_of(error), str(error))
            await context.write(refused_frame(reason_of(error), str(error), final=True))
            return
        assert hello is not None
        self._retire(peer, hello.hello.instance)
        kept = self._traffic.kept.look(peer)
        if kept is not None:
            welcome.part.CopyFrom(kept)
        connection = Connection(
            *(self.me, peer, self._traffic, read, context.write),
            *(self._on_letter, self._on_notice, welcome.version, part_of(hello.hello)),
        )
        entry = Peer(connection, hello.hello.instance, certificate)
        with known:
            await self._hold(peer, entry, about, Frame(welcome=welcome))

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
            raise Refused(
                "certificate", f"the certificate of {identity_of(certificate)} {objection}"
            )

    def _greet(
        self, frame: Frame | None, certificate: Certificate | None
    ) -> tuple[Actor, dict[str, Any], Welcome]:
        """Check a Hello; who it is, what it says of itself, and the answer."""
        if frame is None or not frame.HasField("hello"):
            raise Refused("frame", "a connection begins with Hello")
        hello = frame.hello
        version = negotiate(hello, self.me)
        self._check_identity(hello, certificate)
        declared = Declared(tuple((tensor.name, tuple(tensor.shape)) for tensor in hello.model))
        difference = self._model.difference(declared)
        if difference is not None:
            raise Refused(
                "model", f"{hello.actor} works on another model than {self.me}: {difference}"
            )
        about = parse_text(hello.about)
        self._welcomes(hello.actor, about)
        welcome = Welcome(
            version=version, software=software(), actor=self.me, about=json.dumps(self._about())
        )
        if isinstance(self._security, Credentials):
            assert certificate is not None
            welcome.certificate, welcome.signature = self._security.sign(hello.nonce, certificate)
        return hello.actor, about, welcome

    def _check_identity(self, hello: Hello, certificate: Certificate | None) -> None:
        if certificate is not None:
            identity, home = identity_of(certificate), home_of(certificate)
            if hello.actor != identity:
                raise Refused(
                    "identity",
                    f"{identity} says that it is {hello.actor!r:.80}; a process acts as its"
                    " certificate says",
                )
            if home not in (None, self.me):
                raise Refused(
                    "identity", f"the certificate of {identity} is for {home}, not for {self.me}"
                )
        if hello.to != self.me:
            raise Refused(
                "identity",
                f"{hello.actor!r:.80} wants {hello.to!r:.80}, but this is {self.me}; look at its"
                " addresses",
            )
        if (kind_of(hello.actor), kind_of(self.me)) not in PAIRS:
            raise Refused("identity", f"{hello.actor!r:.80} has nothing to say to {self.me}")

    def _retire(self, peer: Actor, instance: bytes) -> None:
        """The newest connection of a peer wins; an older process is told."""
        old = self._peers.get(peer)
        if old is None:
            return
        old.connection.keep()
        if old.instance == instance:
            old.connection.end("reconnected", f"{peer} has connected anew")
            return
        sentence = (
            f"another process has connected as {peer} since; the newest wins, so this one must end"
        )
        self._end(peer, old, "replaced", sentence)

    async def _answer_status(
        self, _request: StatusRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> StatusReply:
        await self._check_operator(context, "ask for status")
        return StatusReply(body=json.dumps(self._status()))

    async def _answer_change(
        self, request: ChangeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> ChangeReply:
        by = await self._check_operator(context, "change who belongs here")
        assert self._change is not None
        try:
            return ChangeReply(changed=await self._change(request.what, request.device, by))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError from error  # abort has raised

    async def _check_operator(
        self, context: "grpc.aio.ServicerContext[Any, Any]", what: str
    ) -> Actor:
        """Who it is. In plain text, which is for loopback only, whoever is on this machine may."""
        identity = OPERATOR
        try:
            certificate = self._certificate(context)
            self._check_certificate(certificate)
            identity = OPERATOR if certificate is None else identity_of(certificate)
            if kind_of(identity) != OPERATOR:
                raise Refused(
                    "identity", f"{identity} may not {what}; use the certificate of {OPERATOR}"
                )
        except (ProtocolError, CredentialsError) as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return identity


def negotiate(hello: Hello, me: Actor) -> int:
    version = min(hello.newest, NEWEST)
    if version < max(hello.oldest, OLDEST):
        older = hello.newest < OLDEST
        raise Refused(
            "version",
            f"{hello.actor!r:.80} (fedbcd {hello.software:.20}) speaks versions {hello.oldest} to"
            f" {hello.newest} of the protocol, {me} (fedbcd {software()}) speaks {OLDEST} to"
            f" {NEWEST}; upgrade {hello.actor if older else me}",
        )
    return version
