"""All B side by side: how long a round lasts, how many there are in an hour, and how old the
servers get that are left out.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import mean

import numpy as np

from fedbcd.errors import ConfigError
from fedbcd.planner.order_statistics import (
    Distribution,
    Empirical,
    LargeN,
    check_rank,
    deviation,
    expected_all,
    large_n,
)
from fedbcd.planner.round_time import REPLICAS, RoundTime, async_rounds, draws_needed, rounds_of
from fedbcd.planner.server_time import DifferingDevices, KnownTime, RecordedTime, ServerTime
from fedbcd.protocol.clouds import AsyncCloud, DynamicGraph, RigorousCloud
from fedbcd.schedule.availability import PerServer
from fedbcd.schedule.delays import Floats

PLANNED = (AsyncCloud.name, RigorousCloud.name, DynamicGraph.name)  # clouds with a B
LAW = 20_000  # times that stand for a law that is only drawn from
TIMES_ERROR = 1.96  # standard errors on either side: 95 in 100
# standard deviations on either side, where these are taken from 24 resamples (Student's t)
TIMES_SPREAD = 2.07


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One B (and q): the paper's ratio for servers that start together, and what consecutive rounds
    of the cloud give.
    """

    first: int  # B
    active: PerServer  # q
    beta: float  # B / N
    order_statistic: float  # E[tau_(B)] of N fresh servers, eq. (7)
    reduction: float  # r_{B,N} = E[tau_(B)] / E[tau_(N)], eq. (7)
    round_time: float  # mean time between two mixes
    # of that mean, 95 in 100; from a log: what another log of this length might give; None: it has
    # none
    error: float | None
    spread: float | None  # standard deviation of one round; None: infinite
    ratio: float  # round_time over that of waiting for all
    rounds_per_hour: float
    updates_per_hour: float  # server steps after a mix: B times as many
    staleness: float  # rounds since its last mix, of a server that is left out: mean
    staleness_high: float  # and what 95 in 100 stay below or at
    # of the servers in a mix, how many have a link to another that is there; None: all hear of all
    linked: float | None = None


@dataclass(frozen=True)
class Plan:
    """A plan for N servers on one cloud."""

    cloud: str
    servers: int
    rows: tuple[PlanRow, ...]
    server_time: float  # E[tau_n], of the first q
    clock_seconds: float
    server_spread: float | None = None  # sigma_tau, of the first q; None: infinite
    large_n: tuple[LargeN, ...] = ()  # eq. (8) for every B, of the first q
    by_server: tuple[float, ...] = ()  # E[tau_n] of each, where they differ
    slowest: str = ""  # which of them, by how much and why

    @property
    def has_bars(self) -> bool:
        return all(row.error is not None for row in self.rows)


def make_plan(
    sources: Mapping[PerServer, ServerTime],
    servers: int,
    *,
    firsts: Sequence[int] | None = None,
    cloud: str = "async",
    rounds: int = 100,
    clock_seconds: float = 1.0,
    seed: int = 0,
    links: DynamicGraph | None = None,
) -> Plan:
    """The plan for every q of `sources` (q -> server time) and every B of `firsts` (default: see
    `every_first`).

    rounds         rigorous cloud only: how many rounds the run is to have
    clock_seconds  seconds that one unit of the clock stands for
    links          of a dynamic graph, along which servers mix
    """
    _check(servers, clock_seconds, rounds, cloud)
    chosen = every_first(servers) if firsts is None else sorted(set(firsts))
    for first in chosen:
        check_rank(first, servers)
    by_server, slowest = _by_server(next(iter(sources.values())), servers, seed)
    rows: list[PlanRow] = []
    means: list[float] = []
    for active, source in sources.items():
        times = source.sample(REPLICAS, draws_needed(servers), seed)
        means.append(_mean(source, times))
        if means[-1] <= 0:
            raise ConfigError(
                "every server time is 0, so there is nothing to wait for; give the clock a delay"
                " above 0"
            )
        fresh = _fresh(source, times, servers)
        lasts = _round_times(cloud, source, times, servers, {*chosen, servers}, rounds, seed)
        if isinstance(source, KnownTime):
            # waiting for all of fresh servers is eq. (7) itself, on both clouds
            lasts[servers] = replace(lasts[servers], mean=float(fresh[-1]), error=0.0)
        bars = source.has_variance if isinstance(source, KnownTime) else True
        rows += [
            _row(first, active, servers, fresh, lasts[first], lasts[servers], bars, clock_seconds)
            for first in chosen
        ]
    source = next(iter(sources.values()))
    law = _law(source, seed)
    return Plan(
        cloud,
        servers,
        tuple(rows) if links is None else tuple(_linked(row, links, servers) for row in rows),
        means[0],
        clock_seconds,
        deviation(law),
        large_n(law, chosen, servers, closed=isinstance(source, KnownTime)),
        by_server,
        slowest,
    )


def _linked(row: PlanRow, links: DynamicGraph, servers: int) -> PlanRow:
    """With how many servers of a mix have somebody to mix with. Of a server with d links, the B - 1
    others are any of N - 1 (alike as they are), and each link fails by itself.
    """
    others, alone = row.first - 1, []
    for edges in links.edges:
        degree = Counter(n for link in set(edges) for n in link)
        for d in (degree[n] for n in range(servers)):
            none = sum(
                comb(d, k) * comb(servers - 1 - d, others - k) * links.link_failure**k
                for k in range(min(d, others) + 1)
            )
            alone.append(none / comb(servers - 1, others))
    return replace(row, linked=1 - mean(alone))


