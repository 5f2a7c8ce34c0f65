"""What must hold, said a second time and more simply: sums are formed from scratch, queues are
lists, nothing is incremental.

`check` reads what every role has made durable (its log) and every letter that was ever sent, and
raises `Violation`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from faultsim.keeping import (
    coordinator_may_keep,
    mixed_by,
    repeated_sessions,
    restored_handles,
    server_may_keep,
    wrong_admission,
)
from faultsim.world import FAR, Violation, World, trained
from fedbcd.algorithm.method import Relative
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.local.log_order import Order
from fedbcd.engines.deploy.processes.clock import AHEAD_S
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.protocol.clouds import AsyncCloud, GraphCloud, RigorousCloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Acknowledged,
    Activated,
    Actor,
    Admit,
    AdoptModel,
    AnswersLost,
    Contributed,
    CountNobody,
    DeadlinePassed,
    Declined,
    Dismiss,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    MixModels,
    OfflineTrained,
    OpenPhase,
    Pull,
    Recalled,
    Recount,
    Recovered,
    Restored,
    Resumed,
    Send,
    ServerReady,
    StepGlobal,
    StepLost,
    StepModel,
    Train,
    Trained,
    TrainOffline,
    Undo,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    number_of,
    upload_ref,
)
from fedbcd.record.eventlog import Transition

CLOSE = 1e-5
LARGEST = 1e3  # of what honest training gives here
HEARD = (
    Activated,
    Acknowledged,
    Declined,
    Restored,
    Recalled,
    UpdateRequested,
    Uploaded,
    Resumed,
    Contributed,
    ServerReady,
    Mixed,
    GlobalUpdated,
    Isolated,
)
Log = Sequence[Transition]


def check(world: World) -> None:
    """Everything; where two stores of one role have both gone on, what must hold all the same:
    devices keep their models.
    """
    for device in range(world.plan.devices):
        check_model_is_kept(device, world.nodes[f"device/{device}"].disk.log)
    for wrong in (*world.stores.let_in, *world.objections):
        raise Violation(wrong)
    if world.stores.are_split:
        return
    logs = {actor: tuple(node.disk.log) for actor, node in world.nodes.items()}
    lost = {actor for actor, node in world.nodes.items() if node.was_reset}
    lost |= world.recovering.actors
    # who trains offline and comes back with an old disk has trained otherwise than before
    wire = Wire(world.sent, lost if world.plan.method.offline else ())
    right = {actor for actor, node in world.nodes.items() if node.is_right}
    servers = _check_logs(world.plan, logs, world.sent, lost, wire)
    check_causes(world.sent, logs, right)
    check_nobody_is_carried_along({actor: logs[actor] for actor in right}, world.now)
    check_lives(world)
    check_final(world, logs, lost, servers, wire)


def check_logs(plan: Blueprint, logs: Mapping[Actor, Log]) -> None:
    """What can be seen of a real deployment: its logs. Letters are those that somebody has heard;
    numbers are left to a replay.
    """
    heard = [
        Letter(_speaker(plan, actor, step.event), actor, step.event, None, 0.0)
        for actor, log in logs.items()
        for step in log
        if isinstance(step.event, HEARD)
    ]
    _check_logs(plan, logs, heard, set(), _Unseen(plan))


def _speaker(plan: Blueprint, actor: Actor, event: Any) -> Actor:
    if actor.startswith("device/"):
        return f"server/{plan.home_of(number_of(actor))}"
    if isinstance(event, ServerReady):
        return f"server/{event.server}"
    return (
        COORDINATOR
        if isinstance(event, Mixed | GlobalUpdated | Isolated)
        else f"device/{event.device}"
    )


def _check_logs(
    plan: Blueprint,
    logs: Mapping[Actor, Log],
    letters: Sequence[Letter],
    lost: set[Actor],
    wire: "Wire",
) -> dict[int, "ServerStory"]:
    check_times(logs)
    check_order(plan, logs, lost)
    check_letters_are_durable(
        letters, {actor: log for actor, log in logs.items() if actor not in lost}
    )
    servers = {}
    for n in range(len(plan.servers)):
        servers[n] = check_server(plan, n, logs[f"server/{n}"], wire)
        if servers[n].recovered:
            continue
        check_restored(plan, n, logs[f"server/{n}"], wire)
        if wrong := wrong_admission(plan, n, logs[f"server/{n}"]):
            raise Violation(f"server {n} {wrong}")
    check_coordinator(plan, logs[COORDINATOR], wire)
    for device in range(plan.devices):
        check_offline_limit(plan, device, logs[f"device/{device}"])
    check_promises(letters, servers, lost)
    return servers


def _near(one: Tensor, two: Tensor) -> bool:
    return bool(torch.allclose(one.double(), two.double(), rtol=CLOSE, atol=CLOSE))


class Wire:
    """Every model that was ever sent. A name stands for one value, bit for bit, however often and
    after whatever crash it is sent; but of those who may have changed it, the latest counts.
    """

    def __init__(self, letters: Iterable[Letter], changed: Collection[Actor] = ()) -> None:
        self._models: dict[tuple[str, str], Tensor] = {}
        for letter in letters:
            if letter.model is None:
                continue
            key = self._key(letter)
            known = self._models.setdefault(key, letter.model.clone())
            if letter.sender in changed:
                self._models[key] = letter.model.clone()
            elif not torch.equal(known, letter.model):
                raise Violation(
                    f"{key[0]} {key[1]} was sent as {known.tolist()} and as {letter.model.tolist()}"
                )

    @staticmethod
    def _key(letter: Letter) -> tuple[str, str]:
        event: Any = letter.event
        if isinstance(event, Restored):
            return letter.to, f"restored/{event.incarnation}"
        if isinstance(event, ServerReady):
            return "report", f"{event.server}/{event.phase}/{event.iteration}"
        return "model", event.model

    def model(self, name: str) -> Tensor:
        """By its handle."""
        return self._of("model", name)

    def report(self, ready: ServerReady) -> Tensor:
        """What a server reported."""
        return self._of("report", f"{ready.server}/{ready.phase}/{ready.iteration}")

    def restored(self, actor: Actor, event: Restored) -> Tensor:
        """What a device was told to start from."""
        return self._of(actor, f"restored/{event.incarnation}")

    def has_restored(self, actor: Actor, event: Restored) -> bool:
        """Whether a device was ever told so."""
        return (actor, f"restored/{event.incarnation}") in self._models

    def knows(self, name: str) -> bool:
        """Whether a handle was ever sent."""
        return ("model", name) in self._models

    def has_report(self, ready: ServerReady) -> bool:
        """Whether a report was ever sent."""
        return ("report", f"{ready.server}/{ready.phase}/{ready.iteration}") in self._models

    def _of(self, kind: str, name: str) -> Tensor:
        if (kind, name) not in self._models:
            raise Violation(f"{kind} {name} was used but never sent")
        return self._models[kind, name]


class _Unseen(Wire):
    """Nobody has looked at the models: no value is known, none is compared."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__([])
        self._size = plan.size_F
        self._nothing = torch.zeros(plan.size_F + plan.cloud.sync, dtype=torch.float64)

    def _of(self, kind: str, name: str) -> Tensor:
        return self._nothing if kind == "report" else self._nothing[: self._size]


