"""Dead links that nobody closes, and lines that are slow from the start to the end. How long to
wait for an answer, before it is said again or a peer is called gone, is the deployment's own.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultsim.schedule import Fault, Planned
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.traffic import LinkOptions
from fedbcd.engines.deploy.processes.timeouts import AdaptiveTimeout
from fedbcd.protocol.messages import Actor

if TYPE_CHECKING:
    from faultsim.world import World

GONE_S, RETRY_S = (0.5, 10.0), (0.2, 15.0)  # bounds of the two, shorter than on a real network
BARE_S = 0.005  # that a letter without a model takes on a slow line

Pair = tuple[Actor, Actor]


@dataclass
class Waiting:
    """What has been said and not been answered."""

    said: object
    connections: int  # how often its two have connected
    since: float
    again_at: float
    attempt: int = 0


class Patience:
    """Which links are dead and which lines are slow. Time costs nothing where none is."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._dead: dict[Pair, float] = {}  # guest and host -> since when
        # a model on a slow line takes so long
        self._slow_s = {
            frozenset(planned.where.split(">")): 0.5 + 2 * planned.length
            for planned in world.schedule.faults
            if planned.fault is Fault.SLOW_LINE
        }
        self._watches = any(p.fault is Fault.DEAD_LINK for p in world.schedule.faults)
        self._free_at: dict[tuple[Actor, Actor, int], float] = {}
        self._queued: Counter[Pair] = Counter()
        self._gone = {actor: AdaptiveTimeout(*GONE_S) for actor in world.actors}
        self._retry: dict[tuple[Actor, object], AdaptiveTimeout] = {}
        self._waiting: dict[Actor, Waiting] = {}

    # ---------------------------------------------------------------------------------------------
    # dead links
    def strike(self, planned: Planned) -> None:
        """From now on nothing comes through, though both ends have a connection."""
        one, other = planned.where.split(">")
        for pair in ((one, other), (other, one)):
            if self._world.is_connected(*pair) and pair not in self._dead:
                self._dead[pair] = self._world.now
                self._world.count(Fault.DEAD_LINK)

    def is_dead(self, sender: Actor, to: Actor) -> bool:
        """Whether a letter on this way is lost."""
        return bool(self._dead) and ((sender, to) in self._dead or (to, sender) in self._dead)

    def watch(self, actor: Actor) -> None:
        """Pings: who does not answer any more is hung up on."""
        if not self._watches:
            return
        for pair in self._world.links_of(actor):
            patience = self._gone[actor]
            if pair not in self._dead:
                patience.observe(self._world.chance.uniform(0.002, 0.06))
            elif self._world.now - self._dead[pair] >= patience.seconds():
                self._world.hang_up(pair)

    def closed(self, pair: Pair) -> None:
        """A new connection is a live one."""
        self._dead.pop(pair, None)

    # ---------------------------------------------------------------------------------------------
    # slow lines
    def slow_s(self, letter: Letter) -> float | None:
        """When a letter arrives on a line that is slow, after those before it; None: too many wait
        already. 0: the line is not slow.
        """
        slow = self._slow_s.get(frozenset((letter.sender, letter.to)), 0.0)
        if not slow:
            return 0.0
        world, pair = self._world, (letter.sender, letter.to)
        if self._queued[pair] >= LinkOptions().queue:
            return None
        key = (*pair, world.connections(letter))
        begins = max(world.now, self._free_at.get(key, 0.0))
        self._free_at[key] = begins + (BARE_S if letter.model is None else slow)
        took = self._free_at[key] - world.now
        self._queued[pair] += 1
        world.after(took, lambda: self._queued.subtract([pair]))
        world.count(Fault.SLOW_LINE)
        return took

    def may_repeat(self, actor: Actor, said: object, connections: int) -> bool:
        """Whether it is time to say again what is unanswered: on a new connection at once, else
        after a time that grows, and that past answers teach.
        """
        if not self._slow_s:
            return True
        now, waiting = self._world.now, self._waiting.get(actor)
        if waiting is None or waiting.said != said:
            if waiting is not None:
                self._patience(actor).observe(now - waiting.since)
            self._waiting[actor] = Waiting(said, connections, now, now)
            self._arm(actor)
            return False
        if now < waiting.again_at and waiting.connections == connections:
            return False
        waiting.connections = connections
        waiting.attempt += 1
        self._arm(actor)
        return True

    def _patience(self, actor: Actor) -> AdaptiveTimeout:
        kind = type(self._waiting[actor].said), str(self._waiting[actor].said).split()[0]
        return self._retry.setdefault((actor, kind), AdaptiveTimeout(*RETRY_S))

    def _arm(self, actor: Actor) -> None:
        waiting = self._waiting[actor]
        waiting.again_at = self._world.now + self._patience(actor).seconds(waiting.attempt)
