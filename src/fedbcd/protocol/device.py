"""The device: asks, is activated, trains, uploads; with FedBCD-I it also trains offline and
suspends itself.

Nothing here knows a number of the model: `Train`, `Pull` and `TrainOffline` name what to compute.
"""

from collections.abc import Callable, Mapping
from enum import Enum

from fedbcd.errors import LocalProtocolError, RemoteProtocolError
from fedbcd.protocol.messages import (
    NOT_FINITE,
    Acknowledged,
    Activated,
    Actor,
    Command,
    Contributed,
    Declined,
    DeviceId,
    Event,
    Failed,
    OfflineDue,
    OfflineTrained,
    Pull,
    Recalled,
    Restored,
    Resumed,
    RetryDue,
    Send,
    Train,
    Trained,
    TrainOffline,
    Undo,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    Woke,
    ref,
    upload_ref,
)


class DeviceState(Enum):
    """What the device is doing."""

    IDLE = "idle"
    OFFLINE = "training offline"
    SUSPENDED = "suspended until the next activation"
    ASKING = "waiting to be activated"
    ASKING_OFFLINE = "training offline, waiting to be activated"
    TRAINING = "working for an activation"
    UPLOADING = "waiting for the acknowledgement"
    WITHDRAWING = "without an upload, waiting to be let go"


_D = DeviceState


