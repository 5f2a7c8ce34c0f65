"""The coordinator: decides which servers' models are mixed, and when. Three clouds, three small
machines.

It owns no data and does light work: it holds handles, a queue and, per server, the last thing it
heard and said.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from fedbcd.errors import LocalProtocolError, RemoteProtocolError
from fedbcd.protocol.messages import (
    AnswersLost,
    Command,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    MixModels,
    ModelRef,
    Send,
    ServerId,
    ServerReady,
    StepGlobal,
    ref,
    server_actor,
)


class Coordinator(Protocol):
    """What the engines need of a coordinator: one method that changes it, and the number of
    finished rounds.
    """

    round: int

    def handle(self, event: Event) -> list[Command]:
        """Advance by one event and return what is to be done."""

    def ends_round(self, ready: ServerReady) -> bool:
        """Whether this report is the one that the round under way waits for; changes nothing."""


class SyncCoordinator:
    """Sync-cloud (ii): "Once hearing from all cloud servers" it updates the one model and
    broadcasts it back.
    """

    def __init__(self, servers: Sequence[ServerId], iterations: int = 1) -> None:
        self.round = 0
        self.iterations = iterations
        self.model: ModelRef = ref("z", 0)
        self._servers = dict.fromkeys(sorted(servers))  # in order, and quick to look up
        self._ready: set[ServerId] = set()

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, AnswersLost):
            return []  # the one model that there is is known to whoever has adopted it
        ready = _server_ready(event, self._servers)
        if ready.phase > self.round:
            raise _from_the_future(ready, self.round)
        if (
            ready.phase < self.round
        ):  # it missed the broadcast; `round` can be ahead of it by one only
            return [self._broadcast(ready.server, self.round - 1)]
        self._ready.add(ready.server)
        if len(self._ready) < len(self._servers):
            return []
        return self._aggregate()

    def ends_round(self, ready: ServerReady) -> bool:
        missing = {*self._servers} - self._ready
        return ready.phase == self.round and missing <= {ready.server} <= {*self._servers}

    def _aggregate(self) -> list[Command]:
        before, self.model = self.model, ref("z", self.round + 1)
        step = StepGlobal(
            round=self.round, iterations=self.iterations, model=before, result=self.model
        )
        self._ready.clear()
        self.round += 1
        return [step, *(self._broadcast(server, self.round - 1) for server in self._servers)]

    def _broadcast(self, server: ServerId, phase: int) -> Send:
        return Send(to=server_actor(server), message=GlobalUpdated(phase=phase, model=self.model))


class AsyncCoordinator:
    """Async-cloud (ii): "waits until it hears from the first B cloud servers", mixes those and
    answers those only.

    Servers that were ready but not among the B stay queued, ahead of later ones. With `alike=False`
    (a mixing matrix) each server of the mix gets its own w_n. With K_z = `iterations` > 1 the same
    B exchange their models K_z times.
    """

    def __init__(
        self, servers: Sequence[ServerId], first: int, iterations: int = 1, alike: bool = True
    ) -> None:
        self.round = 0
        self.first = first
        self.iterations = iterations
        self._alike = alike
        self._servers = dict.fromkeys(sorted(servers))  # in order, and quick to look up
        self._heard: dict[ServerId, ServerReady] = {}
        self._said: dict[ServerId, Mixed] = {}
        self._queue: dict[ServerId, ServerReady] = {}  # in order of arrival
        self._group: dict[
            ServerId, ServerReady | None
        ] = {}  # the B of the mix under way -> next iteration's model

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, AnswersLost):
            return self._forget_answers(event)
        ready = _server_ready(event, self._servers)
        heard = self._heard.get(ready.server)
        if not self._is_news(ready, heard):
            return self._repeat(ready)
        if not self._fits(ready, heard):
            raise RemoteProtocolError(
                f"{ready} does not fit: server {ready.server} was last heard with {heard}"
            )
        self._heard[ready.server] = ready
        if ready.iteration > 0:
            self._group[ready.server] = ready
        else:
            self._queue[ready.server] = ready
        return self._advance()

    def ends_round(self, ready: ServerReady) -> bool:
        heard = self._heard.get(ready.server)
        if ready.server not in self._servers or ready.iteration + 1 != self.iterations:
            return False
        if not self._is_news(ready, heard) or not self._fits(ready, heard):
            return False
        if ready.iteration > 0:
            return [s for s, said in self._group.items() if said is None] == [ready.server]
        return not self._group and len(self._queue) + 1 >= self.first

    def _forget_answers(self, event: AnswersLost) -> list[Command]:
        """Who waits for one that is lost reports once more, and that is news."""
        self._said.clear()
        for server in event.servers:
            heard = self._heard.pop(server, None)
            if heard is not None and heard.phase > 0:
                self._heard[server] = replace(heard, phase=heard.phase - 1)
        return []

    @staticmethod
    def _is_news(ready: ServerReady, heard: ServerReady | None) -> bool:
        return heard is None or (ready.phase, ready.iteration) > (heard.phase, heard.iteration)

    def _fits(self, ready: ServerReady, heard: ServerReady | None) -> bool:
        """Whether it is the next iteration of the mix under way, or starts anew for a server that
        waits for none.
        """
        if ready.server in self._group:
            after = heard is not None and (ready.phase, ready.iteration) == (
                heard.phase,
                heard.iteration + 1,
            )
            return after and self._group[ready.server] is None
        return ready.iteration == 0 and ready.server not in self._queue

    def _repeat(self, ready: ServerReady) -> list[Command]:
        """A copy of what was heard before: if it has been answered, the answer was lost; otherwise
        it is still queued.
        """
        said = self._said.get(ready.server)
        if said is None or (said.phase, said.iteration) != (ready.phase, ready.iteration):
            return []
        return [Send(to=server_actor(ready.server), message=said)]

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        while True:
            if not self._group and len(self._queue) >= self.first:
                self._group = {
                    server: self._queue.pop(server) for server in [*islice(self._queue, self.first)]
                }
            group = [ready for ready in self._group.values() if ready is not None]
            if not group or len(group) < len(self._group):
                return commands
            commands += self._mix(group)

    def _mix(self, group: list[ServerReady]) -> list[Command]:
        iteration = group[0].iteration
        numbers = (self.round, iteration)
        results = tuple(
            ref("w", *numbers) if self._alike else ref("w", *numbers, ready.server)
            for ready in group
        )
        commands: list[Command] = [_mix_command(self.round, group, results)]
        for ready, model in zip(group, results, strict=True):
            self._said[ready.server] = Mixed(phase=ready.phase, iteration=iteration, model=model)
            commands.append(Send(to=server_actor(ready.server), message=self._said[ready.server]))
        if iteration + 1 < self.iterations:
            self._group = dict.fromkeys(self._group)  # all B report again before the next iteration
        else:
            self._group = {}
            self.round += 1
        return commands


class RigorousCoordinator:
    """Rigorous Async-cloud (Appendix A): "only cloud-server models at round t will be accepted";
    the rest are isolated.
    """

    def __init__(self, servers: Sequence[ServerId], first: int, iterations: int = 1) -> None:
        self.round = 0
        self.first = first
        self.iterations = iterations
        self._servers = dict.fromkeys(sorted(servers))  # in order, and quick to look up
        self._ready: dict[
            ServerId, ServerReady
        ] = {}  # of this round and iteration, in order of arrival
        self._group: frozenset[ServerId] = frozenset()  # the B of this round, while they iterate
        self._iteration = 0
        self._said: dict[ServerId, Mixed] = {}

    def handle(self, event: Event) -> list[Command]:
        ready = _server_ready(event, self._servers)
        if (ready.phase, ready.iteration) > (self.round, self._iteration):
            raise _from_the_future(ready, self.round)
        if (ready.phase, ready.iteration) < (self.round, self._iteration):
            return self._answer_late(ready)
        if ready.iteration > 0 and ready.server not in self._group:
            raise RemoteProtocolError(
                f"{ready} is not of the mix under way, which has servers {sorted(self._group)}"
            )
        self._ready[ready.server] = ready
        return self._mix() if len(self._ready) == self.first else []

    def ends_round(self, ready: ServerReady) -> bool:
        among = self._group if ready.iteration > 0 else self._servers
        return (
            ready.server in among
            and (ready.phase, ready.iteration) == (self.round, self._iteration)
            and ready.iteration + 1 == self.iterations
            and len({*self._ready, ready.server}) == self.first
        )

    def _answer_late(self, ready: ServerReady) -> list[Command]:
        said = self._said.get(ready.server)
        if said is not None and (said.phase, said.iteration) == (ready.phase, ready.iteration):
            return [Send(to=server_actor(ready.server), message=said)]
        if said is not None and (said.phase, said.iteration) > (ready.phase, ready.iteration):
            return []  # a copy from before its last answer
        if ready.phase == self.round:
            return []  # it is told when the round is over, so that nobody is in the next one before
        return [self._isolate(ready.server, ready.phase)]

    def _mix(self) -> list[Command]:
        group = list(self._ready.values())
        result = ref("w", self.round, self._iteration)
        commands: list[Command] = [_mix_command(self.round, group, (result,) * len(group))]
        for ready in group:
            self._said[ready.server] = Mixed(
                phase=self.round, iteration=self._iteration, model=result
            )
            commands.append(Send(to=server_actor(ready.server), message=self._said[ready.server]))
        self._group = frozenset(self._ready)
        self._ready = {}
        self._iteration += 1
        return commands if self._iteration < self.iterations else [*commands, *self._end_round()]

    def _end_round(self) -> list[Command]:
        isolates: list[Command] = [
            self._isolate(n, self.round) for n in self._servers if n not in self._group
        ]
        self.round += 1
        self._iteration = 0
        self._group = frozenset()
        return isolates

    def _isolate(self, server: ServerId, phase: int) -> Send:
        return Send(to=server_actor(server), message=Isolated(phase=phase))


def _mix_command(
    round_: int, group: Sequence[ServerReady], results: tuple[ModelRef, ...]
) -> MixModels:
    servers, models = tuple(r.server for r in group), tuple(r.model for r in group)
    return MixModels(
        round=round_, iteration=group[0].iteration, servers=servers, models=models, results=results
    )


def _server_ready(event: Event, servers: Collection[ServerId]) -> ServerReady:
    if type(event) not in ACCEPTED:
        raise LocalProtocolError(f"the coordinator cannot handle {event}")
    assert isinstance(event, ServerReady)
    if event.server not in servers:
        raise RemoteProtocolError(f"unknown server {event.server}; known: {list(servers)[:20]}")
    return event


def _from_the_future(ready: ServerReady, round_: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"server {ready.server} reports round {ready.phase}, but round {round_} is not over"
    )


# A coordinator has no states of its own beyond its counters, so its table has one row: what it
# accepts, always.
ACCEPTED: Mapping[type[Event], str] = {ServerReady: "queue it; mix as soon as enough are in"}
# Beside it, `AnswersLost`, from within: whose answers are lost are heard once more.
