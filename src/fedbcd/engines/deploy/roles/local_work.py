"""What a device computes: its own data, a trainer, and what a piece of work gives. Pure, so it may
run in a thread, and a second time after a crash.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.method import SENT
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.wire import Wire
from fedbcd.compute.batch import Trainer
from fedbcd.data.federation import Transform
from fedbcd.data.samples import Pool
from fedbcd.engines.deploy.roles.blueprint import DTYPE, Blueprint, OwnData
from fedbcd.engines.deploy.roles.checks import first_not_finite
from fedbcd.errors import DataError, NumericalError
from fedbcd.protocol.messages import Failed, OfflineTrained, Pull, Train, Trained, TrainOffline
from fedbcd.schedule.work import Session

Work = Train | Pull | TrainOffline
Kept = dict[str, Tensor]  # what a device keeps, by slot


@dataclass(frozen=True)
class WorkDone:
    """What a piece of work gave: what is kept, and what is uploaded (nothing after an offline
    round).
    """

    work: Work
    event: Trained | OfflineTrained | Failed
    kept: Kept
    upload: Tensor | None = None
    trouble: str = ""  # why it failed


class DueWork(NamedTuple):
    """What a piece of work starts from."""

    work: Work
    kept: Kept
    z: Tensor | None


class LocalWork:
    """Sessions of one device; it changes nothing."""

    def __init__(self, blueprint: Blueprint, device: int, data: OwnData) -> None:
        self._blueprint, self._device = blueprint, device
        self.trainer = _trainer(blueprint, device, data)

    def done(self, task: DueWork) -> WorkDone:
        """What it gives, or why it failed."""
        try:
            return self._computed(task)
        except NumericalError as error:
            failed = Failed(session=task.work.session)
            return WorkDone(task.work, failed, task.kept, trouble=str(error))

    def _computed(self, task: DueWork) -> WorkDone:
        work, method = task.work, self._blueprint.method
        number = None if isinstance(work, TrainOffline) else work.activation
        _, steps = method.length(self._blueprint.seed, self._device, work.session, number)
        if isinstance(work, TrainOffline):
            job = Session(self._device, work.session, steps, None, offline=True)
            after = self._run(job, task)
            event: Trained | OfflineTrained = OfflineTrained(session=work.session, steps=steps)
            return WorkDone(work, event, self._kept_after(task, after))
        job = Session(
            self._device, work.session, steps, work.model, offline=False, activation=work.activation
        )
        after = self._run(job, task)
        event = Trained(activation=work.activation, steps=steps)
        upload = self._finite(self._blueprint.bound.uploaded(after)[0], job)
        kept = self._kept_after(task, after)
        if self._blueprint.bound.wire is not None:
            upload = self._message(self._blueprint.bound.wire, job, task, upload, kept)
        return WorkDone(work, event, kept, upload)

    def _message(
        self, wire: Wire, job: Session, task: DueWork, upload: Tensor, kept: Kept
    ) -> Tensor:
        """An upload as it travels; what the device contributes with it is kept."""
        assert task.z is not None
        bound = self._blueprint.bound
        base = bound.base(self._device, kept.get(SENT), task.z)
        message = wire.message(upload, base, bound.sender(self._device, job.activation))
        if SENT in kept:
            kept[SENT] = base + message
        return message.to(wire.dtype)

    def _run(self, job: Session, task: DueWork) -> dict[str, Tensor]:
        """All vectors after a session, one row each."""
        registers = {name: vector[None] for name, vector in task.kept.items() if name != SENT}
        if task.z is not None and not job.offline:
            registers |= self._blueprint.bound.heard.views(task.z[None])
        after = self.trainer.run([job], registers)
        for slot in self._blueprint.method.slots:
            self._finite(after[slot.name][0], job)  # buffers, too
        return after

    def _finite(self, vector: Tensor, job: Session) -> Tensor:
        place = first_not_finite(vector)
        if place is not None:
            raise NumericalError(
                f"value {place} of the model of device/{self._device} is"
                f" {float(vector[place])} after session {job.session}"
            )
        return vector

    def _kept_after(self, task: DueWork, after: dict[str, Tensor]) -> Kept:
        return task.kept | {slot.name: after[slot.name][0] for slot in self._blueprint.method.slots}


class _OwnFederation:
    """One device's data in the shape that `Trainer` asks for: every device's samples are this
    one's.
    """

    def __init__(self, devices: int, data: OwnData) -> None:
        self.devices = devices
        self.pool: Pool = data.samples
        self.positions = torch.arange(len(data.samples))
        self.starts = torch.zeros(1, dtype=torch.int64).expand(devices)
        self.sizes = [len(data.samples)] * devices
        self.transform: Transform = data.transform
        self.augment: Augment | None = data.augment


def _trainer(blueprint: Blueprint, device: int, data: OwnData) -> Trainer:
    declared = blueprint.sizes[device]
    if len(data.samples) != declared:
        raise DataError(
            f"device {device} has {len(data.samples)} samples, but the deployment counts on"
            f" {declared}; give it those"
        )
    objective = Objective(data.module.to(DTYPE), data.loss)
    own = _OwnFederation(blueprint.devices, data)
    trainer = Trainer(
        own, blueprint.method, objective, blueprint.seed, blueprint.start, max_batch=1
    )
    trainer.check_vectorised(blueprint.start)
    return trainer
