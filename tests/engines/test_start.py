"""A run that begins with the models of an earlier one (`start`): which numbers that gives, and that
log, resume and refusals know it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.record.runfolder import difference
from fedbcd.record.start import COPY, models_of
from fedbcd.spec import RunSpec
from support.runs import BCD, LOGISTIC, fedbcd, federation, write_job

SPEC = RunSpec(BCD, fb.AsyncCloud(first=2), dtype=torch.float64, active=2, looks=1, certify_every=0)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "earlier"
    fb.train(federation(LOGISTIC), SPEC, rounds=5, out=folder)
    return folder


def _begun(earlier: Path, **changes: Any) -> fb.Run:
    """One round after the start: most devices and two servers are as they began."""
    return fb.train(federation(LOGISTIC), SPEC, **{"start": earlier, "rounds": 1} | changes)


def test_who_was_not_active_has_the_model_that_the_earlier_run_gave_it(earlier: Path) -> None:
    x_NF, z_VF = models_of(earlier)
    run = _begun(earlier)
    moved = [i for i in range(16) if not torch.equal(run.personal_NF[i], x_NF[i])]
    assert 0 < len(moved) <= 8
    waiting = [n for n in range(4) if torch.equal(run.global_VF[n], z_VF[n])]
    assert len(waiting) == 2
    first = run.history[0]
    assert first.distance == pytest.approx(
        float(sum((x_NF[i] - z_VF[i // 4]).norm() for i in range(16)) / 16), abs=1e-12
    )


def test_servers_step_from_the_models_that_their_members_brought(earlier: Path) -> None:
    """Eq. (6) by hand: every member counts from the beginning, by the model that it came with."""
    _, z_VF = models_of(earlier)
    run = _begun(earlier)
    first = [n for n in range(4) if not torch.equal(run.global_VF[n], z_VF[n])]
    w = z_VF[first].mean(0)
    for n in first:
        m = torch.stack([run.personal_NF[i] for i in federation().servers[n]]).mean(0)
        assert torch.allclose(run.global_VF[n], w - 0.5 * (w - m), rtol=0, atol=1e-13)


def test_one_z_for_all_begins_as_the_mean(earlier: Path) -> None:
    _, z_VF = models_of(earlier)
    run = _begun(earlier, cloud=fb.SyncCloud())
    mean = z_VF.mean(0)
    m = run.personal_NF.mean(0) if isinstance(run.personal_NF, torch.Tensor) else mean
    assert torch.allclose(run.global_VF[0], mean - 0.5 * (mean - m), rtol=0, atol=1e-13)


def test_a_set_that_is_asked_for_holds_from_the_beginning(earlier: Path) -> None:
    tight = replace(BCD, projection=fb.Box(-0.01, 0.01))
    run = fb.train(
        federation(LOGISTIC),
        replace(SPEC, algorithm=tight),
        start=earlier,
        rounds=1,
        on_notice=lambda _: None,
    )
    assert float(torch.as_tensor(run.personal_NF).abs().max()) <= 0.01


def test_models_in_files_and_rounds_ahead_begin_so_too(earlier: Path, tmp_path: Path) -> None:
    plain = _begun(earlier, rounds=4)
    stored = _begun(earlier, rounds=4, state=tmp_path)
    assert stored.digest == plain.digest
    ahead = _begun(earlier, rounds=4, ahead=True)
    assert torch.allclose(ahead.global_VF, plain.global_VF, rtol=0, atol=1e-12)


def test_a_run_keeps_its_copy_so_that_it_resumes_and_replays_alone(
    earlier: Path, tmp_path: Path
) -> None:
    whole = _begun(earlier, rounds=6)
    out = tmp_path / "run"
    _begun(earlier, rounds=3, out=out)
    later = _begun(out / COPY, rounds=6, out=out, resume=True)
    assert later.digest == whole.digest
    replayed = fb.replay(out / "events.jsonl", federation(LOGISTIC))
    assert replayed["digest"] == whole.digest
    (out / COPY).unlink()
    with pytest.raises(ConfigError, match="put that file back"):
        fb.replay(out / "events.jsonl", federation(LOGISTIC))


def test_who_one_is_depends_on_the_models_and_not_on_where_they_lie(
    earlier: Path, tmp_path: Path
) -> None:
    data = federation(LOGISTIC)
    here = replace(SPEC, start=earlier).identity(data)
    copy = tmp_path / "elsewhere.safetensors"
    copy.write_bytes((earlier / "models.safetensors").read_bytes())
    assert here == replace(SPEC, start=copy).identity(data)
    assert "start" in difference(SPEC.identity(data), here)
    assert "start" not in SPEC.identity(data)


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_what_holds_no_models_is_refused(tmp_path: Path, place: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="holds no models of a run"):
        fb.train(federation(LOGISTIC), SPEC, start=tmp_path / place, rounds=1, out=out)
    assert not out.exists()


def test_a_run_of_another_model_is_refused(earlier: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="16 devices with 650 values, this run 16 with 910"):
        fb.train(federation(), SPEC, start=earlier, rounds=1, out=out)
    assert not out.exists()


def test_a_cluster_and_a_deployment_say_that_they_cannot(earlier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="actors of a cluster begin at x"):
        _begun(earlier, engine="cluster")
    job = write_job(tmp_path / "job.toml", **{"run.start": str(earlier)})
    answer = fedbcd("up", job, "--out", tmp_path / "up")
    assert answer.code == 2
    assert "a deployment begins at x(0)" in answer.err


def test_a_job_file_names_the_folder(tmp_path: Path) -> None:
    assert fedbcd("run", write_job(tmp_path / "a.toml"), "--out", tmp_path / "a").code == 0
    job = write_job(tmp_path / "b.toml", **{"run.start": str(tmp_path / "a"), "run.rounds": 1})
    answer = fedbcd("run", job, "--out", tmp_path / "b", "--json")
    assert answer.code == 0, answer.err
    first = fb.History.read_csv(tmp_path / "b" / "history.csv")[0]
    last = fb.History.read_csv(tmp_path / "a" / "history.csv").last
    assert first.global_accuracy == last.global_accuracy
    assert first.personal_accuracy == last.personal_accuracy
    assert fedbcd("replay", tmp_path / "b").code == 0
