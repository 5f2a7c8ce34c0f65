"""One value describes a run: every consumer takes every option from it, and an option that one of
them ignores fails here.
"""

import ast
import inspect
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.config import dump_toml
from fedbcd.data.datasets import DATASETS
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.errors import ConfigError, RecordError, RenamedWarning
from fedbcd.experiments.compare import _key as compare_key
from fedbcd.experiments.deployed import one_job, spec_of as deployed_spec
from fedbcd.experiments.job import Job, parse
from fedbcd.experiments.pool import job_key, without_none
from fedbcd.planner.pilots import pilot_spec
from fedbcd.record.eventlog import LogReader
from fedbcd.record.runfolder import difference
from fedbcd.spec import ENDS, IDENTITY, IN_RUN, OPTIONS, Budget, Place, RunSpec, Watch
from support.runs import BCD, fedbcd, federation, job_table, write_job

ROOT = Path(__file__).parents[2]
MODELS = f"sha256:{'0' * 64}"  # as a record names them
BASE = RunSpec(BCD, active=2, rounds=4)
# another value of every option, as Python has it and as a job file says it
OTHER: dict[str, tuple[Any, Any]] = {
    "clock": (
        fb.Clock(fb.Constant(1.0)),
        {"arrival": {"name": "constant", "value": 1.0}},
    ),
    "active": (3, 3),
    "seed": (7, 7),
    "joins": ({3: 2, 1: 5}, [[1, 5], [3, 2]]),
    "leaves": ({2: 3}, [[2, 3]]),
    "availability": (fb.Chance(0.5), {"name": "chance", "probability": 0.5}),
    "churn": (
        fb.Churn(0.02, 0.01, 20),
        {"joins": 0.02, "leaves": 0.01, "rounds": 20},
    ),
    "deadline": (
        fb.Deadline(60.0, 2, 1),
        {"after": 60.0, "least": 2, "spare": 1},
    ),
    "dtype": (torch.float64, "float64"),
    "max_batch": (1, 1),
    "storage": (torch.bfloat16, "bfloat16"),
    "precision": ("tf32", "tf32"),
    "start": (MODELS, MODELS),
    "uploads": (
        (fb.Clip(2.0), fb.Integers(2.0**-10)),
        [
            {"name": "clip", "norm": 2.0},
            {"name": "integers", "scale": 2.0**-10},
        ],
    ),
    "measure": ("pooled-labels", "pooled-labels"),
    "rounds": (9, 9),
    "until_clock": (50.0, 50),
    "stop": (
        fb.Plateau("worst_decile", 3),
        {"column": "worst_decile", "patience": 3, "least": 0.0},
    ),
    "evaluate_every": (3, 3),
    "looks": (5, 5),
    "certify_every": (0, 0),
    "certify_devices": (2, 2),
    "device_tables": (True, True),
    "checkpoint_every": (3, 3),
    "checkpoint_seconds": (5.0, 5),
    "best": ("worst_decile", "worst_decile"),
    "torch_device": ("cuda", "cuda"),
    "threads": (2, 2),
    "state": ("rows", "rows"),
    "ahead": (True, True),
    "compile": (True, True),
    "engine": (
        fb.Cluster(actors=2),
        {"name": "cluster", "actors": 2, "cpus": 1.0, "gpus": 0.0},
    ),
}
every_option = pytest.mark.parametrize("name", OPTIONS)


def other(name: str, base: RunSpec = BASE) -> RunSpec:
    """The run with another value of one option."""
    return base.changed({name: OTHER[name][0]})


@cache
def small() -> fb.Federation:
    return federation()


def in_part(name: str, *parts: type) -> bool:
    return any(f.name == name for part in parts for f in fields(part))


def job(name: str | None = None) -> Job:
    table = job_table()
    if name is not None:
        place = {"clock": table, "active": table["federation"]}.get(name, table["run"])
        if name in ENDS:
            del place["rounds"]
        place[name] = OTHER[name][1]
    return parse(table)[0]


def test_every_option_has_a_sentence_and_a_second_value_here() -> None:
    assert OTHER.keys() == OPTIONS.keys(), "give each new option another value in OTHER"
    assert all(f.metadata["says"] for f in OPTIONS.values())
    assert all(getattr(BASE, name) != value for name, (value, _) in OTHER.items())


