"""Real sockets and real certificates for the tests of the links: an authority, both ends of a link,
and a TCP proxy in between.
"""

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import torch

from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import Listener, only
from fedbcd.engines.deploy.links.tls import Credentials, Security
from fedbcd.engines.deploy.links.traffic import LinkOptions
from fedbcd.protocol.messages import Acknowledged, Activated, Event, UpdateRequested, Uploaded
from fedbcd.protocol.notices import Notice
from support.waiting import eventually

SERVER, DEVICE = "server/3", "device/7"
QUICK = LinkOptions(gone_s=60.0, backoff_s=(0.02, 0.3), watch_s=0.05)
SMALL = Declared((("weight", (2, 3)), ("bias", (2,))))


def make_authority(folder: Path, *more: str) -> Authority:
    """An authority that has let in a coordinator, server/3 and device/7."""
    authority = Authority.create(folder)
    for identity in ("coordinator", SERVER, DEVICE, *more):
        authority.issue(identity)
    return authority


def declared(size: int) -> Declared:
    """A model of so many parameters."""
    return Declared((("weight", (size,)),))


def up(model: torch.Tensor | None, activation: int = 0, device: int = 7) -> Letter:
    """What a device sends to server/3: its model, or a request."""
    event: Event = UpdateRequested(device=device, activation=activation)
    if model is not None:
        event = Uploaded(device=device, activation=activation, model=f"x/{device}/{activation}")
    return Letter(f"device/{device}", SERVER, event, model, 1.0)


def down(model: torch.Tensor | None, activation: int = 0) -> Letter:
    """What server/3 sends to device/7: a model, or an acknowledgement."""
    event: Event = Acknowledged(activation=activation)
    if model is not None:
        event = Activated(activation=activation, model=f"z/3/{activation}")
    return Letter(SERVER, DEVICE, event, model, 2.0)


class Recorder:
    """Hears everything that one end of a link is told."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.connects: list[tuple[str, dict[str, Any]]] = []
        self.disconnects: list[str] = []
        self.notices: list[tuple[str, Notice]] = []
        self.said: list[tuple[str, dict[str, Any]]] = []

    def common(
        self, security: Security, model: Declared = SMALL, options: LinkOptions = QUICK, **more: Any
    ) -> dict[str, Any]:
        """The arguments of a listener or dialler that this ear listens to."""
        hooks = {
            "on_letter": self.letter,
            "on_connect": self.connect,
            "on_disconnect": self.disconnect,
            "on_notice": self.notice,
        }
        return {
            "model": model,
            "security": security,
            "options": options,
            "log": self,
            **hooks,
            **more,
        }

    async def letter(self, letter: Letter) -> None:
        self.letters.append(letter)

    async def connect(self, actor: str, about: dict[str, Any]) -> None:
        self.connects.append((actor, about))

    async def disconnect(self, actor: str) -> None:
        self.disconnects.append(actor)

    async def notice(self, actor: str, notice: Notice) -> None:
        self.notices.append((actor, notice))

    def info(self, what: str, **fields: Any) -> None:
        self.said.append((what, fields))

    warning = error = info

    def heard(self, what: str) -> list[dict[str, Any]]:
        """The log's entries of one kind."""
        return [fields for word, fields in self.said if word == what]


def listener(
    ear: Recorder, security: Security, address: str = "127.0.0.1:0", me: str = SERVER, **more: Any
) -> Listener:
    """A listener that welcomes device/7."""
    more.setdefault("welcomes", only({DEVICE}))
    extra = {name: more.pop(name) for name in ("welcomes", "status", "on_error") if name in more}
    return Listener(me, address, **extra, **ear.common(security, **more))


def dialer(
    ear: Recorder, security: Security, port: int, me: str = DEVICE, peer: str = SERVER, **more: Any
) -> Dialer:
    """A dialler to this machine."""
    return Dialer(
        me, peer, more.pop("addresses", [f"127.0.0.1:{port}"]), **ear.common(security, **more)
    )


@contextlib.asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator["asyncio.Task[None]"]:
    """Run something beside the test and cancel it at the end; if it failed before, the test sees
    why.
    """
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def linked(
    folder: Path, **more: Any
) -> AsyncIterator[tuple[Listener, Recorder, Dialer, Recorder]]:
    """server/3 and device/7, connected over TLS."""
    here, there = Recorder(), Recorder()
    server = listener(here, Credentials(folder, SERVER), **more)
    device = dialer(
        there,
        Credentials(folder, DEVICE),
        await server.start(),
        **{k: v for k, v in more.items() if k != "welcomes"},
    )
    try:
        async with running(device.run()):
            await eventually(lambda: server.connected and device.connected)
            yield server, here, device, there
    finally:
        await server.stop()


class Proxy:
    """A TCP proxy that counts bytes, can go silent without closing anything, and can be slow (bytes
    a second), each way.
    """

    def __init__(self, port: int, slow: float = math.inf) -> None:
        self.to_port = port
        self.slow = slow
        self.port = 0
        self.bytes_up = self.bytes_down = self.accepted = 0
        self.silent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def break_off(self) -> None:
        """All connections, as when a cable is pulled and put in again."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        if self.slow < math.inf:  # what is under way must wait with the sender, not here
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        if self.silent:
            return
        far = socket.create_connection(("127.0.0.1", self.to_port))
        if self.slow < math.inf:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        far_reader, far_writer = await asyncio.open_connection(sock=far)
        self._writers.append(far_writer)
        for work in (
            self._copy(reader, far_writer, "bytes_up"),
            self._copy(far_reader, writer, "bytes_down"),
        ):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str
    ) -> None:
        due = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536 if self.slow == math.inf else 8192):
                if self.silent:
                    await asyncio.sleep(3600)
                if self.slow < math.inf:
                    due = max(due, time.monotonic() - 0.1) + len(data) / self.slow
                    await asyncio.sleep(due - time.monotonic())
                setattr(self, counter, getattr(self, counter) + len(data))
                writer.write(data)
                await writer.drain()
            writer.close()
