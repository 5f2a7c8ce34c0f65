"""Health, metrics and status of a role over HTTP, inside its event loop: GET only, on loopback
unless told otherwise.

/healthz   200 while the process is alive and its event loop turns
/readyz    200 once it can do its work (listens, or is connected), 503 before
/metrics   what Prometheus scrapes
/status    what it is doing, as JSON
"""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fedbcd.engines.deploy.links.tls import is_loopback
from fedbcd.engines.deploy.processes.descriptors import unwritten
from fedbcd.engines.deploy.processes.exit_codes import AddressError
from fedbcd.record.tensorfile import write_whole

MOST_BYTES, MOST_SECONDS, MOST_CLIENTS = (
    8192,
    5.0,
    32,
)  # of a request; a client that sends more, or nothing, is cut off
LOCAL = ("localhost", "127.0.0.1", "::1")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """A small HTTP server for those who watch."""

    def __init__(
        self,
        metrics: Callable[[], bytes],
        status: Callable[[], dict[str, Any]],
        ready: Callable[[], bool],
    ) -> None:
        self._metrics = metrics
        self._status = status
        self._ready = ready
        self._server: asyncio.Server | None = None
        self._hosts: frozenset[str] | None = None  # that a request may name; None: any
        self._clients: dict[asyncio.Task[None] | None, None] = {}  # that wait, the oldest first

    async def start(self, host: str, port: int) -> int:
        if is_loopback(host):  # a page in a browser may reach it under a name of its own
            self._hosts = frozenset({host, *LOCAL})
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MOST_BYTES)
        except OSError as error:
            raise AddressError(
                f"health and metrics cannot be shown at {host}:{port} ({error.strerror or error});"
                " choose another address with --health"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        if len(self._clients) >= MOST_CLIENTS:  # who asks now has a place: the oldest goes
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            if oldest is not None:
                oldest.cancel()
        self._clients[me] = None
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), MOST_SECONDS)
            writer.write(self._answer(request))
            await asyncio.wait_for(writer.drain(), MOST_SECONDS)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that is gone or misbehaves is no concern of the role
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._clients.pop(me, None)
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if self._hosts is not None and _host_of(request) not in (None, *self._hosts):
            return _response(
                HTTPStatus.MISDIRECTED_REQUEST, b"ask for localhost or its address, by that name\n"
            )
        if method != b"GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n")
        match path:
            case b"/healthz":
                return _response(HTTPStatus.OK, b"ok\n")
            case b"/readyz":
                return (
                    _response(HTTPStatus.OK, b"ready\n")
                    if self._ready()
                    else _response(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
                )
            case b"/metrics":
                return _response(HTTPStatus.OK, self._metrics(), METRICS_TYPE)
            case b"/status":
                return _response(
                    HTTPStatus.OK, json.dumps(self._status()).encode() + b"\n", "application/json"
                )
        return _response(
            HTTPStatus.NOT_FOUND, b"there are /healthz, /readyz, /metrics and /status\n"
        )


def _host_of(request: bytes) -> str | None:
    """The host that a request names, without its port; None: it names none."""
    for line in request.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"host":
            host = value.strip().decode("latin-1").lower()
            return host.partition("]")[0].lstrip("[") if "[" in host else host.partition(":")[0]
    return None


def note_port(folder: Path, port: int) -> None:
    try:
        write_whole(folder / "health.json", json.dumps({"port": port, "pid": os.getpid()}).encode())
    except OSError as error:
        raise unwritten(folder, error) from None


def _response(status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length:"
        f" {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
