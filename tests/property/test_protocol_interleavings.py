"""The machines on a hostile network: hypothesis chooses what happens next, and the invariants hold
all along.

Messages are held in flight; each may be delivered in any order, twice, or never. Devices vanish and
come back, join and leave. Models are exact fractions, one per handle, so that "nothing lost,
nothing counted twice" is an equality and not a tolerance.
"""

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from hypothesis import HealthCheck, given, strategies as st

from fedbcd.protocol import (
    AsyncCoordinator,
    Coordinator,
    Device,
    DeviceState,
    RigorousCoordinator,
    Server,
    ServerState,
    SyncCoordinator,
)
from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    Command,
    DeadlinePassed,
    Declined,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    Dismiss,
    Event,
    Failed,
    MixModels,
    ModelRef,
    OfflineDue,
    OfflineTrained,
    OpenPhase,
    Pull,
    RetryDue,
    Send,
    ServerId,
    ServerReady,
    Started,
    StepGlobal,
    StepModel,
    Train,
    Trained,
    TrainOffline,
    Undo,
    Uploaded,
    Withdrawn,
    Woke,
    device_actor,
    incarnation_of,
    number_of,
    ref,
    server_actor,
)
from support.exploring import examples

SWEEPS = 40  # fair sweeps after which a healthy network must have moved on

Upload = tuple[DeviceId, int]  # a device and its activation
Flight = tuple[Actor, Actor, Event]  # from, to, message


class Cloud(Enum):
    """The three coordinators."""

    SYNC = "sync"
    ASYNC = "async"
    RIGOROUS = "rigorous"


@dataclass(frozen=True)
class Setup:
    """One federation."""

    cloud: Cloud
    servers: int
    devices: int  # per server, at the start
    active: int  # q
    at_once: int | None  # at work at the same time; None: as many as end a phase
    least: int  # uploads that end a phase whose deadline has passed
    spare: int  # devices that may work beyond those that are needed
    first: int  # B
    iterations: int  # K_z
    alike: bool
    offline_limit: int | None
    step: Fraction  # eta_z, relative; with 0 mixing alone moves z

    def coordinator(self) -> Coordinator:
        """The machine under test."""
        everyone = range(self.servers)
        if self.cloud is Cloud.SYNC:
            return SyncCoordinator(everyone, self.iterations)
        if self.cloud is Cloud.RIGOROUS:
            return RigorousCoordinator(everyone, self.first, self.iterations)
        return AsyncCoordinator(everyone, self.first, self.iterations, self.alike)


class Op(Enum):
    """What can happen next; each comes with a number that says to whom."""

    ADVANCE = "time passes: the oldest message arrives, work ends, timers wake idle devices"
    DELIVER = "a message arrives, whatever its age"
    DUPLICATE = "a message is copied"
    DROP = "a message is lost"
    FINISH = "a device's work ends"
    FAIL = "a device's work gives nothing"
    REFUSE = "an upload arrives and is refused for what it holds"
    RETRY = "somebody's answer is overdue"
    WAKE = "a device can take part"
    OFFLINE = "a device can train offline"
    SLOW = "messages from and to a server are held up, or flow again"
    VANISH = "a device is out of reach, or back"
    GIVE_UP = "a server has waited too long for a device"
    OVERDUE = "the deadline of a phase passes, of this one or of an earlier one"
    JOIN = "a new device, or one that left before"
    LEAVE = "a device goes for good"


