"""A server as a process: devices dial it, it dials the coordinator, and it tells its devices how
its phase stands.
"""

import time
from collections.abc import Mapping
from typing import Any

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import only
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.logs import Log
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.checks import check_notice
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import Refused
from fedbcd.protocol.messages import (
    COORDINATOR,
    Activated,
    Actor,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    Started,
    Uploaded,
    Withdrawn,
    device_actor,
    number_of,
)
from fedbcd.protocol.server import ServerState

LOOK_S = 10.0  # how often a server that waits for the epoch looks at the clock
CHANGES: Mapping[str, type[DeviceJoined | DeviceLeft]] = {
    "admit": DeviceJoined,
    "dismiss": DeviceLeft,
}


class ServerProcess(Process):
    """One server."""

    role: ServerRole

    def __init__(self, role: ServerRole, options: Deploy, declared: Declared, log: Log) -> None:
        super().__init__(role, options, declared, log)
        self._is_welcome = False  # the coordinator has told it something
        self._round = 0  # of the coordinator, as it last told
        self._finished = False
        self._opened_at = time.monotonic()
        self._said: tuple[object, ...] = ()  # the latest notice
        self._activated_at: dict[tuple[int, int], float] = {}  # (device, activation) -> when
        self._phase, self._is_open = (
            role.machine.phase,
            False,
        )  # as of the last event that is durable; the machine may be ahead of the disk
        self._tells_members = (
            role.blueprint.algorithm.offline and options.time_scale is not None
        )  # it is drawn which of them are available
        self._members: list[int] = []  # likewise, if they are told

    async def open_links(self) -> None:
        """Listen for the devices, dial the coordinator."""
        devices = map(device_actor, self.role.blueprint.servers[self.role.machine.server])
        await self.listen(only(devices, self.role.check_guest), self.change)
        self.dial(COORDINATOR)

    def begin(self) -> None:
        """Go on, unless it is new; devices that were at work before a restart get a new time
        limit.
        """
        if self.role.machine.state is ServerState.NEW:
            return
        for device, activation in self.role.machine.working:
            self._watch(device, activation)
        self.after([])

    def after(self, letters: list[Letter]) -> None:
        """Watch the devices that were let in, wait for the coordinator's answer, tell devices what
        has changed.
        """
        machine = self.role.machine
        if machine.phase != self._phase:
            self._opened_at = time.monotonic()
        self._phase, self._is_open = machine.phase, machine.places > 0
        self._members = sorted(machine.members) if self._tells_members else []
        self.metrics.rounds.set(max(machine.phase, 0))
        for letter in letters:
            if isinstance(letter.event, Activated):
                self._watch(number_of(letter.to), letter.event.activation)
        waiting = machine.state is ServerState.WAITING
        self.expect_answer(("report", (machine.phase, machine.iteration)) if waiting else None)
        self._tell_devices()

    def waits_for(self) -> str:
        """Devices, or the coordinator."""
        state = self.role.machine.state
        is_waiting = state is ServerState.WAITING or (
            state is ServerState.NEW and not self._is_welcome
        )
        return "coordinator" if is_waiting else "devices"

    def status(self) -> dict[str, Any]:
        """What the machine is doing."""
        machine = self.role.machine
        numbers = {
            "phase": self._phase,
            "round": self._round,
            "received": machine.received,
            "active": machine.active,
        }
        devices = sum(peer != COORDINATOR for peer in self.peers())
        return {
            "state": machine.state.value,
            **numbers,
            "members": len(machine.members),
            "devices": devices,
        }

    # ---------------------------------------------------------------------------------------------
    # members
    async def change(self, what: str, device: int) -> bool:
        """An operator admits or dismisses a device; False: it was so before. Durable once it
        returns.
        """
        machine = self.role.machine
        if what not in CHANGES:
            raise Refused(
                "event",
                f"{what!r:.80} is none of the changes that {self.role.actor} knows:"
                f" {', '.join(CHANGES)}",
            )
        if device not in self.role.blueprint.servers[machine.server]:
            raise Refused(
                "membership",
                f"device {device} does not belong to {self.role.actor}, by the job file; look for"
                " its own server",
            )
        changed: list[str] = []

        def act(now: float) -> list[Letter]:
            if (machine.last_of(device) is not None) == (what == "admit"):
                return []
            letters = self.role.tell(CHANGES[what](device=device), now)
            changed.append(what)
            return letters

        await self.do(act)
        if self.is_ending:  # it may have come too late, or not have reached the disk
            raise Refused(
                "ending",
                f"{self.role.actor} is ending, so this may not have happened; ask again once it"
                " runs",
            )
        if changed:
            self.log.info(
                {"admit": "admitted", "dismiss": "dismissed"}[what],
                device=device,
                members=len(machine.members),
            )
        if changed and what == "dismiss" and self.listener is not None:
            self.listener.refuse(
                device_actor(device),
                "not_admitted",
                f"device {device} has been dismissed by the operator",
            )
        return bool(changed)

    # ---------------------------------------------------------------------------------------------
    # lost devices
    async def receive(self, letter: Letter) -> None:
        """A letter came; an upload tells how long devices take, whether it is taken or not."""
        try:
            await super().receive(letter)
        finally:
            if isinstance(letter.event, Uploaded | Withdrawn):
                self._heard_from(letter.event.device, letter.event.activation)
        if isinstance(letter.event, Withdrawn):
            event = letter.event
            self.log.warning(
                "withdrawn", device=event.device, activation=event.activation, reason=event.reason
            )

    def _heard_from(self, device: int, activation: int) -> None:
        key = (device, activation)
        if key not in self.role.machine.working:
            self.drop(key)
            if key in self._activated_at:
                self.timeouts.lost.observe(device, time.monotonic() - self._activated_at.pop(key))

    def _watch(self, device: int, activation: int) -> None:
        key = (device, activation)
        if key not in self._activated_at:
            self._activated_at = {k: t for k, t in self._activated_at.items() if k[0] != device} | {
                key: time.monotonic()
            }
            self.at(key, self.timeouts.lost.seconds(device), lambda: self._lost(device, activation))

    def _lost(self, device: int, activation: int) -> None:
        self.metrics.lost.inc()
        self.timeouts.lost.given_up(device)
        self.log.warning("device_lost", device=device, activation=activation)
        self.spawn(self.tell(DeviceLost(device=device, activation=activation)))

    # ---------------------------------------------------------------------------------------------
    # notices
    async def noticed(self, sender: Actor, kind: str, body: dict[str, Any]) -> None:
        """The coordinator tells its round."""
        if sender == COORDINATOR and kind == "round":
            check_notice(sender, body, "round")
            self._round = max(self._round, int(body["round"]))
            self._finished = self._finished or bool(body.get("finished"))
            if not self._is_welcome:
                self._is_welcome = True
                self._start()
            self._tell_devices()

    def _start(self) -> None:
        """A new server opens its first phase now, or when the clock of the run begins, which may be
        set right meanwhile.
        """
        if self.now() < 0:
            self.at(Started, min(-self.now(), LOOK_S), self._start)
        else:
            self.spawn(self.do(self.role.welcome))

    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A device has dialled: put it in step if it has lost its memory, and tell it how the phase
        stands.
        """
        await super().connected(peer, about)
        if peer == COORDINATOR or self.listener is None:
            return
        if await self.greet(peer, lambda now: self.role.greet(peer, about, now)):
            await self.listener.notice(peer, "phase", self._notice())

    def _notice(self) -> dict[str, Any]:
        is_open = self._is_open and not self._finished
        elapsed = round(time.monotonic() - self._opened_at, 6)
        notice: dict[str, Any] = {"phase": self._phase, "round": self._round, "open": is_open}
        notice |= {"finished": self._finished, "elapsed": elapsed}
        if self._members:
            notice["members"] = self._members
        return notice

    def _tell_devices(self) -> None:
        notice = self._notice()
        round_ = (
            self._round if self.role.blueprint.algorithm.offline else 0
        )  # only offline rounds follow the coordinator's
        what = (
            notice["phase"],
            round_,
            notice["open"],
            notice["finished"],
            *notice.get("members", ()),
        )
        if what != self._said:
            self._said = what
            self.spawn(self.broadcast("phase", notice))

    def is_ready(self) -> bool:
        """Whether it listens and the coordinator is there."""
        return self.listener is not None and COORDINATOR in self.peers()
