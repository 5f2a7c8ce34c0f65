"""The logs of all roles as one event log in the simulation's format, with the digest of every x_i,
x_prev and z_n at its end.

Causes come before effects (`order`). What a device did before it lost its disk is not in its store;
as far as it counted, it follows from its server's log: which model it was sent, and that it
uploaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedbcd.algorithm.method import Slot
from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.roles.blueprint import DTYPE, Blueprint
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import RecordError
from fedbcd.protocol import Device, DeviceState
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    Declined,
    Event,
    Failed,
    ModelRef,
    Restored,
    Send,
    ServerReady,
    StepModel,
    Trained,
    Uploaded,
    Withdrawn,
    Woke,
    device_actor,
    number_of,
    server_actor,
    upload_ref,
)
from fedbcd.record.eventlog import Transition
from fedbcd.record.tensorfile import digest_of
from fedbcd.spec import RunSpec


def header_of(
    spec: RunSpec, federation: Federation, job: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The head of a deployment's log: devices train one at a time, each by itself."""
    return {"identity": replace(spec, max_batch=1).identity(federation), "job": dict(job or {})}


class Merger:
    """One log, made step by step from those of all roles, in order of time; with what a lost disk
    has taken put back.

    All that it knows follows from the lines so far, so that it can go on with a log that was
    written before (`read`).
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.lines = 0
        self.clock = 0.0
        self._coordinator = blueprint.coordinator_machine()
        self._devices: dict[int, _Followed] = {}
        self._granted: dict[int, Activated] = {}
        self._answers: dict[
            int, Acknowledged | Declined
        ] = {}  # the latest that each device was sent
        self._restored: dict[int, Restored] = {}  # what a device was last put in step with
        self._admitted: dict[
            int, tuple[int, int]
        ] = {}  # device -> server and transition, until it has taken over its start
        self._numbers: dict[Actor, int] = {}
        self._models = [
            blueprint.server_machine(n).model for n in range(len(blueprint.servers))
        ]  # of each server, now

    # ---------------------------------------------------------------------------------------------
    # lines
    def take(self, step: Transition) -> list[Transition]:
        """The lines that the next transition gives: itself; none, if it was undone; or others with
        it, which are missing.
        """
        if step.actor.startswith("device/"):
            device = self._device(number_of(step.actor))
            return [self._noted(step)] if device.takes(step) else []
        if step.actor == COORDINATOR:
            self._coordinator.handle(step.event)
            if isinstance(step.event, ServerReady):  # whose journal is here already, as lines
                step = replace(step, event=replace(step.event, journal=""))
            return [self._noted(step)]
        over = self._over(step)
        if over is None or self._device(over.device).made == over.upload:
            return [self._noted(step)]
        device, counts = self._device(over.device), isinstance(over.answer, Acknowledged)
        if self.blueprint.method.offline and counts:
            raise RecordError(
                f"no log has the offline rounds that upload {over.upload} rests on: they went with"
                " a disk; this run cannot be replayed"
            )
        device.is_back = False
        if self.blueprint.method.offline:
            return [self._noted(step)]
        before = [
            self._noted(line)
            for line in device.before(step.time, over, self._restored.get(over.device))
        ]
        return [*before, self._noted(step), *map(self._noted, device.after(step.time, over.answer))]

    def read(self, line: Transition) -> None:
        if line.actor.startswith("device/"):
            self._device(number_of(line.actor)).do(line.time, line.event)
        elif line.actor == COORDINATOR:
            self._coordinator.handle(line.event)
        else:
            self._over(line)
        self._noted(line)

    def lost(self, device: int) -> None:
        """The store of a device is not the one that was there before, so what it says counts from
        when it is put in step.
        """
        self._device(device).is_back = False

    def _device(self, device: int) -> "_Followed":
        if device not in self._devices:
            self._devices[device] = _Followed(self.blueprint, device)
        return self._devices[device]

    def _noted(self, line: Transition) -> Transition:
        self.lines, self.clock = self.lines + 1, line.time
        if isinstance(line.event, Restored):
            self._admitted.pop(number_of(line.actor), None)
        if line.actor.startswith("server/"):
            server, number = number_of(line.actor), self._numbers.get(line.actor, -1) + 1
            self._numbers[line.actor] = number
            for command in line.commands:
                match command:
                    case Admit():
                        self._admitted[command.device] = (server, number)
                    case StepModel():
                        self._models[server] = command.result
                    case AdoptModel():
                        self._models[server] = command.model
        return line

    def _over(self, step: Transition) -> "_Over | None":
        """The activation that ends with this transition of a server: its upload is accepted, or it
        comes to nothing.
        """
        event, answers = step.event, list[Acknowledged | Declined]()
        for command in step.commands:
            match command:
                case Send(message=Activated() as granted):
                    self._granted[number_of(command.to)] = granted
                case Send(message=Restored() as restored):
                    self._restored[number_of(command.to)] = restored
                case Send(message=Acknowledged() | Declined() as answer):
                    answers.append(answer)
        if not isinstance(event, Uploaded | Withdrawn):
            return None
        sent = self._granted.get(event.device)
        if sent is None or sent.activation != event.activation or not answers:
            return None
        del self._granted[event.device]
        upload = (
            event.model
            if isinstance(event, Uploaded)
            else upload_ref(event.device, event.activation, event.incarnation)
        )
        before, self._answers[event.device] = self._answers.get(event.device), answers[0]
        return _Over(event.device, upload, sent, answers[0], before)

    # ---------------------------------------------------------------------------------------------
    # end
    def end(self, stores: Mapping[Actor, Store]) -> dict[str, Any]:
        """What the last line of the log says, after every transition of these stores has been
        taken.
        """
        return {
            "transitions": self.lines,
            "rounds": self._coordinator.round,
            "clock": self.clock,
            "digest": self._digest(stores),
        }

    def _digest(self, stores: Mapping[Actor, Store]) -> str:
        """As the digest of a run: all that devices keep, all z_n."""
        plan, bound = self.blueprint, self.blueprint.bound
        widths = {"x": plan.size_F, "x_prev": plan.size_P} | bound.slots
        tables = [
            (DTYPE, (plan.devices if slot in bound.slots else 0, width), self._rows(stores, slot))
            for slot, width in widths.items()
        ]
        servers = len(plan.servers)
        models = (self._global(stores[server_actor(n)], n) for n in range(servers))
        return digest_of([*tables, (DTYPE, (servers, bound.model.size), models)])

    def _global(self, store: Store, server: int) -> Tensor:
        model = self._models[server]
        return store.tensor(model) if model in store.names() else self.blueprint.first_model

    def _rows(self, stores: Mapping[Actor, Store], name: str) -> Iterator[Tensor]:
        for slot in self.blueprint.method.slots:
            if slot.name == name:
                for device in range(self.blueprint.devices):
                    yield self._kept(stores, device, slot)

    def _kept(self, stores: Mapping[Actor, Store], device: int, slot: Slot) -> Tensor:
        bound, x_0, name = self.blueprint.bound, self.blueprint.start, slot.name
        if device in self._admitted:
            server, number = self._admitted[device]
            copies, start = stores[server_actor(server)], f"a/{device}/{number}"
            if start in copies.names():
                return bound.begun(slot, copies.tensor(start), x_0)
            raise RecordError(
                f"device {device} joined and left again before it was heard, so its model is not"
                " known; let it join once more"
            )
        if not self._device(device).is_back:
            raise RecordError(
                f"device {device} has lost its disk and has not been put in step; let it connect"
                " once more (if it has left, let it join)"
            )
        own = stores.get(device_actor(device))
        has = own is not None and name in own.names()
        return own.tensor(name) if own is not None and has else bound.first(slot, x_0)


@dataclass(frozen=True)
class _Over:
    """An activation that a server has ended: by which upload, what the device was sent for it, the
    answer, and the one before.
    """

    device: int
    upload: ModelRef
    granted: Activated
    answer: Acknowledged | Declined
    before: Acknowledged | Declined | None


class _Followed:
    """A device, as its lines tell. If its log has a gap, what counted in it follows from its
    server's; all else was undone.
    """

    def __init__(self, blueprint: Blueprint, device: int) -> None:
        self.actor = device_actor(device)
        self.is_back = True
        self.made: ModelRef | None = None  # its latest upload
        self._device = device
        self._machine: Device = blueprint.device_machine(device)
        self._blueprint = blueprint

    def takes(self, step: Transition) -> bool:
        """Whether an event of the device's log comes before the gap, or ends it."""
        if isinstance(step.event, Restored) and step.event.incarnation > self._machine.incarnation:
            self.is_back = True
        if self.is_back:
            self.do(step.time, step.event)
        return self.is_back

    def before(self, time: float, over: _Over, restored: Restored | None) -> Iterator[Transition]:
        """What it must have heard and done to upload, or to have nothing to upload: what was
        refused has changed nothing either.
        """
        machine, granted = self._machine, over.granted
        if restored is not None and restored.incarnation > machine.incarnation:
            yield self.do(time, restored)
        is_unanswered = (
            machine.state in (DeviceState.UPLOADING, DeviceState.WITHDRAWING)
            and machine.activation < granted.activation
        )
        if is_unanswered and over.before is not None:
            yield self.do(time, over.before)
        if machine.state is DeviceState.IDLE:
            yield self.do(time, Woke())
        if machine.state is DeviceState.ASKING:
            yield self.do(time, granted)
        seed, session = self._blueprint.seed, machine.session
        _, steps = self._blueprint.method.length(seed, self._device, session, granted.activation)
        yield self.do(
            time,
            (
                Trained(activation=granted.activation, steps=steps)
                if isinstance(over.answer, Acknowledged)
                else Failed(session=machine.session, reason=over.answer.reason)
            ),
        )

    def after(self, time: float, answer: Acknowledged | Declined) -> Iterator[Transition]:
        yield self.do(time, answer)

    def do(self, time: float, event: Event) -> Transition:
        commands = self._machine.handle(event)
        if isinstance(event, Trained | Failed) and self._machine.state in (
            DeviceState.UPLOADING,
            DeviceState.WITHDRAWING,
        ):
            self.made = upload_ref(
                self._device, self._machine.activation, self._machine.incarnation
            )
        return Transition(time, self.actor, event, tuple(commands))
