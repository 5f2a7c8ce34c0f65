"""An availability rule and a time-varying mixing of one's own: devices work in shifts, and servers
on a ring mix with the neighbour on one side in even rounds, with the other in odd ones.

run: python examples/own_availability.py; in a job file: cloud.name = "own_availability:Turns",
run.availability.name = "own_availability:Shifts"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import fedbcd as fb
from fedbcd.protocol.coordinator import AsyncCoordinator, Coordinator


@dataclass(frozen=True)
class Shifts:
    """Device i can take part in the rounds of its shift, and else with a small chance."""

    shifts: int = 2
    chance: float = 0.1

    def available(self, members: np.ndarray, round_: int, u: np.ndarray) -> np.ndarray:
        return (members % self.shifts == round_ % self.shifts) | (u < self.chance)


@dataclass(frozen=True)
class Turns:
    """Every server keeps 1 - share of its model in a mix."""

    share: float = 0.5
    name: ClassVar[str] = "turns"
    sync: ClassVar[bool] = False  # each server has a z of its own

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        return AsyncCoordinator(range(servers), servers, iterations, alike=False)

    def weights(self, round_: int, servers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        a = np.eye(len(servers)) * (1 - self.share)
        for n in range(0, len(servers) - 1, 2):
            i, j = (n + round_) % len(servers), (n + 1 + round_) % len(servers)
            a[i, j] = a[j, i] = self.share
        return tuple(tuple(float(a[n, m]) for m in servers) for n in servers)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = [(torch.randn(30, 4), torch.randn(30, 1) - i % 3) for i in range(16)]
    federation = fb.Federation(lambda: nn.Linear(4, 1), nn.functional.mse_loss, data, servers=4)
    about = {"cloud": Turns(), "availability": Shifts(), "active": 2, "rounds": 20}
    print(fb.train(federation, fb.FedBCD(device_step=0.05), **about).summary)
