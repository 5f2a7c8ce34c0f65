"""Discrete events: letters on their way, timers, training, faults. The roles, their stores and the
codec are the deployment's own.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from faultsim.damage import Damage
from faultsim.disk import Disk
from faultsim.patience import Patience
from faultsim.recovering import Recovering
from faultsim.schedule import Fault, Planned, Schedule, links_of
from faultsim.stores import Stores
from faultsim.strangers import Hostile, Twins
from fedbcd.algorithm.interpret import Registers
from fedbcd.data.samples import Samples
from fedbcd.engines.deploy.links.codec import WireLimits, decode, encode
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.processes.failpoints import Failpoint, Stopped
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.blueprint import Blueprint, OwnData
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.local_work import WorkDone
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import ProtocolError, RecordError, Refused
from fedbcd.protocol import DeviceState, ServerState
from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    DeadlinePassed,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    Event,
    Failed,
    ModelRef,
    OfflineDue,
    OpenPhase,
    RetryDue,
    Trained,
    Woke,
    device_actor,
    number_of,
    server_actor,
    upload_ref,
)
from fedbcd.record.eventlog import Transition
from fedbcd.schedule.work import Session

CALM_ROUNDS = 2  # that must follow once trouble has ended
CALM_S = 40.0  # within this time
SPLIT_S = 5.0  # how long those go on who cannot agree
SNAPSHOT_EVERY = 7
_NOTHING = OwnData(
    Samples(torch.zeros(1, 2), torch.zeros(1, 1)), nn.Linear(2, 1), nn.functional.mse_loss
)
_WINDOWS = (
    Fault.LOSS,
    Fault.DELAY,
    Fault.REORDER,
    Fault.DUPLICATE,
    Fault.PARTITION,
    Fault.RESET,
    Fault.SPOILED,
)
DYING_S = 0.05  # between a write that failed and the end of the process
FAR = 1e30  # of a model that is out of range


class Violation(AssertionError):
    """Something happened that must not."""


class TinyTrainer:
    """Three numbers instead of a model: a few float32 operations that depend on device, session,
    steps and everything they start from.
    """

    def run(self, jobs: list[Session], registers: Registers) -> Registers:
        """As `Trainer.run`, for one device."""
        (job,), z = jobs, registers.get("z")
        x, prev = (registers.get(name, z) for name in ("x", "x_prev"))
        assert x is not None
        assert prev is not None
        x_after = trained(job.device, job.session, job.steps, x, prev, z)
        return {**registers, "x": x_after, "x_prev": x.clone()}


def spoilt(done: WorkDone, value: float) -> WorkDone:
    """The same with an x of such values."""
    assert done.upload is not None
    upload = torch.full_like(done.upload, value)
    kept = {**done.kept, "x": upload} if "x" in done.kept else done.kept
    return replace(done, kept=kept, upload=upload)


def trained(
    device: int, session: int, steps: int, x: Tensor, prev: Tensor, anchor: Tensor | None
) -> Tensor:
    """The new x."""
    kick = ((device * 31 + (session % 1009) * 17 + steps * 7) % 101) / 101 - 0.5
    return 0.5 * x + 0.25 * prev + 0.25 * (prev if anchor is None else anchor) + kick


@contextmanager
def tiny_training() -> Iterator[None]:
    """Every device that is opened within trains three numbers; roles take snapshots often, since
    their logs are short.
    """
    with (
        patch("fedbcd.engines.deploy.roles.local_work._trainer", lambda *_: TinyTrainer()),
        patch.object(Role, "SNAPSHOT_EVERY", SNAPSHOT_EVERY),
    ):
        yield


@dataclass
class Node:
    """A machine: its disk, its clock, and the role that runs on it, if one does."""

    actor: Actor
    disk: Disk
    role: Any = None
    offset: float = 0.0
    leap: float = 0.0  # as `offset`, for a while
    is_right: bool = True  # its clock, all the time
    paused_until: float = 0.0
    doomed: Planned | None = None  # dies at a step of an event to come
    patience: int = 0
    life: int = 0
    backup: dict[str, object] | None = None
    was_reset: bool = False  # its disk was lost or put back
    lives: list[tuple[Transition, ...]] = field(default_factory=list)  # logs that went with disks
    committed: int = 0
    dying: Any = None  # a role that could not write, until its process ends
    inbox: list[Letter] = field(default_factory=list)  # what has come and is to be handled together


@dataclass
class World:
    """One run. `play` raises `Violation`; `letters`, `logs` and `nodes` are for the reference
    model.
    """

    schedule: Schedule
    now: float = 0.0
    sent: list[Letter] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    spoiled: set[ModelRef] = field(default_factory=set)  # uploads that are out of range
    objections: list[str] = field(default_factory=list)  # what should have been refused
    turned_away: int = 0  # devices that were no members, when they knocked
    happened: dict[Fault, int] = field(default_factory=dict)
    groups: Counter[int] = field(
        default_factory=Counter
    )  # how many events became durable together, how often
    recovered_s: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(f"world {self.schedule.seed}")
        self.plan: Blueprint = self.schedule.blueprint
        self.actors = [
            COORDINATOR,
            *(server_actor(n) for n in range(self.schedule.servers)),
            *(device_actor(d) for d in range(self.plan.devices)),
        ]
        self.nodes = {
            a: Node(a, Disk(random.Random(f"disk {self.schedule.seed} {a}"), k))
            for k, a in enumerate(self.actors)
        }
        self._disks = len(self.actors)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._windows: dict[Fault, list[Planned]] = {}
        self._fates: dict[
            tuple[ModelRef, int], type[Event] | None
        ] = {}  # of each piece of work: what comes of it, if not what should
        self._connected: set[tuple[Actor, Actor]] = set()  # guest and host
        self._greeted: Counter[tuple[Actor, Actor]] = (
            Counter()
        )  # how often; a letter does not outlive the connection that it was sent on
        links = links_of(self.plan)
        self._links_of = {actor: [pair for pair in links if actor in pair] for actor in self.actors}
        size = self.plan.size_F
        self.stores, self.damage, self.patience = Stores(self), Damage(self), Patience(self)
        self.hostile, self.twins = Hostile(self), Twins(self)
        self.recovering = Recovering(self)
        self._apart: dict[Fault, Callable[[Planned], None]] = {
            Fault.LOST_STORE: self.stores.strike,
            Fault.OLD_STORE: self.stores.strike,
            Fault.DAMAGED_DISK: self.damage.strike,
            Fault.DEAD_LINK: self.patience.strike,
            Fault.SLOW_LINE: lambda _: None,  # from the start on
            Fault.HOSTILE: self.hostile.strike,
            Fault.TWIN: self.twins.strike,
            Fault.RECOVERED: self.recovering.strike,
            Fault.REBUILT: self.recovering.rebuild,
        }
        self.is_calm = False  # trouble has ended
        self._limits = WireLimits(frozenset({("F32", size), ("F64", size + 1)}))

    # ---------------------------------------------------------------------------------------------
    # time
    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + seconds, self._serial, act))

    def play(self) -> None:
        """Trouble, then calm; rounds must go on."""
        with tiny_training():
            for actor in self.actors:
                self.after(self.chance.uniform(0, 0.2), lambda a=actor: self._open(a))
                self._tick_later(actor)
            for planned in self.schedule.faults:
                self.after(planned.at, lambda p=planned: self._strike(p))
            until = self.schedule.until
            self._run_until(lambda: self.now >= until, until + 1)
            self._heal()
            # what is acknowledged is in two stores; nobody can go on, and nothing else may happen
            if self.stores.are_split:
                self._run_until(lambda: False, self.now + SPLIT_S)
                return
            goal = self.rounds + CALM_ROUNDS
            began = self.now
            is_slow = any(p.fault is Fault.SLOW_LINE for p in self.schedule.faults)
            calm_s = CALM_S * self.schedule.pace * (1.25 if is_slow else 1.0)
            if not self._run_until(lambda: self.rounds >= goal, self.now + calm_s):
                raise Violation(
                    f"after the faults stopped, round {self.rounds} did not become {goal} in"
                    f" {calm_s:.0f} s: {self._states()}"
                )
            self.recovered_s = self.now - began

    def _run_until(self, done: Callable[[], bool], limit: float) -> bool:
        while self._heap and self.now < limit:
            if done():
                return True
            self.now, _, act = heapq.heappop(self._heap)
            act()
        return done()

    @property
    def rounds(self) -> int:
        """How far the coordinator is."""
        role = self.nodes[COORDINATOR].role
        return -1 if role is None else int(role.machine.round)

    def _states(self) -> dict[str, object]:
        return {
            a: "down" if n.role is None else getattr(n.role.machine, "state", "up")
            for a, n in self.nodes.items()
        }

    # ---------------------------------------------------------------------------------------------
    # roles
    def _open(self, actor: Actor) -> None:
        node = self.nodes[actor]
        if node.role is not None or not self.stores.may_open(actor):
            return
        node.life += 1
        made: list[Any] = []
        if not self._guarded(node, lambda: made.append(self._made(node)) or []):
            return
        node.role = made[0]
        if node.role.store.length < node.committed:
            raise Violation(
                f"{actor} had {node.committed} transitions and has {node.role.store.length} after"
                " it was opened again"
            )
        node.role.watch = lambda step, _: self._noted(node, step)
        self._work(node)
        if getattr(node.role.machine, "state", None) is ServerState.COLLECTING:
            self._set_deadline(node)
        self.after(0.01, lambda: self._connect_all(actor))

    def _made(self, node: Node) -> Any:
        store = node.disk.store(node.actor)
        if node.actor == COORDINATOR:
            return CoordinatorRole.open(store, self.plan)
        if node.actor.startswith("server/"):
            return ServerRole.open(store, self.plan, number_of(node.actor))
        return DeviceRole.open(store, self.plan, number_of(node.actor), _NOTHING)

    def _noted(self, node: Node, step: Transition) -> None:
        node.committed = node.role.store.length
        if node.actor == COORDINATOR:  # it tells its round, before it answers anybody
            for guest, host in self._connected:
                if host == COORDINATOR and self.nodes[guest].role is not None:
                    self.nodes[guest].role.coordinator.told(node.role.machine.round)
        if self.plan.deadline and any(isinstance(c, OpenPhase) for c in step.commands):
            self._set_deadline(node)

    def _set_deadline(self, node: Node) -> None:
        """When the time of a phase is over; it may have ended by then. A restart sets it anew."""
        rule = self.plan.deadline
        if rule is None or rule.after is None:
            return
        event = DeadlinePassed(phase=node.role.machine.phase)
        tell = partial(self.do, node, lambda: node.role.tell(event, self.time_of(node)))
        self.after(rule.after * self.schedule.pace, tell)

    def time_of(self, node: Node) -> float:
        return self.now + node.offset + node.leap

    def crash(self, node: Node, back_in: float) -> None:
        node.role = node.dying = None
        node.doomed = None
        node.inbox.clear()
        node.disk.crash()
        self._disconnect(node.actor)
        self.after(back_in, lambda: self._open(node.actor))

    def _guarded(self, node: Node, act: Callable[[], list[Letter]]) -> bool:
        """Let a role act and send what it says. False: it has died."""
        doomed = node.doomed
        if doomed is not None and doomed.point is not None:
            node.patience -= 1
            failpoints.arm(
                doomed.point, times=1 + int(doomed.amount * 4) if node.patience > 3 else 1
            )
        try:
            for letter in act():
                self._post(letter)
                failpoints.hit(Failpoint.AFTER_SEND, type(letter.event).__name__)
            if doomed is not None and node.patience <= 0:
                raise Stopped
        except Stopped:
            self.count(Fault.CRASH_AT_STEP)
            self.crash(node, doomed.length if doomed is not None else 0.1)
            return False
        except ProtocolError as error:
            self.refused.append(f"{node.actor}: {error}")
        except RecordError as error:
            self._cannot_go_on(node, error)
            return False
        finally:
            failpoints.disarm()
        return True

    def _cannot_go_on(self, node: Node, error: RecordError) -> None:
        """A full or damaged disk ends a process; meanwhile others may still ask it for more."""
        if "damaged" in str(error) and self.damage.is_of(node):
            self.crash(node, 0.3)
        elif node.dying is not None:
            return
        elif not node.disk.full:
            raise Violation(f"{node.actor}: {error}") from error
        else:
            self.count(Fault.FULL_DISK)
            node.dying = role = node.role
            late = DYING_S * (self.schedule.seed % 2) if role is not None else 0.0

            def end() -> None:
                if node.role is role:
                    self.crash(node, 0.3)

            self.after(late, end)

    def do(self, node: Node, act: Callable[[], list[Letter]]) -> None:
        if node.role is not None and self._guarded(node, act):
            self._work(node)

    # ---------------------------------------------------------------------------------------------
    # training
    def _work(self, node: Node) -> None:
        role = node.role
        if (
            not isinstance(role, DeviceRole)
            or role.work is None
            or getattr(role, "busy_with", None) == role.work
        ):
            return
        role.busy_with = role.work  # type: ignore[attr-defined]
        done = self._spoiled(node, role.compute())

        def finish() -> None:
            if node.role is role:
                role.busy_with = None  # type: ignore[attr-defined]
                self.do(node, lambda: role.finish(done, self.time_of(node)))

        self.after(self.chance.uniform(0.05, 0.4) * self.schedule.pace, finish)

    def _spoiled(self, node: Node, done: WorkDone) -> WorkDone:
        """What came of a piece of work, unless trouble is due: then nothing did, or a model that no
        honest training gives.

        The same work gives the same again, also from an old backup.
        """
        machine = node.role.machine
        handle = upload_ref(
            machine.device,
            machine.activation if isinstance(done.event, Trained) else -1,
            machine.incarnation,
        )
        key = (handle, done.work.session)
        if key not in self._fates:
            planned = self._active(Fault.SPOILED, node.actor, node.actor)
            self._fates[key] = planned and (
                Failed if self.chance.random() < planned.amount else Trained
            )
        fate = self._fates[key]
        if fate is None:
            return done
        self.count(Fault.SPOILED)
        if fate is Failed or not isinstance(done.event, Trained):
            return replace(done, event=Failed(session=done.work.session), kept=node.role.kept)
        self.spoiled.add(handle)
        return spoilt(done, FAR)

    # ---------------------------------------------------------------------------------------------
    # timers
    def _tick_later(self, actor: Actor) -> None:
        def tick() -> None:
            self._tick_later(actor)
            node = self.nodes[actor]
            if node.role is None or node.paused_until > self.now:
                return
            self.patience.watch(actor)
            self._connect_all(actor)
            event = self._due(node) if node.role is not None else None
            if isinstance(event, RetryDue) and not self._is_time_to_repeat(node):
                return
            if event is not None:
                self.do(node, lambda: node.role.tell(event, self.time_of(node)))

        if actor != COORDINATOR:
            self.after(self.chance.uniform(0.2, 0.9) * self.schedule.pace, tick)

    def _is_time_to_repeat(self, node: Node) -> bool:
        machine = node.role.machine
        said = (
            (machine.phase, machine.iteration)
            if isinstance(node.role, ServerRole)
            else (machine.state, machine.activation, machine.incarnation)
        )
        connections = self._greeted[self._links_of[node.actor][-1]]
        return self.patience.may_repeat(node.actor, said, connections)

    def _due(self, node: Node) -> Event | None:
        role = node.role
        if isinstance(role, ServerRole):
            return RetryDue() if role.machine.state is ServerState.WAITING else None
        state = role.machine.state
        if (
            self.plan.method.offline
            and state in (DeviceState.IDLE, DeviceState.ASKING)
            and self.chance.random() < 0.4
        ):
            return OfflineDue()
        if state in (
            DeviceState.ASKING,
            DeviceState.ASKING_OFFLINE,
            DeviceState.UPLOADING,
            DeviceState.WITHDRAWING,
        ):
            return RetryDue()
        return (
            Woke()
            if state in (DeviceState.IDLE, DeviceState.SUSPENDED, DeviceState.OFFLINE)
            else None
        )

    # ---------------------------------------------------------------------------------------------
    # network
    def _connect_all(self, actor: Actor) -> None:
        for guest, host in self._links_of[actor]:
            at, dialled = self.nodes[host], self.nodes[guest].role
            ready = (
                (guest, host) not in self._connected
                and at.role is not None
                and dialled is not None
                and at.dying is None
            )
            if ready and not any(
                self._active(fault, *pair)
                for fault in (Fault.PARTITION, Fault.CUT_OFF)
                for pair in ((guest, host), (host, guest))
            ):
                self._greet(at, guest, dialled.hello())

    def _greet(self, host: Node, guest: Actor, hello: dict[str, Any]) -> None:
        if isinstance(host.role, ServerRole) and host.role.machine.state is ServerState.NEW:
            self.stores.look_at_new(host, guest, hello)
            return
        self._handle_inbox(host)  # what came before is handled before
        if host.role is None:
            return
        if host.actor == COORDINATOR and not self.stores.meets(guest, host):
            return
        self._greeted[guest, host.actor] += 1
        before, objection = len(self.refused), self.stores.objection(host, guest, hello)
        if host.actor in self.recovering.actors:  # who is ahead of it contributes again
            objection = ""
        belongs = (
            host.actor == COORDINATOR or host.role.machine.last_of(number_of(guest)) is not None
        )
        self._connected.add((guest, host.actor))
        self.do(host, lambda: host.role.greet(guest, hello, self.time_of(host)))
        turned_away = len(self.refused) > before
        if host.role is not None and belongs and objection and not turned_away:
            self.stores.let_in.append(objection)
        has_to_wait = isinstance(host.role, ServerRole) and not (
            host.role.machine.takes_back and host.role.has_z
        )
        is_wrong = self.stores.is_wrong(host.actor, guest)
        if turned_away and belongs and not is_wrong and not has_to_wait:
            raise Violation(f"an honest peer was turned away: {self.refused[-1]}")
        if not belongs and host.role is not None and not turned_away:
            raise Violation(f"{host.actor} let {guest} in, which is no member")
        if turned_away:
            self.turned_away += 1
            self.refused.pop()
            self.hang_up((guest, host.actor))
        elif host.actor == COORDINATOR and host.role is not None:
            self._welcomed(self.nodes[guest])

    def _welcomed(self, server: Node) -> None:
        """A new server begins; its devices see it soon."""
        if server.role is not None and server.role.machine.state is ServerState.NEW:
            self.do(server, lambda: server.role.welcome(self.time_of(server)))
            self.after(0.01, lambda: self._connect_all(server.actor))

    def cut_off(self, actor: Actor) -> None:
        """What is on its way to or from it does not arrive."""
        for pair in self._links_of[actor]:
            self._greeted[pair] += 1
        for node in self.nodes.values():
            node.inbox = [letter for letter in node.inbox if letter.sender != actor]

    def _disconnect(self, actor: Actor) -> None:
        for pair in self._links_of[actor]:
            self.hang_up(pair)

    def hang_up(self, pair: tuple[Actor, Actor]) -> None:
        """The connection of a guest and a host has ended."""
        self._connected.discard(pair)
        self.patience.closed(pair)

    def is_connected(self, guest: Actor, host: Actor) -> bool:
        """Whether both believe so."""
        return (guest, host) in self._connected

    def links_of(self, actor: Actor) -> list[tuple[Actor, Actor]]:
        """With whom it may connect: guest and host."""
        return self._links_of[actor]

    def leave(self, node: Node) -> None:
        """Another process takes its place; what is on its way to the old one is lost."""
        node.inbox.clear()
        self._disconnect(node.actor)
        self.cut_off(node.actor)

    def come_back(self, node: Node) -> None:
        """It has its turn again, or for the first time."""
        if node.role is None:
            self._open(node.actor)
        else:
            node.role.busy_with = None  # what came of its work meanwhile has been lost
            self._work(node)
            self.after(0.01, lambda: self._connect_all(node.actor))

    def _active(self, fault: Fault, sender: Actor, to: Actor) -> Planned | None:
        for planned in self._windows.get(fault, ()):
            if planned.at <= self.now < planned.at + planned.length and planned.where in (
                sender,
                to,
                f"{sender}>{to}",
            ):
                return planned
        return None

    def _hits(self, fault: Fault, letter: Letter) -> bool:
        planned = self._active(fault, letter.sender, letter.to)
        struck = planned is not None and self.chance.random() < max(planned.amount, 0.2)
        if struck:
            self.count(fault)
        return struck

    def _post(self, letter: Letter) -> None:
        self.sent.append(letter)
        pair = (letter.sender, letter.to)
        if pair not in self._connected and pair[::-1] not in self._connected:
            return
        for fault in (Fault.PARTITION, Fault.CUT_OFF):
            if self._active(fault, *pair):
                self.count(fault)
                return
        line_s = self.patience.slow_s(letter)
        if line_s is None or self.patience.is_dead(*pair) or self._hits(Fault.LOSS, letter):
            return
        copies = 2 if self._hits(Fault.DUPLICATE, letter) else 1
        for _ in range(copies):
            delay = line_s + self.chance.uniform(0.001, 0.03)
            delay += self.chance.uniform(0.3, 3.0) if self._hits(Fault.DELAY, letter) else 0
            delay += self.chance.uniform(0.0, 0.5) if self._hits(Fault.REORDER, letter) else 0
            self.after(delay, partial(self._deliver, letter, self.connections(letter)))

    def connections(self, letter: Letter) -> int:
        """How often these two have connected."""
        return self._greeted[letter.sender, letter.to] + self._greeted[letter.to, letter.sender]

    def _deliver(self, letter: Letter, connections: int) -> None:
        node = self.nodes[letter.to]
        if self.connections(letter) != connections:
            return
        if node.paused_until > self.now:
            self.after(node.paused_until - self.now, partial(self._deliver, letter, connections))
        elif self._hits(Fault.RESET, letter):
            self._cut(letter)
        elif node.role is not None and self.schedule.together:
            node.inbox.append(letter)
            if len(node.inbox) == 1:
                self.after(
                    self.chance.uniform(0.0, self.schedule.together),
                    lambda: self._handle_inbox(node),
                )
        elif node.role is not None:
            self.do(node, lambda: node.role.receive(letter, self.time_of(node)))

    def _handle_inbox(self, node: Node) -> None:
        """What has come meanwhile, with one wait for the disk."""
        letters, node.inbox = node.inbox, []
        if letters:
            self.do(node, lambda: self._together(node, letters))

    def _together(self, node: Node, letters: list[Letter]) -> list[Letter]:
        calls = [partial(node.role.receive, letter, self.time_of(node)) for letter in letters]
        outcomes = node.role.handle_group(calls)
        self.groups[len(calls)] += 1
        self.refused += [
            f"{node.actor}: {outcome}" for outcome in outcomes if isinstance(outcome, ProtocolError)
        ]
        return [
            letter
            for outcome in outcomes
            if not isinstance(outcome, ProtocolError)
            for letter in outcome
        ]

    def _cut(self, letter: Letter) -> None:
        """The connection breaks within a letter: the decoder must make nothing of what came."""
        frames = [*encode(letter)]
        cut = frames[: self.chance.randrange(len(frames))]
        try:
            decode(cut, self._limits, letter.sender, letter.to)
        except Refused as refused:
            if refused.reason != "cut":
                raise Violation(
                    f"half of {letter.event} was refused as {refused.reason}"
                ) from refused
        else:
            raise Violation(f"half of {letter.event} was taken for a whole")
        self.hang_up((letter.sender, letter.to))
        self.hang_up((letter.to, letter.sender))

    # ---------------------------------------------------------------------------------------------
    # trouble
    def count(self, fault: Fault) -> None:
        self.happened[fault] = self.happened.get(fault, 0) + 1

    def _strike(self, planned: Planned) -> None:
        fault = planned.fault
        if fault in _WINDOWS:
            self._windows.setdefault(fault, []).append(planned)
            return
        if fault in self._apart:
            self._apart[fault](planned)
            return
        node = self.nodes[planned.where]
        match fault:
            case Fault.CRASH_AT_STEP:
                node.doomed, node.patience = planned, 8
                return
            case Fault.FULL_DISK:
                node.disk.full = True
                self.after(planned.length, lambda: setattr(node.disk, "full", False))
                return
            case Fault.CRASH:
                self.crash(node, planned.length)
            case Fault.CLOCK_JUMP:
                node.offset, node.is_right = (
                    max(min(node.offset + planned.amount, 36_000.0), -36_000.0),
                    False,
                )
            case Fault.CLOCK_LEAP:
                self._leap(node, planned)
            case Fault.PAUSE:
                node.paused_until = self.now + planned.length
            case Fault.GIVE_UP:
                self._give_up(number_of(planned.where))
            case Fault.CHANGE:
                self._change(number_of(planned.where))
                if planned.amount < 0.7:  # and once more, in most cases
                    self.after(planned.length, lambda: self._change(number_of(planned.where)))
                return
            case Fault.LOST_DISK:
                self._lose(node, planned.length)
            case Fault.OLD_BACKUP:
                self._back_up_or_restore(node, planned.length)
            case Fault.CUT_OFF:
                self._windows.setdefault(fault, []).append(planned)
                self._disconnect(node.actor)
        self.count(fault)

    def _leap(self, node: Node, planned: Planned) -> None:
        """A clock is wrong for a while; every other time the role begins anew with it, and once
        more when it is right again.
        """
        begins_anew = int(abs(planned.amount) * 1000) % 2 == 0
        for leap, when in ((planned.amount, 0.0), (0.0, planned.length)):

            def turn(leap: float = leap) -> None:
                node.leap, node.is_right = leap, False
                if begins_anew:
                    self.crash(node, 0.05)

            self.after(when, turn)

    def _give_up(self, device: int) -> None:
        home = self.nodes[server_actor(self.plan.home_of(device))]
        if (
            home.role is not None
            and home.role.machine.state is not ServerState.NEW
            and home.role.machine.is_working(device)
        ):
            event = DeviceLost(device=device, activation=home.role.machine.last_of(device) + 1)
            self.do(home, lambda: home.role.tell(event, self.time_of(home)))

    def _change(self, device: int) -> None:
        """A member leaves, unless it is the last; one that is none joins, for the first time or
        again.
        """
        home = self.nodes[server_actor(self.plan.home_of(device))]
        if home.role is None or home.role.machine.state is ServerState.NEW:
            return
        members = home.role.machine.members
        if device in members and len(members) == 1:
            return
        event = DeviceLeft(device=device) if device in members else DeviceJoined(device=device)
        self.count(Fault.CHANGE)
        self.do(home, lambda: home.role.tell(event, self.time_of(home)))

    def _lose(self, node: Node, back_in: float) -> None:
        self.crash(node, back_in)
        self.new_disk(node)
        node.was_reset = True

    def new_disk(self, node: Node) -> None:
        """An empty one."""
        node.lives.append(tuple(node.disk.log))
        self._disks += 1
        node.disk.is_new(self._disks)
        node.committed = 0

    def _back_up_or_restore(self, node: Node, back_in: float) -> None:
        if node.backup is None:
            self.crash(node, back_in)
            node.backup = node.disk.copy()
            self.after(1.5, lambda: self._back_up_or_restore(node, back_in))
        elif self.now < self.schedule.until:
            self.crash(node, back_in)
            node.lives.append(tuple(node.disk.log))
            node.disk.put_back(node.backup)
            node.backup, node.was_reset, node.committed = None, True, node.disk.length()

    def _heal(self) -> None:
        self._windows, self.is_calm = {}, True
        self.stores.put_all_back()
        self.damage.repair_all()
        self.twins.end_all()
        for node in self.nodes.values():
            node.doomed, node.disk.full, node.paused_until = None, False, 0.0
        for node in self.nodes.values():
            self._open(node.actor)
