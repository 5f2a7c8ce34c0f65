"""Asking a role how it is doing, over its health port; blocking, without a thread."""

import contextlib
import http.client
import json
import os
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20  # of an answer
TIMEOUT_S = 2.0


def get(address: str, path: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """What a role answers at its health address, host:port."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(MOST_BYTES)
    finally:
        connection.close()


def ask_health(folder: Path, path: str = "/status", timeout_s: float = TIMEOUT_S) -> bytes | None:
    """What the role whose store is in `folder` answers; None: it does not run, or does not answer
    in time.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
        port = int(json.loads((folder / "health.json").read_text())["port"])
        return get(f"127.0.0.1:{port}", path, timeout_s)
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
