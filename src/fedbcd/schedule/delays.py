"""How long things take, and who is slow. Each distribution is a frozen value with a quantile
function, so that delays can be addressed draws; `schedule.times` draws them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedbcd.config import SUCH_AS, fit
from fedbcd.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Where:
    """Whose delay it is: for each number that is drawn, the device, its server, the time at which
    the delay begins (in plans, one for each), and how many bytes a model has on its way down and
    up.
    """

    device: Ints
    server: Ints
    time: float | Floats
    sent: tuple[float, float]


class Delay(Protocol):
    """A distribution of a non-negative time, by its quantile function F^-1. A law that knows whose
    delay it is has `at(u, where)`, with a `Where`, which is then asked instead.
    """

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
        fit(self, f"{self.name} ")
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
        fit(self, f"{self.name} ")
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
        fit(self, f"{self.name} ")
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
        fit(self, f"{self.name} ")
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
        fit(self, f"{self.name} ")
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
        fit(self, f"{self.name} ")
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"constant value={self.value} must be a finite number, 0 or more")

    def quantile(self, u: Floats) -> Floats:
        """The value."""
        return np.full_like(np.asarray(u, dtype=np.float64), self.value)


@dataclass(frozen=True)  # beside its field it has an array, since there may be many values
class Trace:
    """Drawn from recorded `values`, each equally likely."""

    values: tuple[float, ...] = field(metadata={SUCH_AS: "[1.5, 2.0]"})
    name: ClassVar[str] = "trace"

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        object.__setattr__(self, "values", tuple(sorted(map(float, self.values))))
        if not self.values:
            raise ConfigError("trace values=[] is empty; give at least one recorded time")
        bad = [value for value in self.values if not 0 <= value < math.inf]
        if bad:
            raise ConfigError(f"trace values must be finite and 0 or more, not {bad[0]}")
        object.__setattr__(self, "_times", np.array(self.values))

    def quantile(self, u: Floats) -> Floats:
        """The empirical quantile."""
        return _of_sample(self._times, u)  # type: ignore[attr-defined]


def _of_sample(times: Floats, u: Floats) -> Floats:
    return np.asarray(times[(np.asarray(u) * len(times)).astype(np.int64)])


@dataclass(frozen=True)  # likewise
class Traces:
    """Drawn from times recorded of each device, or of the devices of each server: `values` are
    pairs of its number and a time. Whom no pair names draws from all of them.
    """

    values: tuple[tuple[int, float], ...] = field(metadata={SUCH_AS: "[[0, 1.5], [1, 2.0]]"})
    by: Literal["device", "server"] = "device"
    name: ClassVar[str] = "traces"

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        every = Trace(tuple(time for _, time in self.values))  # refuses what are no times
        number, time = (np.array(column) for column in zip(*self.values, strict=True))
        order = np.lexsort((time, number))
        named, begin = np.unique(number[order], return_index=True)
        own = dict(zip(named.tolist(), np.split(time[order], begin[1:]), strict=True))
        object.__setattr__(self, "_every", every)
        object.__setattr__(self, "_own", own)

    def quantile(self, u: Floats) -> Floats:
        """Of all of them."""
        return self._every.quantile(u)  # type: ignore[attr-defined, no-any-return]

    def at(self, u: Floats, where: Where) -> Floats:
        """The empirical quantile of each one's own."""
        number = np.broadcast_to(where.device if self.by == "device" else where.server, u.shape)
        found = self.quantile(u)
        for one in np.unique(number):
            own = self._own.get(int(one))  # type: ignore[attr-defined]
            if own is not None:
                found[number == one] = _of_sample(own, u[number == one])
        return found


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that differ from the others: those named, all of the named servers, or a `share` of
    those that no class names. Their arrivals, steps and transfers take longer by these factors. Who
    is in several classes is in the first of them.
    """

    step: float = 1.0
    arrival: float = 1.0
    transfer: float = 1.0
    share: float = 0.0
    devices: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fit(self, "clock.classes.")
        for name in ("step", "arrival", "transfer"):
            _above_zero("clock.classes:", **{name: getattr(self, name)})
        if not 0 <= self.share <= 1:
            raise ConfigError(f"clock.classes: share={self.share} must be between 0 and 1")
        if (self.share > 0) + bool(self.devices) + bool(self.servers) != 1:
            raise ConfigError(
                "clock.classes: a class is a share above 0, devices, or servers, one of them; e.g."
                " { share = 0.2, step = 5 }"
            )


@dataclass(frozen=True, slots=True)
class Day:
    """Arrivals and steps take 1 + (night - 1) (1 - cos(2 pi t / period)) / 2 times as long where
    they begin at time t: once at its start, `night` times half a period later.
    """

    period: float
    night: float

    def __post_init__(self) -> None:
        fit(self, "clock.day.")
        _above_zero("clock.day", period=self.period, night=self.night)

    def at(self, time: float | Floats) -> float | Floats:
        """The factor."""
        cos = math.cos if isinstance(time, float) else np.cos
        return 1 + (self.night - 1) * (1 - cos(2 * math.pi * time / self.period)) / 2


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes that a device receives (`down`) and sends (`up`) in a unit of the clock: a number, or
    one per device. Without one, that way takes no time.
    """

    down: float | tuple[float, ...] | None = None
    up: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        fit(self, "clock.bandwidth.")
        for name in ("down", "up"):
            given = getattr(self, name)
            for rate in given if isinstance(given, Sequence) else [given]:
                if rate is not None:
                    _above_zero("clock.bandwidth", **{name: rate})


