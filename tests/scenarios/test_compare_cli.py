"""Runs with several seeds on the command line: `fedbcd compare`, `fedbcd run` of a job with seeds,
and devices that are kept out.
"""

import csv
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.config import dump_toml, read_toml
from fedbcd.engines.joining import models_from
from fedbcd.errors import ConfigError
from fedbcd.experiments import pool
from fedbcd.experiments.job import load_job, parse, seeds_in
from fedbcd.experiments.pool import job_key
from support.runs import fedbcd, hash_folder

TABLE: dict[str, Any] = {
    "data": {"samples": 10},
    "federation": {"servers": 2, "devices": 2, "active": 1, "newcomers": 2, "newcomer_steps": 3},
    "model": {"name": "logistic"},
    "run": {"rounds": 2, "seeds": 2, "looks": 2},
    "runs": [
        {"title": "alone", "algorithm": {"name": "local", "device_step": 0.05}},
        {"title": "FedAvg [/b]", "algorithm": {"name": "fedavg", "device_step": 0.1}},
        {"title": "FedBCD", "algorithm": {"name": "fedbcd", "device_step": 0.05}},
    ],
}


ALONE = ("--workers", "1")


def job(folder: Path, **run: Any) -> Path:
    path = folder / "job.toml"
    path.write_text(dump_toml({**TABLE, "run": {**TABLE["run"], **run}}))
    return path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("seeds")
    answer = fedbcd("run", job(folder), "--out", folder / "out", "--workers", "1", "--json")
    assert answer.code == 0, answer.err
    return folder / "out", answer


# ------------------------------------------------------------------------------------------------
# runs with seeds
def test_a_job_with_seeds_is_a_comparison(played: tuple[Path, Any]) -> None:
    out, answer = played
    assert "test scores at the end, mean and deviation over 2 seeds" in answer.err
    assert "FedAvg [/b]" in answer.err
    assert answer.err.count("±") >= 9
    summary = answer.summary
    assert [run["title"] for run in summary["runs"]] == ["alone", "FedAvg [/b]", "FedBCD"]
    assert summary["seeds"] == [0, 1]
    assert {(one["title"], one["baseline"]) for one in summary["against"]} >= {
        ("FedBCD", "alone"),
        ("FedBCD", "FedAvg [/b]"),
    }
    (first, *_) = csv.DictReader(io.StringIO((out / "comparison.csv").read_text()))
    assert float(first["personal_accuracy"]) == summary["runs"][0]["personal_accuracy"]


def test_the_run_with_the_first_seed_is_left_whole(played: tuple[Path, Any]) -> None:
    out, _ = played
    assert {path.name for path in out.iterdir()} == {
        *("config.toml", "comparison.csv", "curves.png", "report.html"),
        *("results", "runs"),
    }
    whole = sorted((out / "runs").iterdir())
    assert [path.name.rpartition("-")[0] for path in whole] == ["alone", "fedavg-b", "fedbcd"]
    for path in whole:
        assert {"models.safetensors", "events.jsonl", "curves.png"} <= {
            file.name for file in path.iterdir()
        }
    assert fedbcd("replay", whole[2]).code == 0
    assert len(list((out / "results").glob("*.json"))) == 6


def test_seeds_are_those_of_single_runs(played: tuple[Path, Any], tmp_path: Path) -> None:
    out, _ = played
    alone = load_job(job(tmp_path), "FedBCD").run(seed=1)
    kept = [json.loads(file.read_text())["summary"] for file in (out / "results").glob("*.json")]
    assert alone.digest in {summary["digest"] for summary in kept if summary["seed"] == 1}


def test_the_folder_says_how_to_go_on_and_is_not_taken_for_another_job(
    played: tuple[Path, Any], tmp_path: Path
) -> None:
    out, _ = played
    table = read_toml(out / "config.toml")
    assert seeds_in(table) == 2
    assert [job_key(one) for one in parse(table, recorded=True)] == [
        job_key(one) for one in parse(TABLE)
    ]
    refused = fedbcd("run", job(tmp_path), "--out", out)
    assert refused.code == 4
    assert "is not empty" in refused.err