# ------------------------------------------------------------------------------------------------
# consumers
def test_train_spells_every_option_for_editors_and_explains_it() -> None:
    named = inspect.signature(fb.train).parameters
    beside = {"federation", "algorithm", "cloud", "out", "resume", "record"}
    assert named.keys() - beside - {"on_round", "on_notice", "should_stop"} == OPTIONS.keys()
    assert all(named[name].default is None for name in OPTIONS)
    for name, f in OPTIONS.items():
        assert f"    {name:<18}{f.metadata['says']}" in str(fb.train.__doc__)


def test_somebody_reads_every_option() -> None:
    read = {
        node.attr
        for path in (ROOT / "src" / "fedbcd").rglob("*.py")
        if path.name != "spec.py" and "experiments" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert OPTIONS.keys() - read <= {"churn", "joins", "leaves"}
    assert "changes" in read


@every_option
def test_a_job_file_says_every_option(name: str) -> None:
    assert getattr(job(name).spec, name) == OTHER[name][0]
    table = json.loads(json.dumps(job(name).to_table()))
    (again,) = parse(without_none(table))
    assert again.spec == job(name).changed(measure=table["run"]["measure"]).spec
    assert (name in IN_RUN) == (name in table["run"])


@every_option
def test_the_page_on_job_files_has_every_option(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "jobs.md").read_text()


@every_option
def test_replay_and_resume_read_every_option_that_determines_the_numbers(name: str) -> None:
    data = federation()
    found, base = other(name).identity(data), BASE.identity(data)
    again = RunSpec.from_identity(json.loads(json.dumps(found)))
    if not in_part(name, *IDENTITY):
        assert found == base
    else:
        assert getattr(again, name) == OTHER[name][0]
        assert name in difference(base, found)
        assert again.identity(data) == found


@every_option
def test_pilots_keep_every_option_but_how_long_and_how_they_are_watched(name: str) -> None:
    cloud = fb.AsyncCloud(first=2)
    pilot = pilot_spec(other(name), cloud, 10.0)
    assert (pilot.cloud, pilot.rounds, pilot.until_clock, pilot.looks) == (cloud, None, 10.0, 1)
    kept = getattr(pilot, name) == OTHER[name][0]
    assert kept != in_part(name, Budget, Watch) or name == "certify_every"


@every_option
def test_a_kept_result_is_found_by_every_option_that_changes_it(name: str) -> None:
    beside = in_part(name, Place) or name.startswith("checkpoint_")
    assert (job_key(job(name)) == job_key(job())) == beside


@every_option
def test_a_comparison_goes_on_by_every_option_that_changes_it(name: str) -> None:
    beside = in_part(name, Place) or name.startswith("checkpoint_")
    data = small()
    assert (compare_key(other(name), data) == compare_key(BASE, data)) == beside


@every_option
def test_the_actors_of_a_cluster_get_every_option(name: str) -> None:
    assert pickle.loads(pickle.dumps(other(name))) == other(name)  # noqa: S301


DEPLOYED = (
    "clock",
    "active",
    "availability",
    "deadline",
    "seed",
    "max_batch",
    "uploads",
    "measure",
    "rounds",
    "until_clock",
)
REFUSED = ("stop", "dtype", "storage", "precision", "start", "joins", "leaves", "churn")


@every_option
def test_a_deployment_uses_an_option_refuses_it_or_has_a_place_and_a_watch_of_its_own(
    name: str,
) -> None:
    table = without_none(json.loads(json.dumps(job(name).to_table())))

    def deploy() -> tuple[Job, Blueprint]:
        one = one_job(table)
        return one, Blueprint.of(deployed_spec(one, Deploy()), one.make_federation())

    if name in REFUSED:
        with pytest.raises(ConfigError, match=name):
            deploy()
        return
    one, blueprint = deploy()
    assert getattr(blueprint, name, None) in (None, OTHER[name][0])
    if name in DEPLOYED:
        assert getattr(one.spec, name) == OTHER[name][0]
    else:
        assert in_part(name, Place, Watch)
        own = replace(RunSpec(BCD), threads=1)
        assert in_part(name, Watch) or getattr(one.spec, name) == getattr(own, name)


def test_the_head_of_a_log_is_the_identity_of_the_run(tmp_path: Path) -> None:
    spec = replace(BASE, rounds=1, storage=torch.bfloat16, seed=3, leaves={2: 3}, looks=1)
    fb.train(federation(), spec, out=tmp_path, certify_every=0)
    head = LogReader(tmp_path / "events.jsonl").header["identity"]
    assert head == json.loads(json.dumps(spec.identity(federation())))
    settled = replace(spec, measure="own-shares", rounds=None, looks=None)
    assert RunSpec.from_identity(head) == replace(settled, algorithm=BCD)


# ------------------------------------------------------------------------------------------------
# changes
def test_keywords_change_a_whole_description() -> None:
    base = replace(BASE, rounds=2, looks=1, certify_every=0)
    run = fb.train(federation(), base, seed=5)
    assert run.digest == fb.train(federation(), BCD, active=2, rounds=2, seed=5).digest
    assert run.summary["seed"] == 5


def test_to_say_when_to_stop_replaces_what_was_said_of_it() -> None:
    assert (other("until_clock").rounds, other("until_clock").until_clock) == (None, 50.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fb.train(federation(), BCD, rounds=1, active=2, device="cpu"), "^device is now"),
        (
            lambda: fb.replay("nowhere.jsonl", federation(), device="cpu"),
            "device is now called torch_device",
        ),
        (
            lambda: parse(job_table(**{"run.device": "cpu"})),
            r"^\[run\] device is now called torch_device",
        ),
        (lambda: fb.Settings(BCD, active=2), "fb.Settings is now fb.RunSpec"),
    ],
)
def test_old_names_go_on_and_point_to_the_new_ones(make: Callable[[], Any], words: str) -> None:
    with pytest.warns(RenamedWarning, match=words), suppress(RecordError):  # no log, for replay
        make()


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="device is now called torch_device, and both are given"):
        parse(job_table(**{"run.device": "cpu", "run.torch_device": "cpu"}))


