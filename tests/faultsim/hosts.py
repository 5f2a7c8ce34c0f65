"""A real deployment over several hosts: each in a network namespace of its own, joined by a bridge,
with TLS. Links are cut and made bad.

Afterwards the logs go through the reference model and are replayed to the models on disk. `python
-m faultsim.hosts --seconds 6` needs Linux, root and `ip`; links that lose and delay packets need
`tc` with netem.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from faultsim.model import check_logs
from faultsim.processes import Here, Hurt, start, tables
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import actors_of
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import COORDINATOR, Actor

SERVERS, PORT, NETWORK = 2, 7400, "10.77.0"
HOSTS = (COORDINATOR, *(f"server/{n}" for n in range(SERVERS)), "devices")
PATIENCE_S = 600.0
CLONE_NEWNET = 0x40000000
BAD = ("delay", "40ms", "20ms", "loss", "25%")


def why_not() -> str:
    """Why this machine cannot have network namespaces; empty if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    try:
        Network().close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    return ""


class Network:
    """Hosts on one bridge."""

    def __init__(self) -> None:
        self._hub = f"fedbcd-{os.getpid()}"
        self._made: list[str] = []
        try:
            self._make(self._hub)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for number, host in enumerate(HOSTS):
                self._join(number, host)
        except BaseException:
            self.close()
            raise

    def _make(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _join(self, number: int, host: str) -> None:
        inside, plug = self.namespace(host), self._plug(host)
        self._make(inside)
        _ip(
            "-n",
            self._hub,
            "link",
            "add",
            plug,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            inside,
        )
        _ip("-n", self._hub, "link", "set", plug, "master", "bridge", "up")
        _ip("-n", inside, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
        _ip("-n", inside, "link", "set", "eth0", "up")

    def namespace(self, host: str) -> str:
        """The name of a host's own."""
        return f"{self._hub}-{HOSTS.index(host)}"

    @staticmethod
    def _plug(host: str) -> str:
        return f"plug{HOSTS.index(host)}"

    def cut(self, host: str) -> None:
        """Pull the plug."""
        _ip("-n", self._hub, "link", "set", self._plug(host), "down")

    def join(self, host: str) -> None:
        """Put it in again."""
        _ip("-n", self._hub, "link", "set", self._plug(host), "up")

    def make_bad(self, host: str) -> bool:
        """Packets to this host are late, or lost; False: not here."""
        with suppress(subprocess.CalledProcessError, FileNotFoundError):
            _run(
                "tc",
                "-n",
                self._hub,
                "qdisc",
                "add",
                "dev",
                self._plug(host),
                "root",
                "netem",
                *BAD,
            )
            return True
        return False

    def make_good(self, host: str) -> None:
        """As before."""
        _run("tc", "-n", self._hub, "qdisc", "del", "dev", self._plug(host), "root")

    def close(self) -> None:
        """Remove everything."""
        for name in reversed(self._made):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def move_into(namespace: str) -> None:
    """This process is on that host from now on."""
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot move into {namespace}")
    finally:
        os.close(handle)


class Several:
    """One run."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder = folder
        self.network = network
        self.here = Here(
            tables(SERVERS, devices=2, active=2, cloud={"name": "async", "first": 1}), plain=False
        )
        places = [f"{NETWORK}.{number + 1}:{PORT}" for number in range(SERVERS + 1)]
        self.here.set_options(folder, coordinator=places[0], servers=tuple(places[1:]))
        move_into(
            network.namespace(COORDINATOR)
        )  # the parent only asks the coordinator for its status
        self.hurt: Hurt = start(self.here, folder, None, self._move)
        self.troubles: list[dict[str, Any]] = []
        self._latest = -1

    def _move(self, actor: Actor) -> None:
        move_into(self.network.namespace("devices" if actor.startswith("device/") else actor))

    def round(self) -> int:
        """How far the coordinator is."""
        status = ask_status(self.here.options(self.folder).folder_of(COORDINATOR)) or {}
        self._latest = max(self._latest, int(status.get("round", -1)))
        return self._latest

    def wait_for_round(self, goal: int) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while self.round() < goal:
            assert time.monotonic() - began < PATIENCE_S, f"no round {goal} in {PATIENCE_S:.0f} s"
            assert not self.hurt.supervisor.look(), "a process has ended"
            time.sleep(0.05)
        return time.monotonic() - began

    def play(self, seconds: float) -> None:
        """Cut every host off for so long, one after the other; then bad links. One server is enough
        for a round, so others go on.
        """
        self.wait_for_round(2)
        for host in HOSTS:
            before = self.round()
            self.network.cut(host)
            time.sleep(seconds)
            if host.startswith("server/"):
                self.wait_for_round(before + 1)
            during = self.round() - before
            self.network.join(host)
            self._tell("cut", host, during)
        for host in HOSTS:
            before = self.round()
            if self.network.make_bad(host):
                time.sleep(seconds)
                during = self.round() - before
                self.network.make_good(host)
                self._tell("bad", host, during)

    def _tell(self, kind: str, host: str, during: int) -> None:
        recovered = self.wait_for_round(self.round() + 2)
        self.troubles.append(
            {
                "kind": kind,
                "host": host,
                "rounds_during": during,
                "two_more_rounds_s": round(recovered, 2),
            }
        )

    def conclude(self) -> dict[str, Any]:
        """Stop everybody; check logs and models."""
        rounds, restarts = self.round(), self.hurt.supervisor.restarts
        self.hurt.stop()
        plan = self.hurt._deployment.blueprint
        logs = {}
        for actor in actors_of(plan):
            store = FileStore(self.here.options(self.folder).folder_of(actor), read_only=True)
            logs[actor] = tuple(store.transitions())
            store.close()
        check_logs(plan, logs)
        return {
            "rounds": rounds,
            "restarts": restarts,
            "troubles": self.troubles,
            "replayed": self.here.replays(self.folder),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything held."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.hosts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each trouble")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    reason = why_not()
    if reason:
        print(json.dumps({"skipped": reason}))
        return 0
    network = Network()
    try:
        with tempfile.TemporaryDirectory() as path:
            several = Several(Path(path) / "run", network)
            try:
                several.play(asked.seconds)
                print(json.dumps(several.conclude()))
            finally:
                several.hurt.stop()
    finally:
        network.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
