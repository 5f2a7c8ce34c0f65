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

from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.objective import Loss
from fedbcd.config import convert
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
from fedbcd.errors import ConfigError, DataError

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
        if inputs.is_floating_point() or inputs.dtype in (torch.uint8, torch.int8)
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
    global models are tested on all that devices have
    metric    metric(outputs, targets) -> a score per sample, one for all, or a mapping of names to
    such; higher is better, unless it has an attribute better = "lower"
    metrics   several: `fb.Measure`s and such functions; what fits loss and targets by default, and
    the loss always
    holdout   a share of each device's samples to test its model on, where it has brought no test
    set, or a Holdout(test, validation, seed)
    transform applied to each batch of inputs on its way to the model
    augment   changes training batches before that, by addressed draws, e.g. FlipCrop()
    """

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
        pairs = [with_test(data) for data in devices]
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
    def from_partition(
        cls,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Loss,
        pool: Samples,
        partition: Partition,
        servers: Servers,
        *,
        test: Samples | None = None,
        metric: Metric | None = None,
        metrics: Sequence[Measure | Metric] = (),
        holdout: float | Holdout = 0.0,
        transform: Transform = as_dtype,
        augment: Augment | None = None,
    ) -> "Federation":
        """Devices that own positions of one common pool; the pool is not copied."""
        self, pool = cls.__new__(cls), as_samples("the pool", pool)
        owned = [torch.from_numpy(p) for p in partition.samples]
        owned = self._set_tests(pool, owned, test, {}, holdout)
        self._set(model, loss, pool, owned, servers)
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
        self.transform = transform
        self.augment = augment
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
            return copy.deepcopy(self._model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                module = self._model()
            except TypeError as error:
                raise ConfigError(
                    f"model() cannot be called: {error}; give a callable without arguments"
                ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model() returned {type(module).__name__}; it must return a torch.nn.Module"
            )
        return module

    def fingerprint(self) -> str:
        """A hash of the data and of who owns it, by which a run folder knows its federation
        again.
        """
        digest = hashlib.sha256(repr((self.sizes, self.servers)).encode())
        for tensor in (self.pool.inputs, self.pool.targets, self.positions):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


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
        if owner == FOR_ALL:
            continue
        if len(found[-1]) == 0:
            raise DataError(f"{name} is empty; give None, or samples")
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


def as_samples(name: str, data: DeviceData) -> Samples:
    """Data as tensors, all finite; `name` says whose they are."""
    try:
        samples = _as_samples(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} cannot be used: {error}; give (inputs, targets) or a Dataset of such pairs"
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


def _as_samples(data: DeviceData) -> Samples:
    if isinstance(data, Samples):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return Samples(torch.as_tensor(data[0]), torch.as_tensor(data[1]))
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(f"a {type(data).__name__} has no length")
    rows = [data[k] for k in range(len(data))]
    if not rows:
        raise ValueError("it has no samples")
    return Samples(
        *(torch.stack([torch.as_tensor(v) for v in column]) for column in zip(*rows, strict=True))
    )


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


def _servers(servers: Servers, devices: int) -> list[list[int]]:
    if isinstance(servers, Mapping):
        home = convert(servers, Mapping[int, int], "servers")
        servers = [[i for i in home if home[i] == n] for n in sorted({*home.values()})]
    groups = convert(servers, int | Sequence[Sequence[int]], "servers")
    if isinstance(groups, int):
        servers = groups
        if not 1 <= servers <= devices:
            raise ConfigError(f"servers={servers} must be between 1 and the {devices} devices")
        bounds = [round(k * devices / servers) for k in range(servers + 1)]
        return [list(range(a, b)) for a, b in pairwise(bounds)]
    groups = [list(group) for group in groups]
    counts = Counter(device for group in groups for device in group)
    wrong = [f"server {n} is empty" for n, group in enumerate(groups) if not group]
    wrong += [
        f"device {device} appears {counts[device]} times"
        for device in range(devices)
        if counts[device] != 1
    ]
    wrong += [f"there is no device {device}" for device in counts if device not in range(devices)]
    if wrong:
        raise ConfigError(
            f"servers must name each of the {devices} devices exactly once, and no server may be"
            f" empty: {wrong[0]}"
        )
    return groups
