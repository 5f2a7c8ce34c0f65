"""What makes a run, beyond its federation: checked before anything is written, and kept in the head
of its event log.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedbcd.algorithm.cloud import check_absolute_step, check_doubly_stochastic
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.variants import Algorithm, FedBCDI, cloud_weights, penalties
from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import Devices, StackedDevices
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import MakeRows
from fedbcd.data.federation import Federation
from fedbcd.data.measure import DEFAULT, Measure, check_measure
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.protocol.clouds import Cloud, GraphCloud, SyncCloud
from fedbcd.recorded import in_record, shortened
from fedbcd.schedule.delays import Clock
from fedbcd.schedule.driver import Machines
from fedbcd.schedule.work import Reader, first_models

Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass
class Settings:
    """What makes a run, beyond the federation: see `train`."""

    algorithm: Algorithm
    cloud: Cloud = field(default_factory=SyncCloud)
    active: int | None = None
    clock: Clock = field(default_factory=Clock)
    seed: int = 0
    joins: Mapping[int, int] = field(default_factory=dict)
    leaves: Mapping[int, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    max_batch: int | None = None
    storage: torch.dtype | None = None  # of personal models between sessions; None: as `dtype`
    precision: Precision = "float32"  # of products of float32 numbers
    measure: Measure = DEFAULT  # of personal accuracy, see `data.measure`

    def active_of(self, federation: Federation) -> int:
        """q: as given, or 0.3 of the smallest server's members."""
        return (
            max(1, round(0.3 * min(self._members(federation))))
            if self.active is None
            else self.active
        )

    def _members(self, federation: Federation) -> list[int]:
        return [
            sum(device not in self.joins for device in members) for members in federation.servers
        ]

    def check(self, federation: Federation) -> None:
        """Refuse what cannot be, before anything is written."""
        self._check_changes(federation)
        members = self._members(federation)
        active = self.active_of(federation)
        if not 1 <= active <= min(members):
            raise ConfigError(
                f"active={active} must be between 1 and {min(members)}, the members of the smallest"
                " server"
            )
        if isinstance(self.algorithm, FedBCDI):
            available = min(self.algorithm.available_of(n) for n in members)
            if active > available:
                raise ConfigError(
                    f"active={active} exceeds the {available} available devices of a server; use"
                    f" active <= {available}"
                )
        if not self.algorithm.personal and not self.cloud.sync:
            raise ConfigError(
                f"{self.algorithm.name} keeps one model everywhere and runs on the sync cloud only,"
                f" not {self.cloud.name}"
            )
        gamma = penalties(self.algorithm, federation.devices)  # refuses a wrong number of them
        if self.algorithm.server_step_form == "absolute":
            sizes = [len(members) for members in federation.servers]  # with those that join late
            most = sum(sizes) if self.cloud.sync else max(sizes)
            check_absolute_step(self.algorithm.server_step, float(gamma.max()), most)
        if isinstance(self.cloud, GraphCloud):
            for matrix in self.cloud.mixing:
                check_doubly_stochastic(torch.tensor(matrix, dtype=torch.float64))
        for name, dtype in (("dtype", self.dtype), ("storage", self.storage or self.dtype)):
            if not dtype.is_floating_point:
                raise ConfigError(
                    f"{name}={dtype} must be a floating-point dtype, such as torch.float32"
                )
        if self.precision not in get_args(Precision):
            raise ConfigError(
                f"precision={self.precision!r} is unknown; known: {', '.join(get_args(Precision))}"
            )
        if self.precision != "float32" and self.dtype != torch.float32:
            raise ConfigError(
                f"precision={self.precision!r} is about products of float32 numbers; leave"
                f" dtype={self.dtype} out"
            )
        check_measure(self.measure)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must fit in 64 bits: between -2^63 and 2^63 - 1")

    def _check_changes(self, federation: Federation) -> None:
        for name, changes in (("joins", self.joins), ("leaves", self.leaves)):
            for device, when in changes.items():
                if not (0 <= device < federation.devices and when >= 1):
                    raise ConfigError(
                        f"{name}[{device}]={when} must name a device below {federation.devices} and"
                        " a round from 1 on"
                    )
        for device in set(self.joins) & set(self.leaves):
            if self.leaves[device] <= self.joins[device]:
                raise ConfigError(
                    f"device {device} leaves in round {self.leaves[device]} but joins in"
                    f" {self.joins[device]} only"
                )
        for n, members in enumerate(federation.servers):
            if all(device in self.leaves or device in self.joins for device in members):
                raise ConfigError(
                    f"server {n} would be left without devices; keep at least one that neither"
                    " joins late nor leaves"
                )

    def identity(self, federation: Federation) -> dict[str, Any]:
        """What makes this run this run and no other, as plain data. How long it runs is not part of
        it.
        """
        return {
            "algorithm": in_record(self.algorithm),
            "cloud": describe(self.cloud),
            "clock": {"arrival": describe(self.clock.arrival), "step": describe(self.clock.step)},
            "active": self.active_of(federation),
            "seed": self.seed,
            "joins": sorted(self.joins.items()),
            "leaves": sorted(self.leaves.items()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_batch": self.max_batch,
            **(
                {}
                if self.storage is None
                else {"storage": str(self.storage).removeprefix("torch.")}
            ),
            **({} if self.precision == "float32" else {"precision": self.precision}),
            **shortened({"measure": self.measure}, "run"),
            "servers": federation.servers,
            "data": federation.fingerprint(),
            "augment": (
                describe(federation.augment)
                if is_dataclass(federation.augment)
                else getattr(federation.augment, "name", None)
            ),
            "model": _model_fingerprint(federation.make_model(self.seed)),
        }

    def machines(self, federation: Federation) -> Machines:
        """Fresh machines."""
        limit = self.algorithm.offline_limit if isinstance(self.algorithm, FedBCDI) else None
        iterations = self.algorithm.cloud_iterations
        return Machines(
            federation.servers,
            self.cloud,
            self.active_of(federation),
            iterations,
            limit,
            set(self.joins),
        )

    @property
    def kept_as(self) -> torch.dtype:
        """Of personal models."""
        return self.storage or self.dtype

    def reader(
        self,
        federation: Federation,
        remember: Collection[int] = (),
        undone: Collection[tuple[int, int]] = (),
    ) -> Reader:
        """What turns this run's transitions into rounds."""
        return Reader(self.cloud, len(federation.servers), remember, undone)

    def trainer(self, federation: Federation, device: torch.device) -> tuple[Trainer, Tensor]:
        """What trains devices, and x(0)."""
        module = federation.make_model(self.seed)
        objective = Objective(
            module.to(self.dtype),
            federation.loss,
            torch.bfloat16 if self.precision == "bfloat16" else None,
        )
        start = objective.layout.flatten(module, self.dtype).to(device)
        p = objective.layout.size_P
        start[:p] = self.algorithm.projection.project(start[:p])  # x(0) is in X
        trainer = Trainer(federation, self.algorithm, objective, self.seed, start, self.max_batch)
        return trainer, start

    def devices(
        self,
        federation: Federation,
        trainer: Trainer,
        start: Tensor,
        make_rows: MakeRows | None = None,
    ) -> StackedDevices:
        """All devices at x(0)."""
        weights = cloud_weights(self.algorithm, federation.sizes).tolist()
        return StackedDevices(trainer, start, weights, self.kept_as, make_rows)

    def numbers_of(
        self, federation: Federation, trainer: Trainer, start: Tensor, devices: Devices
    ) -> Numbers:
        """All models at x(0), where devices are already."""
        held = first_models(self.cloud, len(federation.servers))
        return Numbers(federation, trainer, devices, held, start, set(self.joins))

    def numbers(
        self, federation: Federation, device: torch.device, make_rows: MakeRows | None = None
    ) -> Numbers:
        """Fresh numbers: all models at x(0); `make_rows` keeps personal models elsewhere than in a
        tensor.
        """
        trainer, start = self.trainer(federation, device)
        devices = self.devices(federation, trainer, start, make_rows)
        return self.numbers_of(federation, trainer, start, devices)


def rounds_between_looks(federation: Federation, settings: Settings, longer: float = 4) -> int:
    """How many rounds train for about `longer` times as long as it takes to test all models once.

    Counted, not timed, so that it is the same everywhere: to train on a sample (a small batch,
    forward and backward, a step) takes at least four times as long as to test on one.
    """
    if federation.test is None:
        return 1
    servers = len(federation.servers)
    tested = len(federation.test) * (1 if settings.cloud.sync else servers)
    if federation.labels is not None and settings.algorithm.personal:
        found = torch.unique(federation.test.targets, return_counts=True)
        count = dict(zip(*(values.tolist() for values in found), strict=True))
        tested += sum(count.get(label, 0) for labels in federation.labels for label in labels)
    return math.ceil(longer * tested / (4 * samples_per_round(federation, settings)))


def samples_per_round(federation: Federation, settings: Settings) -> float:
    """On how many samples a round trains, about."""
    servers, (low, high), batch = (
        len(federation.servers),
        settings.algorithm.steps,
        settings.algorithm.batch,
    )
    at_work = settings.active_of(federation) * int(getattr(settings.cloud, "first", servers))
    if isinstance(
        settings.algorithm, FedBCDI
    ):  # activations take no samples; who was not in contact for long does not go on offline
        available = sum(
            settings.algorithm.available_of(len(members)) for members in federation.servers
        )
        at_work = min(available, at_work * settings.algorithm.offline_limit)
    batch = sum(federation.sizes) // federation.devices if batch == "all" else batch
    return at_work * batch * (low + high) / 2


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Let the GPU's matrix units round factors to TF32 (or not), for a while; CPUs do not have
    it.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def torch_device(name: str | torch.device) -> torch.device:
    """The torch device of this name, if there is one."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"device={str(name)!r} cannot be used here ({reason}); use 'cpu', or 'cuda' where there"
            " is a GPU"
        ) from None
    return device


def _model_fingerprint(module: nn.Module) -> str:
    """A hash of a module's tensors: their names, shapes and initial values."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