class Device:
    """One device. `offline_limit` is None for FedBCD, FedAvg and FedProx; for FedBCD-I it is the
    number of offline rounds in a row.
    """

    __slots__ = (
        "_brought",
        "_granted",
        "_reason",
        "activation",
        "device",
        "incarnation",
        "offline",
        "offline_limit",
        "server",
        "session",
        "state",
    )

    def __init__(self, device: DeviceId, server: Actor, offline_limit: int | None = None) -> None:
        self.device = device
        self.server = server
        self.offline_limit = offline_limit
        self.state = DeviceState.IDLE
        self.activation = 0  # the next activation, or the one under way
        self.session = 0  # the next session of mini-batch steps
        self.offline = 0  # offline rounds since the last contact
        self.incarnation = 0  # how often the server has had to put it in step
        self._brought: int | None = None  # its activation when it was last recalled
        self._reason = NOT_FINITE  # why the activation under way is withdrawn
        self._granted: Activated | None = None  # came while training offline; starts when that ends

    @property
    def granted(self) -> Activated | None:
        """The activation that starts when the offline round under way has ended."""
        return self._granted

    def handle(self, event: Event) -> list[Command]:
        """Advance by one event and return what is to be done. The only method that changes
        anything.
        """
        transition = TRANSITIONS.get((self.state, type(event)))
        if transition is None:
            raise LocalProtocolError(
                f"device {self.device} cannot handle {event} while {self.state.value}"
            )
        return transition(self, event)

    # ---------------------------------------------------------------------------------------------
    # own timers
    def _ask(self, _: Event) -> list[Command]:
        self.state = (
            DeviceState.ASKING_OFFLINE if self.state is DeviceState.OFFLINE else DeviceState.ASKING
        )
        return [self._request()]

    def _start_offline(self, event: Event) -> list[Command]:
        if self.offline_limit is None:
            raise LocalProtocolError(
                f"device {self.device} got {event} but its algorithm does not train offline"
            )
        if self.offline >= self.offline_limit:  # asking while suspended: wait for the answer
            return []
        self.state = (
            DeviceState.ASKING_OFFLINE if self.state is DeviceState.ASKING else DeviceState.OFFLINE
        )
        return [TrainOffline(session=self.session)]

    def _retry(self, _: Event) -> list[Command]:
        match self.state:
            case DeviceState.UPLOADING:
                return [self._upload()]
            case DeviceState.WITHDRAWING:
                return [self._withdraw()]
        return [self._request()]

    # ---------------------------------------------------------------------------------------------
    # work finished
    def _offline_done(self, event: Event) -> list[Command]:
        """One that failed counts as a round: its mini-batches are not drawn again, and it is not
        tried more often.
        """
        assert isinstance(event, OfflineTrained | Failed)
        if event.session != self.session:
            raise LocalProtocolError(
                f"device {self.device} trains session {self.session}, not {event.session}"
            )
        self.session += 1
        self.offline += 1
        if self.state is DeviceState.OFFLINE:
            suspended = self.offline_limit is not None and self.offline >= self.offline_limit
            self.state = DeviceState.SUSPENDED if suspended else DeviceState.IDLE
            return []
        self.state = DeviceState.ASKING
        if self._granted is None:
            return []
        granted, self._granted = self._granted, None
        return self._start(granted)

    def _trained(self, event: Event) -> list[Command]:
        assert isinstance(event, Trained)
        if event.activation != self.activation:
            raise LocalProtocolError(
                f"device {self.device} works for activation {self.activation}, not"
                f" {event.activation}"
            )
        if self.offline_limit is None:
            self.session += 1
        self.state = DeviceState.UPLOADING
        return [self._upload()]

    def _failed(self, event: Event) -> list[Command]:
        """There is nothing to upload: the server is told, and lets it go."""
        assert isinstance(event, Failed)
        if event.session != self._session_of_activation():
            raise LocalProtocolError(
                f"device {self.device} works on session {self._session_of_activation()}, not"
                f" {event.session}"
            )
        if self.offline_limit is None:
            self.session += 1
        self.state, self._reason = DeviceState.WITHDRAWING, event.reason
        return [self._withdraw()]

    # ---------------------------------------------------------------------------------------------
    # from the server
    def _activated(self, event: Event) -> list[Command]:
        assert isinstance(event, Activated)
        if event.activation > self.activation:
            raise RemoteProtocolError(
                f"device {self.device} was activated for {event.activation} but has finished only"
                f" {self.activation}; its state is older than the server's"
            )
        if event.activation < self.activation or self.state in (
            _D.TRAINING,
            _D.UPLOADING,
            _D.WITHDRAWING,
        ):
            return []  # a late copy
        if self.state in (DeviceState.OFFLINE, DeviceState.ASKING_OFFLINE):
            self.state = DeviceState.ASKING_OFFLINE
            self._granted = event
            return []
        return self._start(event)

    def _start(self, granted: Activated) -> list[Command]:
        self.state = DeviceState.TRAINING
        self.offline = 0
        work = Train if self.offline_limit is None else Pull
        return [
            work(
                activation=self.activation,
                session=self._session_of_activation(),
                model=granted.model,
            )
        ]

    def _session_of_activation(self) -> int:
        """Of its own; with FedBCD-I that of the latest offline round, which says how many penalty
        steps to take.
        """
        return self.session if self.offline_limit is None else max(self.session - 1, 0)

    def _acknowledged(self, event: Event) -> list[Command]:
        assert isinstance(event, Acknowledged)
        if event.activation > self.activation or (
            event.activation == self.activation and self.state is not DeviceState.UPLOADING
        ):
            raise RemoteProtocolError(
                f"device {self.device} got an acknowledgement of activation {event.activation},"
                " which it has not uploaded"
            )
        if event.activation == self.activation:
            self.activation += 1
            self.state = DeviceState.IDLE
        return []

    def _declined(self, event: Event) -> list[Command]:
        """The activation is over as if it had not been: x and x_prev are those of before, only the
        counters have gone on.
        """
        assert isinstance(event, Declined)
        is_waiting = self.state in (DeviceState.UPLOADING, DeviceState.WITHDRAWING)
        if event.activation > self.activation or (
            event.activation == self.activation and not is_waiting
        ):
            raise RemoteProtocolError(
                f"device {self.device} was declined activation {event.activation}, which it has not"
                " uploaded"
            )
        if event.activation < self.activation:
            return []  # a late copy
        has_changed = self.state is DeviceState.UPLOADING
        self.activation += 1
        self.state = DeviceState.IDLE
        return [Undo(activation=event.activation)] if has_changed else []

    def _restored(self, event: Event) -> list[Command]:
        """Whatever it was doing, it was not meant to: go on as the server remembers it. A copy is
        only answered.
        """
        assert isinstance(event, Restored)
        if event.incarnation > self.incarnation:
            self.incarnation = event.incarnation
            begun = self.session + (self.state in (DeviceState.OFFLINE, DeviceState.ASKING_OFFLINE))
            self.activation, self.offline = event.activation, 0
            self.session = max(
                begun, event.session
            )  # one that trained offline before it joined is ahead: no session comes twice
            self._granted = None
            self.state = DeviceState.IDLE
        return [
            Send(to=self.server, message=Resumed(device=self.device, incarnation=self.incarnation))
        ]

    def _recalled(self, event: Event) -> list[Command]:
        """Its server has lost what it knew after a report: what is under way ends, and what it has
        contributed last is brought again. A copy is answered as long as nothing has changed since.
        """
        assert isinstance(event, Recalled)
        commands: list[Command] = []
        if event.incarnation > self.incarnation:
            commands = self._drop_work(event.activation)
            self.incarnation, self._granted = event.incarnation, None
            self.state = DeviceState.IDLE
            self._brought = self.activation
        if self._brought != self.activation or self.state in (
            _D.TRAINING,
            _D.UPLOADING,
            _D.WITHDRAWING,
        ):
            return []
        brings = Contributed(
            device=self.device,
            incarnation=self.incarnation,
            activation=self.activation,
            model=ref("c", self.device, self.incarnation, self.session),
        )
        return [*commands, Send(to=self.server, message=brings)]

    def _drop_work(self, activation: int) -> list[Command]:
        """No mini-batch is drawn twice; an upload that the server does not know of is undone."""
        if self.state in (_D.OFFLINE, _D.ASKING_OFFLINE) or (
            self.state is _D.TRAINING and self.offline_limit is None
        ):
            self.session += 1
        if self.state not in (_D.UPLOADING, _D.WITHDRAWING):
            return []
        is_undone = self.state is _D.UPLOADING and activation <= self.activation
        self.activation += 1
        return [Undo(activation=self.activation - 1)] if is_undone else []

    def _ignore(self, _: Event) -> list[Command]:
        return []

    # ---------------------------------------------------------------------------------------------
    # messages
    def _request(self) -> Send:
        return Send(
            to=self.server, message=UpdateRequested(device=self.device, activation=self.activation)
        )

    def _upload(self) -> Send:
        model = upload_ref(self.device, self.activation, self.incarnation)
        return Send(
            to=self.server,
            message=Uploaded(device=self.device, activation=self.activation, model=model),
        )

    def _withdraw(self) -> Send:
        counters = {
            "device": self.device,
            "activation": self.activation,
            "incarnation": self.incarnation,
        }
        return Send(to=self.server, message=Withdrawn(**counters, reason=self._reason))


