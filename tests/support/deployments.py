"""What the tests of the deployment share: a post office that carries letters between real roles
with real stores, and may be unkind.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.local.merged_log import header_of
from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.processes.failpoints import Failpoint, Stopped
from fedbcd.engines.deploy.roles.blueprint import Blueprint, OwnData
from fedbcd.engines.deploy.roles.checks import TrustLimits
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import ProtocolError, Refused
from fedbcd.models import logistic
from fedbcd.protocol import DeviceState, ServerState
from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    Event,
    OfflineDue,
    RetryDue,
    Started,
    Woke,
    device_actor,
    number_of,
    server_actor,
)
from fedbcd.spec import RunSpec
from support.merging import merge

SERVERS, DEVICES = 3, 9
MODEL: Callable[[], nn.Module] = partial(logistic, 64, 10)
AnyRole = DeviceRole | ServerRole | CoordinatorRole

BCD = fb.FedBCD(device_step=0.05, batch=4)
BCDI = fb.FedBCDI(device_step=0.05, batch=4)
TWICE = fb.FedBCD(device_step=0.05, batch=4, cloud_iterations=2)
CASES: dict[str, tuple[fb.Algorithm, fb.Cloud]] = {
    "fedbcd-sync": (BCD, fb.SyncCloud()),
    "fedbcd-async": (BCD, fb.AsyncCloud(first=2)),
    "fedbcd-rigorous": (BCD, fb.RigorousCloud(first=2)),
    "fedbcd-graph": (BCD, fb.GraphCloud([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])),
    "fedbcd-dynamic": (BCD, fb.DynamicGraph([(0, 1), (1, 2)], first=2, link_failure=0.2)),
    "fedbcd-i-sync": (BCDI, fb.SyncCloud()),
    "fedbcd-i-async": (BCDI, fb.AsyncCloud(first=2)),
    "fedbcd-i-rigorous": (BCDI, fb.RigorousCloud(first=2)),
    "fedavg-sync": (fb.FedAvg(device_step=0.05, batch=4), fb.SyncCloud()),
    "fedprox-sync": (fb.FedProx(device_step=0.05, batch=4), fb.SyncCloud()),
    "fedprox-rigorous": (fb.FedProx(device_step=0.05, batch=4), fb.RigorousCloud(first=2)),
    "twice-sync": (TWICE, fb.SyncCloud()),
    "twice-async": (TWICE, fb.AsyncCloud(first=2)),
    "twice-rigorous": (TWICE, fb.RigorousCloud(first=2)),
}


class Normed(nn.Module):
    """A small model with batch-norm buffers, which travel with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


@cache
def federation(
    model: Callable[[], nn.Module] = MODEL, servers: int = SERVERS, devices: int = DEVICES
) -> fb.Federation:
    """A few devices with twelve digits each."""
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, devices, 3, 12)
    return fb.Federation.from_partition(
        model, nn.functional.cross_entropy, data.train, split, servers, transform=data.transform
    )


