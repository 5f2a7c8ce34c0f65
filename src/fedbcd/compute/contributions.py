"""What devices contribute to the servers' sums: uploads that wait to be counted, what was counted
last, and what a device that has lost its memory is restored from.

Shapes: V servers, N devices, F values of a model, U values of an upload.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.method import SENT
from fedbcd.algorithm.wire import Wire
from fedbcd.compute.batch import Trainer
from fedbcd.compute.rows import ManyModels
from fedbcd.compute.workers import Workers
from fedbcd.protocol.messages import ModelRef, ref
from fedbcd.schedule.work import Session

UPLOAD = "upload:"  # in a checkpoint: one that waits, with device and activation


@dataclass(slots=True)
class ServerSums:
    """Per server the weighted sum of uploads in float64 (U values each), the weight of what is in
    it, and of how many.
    """

    total_VU: Tensor
    weight_V: list[float]
    count_V: list[int]

    @classmethod
    def of(cls, servers: int, width: int, where: torch.device | str = "cpu") -> "ServerSums":
        """Of nobody."""
        total_VU = torch.zeros(servers, width, dtype=torch.float64, device=where)
        return cls(total_VU, [0.0] * servers, [0] * servers)

    def clear(self, servers: Iterable[int]) -> None:
        """Nobody counts."""
        for server in servers:
            self.total_VU[server] = 0.0
            self.weight_V[server] = 0.0
            self.count_V[server] = 0


class Contributions(Protocol):
    """What each device adds to the sum of its server."""

    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes at present; an upload that waits is forgotten."""

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted, unless it is this one."""

    def start_over(self, device: int, model: Tensor) -> Tensor:
        """Everything that it keeps begins anew, at z = `model`; what it contributes then."""

    def remember(self, devices: Iterable[int]) -> None:
        """These will be restored: keep what was accepted of them."""

    def accept(self, device: int) -> None:
        """Its last upload is what it could be restored from."""

    def restore(self, device: int) -> None:
        """It has lost its memory: what was sent comes back, the rest starts over."""

    def recall(self, device: int) -> None:
        """It stands by what it has contributed last; an upload that waits is that."""


@dataclass(slots=True)
class Upload:
    """What an activation changed: the device's contribution before and after it."""

    activation: int
    before: Tensor | None
    after: Tensor


