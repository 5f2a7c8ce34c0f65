"""The vocabulary of the protocol: events are past facts, commands are imperative, both are frozen
values.

A message between two actors *is* the event that its receiver handles: `Send(to=server(3),
message=Uploaded(...))`. Models appear as handles (`ModelRef`): `x/42/9` device 42 after activation
9 (`x/42/9/1` once it has been put in step), `z/3/17` version 17 of server 3's model, `z/17` the
coordinator's model (Sync-cloud), `w/5/0/3` what server 3 gets from mix 5, iteration 0. The engine
holds the tensors.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

DeviceId: TypeAlias = int
ServerId: TypeAlias = int
ModelRef: TypeAlias = str
Actor: TypeAlias = str

COORDINATOR: Actor = "coordinator"


def device_actor(device: DeviceId) -> Actor:
    return f"device/{device}"


def server_actor(server: ServerId) -> Actor:
    return f"server/{server}"


def number_of(actor: Actor) -> int:
    return int(actor.rpartition("/")[2])


def ref(kind: str, *numbers: int) -> ModelRef:
    """A model handle, e.g. `ref("z", 3, 17)` is `z/3/17`."""
    return "/".join((kind, *map(str, numbers)))


def upload_ref(device: DeviceId, activation: int, incarnation: int) -> ModelRef:
    """The handle of an upload; a device that has lost its memory cannot be mistaken for the one it
    was.
    """
    return ref("x", device, activation, *([incarnation] if incarnation else []))


def is_upload(model: ModelRef) -> bool:
    """Whether this is what a device has sent, and not a server's model."""
    return model.startswith("x/")


def incarnation_of(upload: ModelRef) -> int:
    """The incarnation in the handle of an upload; what is no such handle has none."""
    parts = upload.split("/")
    return int(parts[3]) if len(parts) == 4 and parts[3].isdecimal() else 0


def version_of(model: ModelRef) -> int:
    """The number of a server's model among those that it has had."""
    return int(model.rpartition("/")[2])


def first_session(life: int) -> int:
    """Where a device's sessions begin: each of its lives has 2^32 of its own, so that no mini-batch
    is drawn twice by accident.
    """
    return life << 32


class Event:
    """Something that has happened."""

    __slots__ = ()


class Command:
    """Something that the engine is to do."""

    __slots__ = ()


