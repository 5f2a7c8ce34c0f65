"""How long things take. Each distribution is a frozen value with a quantile function, so that
delays can be addressed draws.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedbcd.errors import ConfigError

Floats = npt.NDArray[np.float64]


class Delay(Protocol):
    """A distribution of a non-negative time, by its quantile function F^-1."""

    name: ClassVar[str]

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u), elementwise, for u strictly between 0 and 1."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """F^-1(u) = -mean ln(1 - u)."""

    mean: float
    name: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        _above_zero(self.name, mean=self.mean)

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u)."""
        return np.asarray(-self.mean * np.log1p(-u))


@dataclass(frozen=True, slots=True)
class Weibull:
    """F^-1(u) = scale (-ln(1 - u))^(1/shape)."""

    shape: float
    scale: float = 1.0
    name: ClassVar[str] = "weibull"

    def __post_init__(self) -> None:
        _above_zero(self.name, shape=self.shape, scale=self.scale)

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u)."""
        return np.asarray(self.scale * (-np.log1p(-u)) ** (1.0 / self.shape))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """F^-1(u) = median exp(sigma Phi^-1(u))."""

    median: float
    sigma: float
    name: ClassVar[str] = "lognormal"

    def __post_init__(self) -> None:
        _above_zero(self.name, median=self.median, sigma=self.sigma)

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u)."""
        normal: Floats = torch.special.ndtri(
            torch.from_numpy(np.asarray(u, dtype=np.float64))
        ).numpy()
        return np.asarray(self.median * np.exp(self.sigma * normal))


@dataclass(frozen=True, slots=True)
class Gamma:
    """F^-1(u) = scale x, where x solves P(shape, x) = u; P is the regularised incomplete gamma
    function.
    """

    shape: float
    scale: float = 1.0
    name: ClassVar[str] = "gamma"

    def __post_init__(self) -> None:
        _above_zero(self.name, shape=self.shape, scale=self.scale)

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u)."""
        from scipy.special import gammaincinv  # takes a third of a second to load

        return np.asarray(self.scale * gammaincinv(self.shape, u))


@dataclass(frozen=True, slots=True)
class Uniform:
    """F^-1(u) = low + u (high - low)."""

    low: float
    high: float
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high < math.inf:
            raise ConfigError(
                f"uniform low={self.low}, high={self.high} must satisfy 0 <= low < high"
            )

    def quantile(self, u: Floats) -> Floats:
        """F^-1(u)."""
        return np.asarray(self.low + u * (self.high - self.low))


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `value`."""

    value: float
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"constant value={self.value} must be a finite number, 0 or more")

    def quantile(self, u: Floats) -> Floats:
        """The value."""
        return np.full_like(np.asarray(u, dtype=np.float64), self.value)


@dataclass(frozen=True, slots=True)
class Trace:
    """Drawn from recorded `values`, each equally likely."""

    values: tuple[float, ...]
    name: ClassVar[str] = "trace"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(float(v) for v in self.values)))
        if not self.values:
            raise ConfigError("trace values=[] is empty; give at least one recorded time")
        bad = [value for value in self.values if not 0 <= value < math.inf]
        if bad:
            raise ConfigError(f"trace values must be finite and 0 or more, not {bad[0]}")

    def quantile(self, u: Floats) -> Floats:
        """The empirical quantile."""
        values = np.asarray(self.values)
        return np.asarray(values[(np.asarray(u) * len(values)).astype(np.int64)])


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock model of the experiments: when a device asks, and how long one of its steps takes.

    tau_i = arrival + K_i * step (one draw, times K_i); a server takes its q earliest arrivals;
    tau_n is the largest tau_i of those.
    """

    arrival: Delay = field(default_factory=lambda: Exponential(2.0))
    step: Delay = field(default_factory=lambda: Exponential(1.0))


DELAYS: dict[str, type[Delay]] = {
    kind.name: kind for kind in (Exponential, Weibull, LogNormal, Gamma, Uniform, Constant, Trace)
}


def quantile_at(delay: Delay, u: float) -> float:
    """F^-1 at one u."""
    return float(delay.quantile(np.array([u]))[0])


def _above_zero(name: str, **values: float) -> None:
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} {key}={value} must be a finite number above 0")
