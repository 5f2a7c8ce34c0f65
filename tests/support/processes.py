"""Real deployments for tests: the command line in processes of their own, and ways to look at and
to hurt them.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fedbcd.config import dump_toml, read_toml
from fedbcd.engines.deploy.local.finish import merge_stores
from fedbcd.engines.deploy.local.status_client import ask_health, ask_status
from fedbcd.engines.deploy.processes.options import merge_options
from fedbcd.experiments.deployed import one_job, spec_of
from fedbcd.protocol.messages import Actor
from fedbcd.record.tensorfile import read_tensors
from support.forked import CLI, Forked
from support.waiting import ended, wait_for

ENDLESS = {"rounds": 1_000_000}  # for what must come before the end


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
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """`fedbcd ...` in a process of its own."""
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return Forked(
        [CLI, *map(str, arguments)], strict=True, stdout=stdout, stderr=subprocess.PIPE, env=whole
    )


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
    """kill -9; returns when the role is back in another process."""
    before = pid_of(out, actor)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: status_of(out, actor) and pid_of(out, actor) != before, f"{actor} is not back")


def round_of(out: Path) -> int:
    """The coordinator's; -1 while it does not answer."""
    return int(status_of(out, "coordinator").get("round", -1))


def go_on(out: Path, rounds: int = 1) -> int:
    """Wait for so many rounds more; which round that is."""
    goal = max(round_of(out), 0) + rounds
    wait_for(lambda: round_of(out) >= goal, f"no round {goal}")
    return goal


def stop(up: subprocess.Popen[str]) -> None:
    """Stop a deployment that would go on."""
    up.terminate()
    _, said = ended(up)
    assert up.returncode == 130, said


def finish_log(out: Path) -> dict[str, Any]:
    """Finish the log of a deployment that was stopped, from its stores; its end."""
    job, options = (
        one_job(read_toml(out / "config.toml")),
        merge_options(read_toml(out / "deploy.toml")["deploy"], {}, {}),
    )
    return merge_stores(out, job.make_federation(), spec_of(job, options), options, job.to_table())


def end_soon(out: Path, more: int = 2) -> int:
    """Let a deployment that was stopped end after a few more rounds when it is resumed; how many
    these are in all.

    Its log names the job, so it is made anew from the stores.
    """
    table = read_toml(out / "config.toml")
    rounds: int = finish_log(out)["rounds"] + more
    table["run"]["rounds"] = rounds
    (out / "config.toml").write_text(dump_toml(table))
    (out / "events.jsonl").unlink()
    return rounds


def summary_of(out: Path) -> dict[str, Any]:
    """The summary in a run folder."""
    _, metadata = read_tensors(out / "models.safetensors")
    found: dict[str, Any] = json.loads(metadata["summary"])
    return found
