"""What a server knows of its coordinator: by it a server notices one whose store is empty or an old
one, before it tells that coordinator anything.
"""

from collections.abc import Mapping
from typing import Any

from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.checks import is_store_id
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import Refused
from fedbcd.protocol.messages import COORDINATOR, Event, GlobalUpdated, Mixed, version_of
from fedbcd.protocol.senders import is_counter

# facts
STORE, ROUND, GENERATION = f"store/{COORDINATOR}", "round", f"generation/{COORDINATOR}"


class KnownCoordinator:
    """Its store, and the latest round that it has spoken of: in an answer, or to all servers before
    it gives any answer of that round.
    """

    def __init__(self, store: Store, iterations: int) -> None:
        self._store, self._iterations = store, iterations
        self.round = int(store.facts.get(ROUND, 0))
        self.generation = int(store.facts.get(GENERATION, 0))

    def meet(self, hello: Mapping[str, Any]) -> list[Letter]:
        """Refuse a coordinator that knows of less than this server. One that was rebuilt since need
        not know of a round of which nobody has heard an answer.
        """
        store, round_ = hello.get("store"), hello.get("round")
        generation = hello.get("generation", 0)
        if not is_store_id(store) or not is_counter(round_) or not is_counter(generation):
            raise Refused(
                "hello",
                f"the coordinator does not say how far it is (store={store!r:.80},"
                f" round={round_!r:.80})",
            )
        assert isinstance(store, str)
        assert isinstance(round_, int)
        known = self._store.facts.get(STORE)
        remedy = "Put its newest store back; until then nothing is told to it"
        if known not in (None, store):
            raise Refused("lost", f"the coordinator comes with another store than before. {remedy}")
        if generation > self.generation:
            self.round, self.generation = round_, generation
            facts = {STORE: store, ROUND: str(round_), GENERATION: str(generation)}
            self._store.commit(facts=facts)
        if round_ < self.round or generation < self.generation:
            raise Refused(
                "behind",
                f"the coordinator is in round {round_}, but has told of round {self.round}: its"
                f" store is an old one. {remedy}",
            )
        if known is None:
            self._store.commit(facts={STORE: store})
        return []

    def told(self, round_: int) -> None:
        self.round = max(self.round, round_)

    def note(self, event: Event) -> dict[str, str]:
        """Of an event that becomes durable; the facts that go with it."""
        if isinstance(event, Mixed):
            round_, iteration = map(int, event.model.split("/")[1:3])
            self.told(round_ + (iteration + 1 == self._iterations))
        elif isinstance(event, GlobalUpdated):
            self.told(version_of(event.model))
        return {} if str(self.round) == self._store.facts.get(ROUND) else {ROUND: str(self.round)}
