"""Waiting for what a test needs, and for nothing else: no test may rest on how fast a machine is.

The limit is for what never comes, so it only matters when something is broken. What must not happen
cannot be waited for: there a test looks for a moment, and a slow machine makes it less likely to
find a fault, but never red.
"""

import asyncio
import inspect
import subprocess
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 180.0
LOOK_S = 0.02


def wait_for(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """Until the condition gives something true; what it gave."""
    until = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < until, _missing(condition, what, limit_s)
        time.sleep(LOOK_S)
    return found


async def eventually(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """`wait_for` where others go on meanwhile."""
    until = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < until, _missing(condition, what, limit_s)
        await asyncio.sleep(LOOK_S / 4)
    return found


def _missing(condition: Callable[[], Any], what: str, limit_s: float) -> str:
    return f"not within {limit_s:.0f} s: {what or inspect.getsource(condition).strip()}"


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a process has said, when it has ended."""
    return process.communicate(timeout=LIMIT_S)