def _by_server(source: ServerTime, servers: int, seed: int) -> tuple[tuple[float, ...], str]:
    """E[tau_n] of each server, and a sentence on the slowest; nothing where they are alike."""
    if not isinstance(source, DifferingDevices):
        return (), ""
    if len(source.servers) != servers:
        raise ConfigError(
            f"servers={servers}: the {len(source.servers)} servers of the job differ, so none can"
            " be added or left out; change the job"
        )
    mean_N = source.sample(REPLICAS, 100 * servers, seed).reshape(-1, servers).mean(axis=0)
    return tuple(mean_N.tolist()), source.sentence(mean_N)


def _law(source: ServerTime, seed: int) -> Distribution:
    """The distribution of tau_n; that of a sample where it is only drawn from."""
    if isinstance(source, KnownTime | RecordedTime):
        return source.distribution
    return Empirical(source.sample(1, LAW, seed))


def every_first(servers: int) -> list[int]:
    """1 .. N; of more than 100 servers 50 of those, evenly spread."""
    if servers <= 100:
        return list(range(1, servers + 1))
    return sorted({round(1 + k * (servers - 1) / 49) for k in range(50)})


def _check(servers: int, clock_seconds: float, rounds: int, cloud: str) -> None:
    if servers < 1:
        raise ConfigError(f"servers={servers} must be 1 or more")
    if not 0 < clock_seconds < float("inf"):
        raise ConfigError(f"clock_seconds={clock_seconds} must be a finite number above 0")
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} must be 1 or more")
    if cloud not in PLANNED:
        raise ConfigError(
            f"cloud={cloud!r} waits for all servers, so there is no B to choose; plan for 'async'"
            " or 'rigorous'"
        )


def _round_times(
    cloud: str,
    source: ServerTime,
    times: Floats,
    servers: int,
    firsts: Collection[int],
    rounds: int,
    seed: int,
) -> dict[int, RoundTime]:
    """B -> the time of a round; those of a log less what its resamples are off from it."""
    found = {b: _round_time(cloud, source, times, servers, b, rounds, seed) for b in firsts}
    if not isinstance(source, RecordedTime):
        return found
    known = source.as_known
    times = known.sample(REPLICAS, draws_needed(servers), seed)
    return {
        b: _corrected(_round_time(cloud, known, times, servers, b, rounds, seed), last)
        for b, last in found.items()
    }


def _round_time(
    cloud: str, source: ServerTime, times: Floats, servers: int, first: int, rounds: int, seed: int
) -> RoundTime:
    """All B of the Async-cloud see the same draws, so that they differ by B alone. The error is for
    95 in 100.
    """
    found = (
        rounds_of(cloud, source, servers, first, rounds, seed)
        if cloud == RigorousCloud.name or isinstance(source, DifferingDevices)
        else async_rounds(times, servers, first)
    )
    return replace(found, error=TIMES_ERROR * found.error)


def _corrected(log: RoundTime, resamples: RoundTime) -> RoundTime:
    """A log's own round time, less what its resamples are off from it on average (bootstrap): as
    they err from the log, the log errs.

    The bar is the longer, upper half of an interval for the logarithm: round times from a short log
    are skewed.
    """
    mean = 2 * log.mean - resamples.mean
    spread = resamples.error / TIMES_ERROR * math.sqrt(REPLICAS)
    return replace(log, mean=mean, error=mean * math.expm1(TIMES_SPREAD * spread / resamples.mean))


def _mean(source: ServerTime, times: Floats) -> float:
    return float(
        source.distribution.mean() if isinstance(source, KnownTime | RecordedTime) else times.mean()
    )


def _fresh(source: ServerTime, times: Floats, servers: int) -> Floats:
    """E[tau_(k)] of N servers that start together, k = 1 .. N: exactly where the distribution is
    known, otherwise by sampling.
    """
    if isinstance(source, KnownTime | RecordedTime):
        return expected_all(source.distribution, np.arange(1, servers + 1), servers)
    whole = times.size // servers * servers
    return np.asarray(np.sort(times.ravel()[:whole].reshape(-1, servers), axis=1).mean(axis=0))


def _row(
    first: int,
    active: PerServer,
    servers: int,
    fresh: Floats,
    lasts: RoundTime,
    sync: RoundTime,
    bars: bool,
    clock_seconds: float,
) -> PlanRow:
    per_hour = 3600 / (lasts.mean * clock_seconds)
    return PlanRow(
        first=first,
        active=active,
        beta=first / servers,
        order_statistic=float(fresh[first - 1]),
        reduction=float(fresh[first - 1] / fresh[-1]),
        round_time=lasts.mean,
        error=lasts.error if bars or first == servers else None,
        spread=lasts.spread if bars else None,
        ratio=lasts.mean / sync.mean,
        rounds_per_hour=per_hour,
        updates_per_hour=first * per_hour,
        staleness=lasts.staleness,
        staleness_high=lasts.staleness_high,
    )
