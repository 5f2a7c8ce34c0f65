"""Samples that are not one tensor in memory: read when they are needed, from a torch Dataset, a
dataset of Hugging Face or any sequence of samples; or several tensors, by name.

A sample is (input, target), (input, input, ..., target), or a mapping with a target in it.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import accumulate
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.algorithm.trees import Tree, joined, leaves, mapped
from fedbcd.config import convert
from fedbcd.data.samples import Pool, take
from fedbcd.data.understood import labels_as_int64, tensor_of
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling

TARGETS = ("label", "labels", "target", "targets", "y", "fine_label")  # of a mapping, by default
READ_AT_ONCE = 256  # samples, where only their targets are wanted
COMPARED = 16  # samples whose targets must be those that a dataset lists
REPAIR = "its data set must give a sample for each number below its length"
COLLATES = "it gets a list of samples, and returns (inputs, targets) or a mapping"
Collate = Callable[[list[Any]], Any]


class LazySamples(Pool):
    """Samples of a Dataset, or of anything with a length and items, each read when it is needed.

    collate   makes a batch of a list of samples, (inputs, targets) or a mapping with the targets
    in it, e.g. to pad sequences; without it samples are stacked
    cache     keeps every sample that has been read, as it was: what a transform drew is kept, too
    inputs    of samples that are mappings: the name of what the model takes, or several; by default
    all but the target
    target    and the name of the target; by default label, labels, target, targets, y or fine_label
    targets   all of them, if they are known, so that they need not be read
    """

    why_not_tensors = "samples are read when they are needed, and are not one tensor in memory"

    def __init__(
        self,
        data: Any,
        *,
        collate: Collate | None = None,
        cache: bool = False,
        inputs: str | Sequence[str] = (),
        target: str = "",
        targets: Any = None,
    ) -> None:
        if not is_sequence(data):
            raise DataError(
                f"a {type(data).__name__} cannot be read sample by sample; give something with a"
                " length and items, e.g. a torch Dataset"
            )
        if targets is not None and len(targets) != len(data):
            raise DataError(f"{len(targets)} targets were given for {len(data)} samples")
        self.collate, self._inputs = collate, inputs
        self._target = convert(target, str, "target")
        self._given = targets
        self._parts: list[Any] = [data]
        self._ends = [len(data)]
        self._order: Tensor | None = None  # some of them; None: all
        self._cache: dict[int, Any] | None = {} if convert(cache, bool, "cache") else None
        self._where = torch.device("cpu")

    @classmethod
    def joined(cls, parts: Sequence[Pool]) -> "LazySamples":
        """One after the other; they are made to batches as the first lazy one is."""
        like = next((part for part in parts if isinstance(part, LazySamples)), cls(()))
        made = cls((), collate=like.collate, inputs=like._inputs, target=like._target)
        made._parts, made._ends = list(parts), list(accumulate(map(len, parts)))
        return made

    def __len__(self) -> int:
        return self._ends[-1] if self._order is None else len(self._order)

    def __getitem__(self, position: int) -> Any:
        """As the data set gives it; what it draws is addressed by the position."""
        return self._read([position], None)[0]

    # ---------------------------------------------------------------------------------------------
    # batches
    def take(self, positions: Tensor, hashes: Tensor | None = None) -> tuple[Tree, Tensor]:
        """A batch at these positions."""
        flat = None if hashes is None else hashes.reshape(-1).tolist()
        samples = self._read(positions.reshape(-1).tolist(), flat)
        if self.collate is None:
            batch = self._batch(self._stacked(samples))
        else:
            each = positions.shape[-1]
            rows = [samples[k : k + each] for k in range(0, len(samples), each)]
            with calling("the collate function fails", remedy=COLLATES, kind=DataError):
                made = [self._batch(self._split(self.collate(row))) for row in rows]
            batch = made[0] if positions.ndim == 1 else joined(torch.cat, made)
        if positions.ndim == 1:
            return batch
        inputs, targets = mapped(lambda t: t.reshape(*positions.shape, *t.shape[1:]), batch)
        return inputs, targets

    def _batch(self, batch: tuple[Tree, Any]) -> tuple[Tree, Tensor]:
        inputs, targets = batch
        return mapped(lambda t: t.to(self._where), inputs), targets.to(self._where)

    def _stacked(self, samples: list[Any]) -> tuple[Tree, Tensor]:
        rows = [self._split(sample) for sample in samples]
        try:
            inputs, targets = joined(torch.stack, rows)
        except (RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"samples cannot be stacked to a batch ({reason}); bring them to one shape, or say"
                " how: fb.LazySamples(data, collate=...)"
            ) from error
        return inputs, targets

    def _split(self, sample: Any) -> tuple[Tree, Tensor]:
        """Input and target of a sample, or of a batch, as tensors."""
        if isinstance(sample, Mapping):
            return self._split_mapping(sample)
        if not (isinstance(sample, tuple | list) and len(sample) > 1):
            raise DataError(
                f"a sample is a {type(sample).__name__}; it must be (input, target), or a mapping"
                " with a target in it"
            )
        if named := self._target or self._inputs:
            raise DataError(
                f"a sample is (input, target), whose parts have no names; leave {named!r} out"
            )
        *inputs, target = sample
        return as_tree(inputs[0] if len(inputs) == 1 else tuple(inputs)), labels_as_int64(
            as_tensor(target)
        )

    def _split_mapping(self, sample: Mapping[str, Any]) -> tuple[Tree, Tensor]:
        name = self._target or next((name for name in TARGETS if name in sample), "")
        if name not in sample:
            raise DataError(
                f"a sample has {', '.join(map(str, sample))}, and none is called"
                f" {name or ' or '.join(TARGETS)}; fb.LazySamples(data, target=...) names the"
                " target"
            )
        target = labels_as_int64(as_tensor(sample[name], name))
        wanted = self._inputs or [key for key in sample if key != name]
        asked = [wanted] if isinstance(wanted, str) else wanted
        if missing := [key for key in asked if key not in sample]:
            raise DataError(f"a sample has {', '.join(sample)}, but no {missing[0]!r}")
        if isinstance(wanted, str):
            return as_tree(sample[wanted], wanted), target
        inputs = {key: as_tree(sample[key], key) for key in wanted}
        alone = len(inputs) == 1 and not self._inputs
        return next(iter(inputs.values())) if alone else inputs, target

    # ---------------------------------------------------------------------------------------------
    # reading
    def _read(self, positions: list[int], hashes: list[int] | None) -> list[Any]:
        """Samples as the data sets give them."""
        if self._cache is not None:
            missing = [k for k in dict.fromkeys(positions) if k not in self._cache]
            self._cache.update(zip(missing, self._read_anew(missing, None), strict=True))
            return [self._cache[k] for k in positions]
        return self._read_anew(positions, hashes)

    def _read_anew(self, positions: list[int], hashes: list[int] | None) -> list[Any]:
        found = []
        with generators_kept():
            for k, position in enumerate(positions):
                source, within = self._source_of(position)
                address = draws.address_one(0, draws.AUGMENT, position)
                address = address if hashes is None else hashes[k]
                if isinstance(source, LazySamples):
                    found += source._read([within], None if hashes is None else [address])
                    continue
                seed_generators(address)
                with calling("sample {} cannot be read", within, remedy=REPAIR, kind=DataError):
                    found.append(source[within])
        return found

    def _source_of(self, position: int) -> tuple[Any, int]:
        """Which part a sample is in, and where."""
        place = position if self._order is None else int(self._order[position])
        part = bisect_right(self._ends, place)
        return self._parts[part], place - (self._ends[part - 1] if part else 0)

    # ---------------------------------------------------------------------------------------------
    # the rest of a pool
    @cached_property
    def all_targets(self) -> Tensor:
        """Of all samples: as they are listed somewhere, or read sample by sample."""
        known = self.known_targets
        if known is not None:
            return known
        numbers = torch.split(torch.arange(len(self)), READ_AT_ONCE)
        return torch.cat([self._of_samples(part) for part in numbers])

    def _of_samples(self, positions: Tensor) -> Tensor:
        return torch.stack([self._split(s)[1] for s in self._read(positions.tolist(), None)])

    @cached_property
    def known_targets(self) -> Tensor | None:
        """Where a data set lists them, and they are those of some samples that are read."""
        if self._given is not None:
            return torch.as_tensor([*self._given])
        found = [
            part.known_targets if hasattr(part, "known_targets") else targets_in(part, self._target)
            for part in self._parts
        ]
        if not len(self) or any(part is None for part in found):
            return None
        try:
            listed_all = torch.cat([part for part in found if part is not None])
            some = torch.linspace(0, len(self) - 1, min(COMPARED, len(self))).long()
            read = self._of_samples(some)
        except (RuntimeError, TypeError):
            return None
        same = listed_all.dtype == read.dtype and torch.equal(listed_all[some], read)
        return listed_all if same and len(listed_all) == len(self) else None

    def only(self, positions: Tensor) -> "LazySamples":
        """Those at these positions."""
        made = LazySamples.joined([self])
        made._order, made._where = positions.cpu(), self._where
        if "all_targets" in self.__dict__:  # they have been read
            made._given = self.all_targets[made._order].tolist()
        return made

    def to(self, where: torch.device) -> "LazySamples":
        """The same, giving batches where torch computes."""
        made = copy(self)
        made._where = where
        return made


class NamedTensors(Pool):
    """Inputs that are several tensors, by name or one after another, with a common first axis."""

    why_not_tensors = "inputs are several tensors, not one"

    def __init__(self, inputs: Tree, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        if wrong := {len(part) for part in leaves(inputs)} - {len(targets)}:
            raise DataError(
                f"{wrong.pop()} inputs but {len(targets)} targets; each input needs one"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, position: int) -> tuple[Tree, Tensor]:
        return mapped(lambda t: t[position], self.inputs), self.targets[position]

    @property
    def all_targets(self) -> Tensor:
        """Of all samples."""
        return self.targets

    def known_by(self) -> list[Tensor]:
        """All of them."""
        return [*leaves(self.inputs), self.targets]

    def take(self, positions: Tensor, hashes: Tensor | None = None) -> tuple[Tree, Tensor]:  # noqa: ARG002
        """A batch at these positions."""
        return mapped(lambda t: take(t, positions), self.inputs), take(self.targets, positions)

    def only(self, positions: Tensor) -> "NamedTensors":
        """Those at these positions."""
        return NamedTensors(*self.take(positions))

    def to(self, where: torch.device) -> "NamedTensors":
        """In the memory of a device of torch."""
        return NamedTensors(mapped(lambda t: t.to(where), self.inputs), self.targets.to(where))


# ------------------------------------------------------------------------------------------------
# other people's data
def is_sequence(data: Any) -> bool:
    """Whether samples can be read from it one by one."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_dataset(data: Any) -> bool:
    """Whether it is read when needed: something with samples that is no array, list or mapping."""
    plain = isinstance(data, Tensor | list | tuple | str | Mapping)
    return is_sequence(data) and not plain and not hasattr(data, "__array__")


