"""The server: collects q uploads (the paper's "response and update" phase), reports, and steps when
the coordinator answers.

The same machine serves the three clouds. They differ in one thing: what ends the wait. Sync-cloud:
`GlobalUpdated`. Async-cloud: `Mixed`. Rigorous Async-cloud: `Mixed`, or `Isolated`, after which the
server steps alone.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from fedbcd.errors import LocalProtocolError, RemoteProtocolError
from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Acknowledged,
    Activated,
    Admit,
    AdoptModel,
    Command,
    Contributed,
    CountNobody,
    DeadlinePassed,
    Declined,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Dismiss,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    ModelRef,
    OpenPhase,
    Recalled,
    Recount,
    Recovered,
    Restored,
    Resumed,
    RetryDue,
    Returned,
    Send,
    ServerId,
    ServerReady,
    Started,
    StepLost,
    StepModel,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    device_actor,
    first_session,
    ref,
    upload_ref,
)


class ServerState(Enum):
    """What the server is doing."""

    NEW = "not started"
    COLLECTING = "in its response-and-update phase"
    WAITING = "waiting for the coordinator"


class Server:
    """One server: its members (Q_n), the number of uploads that ends a phase (q = `active`), K_z =
    `iterations`, and how many may work at once: as many as still end the phase, or `at_once`, of
    whom some then begin in one phase and count in a later one.

    A phase whose deadline has passed ends with `least` uploads; `spare` more devices than it needs
    may work. Who is at work when a phase ends counts in a later one as well.
    """

    def __init__(
        self,
        server: ServerId,
        members: Iterable[DeviceId],
        active: int,
        iterations: int = 1,
        sync: bool = False,
        at_once: int | None = None,
        least: int = 1,
        spare: int = 0,
    ) -> None:
        self.server = server
        self.active = active
        self.at_once = at_once
        self.least, self.spare = least, spare
        self.iterations = iterations
        self.sync = sync
        self.state = ServerState.NEW
        self.phase = -1
        self.iteration = 0  # of the cloud's K_z, while waiting
        self.model: ModelRef = self._first_model()
        self._version = 0
        self._isolated_through = -1
        self._is_overdue = False  # the deadline of this phase has passed
        self._counted: set[DeviceId] = set()  # whose uploads this phase has; a device counts once
        # who came to nothing in this phase, which does not wait for them
        self._excused: set[DeviceId] = set()
        self._last = dict.fromkeys(members, -1)  # member -> its last activation that is over
        # member -> its last accepted activation, where it is another
        self._contributed: dict[DeviceId, int] = {}
        self._declined: dict[DeviceId, Declined] = {}  # the latest answer of this kind
        self._left: dict[DeviceId, int] = {}
        self._asking: dict[DeviceId, int] = {}  # in order of arrival
        self._working: dict[DeviceId, Activated] = {}
        self._lost: dict[DeviceId, Activated] = {}  # given up, but welcome if it does arrive
        # uploads that came while waiting; they count in the next phase
        self._held: list[tuple[DeviceId, int]] = []
        self._incarnation: dict[DeviceId, int] = {}  # how often a device had to be put in step
        # how often it may have trained before that and lost it
        self._lives: dict[DeviceId, int] = {}
        self._restoring: set[DeviceId] = set()  # those that have not confirmed it
        # what a device that joined late began with, until its first upload
        self._start: dict[DeviceId, ModelRef] = {}
        self.generation = 0  # how often it had to go on from an older store
        # members that have not contributed since; what they were told, if they came
        self._recalled: dict[DeviceId, Recalled | None] = {}
        self._is_step_lost = False  # the generation before took the step that comes next

    @property
    def members(self) -> tuple[DeviceId, ...]:
        """The devices of this server, Q_n."""
        return tuple(self._last)

    @property
    def received(self) -> int:
        """The number of devices whose uploads count in this phase."""
        return len(self._counted)

    @property
    def barred(self) -> frozenset[DeviceId]:
        """Who has had its turn in this phase: it counts, or has come to nothing."""
        return frozenset(self._counted | self._excused)

    @property
    def working(self) -> tuple[tuple[DeviceId, int], ...]:
        """The devices that are busy with an activation, each with its number."""
        return tuple((device, activated.activation) for device, activated in self._working.items())

    @property
    def places(self) -> int:
        """How many more devices this phase can let in."""
        if self.state is not ServerState.COLLECTING:
            return 0
        most = self.at_once
        if most is None:
            most = self._needed() - self.received + self.spare
        return max(most - len(self._working), 0)

    def last_of(self, device: DeviceId) -> int | None:
        """The last activation of a member that is over, -1 before the first; None: it is no
        member.
        """
        return self._last.get(device)

    def incarnation_of(self, device: DeviceId) -> int:
        """How often this device had to be put in step."""
        return self._incarnation.get(device, 0)

    def is_restoring(self, device: DeviceId) -> bool:
        """Whether the device has been told to start from its last contribution and has not
        confirmed it.
        """
        return device in self._restoring

    def is_working(self, device: DeviceId) -> bool:
        return device in self._working

    @property
    def contributors(self) -> list[DeviceId]:
        """The members who have contributed since the server was last recovered, in order."""
        return sorted(self._last.keys() - self._recalled.keys())

    @property
    def takes_back(self) -> bool:
        """Whether members that have not contributed since it was recovered may do so now."""
        return not self._is_step_lost

    def is_awaited(self, device: DeviceId) -> bool:
        """Whether the device is to contribute again."""
        return device in self._recalled

    def is_waiting_for(self, device: DeviceId, activation: int) -> bool:
        """Whether an upload of this activation has yet to be answered, for the first time or
        because it was declined and comes again.
        """
        if device not in self._last or device in self._restoring:
            return False
        heard = (self._working.get(device), self._lost.get(device), self._declined.get(device))
        return any(one is not None and one.activation == activation for one in heard)

    def handle(self, event: Event) -> list[Command]:
        """Advance by one event and return what is to be done. The only method that changes
        anything.
        """
        transition = TRANSITIONS.get((self.state, type(event)))
        if transition is None:
            raise LocalProtocolError(
                f"server {self.server} cannot handle {event} while {self.state.value}"
            )
        return transition(self, event)

    # ---------------------------------------------------------------------------------------------
    # devices
    def _requested(self, event: Event) -> list[Command]:
        assert isinstance(event, UpdateRequested)
        if self._is_gone(event.device):
            return []
        if event.device in self._recalled:
            return self._recall_again(event.device)
        if event.device in self._restoring:
            return [self._restore(event.device)]
        last = self._last[event.device]
        if event.activation > last + 1:
            raise RemoteProtocolError(
                f"device {event.device} asks for activation {event.activation}, but server"
                f" {self.server} has accepted only {last + 1}; its next is {last + 1}"
            )
        if event.activation <= last:
            return []  # a late copy
        working = self._working.get(event.device) or self._lost.get(event.device)
        if working is not None:
            return [
                Send(to=device_actor(event.device), message=working)
            ]  # the first answer was lost
        self._asking[event.device] = event.activation
        return self._activate_next()

    def _activate_next(self) -> list[Command]:
        """Let in as many as are still needed, in order of arrival; who has had its turn waits for
        the next phase.
        """
        commands: list[Command] = []
        barred = self.barred
        for device in [device for device in self._asking if device not in barred][: self.places]:
            self._working[device] = Activated(activation=self._asking.pop(device), model=self.model)
            commands.append(Send(to=device_actor(device), message=self._working[device]))
        return commands

    def _uploaded(self, event: Event) -> list[Command]:
        assert isinstance(event, Uploaded)
        if self._is_gone(event.device):
            return []
        if event.device in self._recalled:
            return self._recall_again(event.device)
        if event.device in self._restoring:
            return [self._restore(event.device)]
        if event.activation <= self._last[event.device]:
            return self._answer_again(event.device, event.activation)
        self._check_started(event.device, event.activation)
        if event.model != upload_ref(
            event.device, event.activation, self.incarnation_of(event.device)
        ):
            raise self._from_before(event.device, event.model)
        self._is_over(event.device, event.activation)
        self._start.pop(event.device, None)
        self._contributed.pop(event.device, None)
        acknowledge = Send(
            to=device_actor(event.device), message=Acknowledged(activation=event.activation)
        )
        if self.state is ServerState.WAITING:
            self._held.append((event.device, event.activation))
            return [acknowledge]
        self._counted.add(event.device)
        return [
            Absorb(device=event.device, activation=event.activation),
            acknowledge,
            *(self._end_if_complete() or self._activate_next()),
        ]

    def _withdrawn(self, event: Event) -> list[Command]:
        """An activation ends without an upload: its place is free for another, and the phase does
        not wait for this device.
        """
        assert isinstance(event, Withdrawn)
        if self._is_gone(event.device):
            return []
        if event.device in self._recalled:
            return self._recall_again(event.device)
        if event.device in self._restoring:
            return [self._restore(event.device)]
        last = self._last[event.device]
        if event.activation <= last:
            return self._answer_again(event.device, event.activation)
        self._check_started(event.device, event.activation)
        if event.incarnation != self.incarnation_of(event.device):
            raise self._from_before(
                event.device, f"activation {event.activation} of incarnation {event.incarnation}"
            )
        self._contributed.setdefault(event.device, last)
        self._is_over(event.device, event.activation)
        self._declined[event.device] = Declined(activation=event.activation, reason=event.reason)
        answer = Send(to=device_actor(event.device), message=self._declined[event.device])
        if self.state is ServerState.WAITING:
            return [answer]
        self._excused.add(event.device)
        return [answer, *self._activate_next(), *self._end_if_complete()]

    def _is_over(self, device: DeviceId, activation: int) -> None:
        self._working.pop(device, None)
        self._lost.pop(device, None)
        self._last[device] = activation

    def _answer_again(self, device: DeviceId, activation: int) -> list[Command]:
        """The first answer was lost. A device that was declined a later activation has heard all
        before it.
        """
        declined = self._declined.get(device)
        if declined is None or activation > declined.activation:
            return [Send(to=device_actor(device), message=Acknowledged(activation=activation))]
        return (
            [Send(to=device_actor(device), message=declined)]
            if activation == declined.activation
            else []
        )

    def _check_started(self, device: DeviceId, activation: int) -> None:
        activated = self._working.get(device) or self._lost.get(device)
        if activated is None or activated.activation != activation:
            raise RemoteProtocolError(
                f"device {device} uploads activation {activation}, which server {self.server} has"
                " not started"
            )

    def _from_before(self, device: DeviceId, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"device {device} uploads {what}, but it has been put in step"
            f" {self.incarnation_of(device)} times; this is from before"
        )

    def _device_lost(self, event: Event) -> list[Command]:
        assert isinstance(event, DeviceLost)
        working = self._working.get(event.device)
        if working is None or working.activation != event.activation:
            return []  # it has uploaded meanwhile
        self._lost[event.device] = self._working.pop(event.device)
        return self._activate_next()

    def _joined(self, event: Event) -> list[Command]:
        assert isinstance(event, DeviceJoined)
        if event.device in self._last:
            return []
        if event.device not in self._left:
            self._lives[event.device] = -1  # what it is sent to start from begins its first life
        self._last[event.device] = self._left.pop(event.device, -1)
        self._start[event.device] = self.model
        commands: list[Command] = [Admit(device=event.device, model=self.model)]
        if (
            event.device in self._restoring
        ):  # it left before it had confirmed what it was sent, and may have missed it
            commands.append(self._put_in_step(event.device))
        return (
            [*commands, *self._activate_next()]
            if self.state is ServerState.COLLECTING
            else commands
        )

    def _device_left(self, event: Event) -> list[Command]:
        assert isinstance(event, DeviceLeft)
        if event.device not in self._last:
            return []
        if len(self._last) == 1:
            raise LocalProtocolError(
                f"device {event.device} is the last of server {self.server} and cannot leave;"
                " remove the server instead"
            )
        self._left[event.device] = self._last.pop(event.device)
        self._recalled.pop(event.device, None)
        self._asking.pop(event.device, None)
        if event.device in self._working:
            self._lost[event.device] = self._working.pop(
                event.device
            )  # it may come back and finish
        self._held = [
            (device, activation) for device, activation in self._held if device != event.device
        ]
        dismiss = Dismiss(device=event.device, anew=event.anew)
        if self.state is not ServerState.COLLECTING:
            return [dismiss]
        return [dismiss, *self._activate_next(), *self._end_if_complete()]

    def _reset(self, event: Event) -> list[Command]:
        assert isinstance(event, DeviceReset)
        if self._is_gone(event.device):
            return []
        if event.device in self._recalled:
            return self._recall_again(event.device)
        if event.device in self._restoring:
            return [self._restore(event.device)]
        return [self._put_in_step(event.device)]

    def _put_in_step(self, device: DeviceId) -> Send:
        """Begin a new incarnation of a device, which it has to confirm."""
        self._incarnation[device] = self.incarnation_of(device) + 1
        self._lives[device] = self._lives.get(device, 0) + 1
        self._restoring.add(device)
        self._asking.pop(device, None)
        return self._restore(device)

    def _restore(self, device: DeviceId) -> Send:
        incarnation, last = self._incarnation[device], self._last[device]
        contributed = self._contributed.get(device, last)
        session = first_session(self._lives[device])
        model = self._start.get(
            device, ref("x", device, contributed) if contributed >= 0 else self._first_model()
        )
        restored = Restored(
            incarnation=incarnation, activation=last + 1, session=session, model=model
        )
        return Send(to=device_actor(device), message=restored)

    def _first_model(self) -> ModelRef:
        return ref("z", 0) if self.sync else ref("z", self.server, 0)

    def _resumed(self, event: Event) -> list[Command]:
        assert isinstance(event, Resumed)
        if self._is_gone(event.device) or event.device in self._recalled:
            return []
        if event.incarnation > self.incarnation_of(event.device):
            raise RemoteProtocolError(
                f"device {event.device} says that it was put in step {event.incarnation} times, but"
                f" server {self.server} did so {self.incarnation_of(event.device)} times"
            )
        if event.incarnation == self.incarnation_of(event.device):
            self._restoring.discard(event.device)
        return []

    # ---------------------------------------------------------------------------------------------
    # a new generation
    def _recovered(self, event: Event) -> list[Command]:
        """Nobody counts who has not contributed again. Where an answer is waited for, the step that
        it asks for comes before: devices may have trained with its outcome.
        """
        assert isinstance(event, Recovered)
        if event.generation <= self.generation:
            return []
        self.generation = event.generation
        self._recalled = dict.fromkeys(self._last)
        for known in (self._asking, self._working, self._lost, self._declined, self._start):
            known.clear()
        for who in (self._contributed, self._restoring, self._counted, self._excused):
            who.clear()
        self._held, self._is_overdue = [], False
        self._is_step_lost = self.state is ServerState.WAITING and not self.sync
        return [] if self._is_step_lost else [CountNobody()]

    def _lost_step(self, mixed: ModelRef) -> list[Command]:
        """The step that the generation before took from `mixed`, if it did."""
        if not self._is_step_lost:
            return []
        self._is_step_lost = False
        self._version += 1
        result = ref("z", self.server, self._version)
        return [StepLost(mixed=mixed, model=self.model, result=result), CountNobody()]

    def _returned(self, event: Event) -> list[Command]:
        """A member that is behind has lost its memory too: nobody has its model, and it begins at
        that of its server.
        """
        assert isinstance(event, Returned)
        if self._is_gone(event.device) or event.device not in self._recalled or self._is_step_lost:
            return []
        known, last = self.incarnation_of(event.device), self._last[event.device]
        if event.activation <= last:
            del self._recalled[event.device]
            self._incarnation[event.device] = max(known, event.incarnation)
            self._start[event.device] = self.model
            return [Admit(device=event.device, model=self.model), self._put_in_step(event.device)]
        told = self._recalled[event.device]
        if told is None or event.incarnation > told.incarnation:
            incarnation = max(known, event.incarnation) + 1
            self._incarnation[event.device] = incarnation
            self._recalled[event.device] = Recalled(incarnation=incarnation, activation=last + 1)
        return self._recall_again(event.device)

    def _recall_again(self, device: DeviceId) -> list[Command]:
        told = self._recalled[device]
        return [] if told is None else [Send(to=device_actor(device), message=told)]

    def _contributed_again(self, event: Event) -> list[Command]:
        assert isinstance(event, Contributed)
        if self._is_gone(event.device) or event.device not in self._recalled:
            return []
        if event.incarnation != self.incarnation_of(event.device):
            raise self._from_before(event.device, event.model)
        del self._recalled[event.device]
        self._last[event.device] = event.activation - 1
        return [Recount(device=event.device)]

    def _is_gone(self, device: DeviceId) -> bool:
        """Whether a message is a late one of a device that has left; a device that never belonged
        here is refused.
        """
        if device not in self._last and device not in self._left:
            raise RemoteProtocolError(
                f"device {device} is not a member of server {self.server}; its members are"
                f" {sorted(self._last)[:20]}"
            )
        return device in self._left

    def _needed(self) -> int:
        """How many uploads end the phase: q, or all that can still come."""
        return min(
            min(self.active, self.least) if self._is_overdue else self.active,
            (
                sum(device not in self._excused for device in self._last)
                if self._excused
                else len(self._last)
            ),
        )

    # ---------------------------------------------------------------------------------------------
    # phases
    def _open(self) -> list[Command]:
        self.state = ServerState.COLLECTING
        self.phase += 1
        self.iteration = 0
        held, self._held = self._held, []
        self._counted = {device for device, _ in held}
        self._excused = set()
        self._is_overdue = False
        absorbs = [Absorb(device=device, activation=activation) for device, activation in held]
        return [
            OpenPhase(phase=self.phase),
            *absorbs,
            *self._activate_next(),
            *self._end_if_complete(),
        ]

    def _end_if_complete(self) -> list[Command]:
        if self.received < self._needed():
            return []
        self.state = ServerState.WAITING
        return self._step_alone() if self._isolated_through >= self.phase else [self._report()]

    def _report(self) -> Send:
        model = ref("s", self.server, self.phase) if self.sync else self.model
        ready = ServerReady(
            server=self.server, phase=self.phase, iteration=self.iteration, model=model
        )
        return Send(to=COORDINATOR, message=ready)

    def _deadline_passed(self, event: Event) -> list[Command]:
        assert isinstance(event, DeadlinePassed)
        if event.phase != self.phase:
            return []  # that phase has ended meanwhile
        self._is_overdue = True
        return self._end_if_complete()

    # ---------------------------------------------------------------------------------------------
    # the cloud
    def _step(self, mixed: ModelRef) -> StepModel:
        before = self.model
        self._version += 1
        self.model = ref("z", self.server, self._version)
        return StepModel(mixed=mixed, model=before, result=self.model)

    def _mixed(self, event: Event) -> list[Command]:
        assert isinstance(event, Mixed)
        if self._is_late(event.phase, event.iteration):
            return []
        steps = [*self._lost_step(event.model), self._step(event.model)]
        self.iteration += 1
        after = [self._report()] if self.iteration < self.iterations else self._open()
        return [*steps, *after]

    def _global_updated(self, event: Event) -> list[Command]:
        assert isinstance(event, GlobalUpdated)
        if self._is_late(event.phase, 0):
            return []
        self.model = event.model
        return [AdoptModel(model=event.model), *self._open()]

    def _isolated(self, event: Event) -> list[Command]:
        assert isinstance(event, Isolated)
        self._isolated_through = max(self._isolated_through, event.phase)
        # A notice of a later round says nothing about the one it waits for: that one's Mixed may
        # just be slower.
        if self.state is ServerState.WAITING and event.phase == self.phase and self.iteration == 0:
            return self._step_alone()
        return []

    def _step_alone(self) -> list[Command]:
        """Appendix A (iv): use w_n = z_n in update (6), then enter the next round."""
        steps = [self._step(self.model) for _ in range(self.iterations)]
        return [*steps, *self._open()]

    def _is_late(self, phase: int, iteration: int) -> bool:
        """Whether an answer of the coordinator is a copy of an earlier one; one that was never
        asked for is refused.
        """
        asked = (
            (self.phase, self.iteration) if self.state is ServerState.WAITING else (self.phase, -1)
        )
        if (phase, iteration) > asked:
            raise RemoteProtocolError(
                f"server {self.server} got the answer to phase {phase}.{iteration}, but has"
                f" reported only {asked[0]}.{asked[1]}"
            )
        return (phase, iteration) < asked


_S = ServerState
_ANSWERS: Mapping[type[Event], Callable[[Server, Event], list[Command]]] = {
    Mixed: Server._mixed,
    GlobalUpdated: Server._global_updated,
    Isolated: Server._isolated,
}
_DEVICES: Mapping[type[Event], Callable[[Server, Event], list[Command]]] = {
    UpdateRequested: Server._requested,
    Uploaded: Server._uploaded,
    Withdrawn: Server._withdrawn,
    DeviceLost: Server._device_lost,
    DeviceJoined: Server._joined,
    DeviceLeft: Server._device_left,
    DeviceReset: Server._reset,
    Resumed: Server._resumed,
    Recovered: Server._recovered,
    Returned: Server._returned,
    Contributed: Server._contributed_again,
}
TRANSITIONS: Mapping[tuple[ServerState, type[Event]], Callable[[Server, Event], list[Command]]] = {
    (_S.NEW, Started): lambda server, _: server._open(),
    # devices are heard in every phase; while waiting, requests queue and uploads are held for the
    # next phase
    **{
        (state, event): handler
        for state in (_S.COLLECTING, _S.WAITING)
        for event, handler in _DEVICES.items()
    },
    # the coordinator's answers; one that comes while collecting is a late copy (or, Isolated, an
    # early notice)
    **{
        (state, event): handler
        for state in (_S.COLLECTING, _S.WAITING)
        for event, handler in _ANSWERS.items()
    },
    (_S.COLLECTING, DeadlinePassed): Server._deadline_passed,
    (_S.WAITING, DeadlinePassed): lambda _server, _event: [],
    (_S.COLLECTING, RetryDue): lambda _server, _event: [],
    (_S.WAITING, RetryDue): lambda server, _event: [server._report()],
}