@dataclass
class Town:
    """A deployment in one process: every role with a store of its own, and a post office between
    them.
    """

    folder: Path
    spec: RunSpec
    federation: fb.Federation
    roles: dict[Actor, AnyRole] = field(default_factory=dict)
    post: list[Letter] = field(default_factory=list)
    now: float = 0.0
    refused: list[str] = field(default_factory=list)
    stopped: int = 0  # how often a role died at a failpoint
    limits: TrustLimits = field(default_factory=TrustLimits)
    declined: list[Refused] = field(
        default_factory=list
    )  # why what had come was not taken, though that it came had consequences
    offsets: dict[Actor, float] = field(
        default_factory=dict
    )  # by how many seconds clocks are wrong

    def __post_init__(self) -> None:
        self.acting = ""
        self.spec = replace(self.spec, max_batch=1)
        self.blueprint = Blueprint.of(self.spec, self.federation)
        self.late = set(self.spec.joins)

    @property
    def actors(self) -> list[Actor]:
        servers = [server_actor(n) for n in range(len(self.federation.servers))]
        return [
            COORDINATOR,
            *servers,
            *(device_actor(d) for d in range(self.federation.devices) if d not in self.late),
        ]

    # ---------------------------------------------------------------------------------------------
    # the roles
    def open(self, actor: Actor) -> AnyRole:
        """Start a role, or start it again; devices say hello to their server, servers to the
        coordinator.
        """
        store = FileStore(self.folder / actor, begin=True)
        try:
            self.roles[actor] = self._opened(actor, store)
        except Stopped:
            self.stopped += 1
            failpoints.disarm()
            store.close()
            return self.open(actor)
        self.connect(actor)
        return self.roles[actor]

    def _opened(self, actor: Actor, store: FileStore) -> AnyRole:
        if actor == COORDINATOR:
            return CoordinatorRole.open(store, self.blueprint, self.limits)
        if actor.startswith("server/"):
            return ServerRole.open(store, self.blueprint, number_of(actor), self.limits)
        device = number_of(actor)
        return DeviceRole.open(
            store, self.blueprint, device, OwnData.of(self.federation, device, self.spec.seed)
        )

    def connect(self, actor: Actor) -> None:
        if actor.startswith("device/"):
            self._greet(server_actor(self.blueprint.home_of(number_of(actor))), actor)
            return
        for peer in [a for a in self.roles if a != actor]:
            if actor == COORDINATOR and peer.startswith("server/"):
                self._greet(COORDINATOR, peer)
            elif actor.startswith("server/") and peer == COORDINATOR:
                self._greet(COORDINATOR, actor)
            elif (
                actor.startswith("server/")
                and peer.startswith("device/")
                and self.blueprint.home_of(number_of(peer)) == number_of(actor)
            ):
                self._greet(actor, peer)

    def _greet(self, host: Actor, guest: Actor) -> None:
        role = self.roles.get(host)
        if (
            isinstance(role, ServerRole) and role.machine.state is not ServerState.NEW
        ) or isinstance(role, CoordinatorRole):
            dialled = self.roles[guest]
            if isinstance(dialled, ServerRole) and not self._meets(dialled, role):
                return
            self.do(host, lambda: role.greet(guest, dialled.hello(), self.tick()))

    def _meets(self, server: ServerRole, coordinator: AnyRole) -> bool:
        """Whether the server takes it for its coordinator, which tells it its round."""
        try:
            server.coordinator.meet(coordinator.hello())
        except ProtocolError as error:
            self.refused.append(str(error))
            return False
        return True

    def start(self) -> None:
        for actor in self.actors:
            self.open(actor)
        for actor in self.actors:
            self.begin(actor)

    def begin(self, actor: Actor) -> None:
        role = self.roles.get(actor)
        if isinstance(role, ServerRole) and role.machine.state is ServerState.NEW:
            self.do(actor, lambda: role.tell(Started(), self.tick()))
            for peer in [a for a in self.roles if a.startswith("device/")]:
                if self.blueprint.home_of(number_of(peer)) == number_of(actor):
                    self._greet(actor, peer)

    def kill(self, actor: Actor) -> None:
        """As kill -9 does: nothing but the disk is left, and letters on their way to and from it
        are lost.
        """
        role = self.roles.pop(actor, None)
        if role is not None:
            role.store.close()

    def restart(self, actor: Actor) -> AnyRole:
        self.kill(actor)
        role = self.open(actor)
        self.begin(actor)
        return role

    def close(self) -> None:
        for actor in [*self.roles]:
            self.kill(actor)

    def tick(self) -> float:
        """A moment later; by the clock of the role that acts."""
        self.now += 1e-3
        return self.by_clock_of(self.acting)

    def by_clock_of(self, actor: Actor) -> float:
        return self.now + self.offsets.get(actor, 0.0)

    # ---------------------------------------------------------------------------------------------
    # delivery
    def do(self, actor: Actor, act: Callable[[], list[Letter]]) -> None:
        """Let a role act; at a failpoint it dies, and is started again."""
        self.acting = actor
        try:
            letters = act()
        except ProtocolError as error:
            self.refused.append(str(error))
            return
        except Stopped:
            self.stopped += 1
            failpoints.disarm()
            self.restart(actor)
            return
        self.post += letters

    def tell(self, actor: Actor, event: Event) -> None:
        role = self.roles[actor]
        self.do(actor, lambda: role.tell(event, self.tick()))

    def deliver(self, letter: Letter) -> None:
        role = self.roles.get(letter.to)
        if role is not None:
            self.do(letter.to, lambda: role.receive(letter, self.tick(), self.declined.append))

    def work(self, actor: Actor) -> None:
        role = self.roles[actor]
        assert isinstance(role, DeviceRole)
        if role.work is not None:
            self.do(actor, lambda: role.finish(role.compute(), self.tick()))

    def drain(self) -> None:
        """Deliver everything at once and in order, as the simulation does."""
        while self.post:
            self.deliver(self.post.pop(0))

    @property
    def rounds(self) -> int:
        role = self.roles[COORDINATOR]
        return role.machine.round  # type: ignore[union-attr]

    # ---------------------------------------------------------------------------------------------
    # the record
    def merged(self) -> tuple[Path, dict[str, Any]]:
        """The log of all roles; they are closed before."""
        self.close()
        found = [p.parent for p in self.folder.rglob("store.sqlite")]
        stores = {str(p.relative_to(self.folder)): FileStore(p, read_only=True) for p in found}
        out = self.folder / "events.jsonl"
        try:
            end = merge(stores, self.blueprint, header_of(self.spec, self.federation), out)
        finally:
            for store in stores.values():
                store.close()
        return out, end

    def replayed(self) -> dict[str, Any]:
        """Merge, replay exactly, and compare: `replay` raises when the digests differ."""
        out, end = self.merged()
        again = fb.replay(out, self.federation, exact=True)
        assert again["complete"]
        assert again["digest"] == end["digest"]
        return end


