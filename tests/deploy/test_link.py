"""Links over real sockets with real TLS: letters of any size both ways, what is refused, and what
is bounded.
"""

import asyncio
import contextlib
import dataclasses
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.links.codec import CHUNK_BYTES, Declared, encode
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Hello, TensorShape
from fedbcd.engines.deploy.links.listener import Listener, only
from fedbcd.engines.deploy.links.operator_client import request_status
from fedbcd.engines.deploy.links.refusals import RefusedForGood
from fedbcd.engines.deploy.links.room import Share
from fedbcd.engines.deploy.links.tls import Credentials, Plain, host_name
from fedbcd.errors import ConfigError, Refused, RemoteProtocolError
from fedbcd.protocol.messages import ServerReady, Uploaded
from fedbcd.protocol.notices import PhaseNotice, Ping, RoundNotice
from support.waiting import LIMIT_S, eventually
from support.wire import (
    DEVICE,
    QUICK,
    SERVER,
    SMALL,
    Recorder,
    declared,
    dialer,
    down,
    linked,
    listener,
    make_authority,
    running,
    up,
)

LINK = "/fedbcd.v1.Federation/Link"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    authority = make_authority(folder, "device/8", "operator", "server/4")
    authority.issue("device/9", at="server/4")
    return folder


# ------------------------------------------------------------------------------------------------
# letters
@pytest.mark.parametrize("size", [0, 1, 109_386, 30_000_000])
def test_letters_arrive_bit_for_bit_both_ways(certs: Path, size: int) -> None:
    model = torch.randn(size, generator=torch.Generator().manual_seed(size))

    async def scenario() -> None:
        async with linked(certs, model=declared(size)) as (server, here, device, there):
            assert await device.send(up(model))
            assert await server.send(down(model))
            assert await server.send(down(None))
            await eventually(lambda: here.letters and len(there.letters) == 2)
            (got,) = here.letters
            assert got.model is not None
            assert torch.equal(got.model, model)
            assert (got.event, got.sender, got.to, got.clock) == (
                up(model).event,
                DEVICE,
                SERVER,
                1.0,
            )
            back = there.letters[0].model
            assert back is not None
            assert torch.equal(back, model)
            assert there.letters[1] == down(None)

    asyncio.run(scenario())


def test_hello_welcome_and_notices_carry_what_roles_say_of_themselves(certs: Path) -> None:
    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(certs, SERVER), about=lambda: {"phase": 4})
        device = dialer(
            there,
            Credentials(certs, DEVICE),
            await server.start(),
            about=lambda: {"store": "abc", "activation": 2},
        )
        async with running(device.run()):
            await eventually(lambda: there.connects)
            assert here.connects == [(DEVICE, {"store": "abc", "activation": 2})]
            assert there.connects == [(SERVER, {"phase": 4})]
            notice = PhaseNotice(phase=5, round=2, open=True, elapsed=0.5, members=(1, 7))
            assert await server.notice(DEVICE, notice)
            assert await device.notice(SERVER, Ping(number=3))
            await eventually(lambda: here.notices and there.notices)
            assert there.notices == [(SERVER, notice)]
            assert here.notices == [(DEVICE, Ping(number=3))]
            assert await device.notice(SERVER, RoundNotice(round=9))  # not its to say
            await eventually(lambda: server.counts.refused)
            assert [*server.counts.refused] == ["identity"]
            assert len(here.notices) == 1
        await eventually(lambda: here.disconnects == [DEVICE])
        assert not server.connected
        await server.stop()

    asyncio.run(scenario())


def test_what_on_connect_sends_goes_out_first(certs: Path) -> None:
    async def scenario() -> None:
        here, there = Recorder(), Recorder()

        async def greet(_peer: str, _about: dict[str, Any]) -> None:
            assert await server.send(down(None, 5))

        server = Listener(
            SERVER,
            "127.0.0.1:0",
            welcomes=lambda *_: None,
            **{**here.common(Credentials(certs, SERVER)), "on_connect": greet},
        )
        device = dialer(there, Credentials(certs, DEVICE), await server.start())
        async with running(device.run()):
            await eventually(lambda: there.letters)
            assert there.letters == [down(None, 5)]
        await server.stop()

    asyncio.run(scenario())


