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
from fedbcd.engines.deploy.roles.device import Work
from fedbcd.schedule.delays import quantile_at
from fedbcd.schedule.events import Schedule


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

    def work(self, work: Work) -> float:
        """How long it takes at least."""

    def trains_offline(self, round_: int) -> bool:
        """Whether the device takes an offline round in this round of the coordinator (FedBCD-I)."""

    def rest(self, session: int, activation: int) -> float | None:
        """How long after its latest work it begins an offline round; None: other timers decide."""


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

    def work(self, work: Work) -> float:  # noqa: ARG002
        return 0.0

    def trains_offline(self, round_: int) -> bool:  # noqa: ARG002
        return False

    def rest(self, session: int, activation: int) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class Drawn:
    """The clock model of the paper's experiments, on a real clock of `scale` seconds per unit."""

    device: int
    members: Sequence[int]  # of its server, as far as it has been told
    schedule: Schedule
    scale: float
    has_own_timers = False

    def is_available(self) -> bool:
        return True

    def among(self, members: Sequence[int]) -> "Drawn":
        return replace(self, members=members)

    def arrival(self, phase: int, round_: int) -> float | None:
        """The addressed draw of this device and phase; with FedBCD-I only for devices that are
        available in this round.
        """
        if self.schedule.method.available is not None and not self._is_available(round_):
            return None
        u = draws.unit_one(self.schedule.seed, draws.ARRIVAL, self.device, phase)
        return self.scale * quantile_at(self.schedule.clock.arrival, u)

    def work(self, work: Work) -> float:
        return self.scale * self.schedule.work(self.device, work)[1]

    def trains_offline(self, round_: int) -> bool:
        """FedBCD-I with offline rounds that take no time: every available device takes one in each
        round of the coordinator.
        """
        method = self.schedule.method
        is_free = bool(method.offline) and not method.takes_time_offline
        return is_free and self._is_available(round_)

    def rest(self, session: int, activation: int) -> float | None:
        if not self.schedule.method.takes_time_offline:
            return None
        return self.scale * self.schedule.rest(self.device, session, activation)

    def _is_available(self, round_: int) -> bool:
        """Q~_n(t), as `schedule.events` draws it; one that is no member yet draws among the
        members and itself.
        """
        members = np.array(sorted({*self.members, self.device}), dtype=np.int64)
        wanted = self.schedule.method.available_of(len(members))
        keep = max(wanted, min(self.schedule.active, len(members)))
        u = draws.unit(
            draws.address(self.schedule.seed, draws.AVAILABLE, members, np.array([round_]))
        )
        return self.device in members[np.lexsort((members, u))[:keep]]
