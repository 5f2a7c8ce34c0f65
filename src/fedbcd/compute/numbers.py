"""The numbers of a run: personal models as rows of stacked tensors, global models by handle, server
sums in float64.

Decision 3 of the architecture: a server needs sums, not models. It keeps sum gamma_i x_i over its
members (FedBCD) or over the active ones (FedBCD-I and the baselines); an upload replaces the
device's own last contribution. So a round's cost follows the active devices, not the population.
Training is due only when its result is read: all that is pending then runs as one batch.
"""

import hashlib
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.variants import Algorithm, cloud_weights
from fedbcd.compute.batch import Job, Trainer
from fedbcd.compute.fused import InPlace
from fedbcd.compute.rows import (
    TOGETHER,
    MakeRows,
    ManyModels,
    Rows,
    SomeRows,
    in_turn,
    state_of,
    total_distance,
)
from fedbcd.compute.steps import mixed_models, mixing_matrices, stepped, stepped_globally
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Federation
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import (
    Absorb,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    Command,
    Declined,
    Dismiss,
    Event,
    Failed,
    MixModels,
    ModelRef,
    OfflineTrained,
    OpenPhase,
    Pull,
    Restored,
    RetryDue,
    Send,
    ServerReady,
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

    activation: int
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
        make_rows: MakeRows | None = None,
    ) -> None:
        """`start` is x(0); devices in `late` join later and are not counted before; personal models
        are kept as `storage`.

        `make_rows` keeps them elsewhere than in a tensor. A device rounds its model at the end of a
        session, and uploads what it keeps.
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
        first = start.to(storage)
        in_tensor = rows if make_rows is None else 0
        self.with_nobody = first.repeat(
            in_tensor + 1, 1
        )  # one row more, for work of nobody that fills a fixed shape
        self.prev_with_nobody = self.with_nobody[:, : self.size_P].clone()
        self.x_NF: ManyModels = self.with_nobody[:in_tensor]
        self.prev_NP: ManyModels = self.prev_with_nobody[:in_tensor]
        if make_rows is not None and rows:
            self.x_NF, self.prev_NP = (
                make_rows("x", rows, first),
                make_rows("x_prev", rows, first[: self.size_P]),
            )
        self.weights: list[float] = cloud_weights(algorithm, federation.sizes).tolist()
        self.mixing = mixing_matrices(cloud, start.device)
        self._set_start(start)
        self._homes, self._absent = (
            federation.servers,
            set(late),
        )  # devices of each server, and those that are no members now
        self._stale: set[int] = (
            set()
        )  # servers whose sums are to be formed anew before they are used
        self._undone: Collection[
            tuple[int, int]
        ] = ()  # (device, activation) of those that come to nothing
        self._count_members(federation, start.to(storage), late)
        self._at_work: dict[int, Train | Pull] = {}
        self._granted: dict[
            int, Activated
        ] = {}  # until the upload is accepted: a device may begin late, or begin again
        self._awaited: Counter[ModelRef] = Counter()  # w_n -> servers that have not stepped from it
        self._reported: set[int] = set()  # Sync-cloud: servers whose sums are on their way
        self._sent: dict[
            int, tuple[Tensor, float]
        ] = {}  # of those, the sums that have changed since
        self._contribution: dict[
            int, Tensor
        ] = {}  # last accepted models, of devices that are to be remembered
        self._incarnation: dict[int, int] = {}
        self._pending: list[Job] = []
        self._absorbing: list[tuple[int, int]] = []  # (server, device) in order of upload
        self._uploads: dict[int, _Upload] = {}

    def _set_start(self, start: Tensor) -> None:
        for n in range(self.servers):
            handle = ref("z", 0) if self.cloud.sync else ref("z", n, 0)
            self.models[handle] = start.clone()
            self.server_models.append(handle)

    def _count_members(self, federation: Federation, start: Tensor, late: set[int]) -> None:
        self.total_VF = torch.zeros(
            self.servers, len(start), dtype=torch.float64, device=start.device
        )
        self.weight_V = [0.0] * self.servers
        if self.algorithm.counts == "members":
            for n, members in enumerate(federation.servers):
                self.weight_V[n] = sum(self.weights[i] for i in members if i not in late)
                self.total_VF[n] = self.weight_V[n] * start.double()

    def remember(self, devices: Iterable[int], undone: Collection[tuple[int, int]] = ()) -> None:
        """Keep the last accepted model of these devices, from the start: they will be put in step
        by `Restored`.

        Activations that will be `undone`, (device, number), change nothing, so they are not
        computed.
        """
        self._undone = undone
        if self.algorithm.personal:
            self._contribution = {device: self.x_NF[device].clone() for device in devices}

    # ---------------------------------------------------------------------------------------------
    # transitions
    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        """Take note of one transition."""
        if isinstance(event, Trained):
            self._finished(number_of(actor), event)
        elif isinstance(event, Failed):
            self._at_work.pop(number_of(actor), None)
        elif isinstance(event, OfflineTrained):
            self._pending.append(
                Job(number_of(actor), event.session, event.steps, None, offline=True)
            )
        elif isinstance(event, Restored):
            self._restore(number_of(actor), event)
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
                case Send(message=Activated() as granted):
                    self._granted[number_of(command.to)] = granted
                case Send(message=Declined() as declined):
                    self._release_granted(number_of(command.to), declined.activation)
                case Send(message=Acknowledged() as acknowledged):
                    self._accept(number_of(command.to), acknowledged.activation)
                case Send(message=ServerReady()) if self.cloud.sync and not isinstance(
                    event, RetryDue
                ):
                    self._reported.add(number_of(actor))
                case Admit():
                    self._admit(number_of(actor), command)
                case Dismiss():
                    self._dismiss(number_of(actor), command)

    def _finished(self, device: int, event: Trained) -> None:
        work = self._at_work.pop(device)
        if (device, event.activation) not in self._undone:
            self._pending.append(
                Job(
                    device,
                    work.session,
                    event.steps,
                    work.model,
                    offline=False,
                    activation=event.activation,
                )
            )

    def _open(self, server: int) -> None:
        if self.algorithm.counts == "active":
            self.total_VF[server] = 0.0
            self.weight_V[server] = 0.0

    # ---------------------------------------------------------------------------------------------
    # the cloud
    def _step(self, server: int, command: StepModel) -> None:
        self.flush()
        mixed = self.models[command.mixed].double()
        self.models[command.result] = stepped(
            self.algorithm, mixed, self.total_VF[server], self.weight_V[server], self.dtype
        )
        self._stepped_from(command.mixed)
        self._replace(server, command.result)

    def _stepped_from(self, handle: ModelRef) -> None:
        """One server fewer needs this w_n; on a real network another mix may come before the last
        of them has stepped.
        """
        if handle in self._awaited:
            self._awaited[handle] -= 1
            if self._awaited[handle] == 0:
                del self._awaited[handle], self.models[handle]

    def _step_global(self, command: StepGlobal) -> None:
        self.flush()
        total_VF, weights = self.total_VF, self.weight_V
        if self._sent:
            total_VF = torch.stack(
                [self._sent[n][0] if n in self._sent else row for n, row in enumerate(total_VF)]
            )
            weights = [
                self._sent[n][1] if n in self._sent else weight for n, weight in enumerate(weights)
            ]
        z = self.models[command.model]
        self.models[command.result] = stepped_globally(
            self.algorithm, z, total_VF, weights, command.iterations, self.dtype
        )
        self._reported.clear()
        self._sent.clear()

    def _mix(self, command: MixModels) -> None:
        models = [self.models[handle] for handle in command.models]
        self.models |= mixed_models(command, models, self.mixing)
        self._awaited.update(command.results)

    def _replace(self, server: int, handle: ModelRef) -> None:
        self.server_models[server] = handle
        needed = {
            *self.server_models,
            *(work.model for work in self._at_work.values()),
            *(sent.model for sent in self._granted.values()),
        }
        needed |= {job.model for job in self._pending if job.model is not None}
        for old in [
            h for h in self.models if h.startswith("z/") and h not in needed and h != handle
        ]:
            del self.models[old]

    # ---------------------------------------------------------------------------------------------
    # membership
    def _admit(self, server: int, command: Admit) -> None:
        self.flush()
        z = self.models[command.model]
        self._absent.discard(command.device)
        if self.algorithm.personal:
            self.forget_upload(
                command.device
            )  # with a baseline, one who comes back may finish what it was at
            self._set_device(command.device, z)
        if command.device in self._contribution:
            self._contribution[command.device] = z.to(self.x_NF.dtype)
        if self.algorithm.counts == "members":
            self._count(server, command.device, self.x_NF[command.device], 1.0)

    def _dismiss(self, server: int, command: Dismiss) -> None:
        self.flush()
        self._absent.add(command.device)
        if self.algorithm.counts != "members":
            return
        last = self.last_counted(command.device)
        if command.anew:
            self._keep_report(server)
            self._stale.add(server)  # several may leave at once
        else:
            self._count(server, command.device, last, -1.0)

    def _form_anew(self) -> None:
        """Sums from the contributions of those who are members, in order, whatever was lost by
        rounding before.
        """
        for server in sorted(self._stale):
            members = [
                device for device in sorted(self._homes[server]) if device not in self._absent
            ]
            self.total_VF[server] = self.sum_counted(members)
            self.weight_V[server] = reduce(
                operator.add, (self.weights[device] for device in members), 0.0
            )  # one by one
        self._stale.clear()

    def sum_counted(self, devices: Iterable[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        total = torch.zeros_like(self.total_VF[0])
        for device in devices:
            cloud_step.absorb(total, self.weights[device], self._counted(device), None)
        return total

    def _counted(self, device: int) -> Tensor:
        upload = self._uploads.get(device)
        return self.x_NF[device] if upload is None or upload.before is None else upload.before

    def forget_upload(self, device: int) -> None:
        """An upload that waits will not be counted."""
        self._uploads.pop(device, None)

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes to its server's sum at present; an upload that waits is
        forgotten.
        """
        found = self._counted(device)
        self.forget_upload(device)
        return found

    def _count(self, server: int, device: int, model: Tensor, sign: float) -> None:
        weight = sign * self.weights[device]
        self._keep_report(server)
        cloud_step.absorb(self.total_VF[server], weight, model, None)
        self.weight_V[server] += weight

    def _keep_report(self, server: int) -> None:
        """What it has reported stays as it was."""
        if server in self._reported and server not in self._sent:
            self._sent[server] = self.total_VF[server].clone(), self.weight_V[server]

    def _accept(self, device: int, activation: int) -> None:
        """The server has this upload, perhaps from before."""
        if self._release_granted(device, activation) and device in self._contribution:
            self.flush()
            self._contribution[device] = self.x_NF[device].clone()

    def _release_granted(self, device: int, activation: int) -> bool:
        """This activation is over, for the first time."""
        granted = self._granted.get(device)
        if granted is None or granted.activation != activation:
            return False
        del self._granted[device]
        return True

    def _restore(self, device: int, event: Restored) -> None:
        """A device that had lost its memory: x = x_prev = its last accepted model; what it was
        doing has not happened.
        """
        if event.incarnation <= self._incarnation.get(device, 0):
            return  # a copy
        self.flush()
        self._incarnation[device] = event.incarnation
        self._at_work.pop(device, None)
        if device in self._uploads and event.model != ref(
            "x", device, self._uploads[device].activation
        ):  # it was not accepted
            del self._uploads[device]
        if self.algorithm.personal:
            self._set_device(device, self._contribution[device])

    def _set_device(self, device: int, model: Tensor) -> None:
        self.x_NF[device] = model
        self.prev_NP[device] = model[: self.size_P]

    # ---------------------------------------------------------------------------------------------
    # batches
    def flush(self) -> None:
        """Run all pending work: per device in order, over devices together."""
        self._form_anew()
        jobs, absorbing = self._pending, self._absorbing
        self._pending, self._absorbing = [], []
        self.compute(jobs, absorbing)

    def compute(self, jobs: Sequence[Job], absorbing: Sequence[tuple[int, int]]) -> None:
        """Train, then count the uploads of `absorbing`, (server, device) in order of upload."""
        waves: dict[int, list[Job]] = defaultdict(list)
        seen: dict[int, int] = defaultdict(int)
        for job in jobs:
            waves[seen[job.device]].append(job)
            seen[job.device] += 1
        for wave in waves.values():
            for offline in (True, False):
                together = [job for job in wave if job.offline is offline]
                if together:
                    self._run(together)
        self._absorb(absorbing)
        self.release()

    def release(self) -> None:
        """Models that are not in a tensor need no memory until they are read again."""
        for models in (self.x_NF, self.prev_NP):
            if isinstance(models, Rows):
                models.release()

    def will_need(self, devices: Iterable[int]) -> None:
        """The models of these devices will be read in the next round."""
        for models in (self.x_NF, self.prev_NP):
            if isinstance(models, Rows):
                models.will_need(devices)

    def _run(self, jobs: list[Job]) -> None:
        """Train these devices, each once; parts share nothing, so workers take them as they
        come.
        """
        parts = self.trainer.parts(jobs)
        if self.trainer.works_together:
            found = [self._run_part(part, self.workers) for part in parts]
        else:
            found = [*self.workers.map(self._run_part, parts)]
        for uploads in found:
            self._uploads |= uploads

    def _run_part(self, jobs: list[Job], workers: Workers | None = None) -> dict[int, _Upload]:
        anchor_NF = self._anchors(jobs)
        if not self.algorithm.personal:
            return self._run_from_anchor(jobs, anchor_NF, workers)
        rows = torch.tensor([job.device for job in jobs], device=self.x_NF.device)
        if workers is not None and isinstance(self.x_NF, Tensor) and self.x_NF.dtype == self.dtype:
            before, after = self._run_in_place(jobs, rows, anchor_NF, workers)
        else:
            before, after = self._run_copies(jobs, rows, anchor_NF, workers)
        if after is None:
            return {}
        return {
            job.device: _Upload(job.activation, None if before is None else before[k], after[k])
            for k, job in enumerate(jobs)
        }

    def _run_copies(
        self, jobs: list[Job], rows: Tensor, anchor_NF: Tensor | None, workers: Workers | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is uploaded, and what it replaces in the sum of a server."""
        before, prev = self.x_NF.index_select(0, rows), self.prev_NP.index_select(0, rows)
        after, prev = self.trainer.run(
            jobs, before.to(self.dtype), prev.to(self.dtype), self._parameters(anchor_NF), workers
        )
        after = after.to(self.x_NF.dtype)
        self.x_NF.index_copy_(0, rows, after)
        self.prev_NP.index_copy_(0, rows, prev.to(self.prev_NP.dtype))
        return (
            (None, None)
            if jobs[0].offline
            else (before if self.algorithm.counts == "members" else None, after)
        )

    def _run_in_place(
        self, jobs: list[Job], rows: Tensor, anchor_NF: Tensor | None, workers: Workers
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same by compiled code, which needs no copies but what is uploaded, and what that
        replaces.
        """
        assert isinstance(self.x_NF, Tensor)
        assert isinstance(self.prev_NP, Tensor)
        after = None if jobs[0].offline else self.x_NF.new_empty(len(jobs), self.size_P)
        before = (
            None if after is None or self.algorithm.counts != "members" else torch.empty_like(after)
        )
        self.trainer.run_in_place(
            jobs, self.x_NF, self.prev_NP, anchor_NF, workers, InPlace(rows, before, after)
        )
        return before, after

    def _run_from_anchor(
        self, jobs: list[Job], anchor_NF: Tensor | None, workers: Workers | None
    ) -> dict[int, _Upload]:
        """FedAvg and FedProx: no device has a model of its own; all start from z."""
        assert anchor_NF is not None
        after, _ = self.trainer.run(
            jobs, anchor_NF, anchor_NF[:, : self.size_P], self._parameters(anchor_NF), workers
        )
        return {job.device: _Upload(job.activation, None, after[k]) for k, job in enumerate(jobs)}

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

    def _absorb(self, absorbing: Sequence[tuple[int, int]]) -> None:
        """Add each server's uploads to its sum, in order of upload."""
        by_server: dict[int, list[int]] = defaultdict(list)
        for server, device in absorbing:
            by_server[server].append(device)
        for _ in self.workers.map(self._absorb_at, by_server, by_server.values()):
            pass  # raises what a worker raised

    def _absorb_at(self, server: int, devices: list[int]) -> None:
        for device in devices:
            upload, weight = self._uploads.pop(device), self.weights[device]
            fused = self.trainer.fused if upload.after.dtype == torch.float32 else None
            add = cloud_step.absorb if fused is None else fused.absorb
            add(self.total_VF[server], weight, upload.after, upload.before)
            if self.algorithm.counts == "active":
                self.weight_V[server] += weight

    def clear_sums(self, servers: Iterable[int]) -> None:
        """Begin these servers' sums at 0: for a shard, which tells what is to be added."""
        for server in servers:
            self.total_VF[server] = 0.0
            self.weight_V[server] = 0.0

    # ---------------------------------------------------------------------------------------------
    # the state
    def global_NF(self) -> Tensor:
        """z_n of every server, stacked."""
        return torch.stack([self.models[handle] for handle in self.server_models])

    def personal(self, device: int, server: int) -> Tensor:
        """x_i; with a consensus algorithm that is z."""
        return (
            self.x_NF[device].to(self.dtype)
            if self.algorithm.personal
            else self.models[self.server_models[server]]
        )

    def distance(self, members: Sequence[tuple[int, int]]) -> float:
        """The mean of ||x_i - z_n|| over (device, server)."""
        z_VF = self.global_NF()
        if isinstance(self.x_NF, Rows):
            return self.x_NF.total_distance(z_VF, members) / len(members)
        parts = (members[k : k + TOGETHER] for k in range(0, len(members), TOGETHER))
        return sum(total_distance(self.x_NF, z_VF, part) for part in parts) / len(members)

    def state(self) -> dict[str, Tensor | SomeRows]:
        """Everything that a checkpoint needs. Only valid between rounds, when nothing is
        pending.
        """
        self.flush()
        state: dict[str, Tensor | SomeRows] = {
            **state_of("x", self.x_NF),
            **state_of("x_prev", self.prev_NP),
            "total": self.total_VF,
        }
        state["weight"] = torch.tensor(self.weight_V, dtype=torch.float64)
        return state | {f"model:{handle}": model for handle, model in self.models.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`, on the device of the present tensors."""
        for name, models in (("x", self.x_NF), ("x_prev", self.prev_NP)):
            rows = state.get(f"{name}:rows", torch.arange(len(models)))
            models.index_copy_(0, rows.to(models.device), state[name].to(models.device))
        self.total_VF.copy_(state["total"])
        self.weight_V = [float(w) for w in state["weight"]]
        where = self.x_NF.device
        self.models = {
            k.removeprefix("model:"): v.to(where)
            for k, v in state.items()
            if k.startswith("model:")
        }

    def resume_at(
        self, server_models: list[ModelRef], at_work: dict[int, Train | Pull], absent: Iterable[int]
    ) -> None:
        """After `load_state`: which handle each server holds, which devices are busy with what, and
        which are no members.
        """
        self.server_models = list(server_models)
        self._at_work = dict(at_work)
        self._absent = set(absent)

    def rename_models(self, server_models: list[ModelRef]) -> None:
        """The same z_n under other handles, one for each server; others are forgotten. For numbers
        that no transition has led.
        """
        self.models = {
            new: self.models[old]
            for new, old in zip(server_models, self.server_models, strict=True)
        }
        self.server_models = server_models

    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        self.flush()
        digest = hashlib.sha256()
        for models in (self.x_NF, self.prev_NP, self.global_NF()):
            digest.update(repr((str(models.dtype), tuple(models.shape))).encode())
            for block in in_turn(models):
                digest.update(block.contiguous().cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()