# ------------------------------------------------------------------------------------------------
# of all roles
def check_times(logs: Mapping[Actor, Log]) -> None:
    """A role's time only goes forward."""
    for actor, log in logs.items():
        before = -1.0
        for step in log:
            if not (step.time > before):
                raise Violation(f"the clock of {actor} went from {before} to {step.time}")
            before = step.time


def check_causes(letters: Iterable[Letter], logs: Mapping[Actor, Log], right: set[Actor]) -> None:
    """Where the clocks of two are right, what one heard was said before."""
    said: dict[tuple[Actor, Any], float] = {}
    for letter in letters:
        if letter.sender in right:
            key = (letter.to, letter.event)
            said[key] = min(said.get(key, letter.clock), letter.clock)
    for actor in right:
        for step in logs[actor]:
            if not (step.time > said.get((actor, step.event), -1.0)):
                raise Violation(f"{actor} heard {step.event} before it was said")


def check_nobody_is_carried_along(logs: Mapping[Actor, Log], now: float) -> None:
    """Whoever's clock is right records times that are right, whatever those of its peers say."""
    for actor, log in logs.items():
        if log and log[-1].time > now + 2 * AHEAD_S:
            raise Violation(
                f"the clock of {actor} was carried to {log[-1].time}, though it is {now}"
            )


