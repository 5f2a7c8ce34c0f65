"""A job file: what to train on what, how, for how long. One run, or several under `[[runs]]` that
each change some of it.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedbcd.algorithm.augment import FlipCrop
from fedbcd.algorithm.method import Facts, Method, method_of
from fedbcd.algorithm.methods import FedBCD
from fedbcd.algorithm.objective import Loss
from fedbcd.config import (
    HOMES,
    PLACES,
    build,
    check_keys,
    convert,
    nearest,
    read_toml,
    renamed_keys,
)
from fedbcd.data.datasets import DATASETS, LoadedDataset
from fedbcd.data.federation import Federation
from fedbcd.data.given import Data, load_data, sizes_of, targets_of
from fedbcd.data.holdout import Holdout
from fedbcd.data.measure import measure_for
from fedbcd.data.measures import KNOWN, Measure, Metric, mse_loss
from fedbcd.data.partition import Diversity, Partition, Partitioner
from fedbcd.describe import describe
from fedbcd.engines.joining import joined
from fedbcd.engines.result import Run
from fedbcd.engines.run import train
from fedbcd.engines.saving import folder_of
from fedbcd.engines.setup import find_torch_device, rehearse
from fedbcd.errors import ConfigError
from fedbcd.models import MODELS
from fedbcd.own import are_imported, imported_function, imports, names_code
from fedbcd.record.runfolder import recorded_in
from fedbcd.recorded import completed
from fedbcd.schedule.availability import PerServer, at_server
from fedbcd.spec import OPTIONS, RENAMED, RunSpec, plain

Load = Callable[[str, Path | None], Data]
LOSSES: dict[str, Loss] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": mse_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """Which data, and how they are split over the devices."""

    name: str = "digits"  # see `fedbcd models`, or your own as "package.module:function"
    folder: str | None = None  # where its files are; FEDBCD_DATA by default
    diversity: int = 3  # labels per device
    samples: int = 60  # samples per device
    dealt: bool = False  # of diversity and samples: no sample goes to two devices
    partition: Partitioner | None = (
        None  # another split, chosen by name from PARTITIONS, in place of diversity and samples
    )
    manifest: str | None = None  # a split that was saved, in place of any other
    augment: Literal["none", "flip-crop"] | None = (
        None  # of training images; flip-crop for cifar10, none for the others
    )
    holdout: float = 0.0  # share of each device's samples that its model is tested on
    validation: float = 0.0  # and validated on

    def __post_init__(self) -> None:
        if self.name not in DATASETS and ":" not in self.name:
            raise ConfigError(
                f"data.name = {self.name!r} is unknown{nearest(self.name, DATASETS)}; known:"
                f' {", ".join(DATASETS)}, or your own as "package.module:function"'
            )
        if self.samples < 1:
            raise ConfigError(f"data.samples = {self.samples} must be 1 or more")
        if not isinstance(self.partition, Partitioner | None):
            raise ConfigError(
                f"data.partition = {self.partition!r:.80} is none; let it extend"
                " fedbcd.data.partition.Partitioner, with deal(pool, devices, seed)"
            )
        if self.partition is not None and self.manifest is not None:
            raise ConfigError(
                f"[data] has both a partition and manifest = {self.manifest!r}; keep one of them"
            )
        if self.dealt and (self.partition is not None or self.manifest is not None):
            raise ConfigError(
                "data.dealt = true is about diversity and samples, but [data] names another split;"
                ' leave it out, or say partition = { name = "diversity", ..., dealt = true }'
            )

    def kept_back(self, seed: int) -> Holdout:
        """What devices do not train on, drawn by the seed of the run."""
        return Holdout(self.holdout, self.validation, seed)

    def split(self, data: LoadedDataset, devices: int, seed: int) -> Partition:
        if self.manifest is None:
            partitioner = self.partition or Diversity(self.diversity, self.samples, self.dealt)
            return partitioner.split(data.train.targets, devices, seed, data.columns)
        saved = Partition.load(self.manifest, data.train.targets)
        if len(saved.samples) != devices:
            raise ConfigError(
                f"data.manifest = {self.manifest!r} is of {len(saved.samples)} devices, but"
                f" [federation] has {devices}"
            )
        return saved

    def check_dealt(self, found: int, devices: int) -> None:
        """Refuse a split of data that come by device, and another number of devices."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in NO_SPLIT and value != each.default:
                raise ConfigError(
                    f"data.{each.name} = {value!r:.80} is about a split, but data.name ="
                    f" {self.name!r} gives the data of each device; leave data.{each.name} out"
                )
        if found != devices:
            raise ConfigError(
                f"data.name = {self.name!r} gives the data of {found} devices, but [federation] has"
                f" {devices}; let servers times devices, and newcomers, be {found}"
            )


