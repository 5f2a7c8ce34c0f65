"""A `Store` on this machine: SQLite and a folder of files, locked by one process."""

import fcntl
import hashlib
import json
import lzma
import math
import os
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedbcd.engines.deploy.processes.descriptors import are_exhausted, unwritten
from fedbcd.engines.deploy.processes.exit_codes import ExitCode, is_of_the_disk
from fedbcd.engines.deploy.roles.store import Saved, StoreOn
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Command, Event
from fedbcd.record.eventlog import Transition, decode, encode
from fedbcd.record.tensorfile import Piece, sync

VERSION = 2
OLDER = 1  # of fedbcd 0.1.0: rows without checksums are taken as they are, and then given them
_SCHEMA = """
CREATE TABLE fact (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tensor (name TEXT PRIMARY KEY, file TEXT NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE transition (number INTEGER PRIMARY KEY, time REAL NOT NULL, actor TEXT NOT NULL,
    event TEXT NOT NULL, commands TEXT NOT NULL);
"""
# History before the last snapshot: packed transitions `first` to `last`.
_ARCHIVE = """
CREATE TABLE IF NOT EXISTS archive (first INTEGER PRIMARY KEY, last INTEGER NOT NULL,
    packed BLOB NOT NULL, sum BLOB);
"""
_COLUMNS = {
    "fact": ("key", "value"),
    "tensor": ("name", "file", "digest"),
    "transition": ("number", "time", "actor", "event", "commands"),
}  # the first is the key; each row ends with the checksum of these
_ADD_CHECKSUMS = "".join(f"ALTER TABLE {table} ADD COLUMN sum BLOB;" for table in _COLUMNS)
_COLUMNS["archive"] = ("first", "last", "packed")
PACKED = 1000  # transitions in a row of the archive, at most


@dataclass(frozen=True)
class Tail:
    """The latest part of a store: how many transitions it has, and those that came after a given
    place.
    """

    length: int
    steps: list[Transition]
    is_same: bool  # whether the transition before that place is the one that was there


class NoStore(RecordError):
    """There is no store where there must be one: to begin anew instead would lose what was
    acknowledged.
    """

    exit_code = int(ExitCode.NO_STORE)

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"there is no store in {path.absolute()}. If this role has run before, look for a disk"
            " that is not mounted or for another folder, and put its newest store back. Only one"
            " that has never run begins a new store: --init (fedbcd up does so in a new folder)"
        )


class FileStore(StoreOn):
    """A `Store` in a folder of its own: `store.sqlite` and one file per tensor under `tensors`."""

    def __init__(self, path: Path, *, begin: bool = False, read_only: bool = False) -> None:
        """Open a store; with `begin` make one if there is none. One process at a time; `read_only`
        looks without a lock.
        """
        self.path = path
        self._lock: int | None = None
        try:
            if not read_only:
                self._take(path, begin)
            super().__init__(
                _Folder(path / "tensors"),
                _Database(path, begin, read_only),
                str(path),
                read_only=read_only,
            )
        except (
            OSError,
            sqlite3.Error,
            ValueError,
            TypeError,
        ) as error:  # the last two: what is left of a damaged database
            self._unlock()
            if are_exhausted(error) or is_of_the_disk(error, path):
                raise unwritten(f"the store {path}", error) from None
            remedy = "restore a backup; only a device may begin with an empty folder instead"
            raise RecordError(f"the store {path} cannot be used ({error}); {remedy}") from None
        except BaseException:
            self._unlock()
            raise

    def _take(self, path: Path, begin: bool) -> None:
        """Make its folders, if it may, and lock it; where there is no store, and none is to begin,
        nothing is changed.
        """
        if not begin and not (path / "store.sqlite").is_file():
            raise NoStore(path)
        path.mkdir(
            parents=True, exist_ok=True, mode=0o700
        )  # personal models are nobody else's business
        (path / "tensors").mkdir(exist_ok=True, mode=0o700)
        self._lock = _locked(path)

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
        sync(self._path / file)

    def rename(self, old: str, new: str) -> None:
        (self._path / old).rename(self._path / new)

    def sync(self) -> None:
        sync(self._path)

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
    """There is a database, but nothing in it: its role is making it, or was stopped while it
    did.
    """


