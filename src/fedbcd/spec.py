"""What a run is, as one value: `train`, job files, replays, pilots, deployments, clusters and kept
results are all told by a `RunSpec`.

It is made of small parts. The first three, with algorithm and cloud, say what is computed: they
are the identity of a run, which stands at the head of its log. The others say how long, how it is
watched, and where it is computed. A new option is one field with a sentence in one of the parts,
and a keyword of `train`.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from torch import nn

from fedbcd.algorithm.cloud import check_absolute_step, check_doubly_stochastic
from fedbcd.algorithm.method import Absolute, Bound, Facts, Method, method_of
from fedbcd.algorithm.methods import ALGORITHMS, Algorithm, FedBCD
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.wire import LAYERS, Layer, check_layers
from fedbcd.config import (
    HOMES,
    PLACES,
    build,
    check_keys,
    choose,
    convert,
    fit,
    follow_renamed,
    nearest,
    offered,
    settings,
)
from fedbcd.data.federation import Federation
from fedbcd.data.measure import DEFAULT, Measure, check_tests, measure_for, measure_in
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.own import calling, is_own
from fedbcd.protocol.clouds import CLOUDS, Cloud, DynamicGraph, GraphCloud, SyncCloud
from fedbcd.protocol.coordinator import (
    AsyncCoordinator,
    RigorousCoordinator,
    SyncCoordinator,
)
from fedbcd.record.history import PLACE, columns_of, deciding, scored_in
from fedbcd.record.start import named
from fedbcd.record.stopping import Plateau
from fedbcd.recorded import completed, going_on, in_record, shortened
from fedbcd.schedule.availability import RULES, Availability, AvailableDevices, PerServer, at_server
from fedbcd.schedule.churn import Changes, Churn
from fedbcd.schedule.deadline import Deadline
from fedbcd.schedule.delays import DELAYS, Clock
from fedbcd.schedule.mixing import weights_of
from fedbcd.schedule.times import TRIED, Times, drawn
from fedbcd.theory.mixing import cut_off

Precision = Literal["float32", "tf32", "bfloat16"]
MOST_THREADS = 4096
CLOUD = ("name", "sync", "coordinator(servers, iterations)", "weights(round, servers)")  # it needs
LOOKED_AT = 4  # rounds whose mixing weights are checked beforehand, of a cloud of one's own
FLOATS = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
A_FLOAT = (
    lambda dtype: dtype.is_floating_point,
    "be a floating-point dtype, such as torch.float32",
)
RENAMED = {"device": "torch_device"}  # options, each with its name of today


def option(default: Any, says: str, **more: Any) -> Any:
    """A field of a description, with a sentence on it.

    must     what holds of its value: pairs of a test, and words for `must ...`
    read     makes a value of plain data, where its type does not say how
    always   an identity names it even where it has its default
    """
    value = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**value, metadata={"says": says, **more})


def at_least(least: int, remedy: str = "") -> tuple[Callable[[Any], bool], str]:
    """A bound, for `must`."""
    return lambda value: value >= least, f"be {least} or more{remedy}"


@dataclass(frozen=True)
class Cluster:
    """Where `train(engine=...)` computes: on the actors of a Ray cluster, each with a shard of the
    devices.

    address  of a running cluster, e.g. "auto" or "head:6379"; without one, Ray is started on this
    machine for the run
    actors   how many shards; by default one per `cpus` that the cluster has (or per `gpus`)
    cpus     of each actor, as Ray counts them
    gpus     of each actor; a fraction shares a GPU, e.g. 0.25 puts four actors on one
    """

    address: str | None = None
    actors: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    name: ClassVar[str] = "cluster"

    def __post_init__(self) -> None:
        fit(self, "engine: ")
        if self.actors is not None and self.actors < 1:
            raise ConfigError(f"actors={self.actors} must be 1 or more")
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise ConfigError(
                f"cpus={self.cpus:g} and gpus={self.gpus:g} must be 0 or more, and not both 0"
            )


# ------------------------------------------------------------------------------------------------
# plain data
def plain(value: Any) -> Any:
    """A value as files and records have it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return sorted(value.items())
    described = value is None or is_dataclass(value) or isinstance(value, tuple)
    return describe(value) if described else _as_text(value)


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(value)