# ------------------------------------------------------------------------------------------------
# events, any machine
NOT_FINITE = "finite"  # why work comes to nothing
DROPOUT = "dropout"


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The machine may begin."""


@dataclass(frozen=True, slots=True)
class RetryDue(Event):
    """No answer came in time; say the last thing again."""


# ------------------------------------------------------------------------------------------------
# events, device
@dataclass(frozen=True, slots=True)
class Woke(Event):
    """The device is idle, charged and connected: it can take part."""


@dataclass(frozen=True, slots=True)
class OfflineDue(Event):
    """The device is idle and charged, connected or not: time for an offline round (FedBCD-I)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTrained(Event):
    """An offline round has ended after `steps` mini-batch steps."""

    session: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated(Event):
    """The server has let the device in and sent its global model."""

    activation: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Event):
    """The local work of an activation has ended after `steps` steps."""

    activation: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The work under way, with this session, came to nothing: there is nothing to keep. `reason`
    is one word: values were not finite, or the device was lost on the way ("dropout").
    """

    session: int
    reason: str = NOT_FINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged(Event):
    """The server has the upload of this activation for good."""

    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(Event):
    """This activation is over and does not count; `reason` is one word (docs/wire.md)."""

    activation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """The server puts a device in step that has lost its memory: x = x_prev = `model`, its last
    contribution.

    `incarnation` counts such events of the device, so that a copy does nothing; counters go on from
    `activation` and `session`.
    """

    incarnation: int
    activation: int
    session: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled(Event):
    """The server goes on under a new generation (`Recovered`), and asks for what the device has
    contributed last: it keeps its model, and whatever it was doing ends.

    `activation` is the next one as far as the server knows; the device may be further.
    """

    incarnation: int
    activation: int


# ------------------------------------------------------------------------------------------------
# events, server
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequested(Event):
    """A device asks to take part; `activation` is its own counter, a retry repeats it."""

    device: DeviceId
    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded(Event):
    """A device has sent its personal model."""

    device: DeviceId
    activation: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn(Event):
    """An activation has come to nothing: the device could not train (it says so), or what it
    uploaded was refused (so the server does).

    `incarnation` tells it from one of before the device was put in step.
    """

    device: DeviceId
    activation: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """An activated device has not been heard from in time; another may have its place."""

    device: DeviceId
    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(Event):
    """This phase has waited for as long as it may: the least number of uploads ends it from now
    on.
    """

    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJoined(Event):
    """A new member; it starts from the server's model. `by`: whose wish it was, where somebody
    wished it.
    """

    device: DeviceId
    by: Actor = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLeft(Event):
    """A member has gone for good; its copy no longer counts. For `anew` see `Dismiss`, for `by` see
    `DeviceJoined`.
    """

    device: DeviceId
    anew: bool = True
    by: Actor = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReset(Event):
    """A member has come back without its memory, or with one that is older than what the server has
    accepted.
    """

    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A device has been put in step."""

    device: DeviceId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Event):
    """A server has an older store, brought up to its last report from its coordinator's log. What
    came after is lost, and so is what its devices have contributed: a new generation begins, and
    nobody counts before having contributed again.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned(Event):
    """A member has come back to a server of a new generation, and says how far it is."""

    device: DeviceId
    activation: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed(Event):
    """A device that was recalled brings what it has contributed last; `activation` is its next."""

    device: DeviceId
    incarnation: int
    activation: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Event):
    """The coordinator has mixed this server's model of `phase` with the others': w_n = `model`.

    `among` are the servers of the mix, in order, so that the coordinator's log is in other places
    too (docs/recovery.md). As with `journal` of reports, comparisons pass it over.
    """

    phase: int
    iteration: int
    model: ModelRef
    among: tuple[ServerId, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalUpdated(Event):
    """Sync-cloud: the coordinator has a new global model."""

    phase: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolated(Event):
    """Rigorous Async-cloud: round `phase` was mixed without this server."""

    phase: int


# ------------------------------------------------------------------------------------------------
# events, coordinator
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady(Event):
    """A server has ended its response-and-update phase; `phase` is its own counter, a retry repeats
    it.

    `journal` is what has happened at the server since its report before, so that its log is in two
    places (docs/recovery.md). It is no part of what is said: machines and comparisons pass it over.
    """

    server: ServerId
    phase: int
    iteration: int
    model: ModelRef
    journal: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersLost(Event):
    """The coordinator has lost its store, and its log was put together from those of its servers.
    Nobody has the models of its answers any more: `servers` wait for one, and are to be mixed
    anew. Of each, the model that it was to have got.
    """

    servers: tuple[ServerId, ...]
    models: tuple[ModelRef, ...]


# ------------------------------------------------------------------------------------------------
# commands
@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Command):
    """Deliver `message` to `to`; it may arrive late, twice or out of order."""

    to: Actor
    message: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Command):
    """Take ASPG steps towards the data and `model`, then report Trained (Algorithm 1, lines
    5-11).
    """

    activation: int
    session: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOffline(Command):
    """Take ASPG steps on the data alone, then report OfflineTrained (Algorithm 2, lines 5-11)."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Command):
    """Take penalty steps towards `model`, as many as in `session`, then report Trained (Algorithm
    2, lines 14-18).
    """

    activation: int
    session: int
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo(Command):
    """Put back the model and its predecessor that were there before this activation, which has been
    declined.
    """

    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPhase(Command):
    """Accept update requests: the response-and-update phase begins."""

    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorb(Command):
    """Replace the server's copy of this device's model by the uploaded one."""

    device: DeviceId
    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Command):
    """Start a new device from `model`, and count it."""

    device: DeviceId
    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss(Command):
    """Stop counting a device: form the server's sum `anew` from the copies of those who are left.

    Until 0.1.0 (`anew` is False) its copy was subtracted; what rounding had lost by it stayed lost.
    """

    device: DeviceId
    anew: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel(Command):
    """Take one server step, eq. (6b), from w_n = `mixed`; call the outcome `result`."""

    mixed: ModelRef
    model: ModelRef
    result: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLost(Command):
    """A step as `StepModel`, which the generation before has taken: devices may have trained with
    its outcome, but nobody has it any more. Who replays the log takes it, a server passes it over.
    """

    mixed: ModelRef
    model: ModelRef
    result: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CountNobody(Command):
    """What members have contributed is lost: the sum is that of nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount(Command):
    """A member has contributed again: form the sum anew from all who have."""

    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptModel(Command):
    """Sync-cloud: the coordinator's model becomes the server's."""

    model: ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class MixModels(Command):
    """Mix the servers' models, eq. (6a); server k of `servers` gets `results[k]`."""

    round: int
    iteration: int
    servers: tuple[ServerId, ...]
    models: tuple[ModelRef, ...]
    results: tuple[ModelRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGlobal(Command):
    """Sync-cloud: update the one global model from all servers' sums, eq. (5), `iterations`
    times.
    """

    round: int
    iterations: int
    model: ModelRef
    result: ModelRef
