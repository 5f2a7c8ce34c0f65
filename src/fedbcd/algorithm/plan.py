"""Local work as data. A plan is a tuple of operations on named vectors ("registers"): what a device
keeps (its slots), what it was sent (z, ...), and names that the plan makes up on its way.

Backends compare the value: whoever can do better for a plan it knows does so; everybody else
interprets it (`compute.interpret`). The equations are those of `algorithm.device`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedbcd.algorithm.device import Contact
from fedbcd.algorithm.optimizers import Optimizer, StepSchedule
from fedbcd.algorithm.projection import NoProjection, Projection
from fedbcd.config import fit
from fedbcd.errors import ConfigError

EVERYWHERE = NoProjection()
Repetitions = int | Literal["K"]  # "K": as many as the schedule has drawn for this session
Terms = tuple[tuple[float, str], ...]  # a sum: coefficients and registers
Function = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


OTHERS = ("times", "body", "optimizer", "schedule")  # that are looked at elsewhere


class _Values:
    """What operations have in common: their fields are as their types ask."""

    def __post_init__(self) -> None:
        fit(self, f"{type(self).__name__} ", OTHERS, projection="project(x)")


@dataclass(frozen=True)
class Toward(_Values):
    """A pull: gamma (x - model); without a penalty of its own the device's gamma_i."""

    model: str = "z"
    penalty: float | None = None


@dataclass(frozen=True)
class Steps(_Values):
    """Eq. (4), `times` times: x <- P_X(ex - eta (gradient + linear + sum gamma (ex - z))), at ex =
    x + zeta (x - prev).

    prev        keeps the last iterate but one; empty: no momentum
    linear      constant terms of the gradient
    only        patterns of names: the tensors that move
    same_batch  all steps on one mini-batch
    decay       adds decay/2 ||x||^2 to g_i
    optimizer   makes another direction of the whole gradient; None: the gradient itself
    schedule    what eta is multiplied by in a device's session 0, 1, ...
    """

    step: float
    of: str = "x"
    prev: str = ""
    momentum: float = 0.0
    pulls: tuple[Toward, ...] = ()
    linear: Terms = ()
    times: Repetitions = "K"
    only: tuple[str, ...] = ("*",)
    same_batch: bool = False
    projection: Projection = EVERYWHERE
    decay: float = 0.0
    optimizer: Optimizer | None = None
    schedule: StepSchedule | None = None

    @property
    def is_more(self) -> bool:
        """Whether it is more than eq. (4) with one eta_x."""
        return bool(self.decay) or self.optimizer is not None or self.schedule is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.step < math.inf:
            raise ConfigError(f"Steps step={self.step} must be a finite number above 0")


@dataclass(frozen=True)
class Pull(_Values):
    """Algorithm 2, lines 14-18, `times` times: x <- P_X(x - gamma (x - z)); `contact` says what x -
    prev is afterwards.
    """

    of: str = "x"
    prev: str = ""
    toward: Toward = Toward()
    times: Repetitions = "K"
    projection: Projection = EVERYWHERE
    contact: Contact = "kept"


@dataclass(frozen=True)
class Set(_Values):
    """into <- the sum of `terms`, and of `over_steps` divided by K; "shared": only in the tensors
    that are one with the server's (`Method.by_tensor`).
    """

    into: str
    terms: Terms
    columns: Literal["all", "shared"] = "all"
    over_steps: Terms = ()


@dataclass(frozen=True)
class Gradient(_Values):
    """into <- the mini-batch gradient of g_i at a register; loss <- its value, (N, 1).

    last_batch: the mini-batch of the gradient before, not a new one.
    """

    into: str
    at: str
    loss: str = ""
    last_batch: bool = False


@dataclass(frozen=True)
class Repeat:
    """All of `body`, `times` times."""

    times: Repetitions
    body: "Plan"


@dataclass(frozen=True)
class Custom(_Values):
    """What no operation says: a function of the registers, stacks (N, width), that returns those it
    changes. `reads` and `writes` name them.
    """

    function: Function
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Operation = Steps | Pull | Set | Gradient | Repeat | Custom
Plan = tuple[Operation, ...]


