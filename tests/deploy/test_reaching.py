"""A dialler that gets nowhere says in one sentence why and what to do, and tries on calmly; one
that waits for a network is back soon after it.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fedbcd.engines.deploy.links import dialer as dialer_module
from fedbcd.engines.deploy.links.reaching import knock
from fedbcd.engines.deploy.links.tls import Credentials, Plain, Security
from fedbcd.engines.deploy.links.traffic import Closed
from fedbcd.engines.deploy.processes.logs import log_of
from support.waiting import eventually
from support.wire import (
    DEVICE,
    QUICK,
    SERVER,
    Recorder,
    dialer,
    listener,
    make_authority,
    running,
)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder, "server/4")
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Path:
    """Another authority, whose device trusts the first one's server."""
    folder = tmp_path_factory.mktemp("others")
    make_authority(folder)
    half = folder / "half"
    half.mkdir()
    role = folder / "device-7"
    for name in ("identity.pem", "crl.pem", "ca.pem"):
        (half / name).write_bytes((role / name).read_bytes())
    return folder


@contextlib.contextmanager
def a_port(listens: bool) -> Iterator[int]:
    """One at which nobody listens, or somebody who says nothing."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        if listens:
            door.listen()
        yield door.getsockname()[1]


@contextlib.asynccontextmanager
async def talker(words: bytes) -> AsyncIterator[int]:
    """Another service."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(100)
            writer.write(words)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def why(security: Security, port: int, **options: float) -> tuple[str, Recorder]:
    """The one sentence that is logged, however often it is tried."""
    ear = Recorder()
    device = dialer(ear, security, port, options=dataclasses.replace(QUICK, **options))
    attempts = 0
    inner = device._pause

    async def count(failures: int) -> bool:
        nonlocal attempts
        attempts += 1
        return await inner(failures)

    device._pause = count  # type: ignore[method-assign]
    async with running(device.run()):
        await eventually(lambda: attempts >= 2)
    (sentence,) = (said["sentence"] for said in ear.heard("not_connected"))
    assert device.trouble == [sentence]
    return sentence, ear


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nobody", "nobody listens (connection refused); is it started, and is the port right?"),
        ("silence", "but server/3 does not answer; is that process overloaded or stopped"),
        ("plain text", "does not speak TLS (plain text, or another service); is the port right"),
        ("another service", "does not speak TLS (plain text, or another service)"),
        ("hangs up", "hangs up"),
        ("plain to TLS", "speaks TLS, but this process plain text; leave out 'plain'"),
        ("wrong authority", "of another authority than the one in"),
        ("wrong server", "server/4 is at 127.0.0.1:"),
    ],
)
def test_what_is_wrong_is_one_sentence(case: str, words: str, certs: Path, others: Path) -> None:
    async def scenario() -> str:
        security: Security = Credentials(certs, DEVICE)
        if case in ("nobody", "silence"):
            with a_port(listens=case == "silence") as port:
                return (await why(security, port, gone_s=0.5, connect_s=0.5))[0]
        if case in ("another service", "hangs up"):
            words = b"HTTP/1.1 400 Bad Request\r\n\r\n" if case == "another service" else b""
            async with talker(words) as port:
                return (await why(security, port))[0]
        me, theirs = SERVER, Credentials(certs, SERVER)
        if case == "wrong server":
            me, theirs = "server/4", Credentials(certs, "server/4")
        if case == "wrong authority":
            security = Credentials(others, DEVICE)
        elif case == "plain to TLS":
            security = Plain()
        server = listener(Recorder(), Plain() if case == "plain text" else theirs, me=me)
        try:
            return (await why(security, await server.start()))[0]
        finally:
            await server.stop()

    sentence = asyncio.run(scenario())
    assert words in sentence
    assert "SSL" not in sentence.replace("TLS", "")
    assert "UNAVAILABLE" not in sentence


