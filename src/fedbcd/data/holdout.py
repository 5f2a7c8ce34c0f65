"""Samples that devices keep back: to test their models on, and to validate on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.errors import ConfigError


@dataclass(frozen=True)
class Holdout:
    """Shares of each device's samples that it does not train on, at least a sample each, where it
    has enough; drawn by the seed, the same whatever other devices have.

    test        to test its model on, where it has brought no test samples
    validation  to choose by while it trains (columns validation_...)
    """

    test: float = 0.2
    validation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.test, self.validation)
        if not (all(0 <= share < 1 for share in shares) and sum(shares) < 1):
            raise ConfigError(
                f"holdout: test={self.test:g} and validation={self.validation:g} must be shares of"
                " 0 or more, together below 1: devices train on what is left"
            )


@dataclass(frozen=True)
class Divided:
    """Positions of samples, by device."""

    train: list[Tensor]
    test: dict[int, Tensor]
    validation: dict[int, Tensor]


def divided(
    owned: Sequence[Tensor], holdout: float | Holdout, with_tests: Collection[int]
) -> Divided:
    """Each device's samples in parts; those `with_tests` of their own keep none back to test on."""
    wish = holdout if isinstance(holdout, Holdout) else Holdout(holdout)
    found = Divided([*owned], {}, {})
    if wish.test == wish.validation == 0:
        return found
    if not wish.validation and len(with_tests) == len(owned):
        raise ConfigError(
            f"holdout: test={wish.test:g} keeps nothing back, as every device has brought tests of"
            " its own; leave one of the two out, or ask for samples to validate on:"
            " Holdout(validation=0.1)"
        )
    for device, positions in enumerate(owned):
        share = 0.0 if device in with_tests else wish.test
        numbers = np.arange(len(positions))
        hashed = draws.address(wish.seed, draws.HOLDOUT, np.full_like(numbers, device), numbers)
        order = torch.from_numpy(np.argsort(draws.unit(hashed), kind="stable"))
        tested = _count(share, len(positions), len(positions) - 1)
        validated = _count(wish.validation, len(positions), len(positions) - 1 - tested)
        parts = torch.split(order, [tested, validated, len(positions) - tested - validated])
        test, validation, train = (positions[part.sort().values] for part in parts)
        found.train[device] = train
        found.test.update({device: test} if len(test) else {})
        found.validation.update({device: validation} if len(validation) else {})
    return found


def _count(share: float, samples: int, most: int) -> int:
    return min(max(0, most), max(1, round(share * samples))) if share else 0