TRANSITIONS: Mapping[tuple[DeviceState, type[Event]], Callable[[Device, Event], list[Command]]] = {
    # a device can take part
    (_D.IDLE, Woke): Device._ask,
    (_D.SUSPENDED, Woke): Device._ask,
    (_D.OFFLINE, Woke): Device._ask,
    (_D.ASKING, Woke): Device._ignore,
    (_D.ASKING_OFFLINE, Woke): Device._ignore,
    (_D.TRAINING, Woke): Device._ignore,
    (_D.UPLOADING, Woke): Device._ignore,
    (_D.WITHDRAWING, Woke): Device._ignore,
    # FedBCD-I: it can train offline
    (_D.IDLE, OfflineDue): Device._start_offline,
    (_D.ASKING, OfflineDue): Device._start_offline,
    (_D.SUSPENDED, OfflineDue): Device._ignore,
    (_D.OFFLINE, OfflineDue): Device._ignore,
    (_D.ASKING_OFFLINE, OfflineDue): Device._ignore,
    (_D.TRAINING, OfflineDue): Device._ignore,
    (_D.UPLOADING, OfflineDue): Device._ignore,
    (_D.WITHDRAWING, OfflineDue): Device._ignore,
    (_D.OFFLINE, OfflineTrained): Device._offline_done,
    (_D.ASKING_OFFLINE, OfflineTrained): Device._offline_done,
    (_D.OFFLINE, Failed): Device._offline_done,
    (_D.ASKING_OFFLINE, Failed): Device._offline_done,
    # the exchange; a late or repeated message is normal in every state
    **{(state, Activated): Device._activated for state in _D},
    (_D.TRAINING, Trained): Device._trained,
    (_D.TRAINING, Failed): Device._failed,
    **{(state, Acknowledged): Device._acknowledged for state in _D},
    **{(state, Declined): Device._declined for state in _D},
    **{(state, Restored): Device._restored for state in _D},
    **{(state, Recalled): Device._recalled for state in _D},
    # no answer came
    (_D.ASKING, RetryDue): Device._retry,
    (_D.ASKING_OFFLINE, RetryDue): Device._retry,
    (_D.UPLOADING, RetryDue): Device._retry,
    (_D.WITHDRAWING, RetryDue): Device._retry,
    **{
        (state, RetryDue): Device._ignore
        for state in (_D.IDLE, _D.OFFLINE, _D.SUSPENDED, _D.TRAINING)
    },
}
