"""`train`: from settings to a `Run`, on a virtual clock, with evaluations and checkpoints on the
way.
"""

import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedbcd.algorithm.methods import Algorithm
from fedbcd.algorithm.wire import Layer
from fedbcd.compute.ahead import Ahead, AheadWithEvents
from fedbcd.compute.backends import BackendChoice, choices
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.players import NONE, EventPlayer, Player
from fedbcd.compute.store import devices_of_rounds, stored_in
from fedbcd.compute.workers import workers
from fedbcd.config import called, convert
from fedbcd.data.federation import Federation, check_federation
from fedbcd.data.measure import Measure, untested
from fedbcd.engines.cluster.engine import cluster_numbers
from fedbcd.engines.cluster.options import chosen_cluster
from fedbcd.engines.interrupts import stop_on_interrupt
from fedbcd.engines.listeners import check_listeners
from fedbcd.engines.look import all_personal, device_table, members_of
from fedbcd.engines.progress import LiveModels, Progress
from fedbcd.engines.result import Run, notes_of
from fedbcd.engines.saving import Checkpoints, folder_of
from fedbcd.engines.setup import (
    find_torch_device,
    make_machines,
    make_numbers,
    make_reader,
    make_schedule,
    products_in,
    threads_inside_torch,
)
from fedbcd.engines.warnings import at_the_border, setting_warnings
from fedbcd.engines.watcher import Watcher
from fedbcd.errors import BorderWarning, ConfigError, DivergenceWarning, RecordError
from fedbcd.protocol.clouds import Cloud
from fedbcd.record.eventlog import LogWriter
from fedbcd.record.runfolder import Checkpoint, RunFolder, recorded_in
from fedbcd.record.start import keep_copy
from fedbcd.record.stopping import Plateau
from fedbcd.schedule.arrays import Outline, why_not_ahead
from fedbcd.schedule.availability import Availability, PerServer
from fedbcd.schedule.churn import Churn
from fedbcd.schedule.deadline import Deadline
from fedbcd.schedule.delays import Clock
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.spec import OPTIONS, Cluster, Precision, RunSpec, in_words