def check_order(plan: Blueprint, logs: Mapping[Actor, Log], lost: set[Actor]) -> None:
    """The merged log has every line, each role's in order, at times that do not go back; and
    nothing is heard before it is said.
    """
    order = Order(plan.home_of)
    for actor, log in logs.items():
        order.add(actor, log)
    lines = order.due(math.inf)
    found: dict[Actor, list[Transition]] = {actor: [] for actor in logs}
    for line in lines:
        found[line.actor].append(line)
    for actor, log in logs.items():
        if [(line.event, line.commands) for line in found[actor]] != [
            (step.event, step.commands) for step in log
        ]:
            raise Violation(f"the merged log has not the lines of {actor}")
    said: set[tuple[Actor, Event]] = set()
    before = -math.inf
    for line in lines:
        if line.time < before:
            raise Violation(f"the merged log goes back from {before} to {line.time}")
        before = line.time
        is_heard = (
            isinstance(line.event, (*HEARD, Withdrawn))
            and _speaker(plan, line.actor, line.event) not in lost
        )
        if is_heard and not any((line.actor, event) in said for event in _as_said(line.event)):
            raise Violation(f"in the merged log {line.actor} hears {line.event} before it is said")
        said |= {
            (command.to, command.message) for command in line.commands if isinstance(command, Send)
        }


def _as_said(event: Event) -> list[Event]:
    """What a device has said; where its upload was refused, its server notes that it was
    withdrawn.
    """
    if not isinstance(event, Withdrawn):
        return [event]
    handle = upload_ref(event.device, event.activation, event.incarnation)
    return [event, Uploaded(device=event.device, activation=event.activation, model=handle)]


def check_letters_are_durable(letters: Iterable[Letter], logs: Mapping[Actor, Log]) -> None:
    """Whatever was said is in the log of who said it: nothing is sent before it is durable."""
    kept = {
        (actor, c.to, c.message)
        for actor, log in logs.items()
        for step in log
        for c in step.commands
        if isinstance(c, Send)
    }
    for letter in letters:
        if letter.sender in logs and (letter.sender, letter.to, letter.event) not in kept:
            raise Violation(f"{letter.sender} has sent {letter.event} and forgotten it")


# ------------------------------------------------------------------------------------------------
# servers
@dataclass
class ServerStory:
    """What a server's log says."""

    z: Tensor
    accepted: dict[tuple[int, int], str] = field(
        default_factory=dict
    )  # (device, activation) -> handle
    counted: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    declined: set[tuple[int, int]] = field(default_factory=set)  # came to nothing
    withdrawn: set[tuple[int, int]] = field(
        default_factory=set
    )  # accepted, and not yet counted when its device left
    again: dict[int, int] = field(
        default_factory=dict
    )  # device -> how many activations it had behind it when it contributed again
    recovered: bool = False