def test_records_of_old_names_are_read_without_a_word() -> None:
    assert parse(job_table(**{"run.device": "cuda"}), recorded=True)[0].spec.torch_device == "cuda"


def test_the_command_line_says_where_torch_computes_and_notes_old_names(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml", **{"run.device": "cpu"})
    answer = fedbcd("run", tmp_path / "job.toml", "--out", tmp_path / "out", "--on", "gpu")
    assert "note: [run] device is now called torch_device" in answer.err
    assert "torch_device='gpu' cannot be used here" in answer.err
    old = fedbcd("paper", "fig3a", "--device", "gpu", "--out", tmp_path / "paper")
    assert "--device is now called --on" in old.err


# ------------------------------------------------------------------------------------------------
# results, jobs, data
def test_a_job_file_runs_from_python(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml")
    run = fb.load_job(path).run(tmp_path / "run", rounds=2, on_notice=lambda _: None)
    assert run.summary["rounds"] == 2
    again = fb.load_job(tmp_path / "run" / "config.toml")
    assert again.spec.rounds == 2
    assert again.run().digest == run.digest


def test_of_several_runs_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_toml({**job_table(), "runs": [{"title": "one"}, {"title": "two"}]}))
    assert fb.load_job(path, "two").title == "two"
    with pytest.raises(ConfigError, match="has 2 runs \\('one', 'two'\\): name one of them"):
        fb.load_job(path)
    with pytest.raises(ConfigError, match=r"none is called 'tow' \(did you mean 'two'\?\)"):
        fb.load_job(path, "tow")


def test_data_are_loaded_once_for_all_runs_of_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads: list[Path | None] = []
    load = DATASETS["digits"]

    def counted(folder: Path | None) -> Any:
        loads.append(folder)
        return load(folder)

    monkeypatch.setitem(DATASETS, "digits", counted)
    runs = [{"title": name, "cloud": {"name": name}} for name in ("sync", "async")]
    runs[1]["cloud"] = {"name": "async", "first": 2}
    (tmp_path / "job.toml").write_text(dump_toml({**job_table(**{"run.rounds": 1}), "runs": runs}))
    assert fedbcd("run", tmp_path / "job.toml", "--out", tmp_path / "out").code == 0
    assert len(loads) == 1
