"""Run folders that earlier versions have left: they resume and replay with what they were made
with, whatever the defaults are now.
"""

import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedbcd as fb
from fedbcd.config import read_toml
from fedbcd.errors import RecordError
from fedbcd.experiments.job import Job, parse
from fedbcd.record.eventlog import LogReader
from support.runs import fedbcd

pytestmark = pytest.mark.filterwarnings(
    "ignore::fedbcd.errors.BorderWarning"
)  # one of the runs meets its box
FOLDERS = sorted((Path(__file__).parent / "fixtures").iterdir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: a run of three rounds, the job file it was made from, and its models after six
    rounds.
    """
    return Path(shutil.copytree(request.param, tmp_path / "old"))


def job_of(old: Path, **algorithm: object) -> Job:
    """What a user still has: the file, which is silent where there was a default."""
    table = read_toml(old / "job.toml")
    table["algorithm"] |= algorithm
    table["run"]["rounds"] = 6
    (job,) = parse(table)
    return job


def assert_six_rounds(run: fb.Run, old: Path) -> None:
    """As the version that made it went on; the last bits may be those of another processor."""
    models = load_file(old / "six-rounds.safetensors")
    torch.testing.assert_close(run.personal_NF, models["x"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.global_VF, models["z"], rtol=1e-5, atol=1e-5)


def test_a_silent_job_file_goes_on_with_what_was_recorded(old: Path) -> None:
    run = job_of(old).run(old, resume=True)
    assert_six_rounds(run, old)
    assert run.summary["measure"] == "pooled-labels"
    assert run.history.last.personal_accuracy == pytest.approx(
        mean(pooled(run, device) for device in range(9)), abs=1e-12
    )


def test_a_program_that_names_no_measure_goes_on_with_the_one_that_was_recorded(old: Path) -> None:
    job = job_of(old)
    common: dict[str, Any] = {
        "cloud": job.spec.cloud,
        "active": 2,
        "max_batch": 1,
        "out": old,
        "resume": True,
        "rounds": 4,
    }
    assert (
        fb.train(job.make_federation(), job.spec.algorithm, **common).summary["measure"]
        == "pooled-labels"
    )
    with pytest.raises(RecordError, match="measure: pooled-labels there, own-shares here"):
        fb.train(job.make_federation(), job.spec.algorithm, measure="own-shares", **common)


def pooled(run: fb.Run, device: int) -> float:
    """The accuracy of a device's model on all test samples of its labels, as version 0.1.0 took
    it.
    """
    federation = run.federation
    assert federation.test is not None
    assert federation.labels is not None
    own = torch.isin(federation.test.targets, torch.tensor(federation.labels[device]))
    outputs = run.personal_model(device)(
        federation.transform(federation.test.inputs[own], torch.float32)
    )
    return float((outputs.argmax(1) == federation.test.targets[own]).double().mean())


def test_the_log_replays(old: Path) -> None:
    lines = (old / "events.jsonl").read_bytes().splitlines(keepends=True)
    (old / "events.jsonl").write_bytes(
        b"".join(line for line in lines if not line.startswith(b'{"end"'))
    )
    assert fb.replay(old / "events.jsonl", job_of(old).make_federation())["rounds"] == 3


def test_what_the_job_file_says_otherwise_is_another_run(old: Path) -> None:
    with pytest.raises(RecordError, match=r"device_step: [01.]+[02]? there, 0\.03 here"):
        job_of(old, device_step=0.03).run(old, resume=True)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("momentum_after_contact", "kept", r"momentum_after_contact: pull there, kept here"),
        (
            "projection",
            {"name": "none"},
            r"projection\.high: 2\.0 there, None here; algorithm\.projection\.low: -2\.0 there",
        ),
    ],
)
def test_the_present_default_by_name_is_another_run(
    old: Path, setting: str, value: object, message: str
) -> None:
    if not hasattr(job_of(old).spec.algorithm, setting):
        pytest.skip(f"a run of {job_of(old).spec.algorithm.name}")
    with pytest.raises(RecordError, match=message):
        job_of(old, **{setting: value}).run(old, resume=True)


def test_a_silent_program_goes_on_with_what_was_recorded(old: Path) -> None:
    """As a job file that names what the file names, so a call of `train` that gives what it
    gave.
    """
    job = job_of(old)
    given = {"device_step": job.spec.algorithm.device_step, "steps": job.spec.algorithm.steps}
    assert {*given} == job.spec.algorithm.said
    again: Any = {
        "active": 2,
        "cloud": job.spec.cloud,
        "max_batch": 1,
        "checkpoint_every": 2,
        "evaluate_every": 2,
    }
    run = fb.train(
        job.make_federation(),
        type(job.spec.algorithm)(**given),
        rounds=6,
        out=old,
        resume=True,
        **again,
    )
    assert_six_rounds(run, old)


def test_the_folder_alone_goes_on_with_what_it_says(old: Path) -> None:
    assert fedbcd("run", "--resume", "--out", old, "--rounds", "6", "--json").code == 0
    (job,) = parse(read_toml(old / "job.toml"))
    assert_six_rounds(fb.Run.load(old, job.make_federation()), old)
    assert read_toml(old / "config.toml")["algorithm"]["projection"] == {
        "name": "box",
        "low": -2.0,
        "high": 2.0,
    }


def test_the_border_matters_in_one_of_the_runs() -> None:
    """Else nothing here would show that there is one."""
    models = [load_file(folder / "six-rounds.safetensors")["x"] for folder in FOLDERS]
    assert any(int((x.abs() == 2).sum()) > 100 for x in models)


SEVERAL = """# As 0.1.0 has left it: what the job file said, and nothing else.
# It was killed before it came to the second run.
[data]
name = "digits"
samples = 12
[federation]
servers = 2
devices = 2
active = 1
[model]
hidden = [4]
[run]
rounds = 2
[[runs]]
title = "first"
algorithm = { name = "fedavg" }
[[runs]]
title = "second"
algorithm = { name = "fedbcd-i", device_step = 0.01 }
[[runs]]
title = "third"
"""


@pytest.mark.parametrize("file", [False, True])
def test_a_folder_of_several_runs_goes_on_with_what_they_were_begun_with(
    tmp_path: Path, file: bool
) -> None:
    """Also those that have not begun: they are to be compared with the others."""
    folder, job = tmp_path / "several", tmp_path / "job.toml"
    folder.mkdir()
    for path in (folder / "config.toml", job):
        path.write_text(SEVERAL)
    for _ in range(2):
        assert fedbcd("run", *([job] if file else []), "--resume", "--out", folder).code == 0
        for name in ("first", "second", "third"):
            found = LogReader(folder / name / "events.jsonl").header["identity"]["algorithm"]
            assert found["projection"] == {"name": "box", "low": -2.0, "high": 2.0}
            assert "momentum_after_contact" not in found
    new = tmp_path / "new"
    assert fedbcd("run", job, "--out", new).code == 0
    second = LogReader(new / "second" / "events.jsonl").header["identity"]["algorithm"]
    assert second["projection"] == {"name": "none"}
    assert second["momentum_after_contact"] == "kept"
    assert fedbcd("run", "--resume", "--out", new).code == 0, (
        "and the new folder goes on as it was, too"
    )