def check_server(plan: Blueprint, server: int, log: Log, wire: Wire) -> ServerStory:
    """Each accepted upload counts once, in this phase or the next; a phase ends with q; z follows
    from what counted and who belongs.
    """
    weights, members = plan.weights(), {*plan.servers[server]} - plan.late
    everybody = plan.method.counts == "members"
    story = ServerStory(plan.start)
    last = dict.fromkeys(plan.servers[server], -1)
    copies = {device: plan.start.double() for device in plan.servers[server]}
    active: set[int] = set()
    excused: set[int] = set()  # whose activation came to nothing in this phase
    unstarted: set[int] = set()  # joined, and not told what to start from
    phase, waiting, reported, model = (
        -1,
        True,
        (-1, -1),
        "z/0" if plan.cloud.sync else f"z/{server}/0",
    )
    granted: dict[int, Activated] = {}
    uncounted: set[int] = set()  # members that have not contributed since it was recovered
    enough = plan.active
    for step in log:
        event: Any = step.event
        if isinstance(event, Recovered):
            story.recovered, story.held, granted, unstarted = True, [], {}, set()
            uncounted, active, excused = {*members}, set(), set()
        if isinstance(event, DeadlinePassed) and event.phase == phase and not waiting:
            assert plan.deadline is not None
            enough = min(plan.active, plan.deadline.least)
        if (
            isinstance(event, Uploaded)
            and Send(to=f"device/{event.device}", message=Acknowledged(activation=event.activation))
            in step.commands
        ) and event.activation > last[event.device]:
            if not (event.activation == last[event.device] + 1 and event.device in members):
                raise Violation(
                    f"server {server} accepted {event} after {last[event.device]} from one of"
                    f" {members}"
                )
            if not (granted.get(event.device) is not None):
                raise Violation(f"server {server} accepted {event}, which it had not asked for")
            if event.device in unstarted:
                raise Violation(
                    f"server {server} accepted {event} from a device that joined and was not told"
                    " what to start from"
                )
            del granted[event.device]
            last[event.device] = event.activation
            story.accepted[event.device, event.activation] = event.model
            story.held.append((event.device, event.activation))
        declined = [
            c.message
            for c in step.commands
            if isinstance(c, Send) and isinstance(c.message, Declined)
        ]
        if isinstance(event, Withdrawn) and declined and event.activation > last[event.device]:
            if not (
                event.device in granted and granted[event.device].activation == event.activation
            ):
                raise Violation(f"server {server} let {event} go, which it had not asked for")
            del granted[event.device]
            last[event.device] = event.activation
            story.declined.add((event.device, event.activation))
            excused |= set() if waiting else {event.device}
        for command in step.commands:
            match command:
                case OpenPhase():
                    if not (command.phase == phase + 1 and waiting):
                        raise Violation(
                            f"server {server} opened phase {command.phase} after {phase}"
                        )
                    phase, waiting, active, excused = command.phase, False, set(), set()
                    enough = plan.active
                case Absorb():
                    key = (command.device, command.activation)
                    if key not in story.held:
                        raise Violation(
                            f"server {server} counted {key}, which waits for no counting (counted:"
                            f" {key in story.counted})"
                        )
                    story.held.remove(key)
                    story.counted.append(key)
                    active.add(command.device)
                    copies[command.device] = wire.model(story.accepted[key]).double()
                    if float(copies[command.device].abs().max()) > LARGEST:
                        raise Violation(
                            f"server {server} counted {key}, which is"
                            f" {copies[command.device].tolist()}"
                        )
                case CountNobody():
                    uncounted, active = {*members}, set()
                case StepLost():
                    model = _newer(server, model, command.result)
                case Recount(device=device):
                    assert isinstance(event, Contributed)
                    if device not in uncounted:
                        raise Violation(f"server {server} counts {device} twice: {event}")
                    uncounted.discard(device)
                    last[device] = event.activation - 1
                    story.again[device] = event.activation
                    if plan.method.has_personal:
                        copies[device] = wire.model(event.model).double()
                case Admit():
                    members.add(command.device)
                    uncounted.discard(command.device)
                    unstarted |= {command.device} if plan.method.has_personal else set()
                    if everybody:  # it counts at once, with what it is to start from
                        copies[command.device] = story.z.double()
                case Dismiss():
                    members.remove(command.device)
                    uncounted.discard(command.device)
                    story.withdrawn |= {key for key in story.held if key[0] == command.device}
                    story.held = [key for key in story.held if key[0] != command.device]
                case Send(message=Restored()):
                    unstarted.discard(number_of(command.to))
                case Send(message=Activated() as activated):
                    device = number_of(command.to)
                    if device not in members:
                        raise Violation(
                            f"server {server} sent {activated} to {device}, which is none of"
                            f" {members}"
                        )
                    if device not in granted:
                        if not (activated.model == model):
                            raise Violation(
                                f"server {server} sent {activated} while its model was {model}"
                            )
                        if not (activated.activation == last[device] + 1):
                            raise Violation(
                                f"server {server} sent {activated} after {last[device]}"
                            )
                        granted[device] = activated
                    if not (granted[device] == activated):
                        raise Violation(f"server {server} sent {activated} after {granted[device]}")
                case Send(message=ServerReady() as ready):
                    if ready.iteration == 0 and len(active) < min(
                        enough, len(members - excused)
                    ):  # members may join between iterations
                        raise Violation(
                            f"server {server} reported phase {phase} with {len(active)} uploads"
                        )
                    if not ((ready.phase, ready.iteration) > reported):
                        raise Violation(f"server {server} went back from {reported} to {ready}")
                    if (
                        story.held and ready.iteration == 0
                    ):  # between iterations it waits, and uploads with it
                        raise Violation(
                            f"server {server} reported while {story.held} had not been counted"
                        )
                    reported, waiting = (ready.phase, ready.iteration), True
                    total, weight = _sum(
                        copies, weights, members - uncounted if everybody else active
                    )
                    whole = (
                        torch.cat([total, torch.tensor([weight], dtype=torch.float64)])
                        if plan.cloud.sync
                        else _stepped(plan, story.z.double(), total, weight)
                        if plan.method.order == "step, mix"
                        else story.z
                    )
                    if wire.has_report(ready) and not _near(wire.report(ready), whole):
                        raise Violation(
                            f"server {server} reported {wire.report(ready)}, not {whole}"
                        )
                case StepModel():
                    alone = not (isinstance(event, Mixed) and event.model == command.mixed)
                    mixed = story.z if alone else wire.model(command.mixed)
                    waiting = True
                    total, weight = _sum(
                        copies, weights, members - uncounted if everybody else active
                    )
                    if alone or plan.method.order == "mix, step":
                        mixed = _stepped(plan, mixed.double(), total, weight)
                    story.z = mixed
                    model = _newer(server, model, command.result)
                    if wire.knows(model) and not (_near(wire.model(model), story.z)):
                        raise Violation(
                            f"server {server}: {model} is {wire.model(model)}, not {story.z}"
                        )
                case AdoptModel():
                    assert isinstance(event, GlobalUpdated)
                    model = _newer(server, model, event.model)
                    story.z = wire.model(model)
    if not (waiting or not story.held):
        raise Violation(f"server {server} has not counted {story.held}, though its phase is open")
    return story


