"""A federation: a model, a loss, and who owns which data under which server."""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedbcd.algorithm.augment import Augment, FlipCrop
from fedbcd.algorithm.objective import Loss, takes_scores
from fedbcd.algorithm.trees import Tree, joined, leaves, mapped, module_loss, outputs_of, shapes
from fedbcd.config import PLACES, called, convert, offered, shown
from fedbcd.data.datasets import Samples
from fedbcd.data.holdout import Holdout, divided
from fedbcd.data.lazy import (
    LazySamples,
    NamedTensors,
    are_several,
    as_tensors,
    is_dataset,
    is_sequence,
    partitions_of,
)
from fedbcd.data.measures import (
    OWN_LOSS,
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
from fedbcd.data.samples import Pool
from fedbcd.data.understood import (
    check_function,
    check_kind,
    check_module,
    checked_metrics,
    is_pair,
    labels_as_int64,
    listed,
    tensor_of,
)
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling

Transform = Callable[[Any, torch.dtype], Any]
Servers = int | Sequence[Sequence[int]] | Mapping[int, int]
DeviceData = Pool | tuple[Any, Any] | Dataset[Any]


FIRST = torch.tensor([0])
SEEN = 16  # samples whose targets say which measures fit, where they have to be read
FOR_ALL = -1  # whose test samples are nobody's own
Key = tuple[str, int]  # samples for what, and whose


def as_dtype(inputs: Tree, dtype: torch.dtype) -> Tree:
    """The default transform: numbers become the model's dtype; integer tokens (int32, int64) are
    left alone. Of several inputs, each.
    """
    if not isinstance(inputs, Tensor):
        return mapped(lambda part: as_dtype(part, dtype), inputs)
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
    devices   per device: (inputs, targets) as tensors or arrays, inputs perhaps a mapping or a
    tuple of such; or a torch Dataset, or one of Hugging Face, which is read when it is needed
    (`LazySamples` says how); or a pair (train, test) of such data, test None where a device has
    none of its own. Or an object with `load_partition`, as flwr-datasets has them
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
        metric: Measure | Metric | str | None = None,
        metrics: Sequence[Measure | Metric | str] = (),
        holdout: float | Holdout = 0.0,
        transform: Transform = as_dtype,
        augment: Augment | None = None,
    ) -> None:
        pairs = [with_test(data) for data in listed(partitions_of(devices))]
        parts = [as_samples(f"device {i}", data) for i, (data, _) in enumerate(pairs)]
        _check_parts(parts)
        pool = joined_pool(parts)
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
        metric: Measure | Metric | str | None = None,
        metrics: Sequence[Measure | Metric | str] = (),
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
        pool: Pool,
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
        self.pool: Pool = pool
        self.sizes = [len(positions) for positions in owned]
        self.positions = torch.cat(owned)
        self.starts = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        self.servers = _servers(servers, len(owned))

    def _set_tests(
        self,
        pool: Pool,
        owned: Sequence[Tensor],
        common: DeviceData | None,
        brought: Mapping[int, DeviceData],
        holdout: float | Holdout,
    ) -> list[Tensor]:
        """Who is tested on what; returns the samples that devices train on."""
        parts = divided(owned, convert(holdout, float | Holdout, "holdout"), brought)
        tests: dict[Key, DeviceData | None] = {("all", FOR_ALL): common}
        tests |= {("test", i): data for i, data in brought.items()}
        tests |= {("test", i): pool.only(positions) for i, positions in parts.test.items()}
        tests |= {("validation", i): pool.only(found) for i, found in parts.validation.items()}
        self.test, spans = _joined(tests, pool)
        # where in it each device's own test samples are, and those for all; those to validate on
        own = {i: span for (kind, i), span in spans.items() if kind != "validation"}
        self.own_tests = own if set(own) - {FOR_ALL} else None
        self.validation = {i: span for (kind, i), span in spans.items() if kind == "validation"}
        self.common_test = own.get(FOR_ALL)
        return parts.train

    def _set_evaluation(
        self,
        said: tuple[Measure | Metric | str | None, Sequence[Measure | Metric | str]],
        transform: Transform,
        labels: Sequence[tuple[int, ...]] | None,
        augment: Augment | None,
    ) -> None:
        self.metrics = tuple(checked_metrics(*said))
        self.example = self.pool.take(self.positions[:1])
        usual = mse if self.example[1].is_floating_point() else accuracy
        self.metric = self.metrics[0] if self.metrics else usual
        self.transform = as_dtype if transform is None else transform
        check_function("transform", self.transform, "lambda inputs, dtype: inputs.to(dtype)")
        self.augment = augment
        if augment is not None:
            offered(augment, "augment", "apply(inputs, h)", kinds={"": FlipCrop})
        self._labels = labels

    @cached_property
    def labels(self) -> Sequence[tuple[int, ...]] | None:
        """Which each device owns, where there are tests by label."""
        targets = self.example[1]
        if self._labels is not None or self.test is None:
            return self._labels
        if targets.is_floating_point() or targets.ndim > 1:
            return None
        return [labels_of(self.pool.all_targets[self.owned(i)]) for i in range(len(self.sizes))]

    @cached_property
    def _fitting(self) -> tuple[Measure, ...]:
        """What fits these data, where nobody says; the loss last."""
        known = self.pool.known_targets
        seen = self.pool.take(self.positions[:SEEN])[1] if known is None else known
        return (*fitting_measures(self.loss, seen), loss_measure(self.loss, seen))

    @property
    def _loss(self) -> Measure:
        return self._fitting[-1]

    def measures(self, outputs: Tensor, targets: Tensor) -> tuple[Measure, ...]:
        """What models are measured by, the loss last; outputs and targets are an example."""
        found = chosen_measures(self.metrics or self._fitting[:-1], outputs, targets)
        with_loss = any(self._loss.name in each.names for each in found)
        if self.loss is module_loss and not with_loss:
            return *found, OWN_LOSS
        return found if with_loss or not self._is_of(outputs, targets) else (*found, self._loss)

    def _is_of(self, outputs: Tensor, targets: Tensor) -> bool:
        """Whether the loss is one of scores: others want what the module returns as it is."""
        if takes_scores(self.loss):
            return True
        try:
            self._loss.sums(outputs, targets, [len(targets)])
        except Exception:  # noqa: BLE001  it may ask anything of the module's own object
            return False
        return True

    def known_measures(self) -> dict[str, Better]:
        """The names of what models are measured by, and which of their values are better; by a
        trial on the first samples.
        """
        inputs, targets = self.pool.take(self.positions[:2])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module = self.make_model(0).eval()
            dtype = next((p.dtype for p in module.parameters()), torch.float32)
            found = self.measures(outputs_of(module, self.transform(inputs, dtype)), targets)
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
        again. Of lazy data: of a few samples, and of how many there are.
        """
        digest = hashlib.sha256(repr((self.sizes, self.servers)).encode())
        for tensor in (*self.pool.known_by(), self.positions):
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
    """(train, test) of a device, also by these names; the parts of (inputs, targets) are tensors,
    arrays or lists.
    """
    if isinstance(data, Mapping) and {*data} == {"train", "test"}:
        data = data["train"], data["test"]
    if isinstance(data, tuple) and len(data) == 2:
        train, test = data
        if _is_whole(train) and (test is None or _is_whole(test)):
            return train, test
    return data, None


def _is_whole(data: Any) -> bool:
    """Inputs and targets, not one of them."""
    return isinstance(data, tuple) or is_dataset(data)


def _joined(
    tests: Mapping[Key, DeviceData | None], like: Pool
) -> tuple[Pool | None, dict[Key, tuple[int, int]]]:
    """All test samples one after another, and where each one's begin and end."""
    found: list[Pool] = []
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
        mine = found[-1]
        if isinstance(mine, Samples) and isinstance(like, Samples):
            if owner == FOR_ALL:
                _check_axes(mine, like)
            else:
                _check_alike(name, mine, like)
    if len(found) < 2:
        return (found[0] if found else None), spans
    return joined_pool(found), spans


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


