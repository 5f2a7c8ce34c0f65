"""Where the CPU time of a running process goes, by cause: a thread looks at all Python threads a
hundred times a second.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

LOOK_S = 0.01
CAUSES = {  # part of a file's path -> cause; the innermost frame that has one decides
    "safetensors": "store and sync",
    "roles/store": "store and sync",
    "roles/filestore": "store and sync",
    "record/eventlog": "store and sync",
    "links/codec": "encode and decode",
    "roles/checks": "checks",
    "protocol/senders": "checks",
    "processes/logs": "logs and metrics",
    "processes/metrics": "logs and metrics",
    "prometheus_client": "logs and metrics",
    "fedbcd/algorithm": "algorithm and machines",
    "fedbcd/protocol": "algorithm and machines",
    "fedbcd/compute": "algorithm and machines",
    "roles/server": "algorithm and machines",
    "roles/contributions": "algorithm and machines",
    "roles/coordinator": "algorithm and machines",
    "roles/base": "algorithm and machines",
    "grpc": "event loop, with the Python side of gRPC",
    "links/connection": "links",
    "links/endpoint": "links",
    "links/listener": "links",
    "links/dialer": "links",
    "processes/event_queue": "event loop, with the Python side of gRPC",
    "processes/base": "event loop, with the Python side of gRPC",
    "asyncio": "event loop, with the Python side of gRPC",
    "faultsim": "this look",
}
NATIVE = "gRPC's own threads: TLS, HTTP/2, sockets"


def cause_of(frame: FrameType | None) -> str:
    """Of a stack."""
    for file in _files(frame):
        for part, cause in CAUSES.items():
            if part in file:
                return cause
    return "other"


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


class Causes(threading.Thread):
    """CPU seconds by cause, written to `file` once a second."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self._file = file
        self._seconds: Counter[str] = Counter()
        self._used: dict[int, float] = {}

    def run(self) -> None:
        """For ever."""
        began, told = time.process_time(), time.monotonic()
        while True:
            time.sleep(LOOK_S)
            for thread, frame in sys._current_frames().items():
                used = self._cpu(thread)
                self._seconds[cause_of(frame)] += used - self._used.get(thread, used)
                self._used[thread] = used
            if time.monotonic() > told + 1:
                told = time.monotonic()
                whole = time.process_time() - began
                rest = max(whole - sum(self._seconds.values()), 0.0)
                self._file.write_text(json.dumps({**self._seconds, NATIVE: rest}))

    def _cpu(self, thread: int) -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(thread))
        except OSError:  # it has ended
            return self._used.get(thread, 0.0)


def shares(file: Path) -> dict[str, float]:
    """Of what was seen, in order; the look itself is left out."""
    seen = json.loads(file.read_text())
    seen.pop("this look", None)
    whole = sum(seen.values()) or 1.0
    return {
        cause: round(seconds / whole, 3)
        for cause, seconds in sorted(seen.items(), key=lambda item: -item[1])
    }
