"""How long each device takes, and why: the laws of the clock at their addresses, and what makes
devices differ.
"""

from collections.abc import Sequence

import numpy as np

from fedbcd.algorithm import draws
from fedbcd.algorithm.method import Method
from fedbcd.errors import ConfigError
from fedbcd.own import calling, is_own
from fedbcd.protocol.messages import Pull, Train, TrainOffline
from fedbcd.schedule.delays import (
    CONTINUOUS,
    Bandwidth,
    Clock,
    Delay,
    Floats,
    Ints,
    Traces,
    Where,
)

NONE = -1  # of no class


class Times:
    """When devices ask and how long they work: tau_i = arrival + K_i * step, and all that the clock
    says beyond that.

    arrival  law * class * day(when the phase opened)
    work     K_i * law * class * speed * day(when it began) + class * (down + up)
    """

    def __init__(
        self,
        clock: Clock,
        seed: int,
        servers: Sequence[Sequence[int]],
        sent: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`servers`: the devices of each. `sent`: bytes that one receives and sends in an
        activation.
        """
        self.clock, self.seed, self.sent = clock, seed, sent
        self.alike = clock.is_alike
        if self.alike:
            return
        count = sum(map(len, servers))
        self.home = np.zeros(count, dtype=np.int64)
        for n, members in enumerate(servers):
            self.home[list(members)] = n
        self.kind = self._classes(len(servers))
        self._arrival, self._step, self._transfer = (
            np.array([*(getattr(each, name) for each in clock.classes), 1.0])[self.kind]
            for name in ("arrival", "step", "transfer")
        )
        self.speed = np.ones(count)
        if clock.speeds is not None:
            u = draws.unit(draws.address(seed, draws.SPEEDS, np.arange(count)))
            self.speed = drawn(clock.speeds, u, Where(np.arange(count), self.home, 0.0, sent))
            if not bool(np.isfinite(self.speed).all() and (self.speed > 0).all()):
                raise ConfigError(
                    f"clock.speeds gives a factor of {self.speed.min():g}; use a law of finite"
                    ' factors above 0, e.g. { name = "lognormal", median = 1, sigma = 0.5 }'
                )
        self._step = self._step * self.speed
        self._transfer = self._transfer * _seconds(clock.bandwidth, sent, count)
        for law in (clock.arrival, clock.step):
            _check_named(law, count, len(servers))

    def arrivals(self, devices: Ints, phase: Ints, now: float) -> Floats:
        """After the opening of their phases, at `now`."""
        u = draws.unit(draws.address(self.seed, draws.ARRIVAL, devices, phase))
        return self.arrivals_at(u, devices, now)

    def arrivals_at(self, u: Floats, devices: Ints, now: float | Floats) -> Floats:
        """Of these draws."""
        if self.alike:
            return drawn(self.clock.arrival, u)
        took = self._drawn(self.clock.arrival, u, devices, now) * self._arrival[devices]
        return np.asarray(took if self.clock.day is None else took * self.clock.day.at(now))

    def work(self, devices: Ints, activation: Ints, steps: Ints, now: float) -> Floats:
        """From the start of an activation, at `now`, to its upload; `steps`, or passes over the
        data, as they were drawn.
        """
        u = draws.unit(draws.address(self.seed, draws.PROCESS, devices, activation))
        return self.work_at(u, devices, steps, now)

    def work_at(self, u: Floats, devices: Ints, steps: Ints, now: float | Floats) -> Floats:
        """Of these draws."""
        took = self._training(u, devices, steps, now)
        return took if self.alike else np.asarray(took + self._transfer[devices])

    def _training(self, u: Floats, devices: Ints, steps: Ints, now: float | Floats) -> Floats:
        if self.alike:
            return np.asarray(steps * drawn(self.clock.step, u))
        took = steps * self._drawn(self.clock.step, u, devices, now) * self._step[devices]
        return np.asarray(took if self.clock.day is None else took * self.clock.day.at(now))

    def of(
        self, method: Method, device: int, work: Train | Pull | TrainOffline, now: float
    ) -> tuple[int, float]:
        """K_i of a piece of work that begins at `now`, and how long it takes. For an offline round
        nothing travels, and where it is free it takes no time.
        """
        if not isinstance(work, TrainOffline):
            length = method.length(self.seed, device, work.session, work.activation)
            return length.steps, self.work_one(device, work.activation, length.drawn, now)
        length = method.length(self.seed, device, work.session, None)
        if not method.takes_time_offline:
            return length.steps, 0.0
        one, number, count = (np.array([part]) for part in (device, work.session, length.drawn))
        u = draws.unit(draws.address(self.seed, draws.OFFLINE, one, number))
        return length.steps, float(self._training(u, one, count, now)[0])

    def rest_one(self, device: int, session: int, activation: int, now: float) -> float:
        """From `now` to the next of them: as long as an arrival."""
        one, *numbers = (np.array([part]) for part in (device, session, activation))
        u = draws.unit(draws.address(self.seed, draws.REST, one, *numbers))
        return float(self.arrivals_at(u, one, now)[0])

    def work_one(self, device: int, activation: int, steps: int, now: float) -> float:
        """`work` of one."""
        if self.alike:
            u = draws.unit_one(self.seed, draws.PROCESS, device, activation)
            return steps * float(drawn(self.clock.step, np.array([u]))[0])
        one, number, count = (np.array([part]) for part in (device, activation, steps))
        return float(self.work(one, number, count, now)[0])

    def lost_after(self, device: int, activation: int) -> float | None:
        """The part of its work after which a device is lost; None: it is not."""
        u = draws.unit_one(self.seed, draws.DROPOUT, device, activation)
        return u / self.clock.dropout if u < self.clock.dropout else None

    def _drawn(self, law: Delay, u: Floats, devices: Ints, now: float | Floats) -> Floats:
        return drawn(law, u, Where(devices, self.home[devices], now, self.sent))

    def _classes(self, servers: int) -> Ints:
        """The class of each device. Shares go to those that no class names, in order of a draw."""
        kind = np.full(len(self.home), NONE)
        for number, each in reversed([*enumerate(self.clock.classes)]):
            _check_numbers(each.devices, len(self.home), "device")
            _check_numbers(each.servers, servers, "server")
            named = np.isin(self.home, each.servers)
            named[list(each.devices)] = True
            kind[named] = number
        free = np.flatnonzero(kind == NONE)
        u = draws.unit(draws.address(self.seed, draws.CLASSES, free))
        ends = np.cumsum([each.share for each in self.clock.classes])
        ends = np.round(ends * len(free)).astype(np.int64)
        for each, count in zip(self.clock.classes, np.diff(ends, prepend=0), strict=True):
            if each.share and not count:
                raise ConfigError(
                    f"clock.classes: share={each.share:g} of the {len(free)} devices that no class"
                    " names is nobody; use a larger share, or name devices or servers"
                )
        rank = np.argsort(np.argsort(u, kind="stable"), kind="stable")
        chosen = np.searchsorted(ends, rank, side="right")
        kind[free] = np.where(chosen < len(ends), chosen, NONE)
        return kind

    # ---------------------------------------------------------------------------------------------
    # in words
    def why_slow(self, device: int) -> str:
        """What makes a device slower, or faster, than the law alone; empty: nothing does."""
        if self.alike:
            return ""
        found = []
        if self.kind[device] != NONE:
            each = self.clock.classes[self.kind[device]]
            parts = {name: getattr(each, name) for name in ("arrival", "step", "transfer")}
            says = ", ".join(f"{name} x {f:g}" for name, f in parts.items() if f != 1)
            found.append(f"its class ({says or 'like the rest'})")
        if self.clock.speeds is not None:
            found.append(f"its own speed (steps x {self.speed[device]:.3g})")
        rates = {name: getattr(self.clock.bandwidth, name, None) for name in ("down", "up")}
        says = ", ".join(
            f"{name} {rate[device] if isinstance(rate, tuple) else rate:g}"
            for name, rate in rates.items()
            if rate is not None
        )
        if says:
            found.append(f"its links ({says})")
        return " and ".join(found)


NOBODY = np.zeros(2, dtype=np.int64)
TRIED = Where(NOBODY, NOBODY, 0.0, (0.0, 0.0)), np.array([0.3, 0.7])


def drawn(law: Delay, u: Floats, where: Where = TRIED[0]) -> Floats:
    """F^-1(u) of a law, by whose delay it is where the law asks."""
    at = getattr(law, "at", None)
    if not is_own(type(law)):
        return law.quantile(u) if at is None else np.asarray(at(u, where), dtype=np.float64)
    remedy = "quantile(u) takes an array, at(u, where) also whose delay it is"
    with calling("the delay law {!r:.80} fails on {} numbers", law, len(u), remedy=remedy):
        took = np.asarray(law.quantile(u) if at is None else at(u, where), dtype=np.float64)
    if took.shape != u.shape or not bool(((took >= 0) & (took < np.inf)).all()):
        raise ConfigError(
            f"the delay law {law!r:.80} gives {took!r:.80} for u of shape {u.shape}; it must give a"
            " finite time, 0 or more, for each"
        )
    return took


def why_events(clock: Clock) -> str | None:
    """Why a schedule with this clock cannot be drawn ahead of its events; None: it can."""
    laws = (clock.arrival, clock.step)
    if clock.day is not None or any(hasattr(x, "at") and type(x) is not Traces for x in laws):
        return "delays depend on the time"
    if any(type(law) not in CONTINUOUS for law in laws):  # of others nobody knows
        return "delays that repeat make events fall together"
    return "devices are lost during activations" if clock.dropout else None


def _seconds(bandwidth: Bandwidth | None, sent: tuple[float, float], count: int) -> Floats:
    """What a model takes down and up, of each device."""
    took = np.zeros(count)
    for name, size in zip(("down", "up"), sent, strict=True):
        rate = getattr(bandwidth, name, None)
        if isinstance(rate, tuple) and len(rate) != count:
            raise ConfigError(
                f"clock.bandwidth.{name} has {len(rate)} rates for {count} devices; give one for"
                " each, or one number for all"
            )
        if rate is not None:
            took += size / np.asarray(rate)
    return took


def _check_numbers(named: Sequence[int], count: int, what: str) -> None:
    for number in named:
        if not 0 <= number < count:
            raise ConfigError(
                f"clock.classes names {what} {number}; there are {what}s 0 to {count - 1}"
            )


def _check_named(law: Delay, devices: int, servers: int) -> None:
    if isinstance(law, Traces):
        count = devices if law.by == "device" else servers
        if not any(0 <= number < count for number, _ in law.values):
            raise ConfigError(
                f"traces by {law.by} name none of the {count} {law.by}s, which are 0 to"
                f" {count - 1}; the first names {law.values[0][0]}"
            )
