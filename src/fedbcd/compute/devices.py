"""Where devices are: their models, their training, and what they add to the servers' sums.

`StackedDevices` holds the models of this process as rows of stacked tensors, or in files;
`engines.cluster` has another `Devices`, whose models are on other machines.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.compute.batch import Trainer
from fedbcd.compute.fused import InPlace
from fedbcd.compute.rows import MakeRows, ManyModels, Rows
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.protocol.messages import ModelRef, ref
from fedbcd.schedule.work import Count, Session, Sessions

Wait = Callable[[], None]


@dataclass(slots=True)
class Sums:
    """Per server sum gamma_i x_i in float64, and the weight of what is in it."""

    total_VF: Tensor
    weight_V: list[float]

    def clear(self, servers: Iterable[int]) -> None:
        """Nobody counts."""
        for server in servers:
            self.total_VF[server] = 0.0
            self.weight_V[server] = 0.0


class Devices(Protocol):
    """Computes what is asked of devices. It knows no clock, no step of a server and no mixing."""

    x_NF: ManyModels
    prev_NP: ManyModels
    engine: str  # its name, if it adds up sums in an order of its own; otherwise empty
    one_sum: bool  # uploads to all servers are in the first sum, since eq. (5) needs only the total

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: Sums
    ) -> Wait | None:
        """Train, and add uploads to sums, in this order. What is returned is called before `into`
        is read; None: it is all done.
        """
        ...

    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        ...

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes at present; an upload that waits is forgotten."""
        ...

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted, unless it is this one."""
        ...

    def set_model(self, device: int, model: Tensor) -> None:
        """x = x_prev = `model`."""
        ...

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        ...

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round."""
        ...

    def why_not_ahead(self) -> str | None:
        """Why rounds of these devices cannot be planned ahead; None: they can."""
        ...

    def saved_in(self, checkpoint: Path | None) -> None:
        """All models are in this file now; None: a checkpoint will be written, so what is lost can
        be brought back.
        """
        ...

    def report(self) -> dict[str, Any]:
        """For the summary of a run: who did how much. Empty where it was one process."""
        ...


@dataclass(slots=True)
class _Upload:
    """What an activation changed: the row before and after it."""

    activation: int
    before: Tensor | None
    after: Tensor


