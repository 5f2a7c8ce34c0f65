"""tau_n, the time a server needs for one phase: from the device model, from a distribution, or from an event log."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from scipy import stats

from fedbcd.algorithm.variants import FedBCDI
from fedbcd.engines.simulate.delays import Clock, Floats
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Job
from fedbcd.planner.order_statistics import Distribution, Empirical, check_mean, uniforms
from fedbcd.planner.record import Record

LARGEST_U = 1 - 2.0**-53


class ServerTime(Protocol):
    """A source of tau_n. `recorded`: it is a sample itself, so that its copies differ as much as another sample might."""

    recorded: ClassVar[bool]

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Draws of tau_n for several copies of the servers: shape (copies, count)."""
        ...


@dataclass(frozen=True)
class DeviceModel:
    """The clock model: a server lets in the q = `active` earliest of its `members`; tau_n = max of arrival + K_i * step over those."""

    clock: Clock
    members: int
    active: int
    steps: tuple[int, int] = (1, 5)
    recorded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.members:
            raise ConfigError(f"q={self.active} devices of {self.members} cannot take part; use 1 <= q <= {self.members}")
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"steps={self.steps} must be 1 <= low <= high")

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Independent draws of tau_n. Only the q earliest of the arrivals are drawn, so members cost nothing."""
        rows, (low, high) = copies * count, self.steps
        arrival = self.clock.arrival.quantile(self._earliest(uniforms(seed, 1, rows, self.active)))
        steps = low + np.floor(uniforms(seed, 2, rows, self.active) * (high - low + 1))
        one_step = self.clock.step.quantile(uniforms(seed, 3, rows, self.active))
        return np.asarray((arrival + steps * one_step).max(axis=1).reshape(copies, count))

    def _earliest(self, u: Floats) -> Floats:
        """The q smallest of `members` uniforms: 1 - U_(j) is the product of V_i^(1 / (members - i + 1)), i = 1 .. j (Renyi)."""
        left = self.members - np.arange(self.active)
        return np.minimum(-np.expm1(np.cumsum(np.log(u) / left, axis=1)), LARGEST_U)


def device_model(job: Job, active: int | None = None) -> DeviceModel:
    """The device model of a job; with FedBCD-I only the available devices can arrive."""
    members, q = job.federation.devices, job.federation.active if active is None else active
    if isinstance(job.algorithm, FedBCDI):
        members = min(members, job.algorithm.available_of(members))
    return DeviceModel(job.clock, members, q, job.algorithm.steps)


@dataclass(frozen=True)
class KnownTime:
    """tau_n of a known distribution."""

    distribution: Distribution
    recorded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_mean(self.distribution)
        shortest = float(self.distribution.support()[0])
        if shortest < 0:
            raise ConfigError(f"server times cannot be negative, but this distribution begins at {shortest:g}; shift it with loc")

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Independent draws of tau_n."""
        return np.asarray(self.distribution.ppf(uniforms(seed, 1, copies, count)), dtype=np.float64)


@dataclass(frozen=True)
class RecordedTime:
    """tau_n of an event log. Each copy draws from its own resample (bootstrap), so that a short log has wide error bars."""

    distribution: Empirical
    recorded: ClassVar[bool] = True

    def sample(self, copies: int, count: int, seed: int) -> Floats:
        """Draws of tau_n, each copy from a resample of the log."""
        resamples = np.sort(self.distribution.ppf(uniforms(seed, 2, copies, self.distribution.values.size)), axis=1)
        place = (uniforms(seed, 1, copies, count) * self.distribution.values.size).astype(np.int64)
        return np.take_along_axis(resamples, place, axis=1)


# ---------------------------------------------------------------------------------------------------------------------- from a log
def recorded_times(record: Record, active: int | None = None) -> Floats:
    """tau_n of every finished phase of a log. With `active` below what was recorded: as if only that many had been waited for."""
    phases = [phase for phase in record.phases if phase.ended is not None and phase.complete]
    if not phases:
        raise RecordError(f"{record.path} has no finished phase: no server got all its uploads; record at least one round")
    if active is None:
        return np.array([phase.ended - phase.opened for phase in phases if phase.ended is not None])
    fewest = min(len(phase.complete) for phase in phases)
    if not 1 <= active <= fewest:
        raise ConfigError(
            f"q={active} cannot be read off {record.path}, whose phases saw {fewest} arrivals; use q <= {fewest}, or a delay model"
        )
    return np.array([max(visit.uploaded or 0.0 for visit in phase.complete[:active]) - phase.opened for phase in phases])


@dataclass(frozen=True)
class Fit:
    """A distribution fitted to recorded times by maximum likelihood, and its Kolmogorov-Smirnov distance to them: max |F - F_sample|."""

    name: str
    distribution: Distribution
    parameters: dict[str, float]
    distance: float


def fits(times: Floats) -> list[Fit]:
    """Exponential, Weibull, gamma and log-normal fits, the nearest first."""
    times = np.asarray(times, dtype=np.float64)
    if times.size < 2 or float(times.min()) == float(times.max()):
        raise RecordError(
            f"{times.size} recorded times without any spread cannot be fitted; record more rounds, or use the sample as it is"
        )
    if float(times.min()) <= 0:
        raise RecordError(f"a recorded time of {times.min():g} cannot be fitted by a distribution above 0; use the sample as it is")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search for a maximum may try impossible values
        found = [_exponential(times), _weibull(times), _gamma(times), _log_normal(times)]
    return sorted(found, key=lambda fit: fit.distance)


def _fit(name: str, distribution: Distribution, times: Floats, **parameters: float) -> Fit:
    return Fit(name, distribution, {k: float(v) for k, v in parameters.items()}, float(stats.kstest(times, distribution.cdf).statistic))


def _exponential(times: Floats) -> Fit:
    mean = float(times.mean())
    return _fit("exponential", stats.expon(scale=mean), times, mean=mean)


def _weibull(times: Floats) -> Fit:
    shape, _, scale = stats.weibull_min.fit(times, floc=0)
    return _fit("weibull", stats.weibull_min(shape, scale=scale), times, shape=shape, scale=scale)


def _gamma(times: Floats) -> Fit:
    shape, _, scale = stats.gamma.fit(times, floc=0)
    return _fit("gamma", stats.gamma(shape, scale=scale), times, shape=shape, scale=scale)


def _log_normal(times: Floats) -> Fit:
    logs = np.log(times)
    median, sigma = math.exp(float(logs.mean())), float(logs.std())
    return _fit("lognormal", stats.lognorm(sigma, scale=median), times, median=median, sigma=sigma)


def recorded(record: Record, active: int | None = None) -> RecordedTime:
    """The recorded times of a log as they are."""
    return RecordedTime(Empirical(recorded_times(record, active)))
