"""Each role as a command of its own: start, status, metrics, clean stop, exit codes, and the rules
of identity.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest
from typer.testing import CliRunner

from fedbcd.cli import app
from fedbcd.config import read_toml
from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import free_ports
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from support.processes import job, metrics_of, run, running, status_of, write_job
from support.waiting import ended, wait_for

Processes = dict[str, Popen[str]]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[tuple[Path, Path, Processes]]:
    """A coordinator, one server and two devices, with certificates, that are stopped at the end."""
    ports = free_ports(2)
    deploy = {
        "folder": str(tmp_path / "state"),
        "certificates": str(tmp_path / "certs"),
        "coordinator": f"127.0.0.1:{ports[0]}",
        "servers": [f"127.0.0.1:{ports[1]}"],
        "retry_s": [0.2, 5.0],
    }
    table = job(federation={"servers": 1, "devices": 2, "active": 1}, deploy=deploy)
    file = write_job(tmp_path, table)
    authority = Authority.create(tmp_path / "certs")
    for identity in ("operator", "coordinator", "server/0", "device/0", "device/1"):
        authority.issue(identity)
    with ExitStack() as stack:
        processes = {
            actor: stack.enter_context(running(*command))
            for actor, command in {
                "coordinator": ("coordinator", file, "--init"),
                "server/0": ("server", file, "--id", "0", "--init"),
                "device/0": ("device", file, "--id", "0"),
                "device/1": ("device", file, "--id", "1"),
            }.items()
        }
        yield file, tmp_path, processes


def test_roles_start_answer_keep_to_the_rules_of_identity_and_stop_cleanly(
    deployment: tuple[Path, Path, Processes],
) -> None:
    """The folder is locked; from another folder the newest wins and the older ends, unless it is
    refused; a lost disk is put in step.
    """
    file, out, processes = deployment
    check_answers(file, out)
    check_identity(file, out, processes)
    for actor in ("device/1", "server/0", "coordinator"):
        processes[actor].send_signal(signal.SIGTERM)
        _, said = ended(processes[actor])
        assert processes[actor].returncode == 0, said
        last = json.loads(said.splitlines()[-1])
        assert (last["what"], last["meaning"]) == ("ended", "DONE")
        assert "PRIVATE KEY" not in said


def check_answers(file: Path, out: Path) -> None:
    wait_for(lambda: status_of(out, "coordinator").get("round", 0) >= 3, "no third round")
    wait_for(lambda: status_of(out, "server/0").get("devices") == 2, "a device is not connected")
    told = run("status", file, "--json")
    assert told.returncode == 0, told.stderr
    coordinator, server = map(json.loads, told.stdout.splitlines())
    assert coordinator["actor"] == "coordinator"
    assert coordinator["round"] >= 3
    assert (server["members"], server["devices"]) == (2, 2)
    wait_for(lambda: "waits for" in run("status", file).stdout, "nobody waits")
    assert 'fedbcd_letters_total{direction="in",event="Uploaded"}' in metrics_of(out, "server/0")
    wait_for(lambda: "fedbcd_waiting_seconds_total{" in metrics_of(out, "device/0"), "no metric")


def check_identity(file: Path, out: Path, processes: Processes) -> None:
    wait_for(
        lambda: status_of(out, "device/0").get("activation", 0) >= 1, "device 0 has not taken part"
    )
    second = run("device", file, "--id", "0")
    assert second.returncode == ExitCode.RECORD, second.stderr
    assert "another process uses the store" in second.stderr
    foreign = job(
        federation={"servers": 1, "devices": 2, "active": 1}, run={"rounds": 8, "seed": 5}
    ) | {"deploy": read_toml(file)["deploy"]}
    (out / "foreign").mkdir()
    wrong = run(
        "device", write_job(out / "foreign", foreign), "--id", "0", "--folder", out / "foreign"
    )
    assert wrong.returncode == ExitCode.REFUSED, wrong.stderr
    assert "belongs to a deployment with other settings" in wrong.stderr
    before = wait_for(
        lambda: status_of(out, "device/0").get("activation"), "device 0 does not answer"
    )
    wait_for(
        lambda: status_of(out, "device/0").get("activation", 0) > before, "device 0 does not go on"
    )
    assert processes["device/0"].poll() is None
    other = out / "other"
    with running("device", file, "--id", "0", "--folder", other) as newest:
        _, said = ended(processes["device/0"])
        assert processes["device/0"].returncode == ExitCode.REPLACED, said
        wait_for(
            lambda: status_of(out, "server/0").get("devices") == 2, "the newest is not connected"
        )
        wait_for(
            lambda: (ask_status(other / "device-0") or {}).get("activation", 0) >= 2,
            "the new disk was not put in step",
        )
        assert newest.poll() is None


def test_a_role_that_cannot_start_says_why(tmp_path: Path) -> None:
    file = write_job(
        tmp_path,
        job(deploy={"folder": str(tmp_path / "state"), "servers": ["127.0.0.1:1", "127.0.0.1:2"]}),
    )
    cases = (
        (("device", file, "--id", "99"), ExitCode.CONFIG, "there is no device/99"),
        (("device", file, "--id", "0"), ExitCode.CONFIG, "has no certificates"),
        (
            ("device", file, "--id", "1", "--certificates", tmp_path / "none"),
            ExitCode.CREDENTIALS,
            "fedbcd certs",
        ),
        (
            ("coordinator", file, "--plain"),
            ExitCode.NO_STORE,
            f"there is no store in {tmp_path / 'state' / 'coordinator'}",
        ),
        (("server", file, "--id", "1", "--plain"), ExitCode.NO_STORE, "a new store: --init"),
        (
            ("coordinator", file, "--init", "--plain", "--listen", "192.0.2.1:7400"),
            ExitCode.CONFIG,
            "plain text at 192.0.2.1",
        ),
    )
    for arguments, code, words in cases:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        said = done.stderr + str(done.exception)
        assert (getattr(done.exception, "exit_code", done.exit_code), words in said) == (
            code,
            True,
        ), said
