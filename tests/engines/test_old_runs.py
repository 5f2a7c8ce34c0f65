"""Run folders that earlier versions have left: they resume and replay with what they were made with, whatever the defaults are now."""

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

FOLDERS = sorted((Path(__file__).parent / "fixtures").iterdir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: a run of three rounds, the job file it was made from, and its models after six rounds."""
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
    torch.testing.assert_close(run.personal_NF, models["x"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.global_VF, models["z"], rtol=1e-5, atol=1e-6)


def test_a_silent_job_file_goes_on_with_what_was_recorded(old: Path) -> None:
    run = job_of(old).start(old, resume=True)
    assert_six_rounds(run, old)
    assert run.summary["measure"] == "pooled-labels"
    assert run.history.last.personal_accuracy == pytest.approx(mean(pooled(run, device) for device in range(9)), abs=1e-12)


def test_a_program_that_names_no_measure_goes_on_with_the_one_that_was_recorded(old: Path) -> None:
    job = job_of(old)
    common: dict[str, Any] = {"cloud": job.cloud, "active": 2, "max_batch": 1, "out": old, "resume": True, "rounds": 4}
    assert fb.train(job.make_federation(), job.algorithm, **common).summary["measure"] == "pooled-labels"
    with pytest.raises(RecordError, match="measure: pooled-labels there, own-shares here"):
        fb.train(job.make_federation(), job.algorithm, measure="own-shares", **common)


def pooled(run: fb.Run, device: int) -> float:
    """The accuracy of a device's model on all test samples of its labels, as version 0.1.0 took it."""
    federation = run.federation
    assert federation.test is not None
    assert federation.labels is not None
    own = torch.isin(federation.test.targets, torch.tensor(federation.labels[device]))
    outputs = run.personal_model(device)(federation.transform(federation.test.inputs[own], torch.float32))
    return float((outputs.argmax(1) == federation.test.targets[own]).double().mean())


def test_the_log_replays(old: Path) -> None:
    lines = (old / "events.jsonl").read_bytes().splitlines(keepends=True)
    (old / "events.jsonl").write_bytes(b"".join(line for line in lines if not line.startswith(b'{"end"')))
    assert fb.replay(old / "events.jsonl", job_of(old).make_federation())["rounds"] == 3


def test_what_the_job_file_says_otherwise_is_another_run(old: Path) -> None:
    with pytest.raises(RecordError, match=r"device_step: 0\.02 there, 0\.03 here"):
        job_of(old, device_step=0.03).start(old, resume=True)


def test_the_present_default_by_name_is_another_run(old: Path) -> None:
    with pytest.raises(RecordError, match=r"momentum_after_contact: pull there, kept here"):
        job_of(old, momentum_after_contact="kept").start(old, resume=True)
