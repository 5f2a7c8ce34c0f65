"""Documents tell the truth: their Python runs, their TOML parses, their links lead somewhere, their
names exist.
"""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import fedbcd
from fedbcd.experiments.job import parse

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.S | re.M)
    return [
        (f"{d.name}-{k}", block)
        for d in DOCUMENTS
        for k, block in enumerate(pattern.findall(d.read_text()))
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
def test_job_files_in_documents_parse(name: str, text: str) -> None:
    assert parse(tomllib.loads(text)), name


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(example)])
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
    """ "Under 1,000 lines": the files that the README's table names."""
    tour = (ROOT / "README.md").read_text().partition("## Read the code")[2].partition("For who")[0]
    files = re.findall(r"\]\((src/[^)]+)\)", tour)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in files}
    assert len(files) >= 5
    assert sum(lines.values()) < 1000, lines