def test_a_comparison_says_who_differs_and_can_be_changed_and_repeated(
    played: tuple[Path, Any], tmp_path: Path
) -> None:
    """What is known is not computed again, and the whole runs of other settings are no obstacle."""
    out, _ = played
    before = hash_folder(out / "results")
    changed = {"title": "FedBCD", "algorithm": {"name": "fedbcd", "device_step": 0.06}}
    path = tmp_path / "job.toml"
    path.write_text(dump_toml({**TABLE, "runs": [*TABLE["runs"][:1], changed]}))
    answer = fedbcd("compare", path, "--out", out, *ALONE)
    assert answer.code == 0, answer.err
    assert "FedBCD against alone: " in answer.out
    assert "over seeds" in answer.out
    after = hash_folder(out / "results")
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2
    assert len(list((out / "runs").iterdir())) == 4


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def interrupted(*_: object) -> None:
        tried.append(None)
        if len(tried) == 3:
            signal.raise_signal(signal.SIGINT)
        compute(*_)

    compute = pool._compute
    monkeypatch.setattr(pool, "_compute", interrupted)
    answer = fedbcd("run", job(tmp_path), "--out", tmp_path / "out", "--workers", "1")
    assert answer.code == 130
    assert f"fedbcd run --resume --out {tmp_path / 'out'}" in answer.err
    assert len(list((tmp_path / "out" / "results").glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("words", "changes", "complaint"),
    [
        (("run", "--seeds", "0"), {}, "seeds=0 must be 1 or more"),
        (("run",), {"seeds": 0}, "run.seeds = 0 must be 1 or more"),
        (("run",), {"seeds": 1.5}, "run.seeds = 1.5 must be"),
        (("run", "--track", "tensorboard"), {}, "--track is about one run; add --seeds 1"),
        (("compare", "--seeds", "0"), {}, "seeds=0 must be 1 or more"),
        (("compare", "--against", "alon"), {}, "did you mean 'alone'"),
        (("compare", "--workers", "0"), {}, "workers=0 must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    words: tuple[str, ...], changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    command, *options = words
    out = ("--out", tmp_path / "out")
    answer = fedbcd(command, job(tmp_path, **changes), *options, *out)
    assert answer.code == 2, answer.err
    assert complaint in answer.err
    assert not (tmp_path / "out").exists()


def test_seeds_are_no_setting_of_a_run() -> None:
    assert seeds_in(TABLE) == 2
    (one, *_) = parse(TABLE)
    assert "seeds" not in one.to_table()["run"]


# ------------------------------------------------------------------------------------------------
# devices that are kept out
def test_newcomers_get_models_from_z(played: tuple[Path, Any]) -> None:
    _, answer = played
    assert "2 devices that were kept out, before and after 3 steps" in answer.err
    rows = {row["title"]: row for row in answer.summary["runs"]}
    assert all(0 <= row["newcomers.own"] <= 1 for row in rows.values())
    assert rows["alone"]["newcomers.own"] == rows["alone"]["newcomers.alone"], "z stays x(0)"


def test_the_data_are_split_among_all_and_newcomers_take_no_part(tmp_path: Path) -> None:
    whole = load_job(job(tmp_path), "FedBCD")
    federation, newcomers = whole.make_federation(), whole.newcomers()
    assert newcomers is not None
    assert (federation.devices, newcomers.devices) == (4, 2)
    everyone = parse(
        {
            **TABLE,
            "federation": {"servers": 2, "devices": 3, "active": 1},
            "runs": TABLE["runs"][:1],
        }
    )[0].make_federation()
    parts = [*map(federation.owned, range(4)), *map(newcomers.owned, range(2))]
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(parts, map(everyone.owned, range(6)), strict=True)
    )


def test_one_newcomer_of_many_gets_the_model_that_it_would_get_alone(tmp_path: Path) -> None:
    run = load_job(job(tmp_path), "FedBCD").run()
    federation, spec = run.federation, run.spec
    assert spec is not None
    owned = [
        fb.Samples(federation.pool.inputs[own], federation.pool.targets[own])
        for own in map(federation.owned, range(3))
    ]
    z = run.global_VF[0]
    together = models_from(z, federation, spec, owned, 5, 0)
    alone = fb.personalise(run, owned[0], steps=5, test=owned[1], server=0, seed=0)
    torch.testing.assert_close(together[0], alone.x)


def test_fine_tuning_begins_at_z_once(tmp_path: Path) -> None:
    """Its sessions begin at z; a newcomer's steps are one session, as with FedAvg."""
    table = {**TABLE, "runs": [{"algorithm": {"name": "fedavg-ft", "device_step": 0.1}}]}
    tuned = parse(table)[0].run()
    plain = parse({**TABLE, "runs": TABLE["runs"][1:2]})[0].run()
    assert tuned.summary["newcomers"]["own"] == plain.summary["newcomers"]["own"]


@pytest.mark.parametrize(("name", "value"), [("newcomers", -1), ("newcomer_steps", 0)])
def test_numbers_of_newcomers_are_checked(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"federation.{name} = {value} must be"):
        parse({**TABLE, "federation": {**TABLE["federation"], name: value}})
