"""docs/results: every figure and table there comes from a file, which the present code agrees with
and a clean tree has made.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence  # noqa: E402
import tables  # noqa: E402

FILES = tables.files()
COMPUTED = [file for file in FILES if not file.startswith("fig3d")]  # CIFAR-10 is as of 0.1.0


def test_there_are_files() -> None:
    assert {"fig3a", "fig3b", "fig3c", "fig4d"} <= set(FILES)


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_in_documents_are_those_of_the_files(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(text) == text, "python benchmarks/tables.py puts the tables right"


def test_every_figure_has_its_file_and_was_drawn_from_it() -> None:
    text = "".join(path.read_text() for path in tables.DOCUMENTS)
    shown = re.findall(r"\]\((?:mnist|cifar10)/([\w-]+)\.(?:png|svg)\)", text)
    pictures = {path.stem for path in tables.RESULTS.glob("*/fig*.png")}
    assert set(shown) == pictures
    known = tables.drawn_from()
    assert {file: known.get(file) for file in pictures} == {
        file: tables.fingerprint(file) for file in pictures if file in FILES
    }


@pytest.mark.parametrize("file", FILES)
def test_a_file_was_made_by_a_clean_tree(file: str) -> None:
    made = tables.read(file)["made"]
    assert made
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", each["commit"]) for each in made)


@pytest.mark.parametrize("file", COMPUTED)
def test_a_file_is_not_older_than_its_sources(file: str) -> None:
    """What it says was computed is what is asked for now, and three rounds of the same kind come
    to the same numbers on a tiny model.
    """
    asked = {w.title: w.job for w in evidence.wanted() if w.file == file and w.seed == 0}
    for run in tables.read(file)["runs"]:
        settings = evidence.settings_of(asked[run["title"]])
        assert evidence.as_now(run["settings"]) == settings, run["title"]
        assert evidence.agree(run["probe"], evidence.probe(asked[run["title"]])), run["title"]


def test_a_probe_tells_readings_apart() -> None:
    jobs = {
        w.reading: w.job for w in evidence.wanted() if (w.panel, w.title) == ("fig3b", "FedBCD-I")
    }
    kept, *others = (evidence.probe(jobs[r]) for r in ("", "pull", "restart", "dealt"))
    assert not any(evidence.agree(kept, other) for other in others)


def test_words_do_not_make_code_older_and_numbers_do() -> None:
    before = 'def f():\n    """Says."""\n    return 0.5  # half\n'
    assert evidence._code(before, ".py") == evidence._code("def f():\n    return 0.5", ".py")
    assert evidence._code(before, ".py") != evidence._code("def f():\n    return 0.6", ".py")
