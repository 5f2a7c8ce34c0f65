"""Property tests: the same examples in every run of the suite; new ones, which are kept when they
fail, where they are asked for.
"""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

from support import exploring

TESTS = Path(exploring.__file__).parents[1]
PROPERTY = """
from support import exploring
from hypothesis import given, strategies as st

@exploring.examples(5)
@given(number=st.integers(0, 10**9))
def test_one(number):
    with open("numbers.txt", "a") as file:
        file.write(f"{number}\\n")
    assert number < 1000
"""


def numbers(folder: Path, seed: str | None) -> tuple[list[str], str]:
    """What a test that fails was given, and what was said."""
    (folder / "test_one.py").write_text(PROPERTY)
    (folder / "numbers.txt").unlink(missing_ok=True)
    here = {name: value for name, value in os.environ.items() if name != "FEDBCD_EXPLORE"} | {
        "PYTHONPATH": str(TESTS)
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.exploring",
        str(folder),
    ]
    if seed is not None:
        here["FEDBCD_EXPLORE"] = seed
    done = subprocess.run(
        command, capture_output=True, text=True, env=here, check=False, cwd=folder
    )
    return (folder / "numbers.txt").read_text().split(), done.stdout


def test_the_suite_chooses_the_same_examples_every_time(tmp_path: Path) -> None:
    first, said = numbers(tmp_path, None)
    assert "test_one(" in said
    assert numbers(tmp_path, None)[0] == first
    assert not (tmp_path / "found").exists()


def test_exploring_prints_its_seed_and_keeps_what_it_finds(tmp_path: Path) -> None:
    first, said = numbers(tmp_path, "7")
    assert "again with FEDBCD_EXPLORE=7" in said
    assert "@reproduce_failure" in said
    assert first != numbers(tmp_path, None)[0]
    again, _ = numbers(tmp_path, "8")
    assert again[0] == first[-1], "what was found is tried first"


def test_no_file_chooses_by_itself() -> None:
    """Settings come from the profile, through `examples`."""
    if exploring.SEED is None:
        assert settings.default is not None
        assert settings.default.derandomize
        assert settings.default.database is None
        assert settings.default.deadline is None
    imports = [
        line
        for path in TESTS.glob("*/test_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("from hypothesis")
    ]
    assert sum("settings" in line for line in imports) == 1, "but for this file"
