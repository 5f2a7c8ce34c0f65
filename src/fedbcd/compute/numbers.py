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
from fedbcd.algorithm.variants import cloud_weights
from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import Devices, Sums, Wait
from fedbcd.compute.rows import TOGETHER, Rows, SomeRows, in_turn, state_of, total_distance
from fedbcd.compute.steps import mixed_models, stepped, stepped_globally
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
        """`start` is x(0), which server n has as `held[n]`; devices in `late` join later and are
        not counted before.
        """
        self.workers: Workers = OneWorker()
        self.algorithm = trainer.algorithm
        self.trainer = trainer
        self.devices = devices
        self.dtype = start.dtype
        self.size_P = trainer.objective.layout.size_P
        self.weights: list[float] = cloud_weights(self.algorithm, federation.sizes).tolist()
        self.held = list(held)
        self.models: dict[ModelRef, Tensor] = {handle: start.clone() for handle in self.held}
        self._homes = federation.servers
        self._absent = set(late)  # devices that are no members now
        self.sums = self._first_sums(start.to(devices.x_NF.dtype))
        self._stale: set[int] = set()  # servers whose sums are formed anew before they are used
        # Sync-cloud: servers whose sums are on their way; those that have changed since, as sent
        self._reported: dict[int, tuple[Tensor, float] | None] = {}
        self._accepted: dict[int, Tensor] = {}  # last accepted models, of devices to be restored
        self._later: deque[Instruction] = deque()  # what waits for devices that are at work
        self._wait: Wait | None = None

    def _first_sums(self, start: Tensor) -> Sums:
        servers = len(self._homes)
        total_VF = torch.zeros(servers, len(start), dtype=torch.float64, device=start.device)
        sums = Sums(total_VF, [0.0] * servers)
        if self.algorithm.counts == "members":
            for n, members in enumerate(self._homes):
                sums.weight_V[n] = sum(self.weights[i] for i in members if i not in self._absent)
                total_VF[n] = sums.weight_V[n] * start.double()
        return sums

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        self.workers = workers
        self.devices.use(workers)

    def remember(self, devices: Iterable[int]) -> None:
        """Keep the last accepted model of these devices, from the start: they will be restored."""
        if self.algorithm.personal:
            self._accepted = {device: self.devices.x_NF[device].clone() for device in devices}

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
                if self.algorithm.counts == "active":
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
            case Accept(device) if device in self._accepted:
                self._accepted[device] = self.devices.x_NF[device].clone()
            case Restore(device, model):
                self.devices.forget_upload(device, unless=model)
                if self.algorithm.personal:
                    self.devices.set_model(device, self._accepted[device])
            case Forget(models):
                for model in models:
                    del self.models[model]

    # ---------------------------------------------------------------------------------------------
    # the cloud
    def _mix(self, part: Mix) -> None:
        """Eq. (6a)."""
        models = [self.models[handle] for handle in part.models]
        mixed = mixed_models(models, len(part.results), part.weights)
        self.models |= dict(zip(part.results, mixed, strict=True))

    def _step(self, part: Step) -> None:
        """Eq. (6b)."""
        mixed, total = self.models[part.mixed].double(), self.sums.total_VF[part.server]
        weight = self.sums.weight_V[part.server]
        self.models[part.result] = stepped(self.algorithm, mixed, total, weight, self.dtype)
        self.held[part.server] = part.result

    def _step_global(self, part: StepGlobal) -> None:
        """Eq. (5), from the sums as they were reported."""
        total_VF, weights = self.sums.total_VF, self.sums.weight_V
        sent = {n: kept for n, kept in self._reported.items() if kept is not None}
        if sent:
            rows = enumerate(total_VF)
            total_VF = torch.stack([sent[n][0] if n in sent else row for n, row in rows])
            weights = [sent[n][1] if n in sent else w for n, w in enumerate(weights)]
        z = self.models[part.model]
        self.models[part.result] = stepped_globally(
            self.algorithm, z, total_VF, weights, part.iterations, self.dtype
        )
        self._reported.clear()

    # ---------------------------------------------------------------------------------------------
    # membership
    def _admit(self, part: Admit) -> None:
        z = self.models[part.model]
        self._absent.discard(part.device)
        if self.algorithm.personal:
            # with a baseline, one who comes back may finish what it was at
            self.devices.forget_upload(part.device)
            self.devices.set_model(part.device, z)
        if part.device in self._accepted:
            self._accepted[part.device] = z.to(self.devices.x_NF.dtype)
        if self.algorithm.counts == "members":
            self._count(part.server, part.device, self.devices.x_NF[part.device], 1.0)

    def _dismiss(self, part: Dismiss) -> None:
        self._absent.add(part.device)
        if self.algorithm.counts != "members":
            return
        last = self.devices.last_counted(part.device)
        if part.anew:
            self._keep_report(part.server)
            self._stale.add(part.server)  # several may leave at once
        else:
            self._count(part.server, part.device, last, -1.0)

    def _form_anew(self) -> None:
        """Sums from the contributions of those who are members, in order, whatever was lost by
        rounding before.
        """
        if self._stale and self.devices.one_sum:
            self._stale = {*range(len(self._homes))}
        for server in sorted(self._stale):
            members = [i for i in sorted(self._homes[server]) if i not in self._absent]
            self.sums.total_VF[server] = self.devices.sum_of(members)
            weights = (self.weights[device] for device in members)
            self.sums.weight_V[server] = reduce(operator.add, weights, 0.0)  # one by one
        self._stale.clear()

    def _count(self, server: int, device: int, model: Tensor, sign: float) -> None:
        weight = sign * self.weights[device]
        self._keep_report(server)
        cloud_step.absorb(self.sums.total_VF[server], weight, model, None)
        self.sums.weight_V[server] += weight

    def _keep_report(self, server: int) -> None:
        """What it has reported stays as it was."""
        if server in self._reported and self._reported[server] is None:
            self._reported[server] = (
                self.sums.total_VF[server].clone(),
                self.sums.weight_V[server],
            )

    # ---------------------------------------------------------------------------------------------
    # the state
    def global_NF(self) -> Tensor:
        """z_n of every server, stacked."""
        return torch.stack([self.models[handle] for handle in self.held])

    def personal(self, device: int, server: int) -> Tensor:
        """x_i; with a consensus algorithm that is z."""
        if self.algorithm.personal:
            return self.devices.x_NF[device].to(self.dtype)
        return self.models[self.held[server]]

    def distance(self, members: Sequence[tuple[int, int]]) -> float:
        """The mean of ||x_i - z_n|| over (device, server)."""
        z_VF, x_NF = self.global_NF(), self.devices.x_NF
        if isinstance(x_NF, Rows):
            return x_NF.total_distance(z_VF, members) / len(members)
        parts = (members[k : k + TOGETHER] for k in range(0, len(members), TOGETHER))
        return sum(total_distance(x_NF, z_VF, part) for part in parts) / len(members)

    def state(self) -> dict[str, Tensor | SomeRows]:
        """Everything that a checkpoint needs. Only valid between rounds."""
        self.settle()
        return {
            **state_of("x", self.devices.x_NF),
            **state_of("x_prev", self.devices.prev_NP),
            "total": self.sums.total_VF,
            "weight": torch.tensor(self.sums.weight_V, dtype=torch.float64),
            **{f"model:{handle}": model for handle, model in self.models.items()},
        }

    def load_state(
        self, state: Mapping[str, Tensor], held: Sequence[ModelRef], absent: Iterable[int]
    ) -> None:
        """The inverse of `state`: which handle each server has, and which devices are no members,
        follows from the schedule.
        """
        where = self.sums.total_VF.device
        for name, models in (("x", self.devices.x_NF), ("x_prev", self.devices.prev_NP)):
            rows = state.get(f"{name}:rows", torch.arange(len(models)))
            models.index_copy_(0, rows.to(models.device), state[name].to(models.device))
        self.sums.total_VF.copy_(state["total"])
        self.sums.weight_V[:] = [float(w) for w in state["weight"]]
        named = {k.removeprefix("model:"): v for k, v in state.items() if k.startswith("model:")}
        self.models = {handle: model.to(where) for handle, model in named.items()}
        self.held, self._absent = list(held), set(absent)

    def rename_models(self, held: Sequence[ModelRef]) -> None:
        """The same z_n under other handles, one for each server; others are forgotten."""
        self.models = {new: self.models[old] for new, old in zip(held, self.held, strict=True)}
        self.held = list(held)

    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        self.settle()
        tables = (self.devices.x_NF, self.devices.prev_NP, self.global_NF())
        return digest_of((models.dtype, tuple(models.shape), in_turn(models)) for models in tables)
