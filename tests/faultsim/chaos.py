"""A real deployment with TLS, in which no actor can be missed, for minutes: SIGKILL, SIGSTOP, dead
and slow links through a proxy, all drawn from a seed.

Afterwards its logs go through the reference model and are replayed to the models on disk. `python
-m faultsim.chaos --seconds 120`.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from faultsim.model import check_logs
from faultsim.processes import Here, Hurt, start, tables
from faultsim.told import environment
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import actors_of, free_ports
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import COORDINATOR, Actor, server_actor

SERVERS = 2
KINDS = ("kill", "kill", "stop", "up", "down", "slow", "reset")
PATIENCE_S = 600.0
LEAST = 2  # troubles, however slow the machine is


class Proxy:
    """The proxy in a process of its own: a port before each that is dialled."""

    def __init__(self, ports: dict[int, int]) -> None:
        pairs = [f"{port}:{to}" for port, to in ports.items()]
        self.ports = [*ports]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faultsim.proxy", *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def set(self, port: int, mode: str) -> None:
        """Another mood of one port."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{port} {mode}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class Chaos:
    """One run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.here = Here(
            tables(SERVERS, devices=2, active=2, cloud={"name": "async", "first": SERVERS}),
            plain=False,
        )
        inner = free_ports(2 * (SERVERS + 1))
        outer, inner = inner[: SERVERS + 1], inner[SERVERS + 1 :]
        dialled = [f"127.0.0.1:{port}" for port in outer]
        self.here.set_options(folder, coordinator=dialled[0], servers=tuple(dialled[1:]))
        actors = [COORDINATOR, *(server_actor(n) for n in range(SERVERS))]
        binds = {actor: f"127.0.0.1:{port}" for actor, port in zip(actors, inner, strict=True)}
        self.proxy = Proxy(dict(zip(outer, inner, strict=True)))
        self.hurt: Hurt = start(self.here, folder, None, lambda _: None, binds)
        self.done: Counter[str] = Counter()
        self._deck: list[str] = []
        self._latest = -1
        self.recovered: list[float] = []

    def round(self) -> int:
        """How far the coordinator was when it last answered."""
        status = ask_status(self.here.options(self.folder).folder_of(COORDINATOR)) or {}
        self._latest = max(self._latest, int(status.get("round", -1)))
        return self._latest

    def wait(self, seconds: float) -> None:
        """Let it run, and start again what has died."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.hurt.supervisor.look()
            time.sleep(0.05)

    def wait_for_round(self, goal: int) -> float:
        """Until the coordinator is there; seconds that it took."""
        began = time.monotonic()
        while self.round() < goal:
            assert time.monotonic() - began < PATIENCE_S, f"no round {goal} in {PATIENCE_S:.0f} s"
            self.wait(0.1)
        return time.monotonic() - began

    def play(self, seconds: float) -> None:
        """One trouble after the other, each followed by the time until the next round."""
        self.wait_for_round(1)
        until = time.monotonic() + seconds
        while time.monotonic() < until or self.done.total() < LEAST:
            self._trouble()
            self.recovered.append(self.wait_for_round(self.round() + 1))
            self.wait(self.chance.uniform(0.0, 1.0))

    def _trouble(self) -> None:
        if not self._deck:
            self._deck = self.chance.sample(KINDS, len(KINDS))
        kind = self._deck.pop()
        self.done[kind] += 1
        if kind in ("kill", "stop"):
            child = self.chance.choice(self.hurt.supervisor.running)
            with self._signalled(child.pid or 0, kind):
                self.wait(0.0 if kind == "kill" else self.chance.uniform(0.2, 4.0))
            return
        port = self.chance.choice(self.proxy.ports)
        self.proxy.set(port, kind)
        self.wait(self.chance.uniform(0.5, 7.0))
        self.proxy.set(port, "open")

    @contextlib.contextmanager
    def _signalled(self, pid: int, kind: str) -> Iterator[None]:
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        yield
        if kind == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def conclude(self) -> dict[str, Any]:
        """Stop everybody; check logs and models."""
        rounds, restarts = self.round(), self.hurt.supervisor.restarts
        self.hurt.stop()
        self.proxy.close()
        plan = self.hurt._deployment.blueprint
        logs = {actor: self._log(actor) for actor in actors_of(plan)}
        check_logs(plan, logs)
        times = sorted(self.recovered)
        return {
            "rounds": rounds,
            "restarts": restarts,
            "troubles": dict(self.done),
            "transitions": sum(map(len, logs.values())),
            "recovery_median_s": round(times[len(times) // 2], 2) if times else None,
            "recovery_worst_s": round(times[-1], 2) if times else None,
            "replayed": self.here.replays(self.folder),
        }

    def _log(self, actor: Actor) -> tuple[Any, ...]:
        store = FileStore(self.here.options(self.folder).folder_of(actor), read_only=True)
        try:
            return tuple(store.transitions())
        finally:
            store.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything held."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as path:
        chaos = Chaos(Path(path) / "run", asked.seed)
        try:
            chaos.play(asked.seconds)
            print(json.dumps(chaos.conclude()))
        finally:
            chaos.hurt.stop()
            chaos.proxy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
