"""Runs in a folder, followed while someone looks at them. Nothing is read that nobody asked for."""

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbcd.errors import FedBCDError, RecordError
from fedbcd.record.names import CHECKPOINT, HISTORY, LOG, MODELS
from fedbcd.record.runfolder import is_at_work
from fedbcd.report.advice import advice
from fedbcd.report.baseline import best_baseline, job_folders, modified
from fedbcd.report.first import first_screen
from fedbcd.report.follow import LogFollower
from fedbcd.report.planning import Planned, arrivals_of
from fedbcd.report.protocol_view import device_page, timeline_view
from fedbcd.report.runs import Extras, find_runs, read_extras
from fedbcd.report.standing import RunStanding
from fedbcd.report.view import RunRecord, devices_view, record_of, run_view, together

# phases in a stretch that someone looks at, and in what is sent once a second: the latest, and
# shares of time for the rest
PHASES, LATEST = 3_000, 100
LOG_BYTES_AT_ONCE = (
    1 << 25
)  # bytes of a log that are read for one answer; the rest comes with the next ones
MOST_PICKED = 8
FILES = (CHECKPOINT, MODELS, HISTORY)  # beside the log


class Watched:
    """One run that is looked at."""

    def __init__(self, key: str, folder: Path) -> None:
        self.key, self.folder = key, folder
        self.lock = threading.Lock()
        self._follower = LogFollower(folder / LOG)
        self._record: RunRecord | None = None
        self._extras, self._still = Extras(), dict[str, Any]()
        self._stamp: tuple[Any, ...] = (None,)
        self._others: list[Path] = []
        self._view: dict[str, Any] = {}
        self._planned = Planned()

    def refresh(self, others: Sequence[Path] | None = None) -> tuple[Any, ...]:
        """Read on; what tells this state from others. `others` are the folders of runs that are
        looked at with it (None: as before).
        """
        with self.lock:
            self._follower.poll(LOG_BYTES_AT_ONCE)
            self._others = self._others if others is None else list(others)
            compared = tuple(
                (folder, modified(folder / MODELS))
                for folder in [*self._others, *job_folders(self.folder)]
            )
            beside = (*(modified(self.folder / name) for name in FILES), compared)
            stamp = (self._follower.version, self._follower.notice, is_at_work(self.folder), beside)
            if stamp != self._stamp:
                fresh = beside != self._stamp[-1]
                self._extras = read_extras(self.folder) if fresh else self._extras
                self._record = record = record_of(self.folder, self._follower, self._extras)
                if fresh:
                    folders = [folder for folder, _ in compared]
                    found = best_baseline(record.identity, folders, self._extras.judged)
                    self._still = devices_view(record, found)
                self._view = run_view(record, self.key, LATEST, self._still)
                self._view["advice"] = advice(self._view)
                self._stamp = stamp
            return stamp

    def view(self) -> dict[str, Any]:
        with self.lock:
            waiting = self._follower.unread
            return {**self._view, "unread": waiting if self._follower.notice is None else 0}

    def timeline(self, begin: float, end: float) -> dict[str, Any]:
        with self.lock:
            found = self._follower.timeline
            return {} if found is None else timeline_view(found, begin, end, PHASES)

    def devices(self, sort: str, down: bool, start: int, only: str) -> dict[str, Any]:
        with self.lock:
            record = self._record
            if record is None or record.timeline is None:
                return {"columns": [], "total": 0, "start": 0, "rows": []}
            return device_page(record.timeline, record.homes, sort, down, start, 20, only)

    def plan(self) -> dict[str, Any] | None:
        """Round times for every B from this run's own arrivals; made anew now and then while the
        run goes on.
        """
        with self.lock:
            arrivals = None if self._record is None else arrivals_of(self._record)
        return self._planned.plan(arrivals)


class Library:
    """The runs below some folders."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._lock = threading.Lock()
        self._known: dict[str, Path] = {}
        self._watched: dict[str, Watched] = {}
        self._heads: dict[Path, tuple[tuple[float, int], dict[str, Any]]] = {}

    def runs(self) -> list[dict[str, Any]]:
        """Every run, the latest first: what the list shows, from the first and the last line of
        each log.
        """
        with self._lock:
            self._known = {_key(folder): folder for folder in self._folders()}
            found = [{"key": key, **self._head(folder)} for key, folder in self._known.items()]
        for run in found:
            run["state"] = (
                "finished"
                if run["finished"]
                else "goes on"
                if is_at_work(Path(run["folder"]))
                else "stopped"
            )
        return sorted(found, key=lambda run: -float(run["modified"]))

    def _folders(self) -> list[Path]:
        folders: list[Path] = []
        for path in self.paths:
            try:
                folders += find_runs([path])
            except FedBCDError:
                continue  # nothing there yet
        return list(dict.fromkeys(folders))

    def _head(self, folder: Path) -> dict[str, Any]:
        log = folder / LOG
        try:
            stat = log.stat()
        except OSError:
            return {"name": folder.name, "folder": str(folder), "modified": 0.0, "finished": False}
        stamp = (stat.st_mtime, stat.st_size)
        if folder not in self._heads or self._heads[folder][0] != stamp:
            self._heads[folder] = (
                stamp,
                _read_head(folder, stat.st_size) | {"modified": stat.st_mtime},
            )
        return self._heads[folder][1]

    def watched(self, keys: Sequence[str]) -> list[Watched]:
        """The runs of these keys, as far as there are any."""
        if any(key not in self._known for key in keys):
            self.runs()
        with self._lock:
            known = [key for key in keys if key in self._known][:MOST_PICKED]
            for key in known:
                if key not in self._watched:
                    self._watched[key] = Watched(key, self._known[key])
            return [self._watched[key] for key in known]

    def standing(self, folder: Path) -> RunStanding | None:
        """How the run in this folder stands; None where there is none that can be read."""
        try:
            for one in self.watched([_key(folder)]):
                one.refresh()
                return RunStanding(*(one.view()["summary"][name] for name in ("state", "standing")))
        except RecordError:
            pass
        return None

    def view(self, keys: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The views of these runs, and a word that changes whenever they do."""
        runs, stamps, notices = [], [], []
        watched = self.watched(keys)
        for one in watched:
            try:
                stamps.append((one.key, one.refresh([other.folder for other in watched])))
                runs.append(one.view())
            except RecordError as error:
                stamps.append((one.key, (str(error),)))
                notices.append(str(error))
        beside = together(runs)
        title = ", ".join(run["name"] for run in runs[:3]) or "No run is picked"
        view = {
            "kind": "dashboard",
            "title": title,
            "runs": runs,
            "notices": notices,
            "first": first_screen(runs) if runs else None,
            **beside,
        }
        unread = [run["unread"] for run in runs]
        return hashlib.sha256(repr((stamps, unread)).encode()).hexdigest()[:16], view


def _key(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]


def _read_head(folder: Path, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": folder.name, "folder": str(folder), "finished": False}
    try:
        with (folder / LOG).open("rb") as file:
            header = json.loads(file.readline(1 << 22))
            file.seek(max(0, size - 4096))
            found["finished"] = file.read().splitlines()[-1].startswith(b'{"end":')
        identity, job = header["identity"], header.get("job") or {}
        found |= {"name": str(job.get("title") or folder.name), "seed": identity["seed"]}
        found |= {key: identity[key]["name"] for key in ("algorithm", "cloud")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        found["name"] = f"{folder.name} (its log cannot be read)"
    return found
