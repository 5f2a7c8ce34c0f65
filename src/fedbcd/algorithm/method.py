"""What a method is: a value. A plan says what a device does (`algorithm.plan`); the rest says what
it keeps and sends, what a server keeps, who counts with which weight, and how the server steps.

A settings dataclass builds it (`Settings.method`): settings are what people write, and what records
hold. The four of the paper are in `algorithm.methods`; anybody's own are used in the same way.

Shapes: N devices, P parameters, F values of a model (parameters and buffers).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbcd.algorithm import cloud, draws
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.plan import EVERYWHERE, Plan, Pull, Repeat, Steps, check_plan, flat, written
from fedbcd.algorithm.projection import Projection
from fedbcd.algorithm.wire import Layer, Sender, Wire, check_layers, exact_weights
from fedbcd.config import convert, fit
from fedbcd.errors import ConfigError
from fedbcd.own import calling, path_of

Width = Literal["model", "parameters"] | int  # of a vector: a model's, that without buffers, or own
Batch = int | Literal["all"]
Model = Mapping[str, Tensor]  # what a server keeps, by name, float64: z, and perhaps more
Weight = Literal["one", "size", "penalty"] | Sequence[float]
OfflineTime = Literal["timed", "free"]
SENT = "sent"  # no slot has this name


@dataclass(frozen=True)
class Facts:
    """What a method may depend on."""

    devices: int
    sizes: Sequence[int]  # samples of each device


class _Vector:
    """What slots, sent vectors and parts have in common."""

    def __post_init__(self) -> None:
        fit(self, f"{type(self).__name__} ")


@dataclass(frozen=True)
class Slot(_Vector):
    """A vector that a device keeps between its sessions.

    start     a number in every place; None: x(0), and for one who joins later its server's z
    restored  the sent vector from which it comes back after a loss of memory; empty: it starts over
              (where `start` is None, at the first model that was sent)
    """

    name: str
    width: Width = "model"
    start: float | None = None
    restored: str = ""


@dataclass(frozen=True)
class Sent(_Vector):
    """A vector of an upload; each has a sum of its own at the server. `difference`: the plan has
    formed it as one; otherwise it is a model.
    """

    name: str
    width: Width = "model"
    difference: bool = False


@dataclass(frozen=True)
class Part(_Vector):
    """A vector of what servers keep, mix and step; `start` as of a slot. Devices hear of the first
    `Method.hears` parts.
    """

    name: str
    width: Width = "model"
    start: float | None = None


@dataclass(frozen=True)
class Sums:
    """What is known when a server steps (Sync-cloud: of all servers together), float64."""

    totals: Model  # by sent vector: the sum of weight times what was sent
    weight: float  # of those who count
    count: int  # how many they are
    members: int

    def mean(self, name: str = "x") -> Tensor:
        """By weight."""
        return self.totals[name] / self.weight


class ServerStep(Protocol):
    """How z moves: a new model from the mixed one, w, and the sums. It is not asked where nobody
    counts.
    """

    def __call__(self, w: Model, sums: Sums) -> Model:
        """Parts that are not named stay."""
        ...


@dataclass(frozen=True)
class Relative:
    """Eqs. (5) and (6b): z <- w - eta_z (w - m), m being the mean of what was sent."""

    step: float = 1.0
    of: str = "x"
    by_value: ClassVar[bool] = True  # each value by itself, so a long vector may go in parts
    needs_counts: ClassVar[bool] = False  # only weights

    def __call__(self, w: Model, sums: Sums) -> Model:
        """One cloud step."""
        return {"z": cloud.server_step(w["z"], sums.mean(self.of), self.step)}


@dataclass(frozen=True)
class Absolute:
    """The same as printed: z <- w - eta_z sum weight_i (w - x_i)."""

    step: float
    of: str = "x"
    by_value: ClassVar[bool] = True
    needs_counts: ClassVar[bool] = False

    def __call__(self, w: Model, sums: Sums) -> Model:
        """One cloud step."""
        total = sums.totals[self.of]
        return {"z": cloud.server_step_absolute(w["z"], total, sums.weight, self.step)}


@dataclass(frozen=True)
class AddMean:
    """z <- w + eta times the mean of differences that were sent; `by_count`: their sum over how
    many they are, whatever they weigh.
    """

    step: float = 1.0
    of: str = "d"
    by_count: bool = False
    by_value: ClassVar[bool] = True

    def __call__(self, w: Model, sums: Sums) -> Model:
        """One cloud step."""
        over = sums.count if self.by_count else sums.weight
        return {"z": w["z"] + self.step * sums.totals[self.of] / over}


@dataclass(frozen=True)
class Keep:
    """z stays as it was mixed."""

    by_value: ClassVar[bool] = True
    needs_counts: ClassVar[bool] = False

    def __call__(self, w: Model, sums: Sums) -> Model:  # noqa: ARG002
        """Nothing."""
        return {}


class Length(NamedTuple):
    """Of a session: how many steps or passes were drawn, which say how long it takes, and K_i."""

    drawn: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of learning.

    plan, offline   what an activation does, and what a device does between activations, if anything
    at_evaluation   before a personal model is tested, on copies of what the device keeps and of its
                    server's model; with the mini-batches of session -1, and K at its largest
    slots, sends    what a device keeps, and what it uploads
    counts          whose uploads are in the sums: all members, each by its last one, or those of a
                    phase ("active")
    weight          of an upload: one, the device's data size, gamma_i, or a number for each device
    discount        of that weight, by how many versions of z were made since the one it began from
    penalty         gamma_i, one for all or one for each device
    by_tensor       times gamma_i, by patterns of tensors' names: 0 keeps a tensor private, inf
                    makes it one with the server's
    model, hears    what a server keeps; how many of its parts, from the first, are sent to devices
    step, order     the server's step; whether servers are mixed before it, eq. (6), or after it
    personal        the slot that is the device's own model, or what `at_evaluation` makes of it;
                    "z": it has none
    result          the part that is tested as global model
    cloud           for which it is: those with one z for all servers ("sync"), those where each
                    server has its own ("async"), or any
    """

    name: str
    plan: Plan
    offline: Plan = ()
    at_evaluation: Plan = ()
    slots: tuple[Slot, ...] = (Slot("x", restored="x"),)
    sends: tuple[Sent, ...] = (Sent("x"),)
    counts: Literal["members", "active"] = "active"
    weight: Weight = "one"
    discount: Callable[[int], float] | None = None
    penalty: float | Sequence[float] = 0.0
    by_tensor: Mapping[str, float] | None = None
    model: tuple[Part, ...] = (Part("z"),)
    hears: int = 1
    step: ServerStep = Relative()
    order: Literal["mix, step", "step, mix"] = "mix, step"
    personal: str = "x"
    result: str = "z"
    cloud: Literal["any", "sync", "async"] = "any"
    # what a schedule and a mini-batch are made from
    steps: tuple[int, int] = (1, 5)  # K_i is uniform on low..high, or as many passes:
    passes: Sequence[int] = ()  # steps in a pass over its data, of each device; empty: one
    # of an activation that takes no gradients; None: as many as were drawn for the latest session
    pull_steps: tuple[int, int] | None = None
    batch: Batch = 32
    projection: Projection = EVERYWHERE  # x(0) is in X, and what is uploaded
    offline_limit: int | None = None  # offline rounds in a row without contact
    offline_time: OfflineTime = "timed"  # they take their time, or none, once in a round
    available: int | float | None = None  # of a server's members; a share of them below 1
    cloud_iterations: int = 1  # K_z
    # devices of a server that may work at the same time; None: as many as still end its phase, so
    # that nobody's upload is older than the phase
    at_once: int | None = None

    def __post_init__(self) -> None:
        own = ("plan", "offline", "at_evaluation", "passes", "penalty", "weight")
        fit(self, f"{self.name}: ", own, step="__call__(w, sums)", projection="project(x)")
        for name, hint in (("penalty", float | Sequence[float]), ("weight", Weight)):
            if not isinstance(given := getattr(self, name), tuple):  # these may be long
                found = convert(given, hint, f"{self.name}: {name}", whole=True)
                object.__setattr__(self, name, found)
        check_method(self)

    @property
    def has_personal(self) -> bool:
        """Whether devices have models of their own."""
        return self.personal != "z"

    @property
    def keeps_personal(self) -> bool:
        """Whether these are kept between sessions, not only made for a test."""
        return any(slot.name == self.personal for slot in self.slots)

    @property
    def forgets_mixes(self) -> bool:
        """Whether z is what the devices say, whatever servers have mixed: a step of 1 after it."""
        whole = isinstance(self.step, Relative) and self.step.step == 1.0
        return whole and self.order == "mix, step" and self.counts == "active"

    @property
    def is_only_sync(self) -> bool:
        """Whether it is for clouds with one z for all servers."""
        return self.cloud == "sync" or self.forgets_mixes

    @property
    def first_steps(self) -> Steps | None:
        """The first steps it takes on g_i, if any."""
        return next(filter(None, map(_first_steps, (self.plan, self.offline))), None)

    @property
    def device_step(self) -> float:
        """eta_x of its first steps; NaN where it takes none."""
        return math.nan if self.first_steps is None else self.first_steps.step

    @property
    def momentum(self) -> float:
        """zeta of its first steps."""
        return 0.0 if self.first_steps is None else self.first_steps.momentum

    @property
    def takes_time_offline(self) -> bool:
        """Whether devices train offline by timers of their own, and are busy meanwhile."""
        return bool(self.offline) and self.offline_time == "timed"

    def has_passes(self, *, offline: bool) -> bool:
        """Whether what is drawn are passes over the data: not for pulls, which read none."""
        return bool(self.passes) and not pulls_only(self.offline if offline else self.plan)

    def pass_of(self, device: int, *, offline: bool) -> int:
        """Steps in one of what is drawn for an offline round, or an activation."""
        return self.passes[device] if self.has_passes(offline=offline) else 1

    def length(self, seed: int, device: int, session: int, activation: int | None) -> Length:
        """Of a session; `activation`: its number, None in an offline round."""
        if activation is not None and self.pull_steps is not None:
            drawn = draws.steps(seed, device, activation, *self.pull_steps, stream=draws.PULLS)
        else:
            drawn = draws.steps(seed, device, session, *self.steps)
        return Length(drawn, drawn * self.pass_of(device, offline=activation is None))

    def lengths(self, *, offline: bool) -> tuple[int, int]:
        """The fewest and the most steps of an offline round, or of an activation."""
        low, high = self.steps if offline else self.pull_steps or self.steps
        passes = self.passes if self.has_passes(offline=offline) else (1,)
        return low * min(passes), high * max(passes)

    def available_of(self, members: int) -> int:
        """How many of a server's members can train in a round."""
        wanted = self.available
        if wanted is None:
            return members
        return min(members, max(1, round(wanted * members)) if wanted < 1 else int(wanted))

    def penalties(self, devices: int) -> Tensor:
        """gamma_i of every device, float64."""
        given = self.penalty if isinstance(self.penalty, Sequence) else [self.penalty] * devices
        _as_many(given, devices, "penalty", lambda value: value >= 0, "0 or more")
        return torch.tensor(given, dtype=torch.float64)

    def weights(self, sizes: Sequence[int]) -> list[float]:
        """Of every device in a sum."""
        if self.weight == "size":
            return [float(size) for size in sizes]
        if self.weight == "one":
            return [1.0] * len(sizes)
        given = self.penalties(len(sizes)).tolist() if self.weight == "penalty" else self.weight
        _as_many(given, len(sizes), "weight", lambda value: value > 0, "above 0")
        return [float(weight) for weight in given]


