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

from fedbcd.algorithm.methods import Algorithm
from fedbcd.compute.ahead import Ahead, AheadWithEvents
from fedbcd.compute.backends import Choice, choices
from fedbcd.compute.certify import CALL, DEVICES, Certificates, Certifier, Ration
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.players import NONE, EventPlayer, Player
from fedbcd.compute.rows import Rows
from fedbcd.compute.store import devices_of_rounds, stored_in
from fedbcd.compute.workers import workers
from fedbcd.config import renamed
from fedbcd.data.federation import Federation
from fedbcd.data.measure import Measure, untested
from fedbcd.engines.cluster.engine import cluster_numbers
from fedbcd.engines.cluster.options import chosen_cluster
from fedbcd.engines.look import members_of, row_of, scores_of
from fedbcd.engines.result import Progress, Run, notes_of
from fedbcd.engines.setup import (
    find_torch_device,
    make_machines,
    make_numbers,
    make_reader,
    make_schedule,
    products_in,
    rounds_between_looks,
    samples_per_round,
    threads_inside_torch,
)
from fedbcd.engines.warnings import at_the_border, doubts
from fedbcd.errors import BorderWarning, ConfigError, DivergenceWarning, RecordError
from fedbcd.protocol.clouds import Cloud
from fedbcd.record.eventlog import LogWriter
from fedbcd.record.history import History
from fedbcd.record.runfolder import Checkpoint, RunFolder, recorded_in
from fedbcd.schedule.arrays import Outline, why_not_ahead
from fedbcd.schedule.delays import Clock
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.spec import OPTIONS, Cluster, Precision, RunSpec, in_words

MOST_LOOKS, FEWEST_LOOKS = 20, 4  # where the user has not said
# so many times as long as a look is the training between two; a GPU tests faster than it takes
# small steps
ON_GPU = 10.0


