"""An operator admits and dismisses devices of a deployment that runs: authenticated, durable,
idempotent, and in the log.
"""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbcd.cli import app
from fedbcd.config import read_toml
from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.operator_client import ask_change
from fedbcd.engines.deploy.links.refusals import RefusedForGood
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.engines.deploy.processes.options import Deploy, merge_options
from fedbcd.errors import ConfigError, Refused
from fedbcd.experiments.deployed import one_job, spec_of
from fedbcd.protocol.messages import DeviceJoined, DeviceLeft, Restored, Uploaded
from fedbcd.record.eventlog import LogReader, Transition
from support.processes import (
    ENDLESS,
    finish_log,
    go_on,
    job,
    kill,
    run,
    running,
    status_of,
    stop,
    write_job,
)
from support.waiting import wait_for


def members(out: Path, server: int) -> int:
    return int(status_of(out, f"server/{server}").get("members", -1))


def steps_in(out: Path) -> list[Transition]:
    """What the log of a deployment that goes on holds by now."""
    return list(LogReader(out / "events.jsonl", unfinished=True))


def change(out: Path, what: str, device: int, server: int, who: str = "operator") -> bool:
    """As the command does, with the certificate of somebody."""
    options = merge_options(read_toml(out / "deploy.toml")["deploy"], {}, {})
    actor = f"server/{server}"
    return asyncio.run(
        ask_change(
            actor,
            options.address_of(actor),
            Credentials(out / "certs" / who.replace("/", "-"), who),
            what,
            device,
        )
    )


def test_devices_are_admitted_and_dismissed_while_rounds_go_on(tmp_path: Path) -> None:
    """A late device joins, a member leaves and comes back, a server is killed in between; the log
    replays to the models of the stores.
    """
    out = tmp_path / "run"
    table = job(run=ENDLESS, cloud={"name": "async", "first": 1}, deploy={"late": [2]})
    with running("up", write_job(tmp_path, table), "--time-scale", "0.1", "--out", out) as up:
        go_on(out)
        assert members(out, 0) == 2
        told = run("admit", out, "2")
        assert (told.returncode, told.stdout) == (
            0,
            "device 2 is a member of server/0\n",
        ), told.stderr
        kill(out, "server/0")
        wait_for(lambda: members(out, 0) == 3, "what was answered is not durable")
        assert not change(out, "admit", 2, 0)
        told = run("dismiss", out, "4", "3")
        assert (told.returncode, told.stdout) == (
            0,
            "device 4 is no member of server/1\ndevice 3 is no member of server/1\n",
        ), told.stderr
        assert members(out, 1) == 1
        assert change(out, "admit", 4, 1)
        assert not change(out, "admit", 4, 1)
        assert change(out, "dismiss", 4, 1)
        assert change(out, "admit", 4, 1)
        Authority(out / "certs").issue("operator/alice")
        assert change(out, "dismiss", 5, 1, "operator/alice")
        with pytest.raises(Refused, match="device 4 is the last of server 1 and cannot leave"):
            change(out, "dismiss", 4, 1)
        with pytest.raises(Refused, match="device 5 does not belong to server/0"):
            change(out, "dismiss", 5, 0)
        with pytest.raises(
            RefusedForGood,
            match="device/4 may not change who belongs here; use the certificate of operator",
        ):
            change(out, "admit", 4, 1, "device/4")
        wait_for(
            lambda: status_of(out, "device/2").get("activation", 0) >= 1, "device 2 takes no part"
        )
        wait_for(
            lambda: (
                {step.actor for step in steps_in(out) if isinstance(step.event, Restored)}
                >= {"device/2", "device/4"}
            )
        )
        stop(up)
    end = finish_log(out)
    steps = list(LogReader(out / "events.jsonl"))
    changes = [(s.actor, s.event) for s in steps if isinstance(s.event, DeviceJoined | DeviceLeft)]
    by = "operator"
    there = [
        DeviceLeft(device=4, by=by),
        DeviceLeft(device=3, by=by),
        *(2 * [DeviceJoined(device=4, by=by), DeviceLeft(device=4, by=by)])[:3],
        DeviceLeft(device=5, by="operator/alice"),
    ]
    assert changes == [
        ("server/0", DeviceJoined(device=2, by=by)),
        *(("server/1", event) for event in there),
    ]
    assert any(isinstance(s.event, Uploaded) and s.event.device == 2 for s in steps)
    again = run("replay", out, "--exact", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["digest"] == end["digest"]


def test_who_is_available_is_drawn_among_those_who_are_left(tmp_path: Path) -> None:
    """It was drawn among the first members: with two of three left and two to be active, Sync-cloud
    waited for ever in most rounds.
    """
    out = tmp_path / "run"
    table = job(run=ENDLESS, algorithm={"name": "fedbcd-i", "steps": [1, 2], "available": 2})
    with running("up", write_job(tmp_path, table), "--time-scale", "0.05", "--out", out) as up:
        go_on(out)
        assert change(out, "dismiss", 5, 1)
        go_on(out, 8)
        stop(up)


def test_commands_refuse_what_cannot_be(tmp_path: Path) -> None:
    file = write_job(
        tmp_path, job(deploy={"plain": True, "servers": ["127.0.0.1:1", "127.0.0.1:1"]})
    )
    for arguments, words in (
        (("admit", file, "6"), "there is no device/6 in this job; its devices are 0 to 5"),
        (("dismiss", file, "1"), "server/0 does not answer at 127.0.0.1:1"),
        (("admit", tmp_path, "1"), "holds no deployment"),
    ):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code != 0
        assert words in str(done.exception), done.output
    late = write_job(
        tmp_path,
        job(deploy={"late": [6], "plain": True, "servers": ["127.0.0.1:1", "127.0.0.1:1"]}),
    )
    with pytest.raises(
        ConfigError, match="late names device 6; the devices of this job are 0 to 5"
    ):
        CliRunner().invoke(app, ["admit", str(late), "1"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="late names every device of server 1; keep at least one"):
        spec_of(one_job(job()), Deploy(late=(5, 3, 4), samples=20))
