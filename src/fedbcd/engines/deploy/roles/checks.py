"""What arrives is checked before it is used: who may say what, numbers in range, models of the
right size, finite, not too large.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedbcd.algorithm.method import Bound
from fedbcd.algorithm.projection import Projection, is_within, projected
from fedbcd.engines.deploy.roles.parts import parts
from fedbcd.errors import ConfigError, NumericalError, Refused
from fedbcd.protocol.messages import Actor

STORE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
ROUNDING = 2.0**-24  # of a float32, relative
REACH = 2.0**24


@dataclass(frozen=True)
class TrustLimits:
    """How far a peer may go."""

    norm: float | None = None  # of a model that arrives; None: any that is finite
    beyond_norm: Literal["warn", "refuse"] = "warn"
    reach: float = REACH  # see `check_reach`; infinite: no bound

    def __post_init__(self) -> None:
        if self.norm is not None and not 0 < self.norm < math.inf:
            raise ConfigError(
                f"norm={self.norm} must be a finite number above 0; leave it out for no bound"
            )
        if self.beyond_norm not in ("warn", "refuse"):
            raise ConfigError(f"beyond_norm={self.beyond_norm!r} must be 'warn' or 'refuse'")
        if not self.reach > 0:
            raise ConfigError(f"reach={self.reach} must be above 0; give inf for no bound")


def check_run(peer: Actor, hello: Mapping[str, Any], facts: Mapping[str, str]) -> None:
    """Whether a peer belongs to the same deployment: the same settings, members and initial
    model.
    """
    if hello.get("run") != facts["run"]:
        same = f"start it with the same file, where the algorithm is {facts['algorithm']}"
        raise Refused(
            "run", f"{peer} belongs to a deployment with other settings, members or model; {same}"
        )


def is_store_id(value: object) -> bool:
    """Whether what a peer says of itself is the name of a store."""
    return isinstance(value, str) and STORE_ID.fullmatch(value) is not None


def check_model(
    model: Tensor | None, size: int, dtype: torch.dtype, limits: TrustLimits
) -> str | None:
    """Refuse a model that cannot be used; returns a sentence about one that is merely large."""
    if model is None:
        raise Refused("model", f"the letter has no model; {size} values of {dtype} belong to it")
    if model.dtype != dtype or tuple(model.shape) != (size,):
        raise Refused(
            "shape",
            f"the model has shape {tuple(model.shape)} of {model.dtype}; it must be ({size},) of"
            f" {dtype}",
        )
    place = first_not_finite(model)
    if place is not None:
        raise Refused(
            "finite", f"value {place} of the model is {float(model[place])}; all must be finite"
        )
    return check_norm(model, limits)


def first_not_finite(model: Tensor) -> int | None:
    """The place of the first value that is not finite: with it, the sum is not either."""
    if math.isfinite(model.sum(dtype=torch.float64)):
        return None
    for part in parts(len(model)):
        wrong = ~torch.isfinite(model[part])
        if bool(wrong.any()):
            return int(part.start) + int(wrong.nonzero()[0])
    return None


def finite(tensor: Tensor, name: str, actor: Actor) -> Tensor:
    """What has been computed from others' models, to be saved. With what is taken it is finite; if
    it is not, nothing becomes durable.
    """
    place = first_not_finite(tensor)
    if place is not None:
        raise NumericalError(
            f"value {place} of {name}, which {actor} has computed, is {float(tensor[place])}; it is"
            " not kept"
        )
    return tensor


def norm_of(model: Tensor) -> float:
    """The Euclidean norm, in float64."""
    return float(torch.linalg.vector_norm(model, dtype=torch.float64))


def check_norm(model: Tensor, limits: TrustLimits) -> str | None:
    """Refuse a model whose norm is beyond the bound, or return a sentence about it."""
    if limits.norm is None:
        return None
    norm = norm_of(model)
    if norm <= limits.norm:
        return None
    sentence = f"the model has norm {norm:g}, above the bound {limits.norm:g}"
    if limits.beyond_norm == "refuse":
        raise Refused("norm", sentence)
    return sentence


def check_within(x_P: Tensor, projection: Projection, roundings: float = 2.0) -> None:
    """Refuse parameters that are not in X.

    A projected vector is rounded twice to float32 (the bound or factor, and the value); each
    rounding moves it by 2^-24 of its norm at most, so no coordinate, and no norm, by more. Who
    averages such vectors rounds more often, and says so.
    """
    allowance = roundings * ROUNDING * norm_of(x_P)
    if is_within(projection, x_P, allowance):
        return
    away = (x_P - projected(projection, x_P)).abs()
    place = int(away.argmax())
    raise Refused(
        "outside",
        f"value {place} of the model is {float(x_P[place]):g}, outside of the set X of this run,"
        f" {projection!r:.80}, by {float(away[place]):g}; what was trained with this X is"
        " within it",
    )


def check_reach(
    model: Tensor, z: Tensor, limits: TrustLimits, *, is_difference: bool = False
) -> None:
    """Refuse a model that is farther from z than `reach` times the larger of ||z|| and
    sqrt(values), entries of size 1; or a difference that is as long.

    With the default, 2^24, a float32 of the model has no digit left in which z could be seen.
    Honest training, which pulls x and z towards each other, does not come near it from starts and
    to targets up to ten million; and sums in float64 keep 28 bits of what the others contribute
    beside one that comes just within.
    """
    bound = limits.reach * max(norm_of(z), math.sqrt(len(z)))
    distance = math.hypot(
        *(
            norm_of(model[part].double() - (0.0 if is_difference else z[part]))
            for part in parts(len(model))
        )
    )
    if not distance <= bound:
        raise Refused(
            "far",
            f"the model is {distance:g} away from the model of its server, where deploy.reach_limit"
            f" = {limits.reach:g} allows {bound:g}; check the data and device_step of who sent it,"
            " or raise the limit",
        )


def check_sent(
    upload: Tensor, bound: Bound, model: Tensor, limits: TrustLimits, roundings: float = 2.0
) -> None:
    """Refuse what one device, or the mean of some, has sent to a server with this model: its
    vectors must be in X, if the plan has projected them, and within reach.
    """
    z, p = model[: bound.layout.size_F], bound.layout.size_P
    for sent in bound.method.sends:
        vector = bound.upload.views(upload)[sent.name]
        if sent.name in bound.in_set:
            check_within(vector[:p], bound.method.projection, roundings)
        is_difference = sent.difference or isinstance(sent.width, int)
        check_reach(vector, z, limits, is_difference=is_difference)


def check_weight(weight: float, weights: Sequence[float], everybody: bool) -> None:
    """Refuse a sum of weights that no choice of these devices gives: with `everybody` one at least
    counts, and all may.

    A running sum of weights is off by a rounding of float64 for each change; 1e-9 covers millions.
    """
    least, most = (min(weights) if everybody else 0.0), math.fsum(weights)
    if not least * (1 - 1e-9) <= weight <= most * (1 + 1e-9):
        raise Refused(
            "weight",
            f"the weights of the sum add up to {weight:g}; those of its server's devices give"
            f" {least:g} to {most:g}",
        )
