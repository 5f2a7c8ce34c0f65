"""What the command line shows: tables keep their digits whatever the width, brackets are shown,
and how much is said is a matter of options.
"""

import ast
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from fedbcd import cli
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.cli.kinds import MEANING, names_of
from fedbcd.cli.output import Grid, show, table_of
from fedbcd.cli.run import COMMANDS, app
from fedbcd.errors import ConfigError
from fedbcd.protocol.clouds import CLOUDS
from support.runs import fedbcd, write_job

SOURCE = Path(cli.__file__).parent
TITLE = "a rather long title [of a run] that says at great length what it is about"


def shown(table: Grid, width: int) -> str:
    screen = Console(file=io.StringIO(), width=width)
    show(table, screen)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


# ------------------------------------------------------------------------------------------------
# tables
@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_titles_are_cut_and_numbers_are_not(width: int) -> None:
    numbers = [f"{1234.56789 * k:.5f}" for k in range(1, 7)]
    table = table_of("run", *"abcde", "[f]", title="[a title]", titles=("run",))
    table.add_row(TITLE, *numbers)
    text = shown(table, width)
    assert all(number in text for number in numbers)
    assert "[a title]" in text
    assert "[f]" in text
    assert (TITLE in text) is (width == 200)
    assert ("…" in text) is (width < 200)
    if width == 80:
        assert max(map(len, text.splitlines())) <= width + 12


@pytest.mark.parametrize("width", [20, 80])
def test_words_go_on_in_the_next_line(width: int) -> None:
    table = table_of("what it is", "n", words=("what it is",))
    table.add_row(TITLE, "123456789.123456789")
    text = shown(table, width)
    assert "123456789.123456789" in text
    assert all(word in text for word in TITLE.split())


def test_no_command_prints_beside_the_one_place_that_does() -> None:
    """Markup, tables and consoles are made there, so a title in brackets is safe everywhere."""
    beside = []
    for path in {*SOURCE.glob("*.py")} - {SOURCE / "output.py", SOURCE / "commands.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module="rich.markup" | "rich.table"):
                    beside.append(f"{path.name}:{node.lineno}")
                case ast.Call(func=ast.Attribute(attr="print" | "status", value=on)):
                    if "onsole" in ast.dump(on):
                        beside.append(f"{path.name}:{node.lineno}")
    assert not beside


def test_a_run_in_a_pipe_keeps_its_digits(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", title=TITLE, **{"run.rounds": 1})
    answer = fedbcd("run", job, "--out", tmp_path / "out")
    (row,) = (line for line in answer.out.splitlines() if line.lstrip().startswith("a rather"))
    assert len(re.findall(r"\d\.\d{3}(?!\d)", row)) == 3, "three scores, whole"
    assert re.search(r"\d\.\d$", row.rstrip()), "and seconds"
    again = fedbcd("check", job, "--rounds", "5")
    assert "[of a run]" in re.sub(r"\s+", " ", again.out)


# ------------------------------------------------------------------------------------------------
# brackets
def commands(group: Any = None, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


def test_help_of_every_command_shows_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    brackets = 0
    for names, command in commands():
        meant = [command.help or "", *(getattr(each, "help", "") or "" for each in command.params)]
        words = [word for text in meant for word in re.findall(r"\\?(\[[a-z]\w*\])", text)]
        text = fedbcd(*names, "--help").out
        assert "--quiet" in text
        assert not [word for word in words if word not in text], names
        assert "\\[" not in text
        brackets += len(words)
    assert brackets >= 3, "[deploy], [clock], [sweep]"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run.rouns": 3}, "[run]"),
        ({"run.rounds": None}, "[run] needs rounds or until_clock"),
        ({"clock": 3}, "[clock] must be a table"),
        ({"title": 3, "data.name": "[bold]"}, "title = 3"),
        ({"data.name": "[bold]x[/bold]"}, "[bold]x[/bold]"),
        ({"run.uploads": [{"name": "[red]"}]}, "run.uploads[0]"),
        ({"cloud.name": ":smile:"}, ":smile:"),
    ],
)
def test_errors_show_what_was_written(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    answer = fedbcd("run", write_job(tmp_path / "job.toml", **changes), "--out", tmp_path / "out")
    assert answer.code == ConfigError.exit_code
    assert words in answer.err
    assert "Traceback" not in answer.err


# ------------------------------------------------------------------------------------------------
# how much is said
def test_quiet_leaves_results_and_errors_and_verbose_says_each_row(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", **{"run.rounds": 2, "run.evaluate_every": 1})
    quiet = fedbcd("run", job, "--out", tmp_path / "quiet", "--quiet")
    assert quiet.err == ""
    assert "test accuracy at the end" in quiet.out
    bare = fedbcd("run", job, "--out", tmp_path / "bare", "--quiet", "--json")
    assert (bare.err, bare.out.count("\n")) == ("", 1)
    verbose = fedbcd("run", job, "--out", tmp_path / "verbose", "--verbose")
    assert all(f": round {n} clock" in verbose.err for n in (1, 2))
    refused = [
        fedbcd("run", job, "--out", tmp_path / "bare", how) for how in ("--quiet", "--verbose")
    ]
    assert all("error: " in answer.err and answer.code == 4 for answer in refused)
    assert ["Traceback" in answer.err for answer in refused] == [False, True]


# ------------------------------------------------------------------------------------------------
# names
def test_algorithms_say_every_setting_with_its_default_and_its_meaning() -> None:
    for registry in (ALGORITHMS, CLOUDS):
        for name, kind in registry.items():
            answer = fedbcd("algorithms", name)
            for each in fields(kind):
                assert not each.init or each.name in answer.out
                assert not each.init or MEANING[each.name].split()[0] in answer.out
    assert "Eq. (6)" in fedbcd("algorithms", "graph").out
    assert re.search(r"offline_limit +4 +offline rounds", fedbcd("algorithms", "fedbcd-i").out)
    assert "hidden" in fedbcd("models", "mlp").out
    wrong = fedbcd("algorithms", "fedbcd-j")
    assert wrong.code == ConfigError.exit_code
    assert "there is no 'fedbcd-j' (did you mean 'fedbcd-i'?)" in wrong.err


def test_a_shell_completes_commands_options_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of(ALGORITHMS, CLOUDS)("fedb") == ["fedbcd", "fedbcd-i"]

    def completed(words: str) -> str:
        monkeypatch.setenv("_FEDBCD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"fedbcd {words}")
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
        return fedbcd().out

    assert "algorithms" in completed("alg")
    assert completed("algorithms fedav").split() == ["fedavg", "fedavg-ft"]
    assert "emnist-letters" in completed("data show emn")
    assert "fig3a" in completed("paper fig")
    assert "--install-completion" in fedbcd_help(monkeypatch)


def fedbcd_help(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("_FEDBCD_COMPLETE")
    text = fedbcd("--help").out
    assert all(name in text for name in COMMANDS)
    return text
