"""Whatever comes from a wire or a file is taken or refused with a sentence; what is refused changes
nothing. See also tests/deploy.
"""

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from faultsim import fuzz
from faultsim.disk import Disk
from faultsim.schedule import blueprint_of
from faultsim.told import environment
from fedbcd.config import read_toml
from fedbcd.engines.deploy.links.codec import decode_notice, encode_notice
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import ConfigError, Refused
from fedbcd.experiments.deployed import one_job
from fedbcd.protocol.messages import Started
from fedbcd.protocol.notices import Notice, PhaseNotice, Ping, Pong, RoundNotice
from support.waiting import LIMIT_S, eventually
from support.wire import DEVICE, SERVER, linked, make_authority, up

NAMES = ["wire", "device", "server", "events.jsonl", "job.toml", "models.safetensors", "store"]
HALF_OPEN = int(os.environ.get("FEDBCD_HALF_OPEN", "1000"))


@pytest.mark.parametrize("name", NAMES)
def test_cut_at_every_byte_and_mutated(name: str, tmp_path: Path) -> None:
    (target,) = [target for target in fuzz.targets(tmp_path) if target.name == name]
    found = fuzz.fuzz(target, seed=1, mutations=400)
    assert found["findings"] == []
    assert found["inputs"] > 400
    print(found)


# ------------------------------------------------------------------------------------------------
# what the fuzzer found
@pytest.mark.parametrize("wrong", [float("inf"), 1e300, 2**70, -1, True, "7", None, [1], {}])
def test_a_hello_with_a_counter_that_is_none_is_refused_and_the_server_lives(wrong: Any) -> None:
    """An activation of 1e999 was an OverflowError, which ended the server's process: any device
    could do that.
    """
    role = ServerRole.open(Disk(random.Random(0), 1).store("x"), blueprint_of(1, 2, 1), 0)
    role.tell(Started(), 0.0)
    hello = {
        "run": role.store.facts["run"],
        "store": "ab",
        "activation": 0,
        "incarnation": 0,
        "uploading": False,
    }
    for name in ("activation", "incarnation"):
        with pytest.raises(Refused, match="device/0 does not say how far it is"):
            role.greet("device/0", {**hello, name: wrong}, 1.0)
    assert "store/0" not in role.store.facts
    assert role.greet("device/0", json.loads(json.dumps(hello)), 1.0) == []


@pytest.mark.parametrize("store", ["", "s" * 65, 7, None])
def test_a_store_without_a_proper_name_is_refused(store: Any) -> None:
    """Any text was written down as a fact, 64 KiB of it if a device liked."""
    plan = blueprint_of(1, 2, 1)
    server, coordinator = (Disk(random.Random(0), k).store("x") for k in (1, 2))
    role = ServerRole.open(server, plan, 0)
    role.tell(Started(), 0.0)
    hello = {
        "run": server.facts["run"],
        "store": store,
        "activation": 0,
        "incarnation": 0,
        "uploading": False,
        "phase": 0,
    }
    with pytest.raises(Refused, match="does not say how far it is"):
        role.greet("device/0", hello, 1.0)
    with pytest.raises(Refused, match="does not say how far it is"):
        CoordinatorRole.open(coordinator, plan).greet("server/0", hello, 1.0)


def test_numbers_of_a_notice_are_checked() -> None:
    """A notice whose round was no number ended the device's process."""

    def read(kind: str, body: object) -> Notice | None:
        sender, to = ("server/0", "device/1") if kind != "round" else ("coordinator", "server/0")
        return decode_notice(kind, json.loads(json.dumps(body)), sender, to)

    phase = PhaseNotice(phase=3, round=-1, elapsed=1.0)
    assert read("phase", {"phase": 3, "round": -1, "elapsed": 1}) == phase
    for wrong in (None, "1", float("nan"), float("inf"), -1.0, [], 1e16, True):
        with pytest.raises(Refused, match="server/0 gave a notice that cannot be"):
            read("phase", {"phase": 1, "round": 1, "elapsed": wrong})
    for other in (None, 1.0, "1", -2, 2**53, True, float("inf"), -5.5):
        for kind, name in (("round", "round"), ("ping", "number"), ("pong", "number")):
            with pytest.raises(Refused, match="cannot be"):
                read(kind, {name: other})
    for too_little in ({}, {"phase": 1}, {"round": 1}):
        with pytest.raises(Refused, match="cannot be"):
            read("phase", too_little)
    many = read("phase", {"phase": 1, "round": 1, "members": [0, 7]})
    assert many == PhaseNotice(phase=1, round=1, members=(0, 7))
    for members in (None, 3, "3", [-1], [1.0], [[1]], {"0": 1}):
        with pytest.raises(Refused, match="cannot be"):
            read("phase", {"phase": 1, "round": 1, "members": members})
    for clock in (None, True, "1", float("inf")):  # it says nothing, as older software
        assert read("pong", {"number": 1, "clock": clock}) == Pong(number=1)
    assert read("news", {"of": "later"}) is None
    assert read("ping", {"number": 1, "later": "too"}) == Ping(number=1)


NOTICES = [  # as 0.1.0 sent them
    (
        PhaseNotice(phase=3, round=2, open=True, elapsed=0.25, members=(0, 7)),
        '{"phase": 3, "round": 2, "open": true, "finished": false, "elapsed": 0.25, "members": '
        "[0, 7]}",
    ),
    (
        PhaseNotice(phase=-1, round=0),
        '{"phase": -1, "round": 0, "open": false, "finished": false, "elapsed": 0.0}',
    ),
    (RoundNotice(round=4, finished=True), '{"round": 4, "finished": true}'),
    (Ping(number=5), '{"number": 5}'),
    (Pong(number=5, clock=1.5), '{"number": 5, "clock": 1.5}'),
]