def test_a_letter_to_nobody_is_dropped_and_counted(certs: Path) -> None:
    async def scenario() -> None:
        async with linked(certs) as (server, _, _device, _there):
            assert not await server.send(dataclasses.replace(down(None), to="device/8"))
            assert not await server.notice("device/8", Ping(number=1))
            assert server.counts.dropped == 1

    asyncio.run(scenario())


def test_the_coordinator_and_its_servers_talk_the_same_way(certs: Path) -> None:
    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        coordinator = listener(
            here, Credentials(certs, "coordinator"), me="coordinator", welcomes=lambda *_: None
        )
        server = dialer(
            there,
            Credentials(certs, SERVER),
            await coordinator.start(),
            me=SERVER,
            peer="coordinator",
        )
        async with running(server.run()):
            await eventually(lambda: coordinator.connected == {SERVER})
        await coordinator.stop()

    asyncio.run(scenario())


def test_plain_text_on_loopback_when_asked_for() -> None:
    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Plain())
        device = dialer(there, Plain(), await server.start())
        async with running(device.run()):
            await eventually(lambda: device.connected)
            await device.send(up(torch.ones(8)))
            await eventually(lambda: here.letters)
        await server.stop()
        with pytest.raises(
            ConfigError, match="plain text at 0\\.0\\.0\\.0 would be readable on the network"
        ):
            await listener(Recorder(), Plain(), "0.0.0.0:0").start()
        with pytest.raises(ConfigError, match="plain text at 192\\.0\\.2\\.1"):
            await dialer(Recorder(), Plain(), 1, addresses=["192.0.2.1:80"]).run()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:x", "host:65536"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port, such as"):
        split_address(address)
    assert split_address("[::1]:80") == ("::1", 80)


def test_a_port_that_is_taken_is_a_sentence(certs: Path) -> None:
    async def scenario() -> None:
        first = listener(Recorder(), Credentials(certs, SERVER))
        port = await first.start()
        with pytest.raises(ConfigError, match="cannot be listened at"):
            await listener(Recorder(), Credentials(certs, SERVER), f"127.0.0.1:{port}").start()
        await first.stop()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------
