"""What a role must not lose: every transition and every fact in SQLite, every tensor in a checked file of its own.

Tensor files come first: each is written under a temporary name, synced, renamed, and the folder synced. Then one transaction holds
the transition, its time, the facts, and which files are current. Files that no transaction names are swept when a store is opened.
Several transitions can become durable `together`: the disk is then waited for once, and nothing may be said of any before.
"""

import fcntl
import hashlib
import json
import math
import os
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbcd.engines.deploy.failpoints import Failpoint, hit
from fedbcd.errors import RecordError
from fedbcd.eventlog import Transition, decode, encode
from fedbcd.protocol.messages import Command, Event

VERSION = 1
_DTYPES = {"F32": torch.float32, "F64": torch.float64}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
Piece = bytes | memoryview
_SCHEMA = """
CREATE TABLE fact (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tensor (name TEXT PRIMARY KEY, file TEXT NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE transition (number INTEGER PRIMARY KEY, time REAL NOT NULL, actor TEXT NOT NULL, event TEXT NOT NULL, commands TEXT NOT NULL);
"""


class Store(Protocol):
    """What a role needs of its memory. All that `commit` was given is there after a crash, or none of it."""

    @property
    def id(self) -> str:
        """A random name, made with the store: another disk has another."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """Plain facts by key, as of the last commit, also one that is held."""
        ...

    @property
    def length(self) -> int:
        """How many transitions there are."""
        ...

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """The transitions from number `since` on, in order."""
        ...

    def names(self) -> list[str]:
        """The names of the tensors that are current."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor by name: the one saved last, committed or not."""
        ...

    def save(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; it is current from the next commit on."""
        ...

    def drop(self, name: str) -> None:
        """Forget a tensor with the next commit; one that is not there is fine."""
        ...

    def commit(self, step: Transition | None = None, facts: Mapping[str, str] | None = None) -> None:
        """Make one transition, new facts, and all saves and drops since the last commit durable, together."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Hold every commit within, and make all of them durable at its end, or none."""
        ...

    def close(self) -> None:
        """Let another process have it. What was not committed is gone."""
        ...


@dataclass(frozen=True)
class Tail:
    """The latest part of a store: how many transitions it has, and those that came after a given place."""

    length: int
    steps: list[Transition]
    is_same: bool  # whether the transition before that place is the one that was there


Saved = Mapping[str, tuple[str, bytes]]  # tensor -> its file, and the digest of that


class Files(Protocol):
    """The folder of tensor files as the operating system offers it: what is not synced may be lost or torn by a crash."""

    def write(self, file: str, pieces: Sequence[Piece]) -> None:
        """Write a new file, from these pieces in order."""
        ...

    def sync_file(self, file: str) -> None:
        """Make the content of a file durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file its name; durable with `sync`."""
        ...

    def sync(self) -> None:
        """Make names durable."""
        ...

    def read(self, file: str) -> bytearray:
        """All of a file."""
        ...

    def remove(self, file: str) -> None:
        """Remove a file; one that is not there is fine."""
        ...

    def names(self) -> list[str]:
        """The files that are there."""
        ...


class Ledger(Protocol):
    """Where transitions, facts and the names of current files are kept: a `commit` is durable when it returns, or nothing of it is."""

    def tensors(self) -> dict[str, tuple[str, bytes]]:
        """Which file holds which tensor, with its digest."""
        ...

    def facts(self) -> dict[str, str]:
        """Facts by key."""
        ...

    def length(self) -> int:
        """How many transitions there are."""
        ...

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        """The transitions from number `since` on, in order."""
        ...

    def commit(self, number: int, steps: Sequence[Transition], facts: Mapping[str, str], saved: Saved, dropped: Collection[str]) -> None:
        """Write all of this, or nothing; `number` is that of the first step."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class StoreOn:
    """A `Store` on given files and a given ledger: here is in which order things are written, synced, named and removed."""

    def __init__(self, files: Files, ledger: Ledger, place: str, *, read_only: bool = False) -> None:
        self._folder = files
        self._ledger = ledger
        self._place = place
        self._files = ledger.tensors()
        self._facts = ledger.facts()
        self._length = ledger.length()  # that are durable
        self._saved: dict[str, tuple[str, bytes]] = {}
        self._dropped: set[str] = set()
        self._unsynced: dict[str, str] = {}  # file -> under which name it lies until the commit
        self._overwritten: list[str] = []  # files of tensors that were saved again before the commit
        self._held: list[Transition] | None = None  # that become durable together; None: each at once
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
            raise RecordError(f"the store {self._place} has no tensor {name}; restore it from a backup")
        file, digest = self._saved.get(name) or self._files[name]
        path = f"{self._place}/tensors/{file}"
        try:
            data = self._folder.read(self._unsynced.get(file, file))
            if _digest([data]) != digest:
                raise RecordError(f"{path} is damaged: its digest is not the one that was recorded; restore the store from a backup")
            return _unpacked(data)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise RecordError(f"{path} is missing or damaged ({error}); restore the store from a backup") from None

    def save(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to a new file; it is synced with the next commit, and current from then on."""
        try:
            self._save(name, tensor)
        except OSError as error:
            raise self._full(error) from None

    def _full(self, error: Exception) -> RecordError:
        return RecordError(f"cannot write to the store {self._place} ({error}); make room or repair the disk, then start this role again")

    def _save(self, name: str, tensor: Tensor) -> None:
        pieces = _packed(tensor.detach().contiguous())
        file = f"{name.replace('/', '.')}-{self._serial}"
        self._serial += 1
        temporary = f"{file}.tmp"
        hit(Failpoint.BEFORE_WRITE, name)
        self._folder.write(temporary, pieces)
        hit(Failpoint.AFTER_WRITE, name)
        self._unsynced[file] = temporary
        if name in self._saved:
            self._overwritten.append(self._saved[name][0])
        self._saved[name] = (file, _digest(pieces))
        self._dropped.discard(name)

    def drop(self, name: str) -> None:
        """Forget a tensor with the next commit."""
        if name in self._files or name in self._saved:
            self._dropped.add(name)

    def commit(self, step: Transition | None = None, facts: Mapping[str, str] | None = None) -> None:
        """Make one transition, new facts, and all saves and drops since the last commit durable, together."""
        steps = [] if step is None else [step]
        if self._held is None:
            self._make_durable(steps, facts or {})
        else:
            self._held += steps
            self._held_facts |= facts or {}
        self._facts |= facts or {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold every commit within, and make all of them durable at its end; after an error the store must be opened again."""
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
            raise self._full(error) from None
        self._let_go()

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

    def _let_go(self) -> None:
        """After a commit: take over what is new, remove what nothing refers to."""
        old = [*self._overwritten, *(self._files[name][0] for name in self._saved if name in self._files)]
        self._files |= self._saved
        old += [self._files.pop(name)[0] for name in self._dropped]
        self._saved, self._dropped, self._overwritten = {}, set(), []
        for file in old:
            self._folder.remove(file)
            hit(Failpoint.AFTER_REMOVE, file)

    def _sweep(self) -> None:
        """Remove what a crash has left: files that were written but never committed, or replaced but not removed."""
        current = {file for file, _ in self._files.values()}
        for file in self._folder.names():
            if file not in current:
                self._folder.remove(file)

    def close(self) -> None:
        """Let another process have it."""
        self._ledger.close()


class FileStore(StoreOn):
    """A `Store` in a folder of its own: `store.sqlite` and one file per tensor under `tensors`."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or make a store. One process at a time; `read_only` looks without a lock, and finds a store or fails."""
        self.path = path
        self._lock: int | None = None
        try:
            if not read_only:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)  # personal models are nobody else's business
                (path / "tensors").mkdir(exist_ok=True, mode=0o700)
                self._lock = _locked(path)
            super().__init__(_Folder(path / "tensors"), _Database(path, read_only), str(path), read_only=read_only)
        except (OSError, sqlite3.Error, ValueError, TypeError) as error:  # the last two: what is left of a damaged database
            self._unlock()
            raise RecordError(f"the store {path} cannot be used ({error}); restore a backup, or begin with an empty folder") from None
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Let another process have it."""
        super().close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Folder:
    """`Files` in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, file: str, pieces: Sequence[Piece]) -> None:
        with (self._path / file).open("wb") as stream:
            for piece in pieces:
                stream.write(piece)

    def sync_file(self, file: str) -> None:
        _sync(self._path / file)

    def rename(self, old: str, new: str) -> None:
        (self._path / old).rename(self._path / new)

    def sync(self) -> None:
        _sync(self._path)

    def read(self, file: str) -> bytearray:
        with (self._path / file).open("rb", buffering=0) as stream:
            data = bytearray(os.fstat(stream.fileno()).st_size)
            view, done = memoryview(data), 0
            while got := stream.readinto(view[done:]):
                done += got
        return data

    def remove(self, file: str) -> None:
        (self._path / file).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()]


