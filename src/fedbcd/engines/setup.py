"""From the description of a run to what plays it: machines, a schedule, numbers at x(0), and where
torch computes.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from fedbcd.algorithm.method import Bound
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.projection import tried
from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import Devices, StackedDevices
from fedbcd.compute.evaluate import Evaluator
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import MakeRows
from fedbcd.data.federation import FOR_ALL, Federation
from fedbcd.errors import ConfigError
from fedbcd.record.start import models_of
from fedbcd.schedule.driver import Machines
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.events import Schedule
from fedbcd.schedule.work import Reader, first_models
from fedbcd.spec import Precision, RunSpec


def make_machines(spec: RunSpec, federation: Federation) -> Machines:
    method = spec.method_of(federation)
    return Machines(
        federation.servers,
        spec.cloud,
        spec.active_of(federation),
        method.cloud_iterations,
        method.offline_limit,
        set(spec.changes(federation)[0]),
        method.at_once,
        spec.deadline,
    )


def make_schedule(spec: RunSpec, federation: Federation) -> Schedule:
    active = spec.active_of(federation)
    method = spec.method_of(federation)
    sent, changes = spec.sent(federation), spec.changes(federation)
    rules = spec.availability, spec.deadline
    return Schedule(method, spec.clock, spec.seed, active, *changes, sent, *rules)


def make_reader(
    spec: RunSpec,
    federation: Federation,
    remember: Collection[int] = (),
    undone: Collection[tuple[int, int]] = (),
) -> Reader:
    done = Effort(spec.method_of(federation), federation.sizes)
    return Reader(spec.cloud, len(federation.servers), remember, undone, done)


def make_trainer(
    spec: RunSpec, federation: Federation, device: torch.device
) -> tuple[Trainer, Tensor]:
    """What trains devices, and x(0)."""
    module, method = federation.make_model(spec.seed), spec.method_of(federation)
    objective = Objective(
        module.to(spec.dtype),
        federation.loss,
        torch.bfloat16 if spec.precision == "bfloat16" else None,
    )
    start = objective.layout.flatten(module, spec.dtype).to(device)
    p = objective.layout.size_P
    start[:p] = tried(method.projection, start[:p])  # x(0) is in X
    wiring = spec.uploads, start.to(spec.kept_as), max(map(len, federation.servers))
    bound = Bound(method, objective.layout, federation.sizes, wiring)
    trainer = Trainer(federation, method, objective, spec.seed, start, spec.max_batch, bound)
    return trainer, start


def make_devices(
    spec: RunSpec,
    federation: Federation,
    trainer: Trainer,
    start: Tensor,
    make_rows: MakeRows | None = None,
) -> StackedDevices:
    return StackedDevices(trainer, start, federation.devices, spec.kept_as, make_rows)


def make_numbers_of(
    spec: RunSpec, federation: Federation, trainer: Trainer, start: Tensor, devices: Devices
) -> Numbers:
    held = first_models(spec.cloud, len(federation.servers))
    late = set(spec.changes(federation)[0])
    return Numbers(federation, trainer, devices, held, start, late)


def make_numbers(
    spec: RunSpec,
    federation: Federation,
    device: torch.device,
    make_rows: MakeRows | None = None,
) -> Numbers:
    """Fresh numbers: all models at x(0); `make_rows` keeps personal models elsewhere than in a
    tensor.
    """
    trainer, start = make_trainer(spec, federation, device)
    devices = make_devices(spec, federation, trainer, start, make_rows)
    numbers = make_numbers_of(spec, federation, trainer, start, devices)
    if spec.start is not None:
        _begin_with(numbers, spec.start)
    return numbers


def rehearse(spec: RunSpec, federation: Federation) -> None:
    """Carry out once what others have written (model, loss, plan, server step, metric), on the
    first samples of a device, so that a sentence says what fails before anything runs.
    """
    trainer, start = make_trainer(replace(spec, max_batch=1), federation, torch.device("cpu"))
    trainer.check_vectorised(start)
    trainer.rehearse()
    Evaluator(federation, trainer.objective, start.device).check(start)


def _begin_with(numbers: Numbers, start: str | Path) -> None:
    """The models of an earlier run in place of x(0)."""
    x_NF, z_VF = models_of(start)
    devices, size = len(numbers.weights), numbers.bound.layout.size_F
    if x_NF.shape != (devices, size):
        raise ConfigError(
            f"start={str(start)!r} has models of {x_NF.shape[0]} devices with {x_NF.shape[1]}"
            f" values, this run {devices} with {size}; begin with a run of the same devices and"
            " the same model"
        )
    numbers.begin_with(x_NF, z_VF)


def rounds_between_looks(federation: Federation, spec: RunSpec, longer: float = 4) -> int:
    """How many rounds train for about `longer` times as long as it takes to test all models once.

    Counted, not timed, so that it is the same everywhere: to train on a sample (a small batch,
    forward and backward, a step) takes at least four times as long as to test on one.
    """
    if federation.test is None:
        return 1
    servers = len(federation.servers)
    tested = len(federation.test) * (1 if spec.cloud.sync else servers)
    personal = spec.method_of(federation).has_personal
    if personal and federation.own_tests is not None:
        spans = federation.own_tests.items()
        tested += sum(end - start for owner, (start, end) in spans if owner != FOR_ALL)
    elif personal and federation.labels is not None:
        found = torch.unique(federation.test.all_targets, return_counts=True)
        count = dict(zip(*(values.tolist() for values in found), strict=True))
        tested += sum(count.get(label, 0) for labels in federation.labels for label in labels)
    return math.ceil(longer * tested / (4 * samples_per_round(federation, spec)))


def _active_on_average(federation: Federation, spec: RunSpec) -> float:
    active = spec.active_of(federation)
    return active if isinstance(active, int) else mean(active)


def samples_per_round(federation: Federation, spec: RunSpec) -> float:
    """On how many samples a round trains, about."""
    method, servers = spec.method_of(federation), len(federation.servers)
    (low, high), batch = method.lengths(offline=bool(method.offline)), method.batch
    at_work = _active_on_average(federation, spec) * int(getattr(spec.cloud, "first", servers))
    limit = method.offline_limit
    if limit is not None:
        # activations take no samples; who was not in contact for long does not go on offline
        available = sum(method.available_of(len(members)) for members in federation.servers)
        at_work = min(available, at_work * limit)
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


@contextmanager
def threads_inside_torch(count: int | None) -> Iterator[None]:
    """So many for a while; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def find_torch_device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"torch_device={str(name)!r} cannot be used here ({reason}); use 'cpu', or 'cuda' where"
            " there is a GPU"
        ) from None
    return device