def _dtype(value: Any, where: str) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    elif isinstance(value, type | np.dtype):
        value = _name_in_numpy(value)
    name = convert(value, Literal[tuple(FLOATS)], where)
    return FLOATS[name]  # type: ignore[no-any-return]


def _name_in_numpy(value: Any) -> Any:
    """Of what says a type of numbers there: np.float32, or float."""
    try:
        return np.dtype(value).name
    except TypeError:
        return value


def _changes(value: Any, where: str) -> dict[int, int]:
    """Of members: pairs of device and round."""
    if isinstance(value, Mapping) and all(type(n) is int for pair in value.items() for n in pair):
        return value  # type: ignore[return-value]
    try:
        pairs = convert(
            [*value.items()] if isinstance(value, Mapping) else value,
            tuple[tuple[int, int], ...],
            where,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}; write pairs of device and round, such as [[4, 5]], in Python also {{4: 5}}"
        ) from None
    changes = dict(pairs)
    if len(changes) < len(pairs):
        devices = [device for device, _ in pairs]
        twice = next(device for device in devices if devices.count(device) > 1)
        raise ConfigError(f"{where} names device {twice} twice; keep one round of it")
    return changes


def _of(kinds: Mapping[str, type[Any]], value: Any, where: str, *needs: str) -> Any:
    """A value of one of these kinds, or of somebody else's that has what they need."""
    if isinstance(value, str) and ":" not in value:
        value = {"name": value}
    if isinstance(value, Mapping):
        return choose(kinds, value, where)
    return offered(value, where, *needs, kinds=kinds)


def _clock(value: Any, where: str) -> Clock:
    parts = {"arrival": DELAYS, "step": DELAYS, "speeds": DELAYS}
    return build(Clock, value, where.removeprefix("run."), parts)


def _availability(value: Any, where: str) -> Availability:
    return _of(RULES, value, where, "available(members, round_, u)")  # type: ignore[no-any-return]


def _churn(value: Any, where: str) -> Churn:
    return build(Churn, value, where)


def _deadline(value: Any, where: str) -> Deadline:
    return build(Deadline, value, where)


def _plateau(value: Any, where: str) -> Plateau:
    return build(Plateau, value, where)


def _start(value: Any, where: str) -> str | Path:
    if isinstance(value, str | Path):
        return value
    raise ConfigError(
        f"{where} = {value!r:.40} is no path; give the folder of a finished run, which"
        " train(out=...), Run.save and 'fedbcd run' leave, or its models.safetensors"
    )


def _layers(value: Any, where: str) -> tuple[Layer, ...]:
    if not isinstance(value, list | tuple):
        says = 'must be a list of layers, such as [{name = "integers"}]'
        raise ConfigError(f"{where} = {value!r:.80} {says}")
    return tuple(_of(LAYERS, each, f"{where}[{k}]") for k, each in enumerate(value))


def _engine(value: Any, where: str) -> str | Cluster:
    if isinstance(value, Mapping):
        return choose({Cluster.name: Cluster}, value, where)
    return convert(value, str | Cluster, where)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------
