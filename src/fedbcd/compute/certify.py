"""Certificates while training: how far the models of this moment are from a stationary point
(Theorem 1), at a price that is kept small.

The pull and the spread follow from sums that the servers keep anyway. The first-order gap needs
exact gradients, so it is taken on a sample of devices, always the same ones, evenly spaced over
all. The present zbar is used, one cloud step newer than in the theorem.

Shapes: V servers, N devices, P parameters, F values of a model, U values of an upload.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbcd.algorithm.projection import Ball, Box, Projection, Simplex, TensorBoxes, diameter
from fedbcd.compute.numbers import Numbers
from fedbcd.theory import certificates as theory

DEVICES = 8  # devices in the sample by default
SAMPLES = 2000  # samples in one exact gradient call
# certificates may add this share of the work of training, unless the user says how many to take
SHARE_OF_TRAINING = 0.04
CALL_COST_SAMPLES = 200  # one call for a gradient or a step costs as much as this many samples


@dataclass(frozen=True)
class Certificates:
    """The columns of the history."""

    gap: float = math.nan
    worst_gap: float = math.nan
    pull: float = math.nan
    spread: float = math.nan


@dataclass(frozen=True)
class CertificateBudget:
    """How many certificates a run can afford: counted in samples, not timed, so that it is the same
    everywhere.

    A sample in an exact gradient counts as one trained on, though it is cheaper, and every call
    counts as `CALL_COST_SAMPLES` samples more.
    """

    sizes: Sequence[int]  # samples of every device
    per_round: float  # work of training in a round

    def cost(self, members: Sequence[int], devices: int = DEVICES) -> int:
        """The work of one row of certificates."""
        return sum(CALL_COST_SAMPLES + self.sizes[device] for device in sample_of(members, devices))

    def devices(self, members: Sequence[int], rounds: int, certified: int) -> int:
        """How many devices a row takes after `rounds` rounds and `certified` certified rows: the
        whole sample or none.

        Only what has been trained counts, not how long the run is to go on: a run that is extended
        later has the same rows.
        """
        return DEVICES if self.cost(members) <= self._left(members, rounds, certified) else 0

    def devices_at_the_end(self, members: Sequence[int], rounds: int, certified: int) -> int:
        """How many devices the summary of a run takes: what is left, but at least 1."""
        left = self._left(members, rounds, certified)
        return max(
            count
            for count in range(1, DEVICES + 1)
            if count == 1 or self.cost(members, count) <= left
        )

    def _left(self, members: Sequence[int], rounds: int, certified: int) -> float:
        return SHARE_OF_TRAINING * rounds * self.per_round - certified * self.cost(members)


class Certifier:
    """Computes certificates of a run on demand and keeps the time that went into them. It changes
    nothing.
    """

    def __init__(self, numbers: Numbers, sizes: Sequence[int]) -> None:
        """`sizes` has the number of samples of every device."""
        self.numbers = numbers
        self.sizes = sizes
        self.seconds = 0.0
        self._penalty_N = numbers.bound.penalty_N

    def certificates(self, members: Sequence[int], devices: int = DEVICES) -> Certificates:
        """Those of the present models, the gap on `devices` devices at most.

        Baselines keep one model everywhere, so problem (2) has no certificate of theirs.
        """
        if not self.numbers.method.keeps_personal:
            return Certificates()
        began = time.perf_counter()
        self.numbers.settle()
        p = self.numbers.size_P
        z_VP = self.numbers.global_VF()[:, :p]
        mean_z = z_VP.double().mean(0)
        gaps = self.gaps(sample_of(members, devices), mean_z)
        present = torch.tensor(list(members), device=z_VP.device)
        gamma = self._penalty_N.to(z_VP.device)[present]
        found = Certificates(
            gap=sum(gaps) / len(gaps) if gaps else math.nan,
            worst_gap=max(gaps, default=math.nan),
            pull=theory.pull(self._weighted_sum(present, gamma), float(gamma.sum()), mean_z),
            spread=float(theory.spread(z_VP).max()),
        )
        self.seconds += time.perf_counter() - began
        return found

    def _weighted_sum(self, present: Tensor, gamma: Tensor) -> Tensor:
        """sum gamma_i x_i: with FedBCD the servers' own sums; otherwise added up, a few models at a
        time.
        """
        numbers, p = self.numbers, self.numbers.size_P
        if numbers.method.counts == "members" and numbers.bound.sends_x:
            return numbers.sums.total_VU[:, :p].sum(0)
        parts = (
            g @ numbers.personal_NF.index_select(0, i)[:, :p].double()
            for g, i in zip(torch.split(gamma, 16), torch.split(present, 16), strict=True)
        )
        return torch.stack(list(parts)).sum(0)

    def gaps(self, devices: Sequence[int], mean_z: Tensor) -> list[float]:
        """The first-order gap of some personal models, with exact gradients.

        A device whose exact gradient does not exist is left out, such as one with a single sample
        under batch normalisation.
        """
        numbers, p = self.numbers, self.numbers.size_P
        found = []
        for device in devices:
            x = numbers.personal_NF[device].to(numbers.dtype)
            try:
                gradient = self._gradient(device, x)
            except ValueError:
                continue
            full = theory.penalised_gradient(
                gradient.double(), x[:p].double(), mean_z, float(self._penalty_N[device])
            )
            found.append(
                gap(
                    numbers.method.projection,
                    full,
                    x[:p].double(),
                    numbers.method.device_step,
                )
            )
        return found

    def _gradient(self, device: int, x: Tensor) -> Tensor:
        """The exact gradient of g_i, on the device's own samples without augmentation."""
        trainer, p = self.numbers.trainer, self.numbers.size_P
        positions = trainer.positions_of(device)
        total = torch.zeros(p, dtype=torch.float64, device=x.device)
        seeded = (
            trainer.objective.stochastic or trainer.one_by_one
        )  # a model with dropout must not draw from the user's generator
        with (
            torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])
            if seeded
            else nullcontext()
        ):
            for part in torch.chunk(positions, math.ceil(len(positions) / SAMPLES)):
                total += trainer.exact_gradient(x, part).double() * (len(part) / len(positions))
        return total


def gap(projection: Projection, gradient: Tensor, x: Tensor, step: float) -> float:
    """The first-order gap on compact sets with a closed form; on others the norm of the gradient
    mapping, which is 0 with it.
    """
    if math.isfinite(diameter(projection, len(x)) or math.inf):
        match projection:
            case Box():
                return float(theory.gap_on_box(gradient, x, projection.low, projection.high))
            case Ball():
                return float(theory.gap_on_ball(gradient, x, projection.radius))
            case Simplex():
                return float(theory.gap_on_simplex(gradient, x, projection.total))
            case TensorBoxes():
                return float(theory.gap_on_box(gradient, x, *projection.bounds(x)))
    return float(theory.gradient_mapping(gradient, x, step, projection.project))


def sample_of(devices: Sequence[int], most: int) -> list[int]:
    """At most `most` of the devices, evenly spaced, always the same ones."""
    count = min(most, len(devices))
    return [devices[k * len(devices) // count] for k in range(count)]
