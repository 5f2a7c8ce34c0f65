"""tau_n, the time a server needs for one phase: from the device model, from a distribution, or from
an event log.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Job
from fedbcd.planner.order_statistics import Distribution, Empirical, check_mean, uniforms
from fedbcd.planner.record import Record, RecordedPhase
from fedbcd.schedule.delays import Clock, Floats

CHUNK = 2**20  # devices whose times are drawn at once: about 50 MB
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
        cost nothing; CHUNK of them at once.
        """
        rows, at_once = copies * count, max(1, CHUNK // self.active)
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


def device_model(job: Job, active: int | None = None) -> DeviceModel:
    """The device model of a job; with FedBCD-I only the available devices can arrive."""
    members, q = job.federation.devices, job.active if active is None else active
    members = job.method.available_of(members)
    return DeviceModel(job.spec.clock, members, q, job.method.pull_steps or job.method.steps)


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
