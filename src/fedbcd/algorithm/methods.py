"""The methods of the paper, each a frozen value with its settings: FedBCD, FedBCD-I, and the
baselines FedAvg and FedProx; and two baselines more, FedAvg with fine-tuning and local training.

Settings are what people write. `method` makes of them what is computed (`algorithm.method`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from fedbcd.algorithm.device import Contact
from fedbcd.algorithm.method import (
    Absolute,
    Batch,
    Facts,
    Keep,
    Method,
    OfflineTime,
    Relative,
    ServerStep,
    Settings,
    Slot,
    check_range,
)
from fedbcd.algorithm.optimizers import OPTIMIZERS, SCHEDULES, Optimizer, StepSchedule
from fedbcd.algorithm.plan import Plan, Pull, Set, Steps, Toward
from fedbcd.algorithm.projection import PROJECTIONS, NoProjection, Projection
from fedbcd.config import NESTED, fit
from fedbcd.errors import ConfigError
from fedbcd.recorded import Said

Form = Literal["relative", "absolute"]
X = (Slot("x", restored="x"), Slot("x_prev", "parameters", restored="x"))
FROM_Z = Set("x", ((1.0, "z"),))
STEPS = (1, 5)  # where nothing is said
FACTOR, DIRECTION = "factor(session)", "direction(k, gradient, state)"
Range = tuple[int, int] | int  # from the lowest to the highest; a number is both


@dataclass(frozen=True, kw_only=True)
class _DeviceSettings(Said):
    """Settings that all four share."""

    device_step: float = 0.005  # eta_x
    batch: Batch = 32  # R; "all" takes exact gradients (Theorem 1(ii))
    # K_i is uniform on low..high; (1, 5) where there are no epochs
    steps: Range | None = None
    # in place of steps: the number of passes over the device's data, ceil(n / R) steps each
    epochs: Range | None = None
    projection: Projection = field(default_factory=NoProjection)  # P_X
    weight_decay: float = 0.0  # adds weight_decay/2 ||x||^2 to g_i
    # what device_step is multiplied by in a device's session 0, 1, ...
    schedule: StepSchedule | None = None

    def __post_init__(self) -> None:
        fit(self, projection="project(x)", schedule=FACTOR, optimizer=DIRECTION)
        for name in ("steps", "epochs", "pull_steps"):
            if isinstance(number := getattr(self, name, None), int):
                object.__setattr__(self, name, (number, number))
        self._check_length()
        _positive("device_step", self.device_step)
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} must be a finite number from 0 on")
        self._check()
        self.method(Facts(0, ()))

    def _check_length(self) -> None:
        assert not isinstance(self.steps, int)
        assert not isinstance(self.epochs, int)
        check_range("epochs", self.epochs)
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", STEPS)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"steps={list(self.steps)} and epochs={list(self.epochs)} both say how long local"
                " work is; keep one of them"
            )

    def _check(self) -> None:
        """Bounds of one's own settings."""

    def method(self, facts: Facts) -> Method:
        """What is computed with these settings."""
        raise NotImplementedError

    def _made(self, facts: Facts, plan: Plan, **more: Any) -> Method:
        batch = self.batch
        passes: tuple[int, ...] = ()
        if self.epochs is not None and batch != "all":
            passes = tuple(math.ceil(size / batch) for size in facts.sizes)
        given: dict[str, Any] = {
            "steps": self.epochs or self.steps,
            "passes": passes,
            "batch": self.batch,
            "projection": self.projection,
        }
        return Method(name=self.name, plan=plan, **given, **more)

    def _steps(self, **more: Any) -> Steps:
        given: dict[str, Any] = {"decay": self.weight_decay, "schedule": self.schedule}
        return Steps(self.device_step, projection=self.projection, **given, **more)


@dataclass(frozen=True, kw_only=True)
class _FreeSettings(_DeviceSettings):
    """Settings of methods whose devices may step as they like."""

    optimizer: Optimizer | None = None  # of device steps, begun anew in each session; None: ASPG

    def _momentum(self, momentum: float) -> dict[str, Any]:
        """ASPG's, or the optimizer's own."""
        if self.optimizer is not None:
            return {"optimizer": self.optimizer}
        return {"prev": "x_prev", "momentum": momentum}


