"""A server as a process: devices dial it, it dials the coordinator, and it tells its devices how
its phase stands.
"""

import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import only
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.membership import Membership
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.protocol.messages import (
    COORDINATOR,
    Activated,
    Actor,
    DeadlinePassed,
    DeviceLost,
    Started,
    Uploaded,
    Withdrawn,
    device_actor,
    number_of,
)
from fedbcd.protocol.notices import Notice, PhaseNotice, RoundNotice
from fedbcd.protocol.server import ServerState

LOOK_S = 10.0  # how often a server that waits for the epoch looks at the clock


class ServerProcess(Process):
    """One server."""

    role: ServerRole

    def __init__(self, role: ServerRole, options: Deploy, declared: Declared, log: RoleLog) -> None:
        super().__init__(role, options, declared, log)
        self._is_welcome = False  # the coordinator has told it something
        self._round = 0  # of the coordinator, as it last told
        self._finished = False
        self._opened_at = time.monotonic()
        self._said: PhaseNotice | None = None  # the latest notice
        self._activated_at: dict[tuple[int, int], float] = {}  # (device, activation) -> when
        self._phase, self._is_open = (
            role.machine.phase,
            False,
        )  # as of the last event that is durable; the machine may be ahead of the disk
        self._pool = role.blueprint.pool(role.machine.server)
        self._tells_members = (
            self._pool.follows_rounds and options.time_scale is not None
        )  # it is drawn which of them are available
        self._members: tuple[int, ...] = ()  # likewise, if they are told
        self.membership = Membership(self)

    async def open_links(self) -> None:
        devices = map(device_actor, self.role.blueprint.servers[self.role.machine.server])
        welcomes = only(devices, self.role.check_guest)
        await self.peers.listen(welcomes, self.monitor.status, self.membership.change)
        self.tasks.spawn(self.peers.dial(COORDINATOR).run())

    def begin(self) -> None:
        """Go on, unless it is new; devices that were at work before a restart get a new time
        limit.
        """
        if self.role.machine.state is ServerState.NEW:
            return
        for device, activation in self.role.machine.working:
            self._watch(device, activation)
        self._set_deadline(self._phase)
        self.after([])

    def after(self, letters: list[Letter]) -> None:
        machine = self.role.machine
        if machine.phase != self._phase:
            self._opened_at = time.monotonic()
            self._set_deadline(machine.phase)
        self._phase, self._is_open = machine.phase, machine.places > 0
        self._members = tuple(sorted(machine.members)) if self._tells_members else ()
        self.metrics.rounds.set(max(machine.phase, 0))
        for letter in letters:
            if isinstance(letter.event, Activated):
                self._watch(number_of(letter.to), letter.event.activation)
        waiting = machine.state is ServerState.WAITING
        self.retry.expect(("report", (machine.phase, machine.iteration)) if waiting else None)
        self._tell_devices()

    def _set_deadline(self, phase: int) -> None:
        """A phase that was open before a restart has all of its time again."""
        rule = self.role.blueprint.deadline
        if rule is not None and rule.after is not None:
            event, scale = DeadlinePassed(phase=phase), self.options.time_scale or 1.0
            spawn, tell = self.tasks.spawn, self.tell
            self.timers.set(DeadlinePassed, rule.after * scale, lambda: spawn(tell(event)))

    def waits_for(self) -> str:
        state = self.role.machine.state
        is_waiting = state is ServerState.WAITING or (
            state is ServerState.NEW and not self._is_welcome
        )
        return "coordinator" if is_waiting else "devices"

    def status(self) -> dict[str, Any]:
        machine = self.role.machine
        numbers = {
            "phase": self._phase,
            "round": self._round,
            "received": machine.received,
            "active": machine.active,
        }
        devices = sum(peer != COORDINATOR for peer in self.peers.connected)
        return {
            "state": machine.state.value,
            **numbers,
            "members": len(machine.members),
            "devices": devices,
            "absent": [*self.membership.absent.devices],
        }

    def trouble(self) -> list[str]:
        return [*super().trouble(), *self.membership.absent.trouble]

    def beat(self) -> None:
        """Now and then: also look for devices that do not come any more."""
        super().beat()
        self.membership.look()

    # ---------------------------------------------------------------------------------------------
    # lost devices
    async def receive(self, letter: Letter) -> None:
        """A letter came; an upload tells how long devices take, whether it is taken or not."""
        try:
            await super().receive(letter)
        finally:
            if isinstance(letter.event, Uploaded | Withdrawn):
                self._heard_from(letter.event.device, letter.event.activation, letter.model)
        if isinstance(letter.event, Withdrawn):
            event = letter.event
            self.log.warning(
                "withdrawn", device=event.device, activation=event.activation, reason=event.reason
            )

    def _heard_from(self, device: int, activation: int, model: Tensor | None) -> None:
        """How long it has worked: what its line has taken, both ways, is no measure of that."""
        key, end, actor = (device, activation), self.peers.listener, device_actor(device)
        if key not in self.role.machine.working:
            self.timers.drop(key)
            if key in self._activated_at:
                since, now = self._activated_at.pop(key), time.monotonic()
                if end is not None:
                    since = max(since, min(end.model_sent_at(actor), now))
                    now = min(now, end.model_began_at(actor)) if model is not None else now
                self.timeouts.lost.observe(device, now - since)

    def _watch(self, device: int, activation: int) -> None:
        key = (device, activation)
        if key not in self._activated_at:
            self._activated_at = {k: t for k, t in self._activated_at.items() if k[0] != device} | {
                key: time.monotonic()
            }
            self._wait_for(device, activation, self.timeouts.lost.seconds(device))

    def _wait_for(
        self, device: int, activation: int, patience_s: float, left_s: float | None = None
    ) -> None:
        """Give a device up once it has been quiet for so long; it is not while a model moves."""
        key = (device, activation)

        def due() -> None:
            quiet_s = time.monotonic() - self.peers.model_moved_at(device_actor(device))
            if quiet_s < patience_s:
                self._wait_for(device, activation, patience_s, patience_s - quiet_s)
            else:
                self._lost(device, activation)

        self.timers.set(key, patience_s if left_s is None else left_s, due)

    def _lost(self, device: int, activation: int) -> None:
        self.metrics.lost.inc()
        self.timeouts.lost.given_up(device)
        self.log.warning("device_lost", device=device, activation=activation)
        self.tasks.spawn(self.tell(DeviceLost(device=device, activation=activation)))

    # ---------------------------------------------------------------------------------------------
    # notices
    async def noticed(self, sender: Actor, notice: Notice) -> None:
        if not isinstance(notice, RoundNotice):
            await super().noticed(sender, notice)
            return
        self._round = max(self._round, notice.round)
        self.role.coordinator.told(notice.round)
        self._finished = self._finished or notice.finished
        if not self._is_welcome:
            self._is_welcome = True
            self._start()
        self._tell_devices()

    def _start(self) -> None:
        """A new server opens its first phase now, or when the clock of the run begins, which may be
        set right meanwhile.
        """
        if self.clock.now() < 0:
            self.timers.set(Started, min(-self.clock.now(), LOOK_S), self._start)
        else:
            self.tasks.spawn(self.events.do(self.role.welcome))

    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A device has dialled: put it in step if it has lost its memory, and tell it how the phase
        stands.
        """
        if peer == COORDINATOR:
            if await self.greet(peer, lambda _: self.role.coordinator.meet(about)):
                await super().connected(peer, about)
            return
        await super().connected(peer, about)
        if await self.greet(peer, lambda now: self.role.greet(peer, about, now)):
            await self.peers.notify(peer, self._notice())

    def _notice(self) -> PhaseNotice:
        return PhaseNotice(
            phase=self._phase,
            round=self._round,
            open=self._is_open and not self._finished,
            finished=self._finished,
            elapsed=round(time.monotonic() - self._opened_at, 6),
            members=self._members,
        )

    def _tell_devices(self) -> None:
        notice = self._notice()
        round_ = self._round if self._pool.follows_rounds else 0
        news = replace(notice, round=round_, elapsed=0.0)
        if news != self._said:
            self._said = news
            self.tasks.spawn(self.peers.broadcast(notice))

    def is_ready(self) -> bool:
        return self.peers.listener is not None and COORDINATOR in self.peers.connected
