"""Servers and the coordinator that come up with a store that is not their newest: an empty one, or
an old copy; later the newest is put back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faultsim.schedule import Fault, Planned
from fedbcd.engines.deploy.roles.known import STORE
from fedbcd.errors import ProtocolError
from fedbcd.protocol.clouds import RigorousCloud, SyncCloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Actor,
    Declined,
    GlobalUpdated,
    Isolated,
    Mixed,
    MixModels,
    Send,
    ServerReady,
    StepGlobal,
    Uploaded,
    Withdrawn,
    device_actor,
    number_of,
)
from fedbcd.record.eventlog import Transition

if TYPE_CHECKING:
    from faultsim.world import Node, World

ANSWERS = (Mixed, GlobalUpdated, Isolated)
UNTOLD = 0.3  # of the empty disks: nobody says --init, and the role does not start


@dataclass
class Newest:
    """The disk that a role should have, while it has another one."""

    disk: dict[str, Any]
    committed: int
    length: int  # of what it has instead, when it was given that


class Stores:
    """Who has which store. `are_split`: somebody has gone on with a wrong one, so that the newest
    is no longer all that has happened.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._newest: dict[Actor, Newest] = {}
        self._old: dict[Actor, dict[str, Any]] = {}
        self._closed: set[Actor] = set()  # those with an empty disk that nobody has told to begin
        self.are_split = False
        self.let_in: list[str] = []  # who should have been refused

    def is_wrong(self, *actors: Actor) -> bool:
        """Whether one of these has another store than its newest, or had and went on with it."""
        return self.are_split or any(actor in self._newest for actor in actors)

    def may_open(self, actor: Actor) -> bool:
        """Whether it finds a store, or is told to begin one."""
        return actor not in self._closed

    def strike(self, planned: Planned) -> None:
        """An empty disk, or an old copy, which has to be made first."""
        node = self._world.nodes[planned.where]
        if planned.fault is Fault.LOST_STORE:
            self._replace(node, planned, None)
        elif node.actor not in self._old:
            self._old[node.actor] = (
                node.disk.copy() if node.role is None else self._copied(node, planned)
            )
            self._world.after(1.0, lambda: self._replace(node, planned, self._old.pop(node.actor)))

    def _copied(self, node: "Node", planned: Planned) -> dict[str, Any]:
        self._world.crash(node, planned.length / 4)
        return node.disk.copy()

    def _replace(self, node: "Node", planned: Planned, old: Mapping[str, Any] | None) -> None:
        if (
            node.actor in self._newest
            or self._world.is_calm
            or (old is not None and len(old["log"]) == node.disk.length())
        ):
            return
        self._world.crash(node, 0.05)
        self._newest[node.actor] = Newest(
            node.disk.copy(), node.committed, 0 if old is None else len(old["log"])
        )
        if old is None:
            self._world.new_disk(node)
            self._closed |= {node.actor} if planned.amount < UNTOLD else set()
        else:
            node.disk.put_back(dict(old))
        node.committed = node.disk.length()
        self._world.count(planned.fault)
        self._world.after(planned.length, lambda: self.put_back(node))

    def put_back(self, node: "Node") -> None:
        """The newest, unless nothing had happened on it: then what was begun instead is the
        newest.
        """
        newest = self._newest.pop(node.actor, None)
        if newest is None:
            return
        self._closed.discard(node.actor)
        went_on = node.disk.length() > newest.length
        is_first = not newest.disk["log"] and not self._is_known(newest.disk["facts_"]["id"])
        if went_on and is_first and COORDINATOR not in self._newest:
            return
        is_another = node.disk.facts_["id"] != newest.disk["facts_"]["id"]
        # a server that had met nobody before stands by the one that it met
        self.are_split |= went_on or (is_another and self._is_known(node.disk.facts_["id"]))
        self._world.crash(node, 0.05)
        node.disk.put_back(newest.disk)
        node.committed = newest.committed

    def _is_known(self, store: str) -> bool:
        """Whether a server has met the coordinator that has this store."""
        return any(node.disk.facts_.get(STORE) == store for node in self._world.nodes.values())

    def put_all_back(self) -> None:
        """The operators have noticed."""
        for actor in [*self._newest]:
            self.put_back(self._world.nodes[actor])

    # ---------------------------------------------------------------------------------------------
    # who is let in
    def look_at_new(self, host: "Node", guest: Actor, hello: Mapping[str, Any]) -> None:
        """A server that has not begun serves nobody; a device that is ahead of it must be told
        so.
        """
        try:
            host.role.check_guest(guest, hello)
        except ProtocolError:
            self._world.turned_away += 1
        else:
            self.let_in += filter(None, [self.objection(host, guest, hello)])

    def meets(self, server: Actor, host: "Node") -> bool:
        """Whether a server takes the coordinator for its own; not if its log knows of more."""
        world, node = self._world, self._world.nodes[server]
        hello, before = host.role.hello(), len(world.refused)
        world.do(node, lambda: node.role.coordinator.meet(hello))
        if node.role is None:
            return False
        role = node.role
        if len(world.refused) > before:
            world.turned_away += 1
            sentence = world.refused.pop()
            if not self.is_wrong(COORDINATOR):
                self.let_in.append(f"{server} refuses its coordinator: {sentence}")
            return False
        heard = [s.event.phase for s in role.store.transitions() if isinstance(s.event, ANSWERS)]
        if heard and not host.disk.length():
            self.let_in.append(f"{server} takes an empty coordinator, of which it has heard")
        return True

    def objection(self, host: "Node", guest: Actor, hello: Mapping[str, Any]) -> str:
        """Why a guest has to be refused: one of the two has lost what was acknowledged. Read from
        the logs, from their start.
        """
        number = number_of(guest)
        if host.actor != COORDINATOR:
            last = max(
                (step.event.activation for step in host.disk.log if _is_over(step, number)),
                default=-1,
            )
            return (
                f"{host.actor} let {guest} in, which is ahead of it"
                if hello["activation"] > last + 1
                else ""
            )
        if host.disk.facts_.get(f"store/{number}", hello["store"]) != hello["store"]:
            return f"{host.actor} let {guest} in with another store than before"
        heard = [step.event for step in host.disk.log if isinstance(step.event, ServerReady)]
        reported = max((ready.phase for ready in heard if ready.server == number), default=-1)
        if hello["phase"] < reported:
            return f"{host.actor} let {guest} in, whose store is an old one"
        if hello["phase"] > self._latest_phase(host.disk.log, reported):
            return f"{host.actor} let {guest} in, which is ahead of it"
        return ""

    def _latest_phase(self, log: Sequence[Transition], reported: int) -> int:
        """The latest phase of a server of which the coordinator can know."""
        cloud, last = self._world.plan.cloud, self._world.plan.method.cloud_iterations - 1
        if not isinstance(cloud, SyncCloud | RigorousCloud):
            return reported + 1
        return sum(
            isinstance(c, StepGlobal) or (isinstance(c, MixModels) and c.iteration == last)
            for step in log
            for c in step.commands
        )


def _is_over(step: Transition, device: int) -> bool:
    """Whether an activation of a device was accepted or declined."""
    event = step.event
    if not isinstance(event, Uploaded | Withdrawn) or event.device != device:
        return False
    answers = [
        c.message for c in step.commands if isinstance(c, Send) and c.to == device_actor(device)
    ]
    return any(
        isinstance(answer, Acknowledged | Declined) and answer.activation == event.activation
        for answer in answers
    )