@runtime_checkable
class Settings(Protocol):
    """What people write, and records hold: a frozen dataclass that builds its method."""

    def method(self, facts: Facts) -> Method:
        """The method with these settings."""
        ...


def method_of(settings: Settings, facts: Facts) -> Method:
    """What these settings build; they may be somebody else's."""
    name = path_of(type(settings))
    with calling("{}.method(facts) fails", name, remedy="facts has devices and sizes"):
        found: object = settings.method(facts)
    if not isinstance(found, Method):
        raise ConfigError(
            f"{name}.method returns {found!r:.80}; it must return a"
            " fedbcd.algorithm.method.Method (docs/api.md)"
        )
    return found


def _first_steps(plan: Plan) -> Steps | None:
    for part in plan:
        found = _first_steps(part.body) if isinstance(part, Repeat) else part
        if isinstance(found, Steps):
            return found
    return None


def _as_many(
    values: Sequence[float], devices: int, what: str, holds: Callable[[float], bool], bound: str
) -> None:
    if len(values) != devices:
        raise ConfigError(
            f"{what} has {len(values)} values for {devices} devices; give one for all or one each"
        )
    for device, value in enumerate(values):
        if not (holds(value) and value < math.inf):
            raise ConfigError(
                f"{what} of device {device} is {value}; it must be a finite number, {bound}"
            )


