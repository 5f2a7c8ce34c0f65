"""Comparing methods over seeds: what is computed, what is kept, and what the numbers say."""

import csv
import gc
import io
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

import fedbcd as fb
from fedbcd.errors import ConfigError, FedBCDError, RecordError
from fedbcd.experiments.compare import Line, comparison_of
from fedbcd.experiments.comparison import in_digits, paired_t, spread, wilcoxon
from fedbcd.experiments.pool import Result, run_tasks
from fedbcd.experiments.titles import by_what_differs, titles_of
from fedbcd.record.history import History

METHODS = {
    "Local": fb.Local(device_step=0.05, batch=8),
    "FedAvg": fb.FedAvg(device_step=0.05, batch=8),
    "FedBCD": (fb.FedBCD(device_step=0.05, batch=8), {"cloud": "async"}),
}


def federation(seed: int = 0, scale: float = 1.0) -> fb.Federation:
    """Six devices under two servers; made of lambdas, as users make them."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(3, (count,), generator=draw)
        return centres[labels] + torch.randn(count, 2, generator=draw), labels

    return fb.Federation(
        lambda: nn.Linear(2, 3),
        lambda outputs, targets: scale * nn.functional.cross_entropy(outputs, targets),
        [some(12) for _ in range(6)],
        servers=2,
        test=some(60),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[fb.Comparison, Path]:
    out = tmp_path_factory.mktemp("compared")
    return fb.compare(federation(), METHODS, seeds=2, rounds=4, active=1, out=out, workers=2), out


# ------------------------------------------------------------------------------------------------
# computing
class Leftover:
    """Garbage of a process; its end may wait for a thread, which a forked process does not have."""

    def __init__(self, ends: Path) -> None:
        self.itself, self.ends = self, ends

    def __del__(self) -> None:
        with self.ends.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_what_was_there_before_is_collected_by_nobody_else(tmp_path: Path) -> None:
    """Before the processes begin, or never: also what becomes garbage in one of them."""
    kept, here = [Leftover(tmp_path / "ends")], os.getpid()

    def collecting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if os.getpid() != here:
            kept.clear()
            gc.collect()
        return nn.functional.cross_entropy(outputs, targets)

    given = federation()
    given.loss = collecting
    Leftover(tmp_path / "ends")
    fb.compare(given, {"Local": METHODS["Local"]}, seeds=2, rounds=1, active=1, workers=2)
    kept.clear()
    gc.collect()
    assert (tmp_path / "ends").read_text().split() == [str(here)] * 2


def test_forked_processes_compute_what_one_would(found: tuple[fb.Comparison, Path]) -> None:
    """Federations of lambdas cannot travel; every method has the same seeds, each as `train` has
    it.
    """
    comparison, _ = found
    assert comparison.titles == ["Local", "FedAvg", "FedBCD"]
    assert comparison.seeds == [0, 1]
    for title, options in (("FedAvg", {}), ("FedBCD", {"cloud": "async"})):
        method: Any = METHODS[title]
        algorithm = method[0] if isinstance(method, tuple) else method
        for seed, result in enumerate(comparison.results[title]):
            run = fb.train(federation(), algorithm, rounds=4, active=1, seed=seed, **options)
            assert result.history == run.history
            assert result.summary["digest"] == run.digest
            assert result.personal == run.personal_scores
            assert result.home == run.global_scores


def test_what_was_computed_is_found_again_and_extended(found: tuple[fb.Comparison, Path]) -> None:
    comparison, out = found
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    told: list[tuple[int, int]] = []
    again = fb.compare(
        federation(),
        {**METHODS, "another name": fb.FedAvg(device_step=0.05, batch=8)},
        seeds=[1],
        rounds=4,
        active=1,
        out=out,
        on_done=lambda done, total: told.append((done, total)),
    )
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    assert again.values("another name", "clock") == comparison.values("FedAvg", "clock")[1:]
    assert told == [(k, 4) for k in range(1, 5)]


@pytest.mark.parametrize(
    "other",
    [
        partial(federation, scale=2.0),
        partial(federation, seed=1),
    ],
    ids=["loss", "data"],
)
def test_another_loss_or_other_data_are_computed_anew(
    other: Callable[[], fb.Federation], found: tuple[fb.Comparison, Path]
) -> None:
    _, out = found
    before = len(list(out.glob("*.json")))
    fb.compare(other(), {"FedAvg": METHODS["FedAvg"]}, [0], rounds=4, active=1, out=out)
    assert len(list(out.glob("*.json"))) == before + 1


def test_a_federation_may_depend_on_the_seed_and_methods_need_no_titles() -> None:
    compared = fb.compare(
        federation,
        [fb.FedAvg(device_step=0.05), fb.RunSpec(fb.FedAvg(), rounds=1, active=2)],
        seeds=2,
        rounds=2,
        active=1,
        workers=1,
    )
    assert compared.titles == ["FedAvg, device step 0.05", "FedAvg, device step 0.005"]
    alone = fb.train(federation(1), fb.FedAvg(device_step=0.05), seed=1, rounds=2, active=1)
    assert compared.results[compared.titles[0]][1].summary["digest"] == alone.digest


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"seeds": 0}, "seeds=0 must be 1 or more"),
        ({"seeds": [1, 1]}, "seeds that differ"),
        ({"methods": {}}, "must be {title: method"),
        ({"rouns": 3}, "did you mean 'rounds'"),
        ({"seed": 3}, r"seeds=\[...\] says which"),
        ({"against": ["Lokal"]}, "did you mean 'Local'"),
        ({"workers": 0}, "workers=0 must be 1 or more"),
        ({"rounds": None}, "rounds=... or until_clock"),
        ({"active": 9}, "active=9 must be between 1 and 3"),
        ({"federation": lambda _: None}, "must give a fb.Federation"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    given: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    call: dict[str, Any] = {"federation": federation(), "methods": METHODS, "rounds": 2}
    with pytest.raises(ConfigError, match=complaint):
        fb.compare(**{**call, "active": 1, "out": tmp_path / "out", **given})
    assert not (tmp_path / "out").exists()


def test_a_process_that_dies_is_a_sentence(tmp_path: Path) -> None:
    """And what else was computed is kept."""
    import os

    class Deadly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != mine:
                os._exit(3)
            return super().forward(x)

    mine = os.getpid()
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(2)]
    deadly = fb.Federation(lambda: Deadly(2, 2), nn.functional.cross_entropy, data, servers=1)
    with pytest.raises(RecordError, match=r"was killed.*fewer workers"):
        fb.compare(deadly, [fb.FedAvg()], seeds=2, rounds=1, out=tmp_path, workers=2)


# ------------------------------------------------------------------------------------------------
# numbers
def result(name: str, seed: int, personal: list[float], end: float = 0.5) -> Result:
    rows = [[k, 10.0 * k, 3 * k, *[end * k / 2] * 3, 0.0, 0.0] for k in range(3)]
    method = {"Local": fb.Local(), "FedAvg": fb.FedAvg()}.get(name, fb.FedBCD())
    summary = {"seconds": 1.0 + seed, "algorithm": "x", "newcomers": {"own": 0.5}}
    spec = fb.RunSpec(method, rounds=2, seed=seed)
    return Result(name, spec, History.of_plain(rows), summary, dict(enumerate(personal)), {})


SCORES = {
    "Local": ([0.5, 0.5, 0.5, 0.5], [0.4, 0.6, 0.5, 0.5]),
    "FedAvg": ([0.8, 0.8, 0.8, 0.2], [0.8, 0.8, 0.8, 0.2]),
    "FedBCD": ([0.9, 0.8, 0.9, 0.6], [0.8, 0.9, 0.9, 0.4]),
}


@pytest.fixture(scope="module")
def compared() -> fb.Comparison:
    return comparison_of(
        [
            result(name, seed, scores, 0.4 + 0.1 * seed + 0.2 * (name == "FedBCD"))
            for name, both in SCORES.items()
            for seed, scores in enumerate(both)
        ]
    )


def test_means_and_deviations_are_over_seeds(compared: fb.Comparison) -> None:
    assert compared.values("FedBCD", "personal_accuracy") == pytest.approx([0.6, 0.7])
    assert compared.mean("FedBCD", "personal_accuracy") == pytest.approx(0.65)
    assert compared.deviation("FedBCD", "personal_accuracy") == pytest.approx(math.sqrt(0.005))
    assert compared.mean("Local", "seconds") == 1.5
    assert compared.mean("Local", "newcomers.own") == 0.5
    with pytest.raises(KeyError, match="no column 'speed'"):
        compared.values("Local", "speed")
    assert math.isnan(spread([1.0]))


def test_usual_baselines_are_local_training_and_one_model_for_all(compared: fb.Comparison) -> None:
    assert compared.baselines == ("Local", "FedAvg")


def test_a_baseline_is_beaten_device_by_device(compared: fb.Comparison) -> None:
    fedavg, fedbcd = compared.against("Local")
    assert (fedbcd.title, fedbcd.baseline, fedbcd.seeds, fedbcd.devices) == (
        "FedBCD",
        "Local",
        2,
        4,
    )
    assert fedbcd.gain == pytest.approx((0.3 + 0.25) / 2)
    assert (fedavg.harmed, fedbcd.harmed) == (1 / 4, 1 / 8)
    assert "against Local: +0.275 in the mean of 2 seeds" in fedbcd.sentence
    assert "12% of devices lose" in fedbcd.sentence


def test_the_tests_are_those_of_scipy() -> None:
    a, b = [0.9, 0.8, 0.85], [0.7, 0.75, 0.82]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    assert paired_t(differences) == pytest.approx(float(stats.ttest_rel(a, b).pvalue))
    assert math.isnan(paired_t([0.1]))
    assert (paired_t([0.0, 0.0]), paired_t([0.5, 0.5])) == (1.0, 0.0)
    each = torch.tensor([0.1, -0.2, 0.3, 0.4, 0.0, 0.55]).double().numpy()
    assert wilcoxon(each) == pytest.approx(float(stats.wilcoxon(each[each != 0]).pvalue))
    assert wilcoxon(each * 0) == 1.0


def test_lower_scores_are_better_where_the_measure_says_so(compared: fb.Comparison) -> None:
    errors = [
        result(name, seed, scores)
        for name, both in SCORES.items()
        for seed, scores in enumerate(both)
    ]
    for one in errors:
        one.history.judged_by({"accuracy": "lower"})
    (_, fedbcd) = comparison_of(errors).against("Local")
    assert fedbcd.gain == pytest.approx(-compared.against("Local")[1].gain)
    assert fedbcd.harmed == 7 / 8


def test_a_common_score_is_that_which_all_reach_in_all_seeds(compared: fb.Comparison) -> None:
    assert compared.common() == pytest.approx(0.4)
    reached = compared.reached()
    assert reached["Local"] == {"clock": 20.0, "activations": 6.0}
    assert reached["FedBCD"]["clock"] == pytest.approx(20.0)
    assert math.isnan(compared.reached(goal=0.65)["FedBCD"]["clock"])
    assert compared.reached(goal=0.3)["FedBCD"] == {"clock": 10.0, "activations": 3.0}


def test_a_comparison_is_a_table_in_every_format(compared: fb.Comparison, tmp_path: Path) -> None:
    (local, *_) = csv.DictReader(io.StringIO(compared.to_csv(tmp_path / "table.csv")))
    assert (tmp_path / "table.csv").read_text() == compared.to_csv()
    assert local["title"] == "Local"
    assert float(local["personal_accuracy_deviation"]) == pytest.approx(math.sqrt(0.005))
    frame = compared.to_pandas()
    assert frame.loc["FedBCD", "harmed against Local"] == 1 / 8
    table = compared.to_markdown("personal_accuracy")
    assert "| FedBCD | 0.650 ± 0.071 | 12% | 0% |" in table
    latex = compared.to_latex("personal_accuracy", path=tmp_path / "table.tex")
    assert r"FedBCD & 0.650 $\pm$ 0.071 & 12\% & 0\% \\" in latex
    assert latex == (tmp_path / "table.tex").read_text()
    assert "0.650 ± 0.071" in repr(compared)
    assert all(len(line) <= 100 for line in repr(compared).splitlines())
    assert "<td" in compared._repr_html_()


def test_a_comparison_is_a_figure_with_bands(compared: fb.Comparison, tmp_path: Path) -> None:
    figure = compared.plot(tmp_path / "curves.png", axis="activations")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert [line.get_label() for line in right.get_lines()] == ["Local", "FedAvg", "FedBCD"]
    assert len(left.collections) == 3
    assert left.get_ylabel() == "personal accuracy"


def test_small_numbers_keep_their_digits_and_titles_are_escaped(compared: fb.Comparison) -> None:
    assert in_digits(0.00042, 0.00003) == "0.00042 ± 3e-05"
    assert in_digits(0.0, math.nan) == "0.000"
    renamed = fb.Comparison({"a_{$5}": compared.results["Local"]}, ())
    assert r"a\_\{\$5\} & " in renamed.to_latex()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda c: c.to_latex("accuracy"), r"'accuracy' \(did you mean 'global_accuracy'\?\)"),
        (lambda c: c.mean("Local", "acc"), "no column 'acc'; there are round, clock"),
        (lambda c: c.plot(columns=["acc"]), "no column 'acc'"),
        (lambda c: c.plot(axis="time"), "no column 'time'"),
        (lambda c: c.reached(goal="high"), "goal = 'high' must be a number"),
        (lambda c: c.plot("nowhere/c.png"), "cannot write nowhere/c.png: .* in a folder that is"),
        (lambda c: c.to_csv("nowhere/c.csv"), "cannot write nowhere/c.csv"),
        (lambda c: c.plot("c.xyz"), "'c.xyz' is no picture: Format 'xyz' is not supported"),
        (lambda c: c.mean("local", "round"), r"no method is called 'local' \(did you mean 'Local'"),
    ],
)
def test_what_a_comparison_does_not_have_is_a_sentence(
    compared: fb.Comparison, wrong: Callable[[fb.Comparison], Any], says: str
) -> None:
    with pytest.raises(FedBCDError, match=says):
        wrong(compared)


def test_a_run_and_its_history_show_themselves(tmp_path: Path) -> None:
    run = fb.train(federation(), fb.FedBCD(), rounds=2, active=1)
    assert run.plot(tmp_path / "run.png").axes[0].get_xlabel() == "clock"
    assert (tmp_path / "run.png").exists()
    assert "personal_accuracy" in run.history._repr_html_()
    assert run._repr_html_().startswith("<p>fedbcd on the sync cloud, seed 0</p><table>")


def test_a_picture_without_matplotlib_is_a_sentence(
    compared: fb.Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedbcd\[report\]'"):
        compared.plot()


# ------------------------------------------------------------------------------------------------
# titles and progress
def test_titles_say_what_differs() -> None:
    specs = [
        fb.RunSpec(fb.FedBCD(penalty=0.1), rounds=3),
        fb.RunSpec(fb.FedBCD(), rounds=3),
        fb.RunSpec(fb.FedAvg(), rounds=3),
    ]
    assert titles_of(specs) == ["FedBCD, penalty 0.1", "FedBCD, penalty 1", "FedAvg"]
    clouds = [fb.RunSpec(fb.FedBCD(), cloud, rounds=3) for cloud in (fb.SyncCloud(), "async")]  # type: ignore[arg-type]
    assert titles_of(clouds) == ["FedBCD, sync cloud", "FedBCD, async cloud"]
    assert titles_of([specs[0], specs[0]]) == ["FedBCD (1)", "FedBCD (2)"]
    assert by_what_differs(
        [{"algorithm": {"name": "mine:Own"}, "data": {"samples": n}} for n in (5, 6)]
    ) == ["Own, samples 5", "Own, samples 6"]


def test_what_is_left_is_estimated_from_what_was_computed() -> None:
    line = Line(began=0.0, latest=60.0, known=2)
    assert line.text(4, 10).strip() == "4 of 10 runs, 3:00 left"
    assert line.text(10, 10).strip() == "10 of 10 runs"


def test_kept_folders_are_left_whole(tmp_path: Path) -> None:
    from fedbcd.experiments.compare import _specs, _task

    spec = _specs({"FedAvg": fb.FedAvg()}, {"rounds": 2, "active": 1})["FedAvg"]
    task = _task("FedAvg", spec, federation())
    run_tasks([task], tmp_path / "results", keep={task.key: tmp_path / "whole"})
    assert (tmp_path / "whole" / "models.safetensors").exists()
    assert {file.suffix for file in (tmp_path / "results").iterdir()} == {".json"}
