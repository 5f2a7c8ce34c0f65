"""`events.jsonl` of a deployment that goes on: it grows at its end only, and at the end of the run
it is the merged log.

A line is written once nothing can come before it any more: every role that runs says up to which
time its log is settled (`EventQueue.settled`), and one that is started again is told to begin after
the last line (`Deployment.not_before`). A role whose clock is wrong holds nobody up: what its peers
have heard of it is written before what they did with it, whatever its times (`Order`).
"""

import contextlib
import fcntl
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from fedbcd.engines.deploy.local.log_order import Order, in_order
from fedbcd.engines.deploy.local.merged_log import Merger
from fedbcd.engines.deploy.local.status_client import ask_status, pid_in
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.filestore import FileStore, Tail, read_tail
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Actor, number_of
from fedbcd.record.eventlog import LogReader, LogWriter, Transition, header_line, transition_line
from fedbcd.record.runfolder import lock

# how long to wait for another process that writes the log, whose lines the two would cut off and
# repeat: one that was killed leaves children, who end soon
ALONE_S = 10.0


class Settled(NamedTuple):
    """A role says how many events its log has, and that no later one is before `time`.

    One that is `ahead` counts, since it has recorded times far ahead of its clock: what it says of
    time holds nobody up.
    """

    time: float
    events: int
    ahead: bool = False

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> "Settled | None":
        time, events = status.get("settled"), status.get("events")
        if not (isinstance(time, int | float) and isinstance(events, int)):
            return None
        return cls(float(time), events, bool(status.get("counting")))


class StoreReader:
    """Follows the stores of some roles; each `fetch` looks only at what is new."""

    def __init__(self, folders: Mapping[Actor, Path]) -> None:
        self._folders = folders
        self._places: dict[
            Actor, tuple[int | None, float]
        ] = {}  # how many transitions were read, and when the last one was
        self._lines: dict[
            Actor, tuple[int, Transition]
        ] = {}  # how many were written down before, and the last one

    def begin_after(self, actor: Actor, number: int, line: Transition) -> None:
        """Leave out what was written down before: `number` transitions, of which `line` is the
        last.
        """
        self._places[actor], self._lines[actor] = (None, line.time), (number, line)

    def fetch(self, actor: Actor, settled: Settled | None = None) -> Tail:
        number, time = self._places.get(actor, (0, -math.inf))
        if settled is not None and settled.events == number:
            return Tail(number, [], True)
        tail = read_tail(self._folders[actor], number, time, self._lines.get(actor))
        if tail.steps:
            time = tail.steps[-1].time
            self._lines.pop(actor, None)
        self._places[actor] = (tail.length, time)
        return tail