@pytest.mark.parametrize(("notice", "body"), NOTICES)
def test_a_notice_is_the_frame_that_it_was(notice: Notice, body: str) -> None:
    frame = encode_notice(notice).notice
    assert frame.body == body
    pair = ("coordinator", "server/0") if frame.kind == "round" else ("server/0", "device/1")
    assert decode_notice(frame.kind, json.loads(body), *pair) == notice


def test_a_notice_is_taken_from_who_may_give_it() -> None:
    for kind, sender, to in (
        ("phase", "device/0", "server/0"),
        ("round", "device/0", "server/0"),
        ("round", "server/0", "device/0"),
    ):
        with pytest.raises(Refused, match=f"{sender} (may not send|sent) "):
            decode_notice(kind, {"phase": 1, "round": 1}, sender, to)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000], ids=["brackets", "digits"]
)
def test_a_job_file_of_brackets_or_digits_is_a_sentence(text: str, tmp_path: Path) -> None:
    """It was a RecursionError, or a ValueError without the name of the file."""
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(file)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("device_step", 10**400, "algorithm.device_step has 401 digits"),
        ("device_step", -(10**400), "algorithm.device_step has 401 digits"),
        ("penalty", [0.1, 10**400], r"algorithm.penalty\[1\] has 401 digits"),
    ],
)
def test_a_number_that_no_float_can_hold_is_a_sentence(key: str, value: object, words: str) -> None:
    """It was an OverflowError."""
    with pytest.raises(ConfigError, match=words):
        one_job({"algorithm": {"name": "fedbcd", key: value}})


@pytest.mark.parametrize("threads", [4097, 10**400])
def test_more_threads_than_a_machine_has_are_refused(threads: int) -> None:
    """It was a ValueError of torch's."""
    with pytest.raises(ConfigError, match=r"run.threads = .* 4096 or less"):
        one_job({"run": {"rounds": 1, "threads": threads}})


@pytest.mark.parametrize("servers", [2**31 - 1, 2**63, 10**400])
def test_more_servers_than_there_can_be_are_refused(servers: int) -> None:
    """A coordinator of 2,147,483,647 servers took all memory while the job was read."""
    with pytest.raises(ConfigError, match=r"more than 100,000,000 devices"):
        one_job({"federation": {"servers": servers, "devices": 2, "active": 1}})


# ------------------------------------------------------------------------------------------------
# connections
def test_half_open_connections_disturb_nobody(tmp_path: Path) -> None:
    """Connections that say nothing, or begin a handshake and stop: a device that was there goes on,
    and memory is bounded.
    """
    make_authority(tmp_path)
    command = [sys.executable, "-m", "faultsim.idle", str(HALF_OPEN)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as idle:  # before gRPC has threads

        async def scenario() -> None:
            assert idle.stdin is not None
            assert idle.stdout is not None
            async with linked(tmp_path) as (server, here, device, _):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                print(server.port, file=idle.stdin, flush=True)
                opened = int(await asyncio.to_thread(idle.stdout.readline))
                for k in range(20):
                    assert await device.send(up(torch.arange(8.0), k)) or k >= 16
                await eventually(lambda: len(here.letters) >= 16)
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
                print(
                    f"{opened} half-open connections: {grown:.0f} MiB,"
                    f" {1024 * grown / max(opened, 1):.0f} KiB each"
                )
                assert opened == HALF_OPEN
                assert grown < 64 + 0.15 * HALF_OPEN
                # they all break off at once: with TLS this ended the listener's process, in gRPC
                idle.kill()
                await asyncio.sleep(1.0)
                heard = len(here.letters)
                assert await device.send(up(torch.arange(8.0), 99))
                await eventually(lambda: len(here.letters) > heard)
                assert here.disconnects == []

        try:
            asyncio.run(scenario())
        finally:
            idle.kill()


def test_a_bomb_that_inflates_is_refused_before_it_does(tmp_path: Path) -> None:
    """A member with a certificate sends 200 MB as 200 KB of gzip: gRPC stops inflating at the limit
    of a frame, and nobody is disturbed.
    """
    make_authority(tmp_path)
    command = [sys.executable, "-m", "faultsim.bomb", str(tmp_path), DEVICE, SERVER, "200000000"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as bomber:

        async def scenario() -> list[dict[str, Any]]:
            async with linked(tmp_path) as (server, here, device, _):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                told, _ = await asyncio.to_thread(bomber.communicate, f"{server.port}\n", LIMIT_S)
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
                print(f"{told}{grown:.1f} MiB more")
                assert grown < 20
                assert await device.send(up(torch.arange(8.0)))
                await eventually(lambda: here.letters)
                assert here.disconnects == []
                return [json.loads(line) for line in told.splitlines()]

        gzip, deflate, plain = asyncio.run(scenario())
    assert gzip["compression"] == "Gzip"
    assert deflate["compression"] == "Deflate"
    for answer in (gzip["answer"], deflate["answer"], plain["answer"]):
        assert answer.startswith(
            ("RESOURCE_EXHAUSTED: ", "INTERNAL: ")
        )  # the second: it ended while the bomb was still being written
