"""Data, loss and metric of one's own in a job file, found beside the file from wherever a command
is started, and what strangers' functions may do wrong.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.config import dump_toml
from fedbcd.errors import ConfigError
from fedbcd.experiments.pool import job_key
from fedbcd.report.advice import advice
from fedbcd.report.view import read_run, run_view
from support.runs import Answer, fedbcd, job_table

MODULE = '''
import torch
import fedbcd as fb
from fedbcd.data import LoadedDataset

def lines(folder=None):
    """Four devices with lines of their own."""
    torch.manual_seed(4)
    found = []
    for device in range(4):
        x = torch.randn(30, 3)
        y = x @ torch.tensor([1.0, -1.0, 0.5 * device])
        found.append(((x[:20], y[:20]), (x[20:], y[20:])))
    return found

def pooled():
    digits = fb.load_dataset("digits")
    return LoadedDataset(digits.train, digits.test, digits.transform, 10)

def with_test():
    return {"devices": [train for train, _ in lines()], "test": lines()[0][1]}

def absolute(outputs, targets):
    return (outputs.squeeze(-1) - targets).abs()

absolute.better = "lower"

def mean_absolute(outputs, targets):
    return absolute(outputs, targets).mean()

def sideways(outputs, targets):
    return absolute(outputs, targets)
sideways.better = "left"

def uneven():
    return [*lines()[:3], ((torch.ones(5, 2), torch.ones(5)), None)]

def broken():
    raise ValueError("no such table")

def nothing():
    return 7

number = 3
'''
OWN = {
    "data": {"name": "NAME:lines"},
    "model": {"name": "logistic", "loss": "NAME:mean_absolute", "metric": "NAME:absolute"},
    "federation": {"servers": 2, "devices": 2, "active": 1},
    "run": {"rounds": 4, "evaluate_every": 2},
}


def written(folder: Path, **changes: Any) -> Path:
    """A job file with a module beside it, each of a name of its own."""
    folder.mkdir(exist_ok=True)
    name = f"own_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(MODULE)
    table = job_table(**{**OWN, **changes})
    (folder / "job.toml").write_text(dump_toml(table).replace("NAME", name))
    return folder / "job.toml"


def complaint(answer: Answer) -> str:
    assert answer.code in (2, 3), answer
    return " ".join(answer.err.split())


def test_every_command_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    job, out = written(tmp_path / "in"), tmp_path / "out"
    run = fedbcd("run", job, "--out", out, "--json")
    assert run.code == 0, run
    assert run.summary["personal_absolute"] > 0.3  # a mean absolute error, of untrained lines
    assert run.summary["measures"] == {"absolute": "lower", "loss": "lower"}
    assert "test absolute at the end" in run.err
    view = run_view(read_run(out), "0")
    assert view["personal"]["worst_decile"] == view["personal"]["worst"][0]["personal"]
    assert view["personal"]["worst_decile"] > view["personal"]["mean"]
    assert not any("accuracy" in remark for remark in advice(view))
    assert fedbcd("report", out).code == 0
    for command in (("replay", out), ("run", "--resume", "--out", out)):
        assert "--trust" in complaint(fedbcd(*command))
        assert fedbcd(*command, "--trust").code == 0
    exported = ("export", out, "--global", "--format", "safetensors")
    assert "--trust" in complaint(fedbcd(*exported))
    assert fedbcd(*exported, "--trust").code == 0
    newcomer = tmp_path / "newcomer.npz"
    np.savez(newcomer, inputs=np.eye(3, dtype=np.float32), targets=np.arange(3, dtype=np.float32))
    joined = ("personalise", out, "--data", newcomer, "--steps", "2", "--out", tmp_path / "new")
    assert "--trust" in complaint(fedbcd(*joined))
    assert fedbcd(*joined, "--trust").code == 0
    assert fedbcd("check", job).code in (0, 1)
    assert fedbcd("plan", job).code == 0
    assert fb.load_job(job).run().digest == run.summary["digest"]


def test_a_sweep_in_processes_takes_them(tmp_path: Path) -> None:
    job = written(tmp_path / "in", sweep={"keys": {"algorithm.penalty": [0.1, 100.0]}})
    answer = fedbcd("sweep", job, "--out", tmp_path / "sweep", "--workers", "2", "--json")
    assert answer.code == 0, answer


def test_a_result_is_not_that_of_other_data(tmp_path: Path) -> None:
    job = fb.load_job(written(tmp_path / "in"))
    before = job_key(job)
    assert job_key(job.changed(threads=1)) == before
    (module,) = (tmp_path / "in").glob("*.py")
    module.write_text(MODULE.replace("manual_seed(4)", "manual_seed(5)"))
    assert job_key(job) != before


def test_the_same_as_in_python(tmp_path: Path) -> None:
    federation = fb.load_job(written(tmp_path / "in")).make_federation()
    assert federation.devices == 4
    assert federation.own_tests is not None
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0])
    (absolute, loss) = federation.measures(outputs, targets)
    assert absolute.by_sample(outputs, targets).tolist() == [1.0, 2.0]
    assert (absolute.better, loss.better) == (("lower",), ("lower",))
    assert float(federation.loss(outputs, targets)) == 1.5


def test_a_pool_is_split_as_others_are(tmp_path: Path) -> None:
    part = {"servers": 2, "devices": 2, "active": 1}
    own = written(
        tmp_path / "in", data={"name": "NAME:pooled"}, model={"name": "logistic"}, federation=part
    )
    mine = fb.load_job(own).make_federation()
    other = written(tmp_path / "in", data={"name": "digits"}, model={}, federation=part)
    assert mine.fingerprint() == fb.load_job(other).make_federation().fingerprint()


def test_regression_without_a_metric_is_tested_by_its_squared_error(tmp_path: Path) -> None:
    plain = written(tmp_path / "in", data={"name": "NAME:with_test"}, model={"name": "logistic"})
    run = fb.load_job(plain).run()
    module, test = run.global_model, run.federation.test
    assert test is not None
    error = nn.functional.mse_loss(module(test.inputs).squeeze(-1), test.targets).detach()
    assert run.summary["mean_model_mse"] == pytest.approx(float(error), rel=1e-5)
    assert run.history.last.global_mse < run.history[0].global_mse


def test_the_worst_tenth_has_the_largest_errors(tmp_path: Path) -> None:
    run = fb.load_job(written(tmp_path / "in")).run()
    assert run.history.last.worst_decile_absolute == max(run.personal_scores.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"name": "NAME:no"}}, "cannot be imported"),
        ({"data": {"name": "NAME:number"}}, "is not callable; name a function or class that"),
        ({"data": {"name": "NAME:nothing"}}, "returns int; return a list with the data of each"),
        ({"data": {"name": "NAME:broken"}}, "failed (ValueError: no such table)"),
        ({"data": {"name": "NAME:uneven"}}, "device 3 has inputs of shape (2,), device 0 of (3,)"),
        ({"data": {"name": "NAME:lines", "samples": 9}}, "leave data.samples out"),
        (
            {"federation": {"servers": 1, "devices": 3, "active": 1}},
            "let servers times devices, and newcomers, be 4",
        ),
        ({"data": {"name": "digit"}}, "did you mean 'digits'?"),
        ({"data": {"name": "NAME:lines", "holdout": 0.2}}, "every device has brought tests of its"),
        (
            {"model": {"name": "logistic", "metric": "accuracy"}},
            "accuracy compares labels, and targets are torch.float32; labels are whole numbers",
        ),
        (
            {"model": {"name": "logistic", "loss": "cross_entropy"}},
            "cross-entropy is for labels, whole numbers; of numbers take the squared error:"
            ' nn.MSELoss(), in a job file loss = "mse"',
        ),
        (
            {"model": {"name": "logistic", "loss": "mae"}},
            "known: cross_entropy, mse, bce, or your own",
        ),
        (
            {"model": {"name": "logistic", "metric": "f2"}},
            "known: accuracy, mse, r2, f1, or your own",
        ),
        (
            {"model": {"name": "logistic", "metrics": ["mse", "NAME:mean_absolute", "mse"]}},
            "two measures are called 'mse'",
        ),
        ({"model": {"name": "logistic", "metric": "NAME:sideways"}}, "better='left'"),
        ({"model": {"name": "logistic", "metric": "math:hypot"}}, "fails on outputs of shape"),
        ({"model": {"name": "logistic", "loss": "NAME:absolute"}}, "the loss returns shape (2,)"),
        ({"model": {"name": "logistic", "loss": "builtins:len"}}, "the loss fails on outputs of"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    job = written(tmp_path / "in", **changes)
    assert says in complaint(fedbcd("run", job, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_module_hidden_by_another_of_its_name_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "in")
    assert fb.load_job(first).make_federation().devices == 4
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    second = fb.load_job(tmp_path / "copy" / "job.toml")
    assert second.make_federation().devices == 4  # the same text
    (module,) = (tmp_path / "copy").glob("*.py")
    module.write_text(f"{MODULE}# changed")
    with pytest.raises(ConfigError, match="is hidden by another module of that name"):
        second.make_federation()
