"""A federation: a model, a loss, and who owns which data under which server."""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbcd.algorithm.augment import Augment, FlipCrop
from fedbcd.algorithm.objective import Loss
from fedbcd.config import PLACES, called, convert, offered, shown
from fedbcd.data.datasets import Samples
from fedbcd.data.holdout import Holdout, divided
from fedbcd.data.measures import (
    Better,
    Measure,
    Metric,
    accuracy,
    chosen_measures,
    fitting_measures,
    loss_measure,
    mse,
)
from fedbcd.data.partition import Partition, labels_of
from fedbcd.data.understood import (
    check_function,
    check_kind,
    check_module,
    is_pair,
    labels_as_int64,
    listed,
    tensor_of,
)
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling

Transform = Callable[[Tensor, torch.dtype], Tensor]
Servers = int | Sequence[Sequence[int]] | Mapping[int, int]
DeviceData = Samples | tuple[Any, Any] | Dataset[Any]


FOR_ALL = -1  # whose test samples are nobody's own
Key = tuple[str, int]  # samples for what, and whose


def as_dtype(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """The default transform: numbers become the model's dtype; integer tokens (int32, int64) are
    left alone.
    """
    return (
        inputs.to(dtype)
        if inputs.is_floating_point() or inputs.dtype in (torch.uint8, torch.int8, torch.bool)
        else inputs
    )


class Federation:
    """Everything that is given: model, loss, data per device, servers, and what to evaluate on.

    model     a callable without arguments that makes the `nn.Module` (a class will do), or a module
    to start from
    loss      loss(outputs, targets) -> scalar, the mean over the batch
    devices   per device: (inputs, targets) as tensors or arrays, or a torch Dataset of (input,
    target); or a pair (train, test) of such data, test None where a device has none of its own
    servers   how many servers share the devices evenly, a list of device numbers per server, or
    the server of each device, {device: server}
    test      (inputs, targets) or a Dataset; a personal model is tested on its device's own test
    samples, or else on those of these whose label its device owns (`data.measure`). Without it
    global models are tested on all test samples of devices
    metric    metric(outputs, targets) -> a score per sample, one for all, or a mapping of names to
    such; higher is better, unless it has an attribute better = "lower"
    metrics   several: `fb.Measure`s and such functions; what fits loss and targets by default, and
    the loss always
    holdout   a share of each device's samples to test its model on, where it has brought no test
    set, or a Holdout(test, validation, seed)
    transform applied to each batch of inputs on its way to the model
    augment   changes training batches before that, by addressed draws, e.g. FlipCrop()
    """

    @called("Federation")
    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Loss,
        devices: Sequence[DeviceData | tuple[DeviceData, DeviceData | None]],
        servers: Servers,
        *,
        test: DeviceData | None = None,
        metric: Metric | None = None,
        metrics: Sequence[Measure | Metric] = (),
        holdout: float | Holdout = 0.0,
        transform: Transform = as_dtype,
        augment: Augment | None = None,
    ) -> None:
        pairs = [with_test(data) for data in listed(devices)]
        parts = [as_samples(f"device {i}", data) for i, (data, _) in enumerate(pairs)]
        _check_parts(parts)
        pool = Samples(torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts]))
        bounds = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
        owned = [torch.arange(a, b) for a, b in pairwise(bounds)]
        tests = {i: own for i, (_, own) in enumerate(pairs) if own is not None}
        owned = self._set_tests(pool, owned, test, tests, holdout)
        self._set(model, loss, pool, owned, servers)
        self._set_evaluation((metric, metrics), transform, None, augment)

    @classmethod
    @called("Federation.from_partition")
    def from_partition(
        cls,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Loss,
        pool: DeviceData,
        partition: Partition,
        servers: Servers,
        *,
        test: DeviceData | None = None,
        metric: Metric | None = None,
        metrics: Sequence[Measure | Metric] = (),
        holdout: float | Holdout = 0.0,
        transform: Transform = as_dtype,
        augment: Augment | None = None,
    ) -> "Federation":
        """Devices that own positions of one common pool; the pool is not copied."""
        self, samples = cls.__new__(cls), as_samples("the pool", pool)
        owned = self._set_tests(samples, _positions(partition, len(samples)), test, {}, holdout)
        self._set(model, loss, samples, owned, servers)
        self._set_evaluation((metric, metrics), transform, partition.labels, augment)
        return self

    def _set(
        self,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Loss,
        pool: Samples,
        owned: list[Tensor],
        servers: Servers,
    ) -> None:
        if not owned:
            raise DataError("a federation needs at least one device; `devices` is empty")
        for i, positions in enumerate(owned):
            if len(positions) == 0:
                raise DataError(f"device {i} has no samples; leave it out, or give it data")
        check_function("model", model, "lambda: torch.nn.Linear(4, 2)", classes=True)
        check_function("loss", loss, "torch.nn.functional.cross_entropy")
        self._model = model
        self.loss = loss
        self.pool = pool
        self.sizes = [len(positions) for positions in owned]
        self.positions = torch.cat(owned)
        self.starts = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        self.servers = _servers(servers, len(owned))

    def _set_tests(
        self,
        pool: Samples,
        owned: Sequence[Tensor],
        common: DeviceData | None,
        brought: Mapping[int, DeviceData],
        holdout: float | Holdout,
    ) -> list[Tensor]:
        """Who is tested on what; returns the samples that devices train on."""
        parts = divided(owned, convert(holdout, float | Holdout, "holdout"), brought)

        def of_pool(positions: Tensor) -> Samples:
            return Samples(pool.inputs[positions], pool.targets[positions])

        tests: dict[Key, DeviceData | None] = {("all", FOR_ALL): common}
        tests |= {("test", i): data for i, data in brought.items()}
        tests |= {("test", i): of_pool(positions) for i, positions in parts.test.items()}
        tests |= {("validation", i): of_pool(found) for i, found in parts.validation.items()}
        self.test, spans = _joined(tests, pool)
        # where in it each device's own test samples are, and those for all; those to validate on
        own = {i: span for (kind, i), span in spans.items() if kind != "validation"}
        self.own_tests = own if set(own) - {FOR_ALL} else None
        self.validation = {i: span for (kind, i), span in spans.items() if kind == "validation"}
        self.common_test = own.get(FOR_ALL)
        return parts.train

    def _set_evaluation(
        self,
        said: tuple[Metric | None, Sequence[Measure | Metric]],
        transform: Transform,
        labels: Sequence[tuple[int, ...]] | None,
        augment: Augment | None,
    ) -> None:
        metric, metrics = said
        if metric is not None and metrics:
            raise ConfigError("metric=... and metrics=[...] are both given; put all into metrics")
        targets = self.pool.targets
        self.metric = metric or (mse if targets.is_floating_point() else accuracy)
        self.metrics = tuple([metric] if metric is not None else metrics)
        self._measures = () if self.metrics else fitting_measures(self.loss, targets)
        self._loss = loss_measure(self.loss, targets)
        self.transform = as_dtype if transform is None else transform
        check_function("transform", self.transform, "lambda inputs, dtype: inputs.to(dtype)")
        self.augment = augment
        if augment is not None:
            offered(augment, "augment", "apply(inputs, h)", kinds={"": FlipCrop})
        is_labelled = not targets.is_floating_point() and targets.ndim == 1
        if labels is None and self.test is not None and is_labelled:
            labels = [labels_of(targets[self.owned(i)]) for i in range(len(self.sizes))]
        self.labels = labels

    def measures(self, outputs: Tensor, targets: Tensor) -> tuple[Measure, ...]:
        """What models are measured by, the loss last; outputs and targets are an example."""
        found = chosen_measures(self.metrics or self._measures, outputs, targets)
        has_loss = any(self._loss.name in each.names for each in found)
        return found if has_loss else (*found, self._loss)

    def known_measures(self) -> dict[str, Better]:
        """The names of what models are measured by, and which of their values are better; by a
        trial on the first samples.
        """
        inputs, targets = self.pool.inputs[:2], self.pool.targets[:2]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = self.make_model(0).eval()
            dtype = next((p.dtype for p in module.parameters()), torch.float32)
            found = self.measures(module(self.transform(inputs, dtype)), targets)
        return {name: better for each in found for name, better in each.directions.items()}

    @property
    def devices(self) -> int:
        return len(self.sizes)

    def owned(self, device: int) -> Tensor:
        start = int(self.starts[device])
        return self.positions[start : start + self.sizes[device]]

    def make_model(self, seed: int) -> nn.Module:
        """A new module, with the initial weights that belong to `seed` (or those of the module that
        was given).
        """
        if isinstance(self._model, nn.Module):
            return copy.deepcopy(check_module("model", self._model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            remedy = (
                "give a module, or a function without arguments that makes one, such as lambda:"
                " torch.nn.Linear(4, 2)"
            )
            with calling("model() fails", remedy=remedy):
                module = self._model()
        return check_module("model()", module)

    def fingerprint(self) -> str:
        """A hash of the data and of who owns it, by which a run folder knows its federation
        again.
        """
        digest = hashlib.sha256(repr((self.sizes, self.servers)).encode())
        for tensor in (self.pool.inputs, self.pool.targets, self.positions):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def check_federation(given: Any) -> None:
    """Refuse anything else in its place."""
    if not isinstance(given, Federation):
        raise ConfigError(
            f"federation = {shown(given)} is no fb.Federation; make one of your model, loss and"
            " data, and give it first"
        )


def with_test(data: Any) -> tuple[DeviceData, DeviceData | None]:
    """(train, test) of a device; the parts of (inputs, targets) are tensors, arrays or lists."""
    if isinstance(data, tuple) and len(data) == 2:
        train, test = data
        kinds = (Samples, tuple, Dataset)
        if isinstance(train, kinds) and (test is None or isinstance(test, kinds)):
            return train, test
    return data, None


def _joined(
    tests: Mapping[Key, DeviceData | None], like: Samples
) -> tuple[Samples | None, dict[Key, tuple[int, int]]]:
    """All test samples one after another, and where each one's begin and end."""
    found: list[Samples] = []
    spans: dict[Key, tuple[int, int]] = {}
    start = 0
    for (kind, owner), data in tests.items():
        if data is None:
            continue
        name = "the test set" if owner == FOR_ALL else f"the test set of device {owner}"
        found.append(as_samples(name, data))
        spans[kind, owner] = start, start + len(found[-1])
        start += len(found[-1])
        if len(found[-1]) == 0:
            raise DataError(f"{name} is empty; give None, or samples")
        if owner == FOR_ALL:
            _check_axes(found[-1], like)
            continue
        for kind in ("inputs", "targets"):
            mine, theirs = getattr(found[-1], kind), getattr(like, kind)
            if (mine.dtype, mine.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
                raise DataError(
                    f"{name} has {kind} of shape {tuple(mine.shape[1:])} ({mine.dtype}), the"
                    f" devices' are {tuple(theirs.shape[1:])} ({theirs.dtype}); bring them to that"
                )
    if len(found) < 2:
        return (found[0] if found else None), spans
    inputs, targets = ([getattr(one, kind) for one in found] for kind in ("inputs", "targets"))
    return Samples(torch.cat(inputs), torch.cat(targets)), spans


def _check_axes(test: Samples, like: Samples) -> None:
    """A list of test sets passes for a set of samples with an axis more."""
    for kind in ("inputs", "targets"):
        mine, theirs = getattr(test, kind), getattr(like, kind)
        if mine.ndim != theirs.ndim:
            raise DataError(
                f"the test set has {kind} of shape {tuple(mine.shape[1:])}, the devices' are"
                f" {tuple(theirs.shape[1:])}; bring them to that (own test sets of devices go with"
                " them: devices=[(train, test), ...])"
            )


def as_samples(name: str, data: DeviceData) -> Samples:
    """Data as tensors, all finite; `name` says whose they are."""
    try:
        check_kind(data)
        samples = _as_samples(data)
    except DataError as error:
        raise DataError(f"{name} cannot be used: {error}") from None
    except Exception as error:
        raise DataError(
            f"{name} cannot be used: {_reason(error)}; give (inputs, targets) or a Dataset of such"
            " pairs"
        ) from error
    for kind, tensor in (("input", samples.inputs), ("target", samples.targets)):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int(
                (~torch.isfinite(tensor))
                .flatten(1 if tensor.ndim > 1 else 0)
                .reshape(len(tensor), -1)
                .any(1)
                .nonzero()[0]
            )
            raise DataError(
                f"{name} has a value that is not finite in {kind} {bad}; remove or repair that"
                " sample"
            )
    return samples


def _reason(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return said if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {said}"


def _as_samples(data: Any) -> Samples:
    if isinstance(data, Samples):
        given: list[Any] = [data.inputs, data.targets]
    elif not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(f"a {type(data).__name__} has no length")
    else:
        given = [*data] if is_pair(data) else _columns([data[k] for k in range(len(data))])
    inputs, targets = tensor_of(given[0], "inputs"), tensor_of(given[1], "targets")
    targets = labels_as_int64(targets)
    same = isinstance(data, Samples) and inputs is data.inputs and targets is data.targets
    return data if same else Samples(inputs, targets)


def _columns(rows: list[Any]) -> list[Any]:
    if not rows:
        raise ValueError("it has no samples")
    if any(not isinstance(row, tuple | list) or len(row) != 2 for row in rows):
        raise TypeError(f"its samples are {type(rows[0]).__name__}, not (input, target)")
    return [[torch.as_tensor(v) for v in column] for column in zip(*rows, strict=True)]


def _check_parts(parts: Sequence[Samples]) -> None:
    if not parts:
        raise DataError("a federation needs at least one device; `devices` is empty")
    for i, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"device {i} has no samples; leave it out, or give it data")
        for kind, mine, first in (
            ("inputs", part.inputs, parts[0].inputs),
            ("targets", part.targets, parts[0].targets),
        ):
            if mine.dtype != first.dtype:
                raise DataError(
                    f"device {i} has {kind} of {mine.dtype}, device 0 of {first.dtype}; use one"
                    " dtype for all"
                )
            if mine.shape[1:] != first.shape[1:]:
                raise DataError(
                    f"device {i} has {kind} of shape {tuple(mine.shape[1:])}, device 0 of"
                    f" {tuple(first.shape[1:])}; all devices must hold samples of one shape"
                )


def _positions(partition: Any, samples: int) -> list[Tensor]:
    """Of each device's samples in a pool of this size."""
    if not isinstance(partition, Partition):
        splits = hasattr(partition, "split")
        remedy = "give its .split(targets, devices)" if splits else "give Partition.of(targets, it)"
        raise ConfigError(f"partition = {partition!r:.80} is no Partition; {remedy}")
    owned = [torch.from_numpy(positions) for positions in partition.samples]
    last = max((int(own.max()) for own in owned if len(own)), default=0)
    if last >= samples:
        raise DataError(
            f"the partition names sample {last}, but the pool has {samples}; split this pool"
        )
    return owned


def _servers(servers: Servers, devices: int) -> list[list[int]]:
    given, remedy = _grouped(servers), "; give how many, lists of devices, or {device: server}"
    if isinstance(given, Mapping):
        home = convert(given, Mapping[int, int], "servers")
        given = [[i for i in home if home[i] == n] for n in sorted({*home.values()})]
    try:
        groups = convert(given, int | Sequence[Sequence[int]], "servers")
    except ConfigError as error:
        raise ConfigError(f"{error}{remedy}") from None
    if isinstance(groups, int):
        if not 1 <= groups <= devices:
            raise ConfigError(f"servers={groups} must be between 1 and the {devices} devices")
        bounds = [round(k * devices / groups) for k in range(groups + 1)]
        return [list(range(a, b)) for a, b in pairwise(bounds)]
    groups = [list(group) for group in groups]
    counts = Counter(device for group in groups for device in group)
    wrong = [f"server {n} is empty" for n, group in enumerate(groups) if not group]
    wrong += [f"there is no device {device}" for device in counts if device not in range(devices)]
    wrong += [
        f"device {device} appears {counts[device]} times"
        for device in range(devices)
        if counts[device] != 1
    ]
    if wrong:
        raise ConfigError(
            f"servers must name each of the {devices} devices exactly once, and no server may be"
            f" empty: {wrong[0]}"
        )
    return groups


def _grouped(servers: Any) -> Any:
    """Groups of any kind as lists; of {server: its devices} the groups."""
    unordered = (range, set, frozenset)
    groups = [*servers.values()] if isinstance(servers, Mapping) else servers
    of_groups = isinstance(groups, list | tuple) and all(
        isinstance(own, (list, tuple, *unordered)) for own in groups
    )
    if not of_groups:
        return servers
    return [sorted(own) if isinstance(own, unordered) else own for own in groups]


for name in ("model", "loss", "devices", "servers", "test", "metric", "transform", "augment"):
    PLACES[name] = f"fb.Federation(..., {name}=...)"
