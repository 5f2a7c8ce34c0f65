"""`train`: from settings to a `Run`, on a virtual clock, with evaluations and checkpoints on the
way.
"""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedbcd.algorithm.variants import Algorithm
from fedbcd.compute.ahead import Ahead, AheadWithEvents
from fedbcd.compute.certify import CALL, DEVICES, Certificates, Certifier, Ration
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.players import NONE, EventPlayer, Player
from fedbcd.compute.rows import Rows
from fedbcd.compute.store import devices_of_rounds, stored_in
from fedbcd.compute.workers import workers
from fedbcd.data.federation import Federation
from fedbcd.data.measure import DEFAULT, Measure, measure_in, untested
from fedbcd.engines.cluster.engine import cluster_numbers
from fedbcd.engines.cluster.options import Cluster, chosen_cluster
from fedbcd.engines.look import members_of, row_of, scores_of
from fedbcd.engines.result import Progress, Run, notes_of
from fedbcd.engines.settings import (
    Precision,
    Settings,
    products_in,
    rounds_between_looks,
    samples_per_round,
    torch_device,
)
from fedbcd.engines.warnings import at_the_border, doubts
from fedbcd.errors import BorderWarning, ConfigError, DivergenceWarning, RecordError
from fedbcd.protocol.clouds import Cloud, SyncCloud
from fedbcd.record.eventlog import LogWriter
from fedbcd.record.history import History
from fedbcd.record.runfolder import Checkpoint, RunFolder, recorded_in
from fedbcd.recorded import going_on
from fedbcd.schedule.arrays import Outline, why_not_ahead
from fedbcd.schedule.delays import Clock
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Schedule, Simulation

