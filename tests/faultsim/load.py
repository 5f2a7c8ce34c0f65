"""One real server (and coordinator) with many light clients that train nothing: they ask, upload and ask again, as fast as they are let.

`python -m faultsim.load --devices 1000 --seconds 60` prints uploads a second, p50 and p99 of each call, and how memory, file descriptors
and threads of the server change (a line through what was seen in the second half, per minute).
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedbcd as fb
from faultsim.processes import Hurt
from fedbcd.engines.deploy.assemble import Deployment
from fedbcd.engines.deploy.blueprint import Blueprint
from fedbcd.engines.deploy.codec import Declared
from fedbcd.engines.deploy.letter import Letter
from fedbcd.engines.deploy.link import Dialer
from fedbcd.engines.deploy.logs import Journal
from fedbcd.engines.deploy.options import Deploy
from fedbcd.engines.deploy.session import LinkOptions
from fedbcd.engines.deploy.tls import Plain
from fedbcd.engines.deploy.up import free_ports
from fedbcd.engines.settings import Settings
from fedbcd.models import logistic
from fedbcd.protocol.messages import COORDINATOR, Acknowledged, Activated, UpdateRequested, Uploaded

AGAIN_S = 15.0  # the first pause; it doubles, as that of a real device does


class Client:
    """A device without data: it keeps one connection and one number."""

    def __init__(self, number: int, plan: Blueprint, declared: Declared, port: int, times: dict[str, list[float]]) -> None:
        self.number = number
        self.activation = 0
        self._plan = plan
        self._times = times
        self._since = 0.0
        self._model = plan.start + number / 1000
        options = LinkOptions(gone_s=60.0, keepalive_s=60.0)
        self.dialer = Dialer(
            f"device/{number}",
            "server/0",
            [f"127.0.0.1:{port}"],
            model=declared,
            security=Plain(),
            on_letter=self.heard,
            about=self._about,
            options=options,
            journal=Journal(f"device/{number}", "error"),
        )

    def _about(self) -> dict[str, Any]:
        counters = {"activation": self.activation, "incarnation": 0, "uploading": False}
        return {"store": f"light-{self.number}", "run": self._plan.fingerprint(), "size": self._plan.size_F, **counters}

    async def ask(self) -> None:
        """Ask, and again as long as nobody answers, less and less often."""
        pause = AGAIN_S
        while True:
            before = self.activation
            await self._say(UpdateRequested(device=self.number, activation=before), None)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 120.0) if self.activation == before else AGAIN_S

    async def heard(self, letter: Letter) -> None:
        """Let in: upload at once. Acknowledged: ask for the next."""
        now = time.monotonic()
        if isinstance(letter.event, Activated) and letter.event.activation == self.activation:
            handle = f"x/{self.number}/{self.activation}"
            self._since = now
            await self._say(Uploaded(device=self.number, activation=self.activation, model=handle), self._model)
        elif isinstance(letter.event, Acknowledged) and letter.event.activation == self.activation:
            self._times["upload"].append(now - self._since)
            self.activation += 1
            await self._say(UpdateRequested(device=self.number, activation=self.activation), None)

    async def _say(self, event: UpdateRequested | Uploaded, model: torch.Tensor | None) -> None:
        await self.dialer.send(Letter(f"device/{self.number}", "server/0", event, model, 0.0))


def deployment(folder: Path, devices: int, active: int) -> Deployment:
    """One server, one coordinator, a model of 650 values."""
    ports = free_ports(2)
    options = Deploy(
        folder=str(folder),
        plain=True,
        coordinator=f"127.0.0.1:{ports[0]}",
        servers=(f"127.0.0.1:{ports[1]}",),
        samples=4,
        epoch=time.time(),
    )
    settings = Settings(fb.FedBCD(device_step=0.02, batch=4), fb.AsyncCloud(first=1), active=active, max_batch=1)
    return Deployment.private(settings, [range(devices)], partial(logistic, 64, 10), options)


def vitals(pid: int) -> tuple[float, int, int, float]:
    """Resident MiB, open files, threads and CPU seconds of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), cpu


def slope_per_minute(seen: Sequence[tuple[float, float]]) -> float:
    """Of the line through these points."""
    return 60 * statistics.linear_regression(*zip(*seen, strict=True)).slope if len(seen) > 2 else 0.0


async def drive(plan: Deployment, devices: int, seconds: float, pid: int) -> dict[str, Any]:
    """All clients, for a while."""
    times: dict[str, list[float]] = {"upload": []}
    port = int(plan.options.servers[0].rpartition(":")[2])
    clients = [Client(n, plan.blueprint, plan.declared, port, times) for n in range(devices)]
    tasks = [asyncio.create_task(client.dialer.run()) for client in clients]
    async with asyncio.timeout(120):
        while sum(bool(client.dialer.connected) for client in clients) < devices:
            await asyncio.sleep(0.2)
    tasks += [asyncio.create_task(client.ask()) for client in clients]
    began, seen = time.monotonic(), []
    cpu_before = vitals(pid)[3]
    while time.monotonic() - began < seconds:
        await asyncio.sleep(min(1.0, seconds / 10))
        seen.append((time.monotonic() - began, *vitals(pid)))
    late = [row for row in seen if row[0] > seconds / 2]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    took = sorted(times["upload"])
    return {
        "devices": devices,
        "seconds": round(seen[-1][0], 1),
        "uploads_per_s": round(len(took) / seen[-1][0], 1),
        "upload_p50_ms": round(1000 * took[len(took) // 2], 1),
        "upload_p99_ms": round(1000 * took[len(took) * 99 // 100], 1),
        "server_cpu_share": round((seen[-1][4] - cpu_before) / seen[-1][0], 2),
        "server_mib": round(seen[-1][1], 1),
        "mib_per_minute": round(slope_per_minute([(row[0], row[1]) for row in late]), 2),
        "files_per_minute": round(slope_per_minute([(row[0], row[2]) for row in late]), 2),
        "threads_per_minute": round(slope_per_minute([(row[0], row[3]) for row in late]), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one object."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.load", description=__doc__)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", help="where to keep the stores; /dev/shm leaves the disk out of it")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=asked.folder) as path:
        plan = deployment(Path(path) / "state", asked.devices, min(asked.active, asked.devices))
        hurt = Hurt(replace(plan, log_level="error"), Path(path), lambda _: None, {})
        hurt._actors = [COORDINATOR, "server/0"]
        hurt.start()
        pid = hurt.nursery.children["server/0"].pid
        assert pid is not None
        try:
            print(json.dumps(asyncio.run(drive(plan, asked.devices, asked.seconds, pid))))
        finally:
            hurt.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
