"""docs/results: every figure, picture and table there comes from a file, which the present code
agrees with and a clean tree has made.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence  # noqa: E402
import tables  # noqa: E402

FILES = tables.files()
COMPUTED = [file for file in FILES if not file.startswith("fig3d")]  # CIFAR-10 is as of 0.1.0
CLEAN = re.compile(r"[0-9a-f]{7,40}")
NUMBER = re.compile(r"(?<![\w.])[+-]?0?(\.\d{3,4})\b")
# an independent implementation's means over seeds: global, personal (SPEC, "Experiments")
INDEPENDENT = {"fig3a": (0.9043, 0.9617), "fig3b": (0.9245, 0.9397)}


def test_there_are_files() -> None:
    assert {"fig3a", "fig3b", "fig3c", "fig4d"} <= set(FILES)


@pytest.mark.parametrize("panel", INDEPENDENT)
def test_fedbcd_i_ends_where_an_independent_implementation_does(panel: str) -> None:
    """Five seeds, momentum kept over a contact."""
    last = [history.last for history in tables.runs_of(panel)["FedBCD-I"].values()]
    assert len(last) == 5
    assert {row.round for row in last} == {500}
    found = mean(row.global_accuracy for row in last), mean(row.personal_accuracy for row in last)
    assert found == pytest.approx(INDEPENDENT[panel], abs=0.01)


# ------------------------------------------------------------------------------------------------
# documents
@pytest.mark.parametrize("path", tables.FILLED, ids=lambda path: path.name)
def test_tables_in_documents_are_those_of_the_files(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(text) == text, "python benchmarks/tables.py puts the tables right"


def test_a_table_that_differs_from_its_files_is_found() -> None:
    text = (tables.RESULTS / "README.md").read_text()
    assert ".9028 (.0056)" in text
    wrong = text.replace(".9028 (.0056)", ".9128 (.0056)")
    assert tables.filled(wrong) != wrong
    assert tables.filled(wrong) == text


def unfounded(text: str) -> set[str]:
    """Accuracies and effects in words that stand in no table of the document."""
    in_tables = "".join(found[0] for found in tables.MARKED.finditer(text))
    known = {number[:4] for number in NUMBER.findall(in_tables)}
    words = tables.MARKED.sub("", text)
    given = {f"{number:.4f}"[1:] for pair in INDEPENDENT.values() for number in pair}
    return {n for n in NUMBER.findall(words) if n[:4] not in known and n not in given}


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_figures_in_words_stand_in_a_table(path: Path) -> None:
    assert unfounded(path.read_text()) == set()
    assert unfounded(path.read_text() + "\nOr .1234, and +0.567.") == {".1234", ".567"}


# ------------------------------------------------------------------------------------------------
# pictures
def test_every_picture_has_its_file_and_was_drawn_from_it() -> None:
    text = "".join(path.read_text() for path in tables.DOCUMENTS)
    shown = re.findall(r"\]\((?:mnist|cifar10)/([\w-]+)\.png\)", text)
    assert sorted(shown) == sorted(tables.pictures())
    drawn = [*tables.RESULTS.glob("mnist/*.png"), *tables.RESULTS.glob("cifar10/*.png")]
    assert {path.stem for path in drawn} == set(shown)
    elsewhere = re.findall(r"docs/results/\w+/(fig[\w-]+)\.png", (ROOT / "README.md").read_text())
    assert set(elsewhere) <= set(shown)
    assert tables.drawn_from() == {file: tables.fingerprint(file) for file in shown}


def test_a_picture_of_other_curves_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mnist").mkdir()
    shutil.copy(tables.path_of("fig3a"), tmp_path / "mnist")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    content = tables.read("fig3a")
    content["runs"][0]["seeds"]["0"]["global_accuracy"][-1] += 0.001
    tables.write("fig3a", content)
    changed = tables.fingerprint("fig3a")
    tables.runs_of.cache_clear()
    monkeypatch.undo()
    assert tables.drawn_from()["fig3a"] == tables.fingerprint("fig3a") != changed


# ------------------------------------------------------------------------------------------------
# where files come from
@pytest.mark.parametrize("file", FILES)
def test_a_file_was_made_by_a_clean_tree(file: str) -> None:
    made = tables.read(file)["made"]
    assert made
    assert all(CLEAN.fullmatch(each["commit"]) for each in made)


def test_what_slow_ones_cost_was_measured_by_a_clean_tree() -> None:
    assert CLEAN.fullmatch(json.loads(tables.SLOW.read_text())["environment"]["commit"])


def test_a_changed_tree_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        evidence.subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    assert CLEAN.fullmatch(evidence.commit())
    (tmp_path / "src" / "a.py").write_text("a = 2\n")
    assert not CLEAN.fullmatch(evidence.commit())


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


def test_what_computes_other_numbers_is_stale() -> None:
    run = next(w for w in evidence.wanted() if (w.file, w.title) == ("fig3a", "FedBCD-I"))
    lines = evidence.lines_of_files()
    assert not evidence.is_stale(run, lines)
    line, head = lines[run.key]
    other = {**line, "probe": [value * (1 + 1e-6) for value in line["probe"]]}
    assert evidence.is_stale(run, {**lines, run.key: (other, head)})
    assert evidence.is_stale(run, {})


def test_an_interrupted_file_of_runs_goes_on(tmp_path: Path) -> None:
    """Its last line may be cut off anywhere; what made the later ones stands before them."""
    settings = evidence.settings_of(evidence.wanted()[0].job)
    head, one, two = (
        json.dumps({"made with": {"commit": "abcdef0"}}),
        *(json.dumps({"settings": settings, "seed": seed, "probe": [1.0]}) for seed in (1, 2)),
    )
    path = tmp_path / "runs.jsonl"
    path.write_text(f"\n{head}\n{one}\n{two[: two.index('}') + 1]}")
    assert [line["seed"] for line, _ in evidence.lines_of(path).values()] == [1]
    path.write_text(path.read_text() + f"\n{head}\n{two}\n")
    assert [line["seed"] for line, _ in evidence.lines_of(path).values()] == [1, 2]


def test_a_file_that_nobody_wants_is_named() -> None:
    assert {run.file for run in evidence.chosen("fig3a,fig3b-dealt")} == {"fig3a", "fig3b-dealt"}
    assert evidence.chosen("") == [*evidence.wanted()]
    with pytest.raises(
        evidence.ConfigError, match=r"fig3b-deal: there is no .* mean 'fig3b-dealt'"
    ):
        evidence.chosen("fig3b-deal")


def test_words_do_not_make_code_older_and_numbers_do() -> None:
    before = 'def f():\n    """Says."""\n    return 0.5  # half\n'
    assert evidence._code(before, ".py") == evidence._code("def f():\n    return 0.5", ".py")
    assert evidence._code(before, ".py") != evidence._code("def f():\n    return 0.6", ".py")