def check_restored(plan: Blueprint, server: int, log: Log, wire: Wire) -> None:
    """A device that is put in step begins with what it contributed last, or with what a new one
    begins with.
    """
    for device, restored, handle in restored_handles(log) if plan.method.has_personal else ():
        known = wire.has_restored(f"device/{device}", restored)
        if not known or (handle and not wire.knows(handle)):
            continue
        found = wire.restored(f"device/{device}", restored)
        right = wire.model(handle) if handle else plan.start
        if not torch.equal(found, right):
            raise Violation(
                f"server {server} told device {device} to begin with {found.tolist()}, not with"
                f" {handle or 'x(0)'}, which is {right.tolist()}"
            )


def _sum(
    copies: Mapping[int, Tensor], weights: Sequence[float], who: Iterable[int]
) -> tuple[Tensor, float]:
    chosen = sorted(who)
    zero = torch.zeros_like(next(iter(copies.values())))
    return sum((weights[d] * copies[d] for d in chosen), zero), float(
        sum(weights[d] for d in chosen)
    )


def _stepped(plan: Blueprint, mixed: Tensor, total: Tensor, weight: float) -> Tensor:
    return mixed if weight == 0 else mixed - _length(plan) * (mixed - total / weight)


def _length(plan: Blueprint) -> float:
    assert isinstance(plan.method.step, Relative)
    return plan.method.step.step


def _newer(server: int, old: str, new: str) -> str:
    if not (number_of(new) == number_of(old) + 1):
        raise Violation(f"the model of server {server} went from {old} to {new}")
    return new


# ------------------------------------------------------------------------------------------------
# coordinator
def check_coordinator(plan: Blueprint, log: Log, wire: Wire) -> None:
    """Exactly B servers per mix, in order of arrival; mixing keeps the mean; rounds are numbered
    one after the other.
    """
    queue: list[ServerReady] = []
    seen: set[tuple[int, int, int]] = set()
    reported: list[ServerReady] = []
    rounds, z = 0, plan.start.double()
    last_iteration = plan.method.cloud_iterations - 1
    for step in log:
        if isinstance(step.event, AnswersLost):
            again = {(r.server, r.phase) for r in reported if r.server in step.event.servers}
            latest = {server: max(p for s, p in again if s == server) for server, _ in again}
            seen = {(s, p, i) for s, p, i in seen if latest.get(s) != p}
            continue
        assert isinstance(step.event, ServerReady)
        reported.append(step.event)
        key = (step.event.server, step.event.phase, step.event.iteration)
        if key not in seen:
            queue.append(step.event)
            seen.add(key)
        for command in step.commands:
            match command:
                case MixModels():
                    if not (command.round == rounds):
                        raise Violation(f"mix {command.round} came when {rounds} was due")
                    _check_mix(plan, command, queue, wire)
                    rounds += command.iteration == last_iteration
                case StepGlobal():
                    if not (command.round == rounds):
                        raise Violation(f"round {command.round} came when {rounds} was due")
                    ready = [r for r in queue if r.phase == rounds]
                    if not (sorted(r.server for r in ready) == [*range(len(plan.servers))]):
                        raise Violation(f"round {rounds} came with {ready}")
                    sums = sum(
                        (wire.report(r) for r in ready),
                        torch.zeros(plan.size_F + 1, dtype=torch.float64),
                    )
                    for _ in range(command.iterations):
                        z = _stepped(plan, z, sums[:-1], float(sums[-1]))
                    if wire.knows(command.result) and not (_near(wire.model(command.result), z)):
                        raise Violation(
                            f"{command.result} is {wire.model(command.result)}, not {z}"
                        )
                    queue = [r for r in queue if r.phase > rounds]
                    rounds += 1


