"""Panels, claims, sweeps and the pool of runs."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedbcd as fb
from fedbcd.cli import app
from fedbcd.cli.experiments import _claims_table
from fedbcd.config import dump_toml, read_toml
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments import claims
from fedbcd.experiments.claims import CLAIMS, ClaimVerdict, judge
from fedbcd.experiments.figures import by_run, draw_panel, on_one_grid, write_table
from fedbcd.experiments.job import Job, parse
from fedbcd.experiments.paper import PANELS, Panel, Setting, panels
from fedbcd.experiments.pool import job_key, run_jobs
from fedbcd.experiments.sweep import parse_sweep, rank
from fedbcd.planner import plan as plan_module, round_time
from fedbcd.planner.plan import make_plan
from fedbcd.planner.server_time import device_model
from fedbcd.record.history import History
from support.methods import method_of

SMALL = {
    "data": {"diversity": 2, "samples": 12},
    "federation": {"servers": 2, "devices": 3, "active": 1},
    "model": {"name": "logistic"},
    "run": {"rounds": 3, "looks": 3},
}


def test_servers_may_differ_in_devices_and_in_how_many_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "LAW", 2_000)
    monkeypatch.setattr(round_time, "PHASES", 200)
    part = {"servers": 3, "devices": [2, 5, 3], "active": [1, 4, 2]}
    job = parse({**SMALL, "federation": part})[0]
    run = job.run(tmp_path / "run")
    assert run.federation.servers == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]
    assert run.history.last.activations == 3 * (1 + 4 + 2)
    table = read_toml(tmp_path / "run" / "config.toml")
    assert table["federation"] | part == table["federation"]
    in_python = fb.train(run.federation, job.spec.algorithm, rounds=3, looks=3, active=[1, 4, 2])
    assert in_python.digest == run.digest
    assert fb.replay(tmp_path / "run", run.federation)["digest"] == run.digest
    shared = parse({**SMALL, "federation": part | {"active": [1, 1, 1]}})[0].spec
    assert shared.identity(run.federation)["active"] == 1
    for command in (
        ["report", tmp_path / "run"],
        ["plan", tmp_path / "run" / "config.toml", "--no-pilots"],
    ):
        answer = CliRunner().invoke(app, [str(word) for word in command])
        assert answer.exit_code == 0, answer.output
    plan = make_plan({job.active: device_model(job)}, 3)
    assert plan.by_server[1] == max(plan.by_server)
    assert plan.slowest.endswith("of the median server; it waits for 4 of its 5 devices")


def _curve(points: list[tuple[float, float]], personal: float = 0.5) -> History:
    return History.of_plain(
        [
            [k, clock, k, accuracy, personal, personal, 0.0, 0.0]
            for k, (clock, accuracy) in enumerate(points)
        ]
    )


def _straight(end: float, personal: float = 0.5) -> History:
    return _curve([(0.0, 0.1), (50.0, (0.1 + end) / 2), (100.0, end)], personal)


def _by_part(verdicts: list[ClaimVerdict]) -> dict[tuple[int, str], ClaimVerdict]:
    return {(v.claim, v.part): v for v in verdicts}


def test_the_panels_are_those_of_figures_3_and_4() -> None:
    """SPEC, Experiments: "Figure 3: (a) MNIST active 3, d 3; (b) active 3, d 6; (c) active 6, d 3;
    (d) CIFAR-10 active 5, d 3".
    """
    shown = {name: panel(Setting()).jobs[0] for name, panel in PANELS.items()}
    assert {
        n: (j.data.name, j.active, j.data.diversity, j.data.samples)
        for n, j in shown.items()
        if n.startswith("fig3")
    } == {
        "fig3a": ("mnist", 3, 3, 600),
        "fig3b": ("mnist", 3, 6, 600),
        "fig3c": ("mnist", 6, 3, 600),
        "fig3d": ("cifar10", 5, 3, 500),
    }
    for name, diversity in (("fig4a", 3), ("fig4b", 3), ("fig4c", 6), ("fig4d", 6)):
        panel = PANELS[name](Setting())
        assert [getattr(j.spec.cloud, "first", None) for j in panel.jobs] == [None, 7, 5, 3, None]
        assert {j.data.diversity for j in panel.jobs} == {diversity}
        assert panel.axis == "clock"


def test_the_settings_are_the_papers() -> None:
    """Section "Numerical Experiments": eta_x 0.005, zeta 0.9, epochs [1, 5], box [-2, 2], R 32,
    eta_z 0.5, gamma 1 / 0.2 / 5.
    """
    by_title = {job.title: job.spec.algorithm for job in PANELS["fig3a"](Setting()).jobs}
    for algorithm in by_title.values():
        assert (algorithm.device_step, algorithm.batch, algorithm.steps) == (0.005, 32, (1, 5))
        assert (algorithm.projection.low, algorithm.projection.high) == (-2, 2)
    assert {t: method_of(a).penalty for t, a in by_title.items()} == {
        "FedAvg": 0.0,
        "FedProx": 5.0,
        "FedBCD": 1.0,
        "FedBCD-I": 0.2,
    }
    titles = ("FedAvg", "FedProx", "FedBCD", "FedBCD-I")
    assert [method_of(by_title[title]).momentum for title in titles] == [0.0, 0.9, 0.9, 0.9]
    assert by_title["FedBCD"].server_step == by_title["FedBCD-I"].server_step == 0.5
    assert (
        method_of(by_title["FedBCD-I"]).available_of(10),
        by_title["FedBCD-I"].offline_limit,
    ) == (8, 4)


def test_all_means_every_panel_and_an_unknown_one_is_named() -> None:
    assert [p.name for p in panels(["all"], Setting())] == list(PANELS)
    with pytest.raises(ConfigError, match="no panel 'fig5'"):
        panels(["fig5"], Setting())


def test_claims_hold_on_curves_that_show_them_and_fail_on_curves_that_do_not() -> None:
    def fig3(bcd_personal: float, prox_personal: float, bcd_end: float) -> dict[str, list[History]]:
        return {
            "FedAvg": [_straight(0.6, 0.6)] * 2,
            "FedProx": [_straight(0.8, prox_personal)] * 2,
            "FedBCD": [_straight(bcd_end, bcd_personal)] * 2,
            "FedBCD-I": [_straight(0.78, bcd_personal)] * 2,
        }

    good, bad = (
        _by_part(judge({"fig3a": fig3(*v)})) for v in ((0.95, 0.805, 0.7), (0.5, 0.9, 0.5))
    )
    for key in ((1, "FedProx, fig3a"), (2, "FedBCD, fig3a"), (3, "FedBCD ahead of FedAvg, fig3a")):
        assert good[key].holds
        assert good[key].clear
        assert not bad[key].holds
    assert good[2, "FedBCD, fig3a"].effect == pytest.approx(0.95 - 0.805)
    assert good[2, "FedBCD, fig3a"].seeds == 2


def test_time_saved_is_measured_between_looks() -> None:
    """Claim 5: clock time to the same global accuracy."""
    slow, fast = _curve([(0, 0.0), (100, 0.8)]), _curve([(0, 0.0), (50, 0.8), (100, 0.8)])
    runs = {"Sync": [slow], "FedProx, Sync": [slow]} | {
        f"Async, beta {b}": [fast] for b in ("0.3", "0.5", "0.7")
    }
    verdicts = _by_part(judge({"fig4d": runs}))
    assert verdicts[5, "beta 0.3, fig4d"].effect == pytest.approx(0.5)
    assert verdicts[6, "beta 0.3, fig4d"].holds
    assert not verdicts[5, "beta 0.3, fig4d"].clear  # one seed says nothing about noise


def test_smoothness_is_the_total_fall_of_the_curve() -> None:
    rough, smooth = (
        _curve([(0, 0.1), (1, 0.5), (2, 0.3), (3, 0.6)]),
        _curve([(0, 0.1), (1, 0.3), (2, 0.4), (3, 0.6)]),
    )
    verdict = _by_part(judge({"smooth3": {"Sync": [rough]}, "smooth6": {"Sync": [smooth]}}))
    assert verdict[7, "Sync, smooth3 against smooth6"].effect == pytest.approx(0.2)


def test_smoothness_is_judged_where_every_round_is_recorded() -> None:
    """Between looks that are rounds apart a curve falls by less than it does."""
    for panel in panels(["smooth3", "smooth6"], Setting()):
        assert {job.spec.evaluate_every for job in panel.jobs} == {1}


def test_every_claim_of_the_paper_is_judged() -> None:
    numbers = [claim.__doc__.strip().partition(".")[0] for claim in CLAIMS if claim.__doc__]
    assert numbers == [str(k) for k in range(1, 14)]


def test_the_text_s_claims_without_a_figure_are_judged_by_their_sign() -> None:
    high, low = _straight(0.8, 0.9), _straight(0.7, 0.6)
    curves = {
        "fig3a": {"FedBCD": [low], "FedBCD-I": [high], "FedAvg": [low], "FedProx": [low]},
        "rigorous": {
            f"{who}, {which}, beta {beta}": [high if which == "rigorous" else low]
            for who in ("FedBCD", "FedBCD-I")
            for which in ("first B", "rigorous")
            for beta in ("0.3", "0.5")
        },
        "aspg": {
            f"{who}, {which}": [high if which == "ASPG" else low]
            for who in ("FedProx", "FedBCD", "FedBCD-I")
            for which in ("ASPG", "plain steps")
        },
        "beta": {"Async, beta 0.3": [high], "Async, beta 0.2": [low], "Async, beta 0.1": [high]},
    }
    found = _by_part(judge(curves))
    assert found[8, "personal, fig3a"].effect == pytest.approx(0.3)
    assert found[8, "global, fig3a"].effect == pytest.approx(0.05)  # both rise from 0
    assert found[9, "FedBCD, beta 0.3"].effect == pytest.approx(claims.SIMILAR - 0.05)
    assert found[10, "FedProx"].effect == pytest.approx(0.3)
    assert found[11, "0.3 against 0.2"].effect == pytest.approx(0.05)
    assert not found[11, "0.3 against 0.1"].holds
    assert found[12, "FedBCD-I, fig3a"].effect == pytest.approx(0.3)
    assert found[12, "FedBCD, fig3a"].effect == pytest.approx(0.0)
    assert found[13, "fig3a"].effect == pytest.approx(-0.05)


@pytest.mark.parametrize("name", ["beta", "rigorous", "aspg", "smooth3"])
def test_panels_of_the_text_have_the_runs_that_their_claims_read(name: str) -> None:
    (panel,) = panels([name], Setting())
    runs = {job.title: [_straight(0.5, 0.5)] for job in panel.jobs}
    curves = {name: runs} | ({"smooth6": runs} if name == "smooth3" else {})
    assert judge(curves)


def _job(**run: object) -> Job:
    return parse({**SMALL, "run": {**SMALL["run"], **run}})[0]


def test_results_are_kept_by_what_was_asked_and_not_computed_twice(tmp_path: Path) -> None:
    done: list[str] = []
    first = run_jobs([_job(), _job(seed=1)], tmp_path, on_done=lambda j: done.append(job_key(j)))
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    again = run_jobs([_job(), _job(seed=1)], tmp_path)
    assert [r.summary for r in again] == [r.summary for r in first]
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    assert len(set(done)) == 2
    assert all(p.suffix == ".json" for p in tmp_path.iterdir())


def test_the_key_of_a_job_follows_its_settings_and_not_its_title() -> None:
    other = parse({**SMALL, "title": "another name"})[0]
    assert job_key(other) == job_key(_job())
    assert job_key(_job(threads=2)) == job_key(_job())
    assert len({job_key(_job(**r)) for r in ({}, {"seed": 5}, {"rounds": 4})}) == 3


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    run_jobs([_job()], tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:50])
    with pytest.raises(RecordError, match=r"is damaged .* remove it"):
        run_jobs([_job()], tmp_path)


def test_a_panel_becomes_a_table_and_two_pictures(tmp_path: Path) -> None:
    job = parse({**SMALL, "title": "FedBCD"})[0]
    panel = Panel("tiny", "tiny", (job,), "round", ("personal_accuracy", "global_accuracy"))
    results = run_jobs(panel.with_seeds(2), tmp_path / "cache")
    write_table(results, tmp_path / "tiny.csv")
    assert draw_panel(panel, by_run(results), tmp_path / "tiny.png")
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "tiny.csv", "tiny.png", "tiny.svg"}
    lines = (tmp_path / "tiny.csv").read_text().splitlines()
    assert lines[0].startswith("run,seed,round,clock")
    assert len(lines) == 1 + 2 * 4


def test_a_panel_of_many_runs_shows_them_all(tmp_path: Path) -> None:
    """Also those beyond the colours that there are."""
    runs = {f"run {k}": [_straight(k / 8, k / 8)] for k in range(8)}
    panel = Panel("many", "many", (), "round", ("global_accuracy",))
    assert draw_panel(panel, runs, tmp_path / "many.png")
    assert set(re.findall(r"run \d", (tmp_path / "many.svg").read_text())) == set(runs)


def test_seeds_are_compared_at_common_points() -> None:
    grid, curves = on_one_grid(
        [_curve([(0, 0.0), (10, 1.0)]), _curve([(0, 0.0), (5, 0.5), (20, 2.0)])],
        "clock",
        "global_accuracy",
    )
    assert list(grid) == [0.0, 5.0, 10.0]
    assert curves.tolist() == [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]


def test_a_sweep_tries_every_combination_and_ranks_them(tmp_path: Path) -> None:
    keys = {"algorithm.penalty": [0.1, 5.0], "federation.active": [1, 2]}
    table = {
        **SMALL,
        "algorithm": {"name": "fedbcd"},
        "sweep": {"seeds": 2, "best": "global_accuracy", "keys": keys},
    }
    part, points = parse_sweep(table)
    assert [p.values for p in points] == [
        {"algorithm.penalty": p, "federation.active": a} for p in (0.1, 5.0) for a in (1, 2)
    ]
    assert [[j.spec.seed for j in p.jobs] for p in points] == [[0, 1]] * 4
    tried = rank(part, points, run_jobs([j for p in points for j in p.jobs], tmp_path))
    scores = [t.scores["global_accuracy"] for t in tried]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("sweep", "complaint"),
    [
        ({}, "sweep.keys"),
        ({"keys": {"algorithm.penalty": []}}, "sweep.keys"),
        ({"keys": {"algorithm.penalti": [1.0]}}, "did you mean 'penalty'"),
        ({"keys": {"penalty": [1.0]}}, "must name a section"),
        ({"seeds": 0, "keys": {"algorithm.penalty": [1.0]}}, "seeds = 0"),
        ({"best": "speed", "keys": {"algorithm.penalty": [1.0]}}, "'global_accuracy'"),
    ],
)
def test_a_bad_sweep_is_refused_in_words(sweep: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_sweep({**SMALL, "algorithm": {"name": "fedbcd"}, "sweep": sweep})
    assert complaint in str(refused.value)


def test_verdicts_are_plain_data() -> None:
    verdict = ClaimVerdict(1, "x", True, True, 0.1, 0.0, 2, "m")
    assert json.loads(json.dumps(verdict.__dict__))["effect"] == 0.1


def test_a_kept_result_names_no_folder(tmp_path: Path) -> None:
    job = parse({**SMALL, "data": {**SMALL["data"], "folder": str(tmp_path / "private")}})[0]
    run_jobs([job], tmp_path / "cache")
    assert "private" not in next((tmp_path / "cache").iterdir()).read_text()


def test_a_claim_is_clear_only_if_student_says_so() -> None:
    """Two seeds need 12.7 standard errors, five need 2.8."""
    assert not claims._verdict(1, "two seeds", [0.03, 0.05], "").clear
    assert claims._verdict(1, "two seeds, close together", [0.0400, 0.0401], "").clear
    assert not claims._verdict(1, "five seeds", [-0.01, 0.0, 0.01, 0.02, 0.03], "").clear
    assert claims._verdict(1, "five seeds", [0.01, 0.02, 0.02, 0.03, 0.02], "").clear


def test_one_seed_has_no_spread_and_is_no_verdict() -> None:
    table = _claims_table([claims._verdict(1, "x", [0.1], ""), claims._verdict(2, "y", [0, 1], "")])
    assert [[*map(str, column.cells)] for column in table.columns[2:]] == [
        ["yes, one seed", "yes, within noise"],
        ["+0.1000", "+0.5000"],
        ["-", "0.7071"],
        ["1", "2"],
    ]


@pytest.mark.parametrize(("option", "value"), [("rounds", 0), ("workers", 0), ("seeds", 0)])
def test_a_zero_is_refused_not_taken_for_nothing(option: str, value: int, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["paper", "fig3a", f"--{option}", str(value), "--out", str(tmp_path)]
    )
    assert isinstance(result.exception, ConfigError)
    assert f"{option}" in str(result.exception)
    assert str(value) in str(result.exception)


def test_a_sweep_tries_whole_sections_and_the_runs_of_a_file() -> None:
    """Keys are of what a run has made of the file; values have short names, or titles."""
    clouds = ["sync", {"title": "both", "name": "async", "first": 2}]
    table = {
        **SMALL,
        "algorithm": {"name": "fedbcd", "penalty": 0.5},
        "runs": [
            {"title": "own"},
            {"title": "one for all", "algorithm": {"name": "fedavg"}},
        ],
        "sweep": {"keys": {"cloud": clouds, "algorithm.device_step": [0.1, 0.2]}},
    }
    _, points = parse_sweep(table)
    assert [point.jobs[0].title for point in points][:3] == [
        "own, sync, algorithm.device_step = 0.1",
        "own, sync, algorithm.device_step = 0.2",
        "own, both, algorithm.device_step = 0.1",
    ]
    found = [(job.method.name, job.spec.cloud.name) for point in points for job in point.jobs]
    assert found == [
        (method, cloud)
        for method in ("fedbcd", "fedavg")
        for cloud in ("sync", "sync", "async", "async")
    ]
    assert points[0].jobs[0].method.penalty == 0.5
    assert {job.method.plan[-1].step for point in points for job in point.jobs} == {0.1, 0.2}


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"cloud": [3]}, "its values must be tables, not 3"),
        ({"cloud": ["sync", "sync"]}, "two points of the sweep are called 'sync'"),
        ({"cloud": ["asink"]}, "did you mean 'async'"),
    ],
)
def test_a_bad_section_of_a_sweep_is_refused_in_words(
    keys: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_sweep({**SMALL, "sweep": {"keys": keys}})
    assert complaint in str(refused.value)


def test_a_sweep_leaves_curves_tables_and_a_report(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    sweep = {"seeds": 2, "keys": {"algorithm.penalty": [0.1, 5.0]}}
    job.write_text(dump_toml({**SMALL, "sweep": sweep}))
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["sweep", str(job), "--out", str(out), "--workers", "1"])
    assert result.exit_code == 0, result.output
    names = {path.name for path in out.iterdir() if path.suffix != ".json"}
    assert names == {"curves.csv", "sweep.csv", "curves.png", "report.html", "runs"}
    assert len(list((out / "runs").iterdir())) == 2
    lines = (out / "curves.csv").read_text().splitlines()
    assert lines[1].startswith("algorithm.penalty = 0.1,0,0")
    assert "best: algorithm.penalty = " in result.output


def test_a_sweep_is_not_put_among_the_files_of_a_run(tmp_path: Path) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "out"
    sweep = {"keys": {"algorithm.penalty": [0.1, 5.0]}}
    job.write_text(dump_toml({**SMALL, "sweep": sweep}))
    parse(SMALL)[0].run(out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(RecordError, match="holds a run already; choose another folder with --out"):
        CliRunner().invoke(app, ["sweep", str(job), "--out", str(out)], catch_exceptions=False)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(ConfigError, match=r"unknown key 'sweep' \(it is for 'fedbcd sweep'\)"):
        CliRunner().invoke(app, ["run", str(job)], catch_exceptions=False)
