"""An event log that may still grow: each `poll` folds what has been written since the last one."""

import json
import os
from pathlib import Path

from fedbcd.errors import RecordError
from fedbcd.record.eventlog import VERSION
from fedbcd.record.timeline import MOST_VISITS, Timeline

READ_BYTES = 1 << 22  # that are read at once
REMEMBERED_BYTES = (
    64  # bytes before the place that was read last, by which a rewritten log is noticed
)


class LogFollower:
    """Follows one log. `timeline` is None until its first line is whole; `notice` says what is
    wrong with it, if anything is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.timeline: Timeline | None = None
        self.notice: str | None = None
        self.version = 0  # goes up with every line
        self._place = 0
        self._before = b""

    def poll(self, most_bytes: int | None = None) -> bool:
        """Read on, `most_bytes` at most; whether anything was new."""
        try:
            with self.path.open("rb") as file:
                if not self._is_same(file.fileno()):
                    self._reset()
                file.seek(self._place)
                return self._read(file.fileno(), most_bytes)
        except FileNotFoundError:
            raise RecordError(
                f"there is no event log at {self.path}; a run folder holds one as events.jsonl"
            ) from None
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}") from None

    @property
    def unread(self) -> int:
        try:
            return max(0, self.path.stat().st_size - self._place)
        except OSError:
            return 0

    def _is_same(self, file: int) -> bool:
        """A resumed run cuts its log back to the last checkpoint and goes on: what was read is then
        read again.
        """
        if os.fstat(file).st_size < self._place:
            return False
        return os.pread(file, len(self._before), self._place - len(self._before)) == self._before

    def _read(self, file: int, most_bytes: int | None) -> bool:
        before, budget = self.version, most_bytes
        while self.notice is None and (budget is None or budget > 0):
            chunk = os.read(file, READ_BYTES)
            whole = chunk.rfind(b"\n") + 1
            if not whole:
                if len(chunk) == READ_BYTES:
                    self.notice = (
                        f"{self.path} has a line of more than {READ_BYTES} bytes, so it is no event"
                        " log"
                    )
                break
            self._take(chunk[:whole])
            self._place += whole
            self._before = chunk[max(0, whole - REMEMBERED_BYTES) : whole]
            os.lseek(file, self._place, os.SEEK_SET)
            budget = None if budget is None else budget - whole
        return self.version != before

    def _take(self, chunk: bytes) -> None:
        for raw in chunk.splitlines():
            self.version += 1
            try:
                if self.timeline is None:
                    self.timeline = Timeline(self._header(raw), MOST_VISITS)
                else:
                    self.timeline.take(raw)
            except (
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                OverflowError,
                RecursionError,
                IndexError,
            ) as error:
                self.notice = (
                    f"{self.path} line {self.version} is damaged ({error}); shown is what comes"
                    " before it"
                )
                return

    def _header(self, raw: bytes) -> dict[str, object]:
        header = json.loads(raw)
        if not (isinstance(header, dict) and "fedbcd_log" in header):
            raise ValueError("its first line has no 'fedbcd_log' field, so it is no event log")
        if header["fedbcd_log"] != VERSION:
            raise ValueError(
                f"it is of version {header['fedbcd_log']}; this fedbcd reads version {VERSION}"
            )
        return header