# ------------------------------------------------------------------------------------------------
# checks
def check_method(method: Method) -> None:
    """Refuse what cannot be played, before anything runs."""
    name = method.name
    kept, parts, sent = (
        [vector.name for vector in vectors]
        for vectors in (method.slots, method.model, method.sends)
    )
    _check_names(name, {"slots": kept, "model": parts, "sends": sent})
    if SENT in kept:
        raise ConfigError(f"{name}: a slot cannot be called {SENT!r}; give it another name")
    if parts[:1] != ["z"]:
        raise ConfigError(f"{name}: model={parts} must begin with z, the global model")
    if not 1 <= method.hears <= len(parts):
        raise ConfigError(f"{name}: hears={method.hears} must be between 1 and {len(parts)}")
    heard = parts[: method.hears]
    if shared := {*kept} & {*heard}:
        raise ConfigError(
            f"{name}: {', '.join(shared)} is a slot and a part of the model that devices hear of;"
            " give one of them another name"
        )
    if not method.plan:
        raise ConfigError(f"{name}: plan=() does nothing in an activation; give it an operation")
    there = check_plan(method.plan, {*kept, *heard}, f"{name}: plan")
    check_plan(method.offline, kept, f"{name}: offline")
    there_then = check_plan(method.at_evaluation, {*kept, *heard}, f"{name}: at_evaluation")
    for vector in sent:
        if vector not in there:
            raise ConfigError(
                f"{name}: it sends {vector!r}, which its plan does not set; there is"
                f" {', '.join(sorted(there))}"
            )
    if method.has_personal and method.personal not in {*kept, *there_then} - {*heard}:
        raise ConfigError(
            f"{name}: personal={method.personal!r} is no slot; name one of"
            f" {', '.join(kept) or 'its own (it has none)'}, or 'z' for a method without personal"
            " models"
        )
    if method.result not in parts:
        raise ConfigError(f"{name}: result={method.result!r} is none of {', '.join(parts)}")
    _check_sent(method, sent)
    _check_numbers(method)


