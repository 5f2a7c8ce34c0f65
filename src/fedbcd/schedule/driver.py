"""The one loop of every engine: an event goes to its machine, the machine's commands go to the
engine, both go to the log.

An engine says when a message arrives and when a device has finished. The driver holds the machines,
which never look at numbers: what they ask for is read off their transitions (`schedule.work`).
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from fedbcd.errors import RecordError
from fedbcd.protocol import Coordinator, Device, Server
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    Command,
    Event,
    device_actor,
    server_actor,
)
from fedbcd.record.eventlog import Log
from fedbcd.schedule.availability import PerServer, at_server
from fedbcd.schedule.deadline import Deadline


class Observer(Protocol):
    """Is shown every transition, in order."""

    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        """Take note of one transition."""
        ...


class Machines:
    """One machine per actor. Devices are made when first spoken to, so a million idle ones cost
    nothing.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[int]],
        cloud: Cloud,
        active: PerServer,
        iterations: int,
        offline_limit: int | None,
        late: Collection[int] = (),
        at_once: int | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """`late` devices have a home, but are members only from their DeviceJoined on."""
        self.coordinator: Coordinator = cloud.coordinator(len(servers), iterations)
        early = [[device for device in members if device not in late] for members in servers]
        rule = deadline or Deadline()
        phases = iterations, cloud.sync, at_once, rule.least, rule.spare
        self.servers = [
            Server(n, members, at_server(active, n), *phases) for n, members in enumerate(early)
        ]
        self.groups = servers  # with those who join late
        self.devices: dict[int, Device] = {}
        self.home: dict[int, int] = {
            device: n for n, members in enumerate(servers) for device in members
        }
        self._offline_limit = offline_limit
        self._of: dict[Actor, Coordinator | Server | Device] = {COORDINATOR: self.coordinator}
        self._of |= {server_actor(n): server for n, server in enumerate(self.servers)}

    def device(self, device: int) -> Device:
        """The machine of one device."""
        machine = self.devices.get(device)
        if machine is None:
            machine = Device(device, server_actor(self.home[device]), self._offline_limit)
            self.devices[device] = machine
            self._of[device_actor(device)] = machine
        return machine

    def of(self, actor: Actor) -> Coordinator | Server | Device:
        """The machine at an address."""
        machine = self._of.get(actor)
        if machine is not None:
            return machine
        kind, _, number = actor.partition("/")
        if kind != "device" or not number.isdecimal() or int(number) not in self.home:
            raise RecordError(
                f"there is no {actor!r} in this federation of {len(self.servers)} servers and"
                f" {len(self.home)} devices"
            )
        return self.device(int(number))


class Driver:
    """Feeds events to machines, and shows what they answer to an observer and to the log."""

    def __init__(
        self, machines: Machines, observer: Observer | None = None, log: Log | None = None
    ) -> None:
        self.machines = machines
        self.observer = observer
        self.log = log
        self.transitions = 0

    def deliver(self, now: float, actor: Actor, event: Event) -> list[Command]:
        """One transition. What remains for the engine to do are the commands that take time:
        messages and local work.
        """
        commands = self.machines.of(actor).handle(event)
        self.transitions += 1
        if self.log is not None:
            self.log.append(now, actor, event, commands)
        if self.observer is not None:
            self.observer.apply(actor, event, commands)
        return commands
