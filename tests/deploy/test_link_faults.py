"""Links when things break: restarts, another address, silence, two processes with one identity; and
what a letter costs in bytes.
"""

import asyncio
import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbcd.engines.deploy.links.refusals import RefusedForGood, Replaced
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.errors import Refused
from support.waiting import eventually
from support.wire import (
    DEVICE,
    QUICK,
    SERVER,
    Proxy,
    Recorder,
    declared,
    dialer,
    down,
    linked,
    listener,
    make_authority,
    only,
    running,
    up,
)

MLP = 109_386


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder)
    return folder


def test_a_dialler_reconnects_after_the_listener_restarts(certs: Path) -> None:
    async def scenario() -> None:
        async with linked(certs) as (server, here, device, there):
            address = f"127.0.0.1:{server.port}"
            for _ in range(2):
                await server.stop()
                await eventually(lambda: not device.connected)
                assert not await device.send(up(None))
                server = listener(here, Credentials(certs, SERVER), address)
                await server.start()
                await eventually(lambda: device.connected)
                await device.send(up(None))
                await eventually(lambda: here.letters)
                here.letters.clear()
            assert there.connects == [(SERVER, {})] * 3
            await server.stop()

    asyncio.run(scenario())


def test_a_dialler_waits_for_a_listener_that_comes_later(certs: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def scenario() -> None:
        ear = Recorder()
        device = dialer(ear, Credentials(certs, DEVICE), port)
        async with running(device.run()):
            await eventually(lambda: ear.heard("not_connected"))
            await asyncio.sleep(0.3)
            assert len(ear.heard("not_connected")) == 1  # once, however often it tries
            server = listener(Recorder(), Credentials(certs, SERVER), f"127.0.0.1:{port}")
            await server.start()
            await eventually(lambda: device.connected)
            await server.stop()

    asyncio.run(scenario())


def test_a_server_that_moves_to_another_port_is_found_again(certs: Path) -> None:
    """By a list of addresses, and by a function that is asked anew before each attempt (as a DNS
    name is looked up anew).
    """

    async def scenario() -> None:
        addresses: list[str] = []
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER))
        addresses[:] = [f"127.0.0.1:{await server.start()}"]
        device = dialer(there, Credentials(certs, DEVICE), 0, addresses=lambda: addresses)
        async with running(device.run()):
            await eventually(lambda: device.connected)
            moved = listener(here, Credentials(certs, SERVER))
            new = f"127.0.0.1:{await moved.start()}"
            await server.stop()
            await eventually(lambda: not device.connected)
            addresses.append(new)  # the old one is still tried first
            await eventually(lambda: device.connected)
            await device.send(up(None))
            await eventually(lambda: here.letters)
            await moved.stop()

    asyncio.run(scenario())


def test_a_name_is_looked_up_at_each_attempt(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        server = listener(Recorder(), Credentials(certs, SERVER))
        port = await server.start()
        loop = asyncio.get_running_loop()
        asked: list[str] = []

        async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            asked.append(host)
            if len(asked) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(loop, "getaddrinfo", lookup)
        ear = Recorder()
        device = dialer(ear, Credentials(certs, DEVICE), port, addresses=[f"server.example:{port}"])
        async with running(device.run()):
            await eventually(lambda: device.connected)
        assert asked == ["server.example"] * 3
        assert "cannot be looked up" in ear.heard("not_connected")[0]["sentence"]
        await server.stop()

    asyncio.run(scenario())


def test_a_connection_that_goes_silent_is_noticed_at_both_ends_and_replaced(certs: Path) -> None:
    """Half-open: the proxy keeps both sockets open and passes nothing on, as a NAT that has
    forgotten the connection.
    """
    options = dataclasses.replace(QUICK, gone_s=0.6)

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER), options=options)
        proxy = await Proxy(await server.start()).start()
        device = dialer(there, Credentials(certs, DEVICE), proxy.port, options=options)
        async with running(device.run()):
            await eventually(lambda: device.connected and server.connected)
            proxy.silent = True
            await eventually(lambda: there.disconnects and here.disconnects)
            proxy.silent = False
            # a machine that stalls for so long is silent as well, and what was under way is lost
            while not here.letters:
                await eventually(lambda: device.connected and server.connected)
                await device.send(up(None))
                await asyncio.sleep(0.05)
        await proxy.stop()
        await server.stop()

    asyncio.run(scenario())


