"""Lines that are slow, long, or break: a letter that advances is not given up, goes on where it
stopped, and is not sent twice at once; notices do not wait for it.
"""

import asyncio
import dataclasses
import math
import time
from typing import Any

import pytest
import torch

from fedbcd.engines.deploy.links.codec import CHUNK_BYTES, LEAST_CHUNK, Parcel, encode_notice
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame
from fedbcd.engines.deploy.links.refusals import Counts
from fedbcd.engines.deploy.links.sending import FIRST_WINDOW, LEAST_WINDOW, Flow, Sending
from fedbcd.engines.deploy.links.tls import Plain
from fedbcd.engines.deploy.links.traffic import Kept
from fedbcd.protocol.notices import PhaseNotice, Ping, Pong
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
    listener,
    running,
    up,
)

SIZE = 125_000  # values of a model: half a million bytes


def a_model(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Pair:
    """server/3 and device/7 in plain text, with a proxy between them."""

    def __init__(self, slow: float = math.inf, **options: Any) -> None:
        self.options = dataclasses.replace(QUICK, **options)
        self.here, self.there = Recorder(), Recorder()
        self.slow = slow

    async def __aenter__(self) -> "Pair":
        common = {"options": self.options, "model": declared(SIZE)}
        self.server = listener(self.here, Plain(), **common)
        self.proxy = await Proxy(await self.server.start(), slow=self.slow).start()
        self.device = dialer(self.there, Plain(), self.proxy.port, **common)
        self.task = asyncio.create_task(self.device.run())
        await self.connected()
        return self

    async def connected(self) -> None:
        await eventually(lambda: self.server.connected and self.device.connected)

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.proxy.stop()
        await self.server.stop()

    async def break_off(self) -> None:
        """And wait until both have noticed."""
        seen = len(self.there.connects), len(self.here.connects)
        self.proxy.break_off()
        await eventually(
            lambda: len(self.there.connects) > seen[0] and len(self.here.connects) > seen[1]
        )
        await self.connected()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_letter_goes_on_where_its_connection_broke(way: str) -> None:
    """Also when its sender has connected anew before the other end has noticed; bytes are counted
    on the way, so that nothing can be sent again unseen.
    """

    async def scenario() -> None:
        async with Pair(slow=400_000.0) as pair:
            sender, ear = (pair.device, pair.here) if way == "up" else (pair.server, pair.there)
            letter, counter = (up if way == "up" else down)(a_model()), f"bytes_{way}"
            for part in (150_000, 350_000):
                await sender.send(letter)
                await eventually(lambda part=part: getattr(pair.proxy, counter) > part)
                assert ear.letters == []
                await pair.break_off()
            await sender.send(letter)
            await eventually(lambda: ear.letters)
            assert ear.letters[0].model is not None
            assert torch.equal(ear.letters[0].model, a_model())
            # twice what may be under way when a line breaks, and three handshakes
            assert getattr(pair.proxy, counter) < 4 * SIZE + 2 * 3 * FIRST_WINDOW

    asyncio.run(scenario())


def test_another_letter_of_the_same_name_begins_anew() -> None:
    """A device that lost its disk has trained again: what is here is not the beginning of it."""

    async def scenario() -> None:
        async with Pair(slow=400_000.0) as pair:
            await pair.device.send(up(a_model(1)))
            await eventually(lambda: pair.proxy.bytes_up > 150_000)
            await pair.break_off()
            await pair.device.send(up(a_model(2)))
            await eventually(lambda: pair.here.letters)
            assert pair.here.letters[0].model is not None
            assert torch.equal(pair.here.letters[0].model, a_model(2))

    asyncio.run(scenario())


def test_nothing_is_sent_twice_at_once_and_pings_do_not_wait_behind_it() -> None:
    async def scenario() -> None:
        async with Pair(slow=400_000.0) as pair:
            letter = up(a_model())
            for number in range(40):
                assert await pair.device.send(letter)
                assert await pair.device.notice(SERVER, Ping(number=number))
            await eventually(lambda: pair.here.notices)
            assert pair.here.letters == []  # the ping has overtaken it
            moved = set()
            await eventually(
                lambda: moved.add(pair.device.model_moved_at(SERVER)) or pair.here.letters
            )
            assert len(moved) > 3
            assert pair.device.counts.dropped == 0
            await eventually(lambda: pair.device.counts.letters_out == 1)
            assert pair.proxy.bytes_up < 4 * SIZE + 200_000
            assert await pair.device.send(letter)  # it has arrived, so this is once more
            await eventually(lambda: len(pair.here.letters) == 2)

    asyncio.run(scenario())


def test_of_notices_that_wait_the_latest_of_each_kind_is_said() -> None:
    said: list[Frame] = []
    go = asyncio.Event()

    async def write(frame: Frame) -> None:
        await go.wait()
        said.append(frame)

    async def scenario() -> None:
        out = Sending(write, Counts(), 16, 2, None)
        async with running(out.run()):
            for phase in range(1000):
                out.notice(encode_notice(PhaseNotice(phase=phase, round=0)))
                out.notice(encode_notice(Pong(number=phase)))
                await asyncio.sleep(0)
            go.set()
            await eventually(lambda: len(said) == 3)
        assert [one.notice.kind for one in said] == ["phase", "phase", "pong"]
        assert '"phase": 999' in said[1].notice.body

    asyncio.run(scenario())


def test_what_comes_more_slowly_than_the_least_rate_is_given_up_and_kept() -> None:
    """A peer that goes on pinging in the middle of a letter has stopped all the same."""

    async def scenario() -> None:
        async with Pair(gone_s=2.0, standstill_rate=LEAST_CHUNK / 0.3) as pair:
            connection = pair.device._peers[SERVER].connection
            await pair.device.send(up(a_model()))
            connection._out.flow._under_way = 1 << 40  # nothing more of a model goes out
            number = 0
            while not pair.here.disconnects:
                number += 1
                await pair.device.notice(SERVER, Ping(number=number))
                await asyncio.sleep(0.02)
            await eventually(lambda: pair.there.disconnects)
            await pair.connected()
            assert pair.here.letters == []

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------
# how much may be under way
class Clock:
    """A line of so many bytes a second and so many seconds, as a queue."""

    def __init__(self, rate: float, far_s: float) -> None:
        self.now, self.rate, self.far_s = 1000.0, rate, far_s
        self.free_at, self.arrivals = 0.0, []  # type: float, list[tuple[float, int]]

    def play(self, flow: Flow, total: int) -> float:
        """How late the last part arrives beyond what an empty line takes, at most."""
        sent, late = 0, 0.0
        while sent < total or self.arrivals:
            while sent < total and flow.has_room:
                size = min(flow.chunk, total - sent)
                sent += size
                self.free_at = max(self.free_at, self.now) + size / self.rate
                flow.sent(1, sent, size)
                self.arrivals.append((self.free_at + self.far_s, sent))
                late = self.free_at - self.now if sent > total / 2 else 0.0
            at, offset = self.arrivals.pop(0)
            self.now = max(self.now, at)
            assert flow.got(1, offset)
        return late


@pytest.mark.parametrize(
    ("rate", "far_s"), [(5e3, 0.1), (5e4, 0.05), (5e4, 3.0), (1e6, 0.1), (1e8, 0.01)]
)
def test_as_much_is_under_way_as_the_line_carries(
    rate: float, far_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is said in between is not late, and the line is used."""
    line = Clock(rate, far_s)
    monkeypatch.setattr("fedbcd.engines.deploy.links.sending.time.monotonic", lambda: line.now)
    total = int(max(20 * rate, 40 * LEAST_WINDOW))
    flow = Flow(is_told=True)
    late = line.play(flow, total)
    assert late <= 2.0 + far_s + 2 * LEAST_WINDOW / rate
    carried = total / (line.now - 1000.0)
    assert carried > min(0.5 * rate, 0.5 * LEAST_WINDOW / far_s)


def test_who_is_not_told_what_arrives_sends_all() -> None:
    flow = Flow(is_told=False)
    flow.sent(1, 1 << 30, 1 << 30)
    assert flow.has_room
    assert flow.chunk == CHUNK_BYTES
    assert flow.moved_at == -math.inf
    flow.taken()
    assert flow.moved_at <= time.monotonic()
    assert not flow.got(1, 5)


# ------------------------------------------------------------------------------------------------
# what is kept
def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    class Some:
        def __init__(self, size: int) -> None:
            self.message = Parcel(up(torch.zeros(size))).message().message

    kept = Kept(1000)
    parts: list[Any] = [Some(200), Some(10), Some(10), Some(100)]
    for number, part in enumerate(parts):
        kept.put(f"device/{number}", part)
    assert [kept.take(f"device/{n}") for n in range(4)] == [None, *parts[1:]]
    kept.put(DEVICE, None)
    assert kept.look(DEVICE) is None


@pytest.mark.parametrize("older", ["listener", "dialer"])
def test_software_that_does_not_say_what_arrives_is_spoken_to_as_before(
    older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"fedbcd.engines.deploy.links.{older}.NEWEST"
    monkeypatch.setattr(module, 1)

    async def scenario() -> None:
        async with Pair() as pair:
            await pair.device.send(up(a_model()))
            await pair.server.send(down(a_model(1)))
            await eventually(lambda: pair.here.letters and pair.there.letters)
            assert not pair.device._peers[SERVER].connection._out.flow.is_told
            assert not pair.server._peers[DEVICE].connection._out.flow.is_told
            assert pair.here.heard("refused") == pair.there.heard("refused") == []

    asyncio.run(scenario())


def test_a_burst_of_notices_after_a_pause_is_nobodys_fault() -> None:
    """Of each kind the latest is handed on, also what comes while letters are refused."""

    async def scenario() -> None:
        async with Pair(letters_per_s=50.0, burst=5) as pair:
            write = pair.device._peers[SERVER].connection.write
            for number in range(500):
                await write(encode_notice(Ping(number=number)))
            last = (DEVICE, Ping(number=499))
            await eventually(lambda: pair.here.notices and pair.here.notices[-1] == last)
            assert len(pair.here.notices) < 500  # a slow machine has time for more of them
            assert not pair.server.counts.refused
            assert pair.here.heard("refused") == pair.there.heard("refused_by_peer") == []

    asyncio.run(scenario())