# of fields that descriptions name only where they are set: records are older than them
BRIEF: dict[str, Any] = {"brief": True}


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock model of the experiments: when a device asks, and how long one of its steps takes.

    tau_i = arrival + K_i * step (one draw, times K_i); a server takes its q earliest arrivals;
    tau_n is the largest tau_i of those. The paper's devices are alike; beyond that:

    classes    devices that are slower, or faster
    speeds     a law of a factor, drawn once for each device, by which its steps take longer
    day        a factor that depends on the time
    bandwidth  what models take to travel, which is added to the work
    dropout    the probability that a device is lost during an activation, which comes to nothing
    """

    arrival: Delay = field(default_factory=lambda: Exponential(2.0))
    step: Delay = field(default_factory=lambda: Exponential(1.0))
    classes: tuple[DeviceClass, ...] = field(
        default=(), metadata=BRIEF | {SUCH_AS: "[{ share = 0.2, step = 5 }]"}
    )
    speeds: Delay | None = field(default=None, metadata=BRIEF)
    day: Day | None = field(default=None, metadata=BRIEF | {SUCH_AS: "{ period = 24, night = 3 }"})
    bandwidth: Bandwidth | None = field(
        default=None, metadata=BRIEF | {SUCH_AS: "{ down = 1e6, up = 2e5 }"}
    )
    dropout: float = field(default=0.0, metadata=BRIEF)

    def __post_init__(self) -> None:
        needs = "quantile(u) or at(u, where)"
        fit(self, "clock.", arrival=needs, step=needs, speeds=needs)
        shares = sum(each.share for each in self.classes)
        if shares > 1:
            raise ConfigError(
                f"clock.classes: the shares sum to {shares:g}; make them 1 or less together"
            )
        for factor in (each.transfer for each in self.classes if each.transfer != 1):
            if self.bandwidth is None:
                raise ConfigError(
                    f"clock.classes: transfer={factor:g} is a factor of clock.bandwidth, and there"
                    " is none; add bandwidth = { down = 1e6, up = 2e5 }, or leave transfer out"
                )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"clock.dropout={self.dropout} must be 0 or more and below 1, the probability that"
                " a device is lost in an activation"
            )

    @property
    def is_alike(self) -> bool:
        """Whether all devices have the same law at all times, which is the paper's model."""
        plain = Clock(self.arrival, self.step)
        return self == plain and not any(hasattr(law, "at") for law in (self.arrival, self.step))


CONTINUOUS = (Exponential, Weibull, LogNormal, Gamma, Uniform)  # no two delays are the same
KINDS = (*CONTINUOUS, Constant, Trace, Traces)
DELAYS: dict[str, type[Delay]] = {kind.name: kind for kind in KINDS}


def _above_zero(name: str, **values: float) -> None:
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} {key}={value} must be a finite number above 0")