# what is computed
@dataclass(frozen=True, kw_only=True)
class Timing:
    """Who works when."""

    clock: Clock = option(
        Clock, "how long devices take; by default the paper's clock model", read=_clock, always=True
    )
    active: PerServer | None = option(
        None,
        "q, uploads that end a server's phase: a number, or a list with one for each server; by"
        " default 0.3 of the smallest server's devices",
        always=True,
    )
    seed: int = option(
        0,
        "of splits, delays, batches and initial weights",
        must=[
            (
                lambda value: -(1 << 63) <= value < 1 << 63,
                "fit in 64 bits: between -2^63 and 2^63 - 1",
            )
        ],
        always=True,
    )
    joins: Mapping[int, int] = option(
        dict,
        "device -> round: a new device starts from its server's z",
        read=_changes,
        always=True,
    )
    leaves: Mapping[int, int] = option(
        dict,
        "device -> round: it is no longer counted from then on",
        read=_changes,
        always=True,
    )
    availability: Availability | None = option(
        None,
        "who of a server's members can take part in a round: Chance(0.5), or a rule of your own; by"
        " default all, with FedBCD-I 0.8 of them",
        read=_availability,
    )
    churn: Churn | None = option(
        None,
        "a share of the devices that joins, and one that leaves, in each round, by draws:"
        " Churn(joins=0.02, leaves=0.01, rounds=50); devices that `joins` or `leaves` name are"
        " left to these",
        read=_churn,
    )
    deadline: Deadline | None = option(
        None,
        "when a phase ends with those that have come: Deadline(after=60.0, least=5, spare=2); by"
        " default it waits for all of its `active` uploads",
        read=_deadline,
    )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """With which numbers."""

    dtype: torch.dtype = option(
        torch.float32, "of models and steps", must=[A_FLOAT], read=_dtype, always=True
    )
    max_batch: int | None = option(
        None,
        "how many devices train together at most; 1 gives results that do not depend on batching",
        must=[at_least(1)],
        always=True,
    )
    storage: torch.dtype | None = option(
        None,
        "of personal models between sessions: torch.bfloat16 keeps them in half the memory;"
        " arithmetic stays in `dtype`",
        must=[A_FLOAT],
        read=_dtype,
    )
    precision: Precision = option(
        "float32",
        '"tf32" or "bfloat16": products of less precise factors, several times as fast on a GPU;'
        " steps stay in `dtype`",
    )
    start: str | Path | None = option(
        None,
        "the folder of an earlier run, with whose personal and global models this one begins,"
        " without momentum",
        read=_start,
    )
    uploads: Sequence[Layer] = option(
        (),
        "layers between devices and their server's sum, in order: fb.Clip(norm) bounds what one"
        " upload changes, fb.Integers(scale) makes sums whole numbers, which have the same bits in"
        " any order",
        read=_layers,
    )

    @property
    def kept_as(self) -> torch.dtype:
        """Of personal models."""
        return self.storage or self.dtype


@dataclass(frozen=True, kw_only=True)
class Measured:
    """By which measure."""

    measure: Measure | None = option(
        None,
        'of personal accuracy: "own-shares", the default, counts each label by its share of the'
        " device's own samples; \"pooled-labels\", of the recipes, all test samples of the device's"
        ' labels alike; where devices have brought tests of their own it is "own-tests"',
        always=True,
    )

    @property
    def chosen_measure(self) -> Measure:
        """As given, or the default."""
        return self.measure or DEFAULT


