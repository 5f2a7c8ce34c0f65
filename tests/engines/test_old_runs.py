"""Run folders that earlier versions have left: they resume and replay with what they were made with, whatever the defaults are now."""

import shutil
from pathlib import Path

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
    assert_six_rounds(job_of(old).start(old, resume=True), old)


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
