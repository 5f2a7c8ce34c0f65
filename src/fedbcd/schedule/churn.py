"""Devices that come and go by a rule, drawn before a run begins: who joins in which round, and who
leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.config import fit
from fedbcd.errors import ConfigError

DRAWS_AT_ONCE = 2**22  # draws in one array
MOST_ROUNDS = 1_000_000
Changes = Mapping[int, int]  # device -> round


@dataclass(frozen=True, slots=True)
class Churn:
    """In each of the first `rounds` rounds, a share `joins` of the devices joins and a share
    `leaves` leaves, each device by a draw of its own. Who has drawn to join is not there before;
    who has drawn neither is there all along. Nobody comes back.
    """

    joins: float = 0.0
    leaves: float = 0.0
    rounds: int = 100

    def __post_init__(self) -> None:
        fit(self, "churn.")
        for name in ("joins", "leaves"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"churn.{name}={getattr(self, name)} must be 0 or more and below 1, the share"
                    " of all devices in one round"
                )
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise ConfigError(
                f"churn.rounds={self.rounds} must be between 1 and {MOST_ROUNDS:,}, the rounds in"
                " which devices come and go"
            )

    def drawn(self, seed: int, devices: int) -> tuple[Changes, Changes]:
        """The rounds in which devices join, and leave."""
        return _drawn(self, seed, devices)


@lru_cache(maxsize=4)
def _drawn(churn: Churn, seed: int, devices: int) -> tuple[Changes, Changes]:
    joins: dict[int, int] = {}
    leaves: dict[int, int] = {}
    step = max(1, DRAWS_AT_ONCE // churn.rounds)
    for first in range(0, devices, step):
        some = np.arange(first, min(first + step, devices))
        joined = _first(seed, draws.JOINING, some, churn.joins, np.zeros_like(some), churn.rounds)
        left = _first(seed, draws.LEAVING, some, churn.leaves, joined, churn.rounds)
        joins |= {int(i): int(t) for i, t in zip(some, joined, strict=True) if t}
        leaves |= {int(i): int(t) for i, t in zip(some, left, strict=True) if t}
    return joins, leaves


def _first(
    seed: int,
    stream: int,
    devices: npt.NDArray[np.int64],
    share: float,
    after: npt.NDArray[np.int64],
    rounds: int,
) -> npt.NDArray[np.int64]:
    """The first round from 1 to `rounds`, later than `after`, for which a device draws less than
    `share`; 0: there is none.
    """
    if share == 0:
        return np.zeros_like(devices)
    round_ = np.arange(1, rounds + 1)
    u = draws.unit(draws.address(seed, stream, devices[:, None], round_[None, :]))
    hit = (u < share) & (round_ > after[:, None])
    return np.where(hit.any(1), round_[hit.argmax(1)], 0)
