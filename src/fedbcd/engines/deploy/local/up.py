"""A whole deployment on this machine: coordinator, servers and devices as children of this process,
watched until the rounds are done.
"""

import gc
import math
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.local.growing_log import GrowingLog, Settled
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.supervisor import Child, Supervisor
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.base import run_process
from fedbcd.engines.deploy.processes.clock import AHEAD_S, TICK_S, SteadyClock
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.setup import rehearse
from fedbcd.errors import ConfigError, FedBCDError
from fedbcd.protocol.messages import COORDINATOR, Actor, device_actor, server_actor
from fedbcd.spec import RunSpec

PORTS = (
    20_000,
    30_000,
)  # below the ports that outgoing connections take, so that a restarted server finds its own free
LOOK_S = 1.0  # between two looks at the children
WEIGH_S = 30.0  # between two looks at their memory, which take longer
SETTLE_S = 15.0  # how long the servers of the last mix have to take its answer,
SETTLE_BYTES_PER_S = 1e7  # and longer for a large model, at this rate
ASK_DEVICES = 20  # devices asked at each look, in turn, how far their logs are


@dataclass
class View:
    """What there is to see of a running deployment."""

    coordinator: dict[str, Any] = field(default_factory=dict)
    servers: dict[int, dict[str, Any]] = field(default_factory=dict)
    running: int = 0
    restarts: int = 0
    memory_bytes: int = 0
    crashed: list[Child] = field(default_factory=list)  # ended for good although the run goes on

    @property
    def finished(self) -> bool:
        """Whether the last round is over and every server of its mix has taken the answer."""
        if not self.coordinator.get("finished"):
            return False
        released = {
            int(server): phase for server, phase in self.coordinator.get("released", {}).items()
        }
        return all(
            self.servers.get(server, {}).get("phase", -1) > phase
            for server, phase in released.items()
        )


def actors_of(blueprint: Blueprint) -> list[Actor]:
    servers = [server_actor(n) for n in range(len(blueprint.servers))]
    return [COORDINATOR, *servers, *(device_actor(i) for i in range(blueprint.devices))]


def rehearse_apart(spec: RunSpec, federation: Federation) -> None:
    """Refuse a job whose own code fails. A process of its own tries it: beside a GPU, one that has
    taken gradients can no longer fork the roles.
    """
    context = multiprocessing.get_context("fork")
    heard, said = context.Pipe(duplex=False)
    child = context.Process(target=_rehearse, args=(said, spec, federation))
    child.start()
    said.close()
    try:
        sentence = heard.recv_bytes().decode()
    except EOFError:  # nothing to say
        return
    finally:
        child.join()
    raise ConfigError(sentence)


def _rehearse(said: Connection, spec: RunSpec, federation: Federation) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's, and would wait for them for ever
    gc.freeze()  # what may wait for threads of the parent
    try:
        rehearse(spec, federation)
    except FedBCDError as error:
        said.send_bytes(str(error).encode())


def make_certificates(folder: Path, blueprint: Blueprint) -> None:
    """An authority of this deployment's own, and a certificate for everybody in it."""
    authority = Authority.create(folder)
    authority.issue("operator")
    for actor in actors_of(blueprint):
        home = (
            server_actor(blueprint.home_of(int(actor.rpartition("/")[2])))
            if actor.startswith("device/")
            else None
        )
        authority.issue(actor, at=home)


def make_stores(options: Deploy, blueprint: Blueprint) -> None:
    """Begin the stores of a fresh deployment: a child that is started, or started again, never
    begins that of a server or coordinator.
    """
    for actor in actors_of(blueprint):
        if not actor.startswith("device/"):
            FileStore(options.folder_of(actor), begin=True).close()


def check_stores(options: Deploy, blueprint: Blueprint) -> None:
    """Refuse to go on with a deployment in which a server or the coordinator has lost its store."""
    for actor in actors_of(blueprint):
        if not actor.startswith("device/"):
            FileStore(options.folder_of(actor)).close()


def free_ports(number: int) -> list[int]:
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(range(*PORTS), min(number * 20 + 200, PORTS[1] - PORTS[0])):
            if len(found) == number:
                break
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    if len(found) < number:
        raise ConfigError(
            f"fewer than {number} of the ports {PORTS[0]} to {PORTS[1]} are free on this machine;"
            " stop what uses them"
        )
    return found


def start_up_s(processes: int) -> float:
    """How long processes take to start and connect; the clock of the run starts after that."""
    return 1.0 + 0.2 * processes


