"""The log of a server is in two places: each report takes along what has happened since the one
before, and its coordinator keeps that in its own log (docs/recovery.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fedbcd.engines.deploy.links.codec import JOURNAL_BYTES
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.protocol.messages import Command, Event, Mixed, MixModels, ModelRef, Send, ServerReady
from fedbcd.record.journal import pack


class Half(Protocol):
    """What a role tells of its log to those that it talks to."""

    def note(self, number: int, event: Event, commands: Sequence[Command]) -> dict[str, str]:
        """Of a transition; the facts that go with it."""

    def with_journal(self, message: Event) -> Event:
        """The same message, with what belongs to it."""


class SharedMixes:
    """Of a coordinator: each answer names the servers of its mix."""

    def __init__(self, store: Store, servers: int) -> None:
        known = (store.facts.get(f"among/{server}") for server in range(servers))
        self._among: dict[str, str] = dict(text.split("=") for text in known if text)

    def note(self, number: int, event: Event, commands: Sequence[Command]) -> dict[str, str]:  # noqa: ARG002
        facts: dict[str, str] = {}
        for command in commands:
            if isinstance(command, MixModels):
                mix, servers = _mix_of(command.results[0]), command.servers
                self._among[mix] = ",".join(map(str, servers))
                facts |= {f"among/{n}": f"{mix}={self._among[mix]}" for n in servers}
        return facts

    def with_journal(self, message: Event) -> Event:
        if not isinstance(message, Mixed) or _mix_of(message.model) not in self._among:
            return message
        servers = self._among[_mix_of(message.model)].split(",")
        return replace(message, among=tuple(map(int, servers)))


def _mix_of(model: ModelRef) -> str:
    return "/".join(model.split("/")[:3])


class SharedLog:
    """What is to be told of a role's log, and what was told last."""

    def __init__(self, store: Store) -> None:
        self._journal = store.facts.get("journal", "")  # of the latest report
        self._first = int(store.facts.get("reported", 0))  # number of the first event after it
        steps = store.transitions(self._first) if store.length else ()
        self._since = [step.event for step in steps]

    def note(self, number: int, event: Event, commands: Sequence[Command]) -> dict[str, str]:
        """Of a transition; the facts that go with it."""
        self._since.append(event)
        is_report = any(
            isinstance(c, Send) and isinstance(c.message, ServerReady) for c in commands
        )
        if not is_report:
            return {}
        journal = pack(self._first, self._since)
        self._journal = journal if len(journal) <= JOURNAL_BYTES else ""
        self._since, self._first = [], number + 1
        return {"journal": self._journal, "reported": str(self._first)}

    def with_journal(self, message: Event) -> Event:
        """The same, and a report with what belongs to it."""
        if isinstance(message, ServerReady):
            return replace(message, journal=self._journal)
        return message
