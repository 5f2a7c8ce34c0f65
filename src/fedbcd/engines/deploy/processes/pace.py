"""When a device can take part and how long its work takes: as it really is, or drawn, for
experiments.

Drawn delays are the simulation's own (docs/determinism.md), times `scale` seconds: device i arrives
in phase p at the same quantile as it does in a simulation with this seed. So a deployment and a
simulation of one job can be laid side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedbcd.algorithm import draws
from fedbcd.schedule.availability import Pool
from fedbcd.schedule.delays import Clock, quantile_at


class Pace(Protocol):
    """How a device lives; times are seconds."""

    @property
    def has_own_timers(self) -> bool:
        """Whether the device asks, and trains offline, also when it has heard of no phase or round:
        notices may be lost.
        """

    def is_available(self) -> bool:
        """Whether it could take part now."""

    def among(self, members: Sequence[int]) -> "Pace":
        """The same, now that these are the members of its server."""

    def arrival(self, phase: int, round_: int) -> float | None:
        """How long after a phase opens this device asks; None: not in this phase."""

    def work(self, activation: int, steps: int) -> float:
        """How long the work of an activation takes at least."""

    def trains_offline(self, round_: int) -> bool:
        """Whether the device takes an offline round in this round of the coordinator (FedBCD-I)."""


@dataclass(frozen=True)
class Real:
    """A device as it is: it asks as soon as a phase opens and `available()` says yes, and takes as
    long as it takes.
    """

    available: Callable[[], bool] = lambda: True
    has_own_timers = True

    def is_available(self) -> bool:
        return self.available()

    def among(self, members: Sequence[int]) -> "Real":  # noqa: ARG002
        return self

    def arrival(self, phase: int, round_: int) -> float | None:  # noqa: ARG002
        return 0.0

    def work(self, activation: int, steps: int) -> float:  # noqa: ARG002
        return 0.0

    def trains_offline(self, round_: int) -> bool:  # noqa: ARG002
        return False


@dataclass(frozen=True)
class Drawn:
    """The clock model of the paper's experiments, on a real clock of `scale` seconds per unit."""

    device: int
    members: Sequence[int]  # of its server, as far as it has been told
    pool: Pool
    clock: Clock
    scale: float
    has_own_timers = False

    def is_available(self) -> bool:
        return True

    def among(self, members: Sequence[int]) -> "Drawn":
        return replace(self, members=members)

    def arrival(self, phase: int, round_: int) -> float | None:
        """The addressed draw of this device and phase, if it is available in this round."""
        if not self._is_available(round_):
            return None
        return self.scale * quantile_at(
            self.clock.arrival, draws.unit_one(self.pool.seed, draws.ARRIVAL, self.device, phase)
        )

    def work(self, activation: int, steps: int) -> float:
        return (
            self.scale
            * steps
            * quantile_at(
                self.clock.step,
                draws.unit_one(self.pool.seed, draws.PROCESS, self.device, activation),
            )
        )

    def trains_offline(self, round_: int) -> bool:
        """FedBCD-I: every available device takes one offline round in each round of the
        coordinator.
        """
        return bool(self.pool.method.offline) and self._is_available(round_)

    def _is_available(self, round_: int) -> bool:
        """As in a simulation; one that is no member yet draws among the members and itself."""
        members = np.array(sorted({*self.members, self.device}), dtype=np.int64)
        return self.device in self.pool.available(members, round_)