@dataclass(frozen=True, kw_only=True)
class _PersonalSettings(_DeviceSettings):
    """Settings that FedBCD and FedBCD-I share."""

    penalty: float | Sequence[float] = 1.0  # gamma_i, one for all or one per device
    momentum: float = 0.9  # zeta
    server_step: float = 0.5  # eta_z
    server_step_form: Form = "relative"
    cloud_iterations: int = 1  # K_z

    def _check(self) -> None:
        _check_penalty(self.penalty)
        _check_momentum(self.momentum)
        _positive("server_step", self.server_step)
        if self.server_step_form == "relative" and self.server_step > 1:
            raise ConfigError(
                f"server_step={self.server_step:g} in relative form must be at most 1, where"
                " z becomes the devices' mean"
            )
        if self.cloud_iterations < 1:
            raise ConfigError(f"cloud_iterations={self.cloud_iterations} must be 1 or more")

    def _made(self, facts: Facts, plan: Plan, **more: Any) -> Method:
        """With personal models that are weighted by gamma_i."""
        form = Relative if self.server_step_form == "relative" else Absolute
        step: ServerStep = form(self.server_step)
        given = {"penalty": self.penalty, "cloud_iterations": self.cloud_iterations, "step": step}
        return super()._made(facts, plan, slots=X, weight="penalty", **given, **more)


@dataclass(frozen=True, kw_only=True)
class FedBCD(_PersonalSettings):
    """Algorithm 1: devices take ASPG steps on g_i(x) + gamma_i/2 ||x - z_n||^2; momentum crosses
    activations.
    """

    name: ClassVar[str] = "fedbcd"

    def method(self, facts: Facts) -> Method:
        """Algorithm 1, lines 5-11; the inactive members count by their last copies."""
        steps = self._steps(prev="x_prev", momentum=self.momentum, pulls=(Toward(),))
        return self._made(facts, (steps,), counts="members")


@dataclass(frozen=True, kw_only=True)
class FedBCDI(_PersonalSettings):
    """Algorithm 2: devices train offline on g_i alone; an activation takes penalty steps towards
    z_n.
    """

    name: ClassVar[str] = "fedbcd-i"

    penalty: float | Sequence[float] = 0.2
    available: int | None = None  # |Q~_n(t)|; by default 0.8 of a server's members, as in the paper
    offline_limit: int = 4  # offline rounds in a row without contact
    # offline rounds take the time of their steps, or none and fall on the coordinator's rounds
    offline_time: OfflineTime = "timed"
    # penalty steps of an activation; None: as many as steps or epochs in the latest session
    pull_steps: Range | None = None
    momentum_after_contact: Contact = (
        "kept"  # x - x_prev after penalty steps: as before, "pull": the last step, "restart": none
    )

    def _check(self) -> None:
        super()._check()
        if self.available is not None and self.available < 1:
            raise ConfigError(
                f"available={self.available} must be 1 or more; leave it out for 0.8 of the members"
            )
        if self.offline_limit < 1:
            raise ConfigError(
                f"offline_limit={self.offline_limit} must be 1 or more; use FedBCD for devices that"
                " never train offline"
            )
        if self.momentum_after_contact not in get_args(Contact):
            known = ", ".join(map(repr, get_args(Contact)))
            raise ConfigError(
                f"momentum_after_contact={self.momentum_after_contact!r} is unknown; known: {known}"
            )

    def method(self, facts: Facts) -> Method:
        """Algorithm 2: lines 5-11 offline, without the penalty, and lines 14-18 in contact."""
        offline = self._steps(prev="x_prev", momentum=self.momentum)
        contact = self.momentum_after_contact
        pull = Pull(prev="x_prev", projection=self.projection, contact=contact)
        return self._made(
            facts,
            (pull,),
            offline=(offline,),
            offline_limit=self.offline_limit,
            offline_time=self.offline_time,
            pull_steps=self.pull_steps,
            available=self.available or 0.8,
        )


