"""Projections P_X onto convex sets (Assumption 2(i)). Each acts on the last axis of a stack of
parameter vectors.

A projection is a frozen value with `project(x)` and `contains(x)`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbcd.config import SUCH_AS, fit
from fedbcd.errors import ConfigError
from fedbcd.own import calling


@runtime_checkable
class Projection(Protocol):
    """A closed convex set X, known by its nearest-point map."""

    name: ClassVar[str]

    def project(self, x: Tensor) -> Tensor:
        """The point of X nearest to each row of x."""
        ...

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:
        """Whether every row of x lies in X, up to `tolerance`."""
        ...


def is_within(projection: Projection, x: Tensor, tolerance: float) -> bool:
    """Whether x lies in X. A set of somebody's own that cannot say is asked for the nearest point,
    which may be as far away as it takes to be `tolerance` off in each coordinate.
    """
    if hasattr(projection, "contains"):
        return projection.contains(x, tolerance)
    return bool(((projected(projection, x) - x).abs() <= tolerance).all())


@dataclass(frozen=True, slots=True)
class NoProjection:
    """X is the whole space; Assumption 2(i) (compactness) does not hold."""

    name: ClassVar[str] = "none"

    def project(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:  # noqa: ARG002
        """True."""
        return True


@dataclass(frozen=True, slots=True)
class Box:
    """X = [low, high] in every coordinate; the paper's experiments use [-2, 2]."""

    name: ClassVar[str] = "box"

    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        if not self.low < self.high:
            raise ConfigError(f"box low={self.low} must be below high={self.high}; swap them")
        _as_floats(self, "low", "high")

    def project(self, x: Tensor) -> Tensor:
        """Clamp."""
        return x.clamp(self.low, self.high)

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:
        """Whether all coordinates are within the bounds."""
        return bool(((x >= self.low - tolerance) & (x <= self.high + tolerance)).all())


@dataclass(frozen=True, slots=True)
class Ball:
    """X = {x : ||x|| <= radius}, Euclidean norm of the whole parameter vector."""

    name: ClassVar[str] = "ball"

    radius: float

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        if not 0 < self.radius < math.inf:
            raise ConfigError(f"ball radius={self.radius} must be a finite number above 0")
        _as_floats(self, "radius")

    def project(self, x: Tensor) -> Tensor:
        """Scale down rows that are too long."""
        norm = torch.linalg.vector_norm(
            x, dim=-1, keepdim=True, dtype=torch.float64
        )  # float32 is too coarse for many parameters
        scale: Tensor = self.radius / norm.clamp_min(self.radius)
        return x * scale.to(x.dtype)

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:
        """Whether every row's norm is at most the radius (within rounding of the norm itself)."""
        norm = torch.linalg.vector_norm(x.double(), dim=-1)
        rounding = (
            4 * torch.finfo(x.dtype).eps + math.sqrt(x.shape[-1]) * torch.finfo(torch.float64).eps
        ) * self.radius
        return bool((norm <= self.radius + tolerance + rounding).all())


@dataclass(frozen=True, slots=True)
class Simplex:
    """X = {x >= 0, sum(x) = total}: the whole parameter vector is a distribution (of mass
    `total`).
    """

    name: ClassVar[str] = "simplex"

    total: float = 1.0

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        if not 0 < self.total < math.inf:
            raise ConfigError(f"simplex total={self.total} must be a finite number above 0")
        _as_floats(self, "total")

    def project(self, x: Tensor) -> Tensor:
        """Subtract the one threshold that leaves the right mass, and clip at 0 (Held, Wolfe and
        Crowder, 1974).
        """
        shifted = x.double() - x.double().amax(
            -1, keepdim=True
        )  # a shift does not matter; without it large entries cost precision
        ordered = shifted.sort(dim=-1, descending=True).values
        excess = ordered.cumsum(-1) - self.total
        rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
        support = (
            (ordered * rank > excess).sum(-1, keepdim=True).clamp_min(1)
        )  # 0 where x is not finite: the result is not either
        threshold = excess.gather(-1, support - 1) / support
        return (shifted - threshold).clamp_min(0.0).to(x.dtype)

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:
        """Whether every row is non-negative and has the right mass (within rounding of the sum)."""
        rounding = 4 * torch.finfo(x.dtype).eps * self.total * math.sqrt(x.shape[-1])
        mass = (x.double().sum(-1) - self.total).abs()
        return bool((x >= -tolerance).all()) and bool((mass <= tolerance + rounding).all())