class StackedDevices:
    """Personal models as rows of two tables."""

    engine = ""
    one_sum = False

    def __init__(
        self,
        trainer: Trainer,
        start: Tensor,
        weights: Sequence[float],
        storage: torch.dtype,
        make_rows: MakeRows | None = None,
    ) -> None:
        """`start` is x(0). Personal models are kept as `storage`; `make_rows` keeps them elsewhere
        than in a tensor. A device rounds its model at the end of a session, and uploads what it
        keeps.
        """
        self.workers: Workers = OneWorker()
        self.algorithm = trainer.algorithm
        self.trainer = trainer
        self.weights = weights
        self.dtype = start.dtype
        self.size_P = trainer.objective.layout.size_P
        rows = len(weights) if self.algorithm.personal else 0
        first = start.to(storage)
        in_tensor = rows if make_rows is None else 0
        # one row more, for work of nobody that fills a fixed shape
        self.with_nobody = first.repeat(in_tensor + 1, 1)
        self.prev_with_nobody = self.with_nobody[:, : self.size_P].clone()
        self.x_NF: ManyModels = self.with_nobody[:in_tensor]
        self.prev_NP: ManyModels = self.prev_with_nobody[:in_tensor]
        if make_rows is not None and rows:
            self.x_NF = make_rows("x", rows, first)
            self.prev_NP = make_rows("x_prev", rows, first[: self.size_P])
        self._uploads: dict[int, _Upload] = {}

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: Sums
    ) -> None:
        """At once."""
        for part in work:
            if isinstance(part, Sessions):
                self._run(list(part.sessions), models)
            else:
                self._absorb(part.uploads, into)
        for kept in self._in_files():
            kept.release()

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        self.workers = workers

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round."""
        for kept in self._in_files():
            kept.will_need(devices)

    def why_not_ahead(self) -> str | None:
        """Why rounds of these devices cannot be planned ahead."""
        if self._in_files():
            return "personal models are kept in files (`state`) or on a cluster"
        if not self.trainer.divisible or self.trainer.max_batch is not None:
            return "its devices train one after another, or draw random numbers in the forward pass"
        if self.algorithm.batch == "all":
            return "exact gradients need batches of different sizes"
        return None

    def saved_in(self, checkpoint: Path | None) -> None:
        """Nothing is lost here but with the process."""

    def report(self) -> dict[str, Any]:
        """One process."""
        return {}

    def _in_files(self) -> list[Rows]:
        return [models for models in (self.x_NF, self.prev_NP) if isinstance(models, Rows)]

    # ---------------------------------------------------------------------------------------------
    # contributions
    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        total = torch.zeros(self.x_NF.shape[1], dtype=torch.float64, device=self.x_NF.device)
        for device in devices:
            cloud_step.absorb(total, self.weights[device], self._counted(device), None)
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

    def _counted(self, device: int) -> Tensor:
        upload = self._uploads.get(device)
        return self.x_NF[device] if upload is None or upload.before is None else upload.before

    def set_model(self, device: int, model: Tensor) -> None:
        """x = x_prev = `model`."""
        self.x_NF[device] = model
        self.prev_NP[device] = model[: self.size_P]

    def _absorb(self, uploads: Sequence[tuple[int, int]], into: Sums) -> None:
        """Add each server's uploads to its sum, in order of upload."""
        by_server: dict[int, list[int]] = defaultdict(list)
        for server, device in uploads:
            by_server[server].append(device)

        def absorb(server: int, devices: list[int]) -> None:
            for device in devices:
                self._absorb_one(server, device, into)

        for _ in self.workers.map(absorb, by_server, by_server.values()):
            pass  # raises what a worker raised

    def _absorb_one(self, server: int, device: int, into: Sums) -> None:
        upload, weight = self._uploads.pop(device), self.weights[device]
        fused = self.trainer.fused if upload.after.dtype == torch.float32 else None
        add = cloud_step.absorb if fused is None else fused.absorb
        add(into.total_VF[server], weight, upload.after, upload.before)
        if self.algorithm.counts == "active":
            into.weight_V[server] += weight

    # ---------------------------------------------------------------------------------------------
    # training
    def _run(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> None:
        """Train these devices, each once; parts share nothing, so workers take them as they
        come.
        """

        def run(part: list[Session], workers: Workers | None = None) -> dict[int, _Upload]:
            return self._run_part(part, self._anchors(part, models), workers)

        parts = self.trainer.parts(sessions)
        if self.trainer.works_together:
            found = [run(part, self.workers) for part in parts]
        else:
            found = [*self.workers.map(run, parts)]
        for uploads in found:
            self._uploads |= uploads

    def _run_part(
        self, sessions: list[Session], anchor_NF: Tensor | None, workers: Workers | None
    ) -> dict[int, _Upload]:
        if not self.algorithm.personal:
            return self._run_from_anchor(sessions, anchor_NF, workers)
        rows = torch.tensor([s.device for s in sessions], device=self.x_NF.device)
        if workers is not None and isinstance(self.x_NF, Tensor) and self.x_NF.dtype == self.dtype:
            before, after = self._run_in_place(sessions, rows, anchor_NF, workers)
        else:
            before, after = self._run_copies(sessions, rows, anchor_NF, workers)
        if after is None:
            return {}
        return {
            s.device: _Upload(s.activation, None if before is None else before[k], after[k])
            for k, s in enumerate(sessions)
        }

    def _run_copies(
        self,
        sessions: list[Session],
        rows: Tensor,
        anchor_NF: Tensor | None,
        workers: Workers | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is uploaded, and what it replaces in the sum of a server."""
        before, prev = self.x_NF.index_select(0, rows), self.prev_NP.index_select(0, rows)
        x_NF, anchor_NP = before.to(self.dtype), self._parameters(anchor_NF)
        after, prev = self.trainer.run(sessions, x_NF, prev.to(self.dtype), anchor_NP, workers)
        after = after.to(self.x_NF.dtype)
        self.x_NF.index_copy_(0, rows, after)
        self.prev_NP.index_copy_(0, rows, prev.to(self.prev_NP.dtype))
        if sessions[0].offline:
            return None, None
        return before if self.algorithm.counts == "members" else None, after

    def _run_in_place(
        self, sessions: list[Session], rows: Tensor, anchor_NF: Tensor | None, workers: Workers
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same by compiled code, which needs no copies but what is uploaded, and what that
        replaces.
        """
        assert isinstance(self.x_NF, Tensor)
        assert isinstance(self.prev_NP, Tensor)
        after = None if sessions[0].offline else self.x_NF.new_empty(len(sessions), self.size_P)
        before = (
            None if after is None or self.algorithm.counts != "members" else torch.empty_like(after)
        )
        copies = InPlace(rows, before, after)
        self.trainer.run_in_place(sessions, self.x_NF, self.prev_NP, anchor_NF, workers, copies)
        return before, after

    def _run_from_anchor(
        self, sessions: list[Session], anchor_NF: Tensor | None, workers: Workers | None
    ) -> dict[int, _Upload]:
        """FedAvg and FedProx: no device has a model of its own; all start from z."""
        assert anchor_NF is not None
        anchor_NP = anchor_NF[:, : self.size_P]
        after, _ = self.trainer.run(sessions, anchor_NF, anchor_NP, anchor_NP, workers)
        return {s.device: _Upload(s.activation, None, after[k]) for k, s in enumerate(sessions)}

    def _parameters(self, models_NF: Tensor | None) -> Tensor | None:
        return None if models_NF is None else models_NF[:, : self.size_P]

    def _anchors(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> Tensor | None:
        """z_n of each session's server; where it is the same for all, without copies."""
        if sessions[0].offline:
            return None
        handles = [session.model for session in sessions if session.model is not None]
        if len(set(handles)) == 1:
            return models[handles[0]].expand(len(sessions), -1)
        return torch.stack([models[handle] for handle in handles])