def test_a_line_that_is_slow_is_not_taken_for_one_that_is_dead(certs: Path) -> None:
    """An upload that takes longer than the time after which a silent peer is gone. A machine that
    stalls for so long is silent; then everything goes slower, and it is tried again.
    """
    model = torch.zeros(500_000)

    async def scenario(gone_s: float) -> bool:
        options = dataclasses.replace(QUICK, gone_s=gone_s)
        here, there = Recorder(), Recorder()
        server = listener(
            here, Credentials(certs, SERVER), options=options, model=declared(len(model))
        )
        proxy = await Proxy(await server.start(), slow=1_500_000 / gone_s).start()
        device = dialer(
            there,
            Credentials(certs, DEVICE),
            proxy.port,
            options=options,
            model=declared(len(model)),
        )
        async with running(device.run()):
            await eventually(lambda: device.connected)
            began, times = time.monotonic(), set()
            await device.send(up(model))
            await eventually(
                lambda: (
                    times.add(server.moved_at(DEVICE))
                    or here.letters
                    or here.disconnects
                    or there.disconnects
                )
            )
            fine = (len(here.letters), here.disconnects, there.disconnects) == (1, [], [])
            if fine:
                assert len(times) >= 3  # both ends see that it moves
                assert device.model_sent_at(SERVER) > began
                assert server.model_sent_at(DEVICE) < began
        await proxy.stop()
        await server.stop()
        return fine

    assert any(asyncio.run(scenario(gone_s)) for gone_s in (3.0, 9.0, 27.0, 81.0))


def test_a_peer_is_not_called_silent_while_nobody_listens_to_it(certs: Path) -> None:
    async def scenario() -> None:
        ear, moved = Recorder(), []

        async def slow(_letter: Any) -> None:
            began = time.monotonic()
            moved.append(await eventually(lambda: server.moved_at(DEVICE) > began + 0.2))

        ear.letter = slow  # type: ignore[method-assign]
        server = listener(ear, Credentials(certs, SERVER))
        device = dialer(Recorder(), Credentials(certs, DEVICE), await server.start())
        async with running(device.run()):
            await eventually(lambda: device.connected)
            await device.send(up(None))
            await eventually(lambda: moved)
        await server.stop()

    asyncio.run(scenario())


def test_an_idle_connection_is_kept_alive(certs: Path) -> None:
    options = dataclasses.replace(QUICK, gone_s=3.0)

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER), options=options)
        proxy = await Proxy(await server.start()).start()
        device = dialer(there, Credentials(certs, DEVICE), proxy.port, options=options)
        async with running(device.run()):
            await eventually(lambda: device.connected)
            await asyncio.sleep(0.1)
            before = proxy.bytes_up
            await eventually(lambda: proxy.bytes_up > before + 100)  # pings, and nothing else
            assert there.disconnects == []
        await proxy.stop()
        await server.stop()

    asyncio.run(scenario())


def test_of_two_processes_with_one_identity_the_newest_wins_and_the_older_is_told(
    certs: Path,
) -> None:
    async def scenario() -> None:
        async with linked(certs) as (server, here, first, there):
            second_ear = Recorder()
            second = dialer(second_ear, Credentials(certs, DEVICE), server.port)
            async with running(second.run()):
                await eventually(lambda: second.connected and not first.connected)
                await asyncio.sleep(0.5)  # no flapping
                assert second_ear.disconnects == []
                assert len(here.connects) == 2
                await server.send(down(None))
                await eventually(lambda: second_ear.letters)
                assert there.letters == []

    with pytest.raises(
        Replaced, match="another process has connected as device/7 since; the newest wins"
    ) as replaced:
        asyncio.run(scenario())
    assert replaced.value.exit_code == 20


def _of_this_run(peer: str, about: dict[str, Any]) -> None:
    if about.get("run") != "this":
        raise Refused(about.get("reason", "run"), f"{peer} is not of this run")


def test_a_newcomer_that_is_refused_takes_nobodys_place(certs: Path) -> None:
    """It has the right certificate, and that is not enough: the process that is connected is not
    told to end.
    """

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER), welcomes=only({DEVICE}, _of_this_run))
        port = await server.start()
        first = dialer(there, Credentials(certs, DEVICE), port, about=lambda: {"run": "this"})
        async with running(first.run()):
            await eventually(lambda: server.connected)
            for _ in range(2):
                with pytest.raises(RefusedForGood, match="device/7 is not of this run"):
                    await dialer(Recorder(), Credentials(certs, DEVICE), port).run()
            await server.send(down(None))
            await eventually(lambda: there.letters)
            assert (there.disconnects, len(here.connects), server.connected) == ([], 1, {DEVICE})
        assert server.counts.refused == {"run": 2}
        await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["ahead", "not_admitted"])
def test_who_is_refused_for_what_passes_tries_on(reason: str, certs: Path) -> None:
    """Also at first contact: an operator does away with it at the other end. Meanwhile a status
    says what is wrong.
    """

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        about = {"reason": reason}
        server = listener(here, Credentials(certs, SERVER), welcomes=only({DEVICE}, _of_this_run))
        device = dialer(
            there, Credentials(certs, DEVICE), await server.start(), about=lambda: about
        )
        async with running(device.run()):
            await eventually(lambda: server.counts.refused[reason] >= 2)
            assert device.trouble == ["device/7 is not of this run"]
            assert server.trouble == (["device/7 is not of this run"] if reason == "ahead" else [])
            about["run"] = "this"
            await eventually(lambda: device.connected and server.connected)
            assert device.trouble == server.trouble == []
        await server.stop()

    asyncio.run(scenario())