# a peer that says anything
class Raw:
    """A peer with a certificate that writes what frames it likes."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, *frames: Frame) -> None:
        for frame in frames:
            await self.call.write(frame)

    async def hear(self) -> Frame:
        async with asyncio.timeout(LIMIT_S):
            frame = await self.call.read()
        assert isinstance(frame, Frame), "the listener hung up"
        return frame

    async def welcome(self) -> None:
        await self.say(Frame(hello=hello()))
        assert (await self.hear()).HasField("welcome")

    async def refused(self) -> tuple[str, str, bool]:
        frame = await self.hear()
        assert frame.HasField("refused"), frame
        return frame.refused.reason, frame.refused.sentence, frame.refused.final


def hello(**changes: Any) -> Hello:
    shapes = [TensorShape(name=name, shape=shape) for name, shape in SMALL.tensors]
    fields = {
        "oldest": 1,
        "newest": 1,
        "software": "0.0.9",
        "actor": DEVICE,
        "to": SERVER,
        "instance": b"i",
        "nonce": b"n",
        "model": shapes,
    }
    return Hello(**{**fields, **changes})


@contextlib.asynccontextmanager
async def raw(
    certs: Path, me: str = DEVICE, **more: Any
) -> AsyncIterator[tuple[Listener, Recorder, Raw]]:
    ear = Recorder()
    server = listener(ear, Credentials(certs, SERVER), **more)
    port = await server.start()
    credentials, _ = Credentials(certs, me).for_dialler()
    options = [("grpc.ssl_target_name_override", host_name(SERVER))]
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{port}", credentials, options=options
    ) as channel:
        call: Any = channel.stream_stream(LINK, Frame.SerializeToString, Frame.FromString)
        yield server, ear, Raw(call())
    await server.stop()


@pytest.mark.parametrize(
    ("me", "changes", "reason", "words"),
    [
        (
            DEVICE,
            {"oldest": 0, "newest": 0},
            "version",
            "'device/7' (fedbcd 0.0.9) speaks versions 0 to 0 of the protocol, server/3",
        ),
        (DEVICE, {"oldest": 0, "newest": 0}, "version", "upgrade device/7"),
        (DEVICE, {"oldest": 3, "newest": 3}, "version", "upgrade server/3"),
        (
            DEVICE,
            {"actor": "device/8"},
            "identity",
            "device/7 says that it is 'device/8'; a process acts as its certificate says",
        ),
        (DEVICE, {"to": "server/4"}, "identity", "wants 'server/4', but this is server/3"),
        (
            DEVICE,
            {"model": []},
            "model",
            "device/7 works on another model than server/3: 0 tensors instead of 2",
        ),
        (
            DEVICE,
            {"model": [TensorShape(name="weight", shape=[2, 4])] * 2},
            "model",
            "of shape (2, 4) instead of 'weight' of shape (2, 3)",
        ),
        (DEVICE, {"about": "["}, "frame", "not JSON"),
        (DEVICE, {"about": "[]"}, "frame", "must hold a JSON object"),
        (DEVICE, {"about": "1" * 70_000}, "size", "exceeds 65536"),
        ("device/8", {"actor": "device/8"}, "member", "device/8 does not belong here"),
        (
            "device/9",
            {"actor": "device/9"},
            "identity",
            "the certificate of device/9 is for server/4, not for server/3",
        ),
        (
            "server/4",
            {"actor": "server/4"},
            "identity",
            "'server/4' has nothing to say to server/3",
        ),
        (
            "operator",
            {"actor": "operator"},
            "identity",
            "'operator' has nothing to say to server/3",
        ),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_with_a_sentence(
    certs: Path, me: str, changes: dict[str, Any], reason: str, words: str
) -> None:
    async def scenario() -> None:
        async with raw(certs, me) as (server, ear, peer):
            await peer.say(Frame(hello=hello(**changes)))
            got = await peer.refused()
            assert (got[0], got[2]) == (reason, True)
            assert words in got[1]
            assert await peer.call.read() is grpc.aio.EOF
            assert not server.connected
            assert server.counts.refused == {reason: 1}
            assert [fields["peer"] for fields in ear.heard("refused")] == [me]

    asyncio.run(scenario())


def test_a_newer_peer_that_still_speaks_our_version_is_welcome(certs: Path) -> None:
    async def scenario() -> None:
        async with raw(certs) as (_, _ear, peer):
            await peer.say(Frame(hello=hello(oldest=1, newest=9)))
            assert (await peer.hear()).welcome.version == 2

    asyncio.run(scenario())


def test_refused_letters_change_nothing_and_are_logged_once(certs: Path) -> None:
    """A damaged chunk, a wrong length, an unknown dtype, one too large: each is answered, then a
    good letter comes through.
    """
    good = list(encode(up(torch.arange(8.0)), 1))

    def changed(number: int, **fields: Any) -> list[Frame]:
        frames = [Frame.FromString(frame.SerializeToString()) for frame in good]
        for name, value in fields.items():
            kind = frames[number].WhichOneof("kind")
            setattr(getattr(frames[number], str(kind)), name, value)
        return frames

    strange = good[1].chunk.data.replace(b"F32", b"I16")
    cases = [
        ("checksum", changed(1, data=bytes(len(good[1].chunk.data)))),
        ("chunk", changed(1, data=b"short")),
        ("dtype", changed(1, data=strange, crc=zlib.crc32(strange))),
        ("size", changed(0, bytes=2**62)),
        ("event", changed(0, event=b"{}")),
        ("frame", [Frame(hello=hello())]),
        ("frame", [Frame()]),
        ("protocol", list(encode(up(torch.full((8,), torch.nan)), 1))),
    ]

    async def judge(letter: Any) -> None:
        if letter.model is not None and not bool(letter.model.isfinite().all()):
            raise RemoteProtocolError("a model that is not finite")
        heard.append(letter)

    heard: list[Any] = []

    async def scenario() -> None:
        ear = Recorder()
        ear.letter = judge  # type: ignore[method-assign]
        server = listener(ear, Credentials(certs, SERVER))
        credentials, _ = Credentials(certs, DEVICE).for_dialler()
        options = [("grpc.ssl_target_name_override", host_name(SERVER))]
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{await server.start()}", credentials, options=options
        ) as channel:
            call: Any = channel.stream_stream(LINK, Frame.SerializeToString, Frame.FromString)
            peer = Raw(call())
            await peer.welcome()
            for reason, frames in cases * 2:
                await peer.say(*frames)
                assert (await peer.refused())[::2] == (reason, False)
            assert heard == []
            await peer.say(*good)
            await eventually(lambda: heard)
            assert torch.equal(heard[0].model, torch.arange(8.0))
            assert server.connected == {DEVICE}
        await server.stop()
        assert server.counts.refused == {
            "checksum": 2,
            "chunk": 2,
            "dtype": 2,
            "size": 2,
            "event": 2,
            "frame": 4,
            "protocol": 2,
        }
        assert len(ear.heard("refused")) == 7

    asyncio.run(scenario())


def test_an_error_of_our_own_is_no_refusal_and_does_not_go_unseen(certs: Path) -> None:
    async def scenario() -> None:
        ear, seen = Recorder(), []

        async def full(_letter: Any) -> None:
            raise OSError(28, "No space left on device")

        ear.letter = full  # type: ignore[method-assign]
        server = listener(ear, Credentials(certs, SERVER), on_error=seen.append)
        device = dialer(Recorder(), Credentials(certs, DEVICE), await server.start())
        async with running(device.run()):
            await eventually(lambda: device.connected)
            await device.send(up(None))
            await eventually(lambda: seen and len(ear.connects) == 2)  # the device comes again
        await server.stop()
        assert [type(error) for error in seen] == [OSError]
        assert server.counts.refused == {}

    asyncio.run(scenario())


def test_a_stream_that_is_cut_leaves_nothing_behind(certs: Path) -> None:
    async def scenario() -> None:
        size = CHUNK_BYTES
        shapes = [TensorShape(name="weight", shape=[size])]
        async with raw(certs, model=declared(size)) as (server, ear, peer):
            await peer.say(Frame(hello=hello(model=shapes)))
            assert (await peer.hear()).HasField("welcome")
            await peer.say(*list(encode(up(torch.zeros(size)), 1))[:2])
            await eventually(lambda: server._traffic.room._free < QUICK.arriving_bytes)
            peer.call.cancel()
            await eventually(lambda: ear.disconnects)
            assert server._traffic.room._free == QUICK.arriving_bytes
            assert ear.letters == []

    asyncio.run(scenario())


def test_a_peer_that_stops_in_the_middle_of_a_letter_is_cut_off(certs: Path) -> None:
    async def scenario() -> None:
        size = CHUNK_BYTES
        options = dataclasses.replace(QUICK, gone_s=0.3, standstill_rate=1e7)
        shapes = [TensorShape(name="weight", shape=[size])]
        async with raw(certs, model=declared(size), options=options) as (_, ear, peer):
            await peer.say(Frame(hello=hello(model=shapes)))
            assert (await peer.hear()).HasField("welcome")
            await peer.say(*list(encode(up(torch.zeros(size)), 1))[:2])
            await eventually(lambda: ear.disconnects)

    asyncio.run(scenario())


def test_a_peer_that_says_no_hello_is_cut_off(certs: Path) -> None:
    async def scenario() -> None:
        async with raw(certs, options=dataclasses.replace(QUICK, connect_s=0.3)) as (_, _ear, peer):
            assert await peer.call.read() is grpc.aio.EOF

    asyncio.run(scenario())


def test_a_peer_that_sends_too_fast_is_slowed_down_and_told(certs: Path) -> None:
    async def scenario() -> None:
        options = dataclasses.replace(QUICK, letters_per_s=20.0, burst=3)
        async with raw(certs, options=options) as (server, ear, peer):
            await peer.welcome()
            (frame,) = encode(up(None), 1)
            sent = 0
            while not server.counts.refused[
                "rate"
            ]:  # again on a machine that is too slow to send too fast
                await peer.say(*[frame] * 8)
                sent += 8
                await eventually(lambda: len(ear.letters) + server.counts.refused["rate"] == sent)  # noqa: B023
            assert (await peer.refused())[0] == "rate"
            assert 3 <= len(ear.letters) < sent
            assert len(ear.heard("refused")) == 1

    asyncio.run(scenario())


def test_who_connects_anew_has_no_new_bucket(certs: Path) -> None:
    """What one connection has used up, the next one of this identity does not have."""

    async def scenario() -> None:
        options = dataclasses.replace(QUICK, letters_per_s=0.001, burst=3)
        async with linked(certs, options=options) as (server, here, device, _):
            for k in range(3):
                await device.send(up(None, k))
            await eventually(lambda: len(here.letters) == 3)
            assert not server._traffic.bucket(DEVICE, "letters").take()
            assert server._traffic.bucket("device/8", "letters").take()

    asyncio.run(scenario())


def test_letters_for_a_peer_that_does_not_read_are_dropped_not_kept(certs: Path) -> None:
    async def scenario() -> None:
        size = 1_000_000
        shapes = [TensorShape(name="weight", shape=[size])]
        async with raw(certs, model=declared(size)) as (server, _, peer):
            await peer.say(Frame(hello=hello(model=shapes)))
            assert (await peer.hear()).HasField("welcome")
            model = torch.zeros(size)
            sent = 0
            for number in range(60):
                sent += await server.send(down(model, number))
                await asyncio.sleep(0.002)
            assert sent < 60
            assert server.counts.dropped == 60 - sent
            assert server.counts.bytes_out < 16 * 4 * size

    asyncio.run(scenario())


def test_more_peers_than_room_still_all_get_through(certs: Path, tmp_path: Path) -> None:
    """MemoryBudget for one model at a time, five devices that upload at once."""
    authority = make_authority(tmp_path / "many", *(f"device/{i}" for i in range(5)))
    size = CHUNK_BYTES

    async def scenario() -> None:
        here = Recorder()
        options = dataclasses.replace(QUICK, arriving_bytes=1)
        server = listener(
            here,
            Credentials(authority.folder, SERVER),
            welcomes=lambda *_: None,
            model=declared(size),
            options=options,
        )
        port = await server.start()
        async with contextlib.AsyncExitStack() as stack:
            for i in range(5):
                me = f"device/{i}"
                device = dialer(
                    Recorder(), Credentials(authority.folder, me), port, me=me, model=declared(size)
                )
                await stack.enter_async_context(running(device.run()))
                await eventually(lambda device=device: device.connected)  # type: ignore[misc]
                await device.send(up(torch.full((size,), float(i)), device=i))
            await eventually(lambda: len(here.letters) == 5)
        await server.stop()
        assert sorted(
            float(letter.model[0]) for letter in here.letters if letter.model is not None
        ) == [0.0, 1.0, 2.0, 3.0, 4.0]

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------
# status
def test_status_is_for_operators(certs: Path) -> None:
    async def scenario() -> None:
        server = listener(Recorder(), Credentials(certs, SERVER), status=lambda: {"phase": 7})
        address = f"127.0.0.1:{await server.start()}"
        assert await request_status(SERVER, address, Credentials(certs, "operator")) == {"phase": 7}
        with pytest.raises(RefusedForGood, match="device/7 may not ask for status"):
            await request_status(SERVER, address, Credentials(certs, DEVICE))
        await server.stop()
        with pytest.raises(Refused, match="server/3 does not answer at"):
            await request_status(SERVER, address, Credentials(certs, "operator"), timeout_s=2.0)

    asyncio.run(scenario())


def test_the_proto_holds_no_pickle_and_events_are_json(certs: Path) -> None:
    (frame,) = encode(up(None, 3))
    assert json.loads(frame.message.event) == {"UpdateRequested": {"device": 7, "activation": 3}}


# ------------------------------------------------------------------------------------------------
# room
SIZE = CHUNK_BYTES  # values: four chunks
SHAPES = [TensorShape(name="weight", shape=[SIZE])]
DECLARED = Declared(
    (("weight", (SIZE,)),),
    {
        Uploaded: frozenset({(SIZE, torch.float32)}),
        ServerReady: frozenset({(SIZE + 1, torch.float64)}),
    },
)


def test_room_is_given_after_the_event_was_checked_and_by_its_type(tmp_path: Path) -> None:
    """A device announces what only a server may say, what is of somebody else, and a model in
    float64: nothing of it gets room.
    """
    make_authority(tmp_path)

    async def scenario() -> None:
        options = dataclasses.replace(QUICK, arriving_bytes=1 << 20)
        async with raw(tmp_path, model=DECLARED, options=options) as (server, ear, peer):
            await peer.say(Frame(hello=hello(model=SHAPES)))
            assert (await peer.hear()).HasField("welcome")
            taken, take = [], server._traffic.room.take

            async def note(*args: object) -> Share:
                taken.append(args)
                return await take(*args)  # type: ignore[arg-type]

            server._traffic.room.take = note  # type: ignore[method-assign]
            foreign = next(encode(up(torch.zeros(SIZE), device=8), 1))
            double = next(encode(up(torch.zeros(SIZE, dtype=torch.float64)), 2))
            await peer.say(foreign, double)
            assert [(await peer.refused())[0] for _ in range(2)] == ["identity", "size"]
            assert not taken
            await peer.say(*encode(up(torch.zeros(SIZE)), 3))
            await eventually(lambda: ear.letters)
            assert len(taken) == 1

    asyncio.run(scenario())


def test_one_member_does_not_block_the_uploads_of_the_others(tmp_path: Path) -> None:
    """Room for one model; device 7 takes it and sends the rest in drops, so that it is not cut off
    for silence.
    """
    make_authority(tmp_path, "device/8")

    async def scenario() -> None:
        options = dataclasses.replace(QUICK, arriving_bytes=1, least_rate=1e9, gone_s=1.0)
        members = only({DEVICE, "device/8"})
        async with raw(tmp_path, model=DECLARED, options=options, welcomes=members) as (
            server,
            ear,
            peer,
        ):
            await peer.say(Frame(hello=hello(model=SHAPES)))
            assert (await peer.hear()).HasField("welcome")
            message, *chunks = encode(up(torch.zeros(SIZE)), 1)
            await peer.say(message, chunks[0])
            await eventually(lambda: server._traffic.room._free == 0)
            other = dialer(
                Recorder(),
                Credentials(tmp_path, "device/8"),
                server.port,
                me="device/8",
                model=DECLARED,
            )
            async with running(other.run()):
                await eventually(lambda: other.connected)
                await other.send(up(torch.ones(SIZE), device=8))
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may be cut off by then
                    for chunk in chunks[1:3]:
                        await asyncio.sleep(0.6)
                        await peer.say(chunk)
                await eventually(lambda: ear.letters)
            assert ear.letters[0].sender == "device/8"
            assert server.counts.refused["stalled"] == 1

    asyncio.run(scenario())
