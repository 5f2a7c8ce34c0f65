"""One actor of a deployment: its machine, its tensors and its store. No socket, no thread, no
clock: time is passed in.

A role takes one event at a time: what came from the network is checked, the machine handles it,
tensors are computed, all of it is made durable, and only then the letters go out; several events
may share one wait for the disk (`handle_group`). A refused event has changed nothing. After a
crash the role is made again from its store: the machine by its latest snapshot and the events
stored since, the tensors from the files that the last transaction names.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.clock import HybridClock, said_at
from fedbcd.engines.deploy.processes.failpoints import Failpoint, hit
from fedbcd.engines.deploy.roles import snapshot
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.checks import (
    TrustLimits,
    check_model,
)
from fedbcd.engines.deploy.roles.shared_log import Half
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import LocalProtocolError, ProtocolError, RecordError, Refused
from fedbcd.protocol import Coordinator, Device, Server
from fedbcd.protocol.messages import Actor, Command, Event, RetryDue, Send
from fedbcd.protocol.senders import check_clock, check_sender, check_values
from fedbcd.record.eventlog import Transition
from fedbcd.record.runfolder import difference

__all__ = ["Letter", "Role"]


class Role:
    """What device, server and coordinator have in common. `watch` is shown every transition and the
    model that came with its event, `warn` every remark about a peer.
    """

    OWN: ClassVar[
        tuple[type[Event], ...]
    ] = ()  # events that come from within: timers and operators
    # letters of which a copy, or a late one, changes nothing and is not recorded
    COPIED: ClassVar[tuple[type[Event], ...]] = ()
    SNAPSHOT_EVERY: ClassVar[int] = 1000  # transitions: a recovery repeats no more of them

    machine: Device | Server | Coordinator
    home: Actor | None = None  # the one peer that it listens to

    def __init__(
        self, actor: Actor, store: Store, blueprint: Blueprint, limits: TrustLimits
    ) -> None:
        self.actor = actor
        self.store = store
        self.blueprint = blueprint
        self.limits = limits
        self.watch: Callable[[Transition, Tensor | None], None] | None = None
        self.warn: Callable[[Actor, str], None] | None = None
        self.shared_log: Half | None = None  # what a peer keeps of this role's log
        self._clock = HybridClock()
        self._facts: dict[str, str] = {}  # that go with the next commit
        self._recovering = False
        self._broken = False
        self._unseen: list[tuple[Transition, Tensor | None]] | None = (
            None  # of a group that is not yet durable
        )
        _claim(store, actor, blueprint)

    # ---------------------------------------------------------------------------------------------
    # events
    def receive(
        self, letter: Letter, now: float, refused: Callable[[Refused], None] = lambda _: None
    ) -> list[Letter]:
        """Handle a letter from the network; raises a `ProtocolError` and changes nothing if it
        cannot be accepted.

        If what it says is refused, but that it came has consequences, they are handled, and
        `refused` is told why.
        """
        if letter.to != self.actor:
            raise Refused(
                "address", f"{letter.sender} sent a letter for {letter.to} to {self.actor}"
            )
        check_sender(letter.event, letter.sender, self.actor, self.home)
        check_values(letter.event)
        check_clock(letter.clock)
        try:
            remark = self._check(letter)
        except Refused as failed:
            instead = self._instead_of(letter.event, failed)
            if instead is None:
                raise
            letters = self._handle(instead, None, now, letter.clock)
            refused(failed)
            return letters
        if remark is not None and self.warn is not None:
            self.warn(letter.sender, remark)
        return self._handle(letter.event, letter.model, now, letter.clock)

    def _check(self, letter: Letter) -> str | None:
        """Refuse a model that cannot be used; a sentence about one that is merely large."""
        size = self._size_of(letter.event)
        return None if size is None else check_model(letter.model, *size, self.limits)

    def _instead_of(self, event: Event, failed: Refused) -> Event | None:  # noqa: ARG002
        """What has happened when the model of this event is refused; None: nothing."""
        return None

    def tell(self, event: Event, now: float) -> list[Letter]:
        """Handle an event that comes from within: a timer, or an operator's wish."""
        if not isinstance(event, self.OWN):
            raise LocalProtocolError(
                f"{self.actor} cannot be told {event}; it comes from the network or from its own"
                " work"
            )
        return self._handle(event, None, now)

    def handle_group(
        self, calls: Sequence[Callable[[], list[Letter]]]
    ) -> list[list[Letter] | ProtocolError]:
        """Several calls, one after the other, that become durable with one wait for the disk; each
        one's letters, or why it was refused.
        """
        outcomes: list[list[Letter] | ProtocolError] = []
        self._unseen = []
        try:
            with self.store.group_commit():
                outcomes += [_outcome(call) for call in calls]
        except BaseException:
            self._broken = True
            raise
        seen, self._unseen = self._unseen, None
        for step, model in seen:
            self._show(step, model)
        return outcomes

    def hello(self) -> dict[str, Any]:
        """What it says of itself when it connects."""
        return {
            "actor": self.actor,
            "store": self.store.id,
            "run": self.store.facts["run"],
            "size": self.blueprint.size_F,
        }

    def close(self) -> None:
        """Give the store back; everything that was answered is durable already."""
        self.store.close()

    def earliest(self, now: float) -> float:
        """The time that an event would have at local time `now`; no later one has an earlier
        time.
        """
        return self._clock.at(now)

    def _handle(
        self, event: Event, model: Tensor | None, now: float, sent: float | None = None
    ) -> list[Letter]:
        if self._broken:
            raise RecordError(f"{self.actor} could not write to its store and must be opened again")
        before = _values_of(self.machine) if isinstance(event, self.COPIED) else None
        commands = self.machine.handle(event)
        time = self._clock.at(now) if sent is None else self._clock.after(sent, now)
        self._clock.last = time
        has_work = bool(self._facts) or not all(isinstance(command, Send) for command in commands)
        changed = before is None or has_work or before != _values_of(self.machine)
        # what is said again, or answered again, changes nothing, so it leaves no trace
        if isinstance(event, RetryDue) or not changed:
            return self._letters(commands, said_at(time, now))
        try:
            self._apply(self.store.length, event, model, commands)
            if (self.store.length + 1) % self.SNAPSHOT_EVERY == 0:
                self._before_snapshot()
                self._facts["snapshot"] = snapshot.take(self._parts(), self.store.length + 1, time)
            if self.shared_log is not None:
                self._facts |= self.shared_log.note(self.store.length, event, commands)
            step = Transition(time, self.actor, event, tuple(commands))
            self.store.commit(step, self._facts)
            self._facts = {}
        except BaseException:
            self._broken = True  # machine and memory are ahead of the disk
            raise
        self._show(step, model)
        return self._letters(commands, said_at(time, now))

    def _show(self, step: Transition, model: Tensor | None) -> None:
        """To `watch`, once it is durable."""
        if self._unseen is not None:
            self._unseen.append((step, model))
        elif self.watch is not None:
            self.watch(step, model)

    def _letters(self, commands: Sequence[Command], clock: float) -> list[Letter]:
        letters = [
            Letter(
                self.actor,
                command.to,
                self.shared_log.with_journal(command.message)
                if self.shared_log is not None
                else command.message,
                self._tensor(command.to, command.message),
                clock,
            )
            for command in commands
            if isinstance(command, Send)
        ]
        for letter in letters:
            hit(Failpoint.BEFORE_SEND, type(letter.event).__name__)
        return letters

    # ---------------------------------------------------------------------------------------------
    # recovery
    def _recover(self) -> None:
        """Bring the machine to where the store is, from the latest snapshot on, then the
        tensors.
        """
        self._recovering = True
        since, self._clock.last = snapshot.put_back(
            self._parts(), self.store.facts.get("snapshot", ""), self.store.length
        )
        for number, step in enumerate(self.store.transitions(since), start=since):
            commands = self.machine.handle(step.event)
            if tuple(commands) != step.commands:
                raise RecordError(
                    f"transition {number} of the store of {self.actor} is one that this fedbcd"
                    " would not make"
                )
            self._apply(number, step.event, None, commands)
            self._clock.last = step.time
        self._load()
        self._recovering = False

    def _drop(self, name: str) -> None:
        """Forget a tensor with the next commit; what is followed after a crash was forgotten
        then.
        """
        if not self._recovering:
            self.store.drop(name)

    def _parts(self) -> snapshot.Parts:
        """What a snapshot holds: the machine, and what `_apply` takes note of."""
        return {"machine": (self.machine, snapshot.names_of(self.machine))}

    def _before_snapshot(self) -> None:
        """Save what recovery would need earlier events for."""

    # ---------------------------------------------------------------------------------------------
    # of each role
    def _size_of(self, event: Event) -> tuple[int, torch.dtype] | None:
        """Length and dtype of the model that belongs to an event, if one does."""
        raise NotImplementedError

    def _apply(
        self, number: int, event: Event, model: Tensor | None, commands: Sequence[Command]
    ) -> None:
        """Take note of transition `number`; unless it is followed once more after a crash, also
        compute what it asks for, and save what it changes.
        """
        raise NotImplementedError

    def _load(self) -> None:
        """After a crash: put the tensors in place."""
        raise NotImplementedError

    def _tensor(self, to: Actor, message: Event) -> Tensor | None:
        """The model that goes with a message."""
        raise NotImplementedError


