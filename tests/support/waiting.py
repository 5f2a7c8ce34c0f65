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
LOOK_S, LONGEST_S = 0.02, 0.5


def wait_for(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """Until the condition gives something true; what it gave."""
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        assert waited < limit_s, _missing(condition, what, limit_s)
        time.sleep(_pause(waited))
    return found


async def eventually(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """`wait_for` where others go on meanwhile."""
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        assert waited < limit_s, _missing(condition, what, limit_s)
        await asyncio.sleep(_pause(waited) / 4)
    return found


def _pause(waited: float) -> float:
    """A twentieth of what it has waited: who waits long need not look often."""
    return min(max(LOOK_S, waited / 20), LONGEST_S)


def _missing(condition: Callable[[], Any], what: str, limit_s: float) -> str:
    return f"not within {limit_s:.0f} s: {what or inspect.getsource(condition).strip()}"


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a process has said, when it has ended."""
    return process.communicate(timeout=LIMIT_S)
