"""Hosts without a certificate open connections and say nothing: members and the store have their
descriptors all the same.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from faultsim.told import environment
from fedbcd.engines.deploy.links.listener import only
from fedbcd.engines.deploy.links.refusals import Replaced
from fedbcd.engines.deploy.links.strangers import Knocks, Strangers, place_of
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.engines.deploy.processes.descriptors import WANTED, DescriptorsError, raise_limit
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.roles.filestore import FileStore
from support.processes import (
    ENDLESS,
    go_on,
    job,
    pid_of,
    running,
    stop,
    write_job,
)
from support.waiting import eventually, wait_for
from support.wire import (
    DEVICE,
    SERVER,
    Recorder,
    dialer,
    listener,
    make_authority,
    running as beside,
)

DESCRIPTORS = 256  # of each role; what is usual is 1,024
IDLE = 400


@contextlib.contextmanager
def idle(port: int, number: int) -> Iterator[subprocess.Popen[str]]:
    """So many connections that say nothing, or begin a handshake and stop."""
    command = [sys.executable, "-m", "faultsim.idle", str(number)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(port, file=process.stdin, flush=True)
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def listens_at(out: Path, role: str) -> int:
    """The port at which a role says that it listens."""
    lines = (out / "logs" / f"{role}.log").read_text().splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    return int(next(line["port"] for line in said if line["what"] == "listening"))


def test_idle_connections_end_no_server_and_keep_nobody_out(tmp_path: Path) -> None:
    """400 of them, of a server that may have 256 descriptors: its phases go on, and a device that
    comes back meanwhile is served.
    """
    out = tmp_path / "run"
    file = write_job(
        tmp_path, job(run=ENDLESS, federation={"servers": 1, "devices": 3, "active": 3})
    )
    with running("up", file, "--time-scale", "0.02", "--out", out) as up:
        resource.prlimit(up.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        go_on(out)
        server = pid_of(out, "server/0")
        assert resource.prlimit(server, resource.RLIMIT_NOFILE)[1] == DESCRIPTORS
        with idle(listens_at(out, "server-0"), IDLE):
            go_on(out, 3)
            device = pid_of(out, "device/1")
            os.kill(device, signal.SIGKILL)
            wait_for(lambda: pid_of(out, "device/1") != device, "device 1 is not back")
            go_on(out, 2)  # both are needed for a phase
            assert pid_of(out, "server/0") == server
        stop(up)
    log = (out / "logs" / "server-0.log").read_text()
    assert "Traceback" not in log
    assert "too many open files" not in log.lower()


def test_the_oldest_of_the_most_crowded_host_go_first() -> None:
    """And nobody who is known, nor who has come from elsewhere."""
    with contextlib.ExitStack() as stack:
        ear = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = ear.getsockname()[1]
        ends = []
        for host in ("127.0.0.2", *["127.0.0.1"] * 20):
            one = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
            )
            ends.append((one, stack.enter_context(ear.accept()[0])))
            one.setblocking(False)
        strangers = Strangers(16, lambda: 60.0)  # room for 8 of them

        def gone() -> list[int]:
            return [k for k, (one, _) in enumerate(ends) if select.select([one], [], [], 0)[0]]

        with strangers.known(f"ipv4:127.0.0.1:{ends[1][0].getsockname()[1]}"):
            assert strangers.look(port) == 8
            assert len(gone()) == strangers.dropped == 12
            assert {0, 1}.isdisjoint(gone())
            assert strangers.look(port) <= 8
        patient = Strangers(1000, lambda: 0.0)
        patient.look(port)
        assert patient.look(port) == 0  # all of them have been there for longer than that


def test_an_identity_that_says_hello_again_and_again_waits() -> None:
    async def scenario() -> None:
        knocks = Knocks(at_once=3, per_s=20.0)
        began = time.monotonic()
        assert all([await knocks.wait("device/7") for _ in range(3)])
        last = asyncio.create_task(knocks.wait("device/7"))
        await asyncio.sleep(0)
        assert not await knocks.wait("device/7")  # one waits already
        assert await knocks.wait("device/8")
        assert await last
        assert time.monotonic() - began >= 1 / 20 - 0.01

    asyncio.run(scenario())


def test_a_member_that_connects_without_end_costs_little(tmp_path: Path) -> None:
    """Its Hellos are answered at a bounded rate, and others are served meanwhile."""
    make_authority(tmp_path, "device/8")

    async def scenario() -> None:
        ear = Recorder()
        server = listener(ear, Credentials(tmp_path, SERVER), welcomes=only({DEVICE, "device/8"}))
        server._knocks = Knocks(at_once=2, per_s=0.5)
        port = await server.start()
        for _ in range(2):
            one = dialer(Recorder(), Credentials(tmp_path, DEVICE), port)
            async with beside(one.run()):
                await eventually(lambda: DEVICE in server.connected)
            await eventually(lambda: DEVICE not in server.connected)
        two = [dialer(Recorder(), Credentials(tmp_path, DEVICE), port) for _ in range(2)]
        other = dialer(Recorder(), Credentials(tmp_path, "device/8"), port, me="device/8")
        tasks = [asyncio.ensure_future(each.run()) for each in two]
        await eventually(lambda: server.counts.refused["rate"])
        async with beside(other.run()):
            await eventually(lambda: "device/8" in server.connected)
        for task in tasks:
            await _ended(task)
        await server.stop()

    asyncio.run(scenario())


async def _ended(task: "asyncio.Task[None]") -> None:
    """Two processes with one identity: each may have been told that another has connected."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Replaced):
        await task


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:70", ("::1", 70)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", ("10.0.0.1", 7)),
    ],
)
def test_places_are_read_as_grpc_writes_them(peer: str, place: tuple[str, int]) -> None:
    assert place_of(peer) == place


def test_no_descriptors_is_neither_a_damaged_disk_nor_final(tmp_path: Path) -> None:
    """A store that is opened, and one that writes, when none is left; it goes on afterwards."""
    store = FileStore(tmp_path / "one", begin=True)
    FileStore(tmp_path / "two", begin=True).close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        with pytest.raises(DescriptorsError, match=r"all the files open.*\(64\).*raise that limit"):
            store.save("x/0/0", torch.zeros(3))
        with pytest.raises(DescriptorsError):
            FileStore(tmp_path / "two")
    assert not ExitCode(DescriptorsError.exit_code).is_final
    store.save("x/0/0", torch.zeros(3))
    store.commit()
    store.close()


def test_a_process_asks_for_the_descriptors_that_it_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert raise_limit() == min(before[1], WANTED)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