def _values_of(machine: object) -> dict[str, Any]:
    """The state of a machine, of which copies of a letter change nothing."""
    return {name: copy(getattr(machine, name)) for name in snapshot.names_of(machine)}


def _outcome(call: Callable[[], list[Letter]]) -> list[Letter] | ProtocolError:
    try:
        return call()
    except ProtocolError as error:
        return error


def _claim(store: Store, actor: Actor, blueprint: Blueprint) -> None:
    """Refuse a store that belongs to another role or another run."""
    mine = {"actor": actor, **blueprint.facts()}
    facts = store.facts
    if "actor" not in facts:
        store.commit(facts=mine)
    elif facts["actor"] != actor:
        raise RecordError(
            f"this store belongs to {facts['actor']}, not to {actor}; give each role a"
            " folder of its own"
        )
    elif facts["run"] != mine["run"]:
        there, here = (
            {"algorithm": json.loads(known.get("algorithm", "{}"))} for known in (facts, mine)
        )
        named = f" ({difference(there, here)})" if "algorithm" in facts and there != here else ""
        raise RecordError(
            f"the store of {actor} belongs to a run with other settings{named}; use those,"
            " or another folder"
        )
    elif "algorithm" not in facts:  # of version 0.1.0
        store.commit(facts=mine)