# ------------------------------------------------------------------------------------------------
# how long, how it is watched, and where
@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop: one of the first two, or sooner."""

    rounds: int | None = option(
        None, "stop after this many rounds of the coordinator, or", must=[at_least(1)]
    )
    until_clock: float | None = option(
        None,
        "after the first round that ends at this virtual time or later",
        must=[(lambda value: 0 < value < math.inf, "be a finite number above 0")],
    )

    stop: Plateau | None = option(
        None,
        "sooner, where a column of the history no longer gets better: Plateau(column="
        '"personal_accuracy", patience=5) ends after five looks in a row without a better one',
        read=_plateau,
    )

    def check_budget(self, section: str = "") -> None:
        """Refuse a run without an end, or with two; `section` is that of a job file."""
        if self.rounds is not None and self.until_clock is not None and section:
            raise ConfigError(
                f"{section} has both rounds = {self.rounds} and until_clock = {self.until_clock:g};"
                " keep one of them"
            )
        if (self.rounds is None) == (self.until_clock is None):
            raise ConfigError(
                f"{section} needs rounds or until_clock, to say when to stop, e.g. rounds = 100"
                if section
                else "give either rounds=... or until_clock=..., to say when to stop"
            )


@dataclass(frozen=True, kw_only=True)
class Watch:
    """How often to look, and to save."""

    evaluate_every: int | None = option(
        None, "rounds between two rows of the history, or", must=[at_least(1)]
    )
    looks: int | None = option(
        None,
        "how many rows there are to be, about; by default up to 20, so far apart that they take"
        " under 30 % of the time",
        must=[at_least(1)],
    )
    certify_every: int | None = option(
        None,
        "one row in this number holds certificates (gap, pull, spread), 0: none; by default as many"
        " as add under 4 % to the work so far, and the summary at the end",
        must=[at_least(0, "; 0 computes none")],
    )
    certify_devices: int | None = option(
        None,
        "how many devices the gap is taken on: it needs their exact gradients; 8 by default, fewer"
        " in a very short run",
        must=[at_least(1, "; certify_every=0 computes no certificates")],
    )
    device_tables: bool = option(
        False,
        "keeps the scores of every device at each row of the history, too: run.device_tables, and"
        " devices-ROUND.csv with `out`",
    )
    checkpoint_every: int | None = option(
        None,
        "rounds between two checkpoints (with `out`); by default as often as evaluations",
        must=[at_least(1)],
    )
    checkpoint_seconds: float = option(
        60.0,
        "after so many seconds there is a checkpoint in any case, unless writing one takes more"
        " than a tenth of that; 0: never for that reason",
        must=[at_least(0, "; 0 makes none by time")],
    )
    best: str | None = option(
        None,
        "the column of the history by which the models of the best look are kept beside the last"
        " (`run.best`); by default that of `stop`, or that of the devices' validation samples where"
        " they hold some",
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where it is computed, and how: a digest may depend on it in its last bits, a run does not."""

    torch_device: str | torch.device = option("cpu", "where torch computes: cpu, cuda, cuda:1")
    threads: int | None = option(
        None,
        "of torch; by default as many as it has, and in jobs 1 for small models, where more only"
        " wait for each other",
        must=[
            at_least(1),
            (
                lambda value: value <= MOST_THREADS,
                f"be {MOST_THREADS} or less; more than there are cores do not help",
            ),
        ],
    )
    state: str | Path | None = option(
        None,
        "a folder to keep personal models in, where they are more than memory holds; only active"
        " ones are then resident",
    )
    ahead: bool | None = option(
        None,
        "without events between rounds, which are then recorded once and replayed: by default on a"
        " GPU, where the schedule allows it; with `out` their events are played beside them, for"
        " the log",
    )
    compile: bool = option(
        False,
        "with `ahead`: fuse what is between the matrix products by torch.compile; takes a minute at"
        " first, for long runs",
    )
    engine: str | Cluster = option(
        "simulate",
        '"cluster", or a Cluster(...), spreads the devices over the actors of a Ray cluster'
        " (docs/cluster.md)",
        read=_engine,
    )


ENDS = ("rounds", "until_clock")  # of which a run has one
PARTS = (Timing, Numerics, Measured, Budget, Watch, Place)
IDENTITY = (Timing, Numerics, Measured)  # the parts that determine the numbers


