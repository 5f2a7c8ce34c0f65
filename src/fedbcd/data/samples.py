"""What every data set is made of: inputs, targets, and the transform that makes a batch of inputs
ready for a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm.trees import Tree, leaves
from fedbcd.config import fit
from fedbcd.data.understood import tensor_of
from fedbcd.errors import ConfigError, DataError

SAMPLED = 16  # by which data are known again that have to be read


class Pool(ABC):
    """Samples, wherever they are: tensors (`Samples`), or read when needed (`data.lazy`)."""

    # why inputs are not one tensor in memory, as compiled and recorded code need them; empty: they
    # are
    why_not_tensors: str = ""
    # batches that are made by a function of somebody's may be of different shapes
    collate: Callable[[list[Any]], Any] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, position: int) -> Any:
        """A sample."""

    @property
    @abstractmethod
    def all_targets(self) -> Tensor:
        """Of all samples; they may have to be read for that."""

    @property
    def known_targets(self) -> Tensor | None:
        """The same where they are known without reading the samples."""
        return self.all_targets

    @abstractmethod
    def take(self, positions: Tensor, hashes: Tensor | None = None) -> tuple[Tree, Tensor]:
        """A batch at these positions, (..., R): inputs and targets with these axes first; `hashes`
        address what reading draws.
        """

    @abstractmethod
    def only(self, positions: Tensor) -> "Pool":
        """Those at these positions, as a pool of their own."""

    def known_by(self) -> list[Tensor]:
        """By which it is known again: all inputs and targets; of what has to be read, a few."""
        some = torch.linspace(0, len(self) - 1, min(SAMPLED, len(self))).long()
        inputs, targets = self.take(some)
        return [*leaves(inputs), targets]

    @abstractmethod
    def to(self, where: torch.device) -> "Pool":
        """The same, giving batches where torch computes."""


@dataclass(frozen=True)
class Samples(Pool):
    """Inputs and targets with a common first axis. Inputs stay in their small dtype; `transform`
    makes a batch ready for the model.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for name in ("inputs", "targets"):
            if not isinstance(getattr(self, name), Tensor):
                object.__setattr__(self, name, tensor_of(getattr(self, name), name))
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets; each input needs one"
                " target"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.inputs[position], self.targets[position]

    @property
    def all_targets(self) -> Tensor:
        """Of all samples."""
        return self.targets

    def known_by(self) -> list[Tensor]:
        """All of them."""
        return [self.inputs, self.targets]

    def take(self, positions: Tensor, hashes: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """A batch at these positions."""
        return take(self.inputs, positions), take(self.targets, positions)

    def only(self, positions: Tensor) -> "Samples":
        """Those at these positions."""
        return Samples(*self.take(positions))

    def to(self, where: torch.device) -> "Samples":
        """In the memory of a device of torch."""
        return Samples(self.inputs.to(where), self.targets.to(where))


def take(samples: Tensor, positions: Tensor) -> Tensor:
    """samples[positions], in a third of the time."""
    return samples.index_select(0, positions.reshape(-1)).reshape(
        *positions.shape, *samples.shape[1:]
    )


@dataclass(frozen=True)
class Scale:
    """A transform: (value / divisor - mean) / deviation, as the model's dtype."""

    divisor: float
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        fit(self, "Scale: ")
        if 0 in (self.divisor, self.deviation):
            raise ConfigError(f"{self} divides by 0; give a divisor and a deviation above 0")

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return (inputs.to(dtype) / self.divisor - self.mean) / self.deviation


@dataclass(frozen=True)
class LoadedDataset:
    """A training set, a test set and the transform that goes with them.

    columns   further whole numbers per training sample, e.g. who wrote it; what the partition
    "natural" goes by
    """

    train: Samples
    test: Samples
    transform: Scale
    classes: int
    columns: Mapping[str, Tensor] = field(default_factory=dict)


BYTES = Scale(255.0, 0.5, 0.5)  # bytes to -1 .. 1
