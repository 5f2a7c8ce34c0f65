"""A real deployment with TLS over bad lines, one fault after the other: how long no round ended,
and how long after the end of the fault two more had.

Every actor is needed for every round, timeouts are those of a deployment that names none. `python
-m faultsim.network` needs Linux, root, `ip` and /dev/net/tun, and takes half an hour; `--within 15`
ends with 1 if something took longer. Afterwards the logs go through the reference model and are
replayed to the models on disk.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from faultsim.lines import Lines, move_into, why_not
from faultsim.model import check_logs
from faultsim.processes import Here, Hurt, start, tables
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import actors_of
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import COORDINATOR, Actor

SERVERS, PORT = 2, 7400
HOSTS = (COORDINATOR, *(f"server/{n}" for n in range(SERVERS)), "devices")
PATIENCE_S = 600.0
LOOK_S = 0.05

# name -> hosts, and what is ordered of their lines; while it lasts, unless it is over at once
FAULTS: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]] = {
    "forgotten": (HOSTS, {"forget": True}),  # a firewall or NAT has forgotten all connections
    "cut": (HOSTS, {"up": True, "down": True}),
    "deaf": (HOSTS, {"down": True}),  # nothing arrives
    "mute": (HOSTS, {"up": True}),  # nothing leaves
    "moved": (("devices",), {}),  # another address
    "paused": (HOSTS, {}),  # the processes stand still
    "lossy": (("devices", COORDINATOR), {"loss": 0.3}),
    "slow": (("devices",), {"rate": 50_000}),
    "far": (("devices", COORDINATOR), {"delay": 1.5}),  # a round trip of 3 s
    "far, then forgotten": (("devices", COORDINATOR), {"delay": 1.5, "forget": True}),
}
AT_ONCE = ("forgotten", "moved")  # nothing is repaired
LONGER = {"slow": 5, "far": 2, "far, then forgotten": 2}  # so many times as long
HIDDEN, LARGE = 4, {"slow": 1000}  # hidden units; 75,010 values instead of 310


class Troubled:
    """One run."""

    def __init__(self, folder: Path, lines: Lines, hidden: int = HIDDEN, **options: Any) -> None:
        self.folder = folder
        self.lines = lines
        table = tables(SERVERS, devices=2, active=2, cloud={"name": "async", "first": SERVERS})
        table["model"] = {"name": "mlp", "hidden": [hidden]}
        self.here = Here(table, plain=False)
        usual = Deploy()
        places = [f"{lines.address(host)}:{PORT}" for host in HOSTS[:-1]]
        timeouts = {name: getattr(usual, name) for name in ("retry_s", "lost_s", "peer_s")}
        self.here.set_options(
            folder,
            coordinator=places[0],
            servers=tuple(places[1:]),
            **{**timeouts, **options},
        )
        move_into(lines.namespace(COORDINATOR))  # the parent only asks the coordinator
        self.hurt: Hurt = start(
            self.here, folder, None, lambda actor: move_into(lines.namespace(host_of(actor)))
        )
        self._latest, self._latest_at = -1, time.monotonic()
        self._longest = 0.0

    def round(self) -> int:
        """How far the coordinator is; on the way the longest time without a round."""
        status = ask_status(self.here.options(self.folder).folder_of(COORDINATOR)) or {}
        now, latest = time.monotonic(), int(status.get("round", -1))
        self._longest = max(self._longest, now - self._latest_at)
        if latest > self._latest:
            self._latest, self._latest_at = latest, now
        return self._latest

    def wait(self, seconds: float) -> None:
        """Let it run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.round()
            time.sleep(LOOK_S)

    def wait_for_round(self, goal: int) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while self.round() < goal:
            assert time.monotonic() - began < PATIENCE_S, f"no round {goal} in {PATIENCE_S:.0f} s"
            assert not self.hurt.supervisor.look(), "a process has ended"
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def suffer(self, fault: str, host: str, seconds: float) -> dict[str, Any]:
        """One fault, and what came of it."""
        self.wait_for_round(self.round() + 2)
        self._longest = 0.0
        before, (up, down) = self.round(), self.lines.passed(host)
        with self._happening(fault, host):
            self.wait(0.0 if fault in AT_ONCE else seconds)
            during, (more_up, more_down) = self.round() - before, self.lines.passed(host)
        recovered = self.wait_for_round(self.round() + 2)
        return {
            "fault": fault,
            "host": host,
            "lasted_s": 0.0 if fault in AT_ONCE else seconds,
            "rounds_meanwhile": during,
            "bytes_up": more_up - up,
            "bytes_down": more_down - down,
            "without_a_round_s": round(self._longest, 2),
            "recovered_s": round(recovered, 2),
        }

    @contextlib.contextmanager
    def _happening(self, fault: str, host: str) -> Iterator[None]:
        order = FAULTS[fault][1]
        if fault == "paused":
            self._signal(host, signal.SIGSTOP)
        elif fault == "moved":
            self.lines.move(host)
        else:
            self.lines.set(host, **order)
        try:
            yield
        finally:
            if fault == "paused":
                self._signal(host, signal.SIGCONT)
            elif fault not in AT_ONCE:
                self.lines.set(host)

    def _signal(self, host: str, number: int) -> None:
        for actor, child in self.hurt.supervisor.children.items():
            if host_of(actor) == host and child.pid is not None:
                os.kill(child.pid, number)

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
            "replayed": self.here.replays(self.folder),
        }


def host_of(actor: Actor) -> str:
    """Where an actor is."""
    return "devices" if actor.startswith("device/") else actor


@contextlib.contextmanager
def troubled(keep: Path | None = None, **how: Any) -> Iterator[Troubled]:
    """A deployment over lines that can be made bad; gone at the end, but for what is kept."""
    lines = Lines(HOSTS)
    try:
        with tempfile.TemporaryDirectory() as path:
            run = Troubled(keep or Path(path) / "run", lines, **how)
            try:
                yield run
            finally:
                run._signal("devices", signal.SIGCONT)
                run.hurt.stop()
    finally:
        lines.close()


def suffer_all(asked: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> bool:
    """Whether everything was over in time; a deployment for each size of model."""
    fine = True
    faults = asked.faults or FAULTS
    for hidden in (HIDDEN, *LARGE.values()):
        chosen = [fault for fault in faults if LARGE.get(fault, HIDDEN) == hidden]
        if not chosen:
            continue
        keep = asked.keep and asked.keep / str(hidden)
        hurried = {"peer_s": (asked.peer, asked.peer)} if asked.peer else {}
        with troubled(keep, hidden=hidden, **hurried) as run:
            run.wait_for_round(2)
            for fault, host in ((one, host) for one in chosen for host in FAULTS[one][0]):
                if not asked.hosts or host in asked.hosts:
                    came = run.suffer(fault, host, asked.seconds * LONGER.get(fault, 1))
                    fine = fine and came["recovered_s"] <= asked.within
                    tell(came)
            tell(run.conclude())
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything held."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.network", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each fault that lasts")
    parser.add_argument("--within", type=float, default=600.0, help="seconds, at most, afterwards")
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS], help="some only")
    parser.add_argument("--peer", type=float, help="[deploy] peer_s, in place of the usual")
    parser.add_argument("--keep", type=Path, help="an empty folder for stores and logs")
    parser.add_argument("--hosts", nargs="*", choices=HOSTS, help="some only")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    reason = why_not()
    if reason:
        print(json.dumps({"skipped": reason}))
        return 0
    return int(not suffer_all(asked, lambda came: print(json.dumps(came), flush=True)))


if __name__ == "__main__":
    sys.exit(main())
