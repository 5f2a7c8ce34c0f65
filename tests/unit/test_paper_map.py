"""docs/paper_map.md tells the truth: no blank cell, every name exists, every test exists, every
line of the algorithms is there.
"""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
HEADER = ["paper", "code", "test", "departs"]
TABLE_LINES = [line for line in PAGE.splitlines() if line.startswith("|")]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE_LINES
    if not re.fullmatch(r"[|\-: ]+", line)
]
ENTRIES = [row for row in ROWS if row != HEADER]


@cache
def _names(path: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    )


def _in_backticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _resolve(name: str) -> object:
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            # the field of a dataclass without a default is no attribute of the class
            found = (
                found.__annotations__[part]
                if part in getattr(found, "__annotations__", {})
                else getattr(found, part)
            )
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("row", ENTRIES, ids=lambda row: row[0][:40])
def test_a_row_of_the_map_is_full_and_true(row: list[str]) -> None:
    assert len(row) == len(HEADER)
    assert all(row)
    assert all(_in_backticks(cell) for cell in row[1:3])
    for name in _in_backticks(row[1]):
        _resolve(name)
    for reference in _in_backticks(row[2]):
        path, _, name = reference.partition("::")
        assert name in _names(ROOT / path), reference


@pytest.mark.parametrize(("algorithm", "lines"), [(1, 25), (2, 29)])
def test_every_line_of_both_algorithms_is_in_the_map(algorithm: int, lines: int) -> None:
    spans = re.findall(rf"^\| Algorithm {algorithm}, lines? (\d+)(?:-(\d+))?", PAGE, re.M)
    assert sorted(
        k for first, last in spans for k in range(int(first), int(last or first) + 1)
    ) == [*range(1, lines + 1)]