def test_refused_at_first_contact_is_for_good_later_it_is_not(certs: Path) -> None:
    async def scenario() -> None:
        members = {DEVICE}
        here, there = Recorder(), Recorder()
        server = listener(
            here,
            Credentials(certs, SERVER),
            welcomes=lambda peer, about: only(members)(peer, about),
        )
        port = await server.start()
        device = dialer(there, Credentials(certs, DEVICE), port)
        async with running(device.run()):
            await eventually(lambda: device.connected and server.connected)
            await server.send(down(None))
            await eventually(lambda: there.letters)
            members.clear()
            await server.stop()
            server = listener(
                here,
                Credentials(certs, SERVER),
                f"127.0.0.1:{port}",
                welcomes=lambda peer, about: only(members)(peer, about),
            )
            await server.start()
            await eventually(lambda: server.counts.refused["member"] >= 2)
            members.add(DEVICE)
            await eventually(lambda: device.connected)
        members.clear()
        with pytest.raises(
            RefusedForGood, match="server/3 refuses device/7: device/7 does not belong here"
        ) as refused:
            await dialer(Recorder(), Credentials(certs, DEVICE), port).run()
        assert refused.value.exit_code == 21
        await server.stop()

    asyncio.run(scenario())


def test_refused_by_the_role_right_after_the_welcome_is_first_contact_too(certs: Path) -> None:
    async def scenario() -> None:
        here = Recorder()

        async def other_run(_peer: str, _about: dict[str, Any]) -> None:
            raise Refused("run", "device/7 belongs to another run")

        here.connect = other_run  # type: ignore[method-assign]
        server = listener(here, Credentials(certs, SERVER))
        with pytest.raises(
            RefusedForGood, match="server/3 refuses device/7: device/7 belongs to another run"
        ):
            await dialer(Recorder(), Credentials(certs, DEVICE), await server.start()).run()
        assert server.counts.refused == {"run": 1}
        await server.stop()

    asyncio.run(scenario())


def test_pauses_between_attempts_grow_and_vary(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def scenario() -> None:
        device = dialer(
            Recorder(),
            Credentials(certs, DEVICE),
            0,
            addresses=[],
            options=dataclasses.replace(QUICK, backoff_s=(1.0, 16.0)),
        )
        sleep = asyncio.sleep

        async def note(seconds: float) -> None:
            if seconds != QUICK.watch_s:
                pauses.append(seconds)
            if len(pauses) == 200:
                raise asyncio.CancelledError
            await sleep(0)

        monkeypatch.setattr("fedbcd.engines.deploy.links.dialer.asyncio.sleep", note)
        with pytest.raises(asyncio.CancelledError):
            await device.run()

    asyncio.run(scenario())
    assert [
        bound / 2 <= pause <= bound
        for pause, bound in zip(pauses, [2, 4, 8, 16, 16, 16], strict=False)
    ] == [True] * 6
    assert max(pauses) <= 16
    assert len(set(pauses[10:])) > 100


def test_an_activation_costs_at_most_two_per_cent_more_than_its_models(certs: Path) -> None:
    """One model down, one up, request and acknowledgement, counted as TCP payload: first with the
    handshakes, then without.
    """
    model = torch.randn(MLP, generator=torch.Generator().manual_seed(0))
    least = 2 * MLP * 4

    async def scenario() -> list[float]:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER), model=declared(MLP))
        proxy = await Proxy(await server.start()).start()
        device = dialer(there, Credentials(certs, DEVICE), proxy.port, model=declared(MLP))
        shares = []
        async with running(device.run()):
            await eventually(lambda: device.connected and server.connected)
            for number in range(3):
                before = proxy.bytes_up + proxy.bytes_down if number else 0
                await device.send(up(None, number))
                await eventually(lambda n=number: len(here.letters) == 2 * n + 1)  # type: ignore[misc]
                await server.send(down(model, number))
                await eventually(lambda n=number: len(there.letters) == 2 * n + 1)  # type: ignore[misc]
                await device.send(up(model, number))
                await eventually(lambda n=number: len(here.letters) == 2 * n + 2)  # type: ignore[misc]
                await server.send(down(None, number))
                await eventually(lambda n=number: len(there.letters) == 2 * n + 2)  # type: ignore[misc]
                await asyncio.sleep(0.05)
                shares.append((proxy.bytes_up + proxy.bytes_down - before) / least - 1)
        await proxy.stop()
        await server.stop()
        return shares

    shares = asyncio.run(scenario())
    print("above the least possible:", [f"{share:.3%}" for share in shares])
    assert all(0 < share < 0.02 for share in shares), shares