MOST_LOOKS, FEWEST_LOOKS = 20, 4  # where the user has not said
# so many times as long as a look is the training between two; a GPU tests faster than it takes
# small steps
ON_GPU = 10.0


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
    looks: int | None = None,
    certify_every: int | None = None,
    certify_devices: int | None = None,
    checkpoint_every: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    engine: str | Cluster = "simulate",
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    max_batch: int | None = None,
    storage: torch.dtype | None = None,
    state: str | Path | None = None,
    precision: Precision = "float32",
    measure: Measure | None = None,
    ahead: bool | None = None,
    compile: bool = False,
    record: Mapping[str, Any] | None = None,
    on_round: Callable[[Progress], None] | None = None,
    on_notice: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Train personal and global models on a virtual clock.

    cloud             SyncCloud() by default; AsyncCloud(first=B), RigorousCloud(first=B),
    GraphCloud(mixing)
    rounds            stop after this many rounds of the coordinator, or ...
    until_clock       ... after the first round that ends at this virtual time or later
    active            q, uploads that end a server's phase; by default 0.3 of a server's devices
    clock             how long devices take; by default the paper's clock model
    joins, leaves     device -> round: a new device starts from its server's z; one that leaves is
    no longer counted
    evaluate_every    rounds between two rows of the history, or ...
    looks             ... how many rows there are to be, about; by default up to 20, so far apart
    that they take under 30 % of the time
    certify_every     every so many of those rows hold certificates (gap, pull, spread), 0: none; by
    default as many
                      as add under 4 % to the work so far, and the summary at the end
    certify_devices   how many devices the gap is taken on: it needs their exact gradients; 8 by
    default, fewer in a very short run
    checkpoint_every  rounds between two checkpoints (with `out`); by default as often as
    evaluations
    out, resume       a folder for log, checkpoints and models; resume=True goes on with what is
    there,
                      and as it was set, where `algorithm` was not told otherwise
    engine            "cluster", or a Cluster(...), spreads the devices over the actors of a Ray
    cluster (docs/cluster.md)
    max_batch         how many devices train together at most; 1 gives results that do not depend on
    batching
    storage           torch.bfloat16 keeps personal models in half the memory; arithmetic stays in
    `dtype`
    state             a folder to keep personal models in, where they are more than memory holds;
    only active ones are then resident
    precision         "tf32" or "bfloat16": products of less precise factors, several times as fast
    on a GPU; steps stay in `dtype`
    measure           of personal accuracy: "own-shares", the default, counts each label by its
    share of the device's own samples;
                      "pooled-labels", the paper's, all test samples of the device's labels alike
    ahead             without events between rounds, which are then recorded once and replayed: by
    default on a GPU, where the schedule
                      allows it; with `out` their events are played beside them, for the log
    compile           with `ahead`: fuse what is between the matrix products by torch.compile; takes
    a minute at first, for long runs
    record            plain data to keep at the head of the event log, e.g. the job file
    on_round, on_notice, should_stop   progress, remarks in a sentence (without it, what may diverge
    is a `DivergenceWarning`), and a
                      polite way to end early
    """
    changes = (joins or {}, leaves or {})
    if out is not None and resume:
        there = recorded_in(Path(out))
        algorithm, measure = (
            going_on(algorithm, there.get("algorithm")),
            measure or measure_in(there),
        )
    who = (algorithm, cloud or SyncCloud(), active, clock or Clock(), seed, *changes)
    settings = Settings(*who, dtype, max_batch, storage, precision, measure or DEFAULT)
    plan = _Plan(
        rounds, until_clock, evaluate_every, checkpoint_every, looks, certify_every, certify_devices
    )
    settings.check(federation)
    if certify_devices is not None and certify_devices < 1:
        raise ConfigError(
            f"certify_devices={certify_devices} must be 1 or more; certify_every=0 computes no"
            " certificates"
        )
    where = torch_device(device)
    plan = replace(
        plan,
        apart=rounds_between_looks(
            federation, settings, *(() if where.type == "cpu" else (ON_GPU,))
        ),
    )
    cluster, kept_in = chosen_cluster(engine), None if state is None else Path(state)
    if cluster is not None and where.type != "cpu":
        raise ConfigError(
            f"device={str(where)!r}: on a cluster actors have GPUs, the driver needs none; use"
            " Cluster(gpus=1.0)"
        )
    with products_in(precision), _numbers(federation, settings, where, cluster, kept_in) as numbers:
        session = _Training(federation, settings, plan, numbers, on_notice, kept_in)
        session.choose_player(ahead, compile)
        folder = (
            None
            if out is None
            else RunFolder(Path(out), settings.identity(federation), dict(record or {}))
        )
        return session.run(
            folder, resume, on_round or (lambda _: None), should_stop or (lambda: False)
        )


@contextmanager
def _numbers(
    federation: Federation,
    settings: Settings,
    device: torch.device,
    cluster: Cluster | None,
    state: Path | None,
) -> Iterator[Numbers]:
    """All models at x(0): in memory, in files, or on a cluster."""
    if cluster is None:
        yield settings.numbers(federation, device, None if state is None else stored_in(state))
        return
    with cluster_numbers(settings, federation, cluster, state) as numbers:
        yield numbers


@dataclass(frozen=True)
class _Plan:
    """How long to go on, and how often to look."""

    rounds: int | None
    until_clock: float | None
    evaluate_every: int | None
    checkpoint_every: int | None
    looks: int | None
    certify_every: int | None
    certify_devices: int | None
    apart: int = (
        1  # rounds between two looks at least, where the user has not said how many there are to be
    )

    def __post_init__(self) -> None:
        if (self.rounds is None) == (self.until_clock is None):
            raise ConfigError("give either rounds=... or until_clock=..., to say when to stop")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} must be 1 or more")
        if self.until_clock is not None and not 0 < self.until_clock < math.inf:
            raise ConfigError(f"until_clock={self.until_clock} must be a finite number above 0")
        for name, value in (
            ("evaluate_every", self.evaluate_every),
            ("checkpoint_every", self.checkpoint_every),
            ("looks", self.looks),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.certify_every is not None and self.certify_every < 0:
            raise ConfigError(f"certify_every={self.certify_every} must be 0 (never) or more")

    def fraction(self, round_: int, clock: float) -> float:
        """How much of the run is done."""
        return min(
            1.0,
            round_ / self.rounds if self.rounds is not None else clock / (self.until_clock or 1.0),
        )

    def is_done(self, round_: int, clock: float) -> bool:
        """Whether to stop here."""
        return self.fraction(round_, clock) >= 1.0

    def is_look(
        self, last: tuple[int, float], before: tuple[int, float], after: tuple[int, float]
    ) -> bool:
        """Whether an evaluation falls due between two rounds, the last look having been at
        `last`.
        """
        if self.is_done(*after):
            return True
        if self.evaluate_every is not None:
            return after[0] % self.evaluate_every == 0
        if self.looks is None:
            progress = self.fraction(*after) - self.fraction(*last) + 1e-9
            return progress >= 1 / FEWEST_LOOKS or (
                progress >= 1 / MOST_LOOKS and after[0] - last[0] >= self.apart
            )
        if self.rounds is not None:
            return after[0] % max(1, self.rounds // self.looks) == 0
        return int(self.fraction(*before) * self.looks) < int(self.fraction(*after) * self.looks)

    def certified_devices(self, row: int) -> int | None:
        """On how many devices this row of the history is to be certified, as the user has said;
        None: nothing was said.
        """
        if self.certify_every is None and self.certify_devices is None:
            return None
        every = 1 if self.certify_every is None else self.certify_every
        return (self.certify_devices or DEVICES) if every > 0 and row % every == 0 else 0


class _Training:
    """One training from start (or checkpoint) to end."""

    def __init__(
        self,
        federation: Federation,
        settings: Settings,
        plan: _Plan,
        numbers: Numbers,
        notice: Callable[[str], None] | None,
        state: Path | None = None,
    ) -> None:
        self.federation = federation
        self.settings = settings
        self.plan = plan
        self.state = state
        self.numbers = numbers
        device = numbers.sums.total_VF.device
        self.next_devices: Iterator[Collection[int]] = iter(())
        trainer = self.numbers.trainer
        reason = trainer.check_vectorised(self.numbers.global_NF()[0])
        if reason is not None and notice is not None:
            notice(
                f"this model cannot be vectorised, so devices train one after another ({reason})"
            )
        self.notice = notice
        together = device.type != "cpu" and not trainer.one_by_one
        self.evaluator = Evaluator(
            federation, trainer.objective, device, together, settings.measure
        )
        self.certifier = Certifier(self.numbers, federation.sizes)
        work = settings.algorithm.steps[1] * CALL + samples_per_round(federation, settings)
        self.ration = Ration(federation.sizes, work)
        self.machines = settings.machines(federation)
        self.reader = settings.reader(federation)
        self.driver = Driver(self.machines, self.reader)
        self.events = Simulation(self.driver, self._schedule())
        self.player: Player = EventPlayer(numbers, self.events)
        self.ahead = self.compile = False
        self.resumed_engine = ""
        self.history = History()
        self.scores = Scores((), {})
        self.seconds = 0.0
        self.resumed_at = 0.0  # seconds that went before a resume
        self.looking = 0.0  # seconds since then that went into evaluation

    def choose_player(self, ahead: bool | None, compile: bool) -> None:
        """Without events between rounds if that can be, and pays or is asked for."""
        reason = self._why_not_ahead()
        if ahead and reason is not None:
            raise ConfigError(
                f"ahead=True: this run cannot be planned ahead, because {reason}; leave `ahead` out"
            )
        if compile and (reason is not None or ahead is False):
            raise ConfigError(
                "compile=True needs rounds that are planned ahead, which cannot be:"
                f" {reason or 'ahead=False'}; leave it out"
            )
        on_gpu = self.numbers.sums.total_VF.device.type == "cuda"
        self.ahead = reason is None and bool(ahead or compile or (ahead is None and on_gpu))
        self.compile = compile

    def _plan_ahead(self) -> None:
        """From where the run stands, rounds planned ahead; their events are played as well if they
        are logged.
        """
        outline = Outline(self.federation.servers, self._schedule(), self.settings.cloud)
        outline.go_to(self.events.round)
        self.player = ahead = Ahead(self.numbers, outline, self.compile)
        if self.driver.log is not None:
            self.player = AheadWithEvents(ahead, self.events, self.reader)

    def _why_not_ahead(self) -> str | None:
        return self.numbers.devices.why_not_ahead() or why_not_ahead(
            self.federation.servers, self._schedule(), self.settings.cloud
        )

    def run(
        self,
        folder: RunFolder | None,
        resume: bool,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> Run:
        with (
            folder.locked() if folder is not None else nullcontext(),
            workers(self._worker_count()) as crew,
        ):
            self.numbers.use(crew)
            return self._run(folder, resume, on_round, should_stop)

    def _run(
        self,
        folder: RunFolder | None,
        resume: bool,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> Run:
        checkpoint = None if folder is None else folder.inspect(resume)
        driver = self.driver
        if folder is not None:
            self.numbers.devices.saved_in(None)
        if folder is not None and checkpoint is not None:
            self._fast_forward(checkpoint)
            self.numbers.devices.saved_in(folder.checkpoint)
        log = driver.log = (
            None if folder is None else folder.open(checkpoint, resume)
        )  # only now does anything change on disk
        try:
            if self.ahead:
                self._plan_ahead()
            finished = self._play(folder, log, on_round, should_stop)
            result = self._result(finished)
            if log is not None and finished:
                ended = {key: result.summary[key] for key in ("rounds", "clock", "digest")}
                ended |= {"engine": self._engine()} if self._engine() else {}
                log.end({"transitions": driver.transitions, **ended})
        finally:
            if log is not None:
                log.close()
        if folder is not None:
            result.save(folder.path)
        return result

    def _engine(self) -> str:
        """The engine that has added up sums in an order of its own, now or before a resume."""
        return self.numbers.devices.engine or ("ahead" if self.ahead else self.resumed_engine)

    def _worker_count(self) -> int:
        on_cpu = self.numbers.devices.x_NF.device.type == "cpu"
        return torch.get_num_threads() if on_cpu and self.numbers.trainer.divisible else 1

    def _schedule(self) -> Schedule:
        s = self.settings
        return Schedule(
            s.algorithm, s.clock, s.seed, s.active_of(self.federation), s.joins, s.leaves
        )

    def _fast_forward(self, checkpoint: Checkpoint) -> None:
        """Time does not depend on numbers: draw rounds up to the checkpoint without playing them,
        then put its tensors in place.
        """
        last = NONE
        while last.number < checkpoint.round:
            last = next(self.events)
        members = {device for device, _ in members_of(self.machines)}
        absent = self.machines.home.keys() - members
        self.numbers.load_state(dict(checkpoint.tensors), self.reader.held, absent)
        self.player = EventPlayer(self.numbers, self.events, last)
        if self.numbers.digest() != checkpoint.digest:
            raise RecordError(
                "the checkpoint is damaged: its tensors do not have the digest it names; remove it"
                " to start over"
            )
        self.history = checkpoint.history
        self.resumed_engine = checkpoint.engine
        self.scores = self._scores()
        self.seconds = self.resumed_at = checkpoint.seconds

    def _play(
        self,
        folder: RunFolder | None,
        log: LogWriter | None,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        player, plan = self.player, self.plan
        self._look_ahead()
        began = time.perf_counter() - self.seconds
        if not self.history:
            self._warn()
            self._look()
        while not plan.is_done(player.round, player.now):
            before = (player.round, player.now)
            self.numbers.devices.will_need(next(self.next_devices, ()))
            player.play_round()
            after = (player.round, player.now)
            look = plan.is_look((self.history.last.round, self.history.last.clock), before, after)
            if look:
                self._look()
            self.seconds = time.perf_counter() - began
            stop = should_stop()
            due = look if plan.checkpoint_every is None else after[0] % plan.checkpoint_every == 0
            if folder is not None and log is not None and (due or stop or plan.is_done(*after)):
                folder.write_checkpoint(self._checkpoint(log))
                self.numbers.devices.saved_in(folder.checkpoint)
            on_round(Progress(*after, plan.fraction(*after), self.history.last))
            if stop:
                return plan.is_done(*after)
        return True

    def _look_ahead(self) -> None:
        """Who works in the rounds after the next one, so that their models can be fetched
        meanwhile.
        """
        if self.state is not None:
            settings, federation = self.settings, self.federation
            ahead = devices_of_rounds(
                federation.servers,
                lambda: settings.machines(federation),
                self._schedule(),
                settings.cloud,
            )
            self.next_devices = islice(ahead, self.player.round + 1, None)

    def _checkpoint(self, log: LogWriter) -> Checkpoint:
        self._settle()
        digest = self.numbers.digest()
        notes = notes_of(self.federation, self.scores.devices, self.scores.homes)
        return Checkpoint(
            self.player.round,
            log.sync(),
            self.seconds,
            digest,
            self.history,
            self.numbers.state(),
            notes,
            self._engine(),
        )

    def _warn(self) -> None:
        """Say before a run starts what may make it diverge, as far as a glance can tell, and
        whether X cuts initial weights.
        """
        for doubt in doubts(self.federation, self.settings, self.numbers):
            self._say(doubt, DivergenceWarning, calls=7)
        cut = at_the_border(self.numbers, [])
        if cut is not None:
            self._say(f"before the first step {cut}", BorderWarning, calls=7)
        if self.notice is not None and (remark := untested(self.federation)):
            self.notice(remark)

    def _say(self, text: str, category: type[UserWarning], calls: int) -> None:
        """To the listener; without one as a warning at the call of `train`, so many calls up."""
        if self.notice is not None:
            self.notice(text)
        else:
            warnings.warn(text, category, stacklevel=calls)

    # ---------------------------------------------------------------------------------------------
    # evaluation
    def _settle(self) -> None:
        """Have all work done that has been asked for so far."""
        self.player.settle()

    def _scores(self) -> Scores:
        self._settle()
        return scores_of(self.numbers, self.machines, self.evaluator)

    def _look(self) -> None:
        """Add a row to the history."""
        self._settle()
        began = time.perf_counter()
        self.scores = self._scores()
        row = row_of(self.numbers, self.machines, self.scores, self.player.now, Certificates())
        self.looking += time.perf_counter() - began
        found = self._certificates([device for device, _ in members_of(self.machines)])
        self.history.append(
            replace(
                row,
                round=self.player.round,
                activations=self.player.activations,
                **asdict(found),
            )
        )

    def _certificates(self, members: list[int]) -> Certificates:
        """Those of this row, if it is to have any."""
        devices = self.plan.certified_devices(len(self.history))
        if devices is None:
            devices = self.ration.devices(members, self.player.round, self._certified())
        return self.certifier.certificates(members, devices) if devices else Certificates()

    def _last_certificates(self) -> dict[str, float]:
        """Those of the final models, for the summary; empty where there are none."""
        last = self.history.last
        found = Certificates(last.gap, last.worst_gap, last.pull, last.spread)
        if math.isnan(last.pull) and self.plan.certify_every != 0:
            members = [device for device, _ in members_of(self.machines)]
            devices = self.ration.devices_at_the_end(members, self.player.round, self._certified())
            found = self.certifier.certificates(members, self.plan.certify_devices or devices)
        return {name: value for name, value in asdict(found).items() if not math.isnan(value)}

    def _certified(self) -> int:
        return sum(not math.isnan(row.pull) for row in self.history)

    def _share(self, seconds: float) -> float:
        return round(seconds / max(self.seconds - self.resumed_at, seconds, 1e-9), 3)

    def _result(self, finished: bool) -> Run:
        self._settle()
        numbers, last = self.numbers, self.history.last
        home = self.machines.home
        x_NF = numbers.devices.x_NF
        if isinstance(x_NF, Rows):
            personal = x_NF.kept()
        else:
            personal = torch.stack(
                [
                    numbers.personal(device, home[device])
                    for device in range(self.federation.devices)
                ]
            ).cpu()
        certificates = self._last_certificates()
        border = at_the_border(numbers, [device for device, _ in members_of(self.machines)])
        if border is not None:
            self._say(border, BorderWarning, calls=6)
        summary = {
            "algorithm": self.settings.algorithm.name,
            "cloud": self.settings.cloud.name,
            "seed": self.settings.seed,
            "rounds": self.player.round,
            "clock": self.player.now,
            "global_accuracy": last.global_accuracy,
            "personal_accuracy": last.personal_accuracy,
            "measure": self.settings.measure,
            "server_accuracy": [round(score, 6) for score in self.scores.servers],
            "mean_model_accuracy": self.evaluator.score(
                numbers.global_NF().double().mean(0).to(self.settings.dtype)
            ),
            "seconds": round(self.seconds, 3),
            "evaluation_share": self._share(self.looking),
            "certificates": certificates,
            "certificate_share": self._share(self.certifier.seconds),
            "digest": numbers.digest(),
            **({} if border is None else {"notices": [border]}),
        }
        if report := numbers.devices.report():
            summary[numbers.devices.engine] = report
        return Run(
            self.federation,
            self.history,
            personal,
            numbers.global_NF().cpu(),
            summary,
            self.scores.devices,
            finished,
            self.scores.homes,
        )
