"""A job file: what to train on what, how, for how long. One run, or several under `[[runs]]` that
each change some of it.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedbcd.algorithm.augment import FlipCrop
from fedbcd.algorithm.variants import ALGORITHMS, Algorithm, FedBCD
from fedbcd.config import build, check_keys, choose, convert, nearest, read_toml
from fedbcd.data.datasets import DATASETS, LoadedDataset, load_dataset
from fedbcd.data.federation import Federation
from fedbcd.data.measure import DEFAULT, Measure, measure_in
from fedbcd.data.partition import Diversity, Partition, Partitioner
from fedbcd.describe import describe
from fedbcd.engines.result import Run
from fedbcd.engines.run import train
from fedbcd.engines.settings import Settings, torch_device
from fedbcd.errors import ConfigError
from fedbcd.models import MODELS
from fedbcd.protocol.clouds import CLOUDS, Cloud, SyncCloud
from fedbcd.record.runfolder import RunFolder, recorded_in
from fedbcd.recorded import completed, going_on
from fedbcd.schedule.delays import DELAYS, Clock, Delay


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """Which data, and how they are split over the devices."""

    name: str = "digits"  # see `fedbcd models`
    folder: str | None = None  # where its files are; FEDBCD_DATA by default
    diversity: int = 3  # labels per device
    samples: int = 60  # samples per device
    partition: Partitioner | None = (
        None  # another split, chosen by name from PARTITIONS, in place of diversity and samples
    )
    manifest: str | None = None  # a split that was saved, in place of any other
    augment: Literal["none", "flip-crop"] | None = (
        None  # of training images; flip-crop for cifar10, none for the others
    )

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(
                f"data.name = {self.name!r} is unknown{nearest(self.name, DATASETS)}; known:"
                f" {', '.join(DATASETS)}"
            )
        if self.samples < 1:
            raise ConfigError(f"data.samples = {self.samples} must be 1 or more")
        if self.partition is not None and self.manifest is not None:
            raise ConfigError(
                f"[data] has both a partition and manifest = {self.manifest!r}; keep one of them"
            )

    def split(self, data: LoadedDataset, devices: int, seed: int) -> Partition:
        """Who owns which training samples."""
        if self.manifest is None:
            partitioner = self.partition or Diversity(self.diversity, self.samples)
            return partitioner.split(data.train.targets, devices, seed, data.columns)
        saved = Partition.load(self.manifest, data.train.targets)
        if len(saved.samples) != devices:
            raise ConfigError(
                f"data.manifest = {self.manifest!r} is of {len(saved.samples)} devices, but"
                f" [federation] has {devices}"
            )
        return saved


MOST_DEVICES = 100_000_000  # a slip of the pen must not take all memory
MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class FederationPart:
    """Who there is."""

    servers: int = 10
    devices: int = 10  # per server
    active: int = 3  # q, uploads that end a server's phase

    def __post_init__(self) -> None:
        for name in ("servers", "devices", "active"):
            if getattr(self, name) < 1:
                raise ConfigError(f"federation.{name} = {getattr(self, name)} must be 1 or more")
        if self.servers * self.devices > MOST_DEVICES:
            raise ConfigError(
                f"federation.servers = {self.servers} with {self.devices} devices each are more"
                f" than {MOST_DEVICES:,} devices; use fewer"
            )
        if self.active > self.devices:
            raise ConfigError(
                f"federation.active = {self.active} exceeds the {self.devices} devices of a server;"
                f" use active <= {self.devices}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Which network: one of `fedbcd models`, or your own as "package.module:factory"."""

    name: str = "mlp"
    hidden: tuple[int, ...] = (64, 32)  # widths of the hidden layers of an mlp
    norm: Literal["batch", "group"] = "batch"  # normalisation of a resnet20

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ConfigError(
                f"model.hidden = {list(self.hidden)} must be widths of 1 or more, e.g. [64, 32]"
            )

    def factory(self, data: LoadedDataset | None) -> Callable[[], nn.Module]:
        """A callable that makes the module; only one of your own can do without the data set that
        it is for.
        """
        if ":" in self.name:
            return _imported(self.name)
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
        if self.name == "resnet20":
            return partial(MODELS[self.name], classes=data.classes, norm=self.norm)
        inputs = math.prod(data.train.inputs.shape[1:])
        options = {"hidden": self.hidden} if self.name == "mlp" else {}
        return partial(MODELS[self.name], inputs=inputs, classes=data.classes, **options)


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """How long, how often to look, and on what."""

    rounds: int | None = None
    until_clock: float | None = None
    seed: int = 0
    evaluate_every: int | None = None
    looks: int | None = (
        # evaluations in all, where evaluate_every is left out; by default up to 20, under 30 % of
        # the time
        None
    )
    certify_every: int | None = (
        # every so many evaluations with certificates, 0: none; by default as many as are cheap
        None
    )
    certify_devices: int | None = (
        None  # devices whose first-order gap is taken (8 by default, fewer in a very short run)
    )
    checkpoint_every: int | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    max_batch: int | None = None
    storage: Literal["float32", "bfloat16"] | None = None  # of personal models between sessions
    state: str | None = (
        None  # a folder to keep personal models in, where memory is too small for them
    )
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"  # of products of float32 numbers
    measure: Measure | None = (
        # of personal accuracy: by the device's own shares of labels (the default), or by the test
        # set's, pooled
        None
    )
    ahead: bool | None = (
        # rounds planned ahead, without events between them; by default on a GPU, where the schedule
        # allows it
        None
    )
    compile: bool = (
        False  # with rounds planned ahead: fused by torch.compile, which takes a minute at first
    )
    threads: int | None = (
        None  # of torch; by default 1 for small models, where more only wait for each other
    )

    def __post_init__(self) -> None:
        for name in (
            "rounds",
            "evaluate_every",
            "looks",
            "certify_devices",
            "checkpoint_every",
            "max_batch",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"run.{name} = {value} must be 1 or more")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(
                f"run.threads = {self.threads} must be {MOST_THREADS} or less; more than there are"
                " cores do not help"
            )
        if self.certify_every is not None and self.certify_every < 0:
            raise ConfigError(f"run.certify_every = {self.certify_every} must be 0 (never) or more")
        if self.until_clock is not None and not 0 < self.until_clock < math.inf:
            raise ConfigError(
                f"run.until_clock = {self.until_clock} must be a finite number above 0"
            )
        if self.rounds is not None and self.until_clock is not None:
            raise ConfigError(
                f"[run] has both rounds = {self.rounds} and until_clock = {self.until_clock:g};"
                " keep one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, fully described."""

    title: str = ""
    data: DataPart = field(default_factory=DataPart)
    federation: FederationPart = field(default_factory=FederationPart)
    model: ModelPart = field(default_factory=ModelPart)
    algorithm: Algorithm = field(default_factory=FedBCD)
    cloud: Cloud = field(default_factory=SyncCloud)
    clock: Clock = field(default_factory=Clock)
    run: RunPart = field(default_factory=lambda: RunPart(rounds=100))

    @property
    def name(self) -> str:
        """The title, or what it runs."""
        return self.title or f"{self.algorithm.name} {self.cloud.name}"

    def to_table(self) -> dict[str, Any]:
        """A table that makes this job again."""
        clock = {"arrival": describe(self.clock.arrival), "step": describe(self.clock.step)}
        parts = {
            key: describe(getattr(self, key))
            for key in ("data", "federation", "model", "algorithm", "cloud", "run")
        }
        parts["run"]["measure"] = self._measure()  # said, whatever the default is when this is read
        return {"title": self.name, **parts, "clock": clock}

    def going_on(self, record: Mapping[str, Any]) -> "Job":
        """This job, as recorded where it says nothing: a record is a job's table, or the identity
        of a run.
        """
        run = replace(self.run, measure=self.run.measure or measure_in(record))
        return replace(self, algorithm=going_on(self.algorithm, record.get("algorithm")), run=run)

    def make_federation(self) -> Federation:
        """Load the data, split them, and put the model to them."""
        data = load_dataset(
            self.data.name, None if self.data.folder is None else Path(self.data.folder)
        )
        devices = self.federation.servers * self.federation.devices
        split = self.data.split(data, devices, self.run.seed)
        return Federation.from_partition(
            self.model.factory(data),
            nn.functional.cross_entropy,
            data.train,
            split,
            self.federation.servers,
            test=data.test,
            transform=data.transform,
            augment=self._augment(),
        )

    def _augment(self) -> FlipCrop | None:
        chosen = self.data.augment or ("flip-crop" if self.data.name == "cifar10" else "none")
        return FlipCrop() if chosen == "flip-crop" else None

    def check(self, out: Path, resume: bool) -> None:
        """Refuse what `start` would refuse, before anything is trained or written."""
        torch_device(self.run.device)
        federation = self.make_federation()
        settings = (self.going_on(recorded_in(out)) if resume else self).settings()
        settings.check(federation)
        RunFolder(out, settings.identity(federation), self.to_table()).inspect(resume)

    def settings(self) -> Settings:
        """What makes this run, beyond the federation."""
        dtype = torch.float64 if self.run.dtype == "float64" else torch.float32
        parts = (self.algorithm, self.cloud, self.federation.active, self.clock, self.run.seed)
        kept: dict[str, Any] = {
            "storage": self._storage(),
            "precision": self.run.precision,
            "measure": self._measure(),
        }
        return Settings(*parts, dtype=dtype, max_batch=self.run.max_batch, **kept)

    def _measure(self) -> Measure:
        return self.run.measure or DEFAULT

    def _storage(self) -> torch.dtype | None:
        return (
            None
            if self.run.storage is None
            else {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.run.storage]
        )

    def use_threads(self, federation: Federation) -> None:
        """Set the number of torch's threads that this job asks for."""
        if self.run.threads is not None or _is_small(federation):
            torch.set_num_threads(self.run.threads or 1)

    def start(self, out: Path | None = None, *, resume: bool = False, **callbacks: Any) -> Run:
        """Train; see `fedbcd.train` for the callbacks."""
        if out is not None and resume:
            self = self.going_on(recorded_in(out))
        run = self.run
        federation = self.make_federation()
        self.use_threads(federation)
        return train(
            federation,
            self.algorithm,
            cloud=self.cloud,
            rounds=run.rounds,
            until_clock=run.until_clock,
            active=self.federation.active,
            clock=self.clock,
            seed=run.seed,
            evaluate_every=run.evaluate_every,
            looks=run.looks,
            certify_every=run.certify_every,
            certify_devices=run.certify_devices,
            checkpoint_every=run.checkpoint_every,
            out=out,
            resume=resume,
            device=run.device,
            dtype=torch.float64 if run.dtype == "float64" else torch.float32,
            max_batch=run.max_batch,
            storage=self._storage(),
            state=run.state,
            precision=run.precision,
            measure=run.measure,
            ahead=run.ahead,
            compile=run.compile,
            record=self.to_table(),
            **callbacks,
        )


SMALL = 50_000  # parameters; below, a step takes less time than waking a second thread
SECTIONS = ("data", "federation", "model", "algorithm", "cloud", "clock", "run")


def default_table() -> dict[str, Any]:
    """The default job, on data that ship with the package."""
    return read_toml(Path(str(files("fedbcd.experiments") / "default.toml")))


def parse(table: Mapping[str, Any], recorded: bool = False) -> list[Job]:
    """The jobs of a job file: one, or one per entry of `[[runs]]`, each with its own changes.

    recorded   the table is a record of what was run, so where it says nothing it means what was
    done then
    """
    check_keys(
        table, {*SECTIONS, "title", "runs", "deploy"}, ""
    )  # [deploy] is for `fedbcd up` and the roles
    runs = table.get("runs", [{}])
    if not (isinstance(runs, list) and runs and all(isinstance(entry, Mapping) for entry in runs)):
        raise ConfigError("runs must be a list of tables, written [[runs]]")
    base = {key: value for key, value in table.items() if key != "runs"}
    jobs = []
    for number, entry in enumerate(runs):
        check_keys(entry, {*SECTIONS, "title"}, f"runs #{number + 1}")
        job = {**base, **{key: _merged(base.get(key), value) for key, value in entry.items()}}
        if recorded and isinstance(named := job.get("algorithm", {"name": FedBCD.name}), Mapping):
            job["algorithm"] = completed(named)
        if recorded and isinstance(run := job.get("run", {}), Mapping):
            job["run"] = completed(run, "run")
        jobs.append(_job(job))
    names = [job.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs are called {name!r}; give each a title of its own")
    return jobs


def _merged(old: Any, new: Any) -> Any:
    """A section changed by a run: key by key, unless it names another kind of thing."""
    if (
        isinstance(old, Mapping)
        and isinstance(new, Mapping)
        and new.get("name", old.get("name")) == old.get("name")
    ):
        return {**old, **new}
    return new


def _job(table: Mapping[str, Any]) -> Job:
    parts: dict[str, Any] = {"title": convert(table.get("title", ""), str, "title")}
    for key, kind in (
        ("data", DataPart),
        ("federation", FederationPart),
        ("model", ModelPart),
        ("run", RunPart),
    ):
        if key in table:
            parts[key] = build(kind, table[key], key)
    if "algorithm" in table:
        parts["algorithm"] = choose(ALGORITHMS, table["algorithm"], "algorithm")
    if "cloud" in table:
        parts["cloud"] = choose(CLOUDS, table["cloud"], "cloud")
    if "clock" in table:
        parts["clock"] = _clock(table["clock"])
    job = Job(**parts)
    if job.run.rounds is None and job.run.until_clock is None:
        raise ConfigError(
            "[run] needs rounds or until_clock, to say when to stop, e.g. rounds = 100"
        )
    job.cloud.coordinator(
        job.federation.servers, job.algorithm.cloud_iterations
    )  # refuses B > servers
    return job


def _clock(table: Any) -> Clock:
    if not isinstance(table, Mapping):
        raise ConfigError(f"[clock] must be a table, not {table!r}")
    check_keys(table, {"arrival", "step"}, "clock")
    return Clock(**{key: _delay(value, f"clock.{key}") for key, value in table.items()})


def _delay(table: Any, where: str) -> Delay:
    """A delay by name; a trace may name a file with one recorded time per line instead of its
    values.
    """
    if isinstance(table, Mapping) and table.get("name") == "trace" and "file" in table:
        path = Path(str(table["file"]))
        try:
            values = [float(line) for line in path.read_text().split()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where}.file = {str(path)!r} is not a list of times, one per line: {error}"
            ) from None
        table = {"name": "trace", "values": values}
    return choose(DELAYS, table, where)


def _is_small(federation: Federation) -> bool:
    return sum(p.numel() for p in federation.make_model(0).parameters()) < SMALL


def _imported(name: str) -> Callable[[], nn.Module]:
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.name = {name!r} cannot be imported: {error}; is it on PYTHONPATH?"
        ) from None
    if not callable(factory):
        raise ConfigError(
            f"model.name = {name!r} is not callable; name a function or class that makes the module"
        )
    return factory  # type: ignore[no-any-return]
