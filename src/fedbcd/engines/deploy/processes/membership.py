"""Who belongs to a server: an operator admits and dismisses devices, and so does the rule on those
that do not come any more.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.absent import Absent
from fedbcd.errors import ProtocolError, Refused
from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    DeviceJoined,
    DeviceLeft,
    device_actor,
    number_of,
)

if TYPE_CHECKING:
    from fedbcd.engines.deploy.processes.server import ServerProcess

RULE = "rule"  # who dismisses what nobody has asked for
# what an operator may ask for -> the event, and the word for the log
CHANGES: Mapping[str, tuple[type[DeviceJoined | DeviceLeft], str]] = {
    "admit": (DeviceJoined, "admitted"),
    "dismiss": (DeviceLeft, "dismissed"),
}


class Membership:
    """Of one server."""

    def __init__(self, process: "ServerProcess") -> None:
        self._process = process
        self.absent = Absent(process.options.absent_s)

    async def change(self, what: str, device: int, by: Actor) -> bool:
        """`by` admits or dismisses a device; False: it was so before. Durable, with that name, once
        it returns.
        """
        self._check(what, device)
        process, machine, changed = self._process, self._process.role.machine, False

        def act(now: float) -> list[Letter]:
            nonlocal changed
            changed = (machine.last_of(device) is not None) != (what == "admit")
            event = CHANGES[what][0](device=device, by=by)
            return process.role.tell(event, now) if changed else []

        await process.events.do(act)
        if process.tasks.is_ending:  # it may have come too late, or not have reached the disk
            raise Refused(
                "ending",
                f"{process.role.actor} is ending, so this may not have happened; ask again once it"
                " runs",
            )
        if changed:
            process.log.info(CHANGES[what][1], device=device, by=by, members=len(machine.members))
        if changed and what == "dismiss":
            why = "by the operator" if by != RULE else "since it was not connected for long"
            sentence = f"device {device} has been dismissed {why}"
            process.peers.refuse(device_actor(device), "not_admitted", sentence)
        return changed

    def _check(self, what: str, device: int) -> None:
        role = self._process.role
        if what not in CHANGES:
            raise Refused(
                "event",
                f"{what!r:.80} is none of the changes that {role.actor} knows:"
                f" {', '.join(CHANGES)}",
            )
        if device not in role.blueprint.servers[role.machine.server]:
            raise Refused(
                "membership",
                f"device {device} does not belong to {role.actor}, by the job file; look for its"
                " own server",
            )

    def look(self) -> None:
        """For devices that do not come any more."""
        process = self._process
        connected = (number_of(peer) for peer in process.peers.connected if peer != COORDINATOR)
        for device in self.absent.look(process.role.machine.members, connected):
            process.log.warning("absent", device=device, seconds=process.options.absent_s)
        process.metrics.absent.set(len(self.absent.devices))
        if process.options.dismiss_absent:
            for device in self.absent.devices:
                process.tasks.spawn(self._dismiss(device))

    async def _dismiss(self, device: int) -> None:
        """By rule; the last one of a server stays."""
        with suppress(ProtocolError):
            await self.change("dismiss", device, RULE)
