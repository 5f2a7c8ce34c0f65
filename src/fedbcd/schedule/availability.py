"""Who of a server's members can take part in a round: all, as many as the method says, by draws, or
those that a rule names.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.algorithm.method import Method
from fedbcd.config import fit
from fedbcd.errors import ConfigError
from fedbcd.own import calling
from fedbcd.schedule.delays import Floats

Devices = npt.NDArray[np.int64]
PerServer = int | tuple[int, ...]  # a number for all servers, or one for each


class Availability(Protocol):
    """A rule: a frozen dataclass, in job files a name of ours or package.module:Name."""

    def available(self, members: Devices, round_: int, u: Floats) -> npt.NDArray[np.bool_]:
        """Which of these devices can take part in this round of the coordinator; `u` is a draw for
        each of them, uniform between 0 and 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chance:
    """Each device can in each round with the same probability."""

    probability: float
    name: ClassVar[str] = "chance"

    def __post_init__(self) -> None:
        fit(self)
        if not 0 < self.probability <= 1:
            raise ConfigError(f"probability={self.probability} must be above 0 and at most 1")

    def available(self, members: Devices, round_: int, u: Floats) -> npt.NDArray[np.bool_]:  # noqa: ARG002
        """By its draw."""
        return np.asarray(u < self.probability)


RULES: dict[str, type[Chance]] = {Chance.name: Chance}


def at_server(number: PerServer, server: int) -> int:
    """That of one server."""
    return number if isinstance(number, int) else number[server]


@dataclass(frozen=True)
class AvailableDevices:
    """How devices of a server become available. Where a rule names fewer than `active` (q), a phase
    could not end: others make up for them, by their draws.
    """

    method: Method
    active: int
    seed: int
    rule: Availability | None = None

    @property
    def is_everybody(self) -> bool:
        """In every round."""
        return self.rule is None and self.method.available is None

    @property
    def follows_rounds(self) -> bool:
        """Whether devices do something, or do not, because of the coordinator's round."""
        return bool(self.method.offline) or not self.is_everybody

    def available(self, members: Devices, round_: int) -> Devices:
        """Q~_n(t)."""
        if self.is_everybody:
            return members
        least = min(self.active, len(members))
        u = draws.unit(draws.address(self.seed, draws.AVAILABLE, members, np.array([round_])))
        order = np.lexsort((members, u))
        if self.rule is None:
            return members[order[: max(self.method.available_of(len(members)), least)]]
        remedy = "available(members, round_, u) takes arrays of devices and of draws, and a round"
        with calling("availability: {!r:.80} fails", self.rule, remedy=remedy):
            named = np.asarray(self.rule.available(members, round_, u))
        if named.shape != members.shape or named.dtype != bool:
            raise ConfigError(
                f"availability: {self.rule!r:.80} gives {named.dtype} of shape {named.shape} for"
                f" {len(members)} devices; it must be True or False for each of them"
            )
        first = order[np.argsort(~named[order], kind="stable")]  # those that it names come first
        return members[first[: max(int(named.sum()), least)]]