def partitions_of(devices: Any) -> Any:
    """The data of each device, where they come from an object that hands out partitions, as those
    of flwr-datasets do: `load_partition(i)`, and a number of them.
    """
    if not hasattr(devices, "load_partition"):
        return devices
    number = getattr(devices, "num_partitions", None)
    if number is None:
        several = getattr(devices, "partitioners", {})
        if len(several) != 1:
            raise ConfigError(
                f"a {type(devices).__name__} has {len(several)} partitioners; give the devices'"
                " data: [data.load_partition(i, split) for i in range(...)]"
            )
        number = next(iter(several.values())).num_partitions
    return [devices.load_partition(i) for i in range(int(number))]


def are_several(inputs: Any, samples: int) -> bool:
    """Whether they are several inputs of so many samples, not so many inputs."""
    if isinstance(inputs, Mapping):
        return True
    lengths = (
        [len(part) if is_sequence(part) else 0 for part in inputs]
        if isinstance(inputs, tuple)
        else []
    )
    return bool(lengths) and all(length == samples for length in lengths)


def as_tensors(inputs: Any, name: str = "inputs") -> Tree:
    """Several inputs, each of which has all samples."""
    if isinstance(inputs, Mapping):
        return {key: as_tensors(part, str(key)) for key, part in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(as_tensors(part, name) for part in inputs)
    return tensor_of(inputs, name)


def targets_in(data: Any, target: str = "") -> Tensor | None:
    """Targets that a data set lists: a column of a table, or an attribute, of torchvision."""
    indices = getattr(data, "indices", None)
    if indices is not None and hasattr(data, "dataset"):  # a Subset
        whole = targets_in(data.dataset, target)
        return None if whole is None else whole[torch.as_tensor(indices)]
    columns = getattr(data, "column_names", None)
    try:
        if isinstance(columns, list):
            name = target or next(name for name in TARGETS if name in columns)
            return labels_as_int64(torch.as_tensor(np.asarray(data[name])))
        if getattr(data, "target_transform", None) is not None:
            return None
        found = getattr(data, "targets", None)
        return None if found is None else labels_as_int64(torch.as_tensor(found))
    except (StopIteration, TypeError, ValueError, RuntimeError, KeyError):
        return None


def as_tree(value: Any, name: str = "input") -> Tree:
    """Tensors in place of whatever can become one."""
    if isinstance(value, Mapping):
        return {key: as_tree(part, str(key)) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(as_tree(part, name) for part in value)
    return as_tensor(value, name)


def as_tensor(value: Any, name: str = "target") -> Tensor:
    """Numbers, lists, arrays and pictures; these as bytes (channels, height, width)."""
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "getbands"):  # of Pillow
            picture = torch.from_numpy(np.array(value))
            return picture[None] if picture.ndim == 2 else picture.permute(2, 0, 1)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} of a sample is {value!r:.60}, which is no number, tensor or picture"
            f" ({error}); leave it out (fb.LazySamples(data, inputs=...)), or make numbers of it in"
            " the data set"
        ) from error


# ------------------------------------------------------------------------------------------------
# what transforms draw from
_reading = RLock()  # the generators are everybody's


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves torch's, NumPy's and Python's generators as they were."""
    with _reading:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            random.setstate(before[2])


def seed_generators(address: int) -> None:
    """All three by one address."""
    torch.default_generator.manual_seed(address >> 1)
    np.random.seed((address >> 8) & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(address)
