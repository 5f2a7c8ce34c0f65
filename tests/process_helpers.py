"""Real deployments for tests: the command line in processes of their own, and ways to look at and to hurt them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fedbcd.config import dump_toml
from fedbcd.engines.deploy.ask import ask_health, ask_status
from fedbcd.protocol.messages import Actor
from fedbcd.runfolder import read_tensors
from waiting import ended

MAIN = "from fedbcd.cli import main; main()"


def job(**changes: Any) -> dict[str, Any]:
    """A small job: 2 servers with 3 devices each, 2 of them active, a tiny model."""
    table: dict[str, Any] = {
        "data": {"name": "digits", "samples": 30},
        "federation": {"servers": 2, "devices": 3, "active": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "algorithm": {"name": "fedbcd", "device_step": 0.02, "steps": [1, 3]},
        "cloud": {"name": "sync"},
        "run": {"rounds": 8},
    }
    return table | changes


def write_job(folder: Path, table: Mapping[str, Any]) -> Path:
    """The job as a file."""
    path = folder / "job.toml"
    path.write_text(dump_toml(table))
    return path


def start(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """`fedbcd ...` in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", MAIN, *map(str, arguments)]
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=whole)


@contextlib.contextmanager
def running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, whatever happens."""
    process = start(*arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended(process)
        process.kill()
        process.communicate()


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`fedbcd ...` to its end."""
    process = start(*arguments)
    try:
        out, err = ended(process)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def state_folder(out: Path, actor: Actor) -> Path:
    """Where `fedbcd up` keeps a role's store."""
    return out / "state" / actor.replace("/", "-")


def status_of(out: Path, actor: Actor) -> dict[str, Any]:
    """What a role says of itself; empty while it does not answer."""
    return ask_status(state_folder(out, actor)) or {}


def metrics_of(out: Path, actor: Actor) -> str:
    """What a role gives to Prometheus."""
    return (ask_health(state_folder(out, actor), "/metrics") or b"").decode()


def pid_of(out: Path, actor: Actor) -> int:
    """The process of a role."""
    return int(json.loads((state_folder(out, actor) / "health.json").read_text())["pid"])


def kill(out: Path, actor: Actor) -> None:
    """kill -9."""
    os.kill(pid_of(out, actor), signal.SIGKILL)


def summary_of(out: Path) -> dict[str, Any]:
    """The summary in a run folder."""
    _, metadata = read_tensors(out / "models.safetensors")
    found: dict[str, Any] = json.loads(metadata["summary"])
    return found
