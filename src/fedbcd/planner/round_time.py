"""What becomes of server times on a cloud: many copies of the servers at once, through the
coordinator's rule, without machines.

Legend: R copies, C draws of tau_n each, N servers, B of them in a mix, T rounds.
`finish_RN[r, n]` is when server n of copy r ends its present phase.

Eq. (7) lets all servers start together in every round. On the Async-cloud they do so only in the
first: a server that was left out carries on, and is nearer to its end than a fresh one. So the time
of a round is followed here, and eq. (7) is shown beside it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedbcd.planner.order_statistics import check_rank
from fedbcd.planner.server_time import ServerTime
from fedbcd.schedule.delays import Floats

REPLICAS = 24
DRAWS = 10_000  # of tau_n, for each copy and B
WARM_UP = 5  # phases of an average server, before rounds of the Async-cloud are counted
Members = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The time between two mixes: its mean, that mean's standard error, the spread of one round;
    and how old the servers left out are.
    """

    mean: float
    error: float
    spread: float
    staleness: float  # rounds since its last mix, of a server that is left out of one: mean
    staleness_high: float  # and what 95 in 100 stay below or at


class _Times:
    """Draws of tau_n, handed out in order."""

    def __init__(self, times_RC: Floats) -> None:
        self._times_RC = times_RC
        self._used = 0

    def take(self, count: int) -> Floats:
        begin, self._used = self._used, self._used + count
        return self._times_RC[:, begin : self._used]


def sync_rounds(times_RC: Floats, servers: int) -> RoundTime:
    """Sync-cloud: a round lasts as long as the slowest of fresh servers, tau_(N)."""
    rounds = times_RC.shape[1] // servers
    lasts_RT = times_RC[:, : rounds * servers].reshape(len(times_RC), rounds, servers).max(axis=2)
    return _summary(lasts_RT.T, np.zeros(1, dtype=np.int64))


def async_rounds(times_RC: Floats, servers: int, first: int) -> RoundTime:
    """Async-cloud, once it has settled: the B that wait are mixed and start anew; the others go on
    undisturbed.
    """
    check_rank(first, servers)
    if first == servers:
        return sync_rounds(times_RC, servers)
    warm = math.ceil(WARM_UP * servers / first)
    rounds = (times_RC.shape[1] - servers) // first
    return _followed(_async(_Times(times_RC), servers, first, rounds, _has_ties(times_RC)), warm)


def rigorous_rounds(times_RC: Floats, servers: int, first: int) -> RoundTime:
    """Rigorous Async-cloud (Appendix A) over as many rounds as there are times for: it need not
    settle, as a server may fall behind.
    """
    check_rank(first, servers)
    return _followed(
        _rigorous(
            _Times(times_RC), servers, first, times_RC.shape[1] // servers, _has_ties(times_RC)
        ),
        0,
    )


def rounds_of(
    cloud: str, source: ServerTime, servers: int, first: int, rounds: int = 100, seed: int = 0
) -> RoundTime:
    """The time of a round on the cloud of this name: `sync`, `graph`, `async`, or the first
    `rounds` rounds of `rigorous`.
    """
    if cloud == "rigorous":
        return rigorous_rounds(source.sample(REPLICAS, servers * rounds, seed), servers, first)
    times_RC = source.sample(REPLICAS, draws_needed(servers), seed)
    return async_rounds(times_RC, servers, first if cloud == "async" else servers)


def draws_needed(servers: int) -> int:
    """How many tau_n a plan draws for each copy: enough to settle, and then to measure."""
    return DRAWS + servers * (WARM_UP + 3)


# ------------------------------------------------------------------------------------------------
# the rules
def _async(
    times: _Times, servers: int, first: int, rounds: int, ties: bool
) -> Iterator[tuple[Floats, Members]]:
    """Per round: when the mix happens in each copy, and who is in it. Of servers that end together
    the one longest left out is first.
    """
    finish_RN = times.take(servers).copy()
    mixed_RN = np.zeros(finish_RN.shape, dtype=np.int64)
    copies = np.arange(len(finish_RN))[:, None]
    for t in range(rounds):
        chosen_RB = _earliest(finish_RN, mixed_RN, first, ties)
        now_R = finish_RN[copies, chosen_RB].max(axis=1)
        members_RN = np.zeros(finish_RN.shape, dtype=np.bool_)
        members_RN[copies, chosen_RB] = True
        yield now_R, members_RN
        finish_RN[copies, chosen_RB] = now_R[:, None] + times.take(first)
        mixed_RN[copies, chosen_RB] = t + 1


def _has_ties(times_RC: Floats) -> bool:
    """Whether times repeat, as those of a sample, or constant ones."""
    return bool(np.unique(times_RC[:, :100]).size < times_RC[:, :100].size)


def _earliest(
    finish_RN: Floats, mixed_RN: npt.NDArray[np.int64], first: int, ties: bool
) -> npt.NDArray[np.int64]:
    """The B that end first, exactly B; of those that end together the ones longest left out."""
    order_RN = (
        np.lexsort((mixed_RN, finish_RN), axis=1)
        if ties
        else np.argpartition(finish_RN, first - 1, axis=1)
    )
    return order_RN[:, :first]


def _rigorous(
    times: _Times, servers: int, first: int, rounds: int, ties: bool
) -> Iterator[tuple[Floats, Members]]:
    """Per round t: E(t) is the B-th smallest end F_n(t) of phase t; then F_n(t+1) = max(F_n(t),
    E(t)) + tau_n, isolated or not.
    """
    finish_RN = times.take(servers)
    mixed_RN = np.zeros(finish_RN.shape, dtype=np.int64)
    copies = np.arange(len(finish_RN))[:, None]
    for t in range(rounds):
        chosen_RB = _earliest(finish_RN, mixed_RN, first, ties)
        now_R = finish_RN[copies, chosen_RB].max(axis=1)
        members_RN = np.zeros(finish_RN.shape, dtype=np.bool_)
        members_RN[copies, chosen_RB] = True
        yield now_R, members_RN
        mixed_RN[copies, chosen_RB] = t + 1
        if t + 1 < rounds:
            finish_RN = np.maximum(finish_RN, now_R[:, None]) + times.take(servers)


def _followed(rounds: Iterator[tuple[Floats, Members]], warm: int) -> RoundTime:
    """Round lengths and ages after the first `warm` rounds."""
    ends: list[Floats] = []
    ages, age_RN = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for t, (now_R, members_RN) in enumerate(rounds):
        ends.append(now_R)
        age_RN = np.where(members_RN, 0, age_RN + 1)
        if t >= warm:
            ages = _added(ages, np.bincount(age_RN.ravel()))
    ages[0] = 0  # those in the mix
    return _summary(np.diff(np.stack([np.zeros_like(ends[0]), *ends]), axis=0)[warm:], ages)


def _added(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    longer, shorter = (a, b) if a.size > b.size else (b, a)
    longer[: shorter.size] += shorter
    return longer


def _summary(lasts_TR: Floats, ages: npt.NDArray[np.int64]) -> RoundTime:
    means_R = lasts_TR.mean(axis=0)
    error = float(means_R.std(ddof=1)) / math.sqrt(len(means_R))
    total = int(ages.sum())
    mean_age = float(ages @ np.arange(ages.size)) / total if total else 0.0
    high = int(np.searchsorted(np.cumsum(ages), 0.95 * total)) if total else 0
    return RoundTime(float(means_R.mean()), error, float(lasts_TR.std()), mean_age, float(high))
