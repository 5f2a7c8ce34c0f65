"""Real servers and a coordinator with many light clients that train nothing: they ask, upload and
ask again, as fast as they are let.

`python -m faultsim.load --servers 10 --devices 1000 --seconds 60` prints uploads a second, p50 and
p99 of each call, where the CPU time of a server goes, and how memory, file descriptors and threads
of the first server change (a line through what was seen in the second half, per minute). The
clients of each server are a process of their own. `--every 300` tells this again and again while it
runs.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbcd as fb
from faultsim.causes import Causes, shares
from faultsim.processes import Hurt
from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.tls import Credentials, Plain
from fedbcd.engines.deploy.links.traffic import LinkOptions
from fedbcd.engines.deploy.local.up import free_ports, make_certificates, make_stores
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.logs import log_of
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    UpdateRequested,
    Uploaded,
    server_actor,
)
from fedbcd.spec import RunSpec

AGAIN_S = 15.0  # the first pause; it doubles, as that of a real device does
CONNECT_S = 900.0
Times = dict[str, list[float]]


class Client:
    """A device without data: it keeps one connection and one number."""

    def __init__(self, number: int, plan: Deployment, run: str, times: Times) -> None:
        self.number = number
        self.activation = 0
        self._run = run
        self._plan = plan.blueprint
        self._epoch = plan.options.epoch
        self._server = plan.blueprint.home_of(number)
        self._times = times
        self._asked = self._uploaded = time.monotonic()
        self._model = plan.blueprint.start
        me = f"device/{number}"
        self.dialer = Dialer(
            me,
            server_actor(self._server),
            [plan.options.servers[self._server]],
            model=plan.declared,
            security=(
                Plain()
                if plan.options.plain
                else Credentials(plan.options.certificates_of(me), me, log_of(me, "error"))
            ),
            on_letter=self.heard,
            about=self._about,
            options=LinkOptions(gone_s=120.0),
            log=log_of(me, "error"),
        )

    def _about(self) -> dict[str, Any]:
        counters = {"activation": self.activation, "incarnation": 0, "uploading": False}
        return {
            "store": f"light-{self.number}",
            "run": self._run,
            "size": self._plan.size_F,
            **counters,
        }

    async def ask(self) -> None:
        """Ask, and again as long as nobody answers, less and less often."""
        pause = AGAIN_S
        await self._ask()
        while True:
            before = self.activation
            await asyncio.sleep(pause)
            if self.activation == before:
                await self._say(UpdateRequested(device=self.number, activation=before), None)
            pause = min(2 * pause, 120.0) if self.activation == before else AGAIN_S

    async def heard(self, letter: Letter) -> None:
        """Let in: upload at once. Acknowledged: ask for the next."""
        now = time.monotonic()
        if isinstance(letter.event, Activated) and letter.event.activation == self.activation:
            self._times["request"].append(now - self._asked)
            self._times["download"].append(time.time() - self._epoch - letter.clock)
            self._uploaded = now
            handle = f"x/{self.number}/{self.activation}"
            await self._say(
                Uploaded(device=self.number, activation=self.activation, model=handle), self._model
            )
        elif isinstance(letter.event, Acknowledged) and letter.event.activation == self.activation:
            self._times["upload"].append(now - self._uploaded)
            self.activation += 1
            await self._ask()

    async def _ask(self) -> None:
        self._asked = time.monotonic()
        await self._say(UpdateRequested(device=self.number, activation=self.activation), None)

    async def _say(self, event: UpdateRequested | Uploaded, model: torch.Tensor | None) -> None:
        await self.dialer.send(
            Letter(f"device/{self.number}", server_actor(self._server), event, model, 0.0)
        )


def deployment(
    folder: Path, servers: int, devices: int, active: int, values: int, plain: bool
) -> Deployment:
    """Servers with so many devices each, one coordinator, a model of so many values."""
    ports = free_ports(servers + 1)
    options = Deploy(
        folder=str(folder / "state"),
        certificates=None if plain else str(folder / "certs"),
        plain=plain,
        coordinator=f"127.0.0.1:{ports[0]}",
        servers=tuple(f"127.0.0.1:{port}" for port in ports[1:]),
        samples=4,
        lost_s=(60.0, 600.0),
        peer_s=(60.0, 120.0),
        epoch=time.time(),
    )
    spec = RunSpec(
        fb.FedBCD(device_step=0.02, batch=4),
        fb.AsyncCloud(first=max(servers // 2, 1)),
        active=active,
        max_batch=1,
    )
    groups = [range(n * devices, (n + 1) * devices) for n in range(servers)]
    plan = Deployment.private(spec, groups, partial(nn.Linear, values - 1, 1), options)
    if not plain:
        make_certificates(folder / "certs", plan.blueprint)
    make_stores(options, plan.blueprint)
    return plan


def vitals(pid: int) -> tuple[float, int, int, float]:
    """MiB of its own (what is mapped from files comes and goes with the system's need), open files,
    threads and CPU seconds of a process.
    """
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":" in line
    )
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return (
        int(status["RssAnon"].split()[0]) / 1024,
        len(os.listdir(f"/proc/{pid}/fd")),
        int(status["Threads"]),
        cpu,
    )


def slope_per_minute(seen: Sequence[tuple[float, float]]) -> float:
    """Of the line through these points."""
    return (
        60 * statistics.linear_regression(*zip(*seen, strict=True)).slope if len(seen) > 2 else 0.0
    )


# ------------------------------------------------------------------------------------------------
# clients
def clients(plan: Deployment, run: str, server: int, pipe: Connection) -> None:
    """All devices of one server, in a process of their own: says when they are connected, is told
    when to begin and to end.
    """
    torch.set_num_threads(1)
    pipe.send(asyncio.run(_clients(plan, run, server, pipe)))


async def _clients(plan: Deployment, run: str, server: int, pipe: Connection) -> Times:
    times: Times = defaultdict(list)
    everybody = [Client(number, plan, run, times) for number in plan.blueprint.servers[server]]
    tasks = []
    for client in everybody:  # a few at a time, so that nobody's handshake times out
        tasks.append(asyncio.create_task(client.dialer.run()))
        while sum(not c.dialer.connected for c in everybody[: len(tasks)]) > 20:
            await asyncio.sleep(0.01)
    while not all(client.dialer.connected for client in everybody):
        await asyncio.sleep(0.1)
    pipe.send("connected")
    await asyncio.to_thread(pipe.recv)
    tasks += [asyncio.create_task(client.ask()) for client in everybody]
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return dict(times)


@contextmanager
def crowd(plan: Deployment) -> Iterator[list[Connection]]:
    """The processes of all clients."""
    context, run = get_context("fork"), plan.blueprint.fingerprint
    pairs = [context.Pipe() for _ in plan.blueprint.servers]
    children = [
        context.Process(target=clients, args=(plan, run, n, there))
        for n, (_, there) in enumerate(pairs)
    ]
    for child in children:
        child.start()
    try:
        yield [here for here, _ in pairs]
    finally:
        for child in children:
            child.kill()
            child.join()


# ------------------------------------------------------------------------------------------------
# measuring
@dataclass
class Watched:
    """What was seen of one process."""

    pid: int
    began: float = field(default_factory=time.monotonic)
    seen: list[tuple[float, float, int, int, float]] = field(default_factory=list)

    def look(self) -> None:
        """Once more."""
        self.seen.append((time.monotonic() - self.began, *vitals(self.pid)))

    def report(self) -> dict[str, Any]:
        """Of the whole time, and how things change in its second half."""
        late = [row for row in self.seen if row[0] > self.seen[-1][0] / 2]
        return {
            "seconds": round(self.seen[-1][0], 1),
            "server_cpu_share": round(
                (self.seen[-1][4] - self.seen[0][4]) / (self.seen[-1][0] - self.seen[0][0]), 2
            ),
            "server_mib": round(self.seen[-1][1], 1),
            "most_mib": round(max(row[1] for row in self.seen), 1),
            "mib_per_minute_all": round(
                slope_per_minute([(row[0], row[1]) for row in self.seen]), 3
            ),
            "mib_per_minute": round(slope_per_minute([(row[0], row[1]) for row in late]), 3),
            "files_per_minute": round(slope_per_minute([(row[0], row[2]) for row in late]), 2),
            "threads_per_minute": round(slope_per_minute([(row[0], row[3]) for row in late]), 2),
        }


def drive(
    plan: Deployment, seconds: float, pid: int, every: float, enough: Callable[[], bool]
) -> dict[str, Any]:
    """All clients, for a while, and until there is enough to see."""
    with crowd(plan) as pipes:
        began = time.monotonic()
        for pipe in pipes:
            assert pipe.poll(max(CONNECT_S - (time.monotonic() - began), 0)), (
                "the clients of a server could not connect"
            )
            pipe.recv()
        connected_s = time.monotonic() - began
        for pipe in pipes:
            pipe.send("begin")
        watched, told = Watched(pid), 1
        while not watched.seen or watched.seen[-1][0] < seconds or not enough():
            time.sleep(min(1.0, seconds / 10))
            watched.look()
            if watched.seen[-1][0] > told * every:
                print(json.dumps(watched.report()), flush=True)
                told += 1
        for pipe in pipes:
            pipe.send("end")
        heard = [pipe.recv() for pipe in pipes]
    times = {
        call: sorted(t for found in heard for t in found.get(call, []))
        for call in ("request", "download", "upload")
    }
    calls = {
        f"{call}_ms": [round(1000 * took[len(took) * share // 100], 1) for share in (50, 99)]
        for call, took in times.items()
        if took
    }
    uploads = {"uploads_per_s": round(len(times["upload"]) / watched.seen[-1][0], 1)}
    return {"connected_s": round(connected_s, 1), **uploads, **calls, **watched.report()}


def _before(actor: str, causes: Path, slow_sync: float) -> None:
    if slow_sync:
        sync: Callable[[int], None] = os.fsync
        os.fsync = lambda handle: (time.sleep(slow_sync), sync(handle))[1]
    if actor == "server/0":
        Causes(causes).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one object."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.load", description=__doc__)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1000, help="of each server")
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--values", type=int, default=650, help="of the model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--every",
        type=float,
        default=float("inf"),
        help="tell what was seen so far, every so many seconds",
    )
    parser.add_argument(
        "--folder", help="where to keep the stores; /dev/shm leaves the disk out of it"
    )
    parser.add_argument(
        "--slow-sync",
        type=float,
        default=0.0,
        help="seconds that every sync of a server's disk takes longer",
    )
    parser.add_argument("--tls", action="store_true")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=asked.folder) as path:
        plan = deployment(
            Path(path),
            asked.servers,
            asked.devices,
            min(asked.active, asked.devices),
            asked.values,
            plain=not asked.tls,
        )
        causes = Path(path) / "causes.json"
        hurt = Hurt(
            replace(plan, log_level="error"),
            Path(path),
            lambda actor: _before(actor, causes, asked.slow_sync),
            {},
        )
        hurt._actors = [COORDINATOR, *map(server_actor, range(asked.servers))]
        hurt.start()
        pid = hurt.supervisor.children["server/0"].pid
        assert pid is not None
        try:
            found = drive(
                plan,
                asked.seconds,
                pid,
                asked.every,
                lambda: hurt.look([]).coordinator.get("round", 0) >= 1,
            )
            rounds = hurt.look([]).coordinator.get("round")
            who = {"servers": asked.servers, "devices": asked.devices, "rounds": rounds}
            print(json.dumps({**who, **found, "cpu": shares(causes)}))
        finally:
            hurt.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
