"""`train`, `replay` and the `Run` they return."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.cloud import check_absolute_step, check_doubly_stochastic
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.variants import ALGORITHMS, Algorithm, FedBCDI, penalties
from fedbcd.config import choose
from fedbcd.data.federation import Federation
from fedbcd.describe import describe
from fedbcd.engines.driver import Driver, Machines, NoNumbers
from fedbcd.engines.simulate.batch import Trainer
from fedbcd.engines.simulate.delays import DELAYS, Clock
from fedbcd.engines.simulate.engine import Schedule, Simulation
from fedbcd.engines.simulate.evaluate import Evaluator, Scores
from fedbcd.engines.simulate.numbers import StackedNumbers
from fedbcd.errors import ConfigError, ProtocolError, RecordError, ReplayMismatch
from fedbcd.eventlog import LogReader, LogWriter, Transition
from fedbcd.history import History, Row
from fedbcd.protocol.clouds import CLOUDS, Cloud, GraphCloud, SyncCloud
from fedbcd.protocol.messages import Actor, Command, Event, OfflineTrained, Trained
from fedbcd.runfolder import Checkpoint, RunFolder, read_tensors, write_tensors


@dataclass(frozen=True)
class Progress:
    """Told after every round."""

    round: int
    clock: float
    fraction: float  # of the run that is done
    latest: Row  # the latest evaluation


@dataclass
class Run:
    """What training gave: models, table, and where it ended."""

    federation: Federation
    history: History
    personal_NF: Tensor  # x_i, one row per device; the parameters first, then buffers
    global_VF: Tensor  # z_n, one row per server
    summary: dict[str, Any] = field(default_factory=dict)  # algorithm, cloud, rounds, clock, accuracies, seconds, digest
    personal_scores: dict[int, float] = field(default_factory=dict)
    finished: bool = True

    @property
    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        return str(self.summary["digest"])

    @property
    def global_model(self) -> nn.Module:
        """The mean of the servers' models, as a module (with Sync-cloud they are all the same)."""
        return self._module(self.global_VF.double().mean(0))

    def server_model(self, server: int) -> nn.Module:
        """z_n of one server, as a module."""
        return self._module(self.global_VF[server])

    def personal_model(self, device: int) -> nn.Module:
        """x_i of one device, as a module."""
        return self._module(self.personal_NF[device])

    def _module(self, flat: Tensor) -> nn.Module:
        module = self.federation.make_model(int(self.summary.get("seed", 0)))  # frozen parameters belong to the seed
        return Layout(module).load(module, flat).eval()

    def save(self, folder: str | Path) -> None:
        """Write models and table; `load` reads them."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.history.write_csv(path / "history.csv")
        summary = {
            "summary": json.dumps(self.summary),
            "scores": json.dumps(self.personal_scores),
            "finished": json.dumps(self.finished),
            "fedbcd_models": "1",
        }
        write_tensors(path / "models.safetensors", {"x": self.personal_NF, "z": self.global_VF}, summary)

    @classmethod
    def load(cls, folder: str | Path, federation: Federation) -> "Run":
        """Read a saved run; the federation supplies the module that the models fit into."""
        path = Path(folder)
        tensors, metadata = read_tensors(path / "models.safetensors")
        try:
            summary = json.loads(metadata["summary"])
            scores = {int(k): float(v) for k, v in json.loads(metadata["scores"]).items()}
            x, z, finished = tensors["x"], tensors["z"], bool(json.loads(metadata["finished"]))
        except (KeyError, ValueError) as error:
            raise RecordError(f"{path / 'models.safetensors'} does not hold the models of a run ({error})") from None
        size = Layout(federation.make_model(0)).size_F
        if x.shape != (federation.devices, size) or z.shape != (len(federation.servers), size):
            raise RecordError(
                f"{path} holds models of {tuple(x.shape)} (devices, values); this federation has {(federation.devices, size)}"
            )
        return cls(federation, History.read_csv(path / "history.csv"), x, z, summary, scores, finished)


@dataclass
class Settings:
    """What makes a run, beyond the federation: see `train`."""

    algorithm: Algorithm
    cloud: Cloud = field(default_factory=SyncCloud)
    active: int | None = None
    clock: Clock = field(default_factory=Clock)
    seed: int = 0
    joins: Mapping[int, int] = field(default_factory=dict)
    leaves: Mapping[int, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    max_batch: int | None = None

    def active_of(self, federation: Federation) -> int:
        """q: as given, or 0.3 of the smallest server's members."""
        return max(1, round(0.3 * min(self._members(federation)))) if self.active is None else self.active

    def _members(self, federation: Federation) -> list[int]:
        return [sum(device not in self.joins for device in members) for members in federation.servers]

    def check(self, federation: Federation) -> None:
        """Refuse what cannot be, before anything is written."""
        self._check_changes(federation)
        members = self._members(federation)
        active = self.active_of(federation)
        if not 1 <= active <= min(members):
            raise ConfigError(f"active={active} must be between 1 and {min(members)}, the members of the smallest server")
        if isinstance(self.algorithm, FedBCDI):
            available = min(self.algorithm.available_of(n) for n in members)
            if active > available:
                raise ConfigError(f"active={active} exceeds the {available} available devices of a server; use active <= {available}")
        if not self.algorithm.personal and not self.cloud.sync:
            raise ConfigError(f"{self.algorithm.name} keeps one model everywhere and runs on the sync cloud only, not {self.cloud.name}")
        gamma = penalties(self.algorithm, federation.devices)  # refuses a wrong number of them
        if self.algorithm.server_step_form == "absolute":
            sizes = [len(members) for members in federation.servers]  # with those that join late
            most = sum(sizes) if self.cloud.sync else max(sizes)
            check_absolute_step(self.algorithm.server_step, float(gamma.max()), most)
        if isinstance(self.cloud, GraphCloud):
            for matrix in self.cloud.mixing:
                check_doubly_stochastic(torch.tensor(matrix, dtype=torch.float64))
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype} must be a floating-point dtype, such as torch.float32")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must fit in 64 bits: between -2^63 and 2^63 - 1")

    def _check_changes(self, federation: Federation) -> None:
        for name, changes in (("joins", self.joins), ("leaves", self.leaves)):
            for device, when in changes.items():
                if not (0 <= device < federation.devices and when >= 1):
                    raise ConfigError(f"{name}[{device}]={when} must name a device below {federation.devices} and a round from 1 on")
        for device in set(self.joins) & set(self.leaves):
            if self.leaves[device] <= self.joins[device]:
                raise ConfigError(f"device {device} leaves in round {self.leaves[device]} but joins in {self.joins[device]} only")
        for n, members in enumerate(federation.servers):
            if all(device in self.leaves or device in self.joins for device in members):
                raise ConfigError(f"server {n} would be left without devices; keep at least one that neither joins late nor leaves")

    def identity(self, federation: Federation) -> dict[str, Any]:
        """What makes this run this run and no other, as plain data. How long it runs is not part of it."""
        return {
            "algorithm": describe(self.algorithm),
            "cloud": describe(self.cloud),
            "clock": {"arrival": describe(self.clock.arrival), "step": describe(self.clock.step)},
            "active": self.active_of(federation),
            "seed": self.seed,
            "joins": sorted(self.joins.items()),
            "leaves": sorted(self.leaves.items()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_batch": self.max_batch,
            "servers": federation.servers,
            "data": federation.fingerprint(),
            "augment": describe(federation.augment) if is_dataclass(federation.augment) else getattr(federation.augment, "name", None),
            "model": _model_fingerprint(federation.make_model(self.seed)),
        }

    def machines(self, federation: Federation) -> Machines:
        """Fresh machines."""
        limit = self.algorithm.offline_limit if isinstance(self.algorithm, FedBCDI) else None
        iterations = self.algorithm.cloud_iterations
        return Machines(federation.servers, self.cloud, self.active_of(federation), iterations, limit, set(self.joins))

    def numbers(self, federation: Federation, device: torch.device) -> StackedNumbers:
        """Fresh numbers: all models at x(0)."""
        module = federation.make_model(self.seed)
        objective = Objective(module.to(self.dtype), federation.loss)
        start = objective.layout.flatten(module, self.dtype).to(device)
        start[: objective.layout.size_P] = self.algorithm.projection.project(start[: objective.layout.size_P])  # x(0) is in X
        trainer = Trainer(federation, self.algorithm, objective, self.seed, start, self.max_batch)
        return StackedNumbers(federation, self.algorithm, self.cloud, trainer, start, set(self.joins))


def train(
    federation: Federation,
    algorithm: Algorithm,
    *,
    cloud: Cloud | None = None,
    rounds: int | None = None,
    until_clock: float | None = None,
    active: int | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    joins: Mapping[int, int] | None = None,
    leaves: Mapping[int, int] | None = None,
    evaluate_every: int | None = None,
    looks: int = 20,
    checkpoint_every: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    max_batch: int | None = None,
    record: Mapping[str, Any] | None = None,
    on_round: Callable[[Progress], None] | None = None,
    on_notice: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Train personal and global models on a virtual clock.

    cloud             SyncCloud() by default; AsyncCloud(first=B), RigorousCloud(first=B), GraphCloud(mixing)
    rounds            stop after this many rounds of the coordinator, or ...
    until_clock       ... after the first round that ends at this virtual time or later
    active            q, uploads that end a server's phase; by default 0.3 of a server's devices
    clock             how long devices take; by default the paper's clock model
    joins, leaves     device -> round: a new device starts from its server's z; one that leaves is no longer counted
    evaluate_every    rounds between two rows of the history, or ...
    looks             ... how many rows there are to be, about
    checkpoint_every  rounds between two checkpoints (with `out`); by default as often as evaluations
    out, resume       a folder for log, checkpoints and models; resume=True goes on with what is there
    max_batch         how many devices train together at most; 1 gives results that do not depend on batching
    record            plain data to keep at the head of the event log, e.g. the job file
    on_round, on_notice, should_stop   progress, remarks in a sentence, and a polite way to end early
    """
    settings = Settings(algorithm, cloud or SyncCloud(), active, clock or Clock(), seed, joins or {}, leaves or {}, dtype, max_batch)
    plan = _Plan(rounds, until_clock, evaluate_every, checkpoint_every, looks)
    settings.check(federation)
    session = _Training(federation, settings, plan, torch_device(device), on_notice or (lambda _: None))
    folder = None if out is None else RunFolder(Path(out), settings.identity(federation), dict(record or {}))
    return session.run(folder, resume, on_round or (lambda _: None), should_stop or (lambda: False))


@dataclass(frozen=True)
class _Plan:
    """How long to go on, and how often to look."""

    rounds: int | None
    until_clock: float | None
    evaluate_every: int | None
    checkpoint_every: int | None
    looks: int

    def __post_init__(self) -> None:
        if (self.rounds is None) == (self.until_clock is None):
            raise ConfigError("give either rounds=... or until_clock=..., to say when to stop")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} must be 1 or more")
        if self.until_clock is not None and not 0 < self.until_clock < math.inf:
            raise ConfigError(f"until_clock={self.until_clock} must be a finite number above 0")
        for name, value in (("evaluate_every", self.evaluate_every), ("checkpoint_every", self.checkpoint_every), ("looks", self.looks)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")

    def fraction(self, round_: int, clock: float) -> float:
        """How much of the run is done."""
        return min(1.0, round_ / self.rounds if self.rounds is not None else clock / (self.until_clock or 1.0))

    def is_done(self, round_: int, clock: float) -> bool:
        """Whether to stop here."""
        return self.fraction(round_, clock) >= 1.0

    def is_look(self, before: tuple[int, float], after: tuple[int, float]) -> bool:
        """Whether an evaluation falls due between two rounds."""
        if self.is_done(*after):
            return True
        if self.evaluate_every is not None:
            return after[0] % self.evaluate_every == 0
        if self.rounds is not None:
            return after[0] % max(1, self.rounds // self.looks) == 0
        return int(self.fraction(*before) * self.looks) < int(self.fraction(*after) * self.looks)


class _Training:
    """One training from start (or checkpoint) to end."""

    def __init__(
        self,
        federation: Federation,
        settings: Settings,
        plan: _Plan,
        device: torch.device,
        notice: Callable[[str], None],
    ) -> None:
        self.federation = federation
        self.settings = settings
        self.plan = plan
        self.numbers = settings.numbers(federation, device)
        trainer = self.numbers.trainer
        reason = trainer.check_vectorised(self.numbers.global_NF()[0])
        if reason is not None:
            notice(f"this model cannot be vectorised, so devices train one after another ({reason})")
        self.evaluator = Evaluator(federation, trainer.objective, device)
        self.machines = settings.machines(federation)
        self.history = History()
        self.scores = Scores((), {})
        self.seconds = 0.0
        self.looking = 0.0  # seconds of these that went into evaluation

    def run(
        self,
        folder: RunFolder | None,
        resume: bool,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> Run:
        with folder.locked() if folder is not None else nullcontext():
            return self._run(folder, resume, on_round, should_stop)

    def _run(
        self,
        folder: RunFolder | None,
        resume: bool,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> Run:
        checkpoint = None if folder is None else folder.inspect(resume)
        driver = Driver(self.machines, self.numbers)
        self.simulation = Simulation(driver, self._schedule())
        if checkpoint is not None:
            self._fast_forward(driver, checkpoint)
        log = driver.log = None if folder is None else folder.open(checkpoint, resume)  # only now does anything change on disk
        try:
            finished = self._play(folder, log, on_round, should_stop)
            result = self._result(finished)
            if log is not None and finished:
                ended = {key: result.summary[key] for key in ("rounds", "clock", "digest")}
                log.end({"transitions": driver.transitions, **ended})
        finally:
            if log is not None:
                log.close()
        if folder is not None:
            result.save(folder.path)
        return result

    def _schedule(self) -> Schedule:
        s = self.settings
        return Schedule(s.algorithm, s.clock, s.seed, s.active_of(self.federation), s.joins, s.leaves)

    def _fast_forward(self, driver: Driver, checkpoint: Checkpoint) -> None:
        """Time does not depend on numbers: play the schedule alone up to the checkpoint, then put its tensors in place."""
        driver.numbers = outline = NoNumbers()
        while self.simulation.round < checkpoint.round:
            self.simulation.play_round()
        driver.numbers = self.numbers
        self.numbers.load_state(dict(checkpoint.tensors))
        held = [outline.server_models.get(n, handle) for n, handle in enumerate(self.numbers.server_models)]
        self.numbers.resume_at(held, outline.at_work)
        if self.numbers.digest() != checkpoint.digest:
            raise RecordError("the checkpoint is damaged: its tensors do not have the digest it names; remove it to start over")
        self.history = checkpoint.history
        self.scores = self._scores()
        self.seconds = checkpoint.seconds

    def _play(
        self,
        folder: RunFolder | None,
        log: LogWriter | None,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        simulation, plan = self.simulation, self.plan
        began = time.perf_counter() - self.seconds
        if not self.history:
            self._look()
        while not plan.is_done(simulation.round, simulation.now):
            before = (simulation.round, simulation.now)
            simulation.play_round()
            after = (simulation.round, simulation.now)
            look = plan.is_look(before, after)
            if look:
                self._look()
            self.seconds = time.perf_counter() - began
            stop = should_stop()
            due = look if plan.checkpoint_every is None else after[0] % plan.checkpoint_every == 0
            if folder is not None and log is not None and (due or stop or plan.is_done(*after)):
                folder.write_checkpoint(self._checkpoint(log))
            on_round(Progress(*after, plan.fraction(*after), self.history.last))
            if stop:
                return plan.is_done(*after)
        return True

    def _checkpoint(self, log: LogWriter) -> Checkpoint:
        digest = self.numbers.digest()
        return Checkpoint(self.simulation.round, log.sync(), self.seconds, digest, self.history, self.numbers.state())

    # ------------------------------------------------------------------------------------------------------------- evaluation
    def _members(self) -> list[tuple[int, int]]:
        return [(device, server.server) for server in self.machines.servers for device in server.members]

    def _scores(self) -> Scores:
        self.numbers.flush()
        personal = {device: self.numbers.personal(device, server) for device, server in self._members()}
        return self.evaluator.scores(self.numbers.global_NF(), personal)

    def _look(self) -> None:
        """Add a row to the history."""
        self.numbers.flush()
        began = time.perf_counter()
        self.scores = self._scores()
        numbers, members = self.numbers, self._members()
        z_VF = numbers.global_NF()
        mean_z = z_VF.double().mean(0)
        distance = 0.0
        if self.settings.algorithm.personal:
            distance = sum(float((numbers.x_NF[d] - z_VF[n]).norm()) for d, n in members) / len(members)
        personal = sorted(self.scores.devices.values())
        self.history.append(
            Row(
                round=self.simulation.round,
                clock=self.simulation.now,
                activations=sum(device.activation for device in self.machines.devices.values()),
                global_accuracy=_mean(self.scores.servers),
                personal_accuracy=_mean(personal),
                worst_decile=_mean(personal[: max(1, len(personal) // 10)]),
                disagreement=float((z_VF.double() - mean_z).norm(dim=1).mean()),
                distance=distance,
            )
        )
        self.looking += time.perf_counter() - began

    def _result(self, finished: bool) -> Run:
        numbers, last = self.numbers, self.history.last
        home = self.machines.home
        personal = torch.stack([numbers.personal(device, home[device]) for device in range(self.federation.devices)])
        summary = {
            "algorithm": self.settings.algorithm.name,
            "cloud": self.settings.cloud.name,
            "seed": self.settings.seed,
            "rounds": self.simulation.round,
            "clock": self.simulation.now,
            "global_accuracy": last.global_accuracy,
            "personal_accuracy": last.personal_accuracy,
            "seconds": round(self.seconds, 3),
            "evaluation_share": round(self.looking / max(self.seconds, self.looking, 1e-9), 3),
            "digest": numbers.digest(),
        }
        return Run(
            self.federation,
            self.history,
            personal.cpu(),
            numbers.global_NF().cpu(),
            summary,
            self.scores.devices,
            finished,
        )


def replay(log: str | Path, federation: Federation, *, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Recompute a recorded run from its event log alone; raises if a machine or the final digest disagrees with the record."""
    reader = LogReader(Path(log))
    settings = _recorded_settings(reader, federation)
    numbers = settings.numbers(federation, torch_device(device))
    numbers.trainer.check_vectorised(numbers.global_NF()[0])
    recorded = _Recorded(reader.path, settings.algorithm.steps)
    driver = Driver(settings.machines(federation), numbers, recorded)
    for step in reader:
        recorded.deliver(driver, step)
    result = {"rounds": driver.machines.coordinator.round, "clock": recorded.clock, "digest": numbers.digest()}
    for key, value in result.items() if reader.end is not None else ():
        if reader.end is not None and reader.end.get(key) != value:
            raise ReplayMismatch(f"{log} line {recorded.line + 1} ends with {key} {reader.end.get(key)}, the replay with {value}")
    return {**result, "complete": reader.end is not None}


class _Recorded:
    """The log of a replay: it compares each transition with the recorded one, before any number is touched."""

    def __init__(self, path: Path, steps: tuple[int, int]) -> None:
        self.path = path
        self.steps = steps
        self.line = 1
        self.clock = 0.0
        self._expected: tuple[Command, ...] = ()

    def deliver(self, driver: Driver, step: Transition) -> None:
        """Feed one recorded event to the machines; every complaint names its line."""
        self.line += 1
        if not step.time >= self.clock:
            raise ReplayMismatch(f"{self._place()}: time goes back from {self.clock} to {step.time}")
        low, high = self.steps
        if isinstance(step.event, Trained | OfflineTrained) and not low <= step.event.steps <= high:
            raise ReplayMismatch(f"{self._place()}: {step.actor} took {step.event.steps} steps, but the run allows {low} to {high}")
        self.clock, self._expected = step.time, step.commands
        try:
            driver.deliver(step.time, step.actor, step.event)
        except (ProtocolError, RecordError) as error:
            raise ReplayMismatch(f"{self._place()}: {error}") from None
        except KeyError as error:
            raise ReplayMismatch(f"{self._place()}: at this point there is no model {error}") from None

    def append(self, time: float, actor: Actor, event: Event, commands: list[Command]) -> None:  # noqa: ARG002
        """Compare what a machine answers with what it answered then."""
        if tuple(commands) != self._expected:
            raise ReplayMismatch(f"{self._place()}: {actor} now answers {event} differently than recorded")

    def _place(self) -> str:
        return f"{self.path} line {self.line}"


def _recorded_settings(reader: LogReader, federation: Federation) -> Settings:
    """The settings in the head of a log, if they belong to this federation."""
    settings = _parsed_settings(reader)
    if reader.header["identity"] != json.loads(json.dumps(settings.identity(federation))):
        raise RecordError(f"{reader.path} was recorded with other data, other servers or another model than the federation given")
    settings.check(federation)
    return settings


def _parsed_settings(reader: LogReader) -> Settings:
    try:
        identity = reader.header["identity"]
        return Settings(
            algorithm=choose(ALGORITHMS, identity["algorithm"], "algorithm"),
            cloud=choose(CLOUDS, identity["cloud"], "cloud"),
            active=int(identity["active"]),
            clock=Clock(*(choose(DELAYS, identity["clock"][key], f"clock.{key}") for key in ("arrival", "step"))),
            seed=int(identity["seed"]),
            joins={int(device): int(when) for device, when in identity["joins"]},
            leaves={int(device): int(when) for device, when in identity["leaves"]},
            dtype={"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[identity["dtype"]],
            max_batch=None if identity["max_batch"] is None else int(identity["max_batch"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{reader.path} does not say how its run was set up ({error}); it is not a log of this version") from None


def torch_device(name: str | torch.device) -> torch.device:
    """The torch device of this name, if there is one."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device={str(name)!r} cannot be used here ({reason}); use 'cpu', or 'cuda' where there is a GPU") from None
    return device


def _model_fingerprint(module: nn.Module) -> str:
    """A hash of a module's tensors: their names, shapes and initial values."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _mean(values: tuple[float, ...] | list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
