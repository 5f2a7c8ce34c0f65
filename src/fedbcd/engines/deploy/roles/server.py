"""A server: its machine, its global model z_n and one float64 sum. Devices' last contributions lie
on disk, one file each.

Memory is O(parameters): an upload adds gamma_i (after - before) to the sum, `before` is read from
its file. The sum is saved when a phase opens and when members change; after a crash the uploads
since then are added again, in the same order, to the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm.method import Bound
from fedbcd.algorithm.wire import Wire
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.blueprint import CONTRIBUTION, DTYPE, Blueprint
from fedbcd.engines.deploy.roles.checks import (
    TrustLimits,
    check_model,
    check_run,
    check_sent,
    finite,
    is_store_id,
)
from fedbcd.engines.deploy.roles.contributions import Copies, Sum
from fedbcd.engines.deploy.roles.known import KnownCoordinator
from fedbcd.engines.deploy.roles.notes import Notes
from fedbcd.engines.deploy.roles.shared_log import SharedLog
from fedbcd.engines.deploy.roles.snapshot import Parts
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import LocalProtocolError, Refused
from fedbcd.protocol import Server, ServerState
from fedbcd.protocol.messages import (
    Absorb,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    Command,
    Contributed,
    CountNobody,
    DeadlinePassed,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Dismiss,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    ModelRef,
    OpenPhase,
    Recount,
    Recovered,
    Restored,
    Resumed,
    RetryDue,
    Returned,
    Send,
    ServerReady,
    Started,
    StepModel,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    incarnation_of,
    number_of,
    server_actor,
)
from fedbcd.protocol.senders import is_counter

TOTAL, REPORT = (
    "total",
    "report",
)  # names of the sum, and of what was reported, where that has changed since or is all there is
CHANGE_SUMS = (OpenPhase, Admit, Dismiss, CountNobody, Recount)


class ServerRole(Role):
    """One server."""

    OWN = (
        *(Started, RetryDue, DeadlinePassed, DeviceLost, DeviceJoined, DeviceLeft, DeviceReset),
        *(Recovered, Returned),
    )
    COPIED = (UpdateRequested, Uploaded, Withdrawn, Resumed, Mixed, GlobalUpdated, Isolated)
    machine: Server

    def __init__(
        self, store: Store, blueprint: Blueprint, server: int, limits: TrustLimits
    ) -> None:
        """See `open`."""
        super().__init__(server_actor(server), store, blueprint, limits)
        self.machine = blueprint.server_machine(server)
        self.server = server
        self.z = blueprint.first_model
        self.has_z = True  # until a recovered server is answered, nobody has its model
        self._weights, bound = blueprint.weights(), blueprint.bound
        weights = [self._weights[device] for device in self.machine.members]
        self._sum = Sum(bound.known(0, blueprint.start), weights, bound)
        self._copies = Copies(store, blueprint)
        self._first = self.machine.model  # of x(0)
        self._notes = Notes(blueprint, self._first, self._drop)
        self.coordinator = KnownCoordinator(store, self.machine.iterations)
        self._report: Tensor | None = None  # what was reported, if the sum has changed since

    @classmethod
    def open(
        cls, store: Store, blueprint: Blueprint, server: int, limits: TrustLimits | None = None
    ) -> "ServerRole":
        """The server of this store, where it left off."""
        role = cls(store, blueprint.going_on(store.facts), server, limits or TrustLimits())
        role._recover()
        role.shared_log = SharedLog(store)
        return role

    def hello(self) -> dict[str, Any]:
        """Who it is, and how far."""
        machine = self.machine
        how_far = {"phase": machine.phase, "iteration": machine.iteration}
        return super().hello() | how_far | {"generation": machine.generation}

    # ---------------------------------------------------------------------------------------------
    # identity
    def check_guest(self, device: Actor, hello: Mapping[str, Any]) -> None:
        """Refuse who does not belong here, and a device that is ahead of this server. Only reads,
        so it may run beside an event.
        """
        number = number_of(device)
        last = self.machine.last_of(number)
        if last is None and number in self.blueprint.servers[self.server]:
            raise Refused(
                "not_admitted",
                f"{device} is no member of {self.actor} now; fedbcd admit makes it one",
            )
        if last is None:
            raise Refused(
                "membership",
                f"{device} is no member of {self.actor}; its members are"
                f" {sorted(self.machine.members)[:20]}",
            )
        check_run(device, hello, self.store.facts)
        there, times = _DeviceProgress.of(device, hello), self.machine.incarnation_of(number)
        if self.machine.is_awaited(number):
            is_behind = there.returned(number, last).activation <= last
            _check_returning(self.machine, device, is_behind and not self.has_z)
        elif there.activation > last + 1 or there.incarnation > times:
            raise Refused(
                "ahead",
                f"{device} has finished {there.activation} activations and was put in step"
                f" {there.incarnation} times, {self.actor} knows of {last + 1} and {times}: its"
                f" store is empty or an old one. Put the newest store of {self.actor} back; until"
                f" then {device} keeps its model and tries on",
            )

    def greet(self, device: Actor, hello: Mapping[str, Any], now: float) -> list[Letter]:
        """A device has connected. One that has lost its memory, or brings an old one, is put in
        step with its last contribution.
        """
        self.check_guest(device, hello)
        number, there = number_of(device), _DeviceProgress.of(device, hello)
        if self.machine.is_awaited(number):
            returned = there.returned(number, self.machine.last_of(number))
            return self.tell(returned, now, {f"store/{number}": there.store})
        known, last = self.store.facts.get(f"store/{number}"), self.machine.last_of(number)
        assert last is not None
        here = _DeviceProgress(
            known or there.store, last + 1, self.machine.incarnation_of(number), uploading=False
        )
        if self.machine.state is ServerState.NEW:  # neither has done anything yet
            self.store.commit(facts={f"store/{number}": there.store})
            return []
        if not self._notes.is_unstarted(number) and there.is_in_step_with(here, new=known is None):
            if known is None:
                self.store.commit(facts={f"store/{number}": there.store})
            return []
        return self.tell(DeviceReset(device=number), now, {f"store/{number}": there.store})

    def welcome(self, now: float) -> list[Letter]:
        """The coordinator has welcomed this server: a new one begins. Before, and without a
        history, it serves nobody.
        """
        return self.tell(Started(), now) if self.machine.state is ServerState.NEW else []

    def tell(
        self, event: Event, now: float, facts: Mapping[str, str] | None = None
    ) -> list[Letter]:
        """Handle an event that comes from within, with facts that go with it. One who joins is sent
        its server's model, and must confirm it.
        """
        if isinstance(event, DeviceJoined) and not self.has_z:
            raise LocalProtocolError(
                f"{self.actor} goes on from an older store, and has no model for device"
                f" {event.device} to begin with before its coordinator answers; admit it then"
            )
        self._facts = dict(facts or {})
        try:
            letters = super().tell(event, now)
        finally:
            self._facts = {}
        if isinstance(event, DeviceJoined) and self._notes.is_unstarted(event.device):
            letters += super().tell(DeviceReset(device=event.device), now)
        return letters

    # ---------------------------------------------------------------------------------------------
    # uploads
    def _check(self, letter: Letter) -> str | None:
        """An upload that is waited for must also be in X, and within reach of z_n; copies of
        earlier ones were looked at then. One with layers is a message: integers in range, and what
        is then known of the device must be such a model.
        """
        event, limits, bound = letter.event, self.limits, self.blueprint.bound
        if isinstance(event, Contributed):
            return _check_contributed(event.device, letter.model, bound, self.z, limits)
        if not isinstance(event, Uploaded):
            return super()._check(letter)
        if bound.wire is None:
            remark, sent = super()._check(letter), letter.model
            if not self.machine.is_waiting_for(event.device, event.activation):
                return remark
        else:
            _check_message(bound.wire, letter.model, bound.upload.size, limits)
            granted = self._notes.granted(event.device)
            if granted is None or granted.activation != event.activation:
                return None  # it was answered before
            assert letter.model is not None
            contribution = self._contribution(event.device, granted, letter.model)
            _check_range(bound.wire, contribution, bound.wire.exact)
            sent = bound.sent_by(event.device, contribution).to(DTYPE)
            remark = check_model(sent, len(sent), DTYPE, limits)
        assert sent is not None
        check_sent(sent, bound, self.z, limits)
        return remark

    def _contribution(self, device: int, granted: Activated, message: Tensor) -> Tensor:
        """What a device contributes with this upload."""
        bound = self.blueprint.bound
        if bound.wire is None:
            return message
        last = self._copies.latest(device) if self._sum.of_members else None
        return bound.base(device, last, self._model(granted.model)) + message.double()

    def _size_of(self, event: Event) -> tuple[int, torch.dtype] | None:
        if not hasattr(event, "model"):
            return None
        bound = self.blueprint.bound
        is_upload = isinstance(event, Uploaded | Contributed)
        return (bound.upload if is_upload else bound.model).size, DTYPE

    def _instead_of(self, event: Event, failed: Refused) -> Event | None:
        """An upload that is refused ends its activation: nobody waits for it, and the device is
        told to go on without it.
        """
        if not isinstance(event, Uploaded) or not self.machine.is_waiting_for(
            event.device, event.activation
        ):
            return None
        incarnation = incarnation_of(event.model)
        return Withdrawn(
            device=event.device,
            activation=event.activation,
            incarnation=incarnation,
            reason=failed.reason,
        )

    # ---------------------------------------------------------------------------------------------
    # transitions
    def _apply(
        self, number: int, event: Event, model: Tensor | None, commands: Sequence[Command]
    ) -> None:
        if isinstance(event, Uploaded) and _accepts(
            granted := self._notes.granted(event.device), commands
        ):
            assert granted is not None
            self._copies.accept(
                event.device,
                event.activation,
                None if model is None else self._contribution(event.device, granted, model),
            )
        for command in commands:
            match command:
                case Absorb(device=device):
                    weight = self.blueprint.bound.weight_of(device, self._notes.age(device))
                    self._copies.absorb(device, weight)
                case Admit(device=device):
                    self._copies.admit(device, number)
                case CountNobody():
                    self._copies.forget_all()
                case Recount(device=device):
                    self._copies.bring(device, self.machine.incarnation_of(device), model)
            if not self._recovering:
                self._compute(command, event, model)
            if isinstance(command, Dismiss):
                self._copies.dismiss(command.device)
            self._notes.take(command)
        before, current = self._notes.current, self.machine.model
        self._notes.current = current
        if self._recovering:
            if number <= int(self.store.facts.get("total_at", -1)):
                self._copies.uncounted = []  # they are in the sum that was saved
            return
        self._facts |= self.coordinator.note(event)
        if current != before:
            self.store.save(current, finite(self.z, current, self.actor))
            self._notes.release(before)
            self._report = None
            self.store.drop(REPORT)
        if isinstance(event, Recovered) or any(isinstance(c, CHANGE_SUMS) for c in commands):
            self._checkpoint()

    def _compute(self, command: Command, event: Event, model: Tensor | None) -> None:
        match command:
            case StepModel() | AdoptModel() if not self.has_z:
                self.has_z = True
                self._compute(command, event, model)
            case StepModel():  # from what the coordinator has mixed, or alone
                if self._notes.is_passing(command.model):
                    self.store.save(command.model, finite(self.z, command.model, self.actor))
                is_mixed = isinstance(event, Mixed) and event.model == command.mixed
                mixed = model if is_mixed else self.z
                assert mixed is not None
                stepped = self.blueprint.method.order == "step, mix"
                self.z = mixed if stepped and is_mixed else self._sum.step(mixed)
            case AdoptModel():
                assert model is not None
                self.z = model
            case OpenPhase():
                self._sum.open()
            case Absorb():
                self._copies.count(self._sum)
            case CountNobody():
                self._sum.nobody()
            case Admit() | Dismiss() | Recount():
                self._change(command)

    def _change(self, command: Admit | Dismiss | Recount) -> None:
        """Count one member more, or one less; what has been reported stays as it was."""
        if self._notes.reported and self._report is None:
            self._report = self._sum.vector()
            self.store.save(REPORT, self._report)
        weight, members = self._weights[command.device], len(self.machine.members)
        if isinstance(command, Admit):
            bound, count = self.blueprint.bound, len(self.machine.contributors)
            first = bound.first_upload(self.z[: self.blueprint.size_F])
            self._copies.keep_start(command.device, first)
            self._sum.change(weight, bound.contributed(command.device, first), members, count)
        elif isinstance(command, Dismiss) and not command.anew:
            self._sum.change(-weight, self._copies.counted(command.device), members)
        else:
            who = self.machine.contributors
            self._sum.form(((self._weights[i], self._copies.counted(i)) for i in who), members)

    def _checkpoint(self) -> None:
        """Save the sum; what only its making needed can go."""
        self.store.save(TOTAL, self._sum.vector())
        self._facts["total_at"] = str(self.store.length)
        self._copies.drop_obsolete()

    # ---------------------------------------------------------------------------------------------
    # what is where
    def _tensor(self, to: Actor, message: Event) -> Tensor | None:
        match message:
            case ServerReady() if self._report is not None:
                return self._report
            case ServerReady() if self.blueprint.cloud.sync:
                return self._sum.vector()
            case ServerReady():
                stepped = self.blueprint.method.order == "step, mix"
                return self._sum.step(self.z) if stepped else self.z
            case Activated():
                return self._model(message.model)[: self.blueprint.bound.heard.size]
            case Restored() if self.blueprint.bound.keeps_last:
                return self._copies.accepted(number_of(to))
        return None

    def _model(self, handle: ModelRef) -> Tensor:
        if handle == self._notes.current:
            return self.z
        return self.blueprint.first_model if handle == self._first else self.store.tensor(handle)

    # ---------------------------------------------------------------------------------------------
    # recovery
    def _parts(self) -> Parts:
        return {
            **super()._parts(),
            "server": (self._notes, Notes.CHANGE),
            "copies": (self._copies, ("_counted", "_held")),
        }

    def _before_snapshot(self) -> None:
        if "total_at" not in self._facts:  # not saved for this event already
            self._checkpoint()

    def _load(self) -> None:
        names = self.store.names()
        current = self._notes.current = self.machine.model
        self.has_z = current in names or current == self._first
        if current in names:
            self.z = self.store.tensor(current)
        if REPORT in names:
            self._report = self.store.tensor(REPORT)
        if TOTAL in names:
            self._sum.load(self.store.tensor(TOTAL))
        self._copies.count(self._sum)
        self._copies.find_obsolete()


@dataclass(frozen=True)
class _DeviceProgress:
    """How far a device is: by its own word, or as its server knows it."""

    store: str
    activation: int
    incarnation: int
    uploading: bool

    @classmethod
    def of(cls, device: Actor, hello: Mapping[str, Any]) -> "_DeviceProgress":
        names = ("store", "activation", "incarnation", "uploading")
        there = cls(*(hello.get(name) for name in names))  # type: ignore[arg-type]
        counters = (there.activation, there.incarnation)
        if not (
            is_store_id(there.store)
            and all(map(is_counter, counters))
            and isinstance(there.uploading, bool)
        ):
            raise Refused("hello", f"{device} does not say how far it is ({there!r:.200})")
        return there

    def returned(self, device: int, last: int | None) -> Returned:
        """For a server that has lost its memory; what it has accepted is accepted."""
        is_over = self.uploading and self.activation == last
        activation = self.activation + is_over
        return Returned(device=device, activation=activation, incarnation=self.incarnation)

    def is_in_step_with(self, here: "_DeviceProgress", new: bool) -> bool:
        """Whether it can go on: next to be activated, or with an upload whose acknowledgement was
        lost. A new one has done nothing.
        """
        if (self.store, self.incarnation) != (here.store, here.incarnation):
            return False
        if new:
            return self.activation == here.activation == 0
        return self.activation == here.activation or (
            self.activation == here.activation - 1 and self.uploading
        )


def _check_returning(machine: Server, device: Actor, lacks_model: bool) -> None:
    """Wait for the step that was lost; a device without its memory also for a model to begin at."""
    if not machine.takes_back or lacks_model:
        raise Refused(
            "ahead",
            f"{device} has to wait: server/{machine.server} goes on from an older store, and first"
            f" needs its coordinator's answer. {device} keeps its model and tries on",
        )


def _check_contributed(
    device: int, model: Tensor | None, bound: Bound, z: Tensor, limits: TrustLimits
) -> str | None:
    """What a device brings again is as good as an upload."""
    if not bound.keeps_last:
        return None
    is_sum = bound.wire is not None and bound.method.counts == "members"
    dtype = CONTRIBUTION if is_sum else DTYPE
    check_model(model, bound.upload.size, dtype, replace(limits, norm=None))
    assert model is not None
    sent = bound.sent_by(device, model).to(DTYPE) if is_sum else model
    check_sent(sent, bound, z, limits)
    return check_model(sent, len(sent), DTYPE, limits)


def _check_message(wire: Wire, message: Tensor | None, size: int, limits: TrustLimits) -> None:
    check_model(message, size, wire.dtype, replace(limits, norm=None))
    assert message is not None
    _check_range(wire, message, wire.limit)


def _check_range(wire: Wire, integers: Tensor, limit: int) -> None:
    place = wire.beyond(integers, limit)
    if place is not None:
        raise Refused(
            "range",
            f"value {place} of the upload is {int(integers[place])}; integers are at most {limit},"
            " so that the sum has room for all",
        )


def _accepts(granted: Activated | None, commands: Sequence[Command]) -> bool:
    """Whether the upload that was asked for is accepted now, for the first time."""
    return granted is not None and any(
        isinstance(c, Send)
        and isinstance(c.message, Acknowledged)
        and c.message.activation == granted.activation
        for c in commands
    )
