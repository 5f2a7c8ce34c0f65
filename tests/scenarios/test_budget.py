"""`make test` counts the CPU time of all that it starts, and holds its budget."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import budget

BURN = "import time\nwhile time.process_time() < 0.6: pass"
BURNING = f"subprocess.Popen([sys.executable, '-c', {BURN!r}])"


def python(code: str) -> str:
    """A statement that runs this in a Python of its own, to its end."""
    return f"subprocess.run([sys.executable, '-c', {'import signal, subprocess, sys; ' + code!r}])"


CHILD = f"{BURNING}.wait()"
ORPHAN = python(BURNING)
FORGOTTEN = python(f"signal.signal(signal.SIGCHLD, signal.SIG_IGN); {BURNING}.wait()")
STAYS = "subprocess.Popen(['sleep', '600'], start_new_session=True)"


def run(
    folder: Path, body: str, most: float = 60.0, patience: float = 300.0
) -> tuple[int, float, str]:
    """Status, seconds counted and what is said of a suite with one test."""
    (folder / "test_one.py").write_text(
        f"import subprocess, sys\n\n\ndef test_one():\n    {body}\n"
    )
    script = (
        f"import sys, budget; budget.EVERY_S, budget.PATIENCE_S = 0.05, {patience}\n"
        f"budget.TABLE = budget.Path({str(folder / 'cpu.txt')!r})\n"
    )
    script += (
        f"budget.BUDGETS_S = {{'tests': {most}}}; sys.exit(budget.run(['-p', 'no:cacheprovider',"
        f" '-q', {str(folder)!r}]))"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(budget.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=here, check=False
    )
    said = done.stdout.partition("CPU time: ")[2]
    return done.returncode, float(said.split()[0]), done.stdout + done.stderr


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What a suite takes that does nothing."""
    return run(tmp_path_factory.mktemp("nothing"), "pass")[1]


@pytest.mark.parametrize("body", [CHILD, ORPHAN, FORGOTTEN], ids=["child", "orphan", "forgotten"])
def test_every_process_below_a_test_is_counted(tmp_path: Path, nothing: float, body: str) -> None:
    """Also the child of a parent that has ended, and of one that ignores SIGCHLD, whose usage the
    kernel passes to nobody.
    """
    status, counted, said = run(tmp_path, body)
    assert status == 0, said
    assert counted - nothing > 0.4, said
    assert "Within the budget" in said


def test_more_than_the_budget_fails_and_names_the_files(tmp_path: Path) -> None:
    status, _, said = run(tmp_path, ORPHAN, most=0.5)
    assert status == 1
    assert "1 passed" in said
    assert re.search(r"most in \S*test_one\.py", said)
    assert "Over the budget: tests may take" in said


def test_a_failed_test_keeps_its_status_and_a_process_left_behind_fails(tmp_path: Path) -> None:
    assert run(tmp_path, "sys.exit(3)")[0] == 1
    status, _, said = run(tmp_path, STAYS, patience=0.5)
    assert status == 1
    assert "left behind" in said
    assert re.search(r"\(sleep 600 \) of \S*test_one\.py", said)


def test_the_budget_is_that_of_what_was_asked_for() -> None:
    assert budget.budget_of(["-n", "auto"]) == ("tests", 720.0)
    assert budget.budget_of(["-n", "auto", "tests/unit"]) == ("tests/unit", 60.0)
    assert budget.budget_of(["tests/unit/test_draws.py::test_a", "-x"]) == ("tests/unit", 60.0)
    assert budget.budget_of(["tests/unit", "tests/paper"]) == ("tests", 720.0)