@called(device="torch_device")
def train(
    federation: Federation,
    algorithm: Algorithm | RunSpec,
    *,
    cloud: Cloud | None = None,
    clock: Clock | None = None,
    active: PerServer | None = None,
    seed: int | None = None,
    joins: Mapping[int, int] | None = None,
    leaves: Mapping[int, int] | None = None,
    availability: Availability | None = None,
    churn: Churn | None = None,
    deadline: Deadline | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    storage: torch.dtype | None = None,
    precision: Precision | None = None,
    start: str | Path | None = None,
    uploads: Sequence[Layer] | None = None,
    measure: Measure | None = None,
    rounds: int | None = None,
    until_clock: float | None = None,
    stop: Plateau | None = None,
    evaluate_every: int | None = None,
    looks: int | None = None,
    certify_every: int | None = None,
    certify_devices: int | None = None,
    device_tables: bool | None = None,
    checkpoint_every: int | None = None,
    checkpoint_seconds: float | None = None,
    best: str | None = None,
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
                      progress (a `Progress`, with the models of the round for who asks), remarks
                      in a sentence (without it, what may diverge is a `DivergenceWarning`), and a
                      polite way to end early. Ctrl-C is one, too: the first ends the run after its
                      present round and returns what there is (`run.interrupted`), the second
                      raises KeyboardInterrupt
    """
    said = {name: value for name, value in locals().items() if name in ("cloud", *OPTIONS)}
    check_federation(federation)
    check_listeners(on_round=on_round, on_notice=on_notice, should_stop=should_stop)
    out = convert(out, str | Path | None, "out")
    record = convert(record, Mapping[str, Any] | None, "record")
    spec = (algorithm if isinstance(algorithm, RunSpec) else RunSpec(algorithm)).changed(said)
    if resume and out is None:
        raise ConfigError("resume=True goes on with what is in a folder: give it, out=...")
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
    if cluster is not None and spec.start is not None:
        raise ConfigError(
            f"start={str(spec.start)!r}: actors of a cluster begin at x(0); leave it or engine out"
        )
    with (
        products_in(spec.precision),
        threads_inside_torch(spec.threads),
        _numbers(federation, spec, where, cluster) as numbers,
    ):
        session = _Training(federation, spec, numbers, on_notice)
        session.choose_player()
        folder = None if out is None else folder_of(Path(out), federation, spec, record or {})
        with stop_on_interrupt(_say_on_screen) as interrupted:
            asked = should_stop or (lambda: False)
            ends = lambda: asked() or interrupted()  # noqa: E731
            return session.run(folder, resume, on_round or (lambda _: None), ends)


def _say_on_screen(text: str) -> None:
    sys.stderr.write(f"{text}\n")


train.__doc__ = f"{train.__doc__}\n    Options, None as in the `RunSpec`:\n\n{in_words()}\n"


def explain_backend(federation: Federation, spec: RunSpec) -> list[BackendChoice]:
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


class _Training:
    """One training from start (or checkpoint) to end."""

    def __init__(
        self,
        federation: Federation,
        spec: RunSpec,
        numbers: Numbers,
        notice: Callable[[str], None] | None,
    ) -> None:
        self.federation, self.spec, self.numbers = federation, spec, numbers
        self.method, self.notice = numbers.method, notice
        reason = numbers.trainer.check_vectorised(numbers.global_VF()[0])
        numbers.trainer.rehearse()
        if reason is not None and notice is not None:
            notice(
                f"this model cannot be vectorised, so devices train one after another ({reason})"
            )
        self.machines = make_machines(spec, federation)
        self.reader = make_reader(spec, federation)
        self.driver = Driver(self.machines, self.reader)
        self.events = Simulation(self.driver, self._schedule())
        self.player: Player = EventPlayer(numbers, self.events, self.reader.done)
        self.watcher = Watcher(federation, spec, numbers, self.machines)
        self.watcher.evaluator.check(numbers.global_VF()[0])
        self.live = LiveModels(federation, spec.seed, numbers, self.machines)
        self.next_devices: Iterator[Collection[int]] = iter(())
        self.ahead = self.compile = False
        self.resumed_engine = ""
        self.seconds = 0.0
        self.resumed_at = 0.0  # seconds that went before a resume

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

    def choices(self) -> list[BackendChoice]:
        """Which backend computes, and why not another."""
        slow = "on a CPU it does not pay; ahead = true asks for it"
        return choices(self.numbers, "" if self.ahead else self._why_not_ahead() or slow)

    def _plan_ahead(self) -> None:
        """From where the run stands, rounds planned ahead; their events are played as well if they
        are logged.
        """
        done = Effort(self.method, self.federation.sizes)
        outline = Outline(self.federation.servers, self._schedule(), self.spec.cloud, done)
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
        driver, state = self.driver, self.spec.state
        kept = Path(state) if folder is None and state is not None else None
        self.watcher.keep_best(kept if folder is None else folder.path)
        if folder is not None:
            self.numbers.devices.saved_in(None)
        if folder is not None and checkpoint is not None:
            self._fast_forward(checkpoint)
            self.numbers.devices.saved_in(folder.checkpoint)
        log = driver.log = (
            None if folder is None else folder.open(checkpoint, resume)
        )  # only now does anything change on disk
        if folder is not None and self.spec.start is not None:
            keep_copy(self.spec.start, folder.path)
        try:
            if self.ahead:
                self._plan_ahead()
            settled = not self.ahead or self.spec.cloud.sync  # saving changes no bit then
            saving = Checkpoints(folder, log, self.spec, by_time=settled)
            finished = self._play(saving, on_round, should_stop)
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
        self.player = EventPlayer(self.numbers, self.events, self.reader.done, last)
        if self.numbers.digest() != checkpoint.digest:
            raise RecordError(
                "the checkpoint is damaged: its tensors do not have the digest it names; remove it"
                " to start over"
            )
        self.resumed_engine = checkpoint.engine
        if (remark := self.watcher.go_on(checkpoint.history)) and self.notice is not None:
            self.notice(remark)
        self.seconds = self.resumed_at = checkpoint.seconds

    def _play(
        self,
        saving: Checkpoints,
        on_round: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        player, watcher = self.player, self.watcher
        history, looks = watcher.history, watcher.looks
        self.live.player = player
        self._look_ahead()
        began = time.perf_counter() - self.seconds
        if not history:
            self._warn()
            watcher.look(player)
        while not watcher.is_over(player):
            before = (player.round, player.now)
            self.numbers.devices.will_need(next(self.next_devices, ()))
            player.play_round()
            after = (player.round, player.now)
            look = looks.is_look((history.last.round, history.last.clock), before, after)
            if look:
                watcher.look(player)
            self.seconds = time.perf_counter() - began
            stop, over = should_stop(), watcher.is_over(player)
            if saving.are_due(player.round, look, last=stop or over):
                self._save(saving)
            fraction = 1.0 if over else looks.fraction(*after)
            seen, judged = history.last if look else None, history.first_measure
            on_round(Progress(*after, fraction, history.last, seen, self.live, judged))
            if stop:
                return over
        return True

    def _save(self, saving: Checkpoints) -> None:
        assert saving.folder is not None
        assert saving.log is not None
        saving.write(self._checkpoint(saving.log))
        self.numbers.devices.saved_in(saving.folder.checkpoint)
        if self.watcher.keeper is not None:
            self.watcher.keeper.saved(self.watcher.history)

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
        self.player.settle()
        digest, scores = self.numbers.digest(), self.watcher.scores
        measures = self.watcher.history.measures
        notes = notes_of(self.federation, scores.devices, scores.homes, measures)
        return Checkpoint(
            self.player.round,
            log.sync(),
            self.seconds,
            digest,
            self.watcher.history,
            self.numbers.state(),
            notes,
            self._engine(),
        )

    def _warn(self) -> None:
        """Say before a run starts what may make it diverge, as far as a glance can tell, and
        whether X cuts initial weights.
        """
        for doubt in setting_warnings(self.federation, self.spec, self.numbers):
            self._say(doubt, DivergenceWarning, calls=8)
        cut = at_the_border(self.numbers, [])
        if cut is not None:
            self._say(f"before the first step {cut}", BorderWarning, calls=8)
        if self.notice is not None and (remark := untested(self.federation)):
            self.notice(remark)

    def _say(self, text: str, category: type[UserWarning], calls: int) -> None:
        """To the listener; without one a warning at the call of `train`, `calls` calls up."""
        if self.notice is not None:
            self.notice(text)
        else:
            warnings.warn(text, category, stacklevel=calls)

    def _result(self, finished: bool) -> Run:
        self.player.settle()
        scores, keeper = self.watcher.scores, self.watcher.keeper
        return Run(
            self.federation,
            self.watcher.history,
            all_personal(self.numbers, self.machines.home),
            self.numbers.global_VF().cpu(),
            self._summary() | ({} if finished else {"interrupted": True}),
            scores.devices,
            finished,
            scores.homes,
            self.spec,
            None if keeper is None else keeper.best(self.watcher.history),
            device_table(self.federation, scores),
            self.watcher.tables,
        )

    def _summary(self) -> dict[str, Any]:
        numbers, watcher, player = self.numbers, self.watcher, self.player
        certificates = watcher.last_certificates(player.round)
        border = at_the_border(numbers, watcher.members())
        if border is not None:
            self._say(border, BorderWarning, calls=8)
        summary = {
            "algorithm": self.method.name,
            "cloud": self.spec.cloud.name,
            "seed": self.spec.seed,
            "rounds": player.round,
            "clock": player.now,
            "seconds": round(self.seconds, 3),
            **watcher.summary(self.seconds - self.resumed_at),
            "certificates": certificates,
            "digest": numbers.digest(),
            "backend": next(c.backend for c in self.choices() if not c.reason),
            **({} if border is None else {"notices": [border]}),
        }
        if report := numbers.devices.report():
            summary[numbers.devices.engine] = report
        return summary
