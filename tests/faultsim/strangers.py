"""What one with a valid identity may do to the others: say what it must not, or be two processes
that take turns.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from faultsim.disk import Disk
from faultsim.schedule import Fault, Planned
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.errors import ProtocolError
from fedbcd.protocol import ServerState
from fedbcd.protocol.messages import (
    COORDINATOR,
    NOT_FINITE,
    Acknowledged,
    Activated,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Event,
    GlobalUpdated,
    Mixed,
    Restored,
    Resumed,
    ServerReady,
    Started,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    number_of,
    upload_ref,
)

if TYPE_CHECKING:
    from faultsim.world import Node, World

Forged = tuple[Event, Tensor | None, float]  # the last: its clock
TURNS_S, LASTS_S = (0.2, 0.9), 1.5  # how long one has its turn, and at least both


class Hostile:
    """Letters that have to be refused, and to change nothing."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def strike(self, planned: Planned) -> None:
        """A few of them, one after the other."""
        sender = planned.where
        to = self._world.links_of(sender)[-1][1] if sender.startswith("device/") else COORDINATOR
        for _ in range(3):
            self._say(sender, self._world.nodes[to])

    def _say(self, sender: str, host: "Node") -> None:
        role = host.role
        if role is None or host.dying is not None or host.paused_until > self._world.now:
            return
        if host.actor != COORDINATOR and role.machine.state is ServerState.NEW:
            return
        choices = (
            self._of_server(number_of(sender))
            if host.actor == COORDINATOR
            else self._of_device(number_of(sender), host)
        )
        event, model, clock = self._world.chance.choice(choices)
        before = role.store.length
        try:
            role.receive(Letter(sender, host.actor, event, model, clock), self._world.now)
        except ProtocolError:
            self._world.count(Fault.HOSTILE)
            after = role.store.length
            if after == before:
                return
        self._world.objections.append(f"{host.actor} took {event} from {sender}")

    def _model(self) -> Tensor:
        return torch.full((self._world.plan.size_F,), 0.5)

    def _of_device(self, device: int, host: "Node") -> list[Forged]:
        plan, machine, now = self._world.plan, host.role.machine, self._world.now
        other = self._world.chance.choice([d for d in range(plan.devices) if d != device])
        model = self._model()
        forged: list[Forged] = [
            (UpdateRequested(device=other, activation=0), None, now),
            (Uploaded(device=other, activation=0, model=upload_ref(other, 0, 0)), model, now),
            (_withdrawn(other, 0, 0), None, now),
            (Resumed(device=other, incarnation=0), None, now),
            (Acknowledged(activation=0), None, now),
            (Activated(activation=0, model="z/0"), model, now),
            (Restored(incarnation=1, activation=0, session=0, model="z/0"), model, now),
            (GlobalUpdated(phase=0, model="z/1"), model, now),
            (Mixed(phase=0, iteration=0, model="w/0/0"), model, now),
            (ServerReady(server=0, phase=0, iteration=0, model="z/0/0"), model, now),
            *((kind(device=other), None, now) for kind in (DeviceLeft, DeviceJoined, DeviceReset)),
            (DeviceLost(device=other, activation=0), None, now),
            (Started(), None, now),
            *((UpdateRequested(device=device, activation=0), None, clock) for clock in WRONG),
            (UpdateRequested(device=device, activation=-1), None, now),
        ]
        last = machine.last_of(device)
        if last is None or machine.is_restoring(device) or machine.is_awaited(device):
            return forged
        ahead, times = last + 2, machine.incarnation_of(device)
        forged += [
            (UpdateRequested(device=device, activation=ahead), None, now),
            (Uploaded(device=device, activation=ahead, model=f"x/{device}/{ahead}"), model, now),
            (_withdrawn(device, ahead, times), None, now),
            (Resumed(device=device, incarnation=times + 1), None, now),
        ]
        again = Uploaded(
            device=device, activation=max(last, 0), model=upload_ref(device, max(last, 0), times)
        )
        if not machine.is_waiting_for(device, max(last, 0)):
            bad = (model[:-1], model * math.nan, model.double(), None)
            forged += [(again, wrong, now) for wrong in bad]
        if not machine.is_waiting_for(device, last + 1):
            handle = upload_ref(device, last + 1, times)
            forged.append((Uploaded(device=device, activation=last + 1, model=handle), model, now))
        return forged

    def _of_server(self, server: int) -> list[Forged]:
        plan, now = self._world.plan, self._world.now
        size, dtype = plan.report
        other, model = (server + 1) % len(plan.servers), torch.zeros(size, dtype=dtype)
        mine = ServerReady(server=server, phase=0, iteration=0, model="z/0")
        return [
            (ServerReady(server=other, phase=0, iteration=0, model="z/0"), model, now),
            (ServerReady(server=99, phase=0, iteration=0, model="z/0"), model, now),
            (ServerReady(server=server, phase=0, iteration=-1, model="z/0"), model, now),
            (GlobalUpdated(phase=0, model="z/1"), model, now),
            (Mixed(phase=0, iteration=0, model="w/0/0"), model, now),
            (UpdateRequested(device=0, activation=0), None, now),
            (Uploaded(device=0, activation=0, model="x/0/0"), self._model(), now),
            *((mine, wrong, now) for wrong in (model[:-1], model + math.nan, model.half(), None)),
            *((mine, model, clock) for clock in WRONG),
        ]


WRONG = (-1.0, math.inf, math.nan)  # clocks


def _withdrawn(device: int, activation: int, incarnation: int) -> Withdrawn:
    counters = {"device": device, "activation": activation, "incarnation": incarnation}
    return Withdrawn(**counters, reason=NOT_FINITE)


@dataclass
class Parked:
    """The one of two that has not its turn."""

    disk: Disk
    role: Any
    committed: int


class Twins:
    """A device's machine was copied while it ran. Both are the same to everybody; whoever connects
    later has the link, and the other one's letters go nowhere.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._parked: dict[str, Parked] = {}

    def strike(self, planned: Planned) -> None:
        """The second begins at once."""
        node = self._world.nodes[planned.where]
        if node.role is None or node.actor in self._parked:
            return
        self._world.count(Fault.TWIN)
        node.was_reset = True
        disk = Disk(node.disk.chance, 0)
        disk.put_back(node.disk.copy())
        self._parked[node.actor] = Parked(disk, None, disk.length())
        self._world.after(LASTS_S + planned.length, lambda: self._end(node))
        self._take_turns(node)

    def _take_turns(self, node: "Node") -> None:
        if node.actor in self._parked:
            self._swap(node)
            wait = self._world.chance.uniform(*TURNS_S)
            self._world.after(wait, lambda: self._take_turns(node))

    def _swap(self, node: "Node") -> None:
        self._world.leave(node)
        other = self._parked[node.actor]
        role = None if node.dying is not None else node.role
        self._parked[node.actor] = Parked(node.disk, role, node.committed)
        node.disk, node.role, node.committed = other.disk, other.role, other.committed
        node.doomed = node.dying = None
        self._world.come_back(node)

    def _end(self, node: "Node") -> None:
        other = self._parked.pop(node.actor, None)
        if other is not None:
            node.lives.append(tuple(other.disk.log))

    def end_all(self) -> None:
        """Somebody has noticed."""
        for actor in [*self._parked]:
            self._end(self._world.nodes[actor])
