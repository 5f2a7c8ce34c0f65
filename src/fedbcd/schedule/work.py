"""What a round asks for, as values, and the one place where transitions of the machines are read.

A schedule is an iterator of `Round`s. To compute is a fold over them (`compute.numbers.Numbers`),
which knows no clock, no machine and no cloud.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedbcd.protocol import messages as m
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import Actor, ModelRef
from fedbcd.schedule.changes import (
    Accept,
    Admit,
    CountNobody,
    Dismiss,
    Recall,
    Recount,
    Restore,
)
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.mixing import weights_of


@dataclass(frozen=True, slots=True)
class Session:
    """One device's local work: an activation (towards `model`), or an offline round."""

    device: int
    session: int  # its number, by which mini-batches are drawn
    steps: int  # K_i
    model: ModelRef | None
    offline: bool
    activation: int = -1


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of one kind. Each device is there at most once, so all may run at the same time."""

    sessions: tuple[Session, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Uploads enter sums, in order of arrival: (server, device, age), the age being how many
    versions of z were made since the one that it began from.
    """

    uploads: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Open:
    """A phase begins: where only the active count, nobody does yet."""

    server: int


@dataclass(frozen=True, slots=True)
class Report:
    """Sync-cloud: this server's sum is on its way, so a global step reads it as it is now."""

    server: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Eq. (6a). `weights` has a row for each result; None: all get the mean."""

    models: tuple[ModelRef, ...]
    results: tuple[ModelRef, ...]
    weights: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Step:
    """Eq. (6b); `alone`: from the server's own z, of which there has been no mix."""

    server: int
    mixed: ModelRef
    result: ModelRef
    alone: bool = False


@dataclass(frozen=True, slots=True)
class StepGlobal:
    """Eq. (5), `iterations` times."""

    iterations: int
    model: ModelRef
    result: ModelRef


@dataclass(frozen=True, slots=True)
class Adopt:
    """From here on this server holds this model."""

    server: int
    model: ModelRef


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will read these models again."""

    models: tuple[ModelRef, ...]


Instruction = (
    Sessions
    | Count
    | Open
    | Report
    | Mix
    | Step
    | StepGlobal
    | Adopt
    | Admit
    | Dismiss
    | CountNobody
    | Recall
    | Recount
    | Accept
    | Restore
    | Forget
)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the coordinator: all that has happened since the one before."""

    number: int
    clock: float
    activations: int  # uploads until its end
    work: tuple[Instruction, ...]

    @property
    def devices(self) -> set[int]:
        """Whose models it reads and changes."""
        return {
            session.device
            for part in self.work
            if isinstance(part, Sessions)
            for session in part.sessions
        }