def _check_mix(plan: Blueprint, command: MixModels, queue: list[ServerReady], wire: Wire) -> None:
    cloud = plan.cloud
    size = (
        len(plan.servers)
        if isinstance(cloud, GraphCloud)
        else cloud.first
        if isinstance(cloud, AsyncCloud | RigorousCloud)
        else 0
    )
    if isinstance(cloud, RigorousCloud):
        queue[:] = [r for r in queue if r.phase >= command.round]  # earlier ones were isolated
    candidates = [r for r in queue if r.iteration == command.iteration]
    first = candidates[:size]
    if command.iteration > 0:  # the same B again; they may come back in another order
        first = sorted(
            first,
            key=lambda r: command.servers.index(r.server) if r.server in command.servers else size,
        )
    if not (tuple(r.server for r in first) == command.servers):
        raise Violation(
            f"{command} was mixed, though {[r.server for r in candidates]} was the queue, B ="
            f" {size}"
        )
    if not (tuple(r.model for r in first) == command.models):
        raise Violation(f"{command} was mixed from other models than {first}")
    for ready in first:
        queue.remove(ready)
    models = torch.stack([wire.report(r) for r in first]).double()
    if all(wire.knows(handle) for handle in command.results):
        results = torch.stack([wire.model(handle) for handle in command.results]).double()
        if not (_near(results.mean(0), models.mean(0))):
            raise Violation(
                f"{command} did not keep the mean: {models.mean(0)} became {results.mean(0)}"
            )
        right = models.mean(0).expand_as(results)
        if isinstance(cloud, GraphCloud):
            reports = dict(zip(command.servers, models, strict=True))
            right = torch.stack(mixed_by(cloud.mixing, command.round, reports))
        if not _near(results, right):
            raise Violation(f"{command} gave {results}, not {right}")


# ------------------------------------------------------------------------------------------------
# devices
def check_offline_limit(plan: Blueprint, device: int, log: Log) -> None:
    """No more offline rounds in a row than allowed."""
    limit, in_a_row = plan.method.offline_limit or 0, 0
    for step in log:
        in_a_row += isinstance(step.event, OfflineTrained)
        if not (in_a_row <= limit):
            raise Violation(
                f"device {device} trained offline {in_a_row} times in a row; {limit} are allowed"
            )
        if any(isinstance(command, Train | Pull) for command in step.commands) or isinstance(
            step.event, Restored
        ):
            in_a_row = 0


def check_model_is_kept(device: int, log: Log) -> None:
    """What was acknowledged to a device is never replaced by something older."""
    acknowledged = incarnation = 0
    for step in log:
        match step.event:
            case Acknowledged(activation=activation) | Declined(activation=activation) if (
                activation == acknowledged
            ):
                acknowledged += 1
            case Restored() as restored if restored.incarnation > incarnation:
                if restored.activation < acknowledged:
                    raise Violation(
                        f"device {device} lost its model: {restored} replaced it, though"
                        f" {acknowledged} were acknowledged to it"
                    )
                acknowledged, incarnation = restored.activation, restored.incarnation