@settings
@dataclass(frozen=True)
class RunSpec(Place, Watch, Budget, Measured, Numerics, Timing):
    """A run, beyond its federation."""

    algorithm: Algorithm
    cloud: Cloud = field(default_factory=SyncCloud)

    def __post_init__(self) -> None:
        """Everything as its type asks; kinds without settings may be given by their names."""
        for name in OPTIONS:
            object.__setattr__(self, name, _read(name, getattr(self, name), name))
        for name, kinds, needs in (
            ("algorithm", ALGORITHMS, ("method(facts)",)),
            ("cloud", CLOUDS, CLOUD),
        ):
            object.__setattr__(self, name, _of(kinds, getattr(self, name), name, *needs))

    # ---------------------------------------------------------------------------------------------
    # changes
    def changed(self, said: Mapping[str, Any]) -> "RunSpec":
        """With what is said, where it is not None; to say when to stop replaces what was said of
        it.
        """
        changes = {name: value for name, value in said.items() if value is not None}
        if changes.keys() & set(ENDS):
            changes = dict.fromkeys(ENDS) | changes
        return replace(self, **changes)

    def going_on(self, record: Mapping[str, Any]) -> "RunSpec":
        """As recorded where it says nothing: a record is a job's table, or the identity of a
        run.
        """
        algorithm = going_on(self.algorithm, record.get("algorithm"))
        return replace(self, algorithm=algorithm, measure=self.measure or measure_in(record))

    # ---------------------------------------------------------------------------------------------
    # files and records
    @classmethod
    def from_table(cls, table: Mapping[str, Any], active: PerServer | None = None) -> "RunSpec":
        """What a job file says, in its sections algorithm, cloud, clock and run."""
        said: dict[str, Any] = {"algorithm": FedBCD(), "active": active}
        for key, kinds, usual in (
            ("algorithm", ALGORITHMS, FedBCD.name),
            ("cloud", CLOUDS, SyncCloud.name),
        ):
            if key in table:
                given = table[key]
                named = {"name": usual, **given} if isinstance(given, Mapping) else given
                said[key] = choose(kinds, named, key)
        if "clock" in table:
            said["clock"] = _clock(table["clock"], "clock")
        run = table.get("run", {"rounds": 100})
        if not isinstance(run, Mapping):
            raise ConfigError(f"[run] must be a table, not {run!r}")
        run = follow_renamed(run, RENAMED, "[run] ")
        check_keys(run, IN_RUN, "run")
        spec = cls(**said, **{key: _read(key, value, f"run.{key}") for key, value in run.items()})
        spec.check_values("run.")
        spec.check_budget("[run]")
        return spec

    def to_table(self) -> dict[str, Any]:
        """Sections that make it again, with all that there is to say."""
        return {
            "algorithm": describe(self.algorithm),
            "cloud": describe(self.cloud),
            "run": {name: plain(getattr(self, name)) for name in IN_RUN}
            | {"measure": self.chosen_measure},  # whatever the default is when this is read
            "clock": plain(self.clock),
        }

    def identity(self, federation: Federation) -> dict[str, Any]:
        """What makes this run this run and no other, as plain data. How long it runs, and where, is
        not part of it. An option that has been added since is named where it is not at its default.
        """
        settled = replace(
            self,
            active=self.active_of(federation),
            measure=measure_for(federation, self.measure),
            start=named(self.start),
        )
        chosen = {
            f.name: plain(getattr(settled, f.name))
            for part in IDENTITY
            for f in fields(part)
            if f.metadata.get("always") or getattr(settled, f.name) != default_of(f)
        }
        augment = federation.augment
        own = is_own(type(self.algorithm))
        return {
            "algorithm": in_record(self.algorithm),
            "cloud": describe(self.cloud),
            # readers of records do not import what others have written
            **({"personal": self.method_of(federation).has_personal} if own else {}),
            **shortened(chosen, "run"),
            "servers": federation.servers,
            "data": federation.fingerprint(),
            "augment": describe(augment)
            if is_dataclass(augment)
            else getattr(augment, "name", None),
            "model": _model_fingerprint(federation.make_model(self.seed)),
        }

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> "RunSpec":
        """The run of an identity; KeyError, TypeError or ValueError where it is not one."""
        said = completed(identity, "run")
        options = [f for part in IDENTITY for f in fields(part)]
        return cls(
            algorithm=choose(ALGORITHMS, completed(identity["algorithm"]), "algorithm"),
            cloud=choose(CLOUDS, identity["cloud"], "cloud"),
            **{
                f.name: _read(f.name, said[f.name], f.name)
                for f in options
                if f.name in said or f.metadata.get("always")
            },
        )

    def method_of(self, federation: Federation) -> Method:
        """What the algorithm computes, in this federation."""
        return method_of(self.algorithm, Facts(federation.devices, federation.sizes))

    def sent(self, federation: Federation) -> tuple[float, float]:
        """Bytes that a device receives and sends in an activation, where it matters."""
        if self.clock.bandwidth is None:
            return 0.0, 0.0
        bound = _bound(self, federation)
        return bound.heard.size * self.dtype.itemsize, bound.upload.size * self.dtype.itemsize

    def times(self, federation: Federation) -> Times:
        """How long its devices take."""
        return Times(self.clock, self.seed, federation.servers, self.sent(federation))

    def changes(self, federation: Federation) -> tuple[Changes, Changes]:
        """Device -> round in which it joins, and leaves: those that are named, and those that churn
        draws.
        """
        if self.churn is None:
            return self.joins, self.leaves
        joins, leaves = (
            {i: t for i, t in drawn.items() if i not in self.joins and i not in self.leaves}
            for drawn in self.churn.drawn(self.seed, federation.devices)
        )
        return {**joins, **self.joins}, {**leaves, **self.leaves}

    # ---------------------------------------------------------------------------------------------
    # checks
    def active_of(self, federation: Federation) -> PerServer:
        """q: as given (one number, where all servers have the same), or 0.3 of the smallest
        server's members.
        """
        if self.active is None:
            return max(1, round(0.3 * min(self._members(federation))))
        alike = not isinstance(self.active, int) and len(set(self.active)) == 1
        return at_server(self.active, 0) if alike else self.active

    def _members(self, federation: Federation) -> list[int]:
        joins, _ = self.changes(federation)
        return [sum(device not in joins for device in members) for members in federation.servers]

    def check_values(self, section: str = "") -> None:
        """Refuse what no federation makes right; `section` goes before names, "run." in job
        files.
        """
        for name in OPTIONS:
            value = getattr(self, name)
            for holds, what in OPTIONS[name].metadata.get("must", ()):
                if value is not None and not holds(value):
                    shown = f"{value!s:.80}"
                    said = f"{section}{name} = {shown}" if section else f"{name}={shown}"
                    raise ConfigError(f"{said} must {what}")
        if self.precision != "float32" and self.dtype != torch.float32:
            raise ConfigError(
                f"precision={self.precision!r} is about products of float32 numbers; leave"
                f" dtype={self.dtype} out"
            )
        if not is_dataclass(self.algorithm):
            raise ConfigError(
                f"algorithm={self.algorithm!r:.80} is no frozen dataclass, whose fields are what"
                " records say of it; make it one (docs/api.md)"
            )
        check_layers(self.uploads)

    def check(self, federation: Federation) -> None:
        """Refuse what cannot be, before anything is written."""
        self.check_values()
        self._check_changes(federation)
        self._check_active(federation)
        self._check_availability(federation)
        self._check_method(federation)
        if any(is_own(type(part)) for part in (self.algorithm, *self.uploads)):
            _bound(self, federation)  # refuses what does not fit the model
        check_tests(federation, self.measure)
        if self.stop is not None:
            _check_column("stop.column", self.stop.column, federation)
        if self.best is not None:
            _check_column("best", self.best, federation)
        self.times(federation)  # refuses whom nobody knows
        for law in (self.clock.arrival, self.clock.step):
            drawn(law, TRIED[1])
        self._check_coordinator(len(federation.servers))
        if isinstance(self.cloud, GraphCloud):
            for matrix in self.cloud.mixing:
                check_doubly_stochastic(torch.tensor(matrix, dtype=torch.float64))
        elif isinstance(self.cloud, DynamicGraph):
            parts = cut_off(len(federation.servers), chain(*self.cloud.edges))
            if len(parts) > 1:
                raise ConfigError(
                    f"edges never connect servers {parts[1]} with servers {parts[0]}, in no round;"
                    " add a link between them"
                )
        elif is_own(type(self.cloud)):
            for round_ in range(LOOKED_AT):
                weights_of(self.cloud, round_, range(len(federation.servers)))

    def _check_coordinator(self, servers: int) -> None:
        """What a cloud of somebody's own makes must be one, and of the kind that it says."""
        with calling("cloud={!r:.80} fails", self.cloud, remedy=f"it needs {CLOUD[2]}"):
            found: Any = self.cloud.coordinator(servers, 1)
        if not all(hasattr(found, name) for name in ("round", "handle", "ends_round")):
            raise ConfigError(
                f"cloud={self.cloud!r:.80}: its coordinator is {found!r:.80}; it must have round,"
                " handle(event) and ends_round(ready), as those of fedbcd.protocol.coordinator have"
            )
        known = isinstance(found, SyncCoordinator | AsyncCoordinator | RigorousCoordinator)
        if known and isinstance(found, SyncCoordinator) != self.cloud.sync:
            raise ConfigError(
                f"cloud={self.cloud!r:.80} has sync={self.cloud.sync}, but its coordinator is"
                f" {type(found).__name__}: one z for all servers needs sync=True and"
                " SyncCoordinator, others sync=False and another"
            )

    def _check_method(self, federation: Federation) -> None:
        method, sync = self.method_of(federation), self.cloud.sync
        check_layers(self.uploads, discount=method.discount is not None)
        largest = max(method.weights(federation.sizes))
        method.penalties(federation.devices)  # refuses a wrong number of them
        if method.cloud != "any" and sync != (method.cloud == "sync"):
            which, instead = (
                ("one z for all servers", "sync")
                if method.cloud == "sync"
                else ("a z for each server", "async")
            )
            raise ConfigError(
                f"{method.name} is for clouds with {which}, and the {self.cloud.name} cloud is none"
                f" of them; use the {instead} cloud"
            )
        if method.forgets_mixes and not sync:
            raise ConfigError(
                f"{method.name} runs on the sync cloud only, not {self.cloud.name}: a server step"
                " of 1 after the mix forgets the mix; order = 'step, mix' would not"
            )
        if isinstance(method.step, Absolute):
            sizes = [len(members) for members in federation.servers]  # with those that join late
            check_absolute_step(method.step.step, largest, sum(sizes) if sync else max(sizes))

    def _check_active(self, federation: Federation) -> None:
        method, members, given = self.method_of(federation), self._members(federation), self.active
        if isinstance(given, tuple) and len(given) != len(members):
            raise ConfigError(
                f"active={given} has {len(given)} numbers for {len(members)} servers; give one for"
                " each, or one for all"
            )
        late = " at the start" if self.changes(federation)[0] else ""
        each = self.active_of(federation)
        for n, there in enumerate(members):
            active = at_server(each, n)
            if isinstance(given, tuple) and not 1 <= active <= there:
                raise ConfigError(
                    f"active[{n}]={active} must be between 1 and {there}, the members of server"
                    f" {n}{late}"
                )
            if not 1 <= active <= there:
                raise ConfigError(
                    f"active={active} must be between 1 and {min(members)}, the members of the"
                    f" smallest server{late}; a list has a number for each server"
                )
            name = f"active[{n}]" if isinstance(given, tuple) else "active"
            _check_at_work(method, name, active, there)
            if self.deadline is not None and self.deadline.least > active:
                raise ConfigError(
                    f"deadline.least={self.deadline.least} must be at most active={active}, the"
                    " uploads that end a phase anyway"
                )

    def _check_availability(self, federation: Federation) -> None:
        if self.availability is None:
            return
        method, active = self.method_of(federation), self.active_of(federation)
        for n, members in enumerate(federation.servers):
            pool = AvailableDevices(method, at_server(active, n), self.seed, self.availability)
            pool.available(np.array(members), 0)

    def _check_changes(self, federation: Federation) -> None:
        for name, changes in (("joins", self.joins), ("leaves", self.leaves)):
            for device, when in changes.items():
                if not (0 <= device < federation.devices and when >= 1):
                    raise ConfigError(
                        f"{name}[{device}]={when} must name a device below {federation.devices} and"
                        " a round from 1 on"
                    )
        for device in set(self.joins) & set(self.leaves):
            if self.leaves[device] <= self.joins[device]:
                raise ConfigError(
                    f"device {device} leaves in round {self.leaves[device]} but joins in"
                    f" {self.joins[device]} only"
                )
        joins, leaves = self.changes(federation)
        for n, members in enumerate(federation.servers):
            empty = _first_empty(members, joins, leaves)
            if empty is not None:
                remedy = "keep at least one that neither joins late nor leaves"
                if self.churn is not None:
                    remedy = "use smaller shares or fewer rounds of churn, or another seed"
                raise ConfigError(
                    f"server {n} would be left without devices in round {empty}; {remedy}"
                )