@dataclass
class Books:
    """What one server must have done, kept apart from the machine."""

    model: ModelRef  # z_n
    copies: dict[DeviceId, Fraction] = field(
        default_factory=dict
    )  # the server's copies of its members' x_i
    total: Fraction = Fraction(0)  # their sum, kept by differences as the engines keep it
    phase: int = -1
    reported: int = -1  # the last phase that was reported
    overdue: int = -1  # the last phase whose deadline has passed
    steps: int = 0  # of z_n in this phase
    owed: ModelRef | None = None  # w_n, mixed but not yet used
    counted: set[DeviceId] = field(default_factory=set)  # whose uploads this phase has
    excused: set[DeviceId] = field(
        default_factory=set
    )  # whose activations came to nothing in this phase
    held: set[Upload] = field(
        default_factory=set
    )  # acknowledged; to be absorbed when the next phase opens

    def put(self, device: DeviceId, value: Fraction) -> None:
        """Replace one copy."""
        self.total += value - self.copies.get(device, Fraction(0))
        self.copies[device] = value
        assert self.total == sum(self.copies.values())

    def remove(self, device: DeviceId) -> None:
        """Stop counting a device."""
        self.total -= self.copies.pop(device)
        assert self.total == sum(self.copies.values())

    def enough(self, setup: Setup) -> bool:
        """Whether the phase may end."""
        is_overdue = self.overdue == self.phase
        active = min(setup.active, setup.least) if is_overdue else setup.active
        return len(self.counted) >= min(active, len(self.copies.keys() - self.excused))