def _check_alike(name: str, mine: Samples, like: Samples) -> None:
    for kind in ("inputs", "targets"):
        one, other = getattr(mine, kind), getattr(like, kind)
        if (one.dtype, one.shape[1:]) != (other.dtype, other.shape[1:]):
            raise DataError(
                f"{name} has {kind} of shape {tuple(one.shape[1:])} ({one.dtype}), the"
                f" devices' are {tuple(other.shape[1:])} ({other.dtype}); bring them to that"
            )


def joined_pool(parts: Sequence[Pool]) -> Pool:
    """One after the other: as tensors where all are."""
    known = [part for part in parts if isinstance(part, Samples | NamedTensors)]
    if len(known) == len(parts):
        inputs = joined(torch.cat, [part.inputs for part in known])
        targets = torch.cat([part.targets for part in known])
        kind = Samples if isinstance(inputs, Tensor) else NamedTensors
        return kind(inputs, targets)
    return parts[0] if len(parts) == 1 else LazySamples.joined(parts)


def as_samples(name: str, data: Any) -> Pool:
    """Data as they can be taken in batches; tensors all finite. `name` says whose they are."""
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
    if not isinstance(samples, Samples | NamedTensors):
        return samples
    for kind, tensor in (
        *(("input", part) for part in leaves(samples.inputs)),
        ("target", samples.targets),
    ):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()[0])
            raise DataError(
                f"{name} has a value that is not finite in {kind} {bad}; remove or repair that"
                " sample"
            )
    return samples


