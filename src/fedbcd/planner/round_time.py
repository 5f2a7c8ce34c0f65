"""What becomes of server times on a cloud: many copies of the servers at once, through the
coordinator's rule, without machines.

Shapes: R copies, C draws of tau_n each, N servers, B of them in a mix, T rounds.
`finish_RN[r, n]` is when server n of copy r ends its present phase.

Eq. (7) lets all servers start together in every round. On the Async-cloud they do so only in the
first: a server that was left out carries on, and is nearer to its end than a fresh one. So the time
of a round is followed here, and eq. (7) is shown beside it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedbcd.planner.order_statistics import check_rank
from fedbcd.planner.server_time import DifferingDevices, ServerTime
from fedbcd.schedule.delays import Floats

REPLICAS = 24
DRAWS = 10_000  # of tau_n, for each copy and B
PHASES = 2_000  # where servers differ, and their phases are drawn one after another
WARM_UP = 5  # phases of an average server, before rounds of the Async-cloud are counted
COUNTED = 100  # rounds whose ages are counted together
Rounds = npt.NDArray[np.int64]


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


class PhaseSource(Protocol):
    """Where tau_n of the next phases come from."""

    def take(self, servers_RB: Rounds, now: Floats) -> Floats:
        """Of these servers, from now on."""


class _AlikePhases:
    """Draws of tau_n, handed out in order: all servers are alike, at all times."""

    def __init__(self, times_RC: Floats) -> None:
        self._times_RC = times_RC
        self._used = 0

    def take(self, servers_RB: Rounds, now: Floats) -> Floats:  # noqa: ARG002
        begin, self._used = self._used, self._used + servers_RB.shape[1]
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
    times, ties = _AlikePhases(times_RC), _has_ties(times_RC)
    return _followed(_mixes(times, len(times_RC), servers, first, rounds, ties), warm)


def rigorous_rounds(times_RC: Floats, servers: int, first: int) -> RoundTime:
    """Rigorous Async-cloud (Appendix A) over as many rounds as there are times for: it need not
    settle, as a server may fall behind.
    """
    check_rank(first, servers)
    rounds = times_RC.shape[1] // servers
    times, ties = _AlikePhases(times_RC), _has_ties(times_RC)
    return _followed(_mixes(times, len(times_RC), servers, first, rounds, ties, rigorous=True), 0)


def differing_rounds(
    source: DifferingDevices, servers: int, first: int, rounds: int | None, seed: int
) -> RoundTime:
    """Of servers that are not alike: on the Async-cloud, or the first `rounds` of the rigorous
    one.
    """
    check_rank(first, servers)
    warm = 0 if rounds else math.ceil(WARM_UP * servers / first)
    count = rounds or warm + math.ceil(PHASES / first)
    drawn = source.drawn(REPLICAS, seed)
    mixes = _mixes(drawn, REPLICAS, servers, first, count, True, rigorous=bool(rounds))
    return _followed(mixes, warm)


def rounds_of(
    cloud: str, source: ServerTime, servers: int, first: int, rounds: int = 100, seed: int = 0
) -> RoundTime:
    """The time of a round on the cloud of this name; of the first `rounds` rounds of `rigorous`.
    Where all servers are waited for, `first` is their number.
    """
    if isinstance(source, DifferingDevices):
        numbered = rounds if cloud == "rigorous" else None
        return differing_rounds(source, servers, first, numbered, seed)
    if cloud == "rigorous":
        return rigorous_rounds(source.sample(REPLICAS, servers * rounds, seed), servers, first)
    times_RC = source.sample(REPLICAS, draws_needed(servers), seed)
    return async_rounds(times_RC, servers, first)


def draws_needed(servers: int) -> int:
    """How many tau_n a plan draws for each copy: enough to settle, and then to measure."""
    return DRAWS + servers * (WARM_UP + 3)


# ------------------------------------------------------------------------------------------------
# the rules
def _has_ties(times_RC: Floats) -> bool:
    return bool(np.unique(times_RC[:, :100]).size < times_RC[:, :100].size)


def _earliest(finish_RN: Floats, mixed_RN: Rounds, first: int, ties: bool) -> Rounds:
    """The B that end first, exactly B; of those that end together the ones longest left out."""
    order_RN = (
        np.lexsort((mixed_RN, finish_RN), axis=1)
        if ties
        else np.argpartition(finish_RN, first - 1, axis=1)
    )
    return order_RN[:, :first]


def _mixes(
    times: PhaseSource,
    copies: int,
    servers: int,
    first: int,
    rounds: int,
    ties: bool,
    rigorous: bool = False,
) -> Iterator[tuple[Floats, Rounds]]:
    """Per round: when the mix happens in each copy, and after which round each server was mixed
    last. Of servers that end together the one longest left out is first.

    Only those in the mix begin a new phase. Rigorous: E(t) is the B-th smallest end F_n(t) of phase
    t; then F_n(t+1) = max(F_n(t), E(t)) + tau_n, isolated or not.
    """
    everyone = np.broadcast_to(np.arange(servers), (copies, servers))
    finish_RN = times.take(everyone, np.zeros((copies, 1))).copy()
    mixed_RN = np.zeros(finish_RN.shape, dtype=np.int64)
    row_R1 = np.arange(copies)[:, None]
    for t in range(rounds):
        chosen = row_R1, _earliest(finish_RN, mixed_RN, first, ties)
        now_R1 = finish_RN[chosen].max(axis=1, keepdims=True)
        mixed_RN[chosen] = t + 1
        yield now_R1, mixed_RN
        if not rigorous:
            finish_RN[chosen] = now_R1 + times.take(chosen[1], now_R1)
        elif t + 1 < rounds:
            begun_RN = np.maximum(finish_RN, now_R1)
            finish_RN = begun_RN + times.take(everyone, begun_RN)


def _followed(rounds: Iterator[tuple[Floats, Rounds]], warm: int) -> RoundTime:
    ends: list[Floats] = []
    ages, latest = np.zeros(1, dtype=np.int64), []
    for t, (now_R1, mixed_RN) in enumerate(rounds, 1):
        ends.append(now_R1)
        if t > warm:
            latest.append(t - mixed_RN)
        if len(latest) == COUNTED:
            ages, latest = _added(ages, latest), []
    ages = _added(ages, latest)
    ages[0] = 0  # those in the mix
    ends_TR = np.concatenate([np.zeros_like(ends[0]), *ends], axis=1).T
    return _summary(np.ascontiguousarray(np.diff(ends_TR, axis=0)[warm:]), ages)


def _added(ages: Rounds, latest: list[Rounds]) -> Rounds:
    """How many servers were how old, with those of some more rounds."""
    more = np.bincount(np.ravel(latest).astype(np.int64), minlength=ages.size)
    more[: ages.size] += ages
    return more


def _summary(lasts_TR: Floats, ages: Rounds) -> RoundTime:
    means_R = lasts_TR.mean(axis=0)
    error = float(means_R.std(ddof=1)) / math.sqrt(len(means_R))
    total = int(ages.sum())
    mean_age = float(ages @ np.arange(ages.size)) / total if total else 0.0
    high = int(np.searchsorted(np.cumsum(ages), 0.95 * total)) if total else 0
    return RoundTime(float(means_R.mean()), error, float(lasts_TR.std()), mean_age, float(high))
