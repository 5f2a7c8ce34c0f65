"""A device: its machine, its personal model and its store. Training (`local_work`) is pure and may
run in a thread; what it gave is then told.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm.method import SENT
from fedbcd.engines.deploy.roles.base import Letter, Role
from fedbcd.engines.deploy.roles.blueprint import CONTRIBUTION, DTYPE, Blueprint, OwnData
from fedbcd.engines.deploy.roles.checks import TrustLimits, check_model
from fedbcd.engines.deploy.roles.local_work import DueWork, Kept, LocalWork, Work, WorkDone
from fedbcd.engines.deploy.roles.snapshot import Parts
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import LocalProtocolError, Refused
from fedbcd.protocol import Device, DeviceState
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    Actor,
    Command,
    Contributed,
    Declined,
    Event,
    Failed,
    ModelRef,
    OfflineDue,
    OfflineTrained,
    Pull,
    Restored,
    RetryDue,
    Train,
    Trained,
    TrainOffline,
    Undo,
    Uploaded,
    Woke,
    device_actor,
    is_upload,
)


class DeviceRole(Role):
    """One device. `work` is what is to be computed now, also after a crash: it is deterministic, so
    a second time gives the same.
    """

    OWN = (Woke, OfflineDue, RetryDue)
    COPIED = (Activated, Acknowledged, Declined, Restored)
    machine: Device

    def __init__(
        self, store: Store, blueprint: Blueprint, device: int, data: OwnData, limits: TrustLimits
    ) -> None:
        """See `open`."""
        super().__init__(device_actor(device), store, blueprint, limits)
        self.machine = blueprint.device_machine(device)
        self.device = device
        self.home = self.machine.server
        self.work: Work | None = None
        bound = blueprint.bound
        # no vector is ever changed in place: letters, memory and work share them
        self.kept: Kept = {
            slot.name: bound.first(slot, blueprint.start) for slot in bound.method.slots
        }
        if bound.wire is not None and bound.method.counts == "members":
            self.kept[SENT] = bound.known(device, blueprint.start)  # what it has contributed
        self.upload = bound.first_upload(blueprint.start)  # the latest
        # in the store it is x where it is nothing else
        self._upload_name = "x" if bound.uploads_x else "upload"
        self.local_work = LocalWork(blueprint, device, data)
        self._anchor: tuple[ModelRef, Tensor] | None = None  # z_n of the activation under way
        self._done: WorkDone | None = None  # while it is taken over
        self._incarnation = 0  # of x
        self._task: DueWork | None = (
            None  # read once by `compute`, which may run beside a transition
        )

    @classmethod
    def open(
        cls,
        store: Store,
        blueprint: Blueprint,
        device: int,
        data: OwnData,
        limits: TrustLimits | None = None,
    ) -> "DeviceRole":
        """The device of this store, where it left off."""
        role = cls(store, blueprint.going_on(store.facts), device, data, limits or TrustLimits())
        role._recover()
        return role

    def hello(self) -> dict[str, Any]:
        """Who it is, and how far: the server sees from this whether the device has lost its
        memory.
        """
        machine = self.machine
        uploading = machine.state in (
            DeviceState.UPLOADING,
            DeviceState.WITHDRAWING,
        )  # read first: an answer may be handled meanwhile
        return super().hello() | {
            "activation": machine.activation,
            "incarnation": machine.incarnation,
            "uploading": uploading,
        }

    # ---------------------------------------------------------------------------------------------
    # work
    def compute(self) -> WorkDone:
        """Do the work that is due. Changes nothing, so it may run beside everything else; hand the
        outcome to `finish`.
        """
        task = self._task
        if task is None:
            raise LocalProtocolError(f"{self.actor} has nothing to compute")
        return self.local_work.done(task)

    def finish(self, done: WorkDone, now: float) -> list[Letter]:
        """Take over what `compute` gave; what was overtaken meanwhile is left out."""
        if done.work != self.work:
            return []
        self._done = done
        return self._handle(done.event, None, now)

    # ---------------------------------------------------------------------------------------------
    # transitions
    def _check(self, letter: Letter) -> str | None:
        """As every role; but a server that knows of fewer activations than were acknowledged here
        does not replace the model.
        """
        event, here = letter.event, self.machine
        if (
            isinstance(event, Restored)
            and event.incarnation > here.incarnation
            and event.activation < here.activation
        ):
            raise Refused(
                "older",
                f"{letter.sender} wants to put {self.actor} back to activation {event.activation},"
                f" but has acknowledged {here.activation}: the store of {letter.sender} is empty or"
                f" an old one. {self.actor} keeps its model; put the newest store of"
                f" {letter.sender} back",
            )
        size = self._size_of(event)
        if size is None or size[1] != CONTRIBUTION:
            return super()._check(letter)
        check_model(letter.model, *size, replace(self.limits, norm=None))
        assert letter.model is not None
        sent = self.blueprint.bound.sent_by(self.device, letter.model).to(DTYPE)
        return check_model(sent, len(sent), DTYPE, self.limits)

    def _size_of(self, event: Event) -> tuple[int, torch.dtype] | None:
        bound = self.blueprint.bound
        if isinstance(event, Restored):
            laid = bound.wire is not None and is_upload(event.model)
            dtype = CONTRIBUTION if laid else DTYPE
            return (bound.upload.size, dtype) if bound.keeps_last else None
        return (bound.heard.size, DTYPE) if hasattr(event, "model") else None

    def _apply(
        self,
        number: int,  # noqa: ARG002
        event: Event,
        model: Tensor | None,
        commands: Sequence[Command],
    ) -> None:
        is_restored = self.machine.incarnation > self._incarnation
        if not self._recovering:
            self._take_over(event, model if is_restored else None, commands)
        if is_restored or isinstance(event, Trained | OfflineTrained | Failed):
            self.work, self._incarnation = None, self.machine.incarnation
        for command in commands:
            if isinstance(command, Train | Pull | TrainOffline):
                self.work = command
        if not self._recovering:
            self._tidy(event, model)

    def _take_over(
        self, event: Event, restored: Tensor | None, commands: Sequence[Command]
    ) -> None:
        """The model that training gave, that was there before, or that the server knows."""
        if isinstance(event, Trained):
            self._set_aside()
        if isinstance(event, Trained | OfflineTrained):
            assert self._done is not None
            self._keep(self._done.kept, self._done.upload)
        elif any(isinstance(command, Undo) for command in commands):
            self._put_back()
        elif restored is not None:
            assert isinstance(event, Restored)
            self._begin_again(restored, is_upload(event.model))

    def _begin_again(self, restored: Tensor, uploaded: bool) -> None:
        """From what it has contributed, or from what a new member begins with."""
        bound, start = self.blueprint.bound, self.blueprint.start
        sent = bound.sent_by(self.device, restored).to(DTYPE) if uploaded else restored
        kept = {slot.name: bound.begun(slot, sent, start) for slot in bound.method.slots}
        if SENT in self.kept:
            kept[SENT] = restored if uploaded else bound.contributed(self.device, restored)
        self._keep(kept, None)

    def _tidy(self, event: Event, model: Tensor | None) -> None:
        """Keep what is needed next, and nothing else."""
        if self.machine.state is not DeviceState.UPLOADING:
            for name in self.kept:
                self._drop(_before(name))
        wanted = self._wanted()
        if self._anchor is not None and self._anchor[0] != wanted:
            self._anchor = None
            self._drop("z")
        if self._anchor is None and isinstance(event, Activated) and event.model == wanted:
            assert model is not None
            self._anchor = (event.model, model)
            self.store.save("z", model)
        self._set_task()

    def _set_task(self) -> None:
        z = None if self._anchor is None else self._anchor[1]
        self._task = None if self.work is None else DueWork(self.work, self.kept, z)

    def _keep(self, kept: Kept, upload: Tensor | None) -> None:
        self.kept = kept
        for name, vector in kept.items():
            self.store.save(name, vector)
        if upload is not None:
            self.upload = upload
            if self._upload_name not in kept:
                self.store.save(self._upload_name, upload)

    def _set_aside(self) -> None:
        """Keep what was there before an activation until its upload has been answered."""
        for name, vector in self.kept.items():
            if name in self.store.names():
                self.store.rename(name, _before(name))
            else:
                self.store.save(_before(name), vector)  # as at the start

    def _put_back(self) -> None:
        """What was there before the activation; an upload of 0.1.0, which set nothing aside, is
        left as it is.
        """
        if {*map(_before, self.kept)} <= {*self.store.names()}:
            self.kept = {name: self.store.tensor(_before(name)) for name in self.kept}
            for name in self.kept:
                self.store.rename(_before(name), name)

    def _wanted(self) -> ModelRef | None:
        """The global model that is needed, now or after the offline round under way."""
        return (
            self.machine.granted.model
            if self.machine.granted is not None
            else getattr(self.work, "model", None)
        )

    def _parts(self) -> Parts:
        return {**super()._parts(), "device": (self, ("work", "_incarnation"))}

    def _load(self) -> None:
        names = self.store.names()
        self.kept |= {name: self.store.tensor(name) for name in self.kept if name in names}
        if self._upload_name in names:
            self.upload = self.store.tensor(self._upload_name)
        if "z" in names:
            self._anchor = (self._wanted() or "", self.store.tensor("z"))
        self._set_task()

    def _tensor(self, to: Actor, message: Event) -> Tensor | None:  # noqa: ARG002
        if isinstance(message, Contributed) and self.blueprint.bound.keeps_last:
            return self.kept[SENT] if SENT in self.kept else self.kept["x"]
        return self.upload if isinstance(message, Uploaded) else None


def _before(name: str) -> str:
    """In the store: what was kept under this name before the upload that is unanswered."""
    return f"before/{name}"