def test_who_is_turned_down_over_there_is_told_so(certs: Path, others: Path) -> None:
    """It trusts the listener, but not the other way round."""

    class Half(Credentials):
        """Its own certificate, and the CA of the others."""

    credentials = Half(others, DEVICE)
    half = others / "half"
    (half / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    files = dataclasses.replace(credentials._files, ca_pem=(certs / "ca.pem").read_bytes())
    credentials._files, credentials.folder = files, half
    credentials.refresh = lambda: False  # type: ignore[method-assign]
    credentials.check_own = lambda: None  # type: ignore[method-assign]

    async def scenario() -> str:
        server = listener(Recorder(), Credentials(certs, SERVER))
        try:
            return (await why(credentials, await server.start()))[0]
        finally:
            await server.stop()

    assert "turns the certificate of device/7 down" in asyncio.run(scenario())


def test_nothing_but_json_is_written_to_stderr(certs: Path, others: Path) -> None:
    """gRPC and OpenSSL have something to say of their own in a wrong handshake."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.engines.deploy.processes.logs import log_of
from support.wire import *
from pathlib import Path

async def main():
    server = listener(Recorder(), Credentials(Path({str(certs)!r}), SERVER))
    port = await server.start()
    log = log_of(DEVICE)
    device = dialer(Recorder(), Credentials(Path({str(others)!r}), DEVICE), port)
    device._log = log
    async with running(device.run()):
        while not device.trouble:
            await asyncio.sleep(0.02)
    await server.stop()

asyncio.run(main())
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
    )
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["what"] for line in said] == ["not_connected"]


def test_what_grpc_logs_in_python_is_json_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    log_of(DEVICE)
    logging.getLogger("grpc._cython.cygrpc").error("Unexpected %s", "thing")
    assert json.loads(capsys.readouterr().err)["what"] == "Unexpected thing"


# ------------------------------------------------------------------------------------------------
# being back soon
def test_a_knock_that_is_lost_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would wait longer each time."""
    monkeypatch.setattr("fedbcd.engines.deploy.links.reaching.AGAIN_S", 0.05)
    asked = 0

    async def lost_at_first(*_: object, **__: object) -> tuple[None, object]:
        nonlocal asked
        asked += 1
        if asked < 4:
            await asyncio.sleep(3600)

        class Writer:
            transport = type("Transport", (), {"abort": lambda self: None})()

        return None, Writer()

    monkeypatch.setattr(asyncio, "open_connection", lost_at_first)
    assert asyncio.run(knock("192.0.2.1", 1, 60.0)) < 60.0
    assert asked == 4


def test_a_dialler_does_not_wait_long_for_who_is_away_and_hurries_when_told(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialer_module, "AWAY_S", 3600.0)
    options = dataclasses.replace(QUICK, backoff_s=(1800.0, 3600.0))

    async def scenario(port: int) -> None:
        device = dialer(Recorder(), Credentials(certs, DEVICE), port, options=options)
        async with running(device.run()):
            await eventually(lambda: device.trouble)
            server = listener(Recorder(), Credentials(certs, SERVER), f"127.0.0.1:{port}")
            await server.start()
            await asyncio.sleep(0.05)
            device.hurry()
            await eventually(lambda: device.connected)
            await server.stop()

    with a_port(listens=False) as port:
        pass
    asyncio.run(scenario(port))


def test_a_connection_has_the_time_that_the_line_takes_and_more_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A knock took 3 s; TLS, Hello and Welcome take several times that."""
    given: list[float] = []

    async def far(*_: object) -> float:
        return 3.0

    async def connect(_target: str, patience_s: float) -> Closed:
        given.append(patience_s)
        raise TimeoutError

    async def why(*_: object) -> str:
        return "no answer"

    monkeypatch.setattr(dialer_module, "knock", far)
    monkeypatch.setattr(dialer_module, "explain", why)
    options = dataclasses.replace(QUICK, gone_s=10.0, connect_s=100.0)
    device = dialer(Recorder(), Plain(), 1, options=options)
    device._connect = connect  # type: ignore[method-assign]

    async def scenario() -> None:
        for _ in range(4):
            assert not await device._try("127.0.0.1", 1)

    asyncio.run(scenario())
    assert given == [30.0, 60.0, 100.0, 100.0]
