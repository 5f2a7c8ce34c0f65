"""What stands around a role: calls one at a time, whatever is cancelled, comes together or cannot
be.
"""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.coordinator import CoordinatorProcess
from fedbcd.engines.deploy.processes.device import DeviceProcess
from fedbcd.engines.deploy.processes.metrics import Metrics, Mixing
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.peers import HUNG_S
from fedbcd.engines.deploy.processes.server import ServerProcess
from fedbcd.engines.deploy.roles.local_work import WorkDone
from fedbcd.errors import ConfigError, RecordError, Refused
from fedbcd.protocol.messages import (
    COORDINATOR,
    Activated,
    Actor,
    MixModels,
    ServerReady,
    Started,
    Woke,
)
from fedbcd.protocol.notices import Notice, Ping, Pong, RoundNotice
from fedbcd.spec import RunSpec
from support.deployments import BCD, federation
from support.waiting import LIMIT_S, eventually


def plan(folder: Path, rounds: int | None = None) -> Deployment:
    places = tuple(f"127.0.0.1:{7401 + n}" for n in range(3))
    spec = RunSpec(BCD, fb.AsyncCloud(first=1), active=2)
    options = Deploy(folder=str(folder), servers=places, plain=True)
    return Deployment.of(federation(), spec, options, rounds)


def test_a_log_level_that_is_none_is_refused_before_a_store_is_begun(folder: Path) -> None:
    with pytest.raises(ConfigError, match="log_level='loud' must be one of debug, info, warning"):
        replace(plan(folder), log_level="loud")
    assert not folder.exists() or not any(folder.iterdir())


def play(
    folder: Path,
    actor: Actor,
    scene: Callable[[Any], Awaitable[None]],
    rounds: int | None = None,
    init: bool = True,
) -> None:
    """A scene with the process of one role, without links."""

    async def whole() -> None:
        process: Process = plan(folder, rounds).process(actor, init=init)
        try:
            await scene(process)
        finally:
            await process.events.stop()
            process.role.close()

    asyncio.run(whole())


def report(process: Process, server: int) -> Letter:
    ready = ServerReady(server=server, phase=0, iteration=0, model=f"z/{server}/0")
    return Letter(f"server/{server}", COORDINATOR, ready, process.role.blueprint.start.clone(), 0.0)