@dataclass(frozen=True, kw_only=True)
class _SharedSettings(_FreeSettings):
    """Settings that FedAvg and FedProx share: one model for all devices of a server."""

    weight: Literal["size", "one"] = "size"  # of a device in the average: its samples, or equal

    def _check(self) -> None:
        if self.weight not in ("size", "one"):
            raise ConfigError(f"weight={self.weight!r} must be 'size' or 'one'")

    def _made(self, facts: Facts, plan: Plan, **more: Any) -> Method:
        """Servers average their devices before they mix, or the mix would have no effect."""
        given = {"slots": (), "weight": self.weight, "personal": "z", "order": "step, mix"}
        return super()._made(facts, plan, **given, **more)


@dataclass(frozen=True, kw_only=True)
class FedProx(_SharedSettings):
    """FedProx with ASPG on the devices: start from z with no momentum, stay near it by a penalty,
    average the models.
    """

    name: ClassVar[str] = "fedprox"

    penalty: float | Sequence[float] = 5.0
    momentum: float = 0.9

    def _check(self) -> None:
        super()._check()
        _check_penalty(self.penalty)
        _check_momentum(self.momentum)

    def method(self, facts: Facts) -> Method:
        """K_i ASPG steps from x = x_prev = z, or those of an optimizer from z."""
        steps = self._steps(pulls=(Toward(),), **self._momentum(self.momentum))
        begin = (FROM_Z, Set("x_prev", ((1.0, "z"),)))
        return self._made(facts, (*begin[: 1 + bool(steps.prev)], steps), penalty=self.penalty)


@dataclass(frozen=True, kw_only=True)
class FedAvg(_SharedSettings):
    """FedAvg: start from z, plain stochastic gradient steps, average the models."""

    name: ClassVar[str] = "fedavg"

    def method(self, facts: Facts) -> Method:
        """K_i plain steps from z."""
        return self._made(facts, (FROM_Z, self._steps(optimizer=self.optimizer)))


@dataclass(frozen=True, kw_only=True)
class FineTuned(FedAvg):
    """FedAvg whose devices, before they are tested or export a model, go on from z by themselves:
    the baseline that every method for personal models has to beat.
    """

    name: ClassVar[str] = "fedavg-ft"

    tuning_steps: int = 20  # mini-batch steps from z
    tuning_step: float | None = None  # their eta_x; by default as in training

    def _check(self) -> None:
        super()._check()
        if self.tuning_steps < 1:
            raise ConfigError(
                f"tuning_steps={self.tuning_steps} must be 1 or more; FedAvg does without"
            )
        if self.tuning_step is not None:
            _positive("tuning_step", self.tuning_step)

    def method(self, facts: Facts) -> Method:
        """FedAvg; and plain steps from z on a copy."""
        step = self.tuning_step or self.device_step
        tuned = replace(
            self._steps(optimizer=self.optimizer),
            step=step,
            times=self.tuning_steps,
            schedule=None,
        )
        return replace(super().method(facts), at_evaluation=(FROM_Z, tuned), personal="x")


@dataclass(frozen=True, kw_only=True)
class Local(_FreeSettings):
    """Nobody learns from anybody: devices train alone, by ASPG, when it is their turn."""

    name: ClassVar[str] = "local"

    momentum: float = 0.9

    def _check(self) -> None:
        _check_momentum(self.momentum)

    def method(self, facts: Facts) -> Method:
        """K_i ASPG steps on g_i; nothing is sent, and z stays x(0)."""
        plan = (self._steps(**self._momentum(self.momentum)),)
        kept = tuple(replace(slot, restored="") for slot in X[: 1 + bool(plan[0].prev)])
        return self._made(facts, plan, slots=kept, sends=(), step=Keep())


Algorithm = FedBCD | FedBCDI | FedProx | FedAvg | Local | Settings
ALGORITHMS: dict[str, type[_DeviceSettings]] = {
    kind.name: kind for kind in (FedBCD, FedBCDI, FedProx, FedAvg, FineTuned, Local)
}
NESTED |= {"projection": PROJECTIONS, "schedule": SCHEDULES, "optimizer": OPTIMIZERS}


def _check_penalty(penalty: float | Sequence[float]) -> None:
    for value in penalty if isinstance(penalty, Sequence) else (penalty,):
        _positive("penalty", value)


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum={momentum} must be at least 0 and below 1")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value} must be a finite number above 0")