def _bound(spec: RunSpec, federation: Federation) -> Bound:
    """Its method for the model and the devices, before anything is trained."""
    module = federation.make_model(spec.seed)
    layout = Layout(module)
    wiring = spec.uploads, layout.flatten(module, spec.dtype), max(map(len, federation.servers))
    return Bound(spec.method_of(federation), layout, federation.sizes, wiring)


def _check_at_work(method: Method, name: str, active: int, members: int) -> None:
    """Refuse more uploads than a server of so many members can get."""
    if method.at_once is not None and method.at_once < active:
        raise ConfigError(
            f"{method.name}: at_once={method.at_once} must be {name}={active} or more: {active}"
            " uploads end a phase"
        )
    if method.available is not None and active > (available := method.available_of(members)):
        raise ConfigError(
            f"{name}={active} exceeds the {available} available devices of a server; use {name} <="
            f" {available}"
        )


def _first_empty(members: Sequence[int], joins: Changes, leaves: Changes) -> int | None:
    """The first round in which none of them is there; None: there is always one."""
    moves = {0, *(times[i] for times in (joins, leaves) for i in members if i in times)}
    for now in sorted(moves):
        if not any(joins.get(i, 0) <= now < leaves.get(i, now + 1) for i in members):
            return now
    return None


def _check_column(where: str, column: str, federation: Federation) -> None:
    """Refuse a column that cannot decide anything."""
    known = federation.known_measures()
    validation = bool(federation.validation)
    column = deciding(column, known, validation)
    columns = columns_of(known, validation)[len(PLACE) :]
    if column not in columns:
        raise ConfigError(
            f"{where}={column!r} is no column that can decide{nearest(column, columns)}; there are"
            f" {', '.join(columns)}"
        )
    if scored_in(column, known) is not None and federation.test is None:
        raise ConfigError(
            f"{where}={column!r} is a score on test samples, and there are none; give Federation"
            " test=... or holdout=..., or name another column"
        )