def _reason(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return said if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {said}"


def _as_samples(data: Any) -> Pool:
    if isinstance(data, NamedTensors):
        return data
    if isinstance(data, TensorDataset):
        *several, target = data.tensors
        return _as_samples((several[0] if len(several) == 1 else tuple(several), target))
    if not is_sequence(data):
        raise TypeError(f"a {type(data).__name__} has no length")
    if is_dataset(data) and not isinstance(data, Samples | LazySamples):
        data = LazySamples(data)
    if isinstance(data, LazySamples):
        if len(data) == 0:
            raise ValueError("it has no samples")
        data.take(FIRST)  # one of each, to see that they can be read
        return data
    if isinstance(data, Samples):
        given: list[Any] = [data.inputs, data.targets]
    else:
        given = [*data] if is_pair(data) else _columns([data[k] for k in range(len(data))])
    targets = labels_as_int64(tensor_of(given[1], "targets"))
    if are_several(given[0], len(targets)):
        return NamedTensors(as_tensors(given[0]), targets)
    inputs = tensor_of(given[0], "inputs")
    same = isinstance(data, Samples) and inputs is data.inputs and targets is data.targets
    return data if same else Samples(inputs, targets)


def _columns(rows: list[Any]) -> list[Any]:
    if not rows:
        raise ValueError("it has no samples")
    if any(not isinstance(row, tuple | list) or len(row) != 2 for row in rows):
        raise TypeError(f"its samples are {type(rows[0]).__name__}, not (input, target)")
    return [[torch.as_tensor(v) for v in column] for column in zip(*rows, strict=True)]


def _check_parts(parts: Sequence[Pool]) -> None:
    if not parts:
        raise DataError("a federation needs at least one device; `devices` is empty")
    for i, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"device {i} has no samples; leave it out, or give it data")
        like = parts[0]
        if not (isinstance(part, Samples) and isinstance(like, Samples)):
            _check_shapes(i, part, like)
            continue
        for kind, mine, first in (
            ("inputs", part.inputs, like.inputs),
            ("targets", part.targets, like.targets),
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


def _check_shapes(device: int, mine: Pool, like: Pool) -> None:
    """Of several inputs; of those that are read when they are needed, nothing is known here."""
    known = Samples | NamedTensors
    if not (isinstance(mine, known) and isinstance(like, known)):
        return
    if shapes(mine.inputs) != shapes(like.inputs):
        raise DataError(
            f"device {device} has inputs {shapes(mine.inputs)}, device 0 {shapes(like.inputs)}; all"
            " devices must hold samples of one shape"
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


for name in ("model", "loss", "devices", "servers", "test", "metrics", "transform", "augment"):
    PLACES[name] = f"fb.Federation(..., {name}=...)"
PLACES["collate"] = "fb.LazySamples(data, collate=...), for each device"
