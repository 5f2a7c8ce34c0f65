"""The numbers of a run: a fold over rounds. Global models by handle, server sums in float64, and
devices somewhere (`compute.devices`).

A server needs sums, not models. It keeps sum gamma_i x_i over its members (FedBCD) or over the
active ones (FedBCD-I and the baselines); an upload replaces the device's own last contribution. So
a round's cost follows the active devices, not the population.

Shapes: V servers, N devices, F values of a model (P parameters and its buffers), U values of an
upload.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import Devices, Wait
from fedbcd.compute.rows import (
    MODELS_AT_ONCE,
    ManyModels,
    Rows,
    SomeRows,
    in_turn,
    total_distance,
)
from fedbcd.compute.steps import mixed_models, stepped_globally
from fedbcd.compute.tally import Tally
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Federation
from fedbcd.protocol.messages import ModelRef
from fedbcd.record.tensorfile import digest_of
from fedbcd.schedule.changes import (
    Accept,
    Admit,
    CountNobody,
    Dismiss,
    Recall,
    Recount,
    Restore,
)
from fedbcd.schedule.work import (
    Adopt,
    Count,
    Forget,
    Instruction,
    Mix,
    Open,
    Report,
    Round,
    Sessions,
    Step,
    StepGlobal,
)

LEAVES_SUMS = (Open, Report, Adopt, Forget)  # all others read or change what sums hold


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
        self.tally = Tally(
            self.bound, devices, federation.servers, set(late), start.to(devices.storage)
        )
        self.sums = self.tally.sums
        self._later: deque[Instruction] = deque()  # what waits for devices that are at work
        self._wait: Wait | None = None

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        self.workers = workers
        self.devices.use(workers)

    def begin_with(self, x_NF: Tensor, z_VF: Tensor) -> None:
        """These models in place of x(0), in X and without momentum: for a device each, and for a
        server each or, where they were others or there is one z for all, their mean.
        """
        where, p = self.sums.total_VU.device, self.size_P

        def in_set(models: Tensor) -> Tensor:
            models = models.to(where, self.dtype)
            inside = self.method.projection.project(models[:, :p])
            return torch.cat((inside, models[:, p:]), dim=1)

        x_NF, z_VF = in_set(x_NF), in_set(z_VF)
        if len(z_VF) != len(self.held) or len({*self.held}) == 1:
            z_VF = z_VF.double().mean(0).to(self.dtype).expand(len(self.held), -1)
        for handle, z in zip(self.held, z_VF, strict=True):
            self.models[handle] = self.bound.first_model(z)
        self.tally.begin_with(x_NF)

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
            self.tally.form_anew()
            work: list[Sessions | Count] = []
            while self._later and isinstance(part := self._later[0], Sessions | Count):
                work.append(part)
                self._later.popleft()
            self._wait = self.devices.advance(work, self.models, self.sums)

    def _play(self, part: Instruction) -> None:
        if not isinstance(part, LEAVES_SUMS):
            self.tally.form_anew()
        match part:
            case Open(server):
                self.tally.open(server)
            case Report(server):
                self.tally.report(server)
            case Mix():
                self._mix(part)
            case Step():
                self._step(part)
            case StepGlobal():
                self._step_global(part)
            case Adopt(server, model):
                self.held[server] = model
            case Admit():
                self.tally.admit(part, self.models[part.model])
            case Dismiss():
                self.tally.dismiss(part)
            case CountNobody(server):
                self.tally.count_nobody(server)
            case Recall(device):
                self.devices.contributions.recall(device)
            case Recount(server, device):
                self.tally.recount(server, device)
            case Accept(device):
                self.devices.contributions.accept(device)
            case Restore(device, model):
                self.devices.contributions.forget_upload(device, unless=model)
                self.devices.contributions.restore(device)
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
        sums, members = self.sums, self.tally.members_V[server]
        total, weight, count = sums.total_VU[server], sums.weight_V[server], sums.count_V[server]
        return self.bound.stepped(z.double(), total, weight, count, members).to(self.dtype)

    def _step_global(self, part: StepGlobal) -> None:
        """Eq. (5), from the sums as they were reported."""
        total_VU, counted = self.tally.take_reported()
        self.models[part.result] = stepped_globally(
            self.bound, self.models[part.model], total_VU, counted, part.iterations
        )

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
        parts = (members[k : k + MODELS_AT_ONCE] for k in range(0, len(members), MODELS_AT_ONCE))
        return sum(total_distance(x_NF, z_VF, part) for part in parts) / len(members)

    def state(self) -> dict[str, Tensor | SomeRows]:
        """Everything that a checkpoint needs. Only valid between rounds."""
        self.settle()
        state = {**self.devices.state(), **self.tally.state()}
        return state | {f"model:{handle}": model for handle, model in self.models.items()}

    def load_state(
        self, state: Mapping[str, Tensor], held: Sequence[ModelRef], absent: Iterable[int]
    ) -> None:
        """The inverse of `state`: which handle each server has, and which devices are no members,
        follows from the schedule.
        """
        where = self.sums.total_VU.device
        self.devices.load_state(state)
        self.tally.load_state(state, absent)
        named = {k.removeprefix("model:"): v for k, v in state.items() if k.startswith("model:")}
        self.models = {handle: model.to(where) for handle, model in named.items()}
        self.held = list(held)

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