@renamed(device="torch_device")
def train(
    federation: Federation,
    algorithm: Algorithm | RunSpec,
    *,
    cloud: Cloud | None = None,
    clock: Clock | None = None,
    active: int | None = None,
    seed: int | None = None,
    joins: Mapping[int, int] | None = None,
    leaves: Mapping[int, int] | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    storage: torch.dtype | None = None,
    precision: Precision | None = None,
    measure: Measure | None = None,
    rounds: int | None = None,
    until_clock: float | None = None,
    evaluate_every: int | None = None,
    looks: int | None = None,
    certify_every: int | None = None,
    certify_devices: int | None = None,
    checkpoint_every: int | None = None,
    torch_device: str | torch.device | None = None,
    threads: int | None = None,
    state: str | Path | None = None,
    ahead: bool | None = None,
    compile: bool | None = None,
    engine: str | Cluster | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    record: Mapping[str, Any] | None = None,
    on_round: Callable[[Progress], None] | None = None,
    on_notice: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Train personal and global models on a virtual clock.

    algorithm         with its settings; or a whole `RunSpec`, of which the keywords change what
                      they name
    cloud             SyncCloud() by default; AsyncCloud(first=B), RigorousCloud(first=B),
                      GraphCloud(mixing)
    out, resume       a folder for log, checkpoints and models; resume=True goes on with what is
                      there, and as it was set, where `algorithm` was not told otherwise
    record            plain data to keep at the head of the event log, e.g. the job file
    on_round, on_notice, should_stop
                      progress, remarks in a sentence (without it, what may diverge is a
                      `DivergenceWarning`), and a polite way to end early
    """
    said = {name: value for name, value in locals().items() if name in ("cloud", *OPTIONS)}
    spec = (algorithm if isinstance(algorithm, RunSpec) else RunSpec(algorithm)).changed(said)
    if out is not None and resume:
        spec = spec.going_on(recorded_in(Path(out)))
    spec.check(federation)
    spec.check_budget()
    where, cluster = find_torch_device(spec.torch_device), chosen_cluster(spec.engine)
    if cluster is not None and where.type != "cpu":
        raise ConfigError(
            f"torch_device={str(where)!r}: on a cluster actors have GPUs, the driver needs none;"
            " use Cluster(gpus=1.0)"
        )
    with (
        products_in(spec.precision),
        threads_inside_torch(spec.threads),
        _numbers(federation, spec, where, cluster) as numbers,
    ):
        session = _Training(federation, spec, numbers, on_notice)
        session.choose_player()
        folder = (
            None
            if out is None
            else RunFolder(Path(out), spec.identity(federation), dict(record or {}))
        )
        return session.run(
            folder, resume, on_round or (lambda _: None), should_stop or (lambda: False)
        )


train.__doc__ = f"{train.__doc__}\n    Options, None as in the `RunSpec`:\n\n{in_words()}\n"


def explain_backend(federation: Federation, spec: RunSpec) -> list[Choice]:
    """Which backend would compute this run, and why not another; nothing is trained."""
    spec.check(federation)
    where, cluster = find_torch_device(spec.torch_device), chosen_cluster(spec.engine)
    with products_in(spec.precision), _numbers(federation, spec, where, cluster) as numbers:
        session = _Training(federation, spec, numbers, None)
        session.choose_player()
        return session.choices()


@contextmanager
def _numbers(
    federation: Federation, spec: RunSpec, device: torch.device, cluster: Cluster | None
) -> Iterator[Numbers]:
    """All models at x(0): in memory, in files, or on a cluster."""
    state = None if spec.state is None else Path(spec.state)
    if cluster is None:
        yield make_numbers(spec, federation, device, None if state is None else stored_in(state))
        return
    with cluster_numbers(spec, federation, cluster, state) as numbers:
        yield numbers


@dataclass(frozen=True)
class _Looks:
    """When to look at the models, and with which certificates."""

    spec: RunSpec
    # rounds between two looks at least, where the user has not said how many there are to be
    apart: int

    def fraction(self, round_: int, clock: float) -> float:
        """How much of the run is done."""
        rounds, until = self.spec.rounds, self.spec.until_clock
        return min(1.0, round_ / rounds if rounds is not None else clock / (until or 1.0))

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
        rounds, looks, every = self.spec.rounds, self.spec.looks, self.spec.evaluate_every
        if every is not None:
            return after[0] % every == 0
        if looks is None:
            progress = self.fraction(*after) - self.fraction(*last) + 1e-9
            return progress >= 1 / FEWEST_LOOKS or (
                progress >= 1 / MOST_LOOKS and after[0] - last[0] >= self.apart
            )
        if rounds is not None:
            return after[0] % max(1, rounds // looks) == 0
        return int(self.fraction(*before) * looks) < int(self.fraction(*after) * looks)

    def certified_devices(self, row: int) -> int | None:
        """On how many devices this row of the history is to be certified, as the user has said;
        None: nothing was said.
        """
        if self.spec.certify_every is None and self.spec.certify_devices is None:
            return None
        every = 1 if self.spec.certify_every is None else self.spec.certify_every
        return (self.spec.certify_devices or DEVICES) if every > 0 and row % every == 0 else 0


class _Training:
    """One training from start (or checkpoint) to end."""

    def __init__(
        self,
        federation: Federation,
        spec: RunSpec,
        numbers: Numbers,
        notice: Callable[[str], None] | None,
    ) -> None:
        self.federation = federation
        self.spec = spec
        self.numbers = numbers
        device = numbers.sums.total_VU.device
        self.method = numbers.method
        slower = () if device.type == "cpu" else (ON_GPU,)
        self.plan = _Looks(spec, rounds_between_looks(federation, spec, *slower))
        self.next_devices: Iterator[Collection[int]] = iter(())
        trainer = self.numbers.trainer
        reason = trainer.check_vectorised(self.numbers.global_VF()[0])
        if reason is not None and notice is not None:
            notice(
                f"this model cannot be vectorised, so devices train one after another ({reason})"
            )
        self.notice = notice
        together = device.type != "cpu" and not trainer.one_by_one
        self.evaluator = Evaluator(
            federation, trainer.objective, device, together, spec.chosen_measure
        )
        self.certifier = Certifier(self.numbers, federation.sizes)
        work = self.method.steps[1] * CALL + samples_per_round(federation, spec)
        self.ration = Ration(federation.sizes, work)
        self.machines = make_machines(spec, federation)
        self.reader = make_reader(spec, federation)
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

    def choose_player(self) -> None:
        """Without events between rounds if that can be, and pays or is asked for."""
        ahead, compile = self.spec.ahead, self.spec.compile
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
        on_gpu = self.numbers.sums.total_VU.device.type == "cuda"
        self.ahead = reason is None and bool(ahead or compile or (ahead is None and on_gpu))
        self.compile = compile

    def choices(self) -> list[Choice]:
        """Which backend computes, and why not another."""
        slow = "on a CPU it does not pay; ahead = true asks for it"
        return choices(self.numbers, "" if self.ahead else self._why_not_ahead() or slow)

    def _plan_ahead(self) -> None:
        """From where the run stands, rounds planned ahead; their events are played as well if they
        are logged.
        """
        outline = Outline(self.federation.servers, self._schedule(), self.spec.cloud)
        outline.go_to(self.events.round)
        self.player = ahead = Ahead(self.numbers, outline, self.compile)
        if self.driver.log is not None:
            self.player = AheadWithEvents(ahead, self.events, self.reader)

    def _why_not_ahead(self) -> str | None:
        return self.numbers.devices.why_not_ahead() or why_not_ahead(
            self.federation.servers, self._schedule(), self.spec.cloud
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
        on_cpu = self.numbers.sums.total_VU.device.type == "cpu"
        return torch.get_num_threads() if on_cpu and self.numbers.trainer.divisible else 1

    def _schedule(self) -> Schedule:
        return make_schedule(self.spec, self.federation)

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
            every = self.spec.checkpoint_every
            due = look if every is None else after[0] % every == 0
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
        if self.spec.state is not None:
            spec, federation = self.spec, self.federation
            ahead = devices_of_rounds(
                federation.servers,
                lambda: make_machines(spec, federation),
                self._schedule(),
                spec.cloud,
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
        for doubt in doubts(self.federation, self.spec, self.numbers):
            self._say(doubt, DivergenceWarning, calls=8)
        cut = at_the_border(self.numbers, [])
        if cut is not None:
            self._say(f"before the first step {cut}", BorderWarning, calls=8)
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
        if math.isnan(last.pull) and self.spec.certify_every != 0:
            members = [device for device, _ in members_of(self.machines)]
            devices = self.ration.devices_at_the_end(members, self.player.round, self._certified())
            found = self.certifier.certificates(members, self.spec.certify_devices or devices)
        return {name: value for name, value in asdict(found).items() if not math.isnan(value)}

    def _certified(self) -> int:
        return sum(not math.isnan(row.pull) for row in self.history)

    def _share(self, seconds: float) -> float:
        return round(seconds / max(self.seconds - self.resumed_at, seconds, 1e-9), 3)

    def _result(self, finished: bool) -> Run:
        self._settle()
        numbers, last = self.numbers, self.history.last
        home = self.machines.home
        x_NF = numbers.personal_NF
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
            self._say(border, BorderWarning, calls=7)
        summary = {
            "algorithm": self.method.name,
            "cloud": self.spec.cloud.name,
            "seed": self.spec.seed,
            "rounds": self.player.round,
            "clock": self.player.now,
            "global_accuracy": last.global_accuracy,
            "personal_accuracy": last.personal_accuracy,
            "measure": self.spec.chosen_measure,
            "server_accuracy": [round(score, 6) for score in self.scores.servers],
            "mean_model_accuracy": self.evaluator.score(
                numbers.global_VF().double().mean(0).to(self.spec.dtype)
            ),
            "seconds": round(self.seconds, 3),
            "evaluation_share": self._share(self.looking),
            "certificates": certificates,
            "certificate_share": self._share(self.certifier.seconds),
            "digest": numbers.digest(),
            "backend": next(c.backend for c in self.choices() if not c.reason),
            **({} if border is None else {"notices": [border]}),
        }
        if report := numbers.devices.report():
            summary[numbers.devices.engine] = report
        return Run(
            self.federation,
            self.history,
            personal,
            numbers.global_VF().cpu(),
            summary,
            self.scores.devices,
            finished,
            self.scores.homes,
        )