class Reader:
    """Turns transitions into instructions; it is shown every transition of its actors, in order.

    Local work is due only when its result is read, so that all that is pending is one batch. What
    the reader remembers are handles and counters: to resume, a schedule is read again from its
    start and its rounds are thrown away.
    """

    def __init__(
        self,
        cloud: Cloud,
        servers: int,
        remember: Collection[int] = (),
        undone: Collection[tuple[int, int]] = (),
        done: Effort | None = None,
    ) -> None:
        """`remember`: devices that will be restored. `undone`: activations, (device, number), that
        come to nothing, so they are not computed.
        """
        self.held = first_models(cloud, servers)  # the model of each server
        self.done = done or Effort()
        self.absent: set[int] = set()  # devices that have left and not come back
        self._cloud, self._remember, self._undone = cloud, remember, undone
        self._models = set(self.held)
        self._at_work: dict[int, m.Train | m.Pull] = {}
        self._granted: dict[int, m.Activated] = {}  # sent; its upload is not accepted yet
        self._begun: dict[int, ModelRef] = {}  # device -> what its latest activation began from
        self._awaited: Counter[ModelRef] = Counter()  # w_n -> servers that have not stepped from it
        self._incarnation: dict[int, int] = {}
        self._lost: set[ModelRef] = set()  # made by a generation that is over; who uses them?
        self._sessions: list[Session] = []
        self._uploads: list[tuple[int, int, int]] = []
        self._work: list[Instruction] = []

    def apply(self, actor: Actor, event: m.Event, commands: Sequence[m.Command]) -> None:
        """One transition."""
        number = -1 if actor == m.COORDINATOR else m.number_of(actor)
        match event:
            case m.Trained():
                self._trained(number, event)
            case m.AnswersLost():
                for model in event.models:
                    self._stepped_from(model)
            case m.Failed():
                self._at_work.pop(number, None)  # or it was an offline round
            case m.OfflineTrained():
                self._sessions.append(Session(number, event.session, event.steps, None, True))
                self.done.add((number,), event.steps, offline=True)
            case m.Restored() if event.incarnation > self._incarnation.get(number, 0):
                self._incarnation[number] = event.incarnation
                self._at_work.pop(number, None)
                self._due(Restore(number, event.model))
            case m.Recalled():
                if event.incarnation > self._incarnation.get(number, 0):
                    self._incarnation[number] = event.incarnation
                    self._at_work.pop(number, None)
                if commands:  # it brings what it has, perhaps once more
                    self._due(Recall(number))
        for command in commands:
            if isinstance(command, m.Send):
                self._sent(number, event, command)
            else:
                self._command(number, command)

    def take(self, number: int, clock: float, activations: int) -> Round:
        """End a round here; nothing stays behind."""
        self._flush()
        work, self._work = tuple(self._work), []
        return Round(number, clock, activations, work)

    @property
    def is_settled(self) -> bool:
        """Whether all servers of the mixes so far have stepped."""
        return not self._awaited

    # ---------------------------------------------------------------------------------------------
    # transitions
    def _trained(self, device: int, event: m.Trained) -> None:
        work = self._at_work.pop(device)
        if (device, event.activation) not in self._undone:
            self._sessions.append(
                Session(device, work.session, event.steps, work.model, False, event.activation)
            )
            self.done.add((device,), event.steps, offline=False)

    def _sent(self, number: int, event: m.Event, command: m.Send) -> None:
        match command.message:
            case m.Activated() as granted:
                device = m.number_of(command.to)
                self._granted[device], self._begun[device] = granted, granted.model
            case m.Declined() as declined:
                self._release(m.number_of(command.to), declined.activation)
            case m.Acknowledged() as done:
                device = m.number_of(command.to)
                if self._release(device, done.activation) and device in self._remember:
                    self._due(Accept(device))
            case m.ServerReady() if self._cloud.sync and not isinstance(event, m.RetryDue):
                self._work.append(Report(number))

    def _release(self, device: int, activation: int) -> bool:
        """This activation is over, for the first time."""
        granted = self._granted.get(device)
        if granted is None or granted.activation != activation:
            return False
        del self._granted[device]
        return True

    def _command(self, number: int, command: m.Command) -> None:
        match command:
            case m.Train() | m.Pull():
                self._check(command.model)
                self._at_work[number] = command
            case m.Absorb():
                begun = m.version_of(self._begun[command.device])
                age = m.version_of(self.held[number]) - begun
                self._uploads.append((number, command.device, age))
            case m.OpenPhase():
                self._work.append(Open(number))
            case m.MixModels():
                self._check(*command.models)
                weights = weights_of(self._cloud, command.round, command.servers)
                self._due(Mix(command.models, command.results, weights))
                self._awaited.update(command.results)
                self._models.update(command.results)
            case m.StepModel():
                self._check(command.mixed)
                alone = command.mixed not in self._awaited
                self._due(Step(number, command.mixed, command.result, alone))
                self._models.add(command.result)
                self._stepped_from(command.mixed)
                self._hold(number, command.result)
            case m.StepLost():
                self._check(command.mixed)
                alone = command.mixed not in self._awaited
                self._due(Step(number, command.mixed, command.result, alone))
                self._models.add(command.result)
                self._lost.add(command.result)
            case m.StepGlobal():
                self._check(command.model)
                self._due(StepGlobal(command.iterations, command.model, command.result))
                self._models.add(command.result)
            case m.AdoptModel():
                self._check(command.model)
                self._work.append(Adopt(number, command.model))
                self._hold(number, command.model)
            case _:
                self._members_change(number, command)

    def _members_change(self, number: int, command: m.Command) -> None:
        match command:
            case m.CountNobody():
                self._due(CountNobody(number))
            case m.Recount():
                self._due(Recount(number, command.device))
            case m.Admit():
                self._check(command.model)
                self.absent.discard(command.device)
                self._due(Admit(number, command.device, command.model))
            case m.Dismiss():
                self.absent.add(command.device)
                self._due(Dismiss(number, command.device, command.anew))

    # ---------------------------------------------------------------------------------------------
    # models
    def _check(self, *models: ModelRef) -> None:
        """KeyError: there is no such model."""
        for model in models:
            if model not in self._models:
                raise KeyError(model)

    def _stepped_from(self, mixed: ModelRef) -> None:
        """One server fewer needs this w_n; on a real network another mix may come before the last
        of them has stepped.
        """
        if mixed in self._awaited:
            self._awaited[mixed] -= 1
            if self._awaited[mixed] == 0:
                del self._awaited[mixed]
                self._forget({mixed})

    def _hold(self, server: int, model: ModelRef) -> None:
        self.held[server] = model
        needed = {*self.held} | self._lost
        needed |= {work.model for work in self._at_work.values()}
        needed |= {granted.model for granted in self._granted.values()}
        needed |= {session.model for session in self._sessions if session.model is not None}
        self._forget({name for name in self._models if name.startswith("z/")} - needed)

    def _forget(self, models: set[ModelRef]) -> None:
        if models:
            self._models -= models
            self._work.append(Forget(tuple(sorted(models))))

    # ---------------------------------------------------------------------------------------------
    # local work
    def _due(self, instruction: Instruction) -> None:
        """An instruction that reads what local work has given."""
        self._flush()
        self._work.append(instruction)

    def _flush(self) -> None:
        """All local work that is pending: per device in order, over devices together."""
        waves: dict[tuple[int, bool], list[Session]] = {}
        seen: Counter[int] = Counter()
        for session in self._sessions:
            waves.setdefault((seen[session.device], not session.offline), []).append(session)
            seen[session.device] += 1
        self._work += [Sessions(tuple(waves[key])) for key in sorted(waves)]
        if self._uploads:
            self._work.append(Count(tuple(self._uploads)))
        self._sessions, self._uploads = [], []


def first_models(cloud: Cloud, servers: int) -> list[ModelRef]:
    """x(0) under the handle by which each server holds it at the start."""
    return [m.ref("z", 0) if cloud.sync else m.ref("z", n, 0) for n in range(servers)]