def default_of(each: Field[Any]) -> Any:
    """What an option is where nothing is said."""
    return each.default_factory() if callable(each.default_factory) else each.default


OPTIONS: dict[str, Field[Any]] = {f.name: f for part in PARTS for f in fields(part)}
IN_RUN = [name for name in OPTIONS if name not in ("clock", "active")]  # they have sections
for section, others in (("cloud", CLOUDS), ("algorithm", ALGORITHMS)):
    HOMES.update({f.name: section for kind in others.values() for f in fields(kind) if f.init})
HOMES.update(dict.fromkeys(IN_RUN, "run"))
for kind in (*CLOUDS.values(), *reversed(ALGORITHMS.values())):
    PLACES.update({f.name: f"fb.{kind.__name__}({f.name}=...)" for f in fields(kind) if f.init})
PLACES.update({name: f"fb.train(..., {name}=...)" for name in ("cloud", *OPTIONS)})
PLACES["optimizer"] = "of FedAvg, FedProx and Local; the paper's devices take ASPG steps"
HINTS = get_type_hints(RunSpec)


def _read(name: str, value: Any, where: str) -> Any:
    """An option from plain data."""
    read = OPTIONS[name].metadata.get("read")
    if read is None or (value is None and OPTIONS[name].default is None):
        return convert(value, HINTS[name], where)
    return read(value, where)


def in_words() -> str:
    """Every option with its sentence, for `help`."""
    return "\n".join(f"    {name:<18}{f.metadata['says']}" for name, f in OPTIONS.items())


def _model_fingerprint(module: nn.Module) -> str:
    """A hash of a module's tensors: their names, shapes and initial values."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