def test_an_event_that_has_begun_is_brought_to_its_end_without_the_connection_that_brought_it(
    folder: Path,
) -> None:
    async def scene(process: ServerProcess) -> None:
        go, begun, afters = threading.Event(), threading.Event(), []
        process.after = lambda letters: afters.append(letters)  # type: ignore[method-assign]

        def slow(_: float) -> list[Letter]:
            begun.set()
            go.wait(LIMIT_S)
            return []

        task = asyncio.create_task(process.events.do(slow))
        await eventually(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await eventually(lambda: afters == [[]])

    play(folder, "server/0", scene)


def test_reports_that_come_together_do_not_play_more_rounds_than_asked_for(folder: Path) -> None:
    async def scene(process: CoordinatorProcess) -> None:
        await asyncio.gather(*(process.receive(report(process, server)) for server in range(3)))
        assert process.role.machine.round == 1

    play(folder, COORDINATOR, scene, rounds=1)


def test_a_device_does_not_start_the_same_work_twice(folder: Path) -> None:
    """An event whose turn comes between the end of training and its taking over must not train
    again.
    """

    async def scene(process: DeviceProcess) -> None:
        role = process.role
        made: list[WorkDone] = []
        compute = role.compute

        def counted() -> WorkDone:
            made.append(compute())
            return made[-1]

        role.compute = counted  # type: ignore[method-assign]
        await process.tell(Woke())
        start = Letter(
            "server/0",
            "device/0",
            Activated(activation=0, model="z/0/0"),
            role.blueprint.start.clone(),
            0.0,
        )
        async with process.events.turn:
            arrives = asyncio.create_task(process.receive(start))
        await arrives
        async with process.events.turn:
            await eventually(lambda: len(made) == 1)
            await asyncio.sleep(0.05)
            process.after([])  # what the end of any other event does
        await eventually(lambda: role.machine.state.name == "UPLOADING")
        await asyncio.sleep(0.05)
        assert len(made) == 1

    play(folder, "device/0", scene)


@pytest.mark.parametrize("first", [True, False])
def test_an_operator_is_not_told_of_a_change_that_is_not_durable(first: bool, folder: Path) -> None:
    """The disk fails in the middle of a group, whoever's turn it was; or the server has been told
    to stop.
    """

    async def scene(process: ServerProcess) -> None:
        def full(_: float) -> list[Letter]:
            raise RecordError("the disk is full")

        await process.tell(Started())
        asks = [
            lambda: process.membership.change("dismiss", 0, "operator"),
            lambda: process.events.do(full),
        ]
        async with process.events.turn:
            waiting = [asyncio.create_task(ask()) for ask in (asks if first else asks[::-1])]
            await asyncio.sleep(0.01)
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(told[0 if first else 1], RecordError | Refused)
        with pytest.raises(
            Refused, match="server/0 is ending, so this may not have happened; ask again"
        ):
            await process.membership.change("dismiss", 1, "operator")

    play(folder, "server/0", scene)


def test_devices_are_told_of_a_phase_once_it_is_durable(folder: Path) -> None:
    async def scene(process: ServerProcess) -> None:
        go, seen = threading.Event(), threading.Event()

        def slow(now: float) -> list[Letter]:
            letters = process.role.tell(Started(), now)
            seen.set()
            go.wait(LIMIT_S)
            return letters

        task = asyncio.create_task(process.events.do(slow))
        await eventually(seen.is_set)
        assert process.role.machine.phase == 0
        assert (
            process.status()["phase"],
            process._notice().phase,
            process._notice().open,
        ) == (-1, -1, False)
        go.set()
        await task
        assert (
            process.status()["phase"],
            process._notice().phase,
            process._notice().open,
        ) == (0, 0, True)

    play(folder, "server/0", scene)


class FakeListener:
    """Takes note of what it is to do."""

    def __init__(self, *peers: Actor) -> None:
        self.connected = frozenset(peers)
        self.told: list[tuple[Actor, Notice]] = []
        self.refused: list[tuple[Actor, str]] = []
        self.moved, self.model = -math.inf, -math.inf

    def moved_at(self, _peer: Actor) -> float:
        return self.moved

    def model_sent_at(self, _peer: Actor) -> float:
        return self.model

    async def notice(self, peer: Actor, notice: Notice) -> bool:
        self.told.append((peer, notice))
        return True

    def refuse(self, peer: Actor, reason: str, sentence: str) -> None:
        self.refused.append((peer, reason))


@pytest.mark.parametrize(
    ("actor", "peers"),
    [("server/0", ("device/0", "device/1")), (COORDINATOR, ("server/0", "server/1"))],
)
def test_listeners_learn_how_long_peers_take_to_answer_and_hang_up_on_those_that_do_not(
    actor: Actor, peers: tuple[Actor, Actor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(process: Any) -> None:
        now = 1000.0
        monkeypatch.setattr("fedbcd.engines.deploy.processes.peers.time.monotonic", lambda: now)
        process.peers.listener = links = FakeListener(*peers)
        new = peers[1]  # the other is one of software that does not answer
        before = process.timeouts.peer.seconds()

        async def beat() -> dict[Actor, int]:
            links.told.clear()
            process.beat()
            await process.tasks.settle()
            return {peer: asked.number for peer, asked in links.told if isinstance(asked, Ping)}

        for _ in range(3):
            pings = await beat()
            now += 3.0
            await process.noticed(new, Pong(number=10_000))  # not the one that was asked for
            await process.noticed(new, Pong(number=pings[new]))
        assert process.timeouts.peer.seconds() == 12.0 > before
        await process.noticed(new, Ping(number=5))
        peer, answer = links.told[-1]
        assert isinstance(answer, Pong)
        assert (peer, answer.number) == (new, 5)
        assert answer.clock == pytest.approx(process.clock.now(), abs=60.0)
        await beat()
        now += HUNG_S - 1.0
        await beat()
        assert links.refused == []
        now += 1.0
        await beat()
        assert links.refused == [(new, "gone")]
        await process.disconnected(new)
        assert new in await beat()
        process.timers.drop(Ping)

    play(folder, actor, scene)


def test_nobody_is_hung_up_on_while_a_model_is_under_way_or_dealt_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping, or its answer, may wait behind a model of a gigabyte."""

    async def scene(process: ServerProcess) -> None:
        now = 1000.0
        monkeypatch.setattr("fedbcd.engines.deploy.processes.peers.time.monotonic", lambda: now)
        process.peers.listener = links = FakeListener("device/0")  # type: ignore[assignment]

        async def beat() -> None:
            process.beat()
            await process.tasks.settle()

        await beat()
        (ping,) = (notice for _, notice in links.told)
        assert isinstance(ping, Ping)
        await process.noticed("device/0", Pong(number=ping.number))
        await beat()
        for _ in range(10):  # parts come, or go
            now += 9.0
            links.moved = now
            now += 9.0
            await beat()
        links.model = links.moved  # a part of ours was the last; the device writes it to its disk
        now += 100.0
        await beat()
        assert links.refused == []
        now += 20.0
        await beat()
        assert links.refused == [("device/0", "gone")]
        process.timers.drop(Ping)

    play(folder, "server/0", scene)


def test_a_coordinator_that_begins_to_look_late_invents_no_staleness() -> None:
    metrics = Metrics(COORDINATOR)
    mixing = Mixing(metrics, since=1000)
    mixing.mixed(MixModels(round=1001, iteration=1, servers=(0,), models=("a",), results=("w",)))
    assert metrics.value("fedbcd_staleness_rounds_sum") == 1.0


def test_a_new_server_begins_when_its_coordinator_has_welcomed_it(folder: Path) -> None:
    """Not before: it may be one that has lost its store, and only the coordinator can tell. Once it
    has a history it goes on by itself.
    """

    async def scene(process: ServerProcess) -> None:
        process.begin()
        await asyncio.sleep(0)
        assert (process.role.machine.phase, process.waits_for(), Started in process.timers) == (
            -1,
            "coordinator",
            False,
        )
        await process.noticed(COORDINATOR, RoundNotice(round=0))
        await eventually(
            lambda: process.role.machine.phase == 0 and process.role.store.length == 1
        )  # the machine may be ahead of the disk
        await process.noticed(COORDINATOR, RoundNotice(round=1))
        await process.events.do(lambda _: [])
        assert (process.waits_for(), process.role.store.length) == ("devices", 1)

    async def again(process: ServerProcess) -> None:
        process.begin()
        await process.noticed(COORDINATOR, RoundNotice(round=1))
        await process.events.do(lambda _: [])
        assert (process.waits_for(), process.role.store.length) == ("devices", 1)

    play(folder, "server/0", scene)
    with pytest.raises(
        ConfigError,
        match=(
            r"the store .*server-0 of server/0 has begun already; leave --init out to go on with it"
        ),
    ):
        play(folder, "server/0", again)
    play(folder, "server/0", again, init=False)
