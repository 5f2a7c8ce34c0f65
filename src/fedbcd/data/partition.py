"""Who owns which samples. A partition is a list of sample positions per device, and a pure function
of its arguments.

Drawn: each device takes its samples from the whole pool, whatever others took; none repeats within
a device, two devices may share one. Dealt: each sample goes to one device at most. Where `samples`
is given, a split is drawn, and `Diversity` dealt where it is asked to be; where it is left out, the
pool is dealt out.
"""

import abc
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.config import NESTED, SUCH_AS
from fedbcd.data.dealing import (
    cut,
    deal_counts,
    fill,
    parts,
    proportions,
    shuffled,
    smallest,
)
from fedbcd.data.manifest import Labels, Origin, Partition, Positions, labels_of
from fedbcd.describe import describe
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling
from fedbcd.recorded import in_record

__all__ = [
    "IID",
    "PARTITIONS",
    "Dirichlet",
    "Diversity",
    "Natural",
    "Origin",
    "Partition",
    "Partitioner",
    "QuantitySkew",
    "Shards",
    "diversity",
    "labels_of",
]


class Partitioner(abc.ABC):
    """How a pool is split over devices: a frozen value with a `name`, to be found in PARTITIONS.
    Kinds implement `deal` only.
    """

    name: ClassVar[str]

    def split(
        self,
        targets: Tensor | Sequence[int],
        devices: int,
        seed: int = 0,
        columns: Mapping[str, Tensor] | None = None,
    ) -> Partition:
        """Who owns which of the samples with these labels; `columns` are further numbers per
        sample, for a split by one of them.
        """
        try:
            targets = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"targets cannot be used: {error}; give a label per sample") from None
        if targets.is_floating_point() or targets.ndim != 1 or len(targets) == 0:
            raise DataError(
                f"a split needs one whole-number label per sample, not targets of {targets.dtype}"
                f" and shape {tuple(targets.shape)}"
            )
        if devices < 1:
            raise DataError(f"devices={devices} must be 1 or more")
        pool = LabelledPool(targets.numpy().astype(np.int64), columns or {})
        remedy = "it takes a pool, the number of devices and a seed"
        with calling("deal() of {} fails", type(self).__name__, remedy=remedy, kind=DataError):
            dealt = self.deal(pool, devices, seed)
        samples, labels = self._checked(dealt, devices)
        for device, positions in enumerate(samples):
            if len(positions) == 0:
                raise DataError(
                    f"device {device} of {devices} gets no sample from {self.recorded()} with seed"
                    f" {seed}; use fewer devices, another seed, or a less uneven split"
                )
        return Partition.of(
            targets,
            samples,
            labels,
            partitioner=self.recorded(),
            seed=seed,
        )

    def _checked(self, dealt: Any, devices: int) -> tuple[list[Positions], list[Labels] | None]:
        """What `deal` has returned, sorted; it may be somebody else's."""
        try:
            samples, labels = dealt
            found = [np.sort(np.asarray(positions)) for positions in samples]
            owned = None if labels is None else [tuple(map(int, mine)) for mine in labels]
        except (TypeError, ValueError):
            found, owned = [np.zeros((1, 1))], None
        if not all(p.ndim == 1 and (p.dtype.kind in "iu" or not len(p)) for p in found):
            raise DataError(
                f"deal() of {type(self).__name__} returned {dealt!r:.80}; it must return two"
                " things: for each device an array of positions, and for each device its labels,"
                " or None"
            )
        if len(found) != devices or (owned is not None and len(owned) != devices):
            raise DataError(
                f"deal() of {type(self).__name__} returned positions of {len(found)} devices; there"
                f" are {devices} to deal to, and each needs its own"
            )
        for device, positions in enumerate(found):
            if bool((positions[1:] == positions[:-1]).any()):
                raise DataError(
                    f"deal() of {type(self).__name__} gives device {device} a sample twice; give"
                    " it once"
                )
        return found, owned

    def recorded(self) -> dict[str, Any]:
        return dict(describe(self))

    @abc.abstractmethod
    def deal(
        self, pool: "LabelledPool", devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Positions per device, and the labels per device where they are more than those of its
        samples.
        """


@dataclass(frozen=True)
class LabelledPool:
    """What is to be split: a label per sample, and named columns of further numbers per sample."""

    targets: Positions
    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.targets)

    def of_labels(self) -> dict[int, Positions]:
        """The positions of each label that occurs, in ascending order."""
        return {
            int(label): np.flatnonzero(self.targets == label) for label in np.unique(self.targets)
        }


@dataclass(frozen=True)
class Diversity(Partitioner):
    """ "Diversity d": each device has d = `labels` labels, and `samples` samples of those.

    Drawn, as the authors' public code does it: each device draws its labels, then its samples from
    the whole pool of those. `dealt`, as the paper's text can be read ("randomly distributed with
    each device receiving 600 data pairs"): no sample goes to two devices.
    """

    labels: int
    samples: int
    dealt: bool = False
    name: ClassVar[str] = "diversity"

    def recorded(self) -> dict[str, Any]:
        return in_record(self)

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Labels by stream LABELS, samples by stream SAMPLES; dealt: by DEAL and SHUFFLE."""
        of_label = pool.of_labels()
        if self.samples < 1:
            raise DataError(f"samples={self.samples} must be 1 or more")
        if not 1 <= self.labels <= len(of_label):
            raise DataError(
                f"diversity={self.labels} must be between 1 and the {len(of_label)} labels of the"
                " data set"
            )
        if self.dealt:
            return self._dealt(of_label, devices, seed), None
        owned = [
            smallest(draws.LABELS, seed, device, np.array(list(of_label)), self.labels).tolist()
            for device in range(devices)
        ]
        positions = []
        for device, mine in enumerate(owned):
            candidates = np.sort(np.concatenate([of_label[label] for label in mine]))
            if self.samples > len(candidates):
                raise DataError(
                    f"device {device} should own {self.samples} samples of labels {mine}, but there"
                    f" are only {len(candidates)}; use samples <= {len(candidates)} or a higher"
                    " diversity"
                )
            positions.append(smallest(draws.SAMPLES, seed, device, candidates, self.samples))
        return positions, [tuple(mine) for mine in owned]

    def _dealt(self, of_label: Mapping[int, Positions], devices: int, seed: int) -> list[Positions]:
        sizes = {label: len(positions) for label, positions in of_label.items()}
        counts = deal_counts(sizes, devices, self.labels, self.samples, seed)
        pieces = [
            np.split(shuffled(seed, positions), np.cumsum(given))[:-1]
            for positions, given in zip(of_label.values(), counts.T, strict=True)
        ]
        return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Uneven labels: the smaller `alpha`, the fewer labels a device has. Each label is dealt out in
    Dirichlet(alpha) proportions, or, where `samples` is given, each device draws that many in its
    own Dirichlet(alpha) proportions of labels.
    """

    alpha: float
    samples: int | None = None
    name: ClassVar[str] = "dirichlet"

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        _check_samples(self.samples)

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Proportions by stream GAMMA; samples by SHUFFLE, or by SAMPLES where `samples` is
        given.
        """
        of_label = list(pool.of_labels().values())
        if self.samples is None:
            weights = proportions(seed, self.alpha, len(of_label), devices)
            cuts = [
                cut(shuffled(seed, positions), share)
                for positions, share in zip(of_label, weights, strict=True)
            ]
            return [np.concatenate(pieces) for pieces in zip(*cuts, strict=True)], None
        _check_enough(self.samples, len(pool))
        room = np.array([len(positions) for positions in of_label])
        owned = []
        for device, share in enumerate(proportions(seed, self.alpha, devices, len(of_label))):
            counts = fill(share, self.samples, room)
            owned.append(
                [
                    smallest(draws.SAMPLES, seed, device, p, int(n))
                    for p, n in zip(of_label, counts, strict=True)
                ]
            )
        return [np.concatenate(pieces) for pieces in owned], None


@dataclass(frozen=True)
class IID(Partitioner):
    """Devices that are alike: the shuffled pool in equal parts, or `samples` drawn by each device
    from all of it.
    """

    samples: int | None = None
    name: ClassVar[str] = "iid"

    def __post_init__(self) -> None:
        _check_samples(self.samples)

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Samples by stream SHUFFLE, or by SAMPLES where `samples` is given."""
        everything = np.arange(len(pool))
        if self.samples is None:
            return cut(shuffled(seed, everything), np.ones(devices)), None
        _check_enough(self.samples, len(pool))
        return [
            smallest(draws.SAMPLES, seed, device, everything, self.samples)
            for device in range(devices)
        ], None


@dataclass(frozen=True)
class Shards(Partitioner):
    """McMahan et al. (2017): the pool, sorted by label, is cut into equal shards, and each device
    gets `per_device` of them.
    """

    per_device: int = 2
    name: ClassVar[str] = "shards"

    def __post_init__(self) -> None:
        if self.per_device < 1:
            raise ConfigError(f"per_device={self.per_device} must be 1 or more")

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Samples of a label by stream SHUFFLE, shards by stream SHARDS."""
        shards = devices * self.per_device
        if shards > len(pool):
            raise DataError(
                f"{devices} devices with {self.per_device} shards each need {shards} samples, but"
                f" there are only {len(pool)}"
            )
        ordered = np.concatenate(
            [shuffled(seed, positions) for positions in pool.of_labels().values()]
        )
        pieces = cut(ordered, np.ones(shards))
        order = np.argsort(
            draws.unit(draws.address(seed, draws.SHARDS, np.arange(shards))), kind="stable"
        )
        return [
            np.concatenate([pieces[shard] for shard in mine])
            for mine in order.reshape(devices, self.per_device)
        ], None


@dataclass(frozen=True)
class QuantitySkew(Partitioner):
    """Uneven sizes, labels alike: in Dirichlet(`alpha`) proportions, or as 1, 2^-`power`,
    3^-`power`, ...; never below `minimum`.
    """

    alpha: float | None = None
    power: float | None = None
    minimum: int = 1
    name: ClassVar[str] = "quantity-skew"

    def __post_init__(self) -> None:
        if (self.alpha is None) == (self.power is None):
            raise ConfigError(
                f"quantity-skew needs one of alpha and power, not alpha={self.alpha} and"
                f" power={self.power}"
            )
        if self.alpha is not None:
            _check_alpha(self.alpha)
        if self.power is not None and not (self.power >= 0 and math.isfinite(self.power)):
            raise ConfigError(f"power={self.power} must be a finite number from 0 up")
        if self.minimum < 1:
            raise ConfigError(f"minimum={self.minimum} must be 1 or more")

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Sizes by stream GAMMA or RANKS, samples by stream SHUFFLE."""
        spare = len(pool) - devices * self.minimum
        if spare < 0:
            raise DataError(
                f"{devices} devices with {self.minimum} samples or more need"
                f" {devices * self.minimum}, but there are only {len(pool)}"
            )
        if self.alpha is not None:
            weights = proportions(seed, self.alpha, 1, devices)[0]
        else:
            assert self.power is not None
            order = np.argsort(
                draws.unit(draws.address(seed, draws.RANKS, np.arange(devices))), kind="stable"
            )
            weights = (1.0 + np.argsort(order)) ** -self.power
        bounds = np.cumsum(self.minimum + parts(weights, spare))[:-1]
        return np.split(shuffled(seed, np.arange(len(pool))), bounds), None


@dataclass(frozen=True)
class Natural(Partitioner):
    """By who made the samples: one device per value of a column of the data set, e.g. the writer.

    column   its name among the columns of the data set, or the whole numbers themselves, one per
    sample
    Of more values than devices, as many as there are devices are drawn.
    """

    column: str | Sequence[int] = field(metadata={SUCH_AS: '"writer"'})
    name: ClassVar[str] = "natural"

    def __post_init__(self) -> None:
        if isinstance(self.column, str):
            return
        values = np.asarray(self.column)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise DataError(
                f"a column must hold one whole number per sample, not {values.dtype} of shape"
                f" {values.shape}"
            )
        object.__setattr__(
            self, "column", tuple(values.tolist())
        )  # arrays have no equality of their own

    def deal(
        self, pool: LabelledPool, devices: int, seed: int
    ) -> tuple[Sequence[Positions], Sequence[Labels] | None]:
        """Owners by stream OWNERS, numbered in ascending order of their values."""
        column = self._values(pool)
        owners, owner_of = np.unique(column, return_inverse=True)
        if devices > len(owners):
            raise DataError(
                f"{devices} devices, but only {len(owners)} different values in the column; use"
                f" devices <= {len(owners)}"
            )
        keys = draws.unit(draws.address(seed, draws.OWNERS, np.arange(len(owners))))
        chosen = np.sort(np.argsort(keys, kind="stable")[:devices])
        return [np.flatnonzero(owner_of == owner) for owner in chosen], None

    def recorded(self) -> dict[str, Any]:
        """The column by its name, or by a hash of its values."""
        if isinstance(self.column, str):
            return {"name": self.name, "column": self.column}
        return {
            "name": self.name,
            "column": (
                "sha256"
                f" {hashlib.sha256(np.asarray(self.column).astype('<i8').tobytes()).hexdigest()}"
            ),
        }

    def _values(self, pool: LabelledPool) -> Positions:
        if isinstance(self.column, str) and self.column not in pool.columns:
            raise DataError(
                f"the data set has no column {self.column!r}; its columns are:"
                f" {', '.join(sorted(pool.columns)) or 'none'}"
            )
        values = np.asarray(
            pool.columns[self.column] if isinstance(self.column, str) else self.column,
            dtype=np.int64,
        )
        if values.shape != (len(pool),):
            raise DataError(
                f"the column has shape {values.shape}, but there are {len(pool)} samples; it must"
                " hold one number for each"
            )
        return values


PARTITIONS: dict[str, type[Partitioner]] = {
    kind.name: kind for kind in (Diversity, Dirichlet, IID, Shards, QuantitySkew, Natural)
}
NESTED["partition"] = PARTITIONS


def diversity(
    targets: Tensor | Sequence[int],
    devices: int,
    labels: int,
    samples: int,
    seed: int = 0,
    dealt: bool = False,
) -> Partition:
    """ "Diversity d": each device has d = `labels` labels, and `samples` samples of those labels.

    No sample repeats within a device. Two devices may share one, as with the authors' public code;
    with `dealt` each sample goes to one device at most, as the paper's text can be read.
    """
    return Diversity(labels, samples, dealt).split(targets, devices, seed)


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(
            f"alpha={alpha} must be a finite number above 0; 0.1 is very uneven, 100 almost even"
        )


def _check_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise ConfigError(
            f"samples={samples} must be 1 or more, or left out to deal out the whole pool"
        )


def _check_enough(samples: int, pool: int) -> None:
    if samples > pool:
        raise DataError(
            f"samples={samples} exceeds the {pool} samples of the data set; use samples <= {pool}"
        )
