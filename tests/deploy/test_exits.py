"""How processes end when something around them is missing or taken: the documented code, and a
sentence instead of a trace.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedbcd.engines.deploy.links.refusals import Counts, Refusals
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import free_ports
from fedbcd.engines.deploy.processes.exit_codes import AddressError, ExitCode
from fedbcd.engines.deploy.processes.health import Health
from fedbcd.engines.deploy.processes.logs import RoleLog
from support.processes import job, running, state_folder, write_job
from support.waiting import LIMIT_S, ended, wait_for

MAIN = "from fedbcd.cli import main; main()"
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
EXTRA = ("grpc", "google", "cryptography", "prometheus_client")


def without(names: tuple[str, ...], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`fedbcd ...` where these packages are not installed."""
    command = [sys.executable, "-c", WITHOUT.format(names=names) + MAIN, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )


@pytest.mark.parametrize("missing", [("google",), EXTRA], ids="+".join)
def test_a_role_without_the_extra_says_what_to_install(
    missing: tuple[str, ...], tmp_path: Path
) -> None:
    file = write_job(
        tmp_path,
        job() | {"deploy": {"plain": True, "servers": ["127.0.0.1:7401", "127.0.0.1:7402"]}},
    )
    done = without(missing, "coordinator", file, "--folder", tmp_path)
    assert done.returncode == ExitCode.EXTRA, done.stderr
    assert "pip install 'fedbcd[deploy]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_simulation_needs_nothing_of_the_extra(tmp_path: Path) -> None:
    done = without(
        EXTRA, "run", write_job(tmp_path, job(run={"rounds": 1})), "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr


def test_a_health_port_in_use_is_an_address_in_use() -> None:
    async def start(port: int) -> None:
        await Health(bytes, dict, bool).start("127.0.0.1", port)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressError, match="choose another address with --health") as error:
            asyncio.run(start(taken.getsockname()[1]))
    assert error.value.exit_code == ExitCode.ADDRESS


def test_a_deployment_that_is_stopped_while_it_starts_was_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running("up", "--servers", "2", "--devices", "4", "--rounds", "1000", "--out", out) as up:
        wait_for(lambda: state_folder(out, "device/3").exists(), "no process has begun")
        up.terminate()
        _, said = ended(up)
    assert up.returncode == ExitCode.INTERRUPTED, said
    assert "did not end well" not in said


def test_reasons_that_a_peer_invents_take_no_memory() -> None:
    counts = Counts()
    refusals = Refusals(counts, RoleLog("server/0"))
    for number in range(1000):
        refusals.note_from_peer("device/1", f"reason {number}", "because")
    assert len(counts.refused_by_peer) == Refusals.REASONS + 1
    assert sum(counts.refused_by_peer.values()) == 1000
    assert len(refusals._logged) == Refusals.REASONS + 1


def test_a_device_that_is_stopped_while_it_trains_ends_well(tmp_path: Path) -> None:
    """Also when torch is in the middle of a computation that takes minutes."""
    long = job(
        algorithm={"name": "fedbcd", "device_step": 1e-4, "steps": [50_000, 50_000]},
        model={"name": "mlp", "hidden": [256, 256]},
    )
    ports = free_ports(2)
    deploy = {
        "plain": True,
        "folder": str(tmp_path),
        "coordinator": f"127.0.0.1:{ports[0]}",
        "servers": [f"127.0.0.1:{ports[1]}"],
    }
    file = write_job(
        tmp_path, long | {"federation": {"servers": 1, "devices": 1, "active": 1}, "deploy": deploy}
    )

    def state() -> str:
        return str((ask_status(tmp_path / "device-0") or {}).get("waits_for"))

    coordinator, server = (
        running("coordinator", file, "--init"),
        running("server", file, "--id", "0", "--init"),
    )
    with coordinator, server, running("device", file, "--id", "0") as device:
        wait_for(lambda: state() == "training", "no training")
        device.terminate()
        _, said = ended(device)
    assert device.returncode == 0, said
    assert '"meaning": "DONE"' in said.splitlines()[-1]
