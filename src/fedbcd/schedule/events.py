"""The virtual clock: who asks when, how long work takes, who is first. Handles only; a schedule
costs no tensor work.

docs/determinism.md says in which order things happen; this file is that page as code.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fedbcd.algorithm.method import Method
from fedbcd.protocol.device import DeviceState
from fedbcd.protocol.messages import (
    DROPOUT,
    Actor,
    Command,
    DeadlinePassed,
    DeviceJoined,
    DeviceLeft,
    Event,
    Failed,
    OfflineDue,
    OfflineTrained,
    OpenPhase,
    Pull,
    Send,
    Started,
    Train,
    Trained,
    TrainOffline,
    Woke,
    device_actor,
    number_of,
    server_actor,
)
from fedbcd.protocol.server import ServerState
from fedbcd.schedule.availability import (
    Availability,
    AvailableDevices,
    Devices,
    PerServer,
)
from fedbcd.schedule.deadline import Deadline
from fedbcd.schedule.delays import Clock, Floats
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.times import Times
from fedbcd.schedule.work import Reader, Round

SAMPLED = 16  # arrivals looked at first, for each that is wanted


@dataclass
class Schedule:
    """Everything that decides who does what when."""

    method: Method
    clock: Clock
    seed: int
    active: PerServer
    joins: Mapping[int, int] = field(
        default_factory=dict
    )  # device -> round at whose start it joins
    leaves: Mapping[int, int] = field(default_factory=dict)
    sent: tuple[float, float] = (0.0, 0.0)  # bytes of an activation, down and up
    availability: Availability | None = None
    deadline: Deadline | None = None


class Simulation:
    """Plays rounds on a virtual clock. `now` and `round` are where it stands."""

    def __init__(self, driver: Driver, schedule: Schedule) -> None:
        self.driver = driver
        self.machines = driver.machines
        self.schedule = schedule
        self.times = Times(schedule.clock, schedule.seed, self.machines.groups, schedule.sent)
        self._pools = [
            AvailableDevices(schedule.method, q, schedule.seed, schedule.availability)
            for q in (server.active for server in self.machines.servers)
        ]  # of each server
        self.now = 0.0
        self.round = 0
        self._agenda: list[tuple[float, int, Actor, Event]] = []  # a heap
        self._order = count()
        self._inbox: deque[tuple[Actor, Event]] = deque()
        self._opened: list[int] = []  # servers whose phase has just begun
        self._arrivals: dict[int, _Arrivals] = {}  # server -> of its present phase
        self._members: dict[
            int, Devices
        ] = {}  # server -> its members as an array, until they change
        self._expected: dict[int, int] = {}  # chosen device that has not uploaded -> its server
        self._ends: dict[int, float] = {}  # of the offline round of a device, where it takes time
        self._next: dict[int, float] = {}  # device -> when its timer begins the next one
        self._arrived: set[int] = set()  # of the devices that join late
        self._gone: set[int] = set()

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        """The next round, as its reader has read it."""
        self.play_round()
        assert isinstance(self.driver.observer, Reader)
        return self.driver.observer.take(self.round, self.now, self.activations)

    def play_round(self) -> None:
        """Go on until the coordinator has mixed once more and the servers it released have
        stepped.
        """
        if self.round == 0:
            for n in range(len(self.machines.servers)):
                self._deliver(server_actor(n), Started())
                for device in self.machines.servers[n].members:
                    self._rest(device)
        self._change_members()
        if self.schedule.method.offline and not self.schedule.method.takes_time_offline:
            for server in range(len(self.machines.servers)):
                self._train_offline(server)
        while self.machines.coordinator.round == self.round:
            self._invite_devices()
            self.now, _, actor, event = heapq.heappop(self._agenda)
            self._on_time(actor, event)
        self.round = self.machines.coordinator.round

    @property
    def activations(self) -> int:
        """Uploads so far."""
        return sum(device.activation for device in self.machines.devices.values())

    # ---------------------------------------------------------------------------------------------
    # delivery
    def _on_time(self, actor: Actor, event: Event) -> None:
        if isinstance(event, DeadlinePassed):
            machine = self.machines.servers[number_of(actor)]
            if machine.state is ServerState.COLLECTING and machine.phase == event.phase:
                self._deliver(actor, event)
            return
        device = number_of(actor)
        if device in self._gone:
            return
        match event:
            case OfflineDue() if self._next.get(device) != self.now:
                return  # a contact came before it
            case Woke() if self.machines.device(device).state is DeviceState.OFFLINE:
                server = self._expected.pop(device)  # it asks later, if nobody else is earlier
                self._arrivals[server].put_back(device, self._ends[device])
                for time, other in self._arrivals[server].take(1):
                    self._invite(server, time, other)
                return
        is_over = isinstance(event, Trained | Failed)
        if is_over:
            self._expected.pop(device, None)
        self._deliver(actor, event)
        if is_over or isinstance(event, OfflineTrained):
            self._rest(device)
        server = self.machines.home[device]
        goes_on = is_over and server not in self._opened and self.machines.servers[server].places
        if goes_on and self.schedule.method.at_once:
            self._fill(server)  # its place is free
            if isinstance(event, Failed) and not self._arrivals[server].left:
                self._invite_next(server, len(self._members_of(server)))
        elif goes_on and isinstance(event, Failed):
            self._invite_next(server)

    def _deliver(self, actor: Actor, event: Event) -> None:
        """Deliver an event and all that follows from it at once: messages take no time."""
        self._inbox.append((actor, event))
        while self._inbox:
            actor, event = self._inbox.popleft()
            for command in self.driver.deliver(self.now, actor, event):
                self._execute(actor, command)

    def _execute(self, actor: Actor, command: Command) -> None:
        match command:
            case Send():
                self._inbox.append((command.to, command.message))
            case Train() | Pull() | TrainOffline():
                self._start_work(actor, command)
            case OpenPhase():
                self._opened.append(number_of(actor))
                rule = self.schedule.deadline
                if rule is not None and rule.after is not None:
                    self._at(self.now + rule.after, actor, DeadlinePassed(phase=command.phase))

    def _at(self, time: float, actor: Actor, event: Event) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), actor, event))

    # ---------------------------------------------------------------------------------------------
    # time
    def _start_work(self, actor: Actor, work: Train | Pull | TrainOffline) -> None:
        """The clock model says when it ends."""
        device = number_of(actor)
        steps, took = self.times.of(self.schedule.method, device, work, self.now)
        if isinstance(work, TrainOffline):
            trained = OfflineTrained(session=work.session, steps=steps)
            if self.schedule.method.takes_time_offline:
                self._ends[device] = self.now + took
                self._at(self._ends[device], actor, trained)
            else:
                self._inbox.append((actor, trained))
            return
        self._next.pop(device, None)
        part = self.times.lost_after(device, work.activation)
        if part is None:
            self._at(self.now + took, actor, Trained(activation=work.activation, steps=steps))
        else:
            self._at(self.now + part * took, actor, Failed(session=work.session, reason=DROPOUT))

    def _rest(self, device: int) -> None:
        """Set the timer of the next offline round, as far away as an arrival; one that is suspended
        has none.
        """
        method = self.schedule.method
        if not method.takes_time_offline:
            return
        machine = self.machines.device(device)
        if machine.offline < (method.offline_limit or 0):
            rest = self.times.rest_one(device, machine.session, machine.activation, self.now)
            self._next[device] = self.now + rest
            self._at(self._next[device], device_actor(device), OfflineDue())

    def _invite_devices(self) -> None:
        """Draw arrivals for servers that have opened a phase; only the q earliest become events, or
        those that `at_once` has room for.
        """
        for server in self._opened:
            candidates = self._available(server)
            if self.schedule.method.at_once is not None:  # some are still at work
                candidates = candidates[~np.isin(candidates, [*self._expected])]
            elif self.schedule.deadline is not None:  # or have uploaded while it waited
                busy = [*self._expected, *self.machines.servers[server].barred]
                candidates = candidates[~np.isin(candidates, busy)]
            phase = np.array([self.machines.servers[server].phase])
            delay = self.times.arrivals(candidates, phase, self.now)
            self._arrivals[server] = _Arrivals(self.now, delay, candidates)
            self._fill(server)
        self._opened.clear()

    def _fill(self, server: int) -> None:
        """Let the next ones come to a server that has room for them."""
        machine, at_once = self.machines.servers[server], self.schedule.method.at_once
        room = machine.active
        if at_once is not None or self.schedule.deadline is not None:
            room = machine.places + len(machine.working) if at_once is None else at_once
            room -= sum(home == server for home in self._expected.values())
        for time, device in self._arrivals[server].take(room):
            self._invite(server, time, device)

    def _invite(self, server: int, time: float, device: int) -> None:
        self._expected[device] = server
        self._at(max(time, self.now), device_actor(device), Woke())

    def _members_of(self, server: int) -> Devices:
        if server not in self._members:
            self._members[server] = np.array(self.machines.servers[server].members, dtype=np.int64)
        return self._members[server]

    def _available(self, server: int) -> Devices:
        """Q~_n(t)."""
        return self._pools[server].available(self._members_of(server), self.round)

    def _train_offline(self, server: int) -> None:
        """FedBCD-I: every available device takes one offline round; a busy or suspended one ignores
        the call.
        """
        for device in sorted(self._available(server).tolist()):
            self._deliver(device_actor(device), OfflineDue())

    # ---------------------------------------------------------------------------------------------
    # membership
    def _change_members(self) -> None:
        for device in _due(self.schedule.joins, self.round, self._arrived):
            server = self.machines.home[device]
            self._deliver(server_actor(server), DeviceJoined(device=device))
            self._rest(device)
            self._members.pop(server, None)
        for device in _due(self.schedule.leaves, self.round, self._gone):
            server = self.machines.home[device]
            self._deliver(server_actor(server), DeviceLeft(device=device))
            self._members.pop(server, None)
            self._replace(device, server)

    def _replace(self, device: int, server: int) -> None:
        """A chosen device has gone: the next that would have asked takes its place."""
        arrivals = self._arrivals.get(server)
        if arrivals is None:
            return
        arrivals.remove(device)
        if self._expected.pop(device, None) is not None:
            self._invite_next(server)

    def _invite_next(self, server: int, number: int = 1) -> None:
        """The next that would have asked; with FedBCD-I also who was not drawn to be available, if
        nobody else is left.
        """
        arrivals = self._arrivals[server]
        if not arrivals.left:
            busy = np.array([*self._expected], dtype=np.int64)
            if self.schedule.deadline is not None:
                busy = np.array([*self._expected, *self.machines.servers[server].barred])
            here = np.concatenate([arrivals.devices, busy])
            rest = np.setdiff1d(self._members_of(server), here)
            phase = np.array([self.machines.servers[server].phase])
            arrivals.add(self.now, self.times.arrivals(rest, phase, self.now), rest)
        for time, other in arrivals.take(number):
            self._invite(server, time, other)


class _Arrivals:
    """Who asks when in one phase of a server, the earliest first. Only those that are taken are put
    in order; the rest stay arrays.
    """

    def __init__(self, start: float, delay: Floats, devices: Devices) -> None:
        self._start = start
        self._delay = delay  # infinite: taken, or gone
        self.devices = devices
        self._late: dict[int, float] = {}  # device -> when it arrives after all
        self.left = len(delay)

    def add(self, now: float, delay: Floats, devices: Devices) -> None:
        """More of them, whose delays begin now."""
        self._delay = np.concatenate([self._delay, (now - self._start) + delay])
        self.devices = np.concatenate([self.devices, devices])
        self.left += len(delay)

    def take(self, number: int) -> list[tuple[float, int]]:
        """The next arrivals, at most `number`: (time, device). Of equal delays the device with the
        smaller number comes first.
        """
        number = min(number, self.left)
        if number <= 0:
            return []
        early = places_of_smallest(self._delay, number)
        chosen = early[np.lexsort((self.devices[early], self._delay[early]))[:number]]
        times = (self._start + self._delay[chosen]).tolist()
        self._delay[chosen] = np.inf
        self.left -= number
        found = zip(times, self.devices[chosen].tolist(), strict=True)
        return [(self._late.get(device, time), device) for time, device in found]

    def put_back(self, device: int, time: float) -> None:
        """One that was taken comes later."""
        self._late[device] = time
        self._delay[self.devices == device] = time - self._start
        self.left += 1

    def remove(self, device: int) -> None:
        """Forget a device that has gone."""
        place = (self.devices == device) & np.isfinite(self._delay)
        self._delay[place] = np.inf
        self.left -= int(place.sum())


def _due(changes: Mapping[int, int], round_: int, done: set[int]) -> list[int]:
    """Devices whose time has come; also those of a round that was skipped because two mixes fell
    together.
    """
    due = sorted(
        device for device, when in changes.items() if when <= round_ and device not in done
    )
    done.update(due)
    return due


def places_of_smallest(values: Floats, number: int) -> Devices:
    """Places of the `number` smallest, and of all that equal the largest of them.

    A sample says how small those are, about, so that among very many only a few are compared.
    """
    near = np.arange(len(values))
    if len(values) > SAMPLED * number:
        sample = np.sort(values[:: len(values) // (SAMPLED * number) + 1])
        close = np.flatnonzero(
            values
            <= sample[min(2 * number * len(sample) // len(values) + SAMPLED, len(sample) - 1)]
        )
        near = close if len(close) >= number else near
    bound = np.partition(values[near], number - 1)[number - 1]
    found: Devices = near[values[near] <= bound]
    return found