class LogTail:
    """The logs of some stores as one, for somebody who looks on. Roles that run are asked how far
    they are; the others hold nobody back.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = {str(folder): folder for folder in folders}
        self._reader = StoreReader(self._folders)
        self._waiting: list[Transition] = []
        self._settled: dict[Actor, Settled] = {}

    def lines(self, wait: bool) -> list[bytes]:
        """The next lines; with `wait` only those before which no other can come any more."""
        running = self._ask() if wait else {}
        for key in self._folders:
            tail = self._reader.fetch(key, running.get(key))
            if not tail.is_same:
                raise RecordError(
                    f"the store {key} is not the one that was there before; start again"
                )
            self._waiting += tail.steps
        before = min((settled.time for settled in running.values()), default=math.inf)
        due = sorted((step for step in self._waiting if step.time < before), key=in_order)
        self._waiting = [step for step in self._waiting if step.time >= before]
        return [transition_line(step.time, step.actor, step.event, step.commands) for step in due]

    def _ask(self) -> dict[Actor, Settled]:
        running: dict[Actor, Settled] = {}
        for key, folder in self._folders.items():
            pid = pid_in(folder)
            if pid is None:
                self._settled.pop(key, None)
                continue
            status = ask_status(folder) or {}
            said = Settled.of(status) if status.get("pid") == pid else None
            self._settled[key] = running[key] = said or self._settled.get(
                key, Settled(-math.inf, -1)
            )
        return running


def stores_in(folder: Path) -> list[Path]:
    """The store that a folder is, or the stores that lie in it, as in `state` of `fedbcd up`."""
    if (folder / "store.sqlite").is_file():
        return [folder]
    found = sorted(
        path.parent
        for pattern in ("*/store.sqlite", "state/*/store.sqlite")
        for path in folder.glob(pattern)
    )
    if not found:
        raise RecordError(
            f"{folder} is no store of a role and holds none; a role keeps its store in"
            " deploy.folder, fedbcd up in DIR/state"
        )
    return found


class GrowingLog:
    """The log of a deployment in a folder, which one process writes. A log that is there already is
    gone on with.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        blueprint: Blueprint,
        folders: Mapping[Actor, Path],
    ) -> None:
        self.path = path
        self._folders = folders
        self._merger = Merger(blueprint)
        self._reader = StoreReader(folders)
        self._order = Order(blueprint.home_of, self._fetch)
        self._lock = lock(path.parent, ALONE_S)
        if self._lock is None:
            raise RecordError(
                f"another process writes {path}; stop the other 'fedbcd up' of this folder first"
            )
        try:
            keep = self._read_back(header)
            self._log = LogWriter(path, keep=keep) if keep else LogWriter(path, header)
        except BaseException:
            self._unlock()
            raise

    @property
    def clock(self) -> float:
        return self._merger.clock if self._merger.lines else -math.inf

    def _read_back(self, header: dict[str, Any]) -> int:
        """Take note of what was written before; its length without an end, or half a line. 0: there
        is nothing.
        """
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            first = file.readline()
            if first == header_line(header):
                return self._take_note(LogReader(self.path, unfinished=True))
            if not header_line(header).startswith(first):
                raise RecordError(
                    f"{self.path} is the log of another run, or of another version; move it away to"
                    " go on"
                )
        self.path.unlink(missing_ok=True)
        return 0

    def _take_note(self, reader: LogReader) -> int:
        last: dict[Actor, Transition] = {}
        lines: Counter[Actor] = Counter()
        for line in reader:
            self._merger.read(line)
            self._order.note(line)
            last[line.actor] = line
            lines[line.actor] += 1
        for actor, line in last.items():
            self._reader.begin_after(actor, lines[actor], line)
        keep = self.path.stat().st_size
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            for _ in [line for line in (reader.cut, reader.end) if line is not None]:
                keep = view.rfind(b"\n", 0, keep - 1) + 1
        return keep

    # ---------------------------------------------------------------------------------------------
    # growing
    def grow(self, settled: Mapping[Actor, Settled], until: float = math.inf) -> None:
        """Write what is certain by now. `settled` is what each role that runs says; the others do
        not run.

        If nobody runs, everything is written; it has happened `until` now.
        """
        for actor in self._folders:
            self._fetch(actor, settled.get(actor))
        before = min((each.time for each in settled.values() if not each.ahead), default=until)
        ahead = (
            [actor for actor, each in settled.items() if each.ahead] if settled else self._folders
        )
        self._write(self._order.due(before, ahead))

    def _fetch(self, actor: Actor, settled: Settled | None = None) -> None:
        tail = self._reader.fetch(actor, settled)
        self._order.add(actor, tail.steps)
        if tail.is_same:
            return
        if not actor.startswith("device/"):
            raise RecordError(
                f"the store of {actor} does not hold what is in {self.path}; restore its newest"
                " backup"
            )
        self._merger.lost(number_of(actor))

    def _write(self, due: list[Transition]) -> None:
        for step in due:
            for line in self._merger.take(step):
                self._log.append(line.time, line.actor, line.event, list(line.commands))
        if due:
            self._log.sync()

    # ---------------------------------------------------------------------------------------------
    # end
    def finish(self) -> dict[str, Any]:
        """After all roles have stopped for good: the rest, and how the run ended."""
        self.grow({})
        with self._stores() as stores:
            end = self._merger.end(stores)
        self._log.end(end)
        self._log.sync()
        return end

    @contextlib.contextmanager
    def _stores(self) -> Iterator[dict[Actor, FileStore]]:
        with ExitStack() as stack:
            found: dict[Actor, FileStore] = {}
            for actor, folder in self._folders.items():
                if (folder / "store.sqlite").exists():
                    found[actor] = FileStore(folder, read_only=True)
                    stack.callback(found[actor].close)
                elif not actor.startswith("device/"):
                    raise RecordError(
                        f"the store of {actor} is missing; without it the run cannot be put"
                        " together"
                    )
            yield found

    def close(self) -> None:
        self._log.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for children, who have the same handle
            os.close(self._lock)
            self._lock = None
