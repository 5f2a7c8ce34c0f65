"""More of the reference model, each read from one log alone: who is let in, what is sent to a
device that has lost its memory, which mini-batches are drawn, and what a disk need not hold any
more.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.protocol.messages import (
    Absorb,
    Acknowledged,
    Activated,
    Admit,
    AdoptModel,
    Declined,
    DeviceLeft,
    Dismiss,
    Mixed,
    OpenPhase,
    Restored,
    Resumed,
    Send,
    ServerReady,
    StepGlobal,
    StepModel,
    Train,
    TrainOffline,
    UpdateRequested,
    Uploaded,
    number_of,
)
from fedbcd.record.eventlog import Transition

Log = Sequence[Transition]


def said_to(step: Transition, kind: type[Any]) -> list[tuple[int, Any]]:
    """What devices were told by this transition, of one kind of message."""
    return [
        (number_of(command.to), command.message)
        for command in step.commands
        if isinstance(command, Send) and isinstance(command.message, kind)
    ]


def is_accepted(step: Transition) -> bool:
    """Whether an upload was acknowledged by this transition: for the first time, or again."""
    event: Any = step.event
    return isinstance(event, Uploaded) and any(
        device == event.device and message.activation == event.activation
        for device, message in said_to(step, Acknowledged)
    )


# ------------------------------------------------------------------------------------------------
# who is let in
class Queue:
    """Those who ask to be let in, in order of arrival."""

    def __init__(self, members: Iterable[int]) -> None:
        self.waiting: list[int] = []
        self._over = dict.fromkeys(members, -1)  # member -> its last activation that is over
        self._left: dict[int, int] = {}
        self._begun: set[int] = set()  # let in, and not over
        self._barred: set[int] = set()  # have had their turn in this phase
        self._incarnation: dict[int, int] = {}
        self._restoring: set[int] = set()

    def take(self, step: Transition) -> str:
        """Of one transition; what is wrong with it."""
        event: Any = step.event
        if isinstance(event, UpdateRequested):
            self._ask(event)
        elif isinstance(event, DeviceLeft) and any(isinstance(c, Dismiss) for c in step.commands):
            self._left[event.device] = self._over.pop(event.device)
            self._forget(event.device)
        elif isinstance(event, Resumed) and event.incarnation == self._incarnation.get(
            event.device
        ):
            self._restoring.discard(event.device)
        for device, answer in said_to(step, Acknowledged | Declined):  # type: ignore[arg-type]
            if answer.activation > self._over.get(device, answer.activation):
                self._over[device] = answer.activation
                self._begun.discard(device)
                self._barred |= {device} if isinstance(answer, Declined) else set()
        return self._commands(step)

    def _ask(self, event: UpdateRequested) -> None:
        device = event.device
        is_next = self._over.get(device) == event.activation - 1
        busy = self._begun | self._restoring | {*self.waiting}
        if is_next and device not in busy:
            self.waiting.append(device)

    def _forget(self, device: int) -> None:
        self.waiting = [other for other in self.waiting if other != device]

    def _commands(self, step: Transition) -> str:
        for command in step.commands:
            match command:
                case OpenPhase():
                    self._barred = set()
                case Absorb():
                    self._barred.add(command.device)
                case Admit():
                    self._over[command.device] = self._left.pop(command.device, -1)
                case Send(message=Restored() as restored):
                    device = number_of(command.to)
                    self._incarnation[device] = restored.incarnation
                    self._restoring.add(device)
                    self._forget(device)
                case Send(message=Activated()) if number_of(command.to) not in self._begun:
                    device = number_of(command.to)
                    due = [one for one in self.waiting if one not in self._barred]
                    if due[:1] != [device]:
                        return f"let {device} in, though {due} were waiting in this order"
                    self._begun.add(device)
                    self._forget(device)
        return ""


def wrong_admission(plan: Blueprint, server: int, log: Log) -> str:
    """Whoever asks first is let in first."""
    queue = Queue({*plan.servers[server]} - plan.late)
    return next(filter(None, map(queue.take, log)), "")


# ------------------------------------------------------------------------------------------------
# what is sent to a device that has lost its memory
def restored_handles(log: Log) -> list[tuple[int, Restored, str]]:
    """Whom a server has put in step, and the handle of what that device must begin with: its last
    contribution, the model of when it joined, or ("") x(0).
    """
    latest: dict[int, str] = {}
    over: dict[int, int] = {}
    found = []
    for step in log:
        event: Any = step.event
        if is_accepted(step) and event.activation > over.get(event.device, -1):
            latest[event.device], over[event.device] = event.model, event.activation
        for device, declined in said_to(step, Declined):
            over[device] = max(over.get(device, -1), declined.activation)
        latest |= {c.device: c.model for c in step.commands if isinstance(c, Admit)}
        found += [
            (device, restored, latest.get(device, ""))
            for device, restored in said_to(step, Restored)
        ]
    return found


# ------------------------------------------------------------------------------------------------
# mini-batches
def repeated_sessions(lives: Sequence[Log], joined_late: bool) -> str:
    """What a device draws after it was put in step it has never drawn before, on whichever disk.

    What it draws offline before it hears that its memory is lost, or before it is a member and
    loses then, counts nowhere.
    """
    drawn: dict[int, set[int]] = {}
    reached = 0
    for log in lives:
        counts = reached == 0 and not (joined_late and log is not lives[-1])
        incarnation = 0
        for step in log:
            event: Any = step.event
            if isinstance(event, Restored):
                incarnation = max(incarnation, event.incarnation)
            if incarnation > 0 or counts:
                drawn.setdefault(incarnation, set()).update(
                    c.session for c in step.commands if isinstance(c, Train | TrainOffline)
                )
        reached = max(reached, incarnation)
    for one, sessions in drawn.items():
        for other in drawn.keys() - {one}:
            if again := sessions & drawn[other]:
                return f"drew {sorted(again)[:3]} again after it had been put in step"
    return ""


# ------------------------------------------------------------------------------------------------
# what a disk may hold
def server_may_keep(log: Log) -> set[str]:
    """The names of its present model, of those that somebody works from, and of the uploads that
    its sum is made from or that the phase has replaced.
    """
    model, granted = "", dict[int, Activated]()
    counted, held, replaced = dict[int, str](), dict[int, str](), set[str]()
    over: dict[int, int] = {}
    for number, step in enumerate(log):
        event: Any = step.event
        if is_accepted(step) and event.activation > over.get(event.device, -1):
            held[event.device] = f"x/{event.device}/{event.activation}"
        for device, answer in said_to(step, Acknowledged | Declined):  # type: ignore[arg-type]
            over[device] = max(over.get(device, -1), answer.activation)
            if device in granted and granted[device].activation <= answer.activation:
                del granted[device]
        granted |= dict(said_to(step, Activated))
        for command in step.commands:
            match command:
                case StepModel():
                    model = command.result
                case AdoptModel():
                    model = command.model
                case Absorb():
                    replaced.add(counted.get(command.device, ""))
                    counted[command.device] = held.pop(command.device)
                    replaced.add(counted[command.device])
                case Admit():
                    counted[command.device] = f"a/{command.device}/{number}"
                case Dismiss():
                    counted.pop(command.device, None)
                    held.pop(command.device, None)
        if any(isinstance(c, OpenPhase | Admit | Dismiss) for c in step.commands):
            replaced.clear()
    begun = {activated.model for activated in granted.values()}
    return {model, "total", "report", *begun, *counted.values(), *held.values(), *replaced}


def coordinator_may_keep(log: Log) -> set[str]:
    """The names of what each server reported last and was answered last, and of its own model."""
    heard: dict[int, ServerReady] = {}
    said: dict[int, str] = {}
    model = ""
    for step in log:
        event: Any = step.event
        before = heard.setdefault(event.server, event)
        if (event.phase, event.iteration) > (before.phase, before.iteration):
            heard[event.server] = event
        said |= {server: mixed.model for server, mixed in said_to(step, Mixed)}
        model = next((c.result for c in step.commands if isinstance(c, StepGlobal)), model)
    reports = {f"report/{r.server}/{r.phase}/{r.iteration}" for r in heard.values()}
    return {model} | {*said.values()} | reports


# ------------------------------------------------------------------------------------------------
# graphs
def mixed_by(
    mixing: Sequence[Sequence[Sequence[float]]], round_: int, models: Mapping[int, Tensor]
) -> list[Tensor]:
    """Eq. (6a), as it is written: w_n = sum over m of a_nm z_m, with the matrix of this round."""
    matrix = mixing[round_ % len(mixing)]
    return [
        torch.stack([matrix[n][m] * models[m] for m in models]).sum(0)  # in order of arrival
        for n in models
    ]
