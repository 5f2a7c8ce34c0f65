"""tau_n, the time a server needs for one phase: from the device model, from a distribution, or from
an event log.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedbcd.engines.setup import make_machines, make_schedule
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Job
from fedbcd.planner.order_statistics import Distribution, Empirical, check_mean, uniforms
from fedbcd.planner.record import Record, RecordedPhase
from fedbcd.record.timeline import Timeline
from fedbcd.schedule.availability import PerServer, at_server
from fedbcd.schedule.delays import Clock, Floats, Ints
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation
from fedbcd.schedule.times import Times

DEVICES_AT_ONCE = 2**20  # devices whose times are drawn at once: about 50 MB
PLAYED = 1000  # phases of a schedule that has no formula
LARGEST_U = 1 - 2.0**-53
# What is fitted to a log beside the exponential, and where among scipy's (shape, location, scale)
# our parameters stand.
FITTED: dict[str, tuple[Any, dict[str, int]]] = {
    "weibull": (stats.weibull_min, {"shape": 0, "scale": 2}),
    "gamma": (stats.gamma, {"shape": 0, "scale": 2}),
    "lognormal": (stats.lognorm, {"median": 2, "sigma": 0}),
}


class ServerTime(Protocol):
    """A source of tau_n. `recorded`: it is a sample itself, so that its copies differ as much as
    another sample might.
    """

    recorded: ClassVar[bool]

    def sample(self, copies: int, count: int, seed: int) -> Floats: ...


@dataclass(frozen=True)
class DeviceModel:
    """The clock model: a server lets in the q = `active` earliest of its `members`; tau_n = max of
    arrival + K_i * step over those.
    """

    clock: Clock
    members: int
    active: int
    steps: tuple[int, int] = (1, 5)
    recorded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.members:
            raise ConfigError(
                f"q={self.active} devices of {self.members} cannot take part; use 1 <= q <="
                f" {self.members}"
            )
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"steps={self.steps} must be 1 <= low <= high")

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Independent draws of tau_n. Only the q earliest of the arrivals are drawn, so members
        cost nothing; DEVICES_AT_ONCE of them at a time.
        """
        rows, at_once = copies * count, max(1, DEVICES_AT_ONCE // self.active)
        found = [
            self._rows(seed, begin, min(at_once, rows - begin)) for begin in range(0, rows, at_once)
        ]
        return np.concatenate(found).reshape(copies, count)

    def _rows(self, seed: int, begin: int, rows: int) -> Floats:
        low, high = self.steps
        one, two, three = (uniforms(seed, part, rows, self.active, begin) for part in (1, 2, 3))
        arrival = self.clock.arrival.quantile(self._earliest(one))
        steps = low + np.floor(two * (high - low + 1))
        return np.asarray((arrival + steps * self.clock.step.quantile(three)).max(axis=1))

    def _earliest(self, u: Floats) -> Floats:
        """The q smallest of `members` uniforms: 1 - U_(j) is the product of V_i^(1 / (members - i +
        1)), i = 1 .. j (Renyi).
        """
        left = self.members - np.arange(self.active)
        return np.minimum(-np.expm1(np.cumsum(np.log(u) / left, axis=1)), LARGEST_U)


@dataclass(frozen=True)
class DifferingDevices:
    """Devices and servers that are not alike: phases of each server, with its own devices, at the
    time at which they begin. Legend as in `round_time`; B servers, M members of each.
    """

    times: Times
    servers: Sequence[Sequence[int]]
    active: PerServer
    steps: tuple[int, int]
    available: Callable[[int], int]  # number of members -> how many of them are available
    recorded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for n, members in enumerate(self.servers):
            q, most = at_server(self.active, n), self.available(len(members))
            if not 1 <= q <= most:
                raise ConfigError(
                    f"q={q} devices of the {most} of server {n} cannot take part; use 1 <= q <="
                    f" {most}"
                )

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """tau_n of all servers in turn, which begin together again and again (Sync-cloud)."""
        drawn = self.drawn(copies, seed)
        everyone = np.broadcast_to(np.arange(len(self.servers)), (copies, len(self.servers)))
        now_R1, found = np.zeros((copies, 1)), []
        for _ in range(math.ceil(count / len(self.servers))):
            found.append(drawn.take(everyone, now_R1))
            now_R1 = now_R1 + found[-1].max(axis=1, keepdims=True)
        return np.concatenate(found, axis=1)[:, :count]

    def drawn(self, copies: int, seed: int) -> "DrawnPhases":
        return DrawnPhases(self, copies, seed)

    def sentence(self, mean_N: Floats) -> str:
        """Which server is the slowest, by how much, and why."""
        worst = int(mean_N.argmax())
        members = np.array(self.servers[worst])
        slowest = (
            f"server {worst} is the slowest: E[tau_n] = {mean_N[worst]:.3g}, against"
            f" {np.median(mean_N):.3g} of the median server"
        )
        if self.times.alike:
            q = at_server(self.active, worst)
            return f"{slowest}; it waits for {q} of its {len(members)} devices"
        work = self.times.work_at(np.full(len(members), 0.5), members, np.array([1]), 0.0)
        device = int(members[work.argmax()])
        why = self.times.why_slow(device)
        return f"{slowest}; the slowest of its devices is {device}" + (f", by {why}" if why else "")


class DrawnPhases:
    """Phases of differing servers, drawn one after another."""

    def __init__(self, source: DifferingDevices, copies: int, seed: int) -> None:
        self._source, self._copies, self._seed, self._row = source, copies, seed, 0
        most = max(map(len, source.servers))
        self._members_VM = np.full((len(source.servers), most), -1)
        for n, members in enumerate(source.servers):
            self._members_VM[n, : len(members)] = members
        self._keep_V = np.array([source.available(len(members)) for members in source.servers])
        self._q_V = np.array([at_server(source.active, n) for n in range(len(source.servers))])

    def take(self, servers_RB: Ints, now: Floats) -> Floats:
        """tau_n of a phase of each of these servers that begins now."""
        source, low, high = self._source, *self._source.steps
        row, self._row = self._row, self._row + servers_RB.size

        def drawn(part: int, like: Ints) -> Floats:
            u = uniforms(self._seed, part, servers_RB.size, like.shape[-1], row)
            return u.reshape(like.shape)

        member = self._members_VM[servers_RB]  # (R, B, M)
        device, now = np.maximum(member, 0), now[..., None]
        arrival = source.times.arrivals_at(drawn(1, member), device, now)
        absent = np.where(member < 0, 2.0, drawn(4, member))
        absent = absent.argsort(-1).argsort(-1) >= self._keep_V[servers_RB][..., None]
        last = np.where(absent, 0.0, arrival).max(-1, keepdims=True)
        arrival = np.where(absent, last + arrival, arrival)  # only if nobody else is left
        arrival[member < 0] = np.inf
        order = arrival.argsort(-1)
        clock = source.times.clock
        beyond = np.arange(self._q_V.max()) >= self._q_V[servers_RB][..., None]
        if not clock.dropout:
            order = order[..., : self._q_V.max()]
        arrival, device = (np.take_along_axis(part, order, -1) for part in (arrival, device))
        steps = low + np.floor(drawn(2, device) * (high - low + 1)).astype(np.int64)
        begun = np.where(np.isfinite(arrival), now + arrival, 0.0)
        work = source.times.work_at(drawn(3, device), device, steps, begun)
        if not clock.dropout:
            return np.asarray(np.where(beyond, 0.0, arrival + work).max(-1))
        return with_losses(arrival, work, drawn(5, device) / clock.dropout, beyond)


def with_losses(
    arrival: Floats, work: Floats, lost: Floats, beyond: npt.NDArray[np.bool_]
) -> Floats:
    """The end of phases (..., M) whose devices come in this order, where one with `lost` below 1
    is gone after that part of its work and the next takes its place; `beyond` marks places that a
    server has not.
    """
    free = np.where(beyond, np.inf, 0.0)  # when each place is free; infinite: it is done
    end = np.zeros(arrival.shape[:-1])
    for k in range(arrival.shape[-1]):
        place = free.argmin(-1)[..., None]
        begins = np.maximum(arrival[..., k], np.take_along_axis(free, place, -1)[..., 0])
        gone = lost[..., k] < 1
        ends = begins + work[..., k] * np.where(gone, lost[..., k], 1.0)
        end = np.where(np.isfinite(begins) & ~gone, np.maximum(end, ends), end)
        np.put_along_axis(free, place, np.where(gone, ends, np.inf)[..., None], -1)
    return end


def device_model(job: Job, active: PerServer | None = None) -> ServerTime:
    """The device model of a job; with FedBCD-I only the available devices can arrive. Phases with a
    deadline depend on those before, so these are played.
    """
    for name, value in (
        ("at_once", job.method.at_once),
        ("availability", job.spec.availability),
    ):
        if value is not None:
            raise ConfigError(
                f"{name}={value!r:.80}: how long phases take then cannot be said beforehand; plan"
                " from the log of a run"
            )
    q = job.active if active is None else active
    if job.spec.deadline is not None:
        return RecordedTime(_played(job, q))
    lengths = job.method.pull_steps or job.method.steps  # or passes, as they are drawn
    each = job.federation.devices
    if not (isinstance(each, int) and isinstance(q, int) and job.spec.clock.is_alike):
        federation = job.make_federation()
        times, available = job.spec.times(federation), job.method.available_of
        return DifferingDevices(times, federation.servers, q, lengths, available)
    return DeviceModel(job.spec.clock, job.method.available_of(each), q, lengths)


def _played(job: Job, active: PerServer) -> "Observed":
    """The phases of the job's own schedule, with `active` uploads each, without any tensor."""
    federation, timeline = job.make_federation(), Timeline()
    spec = job.spec.changed({"active": active})
    driver = Driver(make_machines(spec, federation), None, timeline)
    simulation = Simulation(driver, make_schedule(spec, federation))
    while len(timeline.phases) < PLAYED:
        simulation.play_round()
    opened, ended = np.array(timeline.phases.opened), np.array(timeline.phases.ended)
    seen = (ended >= 0) | (opened < timeline.now)
    return Observed((np.where(ended >= 0, ended, timeline.now) - opened)[seen], ended[seen] >= 0)


@dataclass(frozen=True)
class KnownTime:
    """tau_n of a known distribution."""

    distribution: Distribution
    recorded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_mean(self.distribution)
        shortest = float(self.distribution.support()[0])
        if shortest < 0:
            raise ConfigError(
                f"server times cannot be negative, but this distribution begins at {shortest:g};"
                " shift it with loc"
            )

    @property
    def has_variance(self) -> bool:
        return isinstance(self.distribution, Empirical) or math.isfinite(
            float(self.distribution.var())
        )

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        return np.asarray(self.distribution.ppf(uniforms(seed, 1, copies, count)), dtype=np.float64)


@dataclass(frozen=True)
class Observed:
    """Phases of a log: how long each took and, where it has not `ended`, how long it had taken when
    the log stopped.
    """

    times: Floats
    ended: npt.NDArray[np.bool_]

    def distribution(self) -> Empirical:
        """The Kaplan-Meier estimate: at each end t, S(t) = S(t-) (1 - ends at t / phases that
        lasted until t).

        Leaving out the phases under way would favour short ones. If the longest is under way, it is
        taken to end there.
        """
        order = np.lexsort((~self.ended, self.times))
        ended = self.ended[order].copy()
        ended[-1] = True
        lasted = np.arange(ended.size, 0, -1)
        survival = np.cumprod(1 - ended / lasted)
        weight = np.concatenate([[1.0], survival[:-1]]) - survival
        return Empirical(self.times[order][ended], weight[ended])


@dataclass(frozen=True)
class RecordedTime:
    """tau_n of an event log. Each copy draws from its own resample (bootstrap), so that a short log
    has wide error bars.
    """

    observed: Observed
    recorded: ClassVar[bool] = True

    @property
    def distribution(self) -> Empirical:
        return self.observed.distribution()

    @property
    def as_known(self) -> KnownTime:
        """The log taken for the truth: without resamples."""
        return KnownTime(self.distribution)

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Draws of tau_n, each copy from a resample of the log."""
        phases = self.observed.times.size
        chosen = (uniforms(seed, 2, copies, phases) * phases).astype(np.int64)
        u = uniforms(seed, 1, copies, count)
        times, ended = self.observed.times, self.observed.ended
        resamples = [Observed(times[c], ended[c]).distribution() for c in chosen]
        return np.stack([one.ppf(u_c) for one, u_c in zip(resamples, u, strict=True)])


# ------------------------------------------------------------------------------------------------
# from a log
def observe(record: Record, active: int | None = None) -> Observed:
    """tau_n of every phase of a log. With `active` below what was recorded: as if only that many
    had been waited for.
    """
    finished = [phase for phase in record.phases if phase.ended is not None and phase.complete]
    if not finished:
        raise RecordError(
            f"{record.path} has no finished phase: no server got all its uploads; record at least"
            " one round"
        )
    fewest = min(len(phase.complete) for phase in finished)
    if active is not None and not 1 <= active <= fewest:
        raise ConfigError(
            f"q={active} cannot be read off {record.path}, whose phases saw {fewest} arrivals; use"
            f" q <= {fewest}, or a delay model"
        )
    phases = [
        *finished,
        *(phase for phase in record.phases if phase.ended is None and phase.opened < record.end),
    ]
    ends = [_end(phase, active) for phase in phases]
    times = [
        (record.end if end is None else end) - phase.opened
        for phase, end in zip(phases, ends, strict=True)
    ]
    return Observed(np.array(times), np.array([end is not None for end in ends]))


def _end(phase: RecordedPhase, active: int | None) -> float | None:
    """When a phase ended, or would have with only `active` devices; None: not in this log."""
    if active is None:
        return phase.ended
    visits = (
        phase.complete
        if phase.ended is not None
        else sorted(phase.visits.values(), key=lambda visit: visit.asked)
    )
    ends = [visit.uploaded for visit in visits[:active] if visit.uploaded is not None]
    return max(ends) if len(ends) == active else None


@dataclass(frozen=True)
class Fit:
    """A distribution fitted to recorded times by maximum likelihood, and its Kolmogorov-Smirnov
    distance to them: max |F - F_sample|.
    """

    name: str
    distribution: Distribution
    parameters: dict[str, float]
    distance: float


def fits(observed: Observed) -> list[Fit]:
    """Exponential, Weibull, gamma and log-normal fits, the nearest first."""
    times = observed.times[observed.ended]
    if times.size < 2 or float(times.min()) == float(times.max()):
        raise RecordError(
            f"{times.size} recorded times without any spread cannot be fitted; record more rounds,"
            " or use the sample as it is"
        )
    if float(times.min()) <= 0:
        raise RecordError(
            f"a recorded time of {times.min():g} cannot be fitted by a distribution above 0; use"
            " the sample as it is"
        )
    data = (
        times
        if observed.ended.all()
        else stats.CensoredData(times, right=observed.times[~observed.ended])
    )
    mean = float(observed.times.sum() / observed.ended.sum())
    found = [_fit("exponential", stats.expon(scale=mean), observed, mean=mean)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search for a maximum may try impossible values
        for name, (kind, places) in FITTED.items():
            fitted = kind.fit(data, floc=0)
            parameters = {word: fitted[place] for word, place in places.items()}
            found.append(_fit(name, kind(fitted[0], scale=fitted[2]), observed, **parameters))
    return sorted(found, key=lambda fit: fit.distance)


def _fit(name: str, distribution: Distribution, observed: Observed, **parameters: float) -> Fit:
    sample = observed.distribution()
    at = distribution.cdf(sample.values)
    distance = max(float((at - sample.share[:-1]).max()), float((sample.share[1:] - at).max()))
    return Fit(name, distribution, {k: float(v) for k, v in parameters.items()}, distance)