def batches_of(plan: Plan, k: int) -> int:
    """How many mini-batches a plan draws in a session of K = `k` steps."""
    total = 0
    for operation in plan:
        match operation:
            case Steps():
                total += 1 if operation.same_batch else count(operation.times, k)
            case Gradient():
                total += not operation.last_batch
            case Repeat():
                total += count(operation.times, k) * batches_of(operation.body, k)
    return total


def gradients_of(plan: Plan, k: int) -> int:
    """How many mini-batch gradients a plan takes in a session of K = `k` steps."""
    total = 0
    for operation in plan:
        match operation:
            case Steps():
                total += count(operation.times, k)
            case Gradient():
                total += 1
            case Repeat():
                total += count(operation.times, k) * gradients_of(operation.body, k)
    return total


def flat(plan: Plan) -> Iterator[Operation]:
    """All operations, also those that are repeated."""
    for operation in plan:
        yield operation
        if isinstance(operation, Repeat):
            yield from flat(operation.body)


def count(times: Repetitions, k: int) -> int:
    """Of repetitions."""
    return k if times == "K" else times


@dataclass(frozen=True)
class OneLoop:
    """A plan that is one loop, perhaps begun at z: all that compiled and recorded code know."""

    loop: Steps | Pull
    from_z: bool  # x and prev begin as z, and are nobody's afterwards
    pulled: bool  # towards z, by gamma_i


def one_loop(plan: Plan) -> OneLoop | None:
    """The plan as such a loop on x and x_prev, or None. It compares values."""
    *before, last = plan
    begins = (Set("x", ((1.0, "z"),)), Set("x_prev", ((1.0, "z"),)))
    prev = last.prev if isinstance(last, Steps | Pull) else ""
    if tuple(before) not in ((), begins[: 1 + bool(prev)]) or prev not in ("", "x_prev"):
        return None
    if isinstance(last, Pull):
        plain = Pull(prev=prev, projection=last.projection, contact=last.contact)
        return OneLoop(last, bool(before), True) if last == plain else None
    if not isinstance(last, Steps) or last.pulls not in ((), (Toward(),)):
        return None
    plain_steps = Steps(
        last.step,
        prev=prev,
        momentum=last.momentum,
        pulls=last.pulls,
        projection=last.projection,
    )
    return OneLoop(last, bool(before), bool(last.pulls)) if last == plain_steps else None


# ------------------------------------------------------------------------------------------------
# checks
def check_plan(plan: object, known: Collection[str], where: str) -> set[str]:
    """Refuse a plan that reads what nobody has written; the registers that there are afterwards."""
    if not isinstance(plan, tuple) or not all(isinstance(part, Operation) for part in plan):
        raise ConfigError(
            f"{where}={plan!r:.80} must be a tuple of operations: Steps, Pull, Set, Gradient,"
            " Repeat, Custom"
        )
    there = set(known)
    for operation in plan:
        for name in _read(operation):
            if name not in there:
                raise ConfigError(
                    f"{where} reads {name!r}, which is nothing that a device keeps or is sent, and"
                    f" no operation before {type(operation).__name__} has set it; there is"
                    f" {', '.join(sorted(there)) or 'nothing'}"
                )
        times = getattr(operation, "times", 1)
        if times != "K" and not (type(times) is int and times >= 1):
            raise ConfigError(f"{where}: times={times!r} must be 1 or more, or 'K'")
        if isinstance(operation, Repeat):
            check_plan(operation.body, there, where)
        there |= written(operation)
    return there


def _read(operation: Operation) -> Iterator[str]:
    match operation:
        case Steps():
            yield from (operation.of, *(name for _, name in operation.linear))
            yield from (pull.model for pull in operation.pulls)
            yield from (operation.prev,) if operation.prev else ()
        case Pull():
            yield from (operation.of, operation.toward.model)
            yield from (operation.prev,) if operation.prev else ()
        case Set():
            yield from (name for _, name in (*operation.terms, *operation.over_steps))
            yield from (operation.into,) if operation.columns == "shared" else ()
        case Gradient():
            yield operation.at
        case Custom():
            yield from operation.reads


def written(operation: Operation) -> set[str]:
    """The registers that it sets."""
    match operation:
        case Set():
            return {operation.into}
        case Gradient():
            return {operation.into, operation.loss} - {""}
        case Custom():
            return {*operation.writes}
        case Repeat():
            return set().union(*map(written, operation.body))
    return {operation.of, operation.prev} - {""}
