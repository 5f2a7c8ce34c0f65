"""A disk in memory that forgets what was not synced. It lies below the deployment's own `StoreOn`,
and survives the role that uses it.
"""

import copy
import errno
import random
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedbcd.engines.deploy.roles.store import Saved, StoreOn
from fedbcd.record.eventlog import Transition
from fedbcd.record.tensorfile import Piece


@dataclass
class _File:
    data: bytes
    synced: bool = False


class Disk:
    """Files and a ledger. `crash` keeps what was synced; of the rest each piece is there, torn, or
    gone.
    """

    def __init__(self, chance: random.Random, number: int) -> None:
        self.chance = chance
        self.full = False
        self.torn = self.lost = 0
        self.is_new(number)

    def is_new(self, number: int) -> None:
        """An empty disk."""
        self.entries: dict[str, _File] = {}
        self._safe: dict[str, _File] = {}
        self._pending: list[tuple[str, str]] = []
        self.tensors_: dict[str, tuple[str, bytes]] = {}
        self.facts_ = {"version": "1", "id": f"{number:032x}"}
        self.log: list[Transition] = []

    def store(self, place: str) -> StoreOn:
        """The deployment's store on this disk."""
        return StoreOn(self, self, place)

    # ---------------------------------------------------------------------------------------------
    # files
    def write(self, file: str, pieces: Sequence[Piece]) -> None:
        """As `_Folder.write`; a full disk takes half."""
        data = b"".join(pieces)
        stored = _File(data[: len(data) // 2] if self.full else data)
        self.entries[file] = stored
        self._pending.append(("", file))
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync_file(self, file: str) -> None:
        """The content is safe."""
        self.entries[file].synced = True

    def rename(self, old: str, new: str) -> None:
        """Names are safe only after `sync`."""
        self.entries[new] = self.entries.pop(old)
        self._pending.append((old, new))

    def sync(self) -> None:
        """All names are safe."""
        self._settle()

    def _settle(self) -> None:
        self._safe, self._pending = dict(self.entries), []

    def read(self, file: str) -> bytearray:
        """All of a file."""
        if file not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file", file)
        return bytearray(self.entries[file].data)

    def remove(self, file: str) -> None:
        """A removed file may come back in a crash."""
        if self.entries.pop(file, None) is not None:
            self._pending.append((file, ""))

    def names(self) -> list[str]:
        """All files."""
        return [*self.entries]

    # ---------------------------------------------------------------------------------------------
    # ledger
    def tensors(self) -> dict[str, tuple[str, bytes]]:
        """See `Ledger`."""
        return dict(self.tensors_)

    def facts(self) -> dict[str, str]:
        """See `Ledger`."""
        return dict(self.facts_)

    def length(self) -> int:
        """See `Ledger`."""
        return len(self.log)

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """See `Ledger`."""
        return iter(self.log[since:])

    def commit(
        self,
        number: int,
        steps: Sequence[Transition],
        facts: Mapping[str, str],
        saved: Saved,
        dropped: Collection[str],
    ) -> None:
        """All or nothing, and safe: SQLite with synchronous=FULL promises this."""
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        assert number == len(self.log), "the store has lost count of its transitions"
        self.tensors_ |= saved
        for name in dropped:
            self.tensors_.pop(name, None)
        self.facts_ |= facts
        self.log += steps

    def close(self) -> None:
        """Nothing to do."""

    # ---------------------------------------------------------------------------------------------
    # trouble
    def crash(self) -> None:
        """The power fails: of names since the last sync any may be lost, of contents that were not
        synced any part.
        """
        everything = dict(self._safe)
        files = {**self._safe, **self.entries}
        for old, new in self._pending:
            if self.chance.random() < 0.5:
                self.lost += 1
                continue
            moved = everything.pop(old, None) if old else files.get(new, _File(b""))
            if new:
                everything[new] = files.get(new) or moved or _File(b"")
        for name, file in everything.items():
            if not file.synced:
                self.torn += 1
                everything[name] = _File(self._torn(file.data), True)
        self.entries = everything
        self._settle()

    def _torn(self, data: bytes) -> bytes:
        return self.chance.choice(
            [b"", data, bytes(len(data)), data[: self.chance.randrange(len(data) + 1)]]
        )

    def copy(self) -> dict[str, object]:
        """A backup."""
        return copy.deepcopy(
            {"entries": self.entries, "tensors_": self.tensors_, "facts_": self.facts_}
        ) | {"log": [*self.log]}

    def put_back(self, backup: dict[str, object]) -> None:
        """The backup instead of what was there."""
        self.__dict__ |= backup
        self._settle()