class _NotMade(RecordError):
    """There is a database, but nothing in it: its role is making it, or was stopped while it did."""


class _Database:
    """A `Ledger` in SQLite."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self._path = path
        file = path / "store.sqlite"
        if read_only and not file.is_file():
            raise RecordError(f"there is no store at {path}")
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(read_only)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        db = self._db
        if not read_only:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'fact'").fetchone():
            if read_only:
                raise _NotMade(f"the store {self._path} is empty: its role has just begun, or it was damaged")
            self._make()
        (version,) = db.execute("SELECT value FROM fact WHERE key = 'version'").fetchone()
        if version != str(VERSION):
            raise RecordError(f"{self._path} is a store of version {version}; this fedbcd reads version {VERSION}")

    def _make(self) -> None:
        """A new store; never where an old one has lost its database, since the tensors that are left would be swept."""
        if any((self._path / "tensors").iterdir()):
            raise RecordError(f"{self._path} has tensors but an empty store.sqlite: it was damaged; restore a backup, or empty the folder")
        fresh = f"('version', '{VERSION}'), ('id', '{secrets.token_hex(16)}')"
        self._db.executescript(f"BEGIN; {_SCHEMA} INSERT INTO fact VALUES {fresh}; COMMIT;")
        for folder in (self._path, self._path.parent):
            _sync(folder)

    def tensors(self) -> dict[str, tuple[str, bytes]]:
        return {name: (file, digest) for name, file, digest in self._db.execute("SELECT name, file, digest FROM tensor")}

    def facts(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT key, value FROM fact"))

    def length(self) -> int:
        (last,) = self._db.execute("SELECT MAX(number) FROM transition").fetchone()
        return 0 if last is None else int(last) + 1

    def tail(self, number: int | None, time: float) -> Tail:
        """See `read_tail`."""
        if time == -math.inf:
            place = 0
        else:
            where = "time = ?" if number is None else "number = ? AND time = ?"
            values = (time,) if number is None else (number - 1, time)
            found = self._db.execute(f"SELECT number FROM transition WHERE {where}", values).fetchone()
            place = -1 if found is None else int(found[0]) + 1
        length = self.length()
        chosen = ("number >= ? AND number < ?", (place, length)) if place >= 0 else ("time > ? AND number < ?", (time, length))
        return Tail(length, [*self._steps(*chosen)], place >= 0)

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        return self._steps("number >= ?", (since,))

    def _steps(self, where: str, values: tuple[float, ...]) -> Iterator[Transition]:
        for number, time, actor, event, commands in self._rows(where, values):
            try:
                step = _decoded(time, actor, event, commands)
            except (ValueError, TypeError, RecursionError) as error:
                raise RecordError(f"transition {number} of the store {self._path} is damaged ({error}); restore a backup") from None
            yield step

    def _rows(self, where: str, values: tuple[float, ...]) -> Iterator[tuple[Any, ...]]:
        query = f"SELECT number, time, actor, event, commands FROM transition WHERE {where} ORDER BY number"
        try:
            yield from self._db.execute(query, values)
        except (sqlite3.Error, ValueError) as error:
            raise RecordError(f"the store {self._path} is damaged ({error}); restore a backup") from None

    def commit(self, number: int, steps: Sequence[Transition], facts: Mapping[str, str], saved: Saved, dropped: Collection[str]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT OR REPLACE INTO tensor VALUES (?, ?, ?)", [(n, f, d) for n, (f, d) in saved.items()])
        self._db.executemany("DELETE FROM tensor WHERE name = ?", [(name,) for name in dropped])
        self._db.executemany("INSERT OR REPLACE INTO fact VALUES (?, ?)", [*facts.items()])
        rows = [(number + k, *_encoded(step)) for k, step in enumerate(steps)]
        self._db.executemany("INSERT INTO transition VALUES (?, ?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def read_tail(path: Path, number: int | None, time: float) -> Tail:
    """What a store has after its transition `number - 1`, which happened at `time`; its role may be running.

    Without `number` the place is found by the time. If that transition is not there any more, the store is another, or an old copy of
    it; then all transitions after that time are given.
    """
    if not (path / "store.sqlite").is_file():
        return Tail(0, [], time == -math.inf)
    try:
        database = _Database(path, read_only=True)
        try:
            return database.tail(number, time)
        finally:
            database.close()
    except _NotMade:
        return Tail(0, [], time == -math.inf)
    except sqlite3.Error as error:
        raise RecordError(f"the store {path} cannot be read ({error}); is its disk full, or is it damaged?") from None


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise RecordError(f"another process uses the store {path}; stop it, or give this one a folder of its own") from None
    return handle


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(pieces: Sequence[Piece | bytearray]) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _packed(tensor: Tensor) -> list[Piece]:
    """A file in the safetensors format with one tensor, of which no copy is made."""
    entry = {"dtype": _CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [0, tensor.nbytes]}
    header = json.dumps({"tensor": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, tensor.numpy().reshape(-1).view("u1").data]


def _unpacked(data: bytearray) -> Tensor:
    """The tensor of such a file; it lives in the memory that was read."""
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["tensor"]
    dtype, shape = _DTYPES[entry["dtype"]], [int(length) for length in entry["shape"]]
    if start + entry["data_offsets"][1] != len(data) or entry["data_offsets"][0] != 0:
        raise ValueError("it is not as long as it says")
    values = torch.frombuffer(data, dtype=dtype, offset=start) if len(data) > start else torch.empty(0, dtype=dtype)
    return values.reshape(shape)


def _serial(file: str) -> int:
    return int(file.rpartition("-")[2])


def _encoded(step: Transition) -> tuple[float, str, str, str]:
    commands = json.dumps([encode(command) for command in step.commands], separators=(",", ":"))
    return step.time, step.actor, json.dumps(encode(step.event), separators=(",", ":")), commands


def _decoded(time: float, actor: str, event: str, commands: str) -> Transition:
    happened, ordered = decode(json.loads(event)), [decode(data) for data in json.loads(commands)]
    known = tuple(command for command in ordered if isinstance(command, Command))
    if not isinstance(happened, Event) or len(known) < len(ordered):
        raise ValueError("an event and commands are expected")
    return Transition(time, actor, happened, known)