class _Database:
    """A `Ledger` in SQLite. Each row has a checksum, which is compared whenever the row is read."""

    def __init__(self, path: Path, begin: bool, read_only: bool) -> None:
        self._path = path
        self._has_sums = True
        file = path / "store.sqlite"
        if read_only and not file.is_file():
            raise RecordError(f"there is no store at {path}")
        self._db = _connected(file, read_only)
        try:
            self._prepare(begin, read_only)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, begin: bool, read_only: bool) -> None:
        db = self._db
        if not read_only:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'fact'").fetchone():
            if read_only:
                raise _NotMade(
                    f"the store {self._path} is empty: its role has just begun, or it was damaged"
                )
            self._make(begin)
        (version,) = db.execute("SELECT value FROM fact WHERE key = 'version'").fetchone()
        if version not in (str(OLDER), str(VERSION)):
            raise RecordError(
                f"{self._path} is a store of version {version}; this fedbcd reads versions {OLDER}"
                f" and {VERSION}"
            )
        self._has_sums = version == str(VERSION)
        if not read_only:
            self._db.executescript(_ARCHIVE)
            self._check_whole()
            if not self._has_sums:
                self._add_checksums()

    def _check_whole(self) -> None:
        """Refuse a database that SQLite finds damaged, or that lacks transitions."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        first, last, count = self._db.execute(
            "SELECT MIN(number), MAX(number), COUNT(*) FROM transition"
        ).fetchone()
        if found == "ok" and count and count != last - first + 1:
            found = f"it has {count} of the transitions {first} to {last}"
        packed = self._db.execute("SELECT first, last FROM archive ORDER BY first").fetchall()
        starts = [0, *(there + 1 for _, there in packed)]
        if found == "ok" and [*(each for each, _ in packed), first or 0] != starts:
            found = f"the transitions before {first} are not all in its archive"
        if found != "ok":
            raise RecordError(f"the store {self._path} is damaged ({found}); restore a backup")

    def _add_checksums(self) -> None:
        """To a store of 0.1.0, which had none."""
        db = self._db
        db.executescript(f"BEGIN IMMEDIATE; {_ADD_CHECKSUMS}")
        db.execute("UPDATE fact SET value = ? WHERE key = 'version'", (str(VERSION),))
        for table, columns in _COLUMNS.items():
            if table == "archive":
                continue  # made with them
            rows = db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
            sums = [(_sum(table, row), row[0]) for row in rows]
            db.executemany(f"UPDATE {table} SET sum = ? WHERE {columns[0]} = ?", sums)
        db.execute("COMMIT")
        self._has_sums = True

    def _make(self, begin: bool) -> None:
        """A new store; never where an old one has lost its database, since the tensors that are
        left would be swept.
        """
        if any((self._path / "tensors").iterdir()):
            raise RecordError(
                f"{self._path} has tensors but an empty store.sqlite: it was damaged; restore a"
                " backup"
            )
        if not begin:
            raise NoStore(self._path)
        self._db.executescript(f"BEGIN; {_SCHEMA} {_ADD_CHECKSUMS} {_ARCHIVE}")
        self._put("fact", [("version", str(VERSION)), ("id", secrets.token_hex(16))])
        self._db.execute("COMMIT")
        for folder in (self._path, self._path.parent):
            sync(folder)

    def tensors(self) -> dict[str, tuple[str, bytes]]:
        return {name: (file, digest) for name, file, digest in self._rows("tensor")}

    def facts(self) -> dict[str, str]:
        return dict(self._rows("fact"))

    def length(self) -> int:
        (last,) = self._db.execute("SELECT MAX(number) FROM transition").fetchone()
        return 0 if last is None else int(last) + 1

    def tail(self, number: int | None, time: float, line: tuple[int, Transition] | None) -> Tail:
        """See `read_tail`."""
        self._db.execute("BEGIN")  # one look, whatever its role does meanwhile
        try:
            length = self.length()
            place = 0 if time == -math.inf else self._place(number, time, line)
            if place >= 0:
                return Tail(length, [*self.transitions(place)], is_same=True)
            return Tail(
                length, [step for step in self.transitions() if step.time > time], is_same=False
            )
        finally:
            self._db.execute("COMMIT")

    def _place(self, number: int | None, time: float, line: tuple[int, Transition] | None) -> int:
        """The number after that of the transition that is looked for; -1: it is not there."""
        if number is None:  # the line says where, or the time; what is packed is looked at last
            if line is not None and self._is_there(*line):
                return line[0]
            found = self._db.execute(
                "SELECT number FROM transition WHERE time = ?", (time,)
            ).fetchone()
            if found is not None:
                return int(found[0]) + 1
        since = 0 if number is None else max(number - 1, 0)
        same = (
            row[0] + 1
            for row in self._all(since)
            if row[1] == time and number in (None, row[0] + 1)
        )
        place = next(same, -1)
        return line[0] if place < 0 and line is not None and self._is_there(*line) else place

    def _is_there(self, number: int, line: Transition) -> bool:
        """Whether a line is of transition `number - 1`. Its time may be another there, and other
        transitions may have the line's; its journal is left out.
        """
        row = next(self._all(number - 1), None)
        if row is None or row[0] != number - 1:
            return False
        there = _decoded(*row[1:])
        return (there.event, there.commands) == (line.event, line.commands)

    def transitions(self, since: int = 0) -> Iterator[Transition]:
        for number, *row in self._all(since):
            try:
                step = _decoded(*row)
            except (ValueError, TypeError, RecursionError) as error:
                raise RecordError(
                    f"transition {number} of the store {self._path} is damaged ({error}); restore a"
                    " backup"
                ) from None
            yield step

    def _all(self, since: int) -> Iterator[tuple[Any, ...]]:
        """Rows of transitions from `since` on, also those that are packed."""
        due, packed = since, True
        while packed:
            packed = False
            for row in self._packed(due):
                due = row[0] + 1
                yield row
            for row in self._rows("transition", "WHERE number >= ? ORDER BY number", (due,)):
                packed = row[0] != due  # its role has packed some more of them meanwhile
                if packed:
                    break
                due += 1
                yield row

    def _packed(self, since: int) -> Iterator[tuple[Any, ...]]:
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'archive'").fetchone():
            return  # of 0.1.0
        for _, _, packed in self._rows("archive", "WHERE last >= ? ORDER BY first", (since,)):
            yield from (row for row in _unpacked(packed) if row[0] >= since)

    def _pack(self, before: int) -> None:
        """Put the transitions before this one into the archive."""
        rows = [*self._rows("transition", "WHERE number < ? ORDER BY number", (before,))]
        parts = [rows[k : k + PACKED] for k in range(0, len(rows), PACKED)]
        self._put("archive", [(part[0][0], part[-1][0], _pack_rows(part)) for part in parts])
        self._db.execute("DELETE FROM transition WHERE number < ?", (before,))

    def _rows(
        self, table: str, which: str = "", values: tuple[float, ...] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of a table without their checksums, which must be right."""
        columns = ", ".join((*_COLUMNS[table], "sum" if self._has_sums else "NULL"))
        try:
            for *row, there in self._db.execute(f"SELECT {columns} FROM {table} {which}", values):
                if self._has_sums and there != _sum(table, row):
                    raise RecordError(
                        f"{table} {row[0]!s:.80} of the store {self._path} is damaged: its"
                        " checksum is not the one that was recorded; restore a backup"
                    )
                yield tuple(row)
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise RecordError(
                f"the store {self._path} is damaged ({error}); restore a backup"
            ) from None

    def _put(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * (len(_COLUMNS[table]) + 1))
        verb = "INSERT" if table == "transition" else "INSERT OR REPLACE"
        self._db.executemany(
            f"{verb} INTO {table} VALUES ({marks})", [(*row, _sum(table, row)) for row in rows]
        )

    def commit(
        self,
        number: int,
        steps: Sequence[Transition],
        facts: Mapping[str, str],
        saved: Saved,
        dropped: Collection[str],
    ) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._put("tensor", [(name, file, digest) for name, (file, digest) in saved.items()])
        self._db.executemany("DELETE FROM tensor WHERE name = ?", [(name,) for name in dropped])
        self._put("fact", [*facts.items()])
        self._put("transition", [(number + k, *_encoded(step)) for k, step in enumerate(steps)])
        if "snapshot" in facts and steps:
            self._pack(number)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def read_tail(
    path: Path, number: int | None, time: float, line: tuple[int, Transition] | None = None
) -> Tail:
    """What a store has after its transition `number - 1`, which happened at `time`; its role may be
    running.

    Without `number` the place is found by the time; where that is another one, by a `line` and how
    many of this store there were with it. If that transition is not there any more, the store is
    another, or an old copy of it; then all transitions after that time are given.
    """
    if not (path / "store.sqlite").is_file():
        return Tail(0, [], time == -math.inf)
    try:
        database = _Database(path, begin=False, read_only=True)
        try:
            return database.tail(number, time, line)
        finally:
            database.close()
    except _NotMade:
        return Tail(0, [], time == -math.inf)
    except sqlite3.Error as error:
        raise RecordError(
            f"the store {path} cannot be read ({error}); is its disk full, or is it damaged?"
        ) from None


