"""Programs of faultsim in processes of their own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from support.forked import Forked

HERE = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """One thread, and the tests' own modules."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def told(*arguments: str) -> list[dict[str, Any]]:
    """What a program of faultsim prints: one object a line."""
    with Forked(
        [*arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        out, err = process.communicate()
    assert process.returncode == 0, out + err
    return [json.loads(line) for line in out.splitlines()]
