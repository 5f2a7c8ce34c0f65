"""Addressed draws: every random number is a hash of where it is used (docs/determinism.md).

One code for NumPy and torch integer arrays: 64-bit signed integers wrap alike in both, on CPU and
on GPU, so the draws are the same bits everywhere. `>>` is arithmetic on signed integers; the masks
make it logical.

Shapes: N devices.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedbcd.addressed import (
    FIRST,
    GOLDEN,
    LINKS as LINKS,
    SECOND,
    address_one as address_one,
    below_one as below_one,
    mixed_seed,
    unit_one as unit_one,
)

Ints = TypeVar("Ints", npt.NDArray[np.int64], torch.Tensor)

BATCH, STEPS, ARRIVAL, PROCESS, AVAILABLE, LABELS, SAMPLES = range(1, 8)
SHUFFLE, GAMMA, SHARDS, RANKS, OWNERS, DEAL = range(8, 14)  # of the partitioners in data/
OFFLINE, REST, PULLS = 14, 15, 16  # FedBCD-I: of an offline round, before it, of an activation
AUGMENT = 20
EXACT = 21  # what a forward pass draws where an exact gradient is taken, for certificates
JOINING, LEAVING = 22, 23  # of devices, by a churn rule
HELD_OUT = 24  # of a newcomer's samples, to test on
CLASSES, SPEEDS, DROPOUT = 26, 27, 28  # of devices that differ (schedule.times)
HOLDOUT = 29  # of a device's samples, to test and to validate on
PLANNING = 30  # of fedbcd.planner; no run draws from it


def _mix(h: Ints) -> Ints:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * FIRST
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * SECOND
    return h ^ ((h >> 31) & ((1 << 33) - 1))


def address(seed: int, stream: int, first: Ints, *rest: Ints) -> Ints:
    """Hash an address. The parts are integer arrays of one kind that broadcast against each other;
    each has at least one axis.
    """
    h = _mix(mixed_seed(seed, stream) + (first + 1) * GOLDEN)
    for part in rest:
        h = _mix(h + (part + 1) * GOLDEN)
    return h


def below(h: Ints, bound: Any) -> Ints:
    """Whole numbers in 0 .. bound-1; `bound` is at most 2^31 and may be an array."""
    return (((h >> 32) & ((1 << 32) - 1)) * bound) >> 32  # type: ignore[no-any-return]


def unit(h: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Float64 numbers strictly between 0 and 1."""
    return (((h >> 12) & ((1 << 52) - 1)).astype(np.float64) + 0.5) * 2.0**-52


def steps(seed: int, device: int, session: int, low: int, high: int, stream: int = STEPS) -> int:
    """K_i: how many steps device i takes in a session, uniform on low .. high."""
    return low + below_one(seed, stream, high - low + 1, device, session)


class BatchGrid(NamedTuple):
    """The numbers of steps and of slots in a mini-batch, as arrays to draw for: (1, K, 1) and (1,
    1, R).
    """

    step: torch.Tensor
    slot: torch.Tensor

    def of(self, steps: int) -> "BatchGrid":
        """The first `steps` steps."""
        return BatchGrid(self.step[:, :steps], self.slot)


def grid(steps: int, batch: int, device: torch.device | str = "cpu") -> BatchGrid:
    """All steps and slots."""
    return BatchGrid(
        torch.arange(steps, device=device)[None, :, None],
        torch.arange(batch, device=device)[None, None, :],
    )


def batch_positions(
    seed: int,
    device_N: torch.Tensor,
    session_N: torch.Tensor,
    size_N: torch.Tensor,
    grid: BatchGrid,
) -> torch.Tensor:
    """Mini-batches of K steps as positions within each device's own samples: shape (N, K, R)."""
    return below(slots(seed, BATCH, device_N, session_N, grid), size_N[:, None, None])


def slots(
    seed: int, stream: int, device_N: torch.Tensor, session_N: torch.Tensor, grid: BatchGrid
) -> torch.Tensor:
    """One hash per slot of each mini-batch: shape (N, K, R)."""
    return address(
        seed, stream, device_N[:, None, None], session_N[:, None, None], grid.step, grid.slot
    )