def _connected(file: Path, read_only: bool) -> sqlite3.Connection:
    """To a database; who only looks changes nothing, and may look at a medium that is read-only."""
    how = {"isolation_level": None, "check_same_thread": False}
    if not read_only:
        return sqlite3.connect(file, **how)  # type: ignore[arg-type]
    place = f"file:{quote(str(file.absolute()))}?mode=ro"
    database = sqlite3.connect(place, uri=True, **how)  # type: ignore[arg-type]
    try:
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1")
    except sqlite3.OperationalError:
        if file.with_name(f"{file.name}-wal").exists():
            return database
        database.close()  # nobody writes to it, and the files that readers share cannot be made
        return sqlite3.connect(f"{place}&immutable=1", uri=True, **how)  # type: ignore[arg-type]
    except sqlite3.DatabaseError:
        pass  # whoever reads finds the same
    return database


def _sum(table: str, row: Sequence[Any]) -> bytes:
    """A checksum of a row, with its place and the kinds of its values."""
    return hashlib.blake2b(repr((table, *row)).encode(), digest_size=8).digest()


def _pack_rows(rows: Sequence[tuple[Any, ...]]) -> bytes:
    return lzma.compress(json.dumps(rows, separators=(",", ":")).encode(), preset=1)


def _unpacked(packed: bytes) -> Iterator[tuple[Any, ...]]:
    try:
        return map(tuple, json.loads(lzma.decompress(packed)))
    except lzma.LZMAError as error:
        raise ValueError(error) from None


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise RecordError(
            f"another process uses the store {path}; stop it, or give this one a folder of its own"
        ) from None
    return handle


def _encoded(step: Transition) -> tuple[float, str, str, str]:
    commands = json.dumps([encode(command) for command in step.commands], separators=(",", ":"))
    return step.time, step.actor, json.dumps(encode(step.event), separators=(",", ":")), commands


def _decoded(time: float, actor: str, event: str, commands: str) -> Transition:
    happened, ordered = decode(json.loads(event)), [decode(data) for data in json.loads(commands)]
    known = tuple(command for command in ordered if isinstance(command, Command))
    if not isinstance(happened, Event) or len(known) < len(ordered):
        raise ValueError("an event and commands are expected")
    return Transition(time, actor, happened, known)
