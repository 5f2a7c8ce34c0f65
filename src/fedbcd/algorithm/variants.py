"""The four algorithms, each a frozen value with its settings: FedBCD, FedBCD-I, and the baselines
FedAvg and FedProx.

An algorithm says what a device does when activated (`device_round`), what FedBCD-I does offline
(`offline_round`), and whose models the cloud averages with which weight. The cloud step itself is
`cloud.server_step` for all four: FedAvg's and FedProx's average is the step of length 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedbcd.algorithm.device import Contact, Rows, Work, aspg, penalty_steps
from fedbcd.algorithm.projection import PROJECTIONS, NoProjection, Projection
from fedbcd.config import NESTED
from fedbcd.errors import ConfigError
from fedbcd.recorded import Said

Batch = int | Literal["all"]
Form = Literal["relative", "absolute"]


@dataclass(frozen=True, kw_only=True)
class _DeviceSettings(Said):
    """Settings that all four share."""

    device_step: float = 0.005  # eta_x
    batch: Batch = 32  # R; "all" takes exact gradients (Theorem 1(ii))
    steps: tuple[int, int] = (1, 5)  # K_i is uniform on low..high
    projection: Projection = field(default_factory=NoProjection)  # P_X

    def __post_init__(self) -> None:
        _freeze_penalty(self)
        _positive("device_step", self.device_step)
        low, high = self.steps
        if not 1 <= low <= high:
            raise ConfigError(
                f"steps={list(self.steps)} must be [low, high] with 1 <= low <= high, e.g. [1, 5]"
            )
        if not callable(getattr(self.projection, "project", None)):
            raise ConfigError(
                f"projection={self.projection!r} must be a set to project onto, such as fb.Box(-2,"
                " 2) or fb.NoProjection()"
            )
        if self.batch != "all" and not (isinstance(self.batch, int) and self.batch >= 1):
            raise ConfigError(f"batch={self.batch} must be 1 or more, or 'all' for exact gradients")

    @property
    def contact_limit(self) -> int | None:
        """Offline rounds in a row without contact; None: devices never train offline."""
        return None

    def available_of(self, members: int) -> int:
        """How many of a server's members can train in a round."""
        return members

    def offline_round(self, rows: Rows, work: Work) -> Rows:
        """What devices do between activations."""
        raise NotImplementedError(f"devices of {type(self).__name__} do not train offline")


@dataclass(frozen=True, kw_only=True)
class FedBCD(_DeviceSettings):
    """Algorithm 1: devices take ASPG steps on g_i(x) + gamma_i/2 ||x - z_n||^2; momentum crosses
    activations.
    """

    name: ClassVar[str] = "fedbcd"
    offline: ClassVar[bool] = False
    personal: ClassVar[bool] = True  # devices keep models of their own
    counts: ClassVar[Literal["members", "active"]] = (
        "members"  # who is in m: all of Q_n, the inactive by their last copy
    )

    penalty: float | Sequence[float] = 1.0  # gamma_i, one for all or one per device
    momentum: float = 0.9  # zeta
    server_step: float = 0.5  # eta_z
    server_step_form: Form = "relative"
    cloud_iterations: int = 1  # K_z

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_personal(
            self.penalty,
            self.momentum,
            self.server_step,
            self.server_step_form,
            self.cloud_iterations,
        )

    def device_round(self, rows: Rows, work: Work) -> Rows:
        """Algorithm 1, lines 5-11."""
        return aspg(rows, work, self.device_step, self.momentum, self.projection)