@dataclass
class Unkind:
    """A seeded network and power supply: letters are lost, repeated and overtaken, roles die, also
    in the middle of a step.
    """

    town: Town
    seed: int
    loss: float = 0.1
    repeat: float = 0.1
    death: float = 0.01
    fail: float = 0.02
    lost_disks: float = 0.0
    backups: float = 0.0  # a device's folder is copied now and then, and the copy put back later
    changes: float = 0.0  # a device joins, leaves or comes back
    give_up: float = 0.02
    points: tuple[Failpoint, ...] = tuple(Failpoint)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.deaths = 0

    def play(self, rounds: int, most: int = 20_000) -> None:
        """Until the coordinator has this many rounds."""
        town = self.town
        town.start()
        for _ in range(most):
            if town.rounds >= rounds:
                failpoints.disarm()
                return
            self._trouble()
            self._step()
        raise AssertionError(
            f"seed {self.seed}: only {town.rounds} of {rounds} rounds after {most} steps"
        )

    def calm(self) -> None:
        """The network is whole again: who has lost its memory connects and is put in step."""
        failpoints.disarm()
        for _ in range(3):
            self.town.drain()
            for actor in self.town.actors:
                if actor.startswith("device/"):
                    self.town.connect(actor)
        self.town.drain()

    def _trouble(self) -> None:
        chance, town = self.chance, self.town
        if chance.random() < self.fail:
            failpoints.arm(chance.choice(self.points), times=chance.randint(1, 3))
        if chance.random() < self.death:
            actor = chance.choice(town.actors)
            self.deaths += 1
            town.kill(actor)
            town.restart(actor)
        if chance.random() < self.lost_disks:
            self.lose_disk(chance.choice([a for a in town.actors if a.startswith("device/")]))

        if chance.random() < self.backups:
            self.back_up_or_restore(
                chance.choice([a for a in town.actors if a.startswith("device/")])
            )
        if chance.random() < self.changes:
            self._change(chance.choice(range(town.federation.devices)))

    def _change(self, device: int) -> None:
        town, actor = self.town, device_actor(device)
        home = server_actor(town.blueprint.home_of(device))
        server = town.roles[home]
        assert isinstance(server, ServerRole)
        if device not in server.machine.members:
            town.tell(home, DeviceJoined(device=device))
            if device in town.late:
                town.late.discard(device)
                town.open(actor)
        elif len(server.machine.members) > town.blueprint.active:
            town.tell(home, DeviceLeft(device=device))

    def back_up_or_restore(self, actor: Actor) -> None:
        copy = self.town.folder.parent / f"{self.town.folder.name}-backup" / actor
        self.town.kill(actor)
        if copy.exists():
            shutil.rmtree(self.town.folder / actor)
            shutil.move(copy, self.town.folder / actor)
        else:
            shutil.copytree(self.town.folder / actor, copy)
        self.town.restart(actor)

    def lose_disk(self, actor: Actor) -> None:
        self.town.kill(actor)
        shutil.rmtree(self.town.folder / actor)
        self.town.restart(actor)

    def _step(self) -> None:
        town, chance = self.town, self.chance
        if town.post and chance.random() < 0.7:
            letter = town.post.pop(chance.randrange(min(len(town.post), 8)))
            if chance.random() < self.repeat:
                town.post.append(letter)
            if chance.random() >= self.loss:
                town.deliver(letter)
            return
        actor = chance.choice(town.actors)
        role = town.roles[actor]
        if isinstance(role, DeviceRole):
            self._device(actor, role)
        elif isinstance(role, ServerRole):
            self._server(actor, role)

    def _device(self, actor: Actor, role: DeviceRole) -> None:
        if role.work is not None:
            self.town.work(actor)
        elif role.machine.state in (
            DeviceState.ASKING,
            DeviceState.UPLOADING,
            DeviceState.WITHDRAWING,
        ):
            offline = (
                self.spec_offline
                and role.machine.state is DeviceState.ASKING
                and self.chance.random() < 0.2
            )
            self.town.tell(actor, OfflineDue() if offline else RetryDue())
        else:
            offline = self.spec_offline and self.chance.random() < 0.5
            self.town.tell(actor, OfflineDue() if offline else Woke())

    @property
    def spec_offline(self) -> bool:
        return bool(self.town.blueprint.method.offline)

    def _server(self, actor: Actor, role: ServerRole) -> None:
        busy = [d for d in role.machine.members if role.machine.is_working(d)]
        if busy and self.chance.random() < self.give_up:
            device = self.chance.choice(busy)
            last = role.machine.last_of(device)
            assert last is not None
            self.town.tell(actor, DeviceLost(device=device, activation=last + 1))
        else:
            self.town.tell(actor, RetryDue())