def _check_sent(method: Method, sent: Sequence[str]) -> None:
    """What is read of uploads is sent."""
    name, of = method.name, getattr(method.step, "of", None)
    if isinstance(method.step, Relative | Absolute | AddMean) and of not in sent:
        raise ConfigError(
            f"{name}: its server step is of {of!r}, which is not sent; there is"
            f" {', '.join(sent) or 'nothing'}"
        )
    for slot in method.slots:
        if slot.restored and slot.restored not in sent:
            raise ConfigError(f"{name}: {slot.name!r} is restored from {slot.restored!r}, not sent")


def _check_names(name: str, tables: Mapping[str, Sequence[str]]) -> None:
    for what, names in tables.items():
        if len({*names}) != len(names):
            raise ConfigError(f"{name}: two of its {what} have one name: {', '.join(names)}")


def _check_numbers(method: Method) -> None:
    if method.counts == "members" and method.discount is not None:
        raise ConfigError(
            f"{method.name}: members count by their last uploads, whatever their age; with a"
            " discount, let only the active ones count"
        )
    factors = [] if method.discount is None else [method.discount(age) for age in range(9)]
    if not all(0 < factor <= 1 for factor in factors):
        raise ConfigError(
            f"{method.name}: discount gives {factors} for ages 0, 1, ...; each must be above 0 and"
            " at most 1"
        )
    for what in ("at_once", "cloud_iterations", "offline_limit"):
        number = getattr(method, what)
        if number is not None and number < 1:
            raise ConfigError(f"{method.name}: {what}={number} must be 1 or more")
    if method.available is not None and not 0 < method.available < math.inf:
        raise ConfigError(
            f"{method.name}: available={method.available} must be a number of members from 1 on, or"
            " a share of them above 0"
        )
    check_range("steps", method.steps)
    check_range("pull_steps", method.pull_steps)
    batch = method.batch
    if batch != "all" and not (isinstance(batch, int) and batch >= 1):
        raise ConfigError(f"batch={batch} must be 1 or more, or 'all' for exact gradients")
    if bool(method.offline) != (method.offline_limit is not None):
        raise ConfigError(
            f"{method.name}: an offline plan needs offline_limit, and only it does: how many"
            " offline rounds a device may take in a row without contact"
        )


