"""Structured logs: one JSON object per line on stderr, and never a secret."""

import contextlib
import json
import re
import sys
import threading
import time
from typing import IO, Any

LEVELS = ("debug", "info", "warning", "error")
SECRET = re.compile(r"(?i)token|secret|password|private|(^|_)key($|_)")
PEM = re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|$)", re.DOTALL)


class Journal:
    """Writes what a role has to say: `journal.info("phase_opened", phase=3)`."""

    def __init__(self, actor: str, level: str = "info", stream: IO[str] | None = None) -> None:
        self.actor = actor
        self._least = LEVELS.index(level)
        self._stream = stream
        self._lock = threading.Lock()

    def debug(self, what: str, **fields: Any) -> None:
        """For those who look for a fault."""
        self._say("debug", what, fields)

    def info(self, what: str, **fields: Any) -> None:
        """What an operator may want to know."""
        self._say("info", what, fields)

    def warning(self, what: str, **fields: Any) -> None:
        """What an operator should look at some time."""
        self._say("warning", what, fields)

    def error(self, what: str, **fields: Any) -> None:
        """What an operator should look at now."""
        self._say("error", what, fields)

    def _say(self, level: str, what: str, fields: dict[str, Any]) -> None:
        if LEVELS.index(level) < self._least:
            return
        line = {
            "time": _now(),
            "level": level,
            "actor": self.actor,
            "what": what,
            **{k: _clean(k, v) for k, v in fields.items()},
        }
        text = json.dumps(line, default=str)
        with (
            self._lock,
            contextlib.suppress(OSError),
        ):  # a full disk that logs lie on is no concern of the role
            print(text, file=self._stream or sys.stderr, flush=True)


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def _clean(name: str, value: Any) -> Any:
    """A value that may be written down: not a key, not a token, not a PEM block."""
    if SECRET.search(name):
        return "***"
    return PEM.sub("***", value) if isinstance(value, str) else value
