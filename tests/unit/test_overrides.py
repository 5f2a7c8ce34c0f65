"""What the command line says goes before what a job file says, in every run of it."""

from pathlib import Path
from typing import Any

from fedbcd.cli.overrides import override


def test_flags_go_before_the_file_in_every_run_of_it() -> None:
    table: dict[str, Any] = {
        "data": {"name": "mnist", "folder": "a"},
        "run": {"until_clock": 9.0, "seed": 1},
        "runs": [{"data": {"folder": "b", "samples": 20}, "run": {"rounds": 7}}, {"title": "two"}],
    }
    override(table, rounds=3, seed=2, folder=Path("c"))
    assert table == {
        "data": {"name": "mnist", "folder": "c"},
        "run": {"rounds": 3, "seed": 2},
        "runs": [{"data": {"samples": 20}, "run": {}}, {"title": "two"}],
    }


def test_flags_that_are_not_given_change_nothing() -> None:
    table: dict[str, Any] = {"data": {"name": "digits"}}
    override(table)
    assert table == {"data": {"name": "digits"}}


def test_a_section_that_is_no_table_is_left_for_the_parser_to_refuse() -> None:
    table: dict[str, Any] = {"data": "digits", "runs": "none"}
    override(table, folder=Path("c"))
    assert table["data"] == "digits"