class StackedContributions:
    """Of devices whose models are rows of these tables."""

    def __init__(self, trainer: Trainer, tables: Mapping[str, ManyModels], start: Tensor) -> None:
        """`start` is x(0) as tables keep it."""
        self._trainer, self._bound, self._method = trainer, trainer.bound, trainer.method
        self._tables, self._sent_NU, self._start = tables, tables.get(SENT), start
        self._uploads: dict[int, Upload] = {}
        self._latest: dict[int, Tensor] = {}  # upload of each device to be restored, and ...
        self._accepted: dict[int, Tensor] = {}  # ... the last that was accepted

    # ---------------------------------------------------------------------------------------------
    # uploads
    def of(
        self,
        sessions: Sequence[Session],
        before_NF: Tensor | None,
        after_NU: Tensor,
        heard_NF: Tensor,
    ) -> dict[int, Upload]:
        """Each device's upload after its session, through the layers that uploads have; `before_NF`
        is what it replaces, if that is kept. Only reads.
        """
        if self._bound.wire is not None:
            after_NU = self._through(self._bound.wire, sessions, after_NU, heard_NF)
        return {
            s.device: Upload(s.activation, None if before_NF is None else before_NF[k], after_NU[k])
            for k, s in enumerate(sessions)
        }

    def _through(
        self, wire: Wire, sessions: Sequence[Session], after_NU: Tensor, heard_NF: Tensor
    ) -> Tensor:
        """Uploads as contributions. Row by row: they do not depend on who trains together."""
        rows = []
        for s, after, z in zip(sessions, after_NU, heard_NF, strict=True):
            last = None if self._sent_NU is None else self._last(s.device)
            base = self._bound.base(s.device, last, z)
            rows.append(
                base + wire.message(after, base, self._bound.sender(s.device, s.activation))
            )
        return torch.stack(rows)

    def add(self, uploads: Mapping[int, Upload]) -> None:
        """These wait to be counted."""
        self._uploads |= uploads
        for device in uploads.keys() & self._accepted.keys():
            sent = self._bound.sent_by(device, uploads[device].after)
            self._latest[device] = sent.to(self._start.dtype)

    def absorb(
        self, uploads: Sequence[tuple[int, int, int]], into: ServerSums, workers: Workers
    ) -> None:
        """Add each server's uploads (server, device, age) to its sum, in this order."""
        by_server: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for server, device, age in uploads:
            by_server[server].append((device, age))

        def absorb(server: int, uploads: list[tuple[int, int]]) -> None:
            for device, age in uploads:
                self._absorb_one(server, device, age, into)

        for _ in workers.map(absorb, by_server, by_server.values()):
            pass  # raises what a worker raised

    def _absorb_one(self, server: int, device: int, age: int, into: ServerSums) -> None:
        upload, weight = self._uploads.pop(device), self._bound.weight_of(device, age)
        before = upload.before if self._sent_NU is None else self._sent_NU[device]
        fused = self._trainer.compiled if upload.after.dtype == torch.float32 else None
        add = cloud_step.absorb if fused is None else fused.chain.absorb
        add(into.total_VU[server], self._bound.factor(weight), upload.after, before)
        if self._sent_NU is not None:
            self._sent_NU[device] = upload.after
        if self._method.counts == "active":
            into.weight_V[server] += weight
            into.count_V[server] += 1

    # ---------------------------------------------------------------------------------------------
    # what counts at present
    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        where = self._start.device
        total = torch.zeros(self._bound.upload.size, dtype=torch.float64, device=where)
        for device in devices:
            factor = self._bound.factor(self._bound.weights[device])
            cloud_step.absorb(total, factor, self._counted(device), None)
        return total

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes at present; an upload that waits is forgotten."""
        found = self._counted(device)
        self.forget_upload(device)
        return found

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted, unless it is this one."""
        upload = self._uploads.get(device)
        if upload is not None and unless != ref("x", device, upload.activation):
            del self._uploads[device]

    def _last(self, device: int) -> Tensor:
        """What it contributes by its own word: also what waits to be counted."""
        waits = self._uploads.get(device)
        return self._counted(device) if waits is None else waits.after

    def _counted(self, device: int) -> Tensor:
        if self._sent_NU is not None:
            return self._sent_NU[device]
        upload = self._uploads.get(device)
        before = None if upload is None else upload.before
        return self._tables["x"][device] if before is None else before

    # ---------------------------------------------------------------------------------------------
    # who starts over
    def start_over(self, device: int, model: Tensor) -> Tensor:
        """Everything that it keeps begins anew, at z = `model`; what it contributes then."""
        first = self._bound.first_upload(model.to(self._start.dtype))
        self._begin(device, first)
        known = self._bound.contributed(device, first)
        if self._sent_NU is not None:
            self._sent_NU[device] = known
        if device in self._accepted:
            self._accepted[device] = first
        return known

    def remember(self, devices: Iterable[int]) -> None:
        """These will be restored: keep what was accepted of them."""
        self._accepted = dict.fromkeys(devices, self._bound.first_upload(self._start))

    def accept(self, device: int) -> None:
        """Its last upload is what it could be restored from."""
        self._accepted[device] = self._latest.pop(device, self._accepted[device])

    def restore(self, device: int) -> None:
        """It has lost its memory: what was sent comes back, the rest starts over."""
        self._begin(device, self._accepted[device])

    def recall(self, device: int) -> None:
        """It stands by what it has contributed last; an upload that waits is that."""
        upload = self._uploads.pop(device, None)
        if upload is not None and self._sent_NU is not None:
            self._sent_NU[device] = upload.after
        if device in self._accepted:
            x = self._counted(device)
            sent = x if self._sent_NU is None else self._bound.sent_by(device, x)
            self._latest.pop(device, None)
            self._accepted[device] = sent.to(self._start.dtype, copy=True)

    def _begin(self, device: int, upload: Tensor) -> None:
        for slot in self._method.slots:
            self._tables[slot.name][device] = self._bound.begun(slot, upload, self._start)

    # ---------------------------------------------------------------------------------------------
    # the state
    def state(self) -> dict[str, Tensor]:
        """Uploads that are not counted yet, each with what it replaces, if that is kept."""
        return {
            f"{UPLOAD}{device}:{upload.activation}": torch.stack(
                [part for part in (upload.after, upload.before) if part is not None]
            )
            for device, upload in self._uploads.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""
        for name in state:
            if name.startswith(UPLOAD):
                device, activation = map(int, name.removeprefix(UPLOAD).split(":"))
                after, *before = state[name].to(self._start.device)
                self._uploads[device] = Upload(activation, before[0] if before else None, after)
