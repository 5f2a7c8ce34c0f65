"""The logs of several roles in one order: by time, and nothing is heard before it was said.

Where clocks are right the first implies the second. A role whose clock is wrong says things at
times that its peers have never seen; what is heard then brings with it what its sender did until it
was said.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    Actor,
    Command,
    Contributed,
    Declined,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    ModelRef,
    Recalled,
    Restored,
    Resumed,
    Send,
    ServerReady,
    StepLost,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    device_actor,
    number_of,
    server_actor,
    upload_ref,
)
from fedbcd.record.eventlog import Transition

REMEMBERED = (
    64  # messages of one role to another; what is heard later is a copy of what was heard before
)


class Order:
    """Transitions go in by role, each role's in its own order, and come out as one sequence.
    `clock` is the time of the last one out.

    `home` says which server a device belongs to; `more` reads on in the log of a role, if that can
    have grown.
    """

    def __init__(
        self, home: Callable[[int], int], more: Callable[[Actor], None] = lambda _: None
    ) -> None:
        self.clock = -math.inf
        self._home = home
        self._more = more
        self._waiting: dict[Actor, deque[Transition]] = {}
        self._said: dict[
            tuple[Actor, Actor], dict[Event, None]
        ] = {}  # by whom, to whom: the latest
        self._gone: set[Actor] = set()  # what the next of these has heard went with a disk

    def add(self, actor: Actor, steps: Iterable[Transition]) -> None:
        self._waiting.setdefault(actor, deque()).extend(steps)

    def note(self, step: Transition) -> None:
        self.clock = max(self.clock, step.time)
        for command in step.commands:
            if isinstance(command, Send):
                said = self._said.setdefault((step.actor, command.to), {})
                said[command.message] = None
                if len(said) > REMEMBERED:
                    del said[next(iter(said))]

    def due(self, before: float, ahead: Collection[Actor] = ()) -> list[Transition]:
        """What happened before this time, and what that follows from; the rest waits. No line is
        earlier than the one before it.

        Of those who are `ahead`, everything has happened by then, whatever they say.
        """
        out: list[Transition] = []
        while (blocked := self._go_on(before, ahead, out)) is not None:
            self._free(blocked)
        return out

    def _go_on(
        self, before: float, ahead: Collection[Actor], out: list[Transition]
    ) -> Actor | None:
        """By time, as far as what is heard has been said. One who still waits, if some wait for
        each other.
        """

        def is_due(step: Transition) -> bool:
            return step.time < before or step.actor in ahead

        heads = [
            (steps[0].time, actor)
            for actor, steps in self._waiting.items()
            if steps and is_due(steps[0])
        ]
        heapify(heads)
        known = {actor for _, actor in heads}
        later: dict[Actor, set[Actor]] = {}  # sender -> who waits for what it is to say
        while heads:
            time, actor = heappop(heads)
            steps = self._waiting[actor]
            if not steps or steps[0].time != time:  # it has come out meanwhile
                continue
            cause = self._cause(actor)
            if cause is not None and is_due(cause):  # it comes in its turn
                later.setdefault(cause.actor, set()).add(actor)
                if cause.actor not in known:  # it has only been read now
                    known.add(cause.actor)
                    heappush(heads, (self._waiting[cause.actor][0].time, cause.actor))
                continue
            touched = self._bring(actor, min(time, before), out)
            for one in touched | {each for sender in touched for each in later.pop(sender, ())}:
                if self._waiting[one] and is_due(self._waiting[one][0]):
                    heappush(heads, (self._waiting[one][0].time, one))
        return next((actor for actors in later.values() for actor in actors), None)

    def _bring(self, actor: Actor, bound: float, out: list[Transition]) -> set[Actor]:
        """Let the next of a role come out, and before it what that follows from, though it is not
        yet time for that; whose came out.
        """
        touched: set[Actor] = set()
        while actor not in touched:
            chain = self._chain(actor)
            if self._cause(chain[-1]) is not None:
                self._free(actor)
                continue
            self._out(chain[-1], bound, out)
            touched.add(chain[-1])
        return touched

    def _out(self, actor: Actor, bound: float, out: list[Transition]) -> None:
        step = self._waiting[actor].popleft()
        time = max(min(step.time, bound), self.clock)
        out.append(step if time == step.time else replace(step, time=time))
        self._gone.discard(actor)
        self.note(out[-1])

    # ---------------------------------------------------------------------------------------------
    # causes
    def _chain(self, actor: Actor) -> list[Actor]:
        """A role, whom its next waits for, whom the next of that one waits for, and so on; it ends
        before anybody comes twice.
        """
        chain = [actor]
        while (cause := self._cause(chain[-1])) is not None and cause.actor not in chain:
            chain.append(cause.actor)
        return chain

    def _free(self, actor: Actor) -> None:
        """Some wait for each other: a device has lost its disk, and said the same again later.
        Somebody heard it the first time.
        """
        chain = self._chain(actor)
        last = self._cause(chain[-1])
        assert last is not None
        circle = chain[chain.index(last.actor) :]
        waits_for = [*circle[1:], circle[0]]
        devices = [
            one
            for one, sender in zip(circle, waits_for, strict=True)
            if sender.startswith("device/")
        ]
        self._gone.add(min(devices or circle, key=lambda one: self._waiting[one][0].time))

    def _cause(self, actor: Actor) -> Transition | None:
        """What has to come out before the next of a role can have been heard. None: nothing, or it
        has gone with a disk.
        """
        step = self._waiting[actor][0]
        sender = self._speaker(step)
        if sender is None or actor in self._gone:
            return None
        heard, said = _heard(step), self._said.get((sender, actor), {})
        if any(send.message in said for send in heard):
            return None
        found = self._saying(sender, heard)
        if found is None:  # it was on a disk before this was on one
            self._more(sender)
            found = self._saying(sender, heard)
        if found is None and isinstance(step.event, Activated):
            found = self._making(sender, step.event.model)
        if found is None:
            self._gone.add(actor)
        return found

    def _saying(self, sender: Actor, heard: Sequence[Send]) -> Transition | None:
        """What a device has heard before it was recalled, its server has said before it did so."""
        for step in self._waiting.get(sender, ()):
            if any(send in step.commands for send in heard):
                return step
            if any(self._recalls(sender, command, heard[0].to) for command in step.commands):
                return None
        return None

    def _recalls(self, server: Actor, command: Command, device: Actor) -> bool:
        """Whether this device is recalled for the first time."""
        return (
            isinstance(command, Send)
            and command.to == device
            and isinstance(command.message, Recalled)
            and command.message not in self._said.get((server, device), {})
        )

    def _making(self, server: Actor, model: ModelRef) -> Transition | None:
        """Where the log of a server has gone with its disk: the step that made this model."""
        for step in self._waiting.get(server, ()):
            if any(isinstance(c, StepLost) and c.result == model for c in step.commands):
                return step
        return None

    def _speaker(self, step: Transition) -> Actor | None:
        """Who said what this role heard; None: it has heard nothing."""
        match step.event:
            case Activated() | Acknowledged() | Declined() | Restored() | Recalled():
                return server_actor(self._home(number_of(step.actor)))
            case UpdateRequested() | Uploaded() | Withdrawn() | Resumed() | Contributed():
                return device_actor(step.event.device)
            case ServerReady():
                return server_actor(step.event.server)
            case Mixed() | GlobalUpdated() | Isolated():
                return COORDINATOR
        return None


def _heard(step: Transition) -> list[Send]:
    """What may have been said to this role; where an upload was refused, that is what it noted, but
    not what it heard.
    """
    messages: list[Event] = [step.event]
    if isinstance(step.event, Withdrawn):
        device, activation = step.event.device, step.event.activation
        upload = upload_ref(device, activation, step.event.incarnation)
        messages.append(Uploaded(device=device, activation=activation, model=upload))
    return [Send(to=step.actor, message=message) for message in messages]


def in_order(step: Transition) -> tuple[float, Actor]:
    """By which the transitions of several roles are put in one order, where clocks are right."""
    return step.time, step.actor
