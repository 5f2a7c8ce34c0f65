"""Real processes: killed at named steps, and under chaos with TLS. The long forms are `make torture`."""

import json
import os
import subprocess
import sys
from typing import Any


def told(*arguments: str) -> list[dict[str, Any]]:
    """What a program of faultsim prints: one object a line."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_role_dies_at_a_step_and_the_models_are_the_same() -> None:
    calm, *killed = told("faultsim.killing")
    assert [run["role"] for run in killed] == ["coordinator", "server/0", "device/0"]
    assert all(run["good"] and run["digest"] == calm["digest"] and run["restarts"] == 1 for run in killed)


def test_chaos() -> None:
    """A few seconds of it: every kind of trouble once or more, TLS, the log through the reference model and a replay."""
    (found,) = told("faultsim.chaos", "--seconds", "12", "--seed", "1")
    assert found["replayed"]
    assert found["rounds"] > 2
    assert sum(found["troubles"].values()) >= 2
    print(found)
