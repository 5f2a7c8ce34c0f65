"""What a role must not lose: every transition and every fact in SQLite, every tensor in a checked
file of its own.

Tensor files come first: each is written under a temporary name, synced, renamed, and the folder
synced. Then one transaction holds the transition, its time, the facts, and which files are current.
Files that no transaction names are swept when a store is opened. Several transitions can become
durable with one `group_commit`: the disk is then waited for once, and nothing may be said of any
before.
"""

import hashlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from fedbcd.engines.deploy.processes.descriptors import unwritten
from fedbcd.engines.deploy.processes.failpoints import Failpoint, hit
from fedbcd.errors import RecordError
from fedbcd.record.eventlog import Transition
from fedbcd.record.tensorfile import Piece, pack, unpack


class Store(Protocol):
    """What a role needs of its memory. All that `commit` was given is there after a crash, or none
    of it.
    """

    @property
    def id(self) -> str:
        """A random name, made with the store: another disk has another."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Plain facts by key, as of the last commit, also one that is held."""

    @property
    def length(self) -> int:
        """How many transitions there are."""

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """The transitions from number `since` on, in order."""

    def names(self) -> list[str]:
        """The names of the tensors that are current."""

    def tensor(self, name: str) -> Tensor:
        """A tensor by name: the one saved last, committed or not."""

    def save(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; it is current from the next commit on."""

    def rename(self, name: str, new: str) -> None:
        """Call a tensor otherwise from the next commit on; nothing is written."""

    def drop(self, name: str) -> None:
        """Forget a tensor with the next commit; one that is not there is fine."""

    def commit(
        self, step: Transition | None = None, facts: Mapping[str, str] | None = None
    ) -> None:
        """Make one transition, new facts, and all saves and drops since the last commit durable,
        together.
        """

    def group_commit(self) -> AbstractContextManager[None]:
        """Hold every commit within, and make all of them durable at its end, or none."""

    def close(self) -> None:
        """Let another process have it. What was not committed is gone."""


Saved = Mapping[str, tuple[str, bytes]]  # tensor -> its file, and the digest of that


class Files(Protocol):
    """The folder of tensor files as the operating system offers it: what is not synced may be lost
    or torn by a crash.
    """

    def write(self, file: str, pieces: Sequence[Piece]) -> None:
        """Write a new file, from these pieces in order."""

    def sync_file(self, file: str) -> None:
        """Make the content of a file durable."""

    def rename(self, old: str, new: str) -> None:
        """Give a file its name; durable with `sync`."""

    def sync(self) -> None:
        """Make names durable."""

    def read(self, file: str) -> bytearray:
        """All of a file."""

    def remove(self, file: str) -> None:
        """Remove a file; one that is not there is fine."""

    def names(self) -> list[str]:
        """The files that are there."""


class Ledger(Protocol):
    """Where transitions, facts and the names of current files are kept: a `commit` is durable when
    it returns, or nothing of it is.
    """

    def tensors(self) -> dict[str, tuple[str, bytes]]:
        """Which file holds which tensor, with its digest."""

    def facts(self) -> dict[str, str]:
        """Facts by key."""

    def length(self) -> int:
        """How many transitions there are."""

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """The transitions from number `since` on, in order."""

    def commit(
        self,
        number: int,
        steps: Sequence[Transition],
        facts: Mapping[str, str],
        saved: Saved,
        dropped: Collection[str],
    ) -> None:
        """Write all of this, or nothing; `number` is that of the first step."""

    def close(self) -> None:
        """Let go of it."""


class StoreOn:
    """A `Store` on given files and a given ledger: here is in which order things are written,
    synced, named and removed.
    """

    def __init__(
        self, files: Files, ledger: Ledger, place: str, *, read_only: bool = False
    ) -> None:
        self._folder = files
        self._ledger = ledger
        self._place = place
        self._files = ledger.tensors()
        self._facts = ledger.facts()
        self._length = ledger.length()  # that are durable
        self._saved: dict[str, tuple[str, bytes]] = {}
        self._dropped: set[str] = set()
        self._unsynced: dict[str, str] = {}  # file -> under which name it lies until the commit
        self._overwritten: list[
            str
        ] = []  # files of tensors that were saved again before the commit
        self._held: list[Transition] | None = (
            None  # that become durable together; None: each at once
        )
        self._held_facts: dict[str, str] = {}
        self._serial = 1 + max((_serial(file) for file, _ in self._files.values()), default=-1)
        if not read_only:
            self._sweep()

    @property
    def id(self) -> str:
        """A random name, made with the store."""
        return self._facts["id"]

    @property
    def facts(self) -> Mapping[str, str]:
        """Plain facts by key."""
        return self._facts

    @property
    def length(self) -> int:
        """How many transitions there are, with those that are held."""
        return self._length + len(self._held or ())

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """The transitions from number `since` on, in order."""
        return self._ledger.transitions(since)

    def names(self) -> list[str]:
        """The names of the tensors that are current."""
        return [*self._files]

    def tensor(self, name: str) -> Tensor:
        """A tensor by name, checked against its digest."""
        if name not in self._saved and name not in self._files:
            raise RecordError(
                f"the store {self._place} has no tensor {name}; restore it from a backup"
            )
        file, digest = self._saved.get(name) or self._files[name]
        path = f"{self._place}/tensors/{file}"
        try:
            data = self._folder.read(self._unsynced.get(file, file))
            _check_digest(data, digest, path)
            return unpack(data)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise RecordError(
                f"{path} is missing or damaged ({error}); restore the store from a backup"
            ) from None

    def save(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to a new file; it is synced with the next commit, and current from then
        on.
        """
        try:
            self._save(name, tensor)
        except OSError as error:
            raise unwritten(f"the store {self._place}", error) from None

    def _save(self, name: str, tensor: Tensor) -> None:
        pieces = pack(tensor)
        file = f"{name.replace('/', '.')}-{self._serial}"
        self._serial += 1
        temporary = f"{file}.tmp"
        hit(Failpoint.BEFORE_WRITE, name)
        self._folder.write(temporary, pieces)
        hit(Failpoint.AFTER_WRITE, name)
        self._unsynced[file] = temporary
        self._name(name, (file, _digest(pieces)))

    def _name(self, name: str, file: tuple[str, bytes]) -> None:
        if name in self._saved:
            self._overwritten.append(self._saved[name][0])
        self._saved[name] = file
        self._dropped.discard(name)

    def rename(self, name: str, new: str) -> None:
        """Call a tensor otherwise from the next commit on."""
        self._name(new, self._saved.get(name) or self._files[name])
        self.drop(name)

    def drop(self, name: str) -> None:
        """Forget a tensor with the next commit."""
        if name in self._files or name in self._saved:
            self._dropped.add(name)

    def commit(
        self, step: Transition | None = None, facts: Mapping[str, str] | None = None
    ) -> None:
        """Make one transition, new facts, and all saves and drops since the last commit durable,
        together.
        """
        steps = [] if step is None else [step]
        if self._held is None:
            self._make_durable(steps, facts or {})
        else:
            self._held += steps
            self._held_facts |= facts or {}
        self._facts |= facts or {}

    @contextmanager
    def group_commit(self) -> Iterator[None]:
        """Hold every commit within, and make all of them durable at its end; after an error the
        store must be opened again.
        """
        self._held, self._held_facts = [], {}
        yield
        steps, facts = self._held, self._held_facts
        self._held = None
        if steps or facts or self._saved or self._dropped:
            self._make_durable(steps, facts)

    def _make_durable(self, steps: Sequence[Transition], facts: Mapping[str, str]) -> None:
        try:
            self._sync_files()
            self._commit(steps, facts)
        except (OSError, sqlite3.Error) as error:
            raise unwritten(f"the store {self._place}", error) from None
        self._remove_old()

    def _sync_files(self) -> None:
        for file, temporary in self._unsynced.items():
            self._folder.sync_file(temporary)
            hit(Failpoint.AFTER_SYNC, file)
            self._folder.rename(temporary, file)
            hit(Failpoint.AFTER_RENAME, file)
        if self._unsynced:
            self._folder.sync()
        self._unsynced = {}

    def _commit(self, steps: Sequence[Transition], facts: Mapping[str, str]) -> None:
        names = [type(step.event).__name__ for step in steps] or [""]
        for name in names:
            hit(Failpoint.BEFORE_COMMIT, name)
        self._ledger.commit(self._length, steps, facts, self._saved, self._dropped)
        for name in names:
            hit(Failpoint.AFTER_COMMIT, name)
        self._length += len(steps)

    def _remove_old(self) -> None:
        """After a commit: take over what is new, remove what nothing refers to."""
        old = [
            *self._overwritten,
            *(self._files[name][0] for name in self._saved if name in self._files),
        ]
        self._files |= self._saved
        old += [self._files.pop(name)[0] for name in self._dropped]
        kept = {
            file for name, (file, _) in self._saved.items() if name not in self._dropped
        }  # some under another name than before
        self._saved, self._dropped, self._overwritten = {}, set(), []
        for file in dict.fromkeys(old):
            if file not in kept:
                self._folder.remove(file)
                hit(Failpoint.AFTER_REMOVE, file)

    def _sweep(self) -> None:
        """Remove what a crash has left: files that were written but never committed, or replaced
        but not removed. Not before what is current was found whole: of a damaged store nothing is
        removed.
        """
        there = {*self._folder.names()}
        current = dict(self._files.values())
        missing = sorted(current.keys() - there)
        if missing:
            raise RecordError(
                f"the store {self._place} lacks {len(missing)} files, such as tensors/{missing[0]};"
                " restore it from a backup"
            )
        strays = sorted(there - current.keys())
        for file, digest in current.items() if strays else ():
            _check_digest(self._folder.read(file), digest, f"{self._place}/tensors/{file}")
        for file in strays:
            self._folder.remove(file)

    def close(self) -> None:
        """Let another process have it."""
        self._ledger.close()


def _digest(pieces: Sequence[Piece | bytearray]) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _check_digest(data: bytearray, digest: bytes, path: str) -> None:
    if _digest([data]) != digest:
        raise RecordError(
            f"{path} is damaged: its digest is not the one that was recorded; restore the store"
            " from a backup"
        )


def _serial(file: str) -> int:
    return int(file.rpartition("-")[2])