def device_story(
    plan: Blueprint, device: int, log: Log, wire: Wire, spoiled: Collection[str]
) -> tuple[Tensor, Tensor]:
    """x and x_prev as they follow from a device's log; every upload is checked on the way."""
    x = prev = plan.start
    before = x, prev
    work: Any = None
    incarnation = 0
    sessions: set[int] = set()
    for step in log:
        event: Any = step.event
        match event:
            case OfflineTrained():
                assert isinstance(work, TrainOffline)
                x, prev = trained(device, work.session, event.steps, x, prev, None), x
            case Trained():
                anchor = wire.model(work.model)
                before = x, prev
                start, momentum = before if plan.method.has_personal else (anchor, anchor)
                x, prev = trained(device, work.session, event.steps, start, momentum, anchor), start
                handle = upload_ref(device, event.activation, incarnation)
                if handle in spoiled:
                    x = torch.full_like(x, FAR)
                if wire.knows(handle) and not (torch.equal(wire.model(handle), x)):
                    raise Violation(f"{handle} was sent as {wire.model(handle)}, but is {x}")
            case Recalled() if event.incarnation > incarnation:
                incarnation = event.incarnation
            case Restored() if event.incarnation > incarnation:
                incarnation = event.incarnation
                if plan.method.has_personal:
                    x = prev = wire.restored(f"device/{device}", event)
        for command in step.commands:
            if isinstance(command, Undo):
                x, prev = before
            if isinstance(command, Train | Pull | TrainOffline):
                work = command
                if not isinstance(command, Pull):
                    if not (command.session not in sessions):
                        raise Violation(f"device {device} drew session {command.session} twice")
                    sessions.add(command.session)
    return x, prev


def check_lives(world: World) -> None:
    """No mini-batch is drawn twice, also by a device that has lost its memory."""
    for actor, node in world.nodes.items():
        if node.lives and actor.startswith("device/"):
            is_late = number_of(actor) in world.plan.late
            if again := repeated_sessions([*node.lives, node.disk.log], is_late):
                raise Violation(f"{actor} {again}")


# ------------------------------------------------------------------------------------------------
# the end
def check_promises(
    letters: Iterable[Letter], servers: Mapping[int, ServerStory], lost: Collection[Actor]
) -> None:
    """Every acknowledgement that ever left a server is kept: the upload is in its log, and counted
    once or about to be. Only where the disk of a server and that of the device are lost, nobody has
    it, and the device may come to nothing in the same activation.
    """
    for letter in letters:
        if isinstance(letter.event, Acknowledged):
            story, key = (
                servers[number_of(letter.sender)],
                (number_of(letter.to), letter.event.activation),
            )
            times = story.counted.count(key) + story.held.count(key)
            is_kept = key not in story.declined or letter.to in lost
            if story.recovered and times < 2 and is_kept:
                continue  # it is in what its device has contributed again, or has yet to
            if times != (0 if key in story.withdrawn else 1) or key in story.declined:
                raise Violation(f"{letter.sender} acknowledged {key} and counts it {times} times")
        elif isinstance(letter.event, Declined):
            story, key = (
                servers[number_of(letter.sender)],
                (number_of(letter.to), letter.event.activation),
            )
            if story.recovered and key not in story.accepted:
                continue
            if key not in story.declined or key in story.accepted:
                raise Violation(f"{letter.sender} declined {key}, which it has accepted")


def check_final(
    world: World,
    logs: Mapping[Actor, Log],
    lost: set[Actor],
    servers: Mapping[int, ServerStory],
    wire: Wire,
) -> None:
    """What the roles hold at the end is what the history implies, and their disks hold nothing
    else.
    """
    for actor, node in world.nodes.items():
        if node.role is None:
            continue
        kept = {file for file, _ in node.disk.tensors_.values()}
        if not ({*node.disk.entries} == kept):
            raise Violation(f"{actor} keeps {sorted(node.disk.entries)}, but needs {sorted(kept)}")
        if actor in lost:
            continue
        if not actor.startswith("device/"):
            may_keep = coordinator_may_keep if actor == COORDINATOR else server_may_keep
            if more := node.disk.tensors_.keys() - may_keep(logs[actor]):
                raise Violation(f"{actor} keeps {sorted(more)}, for which nobody can ask")
        if actor.startswith("server/"):
            story = servers[number_of(actor)]
            if not (_near(node.role.z, story.z)):
                raise Violation(f"z of {actor} is {node.role.z}, not {story.z}")
        elif actor.startswith("device/") and actor not in lost and world.plan.method.has_personal:
            x, prev = device_story(world.plan, number_of(actor), logs[actor], wire, world.spoiled)
            kept = node.role.kept
            if not (torch.equal(kept["x"], x) and torch.equal(kept["x_prev"], prev)):
                raise Violation(f"x of {actor} is {kept['x']}, not {x}")
