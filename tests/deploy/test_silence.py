"""Silence is what counts, not time: nothing is said again, and no device given up, while a model
moves; what was waited for begins anew when a peer is there again.
"""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.device import DeviceProcess
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.server import ServerProcess
from fedbcd.engines.deploy.processes.timeouts import Timeouts
from fedbcd.engines.deploy.processes.timers import Retry, Timers
from fedbcd.errors import ConfigError
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    RetryDue,
    Started,
    UpdateRequested,
)
from fedbcd.protocol.notices import PhaseNotice
from fedbcd.spec import RunSpec
from support.deployments import BCD, federation
from support.waiting import eventually


def play(folder: Path, actor: str, scene: Any, **options: Any) -> None:
    """A scene with the process of one role, without links."""

    async def whole() -> None:
        places = tuple(f"127.0.0.1:{7401 + n}" for n in range(3))
        how = Deploy(folder=str(folder), servers=places, plain=True, **options)
        spec = RunSpec(BCD, fb.AsyncCloud(first=1), active=2)
        process: Any = Deployment.of(federation(), spec, how, None).process(actor, init=True)
        try:
            await scene(process)
        finally:
            process.timers.drop_all()
            await process.tasks.settle()
            await process.events.stop()
            process.role.close()

    asyncio.run(whole())


def test_nothing_is_said_again_while_a_model_moves() -> None:
    async def scenario() -> None:
        said: list[float] = []
        moved_at = [-math.inf]
        timers = Timers()
        timeouts = Timeouts((0.05, 0.05), (1.0, 1.0), (1.0, 1.0))
        retry = Retry(timers, timeouts, lambda: said.append(time.monotonic()), lambda: moved_at[0])
        retry.expect(("upload", 0))
        for _ in range(30):
            moved_at[0] = time.monotonic()
            await asyncio.sleep(0.01)
        # a machine that stalls for longer than the timeout is silent
        assert len(said) <= 3
        last = moved_at[0]
        await eventually(lambda: said and said[-1] >= last)
        assert said[-1] >= last + 0.05
        timers.drop_all()

    asyncio.run(scenario())


def test_patience_begins_anew_when_the_peer_is_there_again() -> None:
    async def scenario() -> None:
        said: list[int] = []
        timers = Timers()
        retry = Retry(
            timers, Timeouts((1000.0, 8e6), (1.0, 1.0), (1.0, 1.0)), lambda: said.append(0)
        )
        retry.expect(("ask", 0))
        first_s = retry._seconds()
        for _ in range(3):
            retry.say_again()
        assert retry._seconds() == 8 * first_s or retry._seconds() == 8e6
        retry.say_again(is_new=True)
        assert (len(said), retry._seconds()) == (4, first_s)
        timers.drop_all()

    asyncio.run(scenario())


def test_no_device_is_given_up_while_its_model_moves(folder: Path) -> None:
    async def scene(process: ServerProcess) -> None:
        moved_at = [time.monotonic()]
        process.peers.model_moved_at = lambda _=None: moved_at[0]  # type: ignore[method-assign]
        lost: list[int] = []
        process._lost = lambda device, _: lost.append(device)  # type: ignore[method-assign]
        await process.tell(Started())
        ask = UpdateRequested(device=0, activation=0)
        await process.receive(Letter("device/0", "server/0", ask, None, 0.0))
        assert 0 in dict(process.role.machine.working)
        for _ in range(30):
            moved_at[0] = time.monotonic()
            await asyncio.sleep(0.01)
        stalled = time.monotonic() - moved_at[0] > 0.05
        assert lost == [] or stalled
        await eventually(lambda: lost)

    play(folder, "server/0", scene, lost_s=(0.1, 0.1))


def test_a_server_that_hears_of_a_device_tries_its_coordinator_at_once(folder: Path) -> None:
    async def scene(process: ServerProcess) -> None:
        dialer = process.peers.dial(COORDINATOR)
        await process.connected("device/0", {})
        assert dialer._hurry.is_set()

    play(folder, "server/0", scene)


def test_a_device_that_said_its_upload_again_asks_in_the_phase_that_has_begun_meanwhile(
    folder: Path,
) -> None:
    """After a cut the notice of the next phase comes before the acknowledgement."""

    async def scene(process: DeviceProcess) -> None:
        machine, start = process.role.machine, process.role.blueprint.start
        await process.noticed("server/0", PhaseNotice(phase=3, round=0, open=True))
        await eventually(lambda: machine.state.name == "ASKING")
        activated = Activated(activation=0, model="z/0/0")
        await process.receive(Letter("server/0", "device/0", activated, start.clone(), 0.0))
        await eventually(lambda: machine.state.name == "UPLOADING")
        await process.noticed("server/0", PhaseNotice(phase=4, round=1, open=True))
        await process.tell(RetryDue())
        done = Acknowledged(activation=0)
        await process.receive(Letter("server/0", "device/0", done, None, 0.0))
        await eventually(lambda: machine.state.name == "ASKING")

    play(folder, "device/0", scene)


# ------------------------------------------------------------------------------------------------
# settings
def test_several_addresses_may_have_spaces_between_them() -> None:
    options = Deploy(
        coordinator="10.0.0.1:7400, 10.0.1.1:7400",
        servers=("a.example:1,b.example:2", " c.example:3 , d.example:4"),
    )
    assert options.addresses_of(COORDINATOR) == ["10.0.0.1:7400", "10.0.1.1:7400"]
    assert options.addresses_of("server/0") == ["a.example:1", "b.example:2"]
    assert options.addresses_of("server/1") == ["c.example:3", "d.example:4"]
    assert options.listens_at(COORDINATOR) == ("10.0.0.1", 7400)


@pytest.mark.parametrize("wrong", ["a b:1", "http://a:1", "a:1;b:2", "a:1,"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        Deploy(servers=(wrong,))


def test_a_dead_link_is_noticed_in_fifteen_seconds_by_default() -> None:
    low, high = Deploy().peer_s
    assert low <= high <= 15.0
    assert Timeouts((1.0, 1.0), (1.0, 1.0), (low, high)).peer.seconds() <= 15.0  # the first too
    with pytest.raises(ConfigError, match=r"deploy.least_rate = 0 must be above 0"):
        Deploy(least_rate=0)
