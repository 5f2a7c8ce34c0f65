"""The numbers of a run: personal models as rows of stacked tensors, global models by handle, server sums in float64.

Decision 3 of the architecture: a server needs sums, not models. It keeps sum gamma_i x_i over its members (FedBCD) or over the active
ones (FedBCD-I and the baselines); an upload replaces the device's own last contribution. So a round's cost follows the active
devices, not the population. Training is due only when its result is read: all that is pending then runs as one batch.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.variants import Algorithm, cloud_weights
from fedbcd.data.federation import Federation
from fedbcd.engines.simulate.batch import Job, Trainer
from fedbcd.engines.simulate.workers import OneWorker, Workers
from fedbcd.protocol.clouds import Cloud, GraphCloud
from fedbcd.protocol.messages import (
    Absorb,
    Actor,
    Admit,
    AdoptModel,
    Command,
    Dismiss,
    Event,
    MixModels,
    ModelRef,
    OfflineTrained,
    OpenPhase,
    Pull,
    StepGlobal,
    StepModel,
    Train,
    Trained,
    number_of,
    ref,
)


@dataclass(slots=True)
class _Upload:
    """What an activation changed: the row before and after it."""

    before: Tensor | None
    after: Tensor


class StackedNumbers:
    """All models of a federation, and the tensor work that machines ask for."""

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        cloud: Cloud,
        trainer: Trainer,
        start: Tensor,
        late: set[int],
        storage: torch.dtype,
    ) -> None:
        """`start` is x(0); devices in `late` join later and are not counted before; personal models are kept as `storage`.

        A device rounds its model to `storage` at the end of a session, and what it keeps is what it uploads.
        """
        self.workers: Workers = OneWorker()
        self.algorithm = algorithm
        self.cloud = cloud
        self.trainer = trainer
        self.servers = len(federation.servers)
        self.size_P = trainer.objective.layout.size_P
        self.models: dict[ModelRef, Tensor] = {}
        self.server_models: list[ModelRef] = []
        rows = federation.devices if algorithm.personal else 0
        self.dtype = start.dtype
        self.with_nobody = start.to(storage).repeat(rows + 1, 1)  # one row more, for work of nobody that fills a fixed shape
        self.prev_with_nobody = self.with_nobody[:, : self.size_P].clone()
        self.x_NF, self.prev_NP = self.with_nobody[:rows], self.prev_with_nobody[:rows]
        self.weights: list[float] = cloud_weights(algorithm, federation.sizes).tolist()
        self.mixing = (
            [torch.tensor(m, dtype=torch.float64, device=start.device) for m in cloud.mixing] if isinstance(cloud, GraphCloud) else []
        )
        self._set_start(start)
        self._count_members(federation, start.to(storage), late)
        self._at_work: dict[int, Train | Pull] = {}
        self._pending: list[Job] = []
        self._absorbing: list[tuple[int, int]] = []  # (server, device) in order of upload
        self._uploads: dict[int, _Upload] = {}

    def _set_start(self, start: Tensor) -> None:
        for n in range(self.servers):
            handle = ref("z", 0) if self.cloud.sync else ref("z", n, 0)
            self.models[handle] = start.clone()
            self.server_models.append(handle)

    def _count_members(self, federation: Federation, start: Tensor, late: set[int]) -> None:
        self.total_VF = torch.zeros(self.servers, len(start), dtype=torch.float64, device=start.device)
        self.weight_V = [0.0] * self.servers
        if self.algorithm.counts == "members":
            for n, members in enumerate(federation.servers):
                self.weight_V[n] = sum(self.weights[i] for i in members if i not in late)
                self.total_VF[n] = self.weight_V[n] * start.double()

    # ------------------------------------------------------------------------------------------------------------ transitions
    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        """Take note of one transition."""
        if isinstance(event, Trained):
            self._finished(number_of(actor), event)
        elif isinstance(event, OfflineTrained):
            self._pending.append(Job(number_of(actor), event.session, event.steps, None, offline=True))
        for command in commands:
            match command:
                case Train() | Pull():
                    self._at_work[number_of(actor)] = command
                case Absorb():
                    self._absorbing.append((number_of(actor), command.device))
                case OpenPhase():
                    self._open(number_of(actor))
                case StepModel():
                    self._step(number_of(actor), command)
                case AdoptModel():
                    self._replace(number_of(actor), command.model)
                case MixModels():
                    self._mix(command)
                case StepGlobal():
                    self._step_global(command)
                case Admit():
                    self._admit(number_of(actor), command)
                case Dismiss():
                    self._dismiss(number_of(actor), command.device)

    def _finished(self, device: int, event: Trained) -> None:
        work = self._at_work.pop(device)
        self._pending.append(Job(device, work.session, event.steps, work.model, offline=False))

    def _open(self, server: int) -> None:
        if self.algorithm.counts == "active":
            self.total_VF[server] = 0.0
            self.weight_V[server] = 0.0

    # -------------------------------------------------------------------------------------------------------------- the cloud
    def _step(self, server: int, command: StepModel) -> None:
        self.flush()
        mixed = self.models[command.mixed].double()
        self.models[command.result] = self._stepped(mixed, self.total_VF[server], self.weight_V[server])
        self._replace(server, command.result)

    def _step_global(self, command: StepGlobal) -> None:
        self.flush()
        total, weight = self.total_VF.sum(0), sum(self.weight_V)
        z = self.models[command.model].double()
        for _ in range(command.iterations):
            z = self._stepped(z, total, weight).double()
        self.models[command.result] = z.to(self.dtype)

    def _stepped(self, mixed: Tensor, total: Tensor, weight: float) -> Tensor:
        """Eqs. (5) and (6b) in float64, rounded once. With nobody to count, z = w."""
        if weight == 0.0:
            return mixed.to(self.dtype)
        if self.algorithm.server_step_form == "absolute":
            z = cloud_step.server_step_absolute(mixed, total, weight, self.algorithm.server_step)
        else:
            z = cloud_step.server_step(mixed, total / weight, self.algorithm.server_step)
        return z.to(self.dtype)

    def _mix(self, command: MixModels) -> None:
        for handle in [h for h in self.models if h.startswith("w/")]:
            del self.models[handle]  # every server of the last mix has stepped
        z_BF = torch.stack([self.models[handle] for handle in command.models]).double()
        if self.mixing:
            weights = self.mixing[command.round % len(self.mixing)]
            chosen = torch.tensor(command.servers, device=weights.device)
            w_BF = cloud_step.mix(z_BF, weights[chosen][:, chosen])
        else:
            w_BF = cloud_step.mean(z_BF).expand(len(command.results), -1)
        self.models |= {handle: w.to(self.dtype) for handle, w in zip(command.results, w_BF, strict=True)}

    def _replace(self, server: int, handle: ModelRef) -> None:
        self.server_models[server] = handle
        needed = {*self.server_models, *(work.model for work in self._at_work.values())}
        for old in [h for h in self.models if h.startswith("z/") and h not in needed and h != handle]:
            del self.models[old]

    # ------------------------------------------------------------------------------------------------------------- membership
    def _admit(self, server: int, command: Admit) -> None:
        self.flush()
        z = self.models[command.model]
        if self.algorithm.personal:
            self.x_NF[command.device] = z
            self.prev_NP[command.device] = z[: self.size_P]
        if self.algorithm.counts == "members":
            self._count(server, command.device, self.x_NF[command.device], 1.0)

    def _dismiss(self, server: int, device: int) -> None:
        self.flush()
        self._at_work.pop(device, None)
        upload = self._uploads.pop(device, None)
        if self.algorithm.counts == "members":
            copy = self.x_NF[device] if upload is None or upload.before is None else upload.before
            self._count(server, device, copy, -1.0)

    def _count(self, server: int, device: int, model: Tensor, sign: float) -> None:
        weight = sign * self.weights[device]
        cloud_step.absorb(self.total_VF[server], weight, model, None)
        self.weight_V[server] += weight

    # ---------------------------------------------------------------------------------------------------------------- batches
    def flush(self) -> None:
        """Run all pending work: per device in order, over devices together."""
        waves: dict[int, list[Job]] = defaultdict(list)
        seen: dict[int, int] = defaultdict(int)
        for job in self._pending:
            waves[seen[job.device]].append(job)
            seen[job.device] += 1
        self._pending = []
        for wave in waves.values():
            for offline in (True, False):
                jobs = [job for job in wave if job.offline is offline]
                if jobs:
                    self._run(jobs)
        self._absorb()

    def _run(self, jobs: list[Job]) -> None:
        """Train these devices, each once; parts share nothing, so workers take them as they come."""
        parts = self.trainer.parts(jobs)
        for uploads in self.workers.map(self._run_part, parts):
            self._uploads |= uploads

    def _run_part(self, jobs: list[Job]) -> dict[int, _Upload]:
        if not self.algorithm.personal:
            return self._run_from_anchor(jobs)
        anchor_NF = self._anchors(jobs)
        rows = torch.tensor([job.device for job in jobs], device=self.x_NF.device)
        before, prev = self.x_NF.index_select(0, rows), self.prev_NP.index_select(0, rows)
        after, prev = self.trainer.run(jobs, before.to(self.dtype), prev.to(self.dtype), self._parameters(anchor_NF))
        after = after.to(self.x_NF.dtype)
        self.x_NF.index_copy_(0, rows, after)
        self.prev_NP.index_copy_(0, rows, prev.to(self.prev_NP.dtype))
        if jobs[0].offline:
            return {}
        keep = self.algorithm.counts == "members"
        return {job.device: _Upload(before[k] if keep else None, after[k]) for k, job in enumerate(jobs)}

    def _run_from_anchor(self, jobs: list[Job]) -> dict[int, _Upload]:
        """FedAvg and FedProx: no device has a model of its own; all start from z."""
        anchor_NF = self._anchors(jobs)
        assert anchor_NF is not None
        after, _ = self.trainer.run(jobs, anchor_NF, anchor_NF[:, : self.size_P], self._parameters(anchor_NF))
        return {job.device: _Upload(None, after[k]) for k, job in enumerate(jobs)}

    def _parameters(self, models_NF: Tensor | None) -> Tensor | None:
        return None if models_NF is None else models_NF[:, : self.size_P]

    def _anchors(self, jobs: list[Job]) -> Tensor | None:
        """z_n of each job's server; where it is the same for all, without copies."""
        if jobs[0].offline:
            return None
        handles = [job.model for job in jobs if job.model is not None]
        if len(set(handles)) == 1:
            return self.models[handles[0]].expand(len(jobs), -1)
        return torch.stack([self.models[handle] for handle in handles])

    def _absorb(self) -> None:
        """Add each server's uploads to its sum, in order of upload."""
        by_server: dict[int, list[int]] = defaultdict(list)
        for server, device in self._absorbing:
            by_server[server].append(device)
        self._absorbing = []
        for _ in self.workers.map(self._absorb_at, by_server, by_server.values()):
            pass  # raises what a worker raised

    def _absorb_at(self, server: int, devices: list[int]) -> None:
        for device in devices:
            upload, weight = self._uploads.pop(device), self.weights[device]
            cloud_step.absorb(self.total_VF[server], weight, upload.after, upload.before)
            if self.algorithm.counts == "active":
                self.weight_V[server] += weight

    # --------------------------------------------------------------------------------------------------------------- the state
    def global_NF(self) -> Tensor:
        """z_n of every server, stacked."""
        return torch.stack([self.models[handle] for handle in self.server_models])

    def personal(self, device: int, server: int) -> Tensor:
        """x_i; with a consensus algorithm that is z."""
        return self.x_NF[device].to(self.dtype) if self.algorithm.personal else self.models[self.server_models[server]]

    def distance(self, members: Sequence[tuple[int, int]]) -> float:
        """The mean of ||x_i - z_n|| over (device, server)."""
        z_VF = self.global_NF()
        total = 0.0
        for k in range(0, len(members), 256):
            device, server = (torch.tensor(column, device=z_VF.device) for column in zip(*members[k : k + 256], strict=True))
            total += float((self.x_NF[device].to(self.dtype) - z_VF[server]).norm(dim=1).double().sum())
        return total / len(members)

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs. Only valid between rounds, when nothing is pending."""
        self.flush()
        state = {"x": self.x_NF, "x_prev": self.prev_NP, "total": self.total_VF}
        state["weight"] = torch.tensor(self.weight_V, dtype=torch.float64)
        return state | {f"model:{handle}": model for handle, model in self.models.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`, on the device of the present tensors."""
        self.x_NF.copy_(state["x"])
        self.prev_NP.copy_(state["x_prev"])
        self.total_VF.copy_(state["total"])
        self.weight_V = [float(w) for w in state["weight"]]
        where = self.x_NF.device
        self.models = {k.removeprefix("model:"): v.to(where) for k, v in state.items() if k.startswith("model:")}

    def resume_at(self, server_models: list[ModelRef], at_work: dict[int, Train | Pull]) -> None:
        """After `load_state`: which handle each server holds, and which devices are busy with what."""
        self.server_models = list(server_models)
        self._at_work = dict(at_work)

    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        self.flush()
        digest = hashlib.sha256()
        for tensor in (self.x_NF, self.prev_NP, self.global_NF()):
            digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()