def check_range(name: str, pair: tuple[int, int] | None) -> None:
    """Refuse bounds of a draw that are none."""
    if pair is not None and not 1 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"{name}={list(pair)} must be [low, high] with 1 <= low <= high, e.g. [1, 5]"
        )


# ------------------------------------------------------------------------------------------------
# vectors
class Vectors:
    """Named vectors side by side in a flat one."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        ends = torch.tensor([0, *widths.values()]).cumsum(0).tolist()
        self.places = {
            name: slice(*place) for name, place in zip(widths, pairwise(ends), strict=True)
        }
        self.size = int(ends[-1])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each by its name; the only one as it is, however many values of it there are."""
        if len(self.places) == 1:
            return dict.fromkeys(self.places, flat)
        return {name: flat[..., place] for name, place in self.places.items()}

    def joined(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The inverse."""
        if len(self.places) == 1:
            return vectors[next(iter(self.places))]
        return torch.cat([vectors[name] for name in self.places], dim=-1)


class Bound:
    """A method for a model and a federation: widths, weights, and which tensors are whose."""

    def __init__(
        self,
        method: Method,
        layout: Layout,
        sizes: Sequence[int],
        wiring: tuple[Sequence[Layer], Tensor, int] | None = None,
    ) -> None:
        """`wiring`: where uploads have layers, these, x(0), and the most devices of a server."""
        self.method, self.layout = method, layout
        self.weights = method.weights(sizes)
        self.penalty_N = method.penalties(len(sizes))
        self.slots = {slot.name: self.width(slot.width) for slot in method.slots}
        self.upload = Vectors({sent.name: self.width(sent.width) for sent in method.sends})
        self.model = Vectors({part.name: self.width(part.width) for part in method.model})
        self.heard = Vectors(
            {part.name: self.width(part.width) for part in method.model[: method.hears]}
        )
        self.coupling_F = self._coupling()
        for operation in flat((*method.plan, *method.offline, *method.at_evaluation)):
            if isinstance(operation, Steps):
                self.moves(operation.only)  # refuses patterns that fit nothing
        self.private_F = None if self.coupling_F is None else self.coupling_F == 0
        # whether the cloud's steps take each value by itself
        self.by_value = (
            len(method.model) == len(method.sends) == 1
            and self.private_F is None
            and getattr(method.step, "by_value", False)
        )
        # whether the server step asks how many count, and not only what they weigh
        self.needs_counts: bool = getattr(method.step, "needs_counts", True)
        # whether each device's last upload is kept, to replace it, or to bring its slots back
        self.keeps_last = bool(method.slots) or method.counts == "members"
        self.wire = _wire(self, *wiring) if wiring is not None and wiring[0] else None
        if self.wire is not None and self.wire.whole:
            self.weights = exact_weights(self.weights)
        plain = self.wire is None
        self.in_parts = plain and self.by_value  # whether a server may step a long vector so
        # sent vectors that are in X, out of which layers may carry them
        self.in_set = {s.name for s in method.sends if plain and self._is_projected(s.name)}
        # whether what a device has contributed is its x, as it was before its session
        self.uploads_x = plain and [*self.upload.places] == ["x"] and self.private_F is None
        self.sends_x = (
            self.uploads_x
            and self.upload.size == self.slots.get("x") == layout.size_F
            and not method.offline
        )

    def weight_of(self, device: int, age: int) -> float:
        """Of an upload in a sum; `age` versions of z were made since it started."""
        weight, discount = self.weights[device], self.method.discount
        return weight if discount is None else weight * discount(age)

    def width(self, width: Width) -> int:
        """In values."""
        sizes = {"model": self.layout.size_F, "parameters": self.layout.size_P}
        return width if isinstance(width, int) else sizes[width]

    def _coupling(self) -> Tensor | None:
        """What gamma_i is multiplied by, for every value of a model."""
        patterns = self.method.by_tensor
        if patterns is None:
            return None
        coupling_F, used = torch.ones(self.layout.size_F, dtype=torch.float64), set()
        for span in (*self.layout.parameters, *self.layout.buffers):
            fits = next((pattern for pattern in patterns if fnmatch(span.name, pattern)), None)
            if fits is not None:
                used.add(fits)
                coupling_F[span.start : span.stop] = patterns[fits]
        if unused := patterns.keys() - used - {"*"}:
            names = ", ".join(span.name for span in self.layout.parameters)
            raise ConfigError(
                f"by_tensor: no tensor of the model is called {sorted(unused)[0]!r}; it has {names}"
            )
        if bool((coupling_F < 0).any()):
            raise ConfigError("by_tensor: a factor must be 0 or more, or inf")
        return coupling_F

    def _is_projected(self, name: str) -> bool:
        """Whether the last that a plan does to a vector is to project it onto X."""
        last = next((op for op in reversed(self.method.plan) if name in written(op)), None)
        return (
            self.private_F is None
            and isinstance(last, Steps | Pull)
            and last.projection == self.method.projection
        )

    def moves(self, only: tuple[str, ...]) -> Tensor | None:
        """Which parameters steps may change; None: all."""
        if only == ("*",):
            return None
        mask_P = torch.zeros(self.layout.size_P, dtype=torch.bool)
        for span in self.layout.parameters:
            mask_P[span.start : span.stop] = any(fnmatch(span.name, each) for each in only)
        if not bool(mask_P.any()):
            names = ", ".join(span.name for span in self.layout.parameters)
            raise ConfigError(
                f"only={list(only)} fits none of the tensors of the model; it has {names}"
            )
        return mask_P

    def first(self, vector: Slot | Part, model: Tensor) -> Tensor:
        """What it begins as, where `model` is x(0) or z."""
        width = self.width(vector.width)
        if vector.start is not None:
            return model.new_full((width,), vector.start)
        if width > len(model):
            raise ConfigError(
                f"{self.method.name}: {vector.name} has {width} values and begins as a model of"
                f" {len(model)}; give it a number to start from"
            )
        return model[:width]

    def tables(self, start: Tensor) -> dict[str, Tensor]:
        """What each device begins with, where x(0) is `start`: its slots and, where members count
        by something else than their x, `SENT`, what each has contributed.
        """
        first = {slot.name: self.first(slot, start) for slot in self.method.slots}
        if self.method.counts == "members" and not self.sends_x:
            first[SENT] = self.known(0, start)
        return first

    def begun(self, slot: Slot, upload: Tensor, start: Tensor) -> Tensor:
        """What it begins as for one who joins or has lost its memory, where `upload` is what it
        contributes, and x(0) is `start`.
        """
        sent = self.upload.views(upload)
        models = [vector.name for vector in self.method.sends if not vector.difference]
        source = slot.restored or (models[0] if models else "")
        if not source or (slot.start is not None and not slot.restored):
            return self.first(slot, start)
        return self.first(replace(slot, start=None), sent[source])

    def first_upload(self, model: Tensor) -> Tensor:
        """What a device contributes that has trained nothing yet, where z is `model`."""
        sent = {
            vector.name: self.first(
                Part(vector.name, vector.width, 0.0 if vector.difference else None), model
            )
            for vector in self.method.sends
        }
        return self.upload.joined(sent) if sent else model[:0]

    # ---------------------------------------------------------------------------------------------
    # contributions: what servers add up; without layers on uploads that is what was sent
    def known(self, device: int, model: Tensor) -> Tensor:
        """What a device contributes that has trained nothing yet, where z is `model`."""
        return self.contributed(device, self.first_upload(model))

    def contributed(self, device: int, sent: Tensor) -> Tensor:
        """The same of one of whom this is known without an upload."""
        return sent if self.wire is None else self.wire.known(sent, self.sender(device))

    def base(self, device: int, last: Tensor | None, z: Tensor) -> Tensor:
        """What a message is added to: the device's `last` contribution, where members count;
        otherwise that of one who was sent z and has trained nothing.
        """
        return self.known(device, z) if last is None else last

    def factor(self, weight: float) -> float:
        """By what a contribution is multiplied in a sum; messages have been on the device."""
        return weight if self.wire is None else math.copysign(1.0, weight)

    def total(self, total: Tensor, weight: float | Tensor) -> Tensor:
        """The sum of weight times what was sent, from that of contributions."""
        return total if self.wire is None else self.wire.value(total, weight)

    def sent_by(self, device: int, contribution: Tensor) -> Tensor:
        """What the device has sent."""
        if self.wire is None:
            return contribution
        weight = self.weights[device]
        return self.wire.value(contribution, weight) / (weight or 1.0)

    def sender(self, device: int, activation: int = -1) -> Sender:
        """For layers."""
        return Sender(device, activation, self.weights[device])

    def uploaded(self, registers: Model) -> Tensor:
        """What is to be sent. Of private tensors what came from the server goes back; or x(0), if
        the server has a contribution that this is compared with.
        """
        sent = {
            name: registers[name][..., : place.stop - place.start]
            for name, place in self.upload.places.items()
        }
        if self.private_F is not None:
            for vector in self.method.sends:
                if not vector.difference and vector.width != "parameters":
                    known = registers["z"]
                    private_F = self.private_F.to(known.device)
                    if self.wire is not None and self.method.counts == "members":
                        known = self.upload.views(self.wire.start)[vector.name].to(known)
                    sent[vector.name] = torch.where(private_F, known, sent[vector.name])
        return self.upload.joined(sent) if sent else next(iter(registers.values()))[:, :0]

    def first_model(self, start: Tensor) -> Tensor:
        """What servers begin with, where x(0) is `start`."""
        return self.model.joined({part.name: self.first(part, start) for part in self.method.model})

    def stepped(
        self, mixed: Tensor, total: Tensor, weight: float, count: int, members: int
    ) -> Tensor:
        """Eqs. (5) and (6b), float64. With nobody to count, z = w. Private tensors stay."""
        if weight == 0.0:
            return mixed
        w = self.model.views(mixed)
        sums = Sums(self.upload.views(self.total(total, weight)), weight, count, members)
        found = self.method.step(w, sums)
        if not _are_parts(found, w):
            raise ConfigError(
                f"{self.method.name}: its server step returns {found!r:.80}; it must return a"
                f" mapping of {', '.join(w)} (or some of them) to tensors as wide as before"
            )
        found = {**w, **found}
        if self.private_F is not None:
            found["z"] = torch.where(self.private_F.to(mixed.device), w["z"], found["z"])
        return self.model.joined(found)


def _wire(bound: Bound, layers: Sequence[Layer], start: Tensor, most: int) -> Wire:
    check_layers(layers, discount=bound.method.discount is not None)
    return Wire(layers, bound.first_upload(start), most, len(bound.weights))


def _are_parts(found: Any, w: Model) -> bool:
    return isinstance(found, Mapping) and all(
        name in w and isinstance(part, Tensor) and part.shape == w[name].shape
        for name, part in found.items()
    )


def pulls_only(plan: Plan) -> bool:
    """Whether it takes no gradients."""
    return all(isinstance(operation, Pull) for operation in plan)