class Up:
    """Children of this process that play a deployment. The parent has one thread and only looks."""

    def __init__(self, deployment: Deployment, out: Path, log: GrowingLog | None = None) -> None:
        """`log` grows while the deployment runs; without one it is made at the end."""
        self._deployment = deployment
        self._log = log
        self._grows = log is not None
        self._settled: dict[Actor, tuple[int, Settled]] = {}  # with the process that said so
        self._turn = 0  # of the devices that are asked next
        self._options = deployment.options
        self._clock = SteadyClock(
            deployment.options.epoch
        )  # of all children: one that starts later begins where the others are
        self._actors = actors_of(deployment.blueprint)
        self.supervisor = Supervisor(self._play, out / "logs")
        self._memory = 0
        self._peak = 0
        self._weighed_at = -WEIGH_S

    def _play(self, actor: Actor) -> int:
        return int(
            run_process(lambda: replace(self._deployment, not_before=self._now()).process(actor))
        )

    def _now(self) -> float:
        """By this process's clock, after what the log tells."""
        self._clock.begin_at(-math.inf if self._log is None else self._log.clock + TICK_S)
        return self._clock.now()

    def start(self) -> None:
        self.supervisor.start(self._actors)

    def watch(self, should_stop: Callable[[], bool]) -> Iterator[View]:
        crashed: list[Child] = []
        settled_by: float | None = None
        while not should_stop():
            crashed += self.supervisor.look()
            view = self.look(crashed)
            yield view
            if view.coordinator.get("finished"):
                settled_by = (
                    settled_by
                    or time.monotonic()
                    + SETTLE_S
                    + self._deployment.blueprint.start.nbytes / SETTLE_BYTES_PER_S
                )
            if view.finished or (settled_by is not None and time.monotonic() > settled_by):
                return
            if any(not child.actor.startswith("device/") for child in crashed):
                return  # without it there is no end
            time.sleep(LOOK_S)

    def look(self, crashed: list[Child]) -> View:
        self._now()
        servers = len(self._deployment.blueprint.servers)
        found = {
            n: ask_status(self._options.folder_of(server_actor(n))) or {} for n in range(servers)
        }
        coordinator = ask_status(self._options.folder_of(COORDINATOR)) or {}
        self._grow(
            {COORDINATOR: coordinator, **{server_actor(n): status for n, status in found.items()}}
        )
        self._weigh()
        return View(
            coordinator,
            found,
            len(self.supervisor.running),
            self.supervisor.restarts,
            self._memory,
            crashed,
        )

    def _grow(self, statuses: dict[Actor, dict[str, Any]], until: float = math.inf) -> None:
        if self._log is None or not self._grows:
            return
        devices = [actor for actor in self._actors if actor.startswith("device/")]
        asked = min(ASK_DEVICES, len(devices))
        chosen = [devices[(self._turn + k) % len(devices)] for k in range(asked)]
        self._turn += asked
        for actor, status in {**statuses, **{actor: self._ask(actor) for actor in chosen}}.items():
            pid, said = self.supervisor.children[actor].pid, Settled.of(status)
            if said is not None and pid is not None and status.get("pid") == pid:
                is_new = (
                    self._settled.get(actor, (None, said))[0] != pid
                )  # its store may be another one, with as many events
                self._settled[actor] = (pid, said._replace(events=-1) if is_new else said)
        known: dict[Actor, Settled] = {}
        for child in self.supervisor.running:
            pid, said = self._settled.get(child.actor, (None, None))
            known[child.actor] = (
                said if said is not None and pid == child.pid else Settled(self._log.clock, -1)
            )
        try:
            self._log.grow(known, until)
        except (
            FedBCDError,
            OSError,
        ) as error:  # the run is worth more than its log, which can be made from the stores later
            sys.stderr.write(f"the log does not grow any more: {error}\n")
            self._grows = False

    def _ask(self, actor: Actor) -> dict[str, Any]:
        return (
            {}
            if self.supervisor.children[actor].pid is None
            else ask_status(self._options.folder_of(actor)) or {}
        )

    def _weigh(self) -> None:
        if time.monotonic() >= self._weighed_at + WEIGH_S:
            self._weighed_at = time.monotonic()
            self._memory = self.supervisor.memory_bytes()
            self._peak = max(self._peak, self._memory)

    def facts(self) -> dict[str, Any]:
        """What is worth keeping of a deployment before it is stopped: processes, memory, restarts,
        bytes.

        Memory is the most that all processes together used at any look (PSS: shared pages count
        once). Bytes are those of frames on the links between devices and servers, per two models
        that travelled; the least that an activation needs is one down and one up.
        """
        seen = [
            ask_status(self._options.folder_of(actor)) or {}
            for actor in self._actors
            if actor.startswith("device/")
        ]
        models = sum(status.get("models", 0) for status in seen)
        sent = sum(
            status.get("totals", {}).get(key, 0.0)
            for status in seen
            for key in ("bytes_in", "bytes_out")
        )
        least = 2 * self._deployment.blueprint.start.nbytes
        each = 2 * sent / models if models else 0.0
        return {
            "processes": len(self._actors),
            "memory_bytes": max(self._peak, self.supervisor.memory_bytes()),
            "restarts": self.supervisor.restarts,
            "bytes_per_activation": round(each),
            "bytes_least": least,
            "bytes_over_least": round(each / least - 1, 6) if models else 0.0,
        }

    def stop(self) -> dict[Actor, int]:
        """Stop devices, then servers, then the coordinator; their exit codes."""
        codes: dict[Actor, int] = {}
        for kind in ("device/", "server/", COORDINATOR):
            codes |= self.supervisor.stop(
                [actor for actor in self._actors if actor.startswith(kind)]
            )
        self._grow({}, until=self._now() + AHEAD_S)
        return codes
