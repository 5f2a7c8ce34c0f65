"""The numbers of a run: a fold over rounds. Global models by handle, server sums in float64, and
devices somewhere (`compute.devices`).

A server needs sums, not models. It keeps sum gamma_i x_i over its members (FedBCD) or over the
active ones (FedBCD-I and the baselines); an upload replaces the device's own last contribution. So
a round's cost follows the active devices, not the population.

Shapes: V servers, N devices, F values of a model: P parameters and its buffers.
"""

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import Devices, Sums, Wait
from fedbcd.compute.rows import (
    TOGETHER,
    ManyModels,
    Rows,
    SomeRows,
    in_turn,
    total_distance,
)
from fedbcd.compute.steps import mixed_models, stepped_globally
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Federation
from fedbcd.protocol.messages import ModelRef
from fedbcd.record.tensorfile import digest_of
from fedbcd.schedule.work import (
    Accept,
    Admit,
    Adopt,
    Count,
    Dismiss,
    Forget,
    Instruction,
    Mix,
    Open,
    Report,
    Restore,
    Round,
    Sessions,
    Step,
    StepGlobal,
)

LEAVES_SUMS = (Open, Report, Mix, Adopt, Forget)  # all others read or change what sums hold


class Numbers:
    """All models of a federation, and what rounds do to them."""

    def __init__(
        self,
        federation: Federation,
        trainer: Trainer,
        devices: Devices,
        held: Sequence[ModelRef],
        start: Tensor,
        late: set[int],
    ) -> None:
        """`start` is x(0), with which server n begins under the handle `held[n]`; devices in `late`
        join later and are not counted before.
        """
        self.workers: Workers = OneWorker()
        self.trainer, self.bound, self.method = trainer, trainer.bound, trainer.method
        self.devices = devices
        self.dtype = start.dtype
        self.size_P = trainer.objective.layout.size_P
        self.weights = self.bound.weights
        self.held = list(held)
        first = self.bound.first_model(start)
        self.models: dict[ModelRef, Tensor] = {handle: first.clone() for handle in self.held}
        self._homes = federation.servers
        self._absent = set(late)  # devices that are no members now
        self.sums = self._first_sums(start.to(devices.storage))
        self._stale: set[int] = set()  # servers whose sums are formed anew before they are used
        # Sync-cloud: servers whose sums are on their way; those that have changed since, as sent
        self._reported: dict[int, tuple[Tensor, float, int] | None] = {}
        self._later: deque[Instruction] = deque()  # what waits for devices that are at work
        self._wait: Wait | None = None

    def _first_sums(self, start: Tensor) -> Sums:
        """Where members count, all of them do, by what they would send at x(0)."""
        sums = Sums.of(len(self._homes), self.bound.upload.size, start.device)
        if self.method.counts == "members":
            first = self.bound.known(0, start).double()
            for n, members in enumerate(self._homes):
                present = [i for i in members if i not in self._absent]
                sums.weight_V[n] = sum(self.weights[i] for i in present)
                sums.count_V[n] = len(present)
                sums.total_VU[n] = sums.weight_V[n] * first
        return sums

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        self.workers = workers
        self.devices.use(workers)

    def begin_with(self, x_NF: Tensor, z_VF: Tensor) -> None:
        """These models in place of x(0), in X and without momentum: for a device each, and for a
        server each or, where they were others or there is one z for all, their mean.
        """
        where = self.sums.total_VU.device
        x_NF, z_VF = (self._in_set(models.to(where, self.dtype)) for models in (x_NF, z_VF))
        if len(z_VF) != len(self._homes) or len({*self.held}) == 1:
            z_VF = z_VF.double().mean(0).to(self.dtype).expand(len(self._homes), -1)
        for handle, z in zip(self.held, z_VF, strict=True):
            self.models[handle] = self.bound.first_model(z)
        self.sums.clear(range(len(self._homes)))
        for server, members in enumerate(self._homes):
            for device in members:
                first = self.devices.start_over(device, x_NF[device])
                if self.method.counts == "members" and device not in self._absent:
                    self._count(server, device, first, 1)

    def _in_set(self, models: Tensor) -> Tensor:
        p = self.size_P
        return torch.cat((self.method.projection.project(models[:, :p]), models[:, p:]), dim=1)

    # ---------------------------------------------------------------------------------------------
    # the fold
    def play(self, round_: Round) -> None:
        """One round. Devices that are elsewhere go on while the next one is prepared; what needs
        their sums waits for `settle`.
        """
        self.settle()
        self._later.extend(round_.work)
        self._go_on()

    def settle(self) -> None:
        """Have everything done that has been asked for."""
        while self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
            self._go_on()

    def _go_on(self) -> None:
        while self._later and self._wait is None:
            if not isinstance(self._later[0], Sessions | Count):
                self._play(self._later.popleft())
                continue
            self._form_anew()
            work: list[Sessions | Count] = []
            while self._later and isinstance(part := self._later[0], Sessions | Count):
                work.append(part)
                self._later.popleft()
            self._wait = self.devices.advance(work, self.models, self.sums)

    def _play(self, part: Instruction) -> None:
        if not isinstance(part, LEAVES_SUMS):
            self._form_anew()
        match part:
            case Open(server):
                if self.method.counts == "active":
                    self.sums.clear([server])
            case Report(server):
                self._reported.setdefault(server, None)
            case Mix():
                self._mix(part)
            case Step():
                self._step(part)
            case StepGlobal():
                self._step_global(part)
            case Adopt(server, model):
                self.held[server] = model
            case Admit():
                self._admit(part)
            case Dismiss():
                self._dismiss(part)
            case Accept(device):
                self.devices.accept(device)
            case Restore(device, model):
                self.devices.forget_upload(device, unless=model)
                self.devices.restore(device)
            case Forget(models):
                for model in models:
                    del self.models[model]

    # ---------------------------------------------------------------------------------------------
    # the cloud
    def _mix(self, part: Mix) -> None:
        """Eq. (6a). Where the order is "step, mix", servers have stepped before."""
        models = [self.models[handle] for handle in part.models]
        if self.method.order == "step, mix":
            servers = [self.held.index(handle) for handle in part.models]
            models = [self._stepped(n, z) for n, z in zip(servers, models, strict=True)]
        mixed = mixed_models(models, len(part.results), part.weights)
        self.models |= dict(zip(part.results, mixed, strict=True))

    def _step(self, part: Step) -> None:
        """Eq. (6b)."""
        mixed = z = self.models[part.mixed]
        if self.method.order == "mix, step" or part.alone:
            z = self._stepped(part.server, mixed)
        self.models[part.result] = z.clone() if z is mixed else z  # others may have it too
        self.held[part.server] = part.result

    def _stepped(self, server: int, z: Tensor) -> Tensor:
        sums, members = self.sums, len(self._members_of(server))
        total, weight, count = sums.total_VU[server], sums.weight_V[server], sums.count_V[server]
        return self.bound.stepped(z.double(), total, weight, count, members).to(self.dtype)

    def _step_global(self, part: StepGlobal) -> None:
        """Eq. (5), from the sums as they were reported."""
        total_VU, weights, counts = self.sums.total_VU, self.sums.weight_V, self.sums.count_V
        sent = {n: kept for n, kept in self._reported.items() if kept is not None}
        if sent:
            rows = enumerate(total_VU)
            total_VU = torch.stack([sent[n][0] if n in sent else row for n, row in rows])
            weights = [sent[n][1] if n in sent else w for n, w in enumerate(weights)]
            counts = [sent[n][2] if n in sent else c for n, c in enumerate(counts)]
        members = sum(len(self._members_of(n)) for n in range(len(self._homes)))
        self.models[part.result] = stepped_globally(
            self.bound,
            self.models[part.model],
            total_VU,
            (sum(weights), sum(counts), members),
            part.iterations,
        )
        self._reported.clear()

    # ---------------------------------------------------------------------------------------------
    # membership
    def _members_of(self, server: int) -> list[int]:
        return [device for device in self._homes[server] if device not in self._absent]

    def _admit(self, part: Admit) -> None:
        self._absent.discard(part.device)
        if self.bound.keeps_last:
            # with a baseline, one who comes back may finish what it was at
            self.devices.forget_upload(part.device)
        first = self.devices.start_over(part.device, self.models[part.model])
        if self.method.counts == "members":
            self._count(part.server, part.device, first, 1)

    def _dismiss(self, part: Dismiss) -> None:
        self._absent.add(part.device)
        if self.method.counts != "members":
            return
        last = self.devices.last_counted(part.device)
        if part.anew:
            self._keep_report(part.server)
            self._stale.add(part.server)  # several may leave at once
        else:
            self._count(part.server, part.device, last, -1)

    def _form_anew(self) -> None:
        """Sums from the contributions of those who are members, in order, whatever was lost by
        rounding before.
        """
        if self._stale and self.devices.one_sum:
            self._stale = {*range(len(self._homes))}
        for server in sorted(self._stale):
            members = sorted(self._members_of(server))
            self.sums.total_VU[server] = self.devices.sum_of(members)
            weights = (self.weights[device] for device in members)
            self.sums.weight_V[server] = reduce(operator.add, weights, 0.0)  # one by one
            self.sums.count_V[server] = len(members)
        self._stale.clear()

    def _count(self, server: int, device: int, contribution: Tensor, sign: int) -> None:
        weight = sign * self.weights[device]
        self._keep_report(server)
        cloud_step.absorb(self.sums.total_VU[server], self.bound.factor(weight), contribution, None)
        self.sums.weight_V[server] += weight
        self.sums.count_V[server] += sign

    def _keep_report(self, server: int) -> None:
        """What it has reported stays as it was."""
        sums = self.sums
        if server in self._reported and self._reported[server] is None:
            kept = sums.total_VU[server].clone(), sums.weight_V[server], sums.count_V[server]
            self._reported[server] = kept

    # ---------------------------------------------------------------------------------------------
    # the state
    @property
    def personal_NF(self) -> ManyModels:
        """Personal models; no rows where devices have none."""
        found = self.devices.tables.get(self.method.personal)
        return self._no_rows(self.bound.layout.size_F) if found is None else found

    def _no_rows(self, width: int) -> Tensor:
        where = self.sums.total_VU.device
        return torch.empty(0, width, dtype=self.devices.storage, device=where)

    def global_VF(self) -> Tensor:
        """The global model of every server, stacked."""
        place = self.bound.model.places[self.method.result]
        return torch.stack([self.models[handle][place] for handle in self.held])

    def personal(self, device: int, server: int) -> Tensor:
        """x_i; with a consensus method that is z."""
        if self.method.has_personal:
            return self.personal_NF[device].to(self.dtype)
        place = self.bound.model.places[self.method.result]
        return self.models[self.held[server]][place]

    def distance(self, members: Sequence[tuple[int, int]]) -> float:
        """The mean of ||x_i - z_n|| over (device, server)."""
        z_VF, x_NF = self.global_VF(), self.personal_NF
        if isinstance(x_NF, Rows):
            return x_NF.total_distance(z_VF, members) / len(members)
        parts = (members[k : k + TOGETHER] for k in range(0, len(members), TOGETHER))
        return sum(total_distance(x_NF, z_VF, part) for part in parts) / len(members)

    def state(self) -> dict[str, Tensor | SomeRows]:
        """Everything that a checkpoint needs. Only valid between rounds."""
        self.settle()
        state = dict(self.devices.state())
        state |= {"total": self.sums.total_VU}
        state |= {"weight": torch.tensor(self.sums.weight_V, dtype=torch.float64)}
        if self.bound.needs_counts:
            state |= {"count": torch.tensor(self.sums.count_V)}
        return state | {f"model:{handle}": model for handle, model in self.models.items()}

    def load_state(
        self, state: Mapping[str, Tensor], held: Sequence[ModelRef], absent: Iterable[int]
    ) -> None:
        """The inverse of `state`: which handle each server has, and which devices are no members,
        follows from the schedule.
        """
        where = self.sums.total_VU.device
        self.devices.load_state(state)
        self.sums.total_VU.copy_(state["total"])
        self.sums.weight_V[:] = [float(w) for w in state["weight"]]
        if "count" in state:
            self.sums.count_V[:] = state["count"].tolist()
        named = {k.removeprefix("model:"): v for k, v in state.items() if k.startswith("model:")}
        self.models = {handle: model.to(where) for handle, model in named.items()}
        self.held, self._absent = list(held), set(absent)

    def rename_models(self, held: Sequence[ModelRef]) -> None:
        """The same z_n under other handles, one for each server; others are forgotten."""
        self.models = {new: self.models[old] for new, old in zip(held, self.held, strict=True)}
        self.held = list(held)

    def digest(self) -> str:
        """A hash of all that devices keep and of all models of servers, bit for bit."""
        self.settle()
        kept: dict[str, ManyModels] = {
            "x": self._no_rows(self.bound.layout.size_F),
            "x_prev": self._no_rows(self.size_P),
        }
        kept |= {slot: self.devices.tables[slot] for slot in self.bound.slots}
        tables = [*kept.values(), torch.stack([self.models[handle] for handle in self.held])]
        return digest_of((table.dtype, tuple(table.shape), in_turn(table)) for table in tables)
