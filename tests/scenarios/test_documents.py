"""Documents tell the truth: their Python runs, their jobs run, their commands exist, their links
lead somewhere, their names exist.
"""

import ast
import inspect
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import fedbcd
from fedbcd.cli import app
from fedbcd.experiments.job import parse, read_job_file
from fedbcd.experiments.sweep import parse_sweep

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def _texts(language: str, document: Path) -> list[str]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.S | re.M)
    return pattern.findall(document.read_text())


def _blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{document.name}-{k}", block)
        for document in DOCUMENTS
        for k, block in enumerate(_texts(language, document))
        if (document, language) != (TUTORIAL, "python")  # which is one script
    ]


@pytest.mark.parametrize(
    ("name", "code"), _blocks("python"), ids=lambda v: v if "\n" not in v else ""
)
def test_python_in_documents_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "document"})


@pytest.mark.parametrize(
    ("name", "text"), _blocks("toml"), ids=lambda v: v if "\n" not in v else ""
)
def test_job_files_in_documents_run(name: str, text: str, tmp_path: Path) -> None:
    """A round of each run of theirs, on the shipped digits where they name files that are not
    here; with the module that the document shows before them.
    """
    document = next(one for one in DOCUMENTS if name.startswith(f"{one.name}-"))
    before = document.read_text().partition(text)[0]
    modules = re.findall(r"^```python\n(.*?)^```$", before, re.S | re.M)
    (tmp_path / f"{document.stem}_mine.py").write_text(modules[-1] if modules else "")
    shutil.copy(ROOT / "examples" / "own_availability.py", tmp_path)
    (tmp_path / "job.toml").write_text(text.replace('"mine:', f'"{document.stem}_mine:'))
    table = read_job_file(tmp_path / "job.toml")
    if table.get("data", {}).get("name") == "mnist":
        table["data"] = {"name": "digits", "diversity": 3, "samples": 20}
    jobs = parse_sweep(table)[1][0].jobs[:1] if "sweep" in table else parse(table)
    for job in jobs:
        assert job.run(rounds=1, evaluate_every=1, certify_every=0).finished


# ------------------------------------------------------------------------------------------------
# commands and calls in words
def _commands() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        blocks = [block for block in _texts("[a-z]*", document) if "───" not in block]  # no output
        lines = [line for block in blocks for line in block.splitlines()]
        inline = re.findall(r"`(fedbcd [a-z][^`]*)`", document.read_text())
        for line in [*(line for line in lines if line.startswith("fedbcd ")), *inline]:
            yield document.name, line.split("   ")[0]


def _what_is_wrong(line: str, command: Any) -> str:
    words = shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    return ", ".join(asked - known - {"--help"})


def test_commands_in_documents_exist() -> None:
    """With the options that stand there."""
    program = typer.main.get_command(app)
    found = [*_commands()]
    assert len(found) > 100
    wrong = {line: said for _, line in found if (said := _what_is_wrong(line, program))}
    assert wrong == {}
    assert _what_is_wrong("fedbcd run --outt x", program) == "--outt"


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for document in DOCUMENTS:
        for code in re.findall(r"`((?:fb|fedbcd)\.[^`]*\([^`]*)`", document.read_text()):
            try:
                tree = ast.parse(code)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if isinstance(node, ast.Call) and re.fullmatch(r"fb(\.\w+)+", name):
                    yield f"{document.name}: {code}", node


def test_calls_in_words_can_be_made() -> None:
    """Their names exist, and take these keywords."""
    found = [*_calls()]
    assert len(found) > 8
    for where, call in found:
        thing: Any = fedbcd
        for part in ast.unparse(call.func).split(".")[1:]:
            thing = getattr(thing, part)
        if callable(thing):
            takes = inspect.signature(thing).parameters
            free = any(each.kind is each.VAR_KEYWORD for each in takes.values())
            assert free or {word.arg for word in call.keywords} <= {*takes, None}, where


# ------------------------------------------------------------------------------------------------
# the tutorial, the index, the README
def test_the_tutorial_is_its_script() -> None:
    script = (ROOT / "examples" / "tutorial.py").read_text().split('"""\n\n', 1)[1]
    parts = [part.strip() for part in re.split(r"(?m)^# \d+\. .*\n", script)[1:]]
    assert [block.strip() for block in _texts("python", TUTORIAL)] == parts


def test_the_tutorial_prints_what_its_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Figures may differ a little between processors, and with them what is said of a newcomer."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "tutorial.py"), run_name="__main__")
    printed, said = capsys.readouterr().out.splitlines(), _texts("", TUTORIAL)[0].splitlines()
    assert len(printed) == len(said)
    for here, there in zip(printed[:4], said[:4], strict=True):
        assert re.sub(r"[\d.]+", "", here) == re.sub(r"[\d.]+", "", there)
        numbers = [[float(n) for n in re.findall(r"\b0\.\d+", line)] for line in (here, there)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.03)
    assert (tmp_path / "tutorial.png").stat().st_size > 10_000


def test_every_page_stands_in_the_index_once() -> None:
    links = re.findall(r"\]\(([\w./]+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    tables = [link for link in links if "/" not in link]
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(tables) == pages
    once = {link: tables.count(link) for link in pages - {"glossary.md"}}  # words come first, too
    assert set(once.values()) == {1}, once


def test_the_readme_takes_a_minute() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert [line for line in lines if len(line) > 100] == []


SHORTER = {"keyboard.py": ["--rounds", "1", "--steps", "5"]}
EXAMPLES = {*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "tutorial.py"}  # run above


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda p: p.name)
def test_examples_run(
    example: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example), *SHORTER.get(example.name, [])])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_the_api_page_quotes_its_example() -> None:
    example = (ROOT / "examples" / "scaffold.py").read_text()
    code = example[example.index("from dataclasses") : example.index("\n\nif __name__")]
    assert code.rstrip() in (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", ["scaffold", "fedbuff", "own_availability"])
def test_other_peoples_kinds_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_api_page_names_everything_public() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in fedbcd.__all__ if not re.search(rf"`[^`]*\b{name}\b", page)] == []


def test_the_first_line_says_which_fedbcd() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[0]
    assert "AAAI 2021" in first
    assert "2019" in first


def test_the_reading_tour_takes_half_an_hour() -> None:
    """ "Less than 1,000 lines": the files that its table names."""
    tour = (ROOT / "docs" / "code_tour.md").read_text().partition("For who")[0]
    files = re.findall(r"\]\(\.\./(src/[^)]+)\)", tour)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in files}
    assert len(files) >= 5
    assert sum(lines.values()) < 1000, lines
