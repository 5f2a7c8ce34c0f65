"""Drivers in a process of their own: Ray that is started for one run and goes with it, and a head
node that they join.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from fedbcd.experiments.job import parse
from support.clusters import ONE, QUIET
from support.forked import CLI, Forked
from support.runs import fedbcd, job_table, log_lines, write_job
from support.waiting import LIMIT_S, wait_for

pytestmark = QUIET
ON_ONE = ("--engine", "cluster", "--actors", "1")
killed: list[int] = []  # sessions of drivers that had no time to stop Ray


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # as /proc writes 127.0.0.1


def _listening(session: int) -> set[str]:
    """The addresses at which the processes of a session listen."""
    mine = set()
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdigit() and os.getsid(int(place.name)) == session:
                mine |= {os.readlink(one) for one in (place / "fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                found.add(local.partition(":")[0])
    return found


def _processes_of(session: int) -> list[str]:
    """Their command lines, from /proc: `ps` would take a fifth of a core while a test waits."""
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError):  # it has gone
            if place.name.isdigit() and os.getsid(int(place.name)) == session:
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found.append(line or (place / "comm").read_text())
    return found


def _wait(condition: Callable[[], Any], process: "subprocess.Popen[str]", said: Path) -> None:
    """Until it holds, while the process goes on."""

    def holds() -> bool:
        assert process.poll() is None, said.read_text()
        return bool(condition())

    wait_for(holds, "what the command is to do")


def _all_gone(session: int) -> bool:
    return not _processes_of(session)


@contextmanager
def started(
    command: list[str], said: Path, to_the_end: bool = True, **more: str
) -> Iterator["subprocess.Popen[str]"]:
    """A command in a session of its own, of which nothing is left in the end; or in which Ray is
    left to clear up.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RAY_ADDRESS", "RAY_AUTH_MODE")
    } | more
    with said.open("w") as file:
        how = {"stdout": file, "stderr": file, "start_new_session": True, "env": environment}
        make = Forked if command[0] == CLI else partial(subprocess.Popen, text=True)
        process = make(command, **how)
        try:
            yield process
        finally:
            if to_the_end and _processes_of(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _run(*arguments: str | Path) -> list[str]:
    return [CLI, "run", *map(str, arguments)]


@pytest.mark.usefixtures("two_nodes")
def test_a_driver_that_is_killed_takes_its_actor_with_it_and_is_resumed_to_the_same_digest(
    tmp_path: Path,
) -> None:
    changes = {"run.rounds": 1_000_000, "run.checkpoint_every": 20, "run.evaluate_every": 100}
    job, out, said = (
        write_job(tmp_path / "job.toml", **changes),
        tmp_path / "out",
        tmp_path / "said",
    )
    with started(_run(job, "--out", out, *ON_ONE), said, to_the_end=False) as process:
        _wait((out / "checkpoint.safetensors").exists, process, said)
        os.kill(process.pid, signal.SIGKILL)  # the driver alone: Ray has to notice
        process.wait()
        killed.append(process.pid)
        wait_for(
            lambda: (
                not any("Shard" in line or "raylet" in line for line in _processes_of(process.pid))
            )
        )
    assert not (out / "models.safetensors").exists(), "killed in the middle"
    with safe_open(out / "checkpoint.safetensors", framework="pt") as file:
        rounds = str(int(file.metadata()["round"]) + 50)
    again = fedbcd("run", "--resume", "--rounds", rounds, "--out", out, *ON_ONE, "--json")
    assert again.code == 0, again.err
    whole = fedbcd("run", job, "--rounds", rounds, "--out", tmp_path / "whole", *ON_ONE, "--json")
    assert again.summary["digest"] == whole.summary["digest"]
    assert log_lines(out) == log_lines(tmp_path / "whole")


@pytest.mark.usefixtures("two_nodes")
def test_ctrl_c_stops_after_the_round_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    changes = {"run.rounds": 1_000_000, "run.checkpoint_every": 5, "run.evaluate_every": 50}
    job, out, said = (
        write_job(tmp_path / "job.toml", **changes),
        tmp_path / "out",
        tmp_path / "said",
    )
    with started(_run(job, "--out", out, *ON_ONE), said) as process:
        _wait((out / "checkpoint.safetensors").exists, process, said)
        assert _listening(process.pid) == LOOPBACK  # and no other host reaches it
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the command
        assert process.wait(LIMIT_S) == 130, said.read_text()
        wait_for(lambda: _all_gone(process.pid))
    done = (out / "history.csv").read_text().splitlines()
    rounds = max(int(line.split(",")[0]) for line in done[1:])
    again = parse(job_table(**changes | {"run.rounds": rounds + 200}))[0].run(
        out, resume=True, engine=ONE
    )
    assert again.finished
    assert again.summary["rounds"] == rounds + 200


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def head_node(said: Path, **environment: str) -> Iterator[str]:
    """`ray start --head`, as on the first machine of a cluster; its address."""
    port, ray = _free_port(), Path(sys.executable).with_name("ray")
    options = [
        "--head",
        "--block",
        "--disable-usage-stats",
        "--include-dashboard=false",
        "--num-cpus=2",
        f"--port={port}",
    ]
    options += [
        "--node-ip-address=127.0.0.1",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--ray-client-server-port={_free_port()}",
    ]
    options += [
        f"--dashboard-agent-listen-port={_free_port()}",
        f"--object-store-memory={100 * 2**20}",
    ]
    with (
        tempfile.TemporaryDirectory(
            prefix="ray", ignore_cleanup_errors=True
        ) as folder,  # short: sockets have short names
        started(
            [str(ray), "start", *options, f"--temp-dir={folder}"], said, **environment
        ) as process,
    ):
        _wait(lambda: "Ray runtime started" in said.read_text(), process, said)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(LIMIT_S)
            wait_for(lambda: _all_gone(process.pid))


@pytest.mark.usefixtures("two_nodes")
def test_a_job_on_a_cluster_that_was_started_before(tmp_path: Path) -> None:
    """`ray start --head`, then `--address`: the digest of a local Ray with as many actors."""
    job, out, said = write_job(tmp_path / "job.toml"), tmp_path / "out", tmp_path / "said"
    token = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # a head node asks those who join for its token
    with head_node(tmp_path / "head", **token) as address:
        command = _run(job, "--out", out, *ON_ONE, "--address", address, "--json")
        with started(command, said, **token) as process:
            assert process.wait(LIMIT_S) == 0, said.read_text()
        joined = json.loads(said.read_text().splitlines()[-1])
    here = fedbcd("run", job, "--out", tmp_path / "here", *ON_ONE, "--json").summary
    assert joined["digest"] == here["digest"]
    assert joined["cluster"]["shards"][0]["node"] != here["cluster"]["shards"][0]["node"]


def test_zz_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    """Last in this file: two idle processes of Ray go a minute after the others, when they have
    given up telling its store why.
    """
    for session in killed:
        try:
            wait_for(lambda session=session: _all_gone(session))
        finally:
            if _processes_of(session):
                os.killpg(session, signal.SIGKILL)