class Network:
    """Actors, messages in flight, and the books against which every command is checked."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.home: dict[DeviceId, ServerId] = {
            d: d % setup.servers for d in range(setup.servers * setup.devices)
        }
        self.coordinator = setup.coordinator()
        self.servers = {n: self._make_server(n) for n in range(setup.servers)}
        self.devices: dict[DeviceId, Device] = {}
        self.flying: list[Flight] = []
        self.slow: set[Actor] = set()
        self.work: dict[DeviceId, Event] = {}
        self.away: set[DeviceId] = set()
        self.gone: set[DeviceId] = set()
        self.models: dict[ModelRef, Fraction] = {
            s.model: Fraction(n * n + 1) for n, s in self.servers.items()
        }
        self.sums: dict[ModelRef, tuple[Fraction, int]] = {}
        self.personal: dict[DeviceId, Fraction] = {}
        self.before: dict[
            DeviceId, Fraction
        ] = {}  # personal models as they were before the latest activation
        self.books = {n: Books(server.model) for n, server in self.servers.items()}
        self.granted: dict[DeviceId, int] = {}  # the last activation that each device was sent
        self.sessions: dict[DeviceId, int] = {}  # of the work under way
        self.drawn: set[tuple[DeviceId, int]] = set()  # sessions whose mini-batches were drawn
        self.streak: dict[DeviceId, int] = {}  # offline rounds in a row
        self.uploaded: set[Upload] = set()
        self.refused: set[Upload] = set()
        self.declined: set[Upload] = set()
        self.was_waiting = False  # the server whose event this is, before it
        self.undone: set[Upload] = set()  # declined, as the device has heard
        self.absorbed: set[Upload] = set()
        self.forgotten: set[Upload] = set()  # acknowledged, but the device left before they counted
        self.heard: set[ServerReady] = set()
        self.arrivals: list[
            ServerReady
        ] = []  # first copies that start an exchange, as they reached the coordinator
        self.group: tuple[ServerId, ...] = ()
        for device, home in self.home.items():
            self._make_device(device, self.models[self.servers[home].model])
        self.mass = self._mass()
        for n in self.servers:
            self.feed(server_actor(n), Started())

    def _make_server(self, n: ServerId) -> Server:
        members = [device for device, home in self.home.items() if home == n]
        setup = self.setup
        sync = setup.cloud is Cloud.SYNC
        rule = setup.at_once, setup.least, setup.spare
        return Server(n, members, setup.active, setup.iterations, sync, *rule)

    def _make_device(self, device: DeviceId, start: Fraction) -> None:
        self.devices.setdefault(
            device, Device(device, server_actor(self.home[device]), self.setup.offline_limit)
        )
        self.streak.setdefault(device, 0)
        self.personal[device] = start
        self.books[self.home[device]].put(device, start)

    # ---------------------------------------------------------------------------------------------
    # what happens next
    def happen(self, op: Op, number: int) -> None:
        """One choice of hypothesis; a choice that nobody can make now changes nothing."""
        device = sorted(self.devices)[number % len(self.devices)]
        index = number % len(self.flying) if self.flying else None
        match op:
            case Op.ADVANCE:
                self._advance(number)
            case Op.DELIVER if index is not None:
                self._deliver(index)
            case Op.DUPLICATE if index is not None:
                self.flying.append(self.flying[index])
            case Op.DROP if index is not None:
                del self.flying[index]
            case Op.FINISH if device in self.work:
                self._finish(device)
            case Op.FAIL if device in self.work:
                self._fail(device)
            case Op.REFUSE:
                self._refuse(number)
            case Op.RETRY:
                self._retry(number)
            case Op.WAKE:
                self._timer(device, Woke())
            case Op.OFFLINE:
                self._timer(device, OfflineDue())
            case Op.SLOW:
                self.slow ^= {server_actor(number % len(self.servers))}
            case Op.VANISH:
                self.away ^= {device}
            case Op.GIVE_UP:
                self._give_up(device)
            case Op.OVERDUE:
                self._overdue(number % len(self.servers), number % 3 == 0)
            case Op.JOIN:
                self._join(number)
            case Op.LEAVE:
                self._leave(device)

    def _advance(self, number: int) -> None:
        for k in range(1 + number):
            at_work = sorted(set(self.work) - self.away)
            ripe = [
                i for i, (sender, to, _) in enumerate(self.flying) if not self.slow & {sender, to}
            ]
            if ripe:
                self._deliver(ripe[0])
            elif at_work:
                self._finish(at_work[0])
            else:
                self._timer(sorted(self.devices)[(number + k) % len(self.devices)], Woke())

    def _deliver(self, index: int) -> None:
        _, to, message = self.flying.pop(index)
        if to not in map(device_actor, self.away):  # a device out of reach hears nothing
            self.feed(to, message)

    def _finish(self, device: DeviceId) -> None:
        if device not in self.away:
            self.feed(device_actor(device), self.work.pop(device))

    def _fail(self, device: DeviceId) -> None:
        """The work is thrown away; an offline round has changed nothing either."""
        if device not in self.away:
            self.work.pop(device)
            self.personal[device] = self.before[device]
            self.feed(device_actor(device), Failed(session=self.sessions[device]))

    def _refuse(self, number: int) -> None:
        """An upload that would be accepted is refused for what it holds."""
        due = [
            i
            for i, (_, _, message) in enumerate(self.flying)
            if isinstance(message, Uploaded) and self._is_due(message)
        ]
        if due:
            _, to, upload = self.flying.pop(due[number % len(due)])
            assert isinstance(upload, Uploaded)
            self.refused.add((upload.device, upload.activation))
            counters = {
                "device": upload.device,
                "activation": upload.activation,
                "incarnation": incarnation_of(upload.model),
            }
            self.feed(to, Withdrawn(**counters, reason="far"))

    def _is_due(self, upload: Uploaded) -> bool:
        return (
            self.servers[self.home[upload.device]].last_of(upload.device) == upload.activation - 1
        )

    def _timer(self, device: DeviceId, event: Event) -> None:
        wanted = self.setup.offline_limit is not None or not isinstance(event, OfflineDue)
        if not wanted or device in self.away | self.gone:
            return
        rested = self.devices[device].state is DeviceState.IDLE and self.streak[device] < (
            self.setup.offline_limit or 0
        )
        self.feed(device_actor(device), event)
        if isinstance(event, OfflineDue):
            assert device in self.work or not rested, "an idle device that may train offline does"

    def _retry(self, number: int) -> None:
        actors = [
            *map(server_actor, self.servers),
            *(device_actor(d) for d in self.devices if d not in self.away),
        ]
        self.feed(actors[number % len(actors)], RetryDue())

    def _give_up(self, device: DeviceId) -> None:
        if device in self.granted:  # the timer may also go off after the upload has come
            lost = DeviceLost(device=device, activation=self.granted[device])
            self.feed(server_actor(self.home[device]), lost)

    def _overdue(self, n: ServerId, late: bool) -> None:
        phase = self.servers[n].phase - late
        if phase >= 0:
            books = self.books[n]
            books.overdue = max(books.overdue, phase)
            self.feed(server_actor(n), DeadlinePassed(phase=phase))

    def _join(self, number: int) -> None:
        """A device that left comes back as it was; otherwise a new one comes, up to two."""
        if number % 2 and self.gone:
            device = sorted(self.gone)[number % len(self.gone)]
            self.gone.remove(device)
        elif len(self.devices) < self.setup.servers * self.setup.devices + 2:
            device = len(self.devices)
            self.home[device] = number % self.setup.servers
        else:
            return
        self.feed(server_actor(self.home[device]), DeviceJoined(device=device))

    def _leave(self, device: DeviceId) -> None:
        if device not in self.gone and len(self.books[self.home[device]].copies) > 1:
            self.gone.add(device)
            self.feed(server_actor(self.home[device]), DeviceLeft(device=device))

    def settle(self) -> None:
        """No more losses, and every timer fires: each server gets two phases further, each member
        one activation.
        """
        self.away.clear()
        phases = {n: server.phase + 2 for n, server in self.servers.items()}
        activations = {
            d: device.activation + 1 for d, device in self.devices.items() if d not in self.gone
        }
        for _ in range(SWEEPS):
            self._sweep()
            behind = [
                server_actor(n) for n, phase in phases.items() if self.servers[n].phase < phase
            ]
            behind += [
                device_actor(d) for d, a in activations.items() if self.devices[d].activation < a
            ]
            if not behind:
                return
        raise AssertionError(f"{behind} made no progress in {SWEEPS} sweeps without losses")

    def _sweep(self) -> None:
        for actor in [*map(server_actor, self.servers), *map(device_actor, self.devices)]:
            self.feed(actor, RetryDue())
        for device in self.devices:
            self._timer(device, OfflineDue())
            self._timer(device, Woke())
        while self.flying or self.work:
            while self.flying:
                self._deliver(0)
            for device in list(self.work):
                self._finish(device)

    # ----------------------------------------------------------------------------------------- one
    # transition, checked
    def feed(self, actor: Actor, event: Event) -> None:
        """Hand one event to its machine, do what it says, and look at everything."""
        before = self._counters(actor)
        self.was_waiting = getattr(self._machine(actor), "state", None) is ServerState.WAITING
        self._note_arrival(event)
        commands = self._machine(actor).handle(event)
        for command in commands:
            self._execute(actor, command)
        assert all(new >= old for old, new in zip(before, self._counters(actor), strict=True)), (
            "a counter went back"
        )
        if isinstance(event, Declined):
            self.undone.add((number_of(actor), event.activation))
        if isinstance(event, Acknowledged):
            self._check_acknowledged(number_of(actor))
        if any(isinstance(command, OpenPhase) for command in commands):
            assert not self.books[number_of(actor)].held, (
                "acknowledged, but not absorbed when the next phase opened"
            )
        machine = self._machine(actor)
        if isinstance(machine, Server) and machine.state is ServerState.COLLECTING:
            assert not self.books[machine.server].enough(self.setup), (
                "a phase waits for what cannot come"
            )
            most = self.setup.at_once or self.setup.active + self.setup.spare
            assert len(machine.working) <= most, "more at work than may be"
        if self.setup.step == 0:
            assert self._mass() == self.mass, "mixing changed the mean of z"

    def _machine(self, actor: Actor) -> Coordinator | Server | Device:
        if actor == COORDINATOR:
            return self.coordinator
        return (
            self.servers[number_of(actor)]
            if actor.startswith("server")
            else self.devices[number_of(actor)]
        )

    def _counters(self, actor: Actor) -> tuple[int, ...]:
        machine = self._machine(actor)
        if isinstance(machine, Device):
            return (machine.activation, machine.session)
        if isinstance(machine, Server):
            assert machine.model == self.books[machine.server].model
            return (machine.phase, _version(machine.model))
        return (machine.round,)

    def _note_arrival(self, event: Event) -> None:
        if isinstance(event, Uploaded):
            self.uploaded.add((event.device, event.activation))
        if isinstance(event, ServerReady) and event not in self.heard:
            self.heard.add(event)
            self.arrivals += [event] if event.iteration == 0 else []

    def _mass(self) -> Fraction:
        """The sum of all z_n, counting a mix as done for all of its servers at once."""
        return sum(
            (self.models[books.owed or books.model] for books in self.books.values()), Fraction(0)
        )

    def _check_acknowledged(self, device: DeviceId) -> None:
        """What a device believes to be counted is counted, or about to be."""
        believed = {
            (device, activation) for activation in range(self.devices[device].activation)
        } - self.undone
        assert believed <= self.absorbed | self.forgotten | self.books[self.home[device]].held

    # ---------------------------------------------------------------------------------------------
    # commands, any actor
    def _execute(self, actor: Actor, command: Command) -> None:
        match command:
            case Send():
                self._note_sent(command)
                self.flying.append((actor, command.to, command.message))
            case Train() | Pull():
                self._train(number_of(actor), command)
            case TrainOffline():
                self._train_offline(number_of(actor), command)
            case OpenPhase():
                self._open(self.books[number_of(actor)], command)
            case Absorb():
                self._absorb(self.books[number_of(actor)], command)
            case Undo():
                device = number_of(actor)
                assert (device, command.activation) in self.refused, "undone, but not refused"
                self.personal[device] = self.before[device]
            case Admit():
                assert command.model == self.books[number_of(actor)].model
                self._make_device(command.device, self.models[command.model])
            case Dismiss():
                self._dismiss(self.books[number_of(actor)], command)
            case StepModel():
                self._step_model(self.books[number_of(actor)], command)
            case AdoptModel():
                self.books[number_of(actor)].model = command.model
                self.books[number_of(actor)].steps += 1
            case MixModels():
                self._mix(command)
            case StepGlobal():
                self._step_global(command)
            case _:
                raise AssertionError(f"the network does not know {command}")

    def _note_sent(self, send: Send) -> None:
        match send.message:
            case Activated(activation=activation):
                device = number_of(send.to)
                is_new = self.granted.get(device, -1) < activation
                assert not (is_new and device in self.books[self.home[device]].excused), (
                    "let in again in the same phase"
                )
                self.granted[device] = activation
            case Uploaded(device=device, model=model):
                self.models.setdefault(model, self.personal[device])
            case Declined(activation=activation):
                self._decline(number_of(send.to), activation)
            case Acknowledged(activation=activation):
                self._acknowledge(number_of(send.to), activation)
            case ServerReady() as ready:
                self._report(ready)

    # ---------------------------------------------------------------------------------------------
    # commands, devices
    def _train(self, device: DeviceId, command: Train | Pull) -> None:
        assert isinstance(command, Pull) == (self.setup.offline_limit is not None)
        assert command.activation == self.devices[device].activation
        assert device not in self.work, "one thing at a time"
        self.streak[device] = 0
        self._draw(device, command)
        self.personal[device] = (self.personal[device] + self.models[command.model]) / 2 + Fraction(
            1, device + 1
        )
        self.work[device] = Trained(activation=command.activation, steps=1)

    def _train_offline(self, device: DeviceId, command: TrainOffline) -> None:
        assert device not in self.work, "one thing at a time"
        self.streak[device] += 1
        assert self.streak[device] <= (self.setup.offline_limit or 0), "trained on without contact"
        self._draw(device, command)
        self.personal[device] += Fraction(1, 3)
        self.work[device] = OfflineTrained(session=command.session, steps=1)

    def _draw(self, device: DeviceId, command: Train | Pull | TrainOffline) -> None:
        self.before[device], self.sessions[device] = self.personal[device], command.session
        if not isinstance(command, Pull):
            assert (device, command.session) not in self.drawn, "a mini-batch was drawn twice"
            self.drawn.add((device, command.session))

    # ---------------------------------------------------------------------------------------------
    # commands, servers
    def _open(self, books: Books, command: OpenPhase) -> None:
        assert command.phase == books.phase + 1
        once = 1 if self.setup.cloud is Cloud.SYNC else self.setup.iterations
        assert books.steps == (0 if command.phase == 0 else once), (
            "each phase ends with K_z steps, no more, no less"
        )
        assert books.owed is None, "a mix was not used"
        books.phase, books.steps = command.phase, 0
        books.counted.clear()
        books.excused.clear()

    def _absorb(self, books: Books, command: Absorb) -> None:
        upload = (command.device, command.activation)
        assert upload in self.uploaded, "absorbed what was never uploaded"
        assert upload not in self.refused, "absorbed what was refused"
        assert upload not in self.absorbed | self.forgotten, (
            "absorbed twice, or after the device had left"
        )
        assert command.device in books.copies, "absorbed from a stranger"
        assert command.device not in books.counted, "one device was counted twice in a phase"
        self.absorbed.add(upload)
        books.held.discard(upload)
        books.counted.add(command.device)
        books.put(command.device, self.models[ref("x", *upload)])

    def _acknowledge(self, device: DeviceId, activation: int) -> None:
        upload, home = (device, activation), self.home[device]
        assert upload in self.uploaded, "acknowledged what was never uploaded"
        if upload not in self.absorbed | self.forgotten:
            assert self.servers[home].state is ServerState.WAITING, "acknowledged, but not counted"
            self.books[home].held.add(upload)

    def _decline(self, device: DeviceId, activation: int) -> None:
        home = self.home[device]
        assert (device, activation) not in self.absorbed | self.forgotten | self.books[home].held, (
            "declined, but counted"
        )
        if (device, activation) not in self.declined:
            self.declined.add((device, activation))
            if not self.was_waiting:
                self.books[home].excused.add(device)

    def _dismiss(self, books: Books, command: Dismiss) -> None:
        dropped = {upload for upload in books.held if upload[0] == command.device}
        books.held -= dropped
        self.forgotten |= dropped
        books.remove(command.device)

    def _report(self, ready: ServerReady) -> None:
        books = self.books[ready.server]
        if ready.phase > books.reported:
            assert books.enough(self.setup), (
                f"phase {ready.phase} ended with the uploads of {books.counted} only"
            )
            books.reported = ready.phase
        if self.setup.cloud is Cloud.SYNC:
            self.sums.setdefault(ready.model, (books.total, len(books.copies)))
        else:
            assert ready.model == books.model

    def _step_model(self, books: Books, command: StepModel) -> None:
        assert command.model == books.model
        if books.owed is None:  # isolated
            assert self.setup.cloud is Cloud.RIGOROUS
            assert books.enough(self.setup) or books.reported == books.phase
            assert command.mixed == books.model, "an isolated server uses w_n = z_n"
        else:
            assert command.mixed == books.owed, "a server of the mix uses its w_n"
        mixed, mean = self.models[command.mixed], books.total / len(books.copies)
        self.models[command.result] = mixed - self.setup.step * (mixed - mean)
        assert _version(command.result) == _version(books.model) + 1
        books.model, books.owed = command.result, None
        books.steps += 1

    # --------------------------------------------------------------------------------------------
    # commands, coordinator
    def _mix(self, mix: MixModels) -> None:
        assert len(mix.servers) == len(set(mix.servers)) == self.setup.first
        if mix.iteration == 0:
            self.group = self._first_to_arrive(mix.round)
            assert mix.servers == self.group, "not the first B, in the order of their arrival"
        assert set(mix.servers) == set(self.group)
        before = [self.models[model] for model in mix.models]
        mean = sum(before, Fraction(0)) / len(before)
        neighbours = [
            (z + before[k - 1]) / 2 for k, z in enumerate(before)
        ]  # a ring, doubly stochastic
        after = [mean] * len(before) if self.setup.alike else neighbours
        assert sum(after) == sum(before)
        for server, model, result, value in zip(
            mix.servers, mix.models, mix.results, after, strict=True
        ):
            self._hand_out(mix, server, model)
            self.books[server].owed, self.models[result] = result, value
        assert len(set(mix.results)) == (1 if self.setup.alike else len(mix.servers))

    def _first_to_arrive(self, round_: int) -> tuple[ServerId, ...]:
        if self.setup.cloud is Cloud.RIGOROUS:
            chosen = [ready for ready in self.arrivals if ready.phase == round_]
            assert len(chosen) == self.setup.first, "the coordinator waits for B, and no longer"
        else:
            chosen = self.arrivals[: self.setup.first]
            del self.arrivals[: self.setup.first]
        return tuple(ready.server for ready in chosen)

    def _hand_out(self, mix: MixModels, server: ServerId, model: ModelRef) -> None:
        books = self.books[server]
        phase = mix.round if self.setup.cloud is Cloud.RIGOROUS else books.phase
        assert books.phase == phase, "a model of another round was mixed"
        assert (
            model == books.model == ref("z", server, phase * self.setup.iterations + mix.iteration)
        )
        assert books.owed is None, "mixed twice without a step between"

    def _step_global(self, step: StepGlobal) -> None:
        ready = [ready for ready in self.arrivals if ready.phase == step.round]
        assert {r.server for r in ready} == set(self.servers), "the coordinator waits for all"
        sums = [self.sums[r.model] for r in ready]
        mean = sum((total for total, _ in sums), Fraction(0)) / sum(count for _, count in sums)
        z = self.models[step.model]
        for _ in range(step.iterations):
            z -= self.setup.step * (z - mean)
        assert step.result == ref("z", step.round + 1)
        self.models[step.result] = z


def _version(model: ModelRef) -> int:
    return int(model.rpartition("/")[2])


# ------------------------------------------------------------------------------------------------
# strategies
WEIGHTED = [
    *Op,
    *[Op.ADVANCE] * 8,
    *[Op.DELIVER] * 4,
    *[Op.SLOW] * 2,
]  # disturbances between stretches of progress
STORM = st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 23)), min_size=20, max_size=60)
THOROUGH = examples(300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def setups(draw: st.DrawFn, cloud: Cloud) -> Setup:
    """A small federation under one cloud, of FedBCD devices (no offline limit) or FedBCD-I
    devices.
    """
    servers, active = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    more = draw(st.sampled_from([None, 0, 2]))
    return Setup(
        cloud=cloud,
        servers=servers,
        devices=draw(st.integers(1, 3)),
        active=active,
        at_once=None if more is None else active + more,
        least=draw(st.integers(1, active)),
        spare=draw(st.sampled_from([0, 0, 2])),
        first=draw(st.integers(1, servers)),
        iterations=draw(st.integers(1, 2)),
        alike=cloud is not Cloud.ASYNC or draw(st.booleans()),
        offline_limit=draw(st.sampled_from([None, 1, 2])),
        step=draw(st.sampled_from([Fraction(0), Fraction(1, 2)])),
    )


def ride_out(setup: Setup, storm: list[tuple[Op, int]]) -> None:
    """Let all of it happen, then let things calm down; the network checks itself all along."""
    network = Network(setup)
    for op, number in storm:
        network.happen(op, number)
    network.settle()


# ------------------------------------------------------------------------------------------------
# tests
@given(setup=setups(Cloud.SYNC), storm=STORM)
@THOROUGH
def test_sync_cloud_waits_for_all_loses_nothing_and_goes_on(
    setup: Setup, storm: list[tuple[Op, int]]
) -> None:
    """Paper, Sync-cloud (ii): 'Once hearing from all cloud servers, this coordinator enters the
    'aggregation' phase'.
    """
    ride_out(setup, storm)


@given(setup=setups(Cloud.ASYNC), storm=STORM)
@THOROUGH
def test_async_cloud_mixes_the_first_b_loses_nothing_and_goes_on(
    setup: Setup, storm: list[tuple[Op, int]]
) -> None:
    """Paper, Async-cloud: 'the model aggregation is carried out in a 'first come first serve'
    manner'.
    """
    ride_out(setup, storm)


@given(setup=setups(Cloud.RIGOROUS), storm=STORM)
@THOROUGH
def test_rigorous_cloud_mixes_models_of_one_round_only_and_goes_on(
    setup: Setup, storm: list[tuple[Op, int]]
) -> None:
    """Paper, Appendix A (i): 'only cloud-server models at round t will be accepted'."""
    ride_out(setup, storm)
