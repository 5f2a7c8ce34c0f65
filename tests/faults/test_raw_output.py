"""docs/results/reliability: what the long tests printed, and docs/reliability.md says of it."""

import re

import pytest

from faultsim import raw

KEPT = sorted(raw.RAW.glob("*.txt"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_was_kept_is_of_a_clean_tree_and_held(path: raw.Path) -> None:
    head, lines = raw.parts_of(path)
    assert re.fullmatch(r"[0-9a-f]{7,40}", head["commit"])
    assert head["exit status"] == "0"
    assert head["command"].split()[2] == raw.PARTS[path.stem][0].split()[0]
    assert lines


def test_the_page_says_what_the_files_say() -> None:
    """`python -m faultsim.raw --list` prints the table; a part that is run again fills it."""
    text = raw.PAGE.read_text()
    assert raw.filled(text) == text
    for path in KEPT:
        assert f"(results/reliability/{path.name})" in text
