"""Servers that go on under a new generation: their disk is lost, or an old copy, for good."""

from typing import TYPE_CHECKING

from faultsim.schedule import Planned
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.rebuild import rebuild
from fedbcd.engines.deploy.roles.recovery import recover
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.engines.deploy.roles.store import StoreOn
from fedbcd.errors import RecordError
from fedbcd.protocol.clouds import RigorousCloud
from fedbcd.protocol.messages import COORDINATOR, Actor, ServerReady, number_of, server_actor

if TYPE_CHECKING:
    from faultsim.world import Node, World

BACKUP_S = 1.0  # how old a copy is


class Recovering:
    """Who was recovered."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.actors: set[Actor] = set()

    def strike(self, planned: Planned) -> None:
        """An empty disk, or a copy of now that comes back later."""
        node = self._world.nodes[planned.where]
        if planned.amount < 0.5:
            self._recover(node, planned, None)
        elif node.role is not None:
            self._world.crash(node, planned.length / 4)
            old = node.disk.copy()
            self._world.after(BACKUP_S, lambda: self._recover(node, planned, old))

    def _recover(self, node: "Node", planned: Planned, old: dict[str, object] | None) -> None:
        world, known = self._world, self._world.nodes[COORDINATOR].disk
        is_wrong = world.stores.is_wrong(COORDINATOR, node.actor)
        if isinstance(world.plan.cloud, RigorousCloud):  # nobody knows its log but itself
            return
        if is_wrong or world.is_calm or node.disk.full or not node.disk.length():
            return
        if world.damage.is_of(world.nodes[COORDINATOR]):  # it is told so, and tries again later
            return
        world.count(planned.fault)
        world.crash(node, planned.length)
        world.cut_off(node.actor)
        world.sent = [letter for letter in world.sent if not self._is_unheard(letter, node.actor)]
        name, newest = node.disk.facts_["id"], node.disk.copy()
        if old is None:
            world.new_disk(node)
            node.disk.facts_["id"] = name
        else:
            node.disk.put_back(old)
        store = node.disk.store(node.actor)
        role = ServerRole.open(store, world.plan, number_of(node.actor))
        try:
            recover(role, StoreOn(known, known, COORDINATOR, read_only=True), world.time_of(node))
        except RecordError:
            if COORDINATOR not in self.actors:  # rebuilt, it has not every report yet
                raise
            node.disk.put_back(newest)
            return
        node.committed = node.disk.length()
        self.actors.add(node.actor)

    def rebuild(self, planned: Planned) -> None:
        """The coordinator has an empty disk, and all that its servers know."""
        world, node = self._world, self._world.nodes[COORDINATOR]
        servers = [world.nodes[server_actor(n)] for n in range(len(world.plan.servers))]
        is_wrong = world.stores.is_wrong(COORDINATOR, *(each.actor for each in servers))
        several = world.plan.method.cloud_iterations > 1 and not world.plan.cloud.sync
        if isinstance(world.plan.cloud, RigorousCloud) or several:  # they know too little
            return
        if is_wrong or world.is_calm or node.disk.full or not node.disk.length():
            return
        world.crash(node, planned.length)
        world.cut_off(COORDINATOR)
        newest = node.disk.copy()
        world.new_disk(node)
        role = CoordinatorRole.open(node.disk.store(COORDINATOR), world.plan)
        known = [StoreOn(s.disk, s.disk, s.actor, read_only=True) for s in servers]
        try:
            rebuild(role, known, world.time_of(node))
        except RecordError:  # of a mix in the middle nobody has heard
            node.disk.put_back(newest)
            return
        world.count(planned.fault)
        heard = {step.event for each in servers for step in each.disk.log}
        world.sent = [
            letter for letter in world.sent if letter.sender != COORDINATOR or letter.event in heard
        ]
        node.committed = node.disk.length()
        self.actors.add(COORDINATOR)

    def _is_unheard(self, letter: Letter, actor: Actor) -> bool:
        """A report that nobody has heard; the next generation may give another under its name."""
        if letter.sender != actor or not isinstance(letter.event, ServerReady):
            return False
        log = self._world.nodes[COORDINATOR].disk.log
        return all(step.event != letter.event for step in log)