@dataclass(frozen=True, slots=True)
class TensorBoxes:
    """A box per tensor of the model: `segments` holds (length, low, high) in the order of the flat
    vector.
    """

    name: ClassVar[str] = "tensor-boxes"

    segments: tuple[tuple[int, float, float], ...] = field(metadata={SUCH_AS: "[[650, -2, 2]]"})

    def __post_init__(self) -> None:
        fit(self, f"{self.name} ")
        for length, low, high in self.segments:
            if length < 0 or not low < high:
                raise ConfigError(
                    f"tensor box (length={length}, low={low}, high={high}) needs length >= 0 and"
                    " low < high"
                )
        object.__setattr__(
            self,
            "segments",
            tuple((length, float(low), float(high)) for length, low, high in self.segments),
        )

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of every coordinate."""
        total = sum(length for length, _, _ in self.segments)
        if total != x.shape[-1]:
            raise ConfigError(
                f"tensor boxes cover {total} parameters, the model has {x.shape[-1]}; give one box"
                " per tensor"
            )
        low, high = (
            torch.cat([x.new_full((segment[0],), segment[k]) for segment in self.segments])
            for k in (1, 2)
        )
        return low, high

    def project(self, x: Tensor) -> Tensor:
        """Clamp each tensor to its own box."""
        low, high = self.bounds(x)
        return torch.minimum(torch.maximum(x, low), high)

    def contains(self, x: Tensor, tolerance: float = 0.0) -> bool:
        """Whether each tensor is within its own box."""
        low, high = self.bounds(x)
        return bool(((x >= low - tolerance) & (x <= high + tolerance)).all())


def _as_floats(projection: object, *names: str) -> None:
    """Box(-2, 2) is Box(-2.0, 2.0), also where it is written down and hashed."""
    for name in names:
        object.__setattr__(projection, name, float(getattr(projection, name)))


PROJECTIONS: dict[
    str, type[NoProjection] | type[Box] | type[Ball] | type[Simplex] | type[TensorBoxes]
] = {kind.name: kind for kind in (NoProjection, Box, Ball, Simplex, TensorBoxes)}


def ours(projection: Projection) -> Projection | None:
    """A set of which more is known than its nearest points; what somebody else has made of one of
    these may be another set.
    """
    return projection if type(projection) in PROJECTIONS.values() else None


def diameter(projection: Projection, size: int) -> float | None:
    """D_X, the diameter of the set in `size` dimensions; infinite without bounds, None for a set
    that is not known here.
    """
    match ours(projection):
        case NoProjection():
            return math.inf
        case Box() as known:
            return (known.high - known.low) * math.sqrt(size)
        case Ball() as known:
            return 2 * known.radius
        case Simplex() as known:
            return known.total * math.sqrt(2)
        case TensorBoxes() as known:
            return math.sqrt(sum(n * (high - low) ** 2 for n, low, high in known.segments))
    return None


def on_bound(projection: Projection, x: Tensor) -> Tensor | None:
    """Which entries of a stack of vectors the set may hold back; None for sets of which that says
    nothing, such as a simplex.
    """
    match ours(projection):
        case Box() as known:
            return (x <= known.low) | (x >= known.high)
        case TensorBoxes() as known:
            low, high = known.bounds(x)
            return (x <= low) | (x >= high)
        case Ball() as known:
            rounding = 1 - 8 * torch.finfo(x.dtype).eps
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
            held: Tensor = norm >= rounding * known.radius
            return held.expand(x.shape)
    return None


def projected(projection: Projection, x: Tensor) -> Tensor:
    """P_X of a vector, or of each row; a set of somebody's own is given rows, copies of these."""
    if ours(projection):
        return projection.project(x)
    rows = x.reshape(-1, x.shape[-1]).clone()
    what, shape = "projection={!r:.80} fails on {} rows of {} numbers", tuple(rows.shape)
    with calling(what, projection, *shape, remedy="project(x) takes a stack of vectors"):
        found: object = projection.project(rows)
    if not (isinstance(found, Tensor) and (found.shape, found.dtype) == (shape, x.dtype)):
        kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"projection={projection!r:.80} gives {kind} for {shape[0]} rows of {shape[1]} numbers;"
            " project(x) must return a tensor like x, the nearest point to each row"
        )
    return found.reshape(x.shape)


def tried(projection: Projection, x: Tensor) -> Tensor:
    """The projection of a vector; a set of somebody's own is tried on a stack, and on what comes
    out.
    """
    found = projected(projection, x.expand(2, -1))
    if not ours(projection) and not torch.allclose(projected(projection, found), found, 1e-3, 1e-5):
        raise ConfigError(
            f"projection={projection!r:.80} moves what it has projected, so it is none; project(x)"
            " must return points of the set, which it leaves as they are"
        )
    return found[0]


def project_(projection: Projection, x: Tensor) -> Tensor:
    """The projection of x, in the memory of x where the set allows."""
    return (
        x.clamp_(projection.low, projection.high)
        if type(projection) is Box
        else projection.project(x)
    )
