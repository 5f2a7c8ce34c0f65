"""A full disk ends a process with a code of its own; it is started again with a pause, and goes on
from all that it has acknowledged.
"""

import contextlib
import errno
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedbcd as fb
from fedbcd.cli import app
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.local.status_client import pid_in
from fedbcd.engines.deploy.processes.exit_codes import DiskError, ExitCode, is_of_the_disk
from fedbcd.engines.deploy.processes.free_space import FreeSpace
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import COORDINATOR, Actor, RetryDue, Woke
from fedbcd.spec import RunSpec
from support.deployments import BCD, Town, federation
from support.processes import (
    ENDLESS,
    finish_log,
    go_on,
    job,
    pid_of,
    round_of,
    run,
    start,
    state_folder,
    stop,
    write_job,
)
from support.waiting import wait_for

ROLES = (COORDINATOR, "server/0", "device/0")


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own; where nobody may mount one, the test is skipped."""
    path.mkdir(parents=True)
    options = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path))
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", *options], capture_output=True, check=False).returncode
    ):
        pytest.skip("no disk can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte."""
    ballast = disk / "ballast"
    for size in (1 << 20, 4096, 1):
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(size)) == size:
                pass
    return ballast


def test_a_full_disk_is_not_final() -> None:
    assert not ExitCode.DISK.is_final
    assert (
        DiskError("the store x", OSError(errno.ENOSPC, "No space left on device")).exit_code
        == ExitCode.DISK
        == 25
    )


def test_a_damaged_store_is_not_mistaken_for_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(fb.errors.RecordError, match="cannot be used") as error:
        FileStore(tmp_path)
    assert error.value.exit_code == ExitCode.RECORD
    assert not is_of_the_disk(PermissionError(errno.EACCES, "no"), tmp_path)
    assert not is_of_the_disk(sqlite3.DatabaseError("file is not a database"), tmp_path)


@contextlib.contextmanager
def no_longer_files(most: int) -> Iterator[None]:
    """A quota: no file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("actor", ROLES)
def test_a_role_that_cannot_write_says_nothing_and_goes_on_from_what_it_has_said(
    actor: Actor, folder: Path, towns: list[Town]
) -> None:
    town = Town(folder, RunSpec(BCD, fb.SyncCloud(), active=1), federation(devices=3))
    towns.append(town)
    town.start()
    failures: list[DiskError] = []

    def play(rounds: int) -> None:
        goal = town.rounds + rounds
        while town.rounds < goal:
            for device in ("device/0", "device/1", "device/2"):
                if town.roles[device].machine.state.name == "IDLE":
                    town.tell(device, Woke())
                elif town.roles[device].machine.state.name != "TRAINING":
                    town.tell(device, RetryDue())
                town.drain()
                town.work(device)
                town.drain()
            for server in ("server/0", "server/1", "server/2"):
                town.tell(server, RetryDue())

    play(2)
    do, said, length = town.do, [*town.post], town.roles[actor].store.length

    def on_a_full_disk(one: Actor, act: Callable[[], list[Letter]]) -> None:
        if one != actor or failures:
            do(one, act)
            return
        said[:] = town.post
        with no_longer_files(1000):
            try:
                do(one, act)
            except DiskError as error:
                failures.append(error)
                town.kill(actor)
                with pytest.raises(DiskError):
                    FileStore(folder / actor)  # started again while there is no room
        if failures:
            assert town.post == said
            town.open(actor)

    town.do = on_a_full_disk  # type: ignore[method-assign]
    play(2)
    assert [error.exit_code for error in failures] == [ExitCode.DISK]
    assert "make room" in str(failures[0])
    assert town.roles[actor].store.length > length
    town.replayed()


def test_new_work_stops_before_the_disk_is_full(tmp_path: Path) -> None:
    """While there is still room for what is under way, and for beginning anew."""
    options = {"folder": str(tmp_path / "state"), "reserve_mb": 1e9, "servers": ["127.0.0.1:1"] * 2}
    file = write_job(tmp_path, job(deploy=options))
    done = CliRunner().invoke(app, ["coordinator", str(file), "--init", "--plain"])
    assert done.exit_code == ExitCode.DISK
    assert "fewer than deploy.reserve_mb = 1e+09); make room" in done.stderr
    room = FreeSpace(tmp_path, 0.0)
    room.check()
    assert room.free_mb > 0


def test_every_role_is_started_again_until_there_is_room(tmp_path: Path) -> None:
    """The disk of the whole deployment is full for a while: no code is final, rounds go on, and the
    log replays to the models on disk.
    """
    with small_disk(tmp_path / "disk", 64) as disk:
        out = disk / "run"
        everybody = (*ROLES, "server/1", *(f"device/{number}" for number in range(1, 6)))
        file = write_job(tmp_path, job(run=ENDLESS, cloud={"name": "async", "first": 1}))

        def gone(actor: Actor) -> bool:
            return pid_in(state_folder(out, actor)) is None

        up = start("up", file, "--time-scale", "0.05", "--out", out)
        try:
            wait_for(lambda: round_of(out) > 1, "no first round")
            before = {actor: pid_of(out, actor) for actor in ROLES}
            ballast = fill(disk)
            wait_for(lambda: any(gone(actor) for actor in everybody), "nobody has noticed")
            for actor in ROLES:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(
                        pid_of(out, actor), signal.SIGKILL
                    )  # with nothing to write it would not notice
            wait_for(lambda: all(gone(actor) for actor in ROLES), "somebody runs")
            ballast.unlink()
            wait_for(
                lambda: all(
                    pid_in(state_folder(out, actor)) not in (None, pid)
                    for actor, pid in before.items()
                ),
                "nobody came back",
            )
            go_on(out, 3)
            stop(up)
        finally:
            up.kill()
            up.communicate()
        finish_log(out)
        again = run("replay", out, "--exact")
        assert again.returncode == 0, again.stderr
        logs = "".join(path.read_text() for path in (out / "logs").iterdir())
        assert '"meaning": "BUG"' not in logs