# of [data], what data that come by device may have, too
NO_SPLIT = ("name", "folder", "augment", "holdout", "validation")
MOST_DEVICES = 100_000_000  # a slip of the pen must not take all memory


@dataclass(frozen=True, kw_only=True)
class FederationPart:
    """Who there is."""

    servers: int = 10
    devices: PerServer = 10  # per server, or a list with the number of each
    # devices more that are kept out of the run; at the end they get models from z
    newcomers: int = field(default=0, metadata={"brief": True})
    # how many local steps they take
    newcomer_steps: int = field(default=20, metadata={"brief": True})

    def __post_init__(self) -> None:
        each = [self.devices] if isinstance(self.devices, int) else self.devices
        for name, value in (("servers", self.servers), *(("devices", count) for count in each)):
            if value < 1:
                raise ConfigError(f"federation.{name} = {value} must be 1 or more")
        for name, least in (("newcomers", 0), ("newcomer_steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"federation.{name} = {getattr(self, name)} must be {least} or more"
                )
        if not isinstance(self.devices, int) and len(self.devices) != self.servers:
            raise ConfigError(
                f"federation.devices = {list(self.devices)} has {len(self.devices)} numbers, but"
                f" federation.servers = {self.servers}; give one for each server"
            )
        if self.total > MOST_DEVICES:
            raise ConfigError(
                f"federation.servers = {self.servers} with {self.devices} devices each are more"
                f" than {MOST_DEVICES:,} devices; use fewer"
            )

    @property
    def total(self) -> int:
        """Devices of all servers."""
        each = self.devices
        return self.servers * each if isinstance(each, int) else sum(each)

    @property
    def groups(self) -> list[range]:
        """The devices of each server, one after the other."""
        each = self.devices
        counts = [each] * self.servers if isinstance(each, int) else each
        return [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]

    def check_active(self, active: PerServer) -> None:
        if isinstance(active, tuple) and len(active) != self.servers:
            raise ConfigError(
                f"federation.active = {list(active)} has {len(active)} numbers, but"
                f" federation.servers = {self.servers}; give one for each server, or one for all"
            )
        alike = isinstance(active, int) and isinstance(self.devices, int)
        for n in range(1 if alike else self.servers):
            q, members = at_server(active, n), at_server(self.devices, n)
            if q < 1:
                raise ConfigError(f"federation.active = {q} must be 1 or more")
            if q > members:
                raise ConfigError(
                    f"federation.active = {q} exceeds the {members} devices of"
                    f" {'a server' if alike else f'server {n}'}; use active <= {members}"
                )


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Which network, and what it is trained and tested by: names that are known, or your own as
    "package.module:function".
    """

    name: str = "mlp"
    hidden: tuple[int, ...] = (64, 32)  # widths of the hidden layers of an mlp
    norm: Literal["batch", "group"] = "batch"  # normalisation of a resnet20
    loss: str | None = None  # cross_entropy; mse where targets are numbers
    metric: str | None = None  # what fits loss and targets; or one of these, or your own
    metrics: tuple[str, ...] = ()  # several of them

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ConfigError(
                f"model.hidden = {list(self.hidden)} must be widths of 1 or more, e.g. [64, 32]"
            )

    def factory(self, data: Data | None) -> Callable[[], nn.Module]:
        """A callable that makes the module; only one of your own can do without the data that it is
        for.
        """
        if ":" in self.name:
            return imported_function(self.name, "model.name", "makes the module")
        if data is None:
            raise ConfigError(
                f"model.name = {self.name!r} needs a data set to fit; name your own as"
                ' "package.module:factory"'
            )
        if self.name not in MODELS:
            raise ConfigError(
                f"model.name = {self.name!r} is unknown{nearest(self.name, MODELS)}; known:"
                f' {", ".join(MODELS)}, or your own as "package.module:factory"'
            )
        inputs, classes = sizes_of(data)
        if self.name == "resnet20":
            return partial(MODELS[self.name], classes=classes, norm=self.norm)
        options = {"hidden": self.hidden} if self.name == "mlp" else {}
        return partial(MODELS[self.name], inputs=inputs, classes=classes, **options)

    def function(self, kind: str, known: Mapping[str, Any]) -> Any:
        """The loss; None where none is named."""
        name = getattr(self, kind)
        return self._known(name, kind, known)

    def chosen_metrics(self) -> list[Measure | Metric]:
        """Those that are named."""
        if self.metric is not None and self.metrics:
            raise ConfigError(
                f"model.metric = {self.metric!r} and model.metrics are both given; put all into"
                " metrics"
            )
        named = self.metrics if self.metric is None else (self.metric,)
        return [self._known(name, "metrics", KNOWN) for name in named]

    def _known(self, name: str | None, kind: str, known: Mapping[str, Any]) -> Any:
        if name is None or name in known:
            return known[name] if name else None
        if ":" in name:
            return imported_function(name, f"model.{kind}", "takes (outputs, targets)")
        raise ConfigError(
            f"model.{kind} = {name!r} is unknown{nearest(name, known)}; known:"
            f' {", ".join(known)}, or your own as "package.module:function"'
        )


ACTIVE = 3  # q, where a job file is silent
for section, part in (("data", DataPart), ("federation", FederationPart), ("model", ModelPart)):
    HOMES.update({key.name: section for key in fields(part) if key.name != "name"})
HOMES["active"] = "federation"
PLACES["sweep"] = "for 'fedbcd sweep'"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, with the data and the model that it is about."""

    title: str = ""
    data: DataPart = field(default_factory=DataPart)
    federation: FederationPart = field(default_factory=FederationPart)
    model: ModelPart = field(default_factory=ModelPart)
    spec: RunSpec = field(default_factory=lambda: RunSpec.from_table({}, ACTIVE))
    may_import: bool = True  # its code; one that was read from a record may not, unless told
    modules: str = ""  # the folder in which code that it names is found, too

    @property
    def name(self) -> str:
        return self.title or f"{self.method.name} {self.spec.cloud.name}"

    @property
    def method(self) -> Method:
        """What its algorithm computes, as far as it is known without the data."""
        return method_of(self.spec.algorithm, Facts(self.devices, (1,) * self.devices))

    @property
    def devices(self) -> int:
        """Of all servers."""
        return self.federation.total

    @property
    def active(self) -> PerServer:
        """q: a job names it, or has 3."""
        return ACTIVE if self.spec.active is None else self.spec.active

    def to_table(self) -> dict[str, Any]:
        parts = {key: describe(getattr(self, key)) for key in ("data", "federation", "model")}
        parts["federation"]["active"] = plain(self.active)
        table = {"title": self.name, **parts, **self.spec.to_table()}
        if ":" in self.data.name and self.spec.measure is None:
            del table["run"]["measure"]  # the data say, once they are there: `settled`
        return table | ({"modules": self.modules} if self.modules and names_code(table) else {})

    def changed(self, **said: Any) -> "Job":
        """With other options of its run; None leaves one as it is."""
        return replace(self, spec=self.spec.changed(said))

    def settled(self, federation: Federation) -> "Job":
        """With the measure that its data ask for, as it is recorded."""
        return self.changed(measure=measure_for(federation, self.spec.measure))

    def going_on(self, record: Mapping[str, Any]) -> "Job":
        """This job, as recorded where it says nothing: a record is a job's table, or the identity
        of a run.
        """
        return replace(self, spec=self.spec.going_on(record))

    def model_factory(self, data: Data | None = None) -> Callable[[], nn.Module]:
        """What makes the network."""
        with imports(self.may_import, self.modules):
            return self.model.factory(data)

    def loss(self, targets: torch.Tensor) -> Loss:
        """As named, or as fits these targets."""
        with imports(self.may_import, self.modules):
            named: Loss | None = self.model.function("loss", LOSSES)
        return named or LOSSES["mse" if targets.is_floating_point() else "cross_entropy"]

    def make_federation(self, load: Load = load_data) -> Federation:
        """Load the data, split them, and put the model to them."""
        there = self.federation
        alike = isinstance(there.devices, int)
        return self._federation_of(
            slice(self.devices), there.servers if alike else there.groups, load
        )

    def newcomers(self, load: Load = load_data) -> Federation | None:
        """Those who are kept out, on the same test samples."""
        there = self.federation.newcomers
        return self._federation_of(slice(self.devices, None), 1, load) if there else None

    def _federation_of(
        self, who: slice, servers: int | Sequence[Sequence[int]], load: Load
    ) -> Federation:
        """Of some of those among whom the data are split."""
        folder = None if self.data.folder is None else Path(self.data.folder)
        with imports(self.may_import, self.modules):
            data = load(self.data.name, folder)
            metrics = self.model.chosen_metrics()
        given = (self.model_factory(data), self.loss(targets_of(data)))
        beside: dict[str, Any] = {
            "transform": data.transform,
            "metrics": metrics,
            "augment": self._augment(),
            "holdout": self.data.kept_back(self.spec.seed),
        }
        everyone = self.devices + self.federation.newcomers
        if isinstance(data, LoadedDataset):
            split = self.data.split(data, everyone, self.spec.seed).of_devices(who)
            return Federation.from_partition(
                *given, data.train, split, servers, test=data.test, **beside
            )
        self.data.check_dealt(len(data.devices), everyone)
        return Federation(*given, data.devices[who], servers, test=data.test, **beside)

    def _augment(self) -> FlipCrop | None:
        chosen = self.data.augment or ("flip-crop" if self.data.name == "cifar10" else "none")
        return FlipCrop() if chosen == "flip-crop" else None

    def check(self, federation: Federation, out: Path, resume: bool) -> None:
        """Refuse what `run` would refuse, before anything is trained or written."""
        find_torch_device(self.spec.torch_device)
        job = (self.going_on(recorded_in(out)) if resume else self).settled(federation)
        job.spec.check(federation)
        if names_code(job.to_table()):
            rehearse(job.spec, federation)
        folder_of(out, federation, job.spec, job.to_table()).inspect(resume)

    def use_threads(self, federation: Federation) -> None:
        if self.spec.threads is not None or _is_small(federation):
            torch.set_num_threads(self.spec.threads or 1)

    def run(
        self,
        out: Path | str | None = None,
        *,
        resume: bool = False,
        federation: Federation | None = None,
        **more: Any,
    ) -> Run:
        """Train; `more` are options of `fedbcd.train`, which change those of the file, and its
        callbacks. `federation` is the job's own, where it has been made before.
        """
        named = [name for name in ("algorithm", "cloud", *OPTIONS) if name in more]
        job = self.changed(**{name: more.pop(name) for name in named})
        if out is not None and resume:
            job = job.going_on(recorded_in(Path(out)))
        federation = federation or job.make_federation()
        job = job.settled(federation)
        job.use_threads(federation)
        run = train(federation, job.spec, out=out, resume=resume, record=job.to_table(), **more)
        newcomers = job.newcomers() if run.finished else None
        if newcomers is not None:
            steps = job.federation.newcomer_steps
            run.summary["newcomers"] = joined(run, job.spec, newcomers, steps)
        return run


class Federations:
    """Those of several jobs in turn: data sets are loaded once, and split anew where the next job
    has another split.
    """

    def __init__(self) -> None:
        self._load = cache(load_data)
        self._last: tuple[Any, Federation] | None = None

    def of(self, job: Job) -> Federation:
        key = (job.data, job.federation, job.model, job.spec.seed, job.modules)
        if self._last is None or self._last[0] != key:
            self._last = key, job.make_federation(self._load)
        return self._last[1]


def load_job(path: str | Path, run: str | None = None) -> Job:
    """The job of a file, to look at, change and `run`; of several in one file, the one called
    `run`.
    """
    path = Path(convert(path, str | Path, "path"))
    jobs = {job.name: job for job in parse(read_job_file(path))}
    if run is None and len(jobs) == 1:
        return next(iter(jobs.values()))
    if run not in jobs:
        said = f"none is called {run!r}{nearest(run, jobs)}" if run else "name one of them"
        raise ConfigError(f"{path} has {len(jobs)} runs ({', '.join(map(repr, jobs))}): {said}")
    return jobs[run]


SMALL_PARAMETERS = 50_000  # parameters; below, a step takes less time than waking a second thread
SECTIONS = ("data", "federation", "model", "algorithm", "cloud", "clock", "run")


def read_job_file(path: Path) -> dict[str, Any]:
    """As a table that says where its modules are: in the file's own folder, or one named from
    there.
    """
    table = read_toml(path)
    modules = convert(table.get("modules", ""), str, "modules")
    return table | {"modules": str((path.parent / modules).resolve())}


def default_table() -> dict[str, Any]:
    return read_toml(Path(str(files("fedbcd.experiments") / "default.toml")))


def seeds_in(table: Mapping[str, Any]) -> int:
    """With how many seeds each run of a job file is to be played: `[run] seeds`."""
    run = table.get("run", {})
    seeds: int = convert(run.get("seeds", 1) if isinstance(run, Mapping) else 1, int, "run.seeds")
    if seeds < 1:
        raise ConfigError(f"run.seeds = {seeds} must be 1 or more")
    return seeds


def parse(table: Mapping[str, Any], recorded: bool = False) -> list[Job]:
    """The jobs of a job file: one, or one per entry of `[[runs]]`, each with its own changes.

    recorded   the table is a record of what was run, so where it says nothing it means what was
    done then; and it may not import code, unless that is allowed around this call
    """
    with imports(allowed=not recorded):
        return _parsed(table, recorded)


def _parsed(table: Mapping[str, Any], recorded: bool) -> list[Job]:
    check_keys(
        table, {*SECTIONS, "title", "runs", "deploy", "modules"}, ""
    )  # [deploy] is for `fedbcd up` and the roles
    runs = table.get("runs", [{}])
    if not (isinstance(runs, list) and runs and all(isinstance(entry, Mapping) for entry in runs)):
        raise ConfigError("runs must be a list of tables, written [[runs]]")
    base = {key: value for key, value in table.items() if key != "runs"}
    seeds_in(table)  # not of one run, but how many there are
    if isinstance(run := base.get("run"), Mapping):
        base["run"] = {key: value for key, value in run.items() if key != "seeds"}
    jobs = []
    for number, entry in enumerate(runs):
        check_keys(entry, {*SECTIONS, "title", "modules"}, f"runs #{number + 1}")
        job = {**base, **{key: merged(base.get(key), value) for key, value in entry.items()}}
        with imports(allowed=False, folder=str(job.get("modules", ""))):
            jobs.append(_job(_as_recorded(job) if recorded else job))
    names = [job.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs are called {name!r}; give each a title of its own")
    return jobs


def _as_recorded(job: dict[str, Any]) -> dict[str, Any]:
    """A job of a record, with what it took for granted when it was written."""
    algorithm, run = job.get("algorithm", {"name": FedBCD.name}), job.get("run", {})
    if isinstance(algorithm, Mapping):
        job["algorithm"] = completed(algorithm)
    if isinstance(run, Mapping):
        job["run"] = completed(renamed_keys(run, RENAMED), "run")
    return job


def merged(old: Any, new: Any) -> Any:
    """A section changed by a run: key by key, unless it names another kind of thing."""
    if (
        isinstance(old, Mapping)
        and isinstance(new, Mapping)
        and new.get("name", old.get("name")) == old.get("name")
    ):
        return {**old, **new}
    return new


def _job(table: Mapping[str, Any]) -> Job:
    parts: dict[str, Any] = {
        key: convert(table.get(key, ""), str, key) for key in ("title", "modules")
    }
    federation = table.get("federation", {})
    active: PerServer = ACTIVE
    if isinstance(federation, Mapping) and "active" in federation:
        active = convert(federation["active"], PerServer, "federation.active")
        federation = {key: value for key, value in federation.items() if key != "active"}
    if isinstance(federation, Mapping):
        known = {"active", *(each.name for each in fields(FederationPart))}
        check_keys(federation, known, "federation")
    for key, kind in (("data", DataPart), ("model", ModelPart)):
        if key in table:
            parts[key] = build(kind, table[key], key)
    parts["federation"] = build(FederationPart, federation, "federation")
    parts["federation"].check_active(active)
    spec = RunSpec.from_table(_with_times(table), active)
    job = Job(**parts, spec=spec, may_import=are_imported())
    job.spec.cloud.coordinator(
        job.federation.servers, job.method.cloud_iterations
    )  # refuses B > servers
    return job


def _with_times(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trace of [clock] may name a file with one recorded time per line instead of its values;
    traces, a table (CSV) with the columns device or server, and seconds.
    """
    clock = table.get("clock")
    if not isinstance(clock, Mapping):
        return table
    return {**table, "clock": {key: _delay(value, f"clock.{key}") for key, value in clock.items()}}


def _delay(table: Any, where: str) -> Any:
    name = table.get("name") if isinstance(table, Mapping) else None
    if name not in ("trace", "traces") or "file" not in table:
        return table
    path = Path(str(table["file"]))
    if name == "traces":
        return _traces(path, where)
    try:
        values = [float(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}.file = {str(path)!r} is not a list of times, one per line: {error}"
        ) from None
    return {"name": "trace", "values": values}


def _traces(path: Path, where: str) -> dict[str, Any]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            named = table.fieldnames or ()
            by = "device" if "device" in named else "server"
            if not {by, "seconds"} <= {*named}:
                raise ValueError(f"it names {', '.join(named) or 'nothing'}")
            values = [[int(row[by]), float(row["seconds"])] for row in table]
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}.file = {str(path)!r} is not a table (CSV) whose first line names the columns"
            f" device or server, and seconds: {error}"
        ) from None
    return {"name": "traces", "by": by, "values": values}


def _is_small(federation: Federation) -> bool:
    return sum(p.numel() for p in federation.make_model(0).parameters()) < SMALL_PARAMETERS