@dataclass(frozen=True, kw_only=True)
class FedBCDI(_DeviceSettings):
    """Algorithm 2: devices train offline on g_i alone; an activation takes penalty steps towards
    z_n.
    """

    name: ClassVar[str] = "fedbcd-i"
    offline: ClassVar[bool] = True
    personal: ClassVar[bool] = True
    counts: ClassVar[Literal["members", "active"]] = "active"  # who is in m: Q_n(t)

    penalty: float | Sequence[float] = 0.2
    momentum: float = 0.9
    server_step: float = 0.5
    server_step_form: Form = "relative"
    cloud_iterations: int = 1
    available: int | None = None  # |Q~_n(t)|; by default 0.8 of a server's members, as in the paper
    offline_limit: int = 4  # offline rounds in a row without contact
    momentum_after_contact: Contact = (
        "kept"  # x - x_prev after penalty steps: as before, "pull": the last step, "restart": none
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_personal(
            self.penalty,
            self.momentum,
            self.server_step,
            self.server_step_form,
            self.cloud_iterations,
        )
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

    @property
    def contact_limit(self) -> int:
        """Offline rounds in a row without contact."""
        return self.offline_limit

    def available_of(self, members: int) -> int:
        """How many of a server's members can train in a round."""
        return min(members, self.available or max(1, round(0.8 * members)))

    def offline_round(self, rows: Rows, work: Work) -> Rows:
        """Algorithm 2, lines 5-11: ASPG without the penalty."""
        return aspg(
            rows, work._replace(anchor_NP=None), self.device_step, self.momentum, self.projection
        )

    def device_round(self, rows: Rows, work: Work) -> Rows:
        """Algorithm 2, lines 14-18."""
        return penalty_steps(rows, work, self.projection, self.momentum_after_contact)


@dataclass(frozen=True, kw_only=True)
class FedProx(_DeviceSettings):
    """FedProx with ASPG on the devices: start from z with no momentum, stay near it by a penalty,
    average the models.
    """

    name: ClassVar[str] = "fedprox"
    offline: ClassVar[bool] = False
    personal: ClassVar[bool] = False  # every device holds z
    counts: ClassVar[Literal["members", "active"]] = "active"
    server_step: ClassVar[float] = 1.0
    server_step_form: ClassVar[Form] = "relative"
    cloud_iterations: ClassVar[int] = 1

    penalty: float | Sequence[float] = 5.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_penalty(self.penalty)
        _check_momentum(self.momentum)

    def device_round(self, rows: Rows, work: Work) -> Rows:
        """K_i ASPG steps from x = x_prev = z."""
        return aspg(rows, work, self.device_step, self.momentum, self.projection)


@dataclass(frozen=True, kw_only=True)
class FedAvg(_DeviceSettings):
    """FedAvg: start from z, plain stochastic gradient steps, average the models."""

    name: ClassVar[str] = "fedavg"
    offline: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    counts: ClassVar[Literal["members", "active"]] = "active"
    server_step: ClassVar[float] = 1.0
    server_step_form: ClassVar[Form] = "relative"
    cloud_iterations: ClassVar[int] = 1
    penalty: ClassVar[float] = 0.0
    momentum: ClassVar[float] = 0.0

    def device_round(self, rows: Rows, work: Work) -> Rows:
        """K_i plain steps from z."""
        return aspg(rows, work._replace(anchor_NP=None), self.device_step, 0.0, self.projection)


Algorithm = FedBCD | FedBCDI | FedProx | FedAvg
ALGORITHMS: dict[str, type[FedBCD] | type[FedBCDI] | type[FedProx] | type[FedAvg]] = {
    kind.name: kind for kind in (FedBCD, FedBCDI, FedProx, FedAvg)
}
NESTED["projection"] = PROJECTIONS


def penalties(algorithm: Algorithm, devices: int) -> Tensor:
    """gamma_i of every device, float64."""
    if isinstance(algorithm.penalty, Sequence):
        if len(algorithm.penalty) != devices:
            raise ConfigError(
                f"penalty has {len(algorithm.penalty)} values for {devices} devices; give one for"
                " all or one each"
            )
        return torch.tensor(algorithm.penalty, dtype=torch.float64)
    return torch.full((devices,), float(algorithm.penalty), dtype=torch.float64)


def cloud_weights(algorithm: Algorithm, sizes: Sequence[int]) -> Tensor:
    """The weight of each device in m, float64: gamma_i for FedBCD and FedBCD-I, the data size for
    FedAvg and FedProx.
    """
    return (
        penalties(algorithm, len(sizes))
        if algorithm.personal
        else torch.tensor(sizes, dtype=torch.float64)
    )


def _freeze_penalty(algorithm: Any) -> None:
    """One penalty per device may come as a list, an array or a tensor; it is kept as a tuple."""
    values = algorithm.penalty
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list):
        object.__setattr__(algorithm, "penalty", tuple(float(v) for v in values))


def _check_personal(
    penalty: float | Sequence[float], momentum: float, step: float, form: str, iterations: int
) -> None:
    _check_penalty(penalty)
    _check_momentum(momentum)
    _positive("server_step", step)
    if form not in ("relative", "absolute"):
        raise ConfigError(f"server_step_form={form!r} must be 'relative' or 'absolute'")
    if form == "relative" and step > 1:
        raise ConfigError(
            f"server_step={step:g} in relative form must be at most 1, where z becomes the devices'"
            " mean"
        )
    if iterations < 1:
        raise ConfigError(f"cloud_iterations={iterations} must be 1 or more")


def _check_penalty(penalty: float | Sequence[float]) -> None:
    for value in penalty if isinstance(penalty, Sequence) else (penalty,):
        _positive("penalty", value)


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum={momentum} must be at least 0 and below 1")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value} must be a finite number above 0")
