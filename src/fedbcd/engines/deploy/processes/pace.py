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

from fedbcd.engines.deploy.roles.local_work import Work
from fedbcd.schedule.availability import AvailableDevices
from fedbcd.schedule.delays import Floats
from fedbcd.schedule.times import Times


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

    def arrival(self, phase: int, round_: int, now: float) -> float | None:
        """How long after a phase opens, at `now`, this device asks; None: not in this phase."""

    def work(self, work: Work, now: float) -> float:
        """How long it takes at least, begun at `now`."""

    def lost_after(self, activation: int) -> float | None:
        """The part of that work after which the device is lost; None: it is not."""

    def trains_offline(self, round_: int) -> bool:
        """Whether the device takes an offline round in this round of the coordinator (FedBCD-I)."""

    def rest(self, session: int, activation: int, now: float) -> float | None:
        """How long after its latest work, over at `now`, it begins an offline round; None: other
        timers decide.
        """


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

    def arrival(self, phase: int, round_: int, now: float) -> float | None:  # noqa: ARG002
        return 0.0

    def work(self, work: Work, now: float) -> float:  # noqa: ARG002
        return 0.0

    def lost_after(self, activation: int) -> float | None:  # noqa: ARG002
        return None

    def trains_offline(self, round_: int) -> bool:  # noqa: ARG002
        return False

    def rest(self, session: int, activation: int, now: float) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class Drawn:
    """The clock model of the paper's experiments, on a real clock of `scale` seconds per unit."""

    device: int
    members: Sequence[int]  # of its server, as far as it has been told
    pool: AvailableDevices
    times: Times
    scale: float
    has_own_timers = False

    def is_available(self) -> bool:
        return True

    def among(self, members: Sequence[int]) -> "Drawn":
        return replace(self, members=members)

    def arrival(self, phase: int, round_: int, now: float) -> float | None:
        """The addressed draw of this device and phase. Who is not available in this round does not
        ask; where devices may be lost, after all that are available.
        """
        delay = float(self._arrivals([self.device], phase, now)[0])
        if not self._is_available(round_):
            if not self.times.clock.dropout:
                return None
            delay += float(self._arrivals(self._available(round_), phase, now).max())
        return self.scale * delay

    def _arrivals(self, devices: Sequence[int], phase: int, now: float) -> Floats:
        return self.times.arrivals(np.array(devices), np.array([phase]), now / self.scale)

    def work(self, work: Work, now: float) -> float:
        return self.scale * self.times.of(self.pool.method, self.device, work, now / self.scale)[1]

    def lost_after(self, activation: int) -> float | None:
        return self.times.lost_after(self.device, activation)

    def trains_offline(self, round_: int) -> bool:
        """FedBCD-I with offline rounds that take no time: every available device takes one in each
        round of the coordinator.
        """
        is_free = bool(self.pool.method.offline) and not self.pool.method.takes_time_offline
        return is_free and self._is_available(round_)

    def rest(self, session: int, activation: int, now: float) -> float | None:
        if not self.pool.method.takes_time_offline:
            return None
        rest = self.times.rest_one(self.device, session, activation, now / self.scale)
        return self.scale * rest

    def _is_available(self, round_: int) -> bool:
        return self.device in self._available(round_)

    def _available(self, round_: int) -> list[int]:
        """As in a simulation; one that is no member yet draws among the members and itself."""
        members = np.array(sorted({*self.members, self.device}), dtype=np.int64)
        found: list[int] = self.pool.available(members, round_).tolist()
        return found
