"""The logs of all roles as one event log in the simulation's format, with the digest of every x_i, x_prev and z_n at its end.

Times are hybrid logical, so in order of time causes come before effects. What a device did before it lost its disk is not in its
store; as far as it counted, it follows from its server's log: which model it was sent, and that it uploaded.
"""

import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.blueprint import DTYPE, Blueprint
from fedbcd.engines.deploy.store import Store
from fedbcd.engines.settings import Settings
from fedbcd.errors import RecordError
from fedbcd.eventlog import LogWriter, Transition
from fedbcd.protocol import Device, DeviceState
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    Event,
    ModelRef,
    Restored,
    Send,
    Trained,
    Uploaded,
    Woke,
    device_actor,
    number_of,
    server_actor,
    upload_ref,
)


def header_of(settings: Settings, federation: Federation, job: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The head of a deployment's log: devices train one at a time, each by itself."""
    return {"identity": replace(settings, max_batch=1).identity(federation), "job": dict(job or {})}


def merge(stores: Mapping[Actor, Store], blueprint: Blueprint, header: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the log of a deployment that has stopped to `out`; returns its end: transitions, rounds, clock, digest.

    A device without a store has not begun. Coordinator and servers must be there.
    """
    history = _History(stores, blueprint)
    log = LogWriter(out, header)
    count, clock, rounds = 0, 0.0, blueprint.coordinator_machine()
    try:
        for step in history.transitions():
            log.append(step.time, step.actor, step.event, list(step.commands))
            count, clock = count + 1, step.time
            if step.actor == COORDINATOR:
                rounds.handle(step.event)
        end = {"transitions": count, "rounds": rounds.round, "clock": clock, "digest": history.digest()}
        log.end(end)
    finally:
        log.close()
    return end


class _History:
    """All stores of a deployment, as one sequence of transitions and one state."""

    def __init__(self, stores: Mapping[Actor, Store], blueprint: Blueprint) -> None:
        for actor in (COORDINATOR, *(server_actor(n) for n in range(len(blueprint.servers)))):
            if actor not in stores:
                raise RecordError(f"the store of {actor} is missing; without it the run cannot be put together")
        self.stores = stores
        self.blueprint = blueprint
        self._granted: dict[int, Activated] = {}
        self._restored: dict[int, Restored] = {}  # what a device was last put in step with
        self._missing = self._unexplained()
        self._lost = {device: _LostDevice(blueprint, device) for device in {int(handle.split("/")[1]) for handle in self._missing}}
        self._admitted: dict[int, tuple[int, int]] = {}  # device -> server and transition, until it has taken over its start
        self._numbers: dict[Actor, int] = {}

    def _unexplained(self) -> set[ModelRef]:
        """The accepted uploads that no device's log explains: it was lost, or is that of a backup, which came to it only later."""
        missing: set[ModelRef] = set()
        for server, members in enumerate(self.blueprint.servers):
            trained = {handle: time for device in members for handle, time in self._trained_by(device)}
            for step in self.stores[server_actor(server)].transitions():
                accepted = self._accepted(step)
                if accepted is not None and not trained.get(accepted[0].model, math.inf) < step.time:
                    missing.add(accepted[0].model)
        self._granted, self._restored = {}, {}
        if missing and self.blueprint.algorithm.offline:
            raise RecordError(
                f"no log has the offline rounds that upload {min(missing)} rests on: they went with a disk; this run cannot be replayed"
            )
        return missing

    def _trained_by(self, device: int) -> Iterator[tuple[ModelRef, float]]:
        """The uploads that a device's own log explains, and when they were made."""
        store, incarnation = self.stores.get(device_actor(device)), 0
        for step in store.transitions() if store is not None else ():
            if isinstance(step.event, Restored):
                incarnation = max(incarnation, step.event.incarnation)
            elif isinstance(step.event, Trained):
                yield upload_ref(device, step.event.activation, incarnation), step.time

    # ------------------------------------------------------------------------------------------------------------ transitions
    def transitions(self) -> Iterator[Transition]:
        """All transitions in order of time, with those that a lost disk has taken put back."""
        for step in heapq.merge(*(store.transitions() for store in self.stores.values()), key=lambda step: (step.time, step.actor)):
            if step.actor.startswith("device/"):
                yield from self._of_device(step)
            elif step.actor.startswith("server/"):
                yield from self._of_server(step)
            else:
                yield step

    def _of_device(self, step: Transition) -> Iterator[Transition]:
        device = number_of(step.actor)
        lost = self._lost.get(device)
        if lost is None or lost.takes(step.event):
            yield step
            if isinstance(step.event, Restored):
                self._admitted.pop(device, None)

    def _of_server(self, step: Transition) -> Iterator[Transition]:
        number = self._numbers[step.actor] = self._numbers.get(step.actor, -1) + 1
        self._admitted |= {c.device: (number_of(step.actor), number) for c in step.commands if isinstance(c, Admit)}
        accepted = self._accepted(step)
        if accepted is None or accepted[0].model not in self._missing:
            yield step
            return
        lost = self._lost[accepted[0].device]
        yield from lost.before(step.time, accepted[1], self._restored.get(accepted[0].device))
        yield step
        yield from lost.after(step.time)

    def _accepted(self, step: Transition) -> tuple[Uploaded, Activated] | None:
        """The upload that a server accepts in this transition, for the first time, and what the device was sent for it."""
        event = step.event
        for command in step.commands:
            match command:
                case Send(message=Activated() as granted):
                    self._granted[number_of(command.to)] = granted
                case Send(message=Restored() as restored):
                    self._restored[number_of(command.to)] = restored
        if not isinstance(event, Uploaded):
            return None
        sent = self._granted.get(event.device)
        acknowledged = any(isinstance(c, Send) and c.message == Acknowledged(activation=event.activation) for c in step.commands)
        if sent is None or sent.activation != event.activation or not acknowledged:
            return None
        del self._granted[event.device]
        return event, sent

    # ------------------------------------------------------------------------------------------------------------------ state
    def digest(self) -> str:
        """As `StackedNumbers.digest` forms it; `transitions` has been read to its end."""
        blueprint = self.blueprint
        rows = blueprint.devices if blueprint.algorithm.personal else 0
        digest = hashlib.sha256()
        for name, width in (("x", blueprint.size_F), ("x_prev", blueprint.size_P)):
            digest.update(repr((str(DTYPE), (rows, width))).encode())
            for device in range(rows):
                digest.update(_bytes(self._personal(device, name)[:width]))
        servers = len(blueprint.servers)
        digest.update(repr((str(DTYPE), (servers, blueprint.size_F))).encode())
        for server in range(servers):
            digest.update(_bytes(self._global(server)))
        return digest.hexdigest()

    def _personal(self, device: int, name: str) -> Tensor:
        if device in self._admitted:
            server, number = self._admitted[device]
            copies, start = self.stores[server_actor(server)], f"a/{device}/{number}"
            if start in copies.names():
                return copies.tensor(start)
            raise RecordError(
                f"device {device} joined and left again before it was heard, so its model is not known; let it join once more"
            )
        if device in self._lost and not self._lost[device].is_back:
            raise RecordError(
                f"device {device} has lost its disk and has not been put in step; let it connect once more (if it has left, let it join)"
            )
        own = self.stores.get(device_actor(device))
        return own.tensor(name) if own is not None and name in own.names() else self.blueprint.start

    def _global(self, server: int) -> Tensor:
        """z_n: the last model that the server's log names."""
        machine, store = self.blueprint.server_machine(server), self.stores[server_actor(server)]
        for step in store.transitions():
            machine.handle(step.event)
        return store.tensor(machine.model) if machine.model in store.names() else self.blueprint.start


class _LostDevice:
    """A device whose log has a gap. What counted in it follows from its server's log; what it did apart from that was undone."""

    def __init__(self, blueprint: Blueprint, device: int) -> None:
        self.actor = device_actor(device)
        self.is_back = True
        self._machine: Device = blueprint.device_machine(device)
        self._steps = (blueprint.seed, device), blueprint.algorithm.steps

    def takes(self, event: Event) -> bool:
        """Whether an event of the device's log comes before the gap, or ends it."""
        if isinstance(event, Restored) and event.incarnation > self._machine.incarnation:
            self.is_back = True
        if self.is_back:
            self._machine.handle(event)
        return self.is_back

    def before(self, time: float, granted: Activated, restored: Restored | None) -> Iterator[Transition]:
        """What it must have heard and done to upload."""
        self.is_back = False
        machine = self._machine
        if restored is not None and restored.incarnation > machine.incarnation:
            yield self._do(time, restored)
        if machine.state is DeviceState.UPLOADING and machine.activation < granted.activation:
            yield self._do(time, Acknowledged(activation=machine.activation))
        if machine.state is DeviceState.IDLE:
            yield self._do(time, Woke())
        if machine.state is DeviceState.ASKING:
            yield self._do(time, granted)
        (seed, device), (low, high) = self._steps
        steps = draws.steps(seed, device, machine.session, low, high)
        yield self._do(time, Trained(activation=granted.activation, steps=steps))

    def after(self, time: float) -> Iterator[Transition]:
        """What it must have heard."""
        yield self._do(time, Acknowledged(activation=self._machine.activation))

    def _do(self, time: float, event: Event) -> Transition:
        return Transition(time, self.actor, event, tuple(self._machine.handle(event)))


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(torch.uint8).numpy().data
    return data
