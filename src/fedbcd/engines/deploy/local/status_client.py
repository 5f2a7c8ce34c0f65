"""Asking a role how it is doing, over its health port; blocking, without a thread."""

import contextlib
import http.client
import json
import os
from pathlib import Path
from typing import Any


def ask_health(folder: Path, path: str = "/status", timeout_s: float = 2.0) -> bytes | None:
    """What the role whose store is in `folder` answers; None: it does not run, or does not answer
    in time.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
        port = int(json.loads((folder / "health.json").read_text())["port"])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()
    return None


def pid_in(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        pid = int(json.loads((folder / "health.json").read_text())["pid"])
        os.kill(pid, 0)
        return pid
    return None


def ask_status(folder: Path) -> dict[str, Any] | None:
    answer = ask_health(folder)
    with contextlib.suppress(ValueError):
        found = json.loads(answer) if answer is not None else None
        return found if isinstance(found, dict) else None
    return None
