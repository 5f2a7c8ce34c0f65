"""How a gradient becomes a step, where it is no step of ASPG, and steps that change from session to
session. What an optimizer keeps is transient: it begins anew in each session, since a method that
starts from z has no use for what was gathered on the way of another model.

Shapes: N devices, P parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fedbcd.config import fit
from fedbcd.errors import ConfigError

State = Mapping[str, Tensor]  # a stack (N, P) each


class Optimizer(Protocol):
    """Moves are x <- P_X(x - eta_x direction)."""

    name: ClassVar[str]

    def begin(self, x_NP: Tensor) -> State:
        """What it keeps, before the first step of a session."""
        ...

    def direction(self, k: int, gradient_NP: Tensor, state: State) -> tuple[Tensor, State]:
        """Of step k = 0, 1, ..., and what it keeps afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SGD:
    """v <- momentum v + gradient, x <- x - eta_x v; as torch.optim.SGD."""

    momentum: float = 0.0
    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        fit(self, "SGD: ")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"SGD: momentum={self.momentum} must be at least 0 and below 1")

    def begin(self, x_NP: Tensor) -> State:
        """v = 0."""
        return {"v": x_NP.new_zeros(x_NP.shape)} if self.momentum else {}

    def direction(self, k: int, gradient_NP: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG002
        """v."""
        if not self.momentum:
            return gradient_NP, state
        v = self.momentum * state["v"] + gradient_NP
        return v, {"v": v}


@dataclass(frozen=True, slots=True)
class Adam:
    """Kingma and Ba (2015), as torch.optim.Adam: means of gradients and of their squares, each
    corrected for their start at 0.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        fit(self, "Adam: ")
        for what in ("beta1", "beta2"):
            if not 0 <= (beta := getattr(self, what)) < 1:
                raise ConfigError(f"Adam: {what}={beta} must be at least 0 and below 1")
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"Adam: epsilon={self.epsilon} must be a finite number above 0")

    def begin(self, x_NP: Tensor) -> State:
        """Both means are 0."""
        return {"mean": x_NP.new_zeros(x_NP.shape), "square": x_NP.new_zeros(x_NP.shape)}

    def direction(self, k: int, gradient_NP: Tensor, state: State) -> tuple[Tensor, State]:
        """The mean over the root of the mean square."""
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * gradient_NP
        square = self.beta2 * state["square"] + (1 - self.beta2) * gradient_NP.square()
        root = (square / (1 - self.beta2 ** (k + 1))).sqrt() + self.epsilon
        return mean / (1 - self.beta1 ** (k + 1)) / root, {"mean": mean, "square": square}


class StepSchedule(Protocol):
    """What eta_x is multiplied by in a device's session 0, 1, ...: the same for all its steps."""

    name: ClassVar[str]

    def factor(self, session: int) -> float:
        """Of this session."""
        ...


@dataclass(frozen=True, slots=True)
class Stairs:
    """`times` as long after every so many sessions of the device."""

    every: int
    times: float = 0.5
    name: ClassVar[str] = "stairs"

    def __post_init__(self) -> None:
        fit(self, "Stairs: ")
        if self.every < 1 or not 0 < self.times < math.inf:
            raise ConfigError(f"{self}: every must be 1 or more sessions, and times above 0")

    def factor(self, session: int) -> float:
        """times^(session // every)."""
        return float(self.times ** (session // self.every))


@dataclass(frozen=True, slots=True)
class Cosine:
    """From 1 down to `low` over so many sessions of the device, by half a cosine; then `low`."""

    over: int
    low: float = 0.0
    name: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        fit(self, "Cosine: ")
        if self.over < 1 or not 0 <= self.low <= 1:
            raise ConfigError(f"{self}: over must be 1 or more sessions, and low between 0 and 1")

    def factor(self, session: int) -> float:
        """low + (1 - low) (1 + cos(pi session / over)) / 2."""
        done = min(1.0, session / self.over)
        return self.low + (1 - self.low) * (1 + math.cos(math.pi * done)) / 2


PLAIN = SGD()
OPTIMIZERS: dict[str, type[Any]] = {kind.name: kind for kind in (SGD, Adam)}
SCHEDULES: dict[str, type[Any]] = {kind.name: kind for kind in (Stairs, Cosine)}
