"""What every data set is made of: inputs, targets, and the transform that makes a batch of inputs
ready for a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbcd.config import fit
from fedbcd.data.understood import tensor_of
from fedbcd.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
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
