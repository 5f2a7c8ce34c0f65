"""Somebody whom no run knew: a personal model from z, by the run's own local steps, compared with z
on samples that it did not train on.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.errors import ConfigError, DataError, RecordError
from support.runs import CASES, LOGISTIC, MLP, fedbcd, federation, train, write_job

U = 2.0**-53


def _digits(*labels: int) -> fb.Samples:
    """Digits of these kinds, from the part of the test set that no device has."""
    data = fb.load_dataset("digits").test
    mine = torch.isin(data.targets, torch.tensor(labels))
    return fb.Samples(data.inputs[mine], data.targets[mine])


@pytest.fixture(scope="module")
def run() -> fb.Run:
    return train("fedbcd-sync", rounds=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("newcomers")
    job = write_job(base / "job.toml")
    assert fedbcd("run", job, "--out", base / "run").code == 0
    return base / "run"


def test_a_newcomer_gets_a_model_of_its_own_that_is_better_than_z_for_it(run: fb.Run) -> None:
    found = fb.personalise(run, _digits(1, 7), steps=200)
    assert found.score > found.global_score + 2 * found.error
    assert found.trained_on + found.tested_on == len(_digits(1, 7))
    assert "better than z" in found.sentence


@pytest.mark.parametrize("case", ["fedbcd-i-sync", "fedavg-sync", "fedprox-sync"])
def test_every_algorithm_takes_its_own_local_steps(case: str) -> None:
    """The baselines go on from z once; FedBCD-I trains offline, and is drawn to z at times."""
    found = fb.personalise(train(case, rounds=2), _digits(0, 1), steps=30)
    assert found.score > found.global_score
    again = fb.personalise(train(case, rounds=2), _digits(0, 1), steps=30)
    assert torch.equal(found.x, again.x)


def test_its_steps_are_those_of_algorithm_1() -> None:
    """Exact gradients of a linear regression, by hand: the same momentum, penalty and set."""
    chance = torch.Generator().manual_seed(3)
    inputs = torch.randn(6, 3, generator=chance, dtype=torch.float64)
    targets = inputs @ torch.ones(3, 1, dtype=torch.float64)
    line = nn.Linear(3, 1, bias=False).double()
    fed = fb.Federation(line, nn.functional.mse_loss, [(inputs, targets)] * 2, 1)
    algorithm = fb.FedBCD(
        device_step=0.1, batch="all", penalty=[1.0, 3.0], projection=fb.Box(-0.5, 0.5)
    )
    run = fb.train(fed, algorithm, rounds=2, dtype=torch.float64, on_notice=lambda _: None)
    own = inputs[:4] + 1, targets[:4]
    found = fb.personalise(run, own, test=own, steps=7)
    z = x = before = run.global_VF[0]
    for _ in range(7):
        ahead = x + 0.9 * (x - before)
        gradient = 2 * own[0].T @ (own[0] @ ahead - own[1][:, 0]) / 4
        x, before = (ahead - 0.1 * (gradient + 2.0 * (ahead - z))).clamp(-0.5, 0.5), x
    assert torch.allclose(found.x, x, rtol=0, atol=7 * 50 * U * 10)


def test_offline_it_goes_on_alone_as_long_as_the_devices_of_the_run() -> None:
    """Algorithm 2, "edge devices suspend local training after finishing 4 offline rounds": here 2,
    of 3 exact steps each, before z draws it back by 3 penalty steps. By hand.
    """
    chance = torch.Generator().manual_seed(3)
    inputs = torch.randn(6, 3, generator=chance, dtype=torch.float64)
    targets = inputs @ torch.ones(3, 1, dtype=torch.float64)
    line = nn.Linear(3, 1, bias=False).double()
    fed = fb.Federation(line, nn.functional.mse_loss, [(inputs, targets)] * 2, 1)
    algorithm = fb.FedBCDI(
        device_step=0.05, batch="all", steps=(3, 3), available=2, offline_limit=2, penalty=0.2
    )
    run = fb.train(fed, algorithm, rounds=2, dtype=torch.float64, on_notice=lambda _: None)
    own = inputs[:4] + 1, targets[:4]
    found = fb.personalise(run, own, test=own, steps=14)
    z = x = before = run.global_VF[0]
    for step in range(14):
        if step in (6, 12):  # a contact; x - before is kept
            moved = x - before
            x = z + (1 - 0.2) ** 3 * (x - z)
            before = x - moved
        ahead = x + 0.9 * (x - before)
        gradient = 2 * own[0].T @ (own[0] @ ahead - own[1][:, 0]) / 4
        x, before = ahead - 0.05 * gradient, x
    assert torch.allclose(found.x, x, rtol=0, atol=16 * 50 * U * 10)


def test_a_run_of_its_log_gives_the_same_as_the_run(folder: Path, run: fb.Run) -> None:
    assert run.spec is not None
    assert run.spec.algorithm == CASES["fedbcd-sync"][0]
    at_home = fb.personalise(folder, _digits(3, 8), server=1)
    assert torch.equal(at_home.x, fb.personalise(folder, _digits(3, 8), server=1, seed=0).x)
    assert not torch.equal(at_home.x, fb.personalise(folder, _digits(3, 8), seed=5).x)


def test_the_command_writes_the_model_and_says_what_it_gained(folder: Path, tmp_path: Path) -> None:
    own = _digits(1, 7)
    np.savez(tmp_path / "own.npz", inputs=own.inputs.numpy(), targets=own.targets.numpy())
    out = tmp_path / "mine.safetensors"
    answer = fedbcd("personalise", folder, "--data", tmp_path / "own.npz", "--out", out, "--json")
    assert answer.code == 0, answer.err
    assert answer.summary["score"] > answer.summary["global_score"]
    assert "the newcomer's own model" in answer.err
    found = fb.personalise(folder, own)
    module = LOGISTIC()
    from safetensors.torch import load_file

    module.load_state_dict(load_file(out))
    for mine, theirs in zip(module.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": torch.zeros(4, 7, 7, dtype=torch.uint8)}, r"inputs of shape \(7, 7\)"),
        ({"inputs": torch.zeros(4, 8, 8)}, r"torch.float32.*bring them to"),
        ({"targets": torch.tensor([0, 1, 2, 10])}, "label 10, but the model of the run knows 0"),
        ({"targets": torch.tensor([0, 1, -2, 1])}, "label -2"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "3 targets"),
        (
            {"inputs": torch.zeros(0, 8, 8, dtype=torch.uint8), "targets": torch.zeros(0).long()},
            "0",
        ),
    ],
)
def test_data_of_another_kind_are_refused(run: fb.Run, change: Any, sentence: str) -> None:
    good = {"inputs": torch.zeros(4, 8, 8, dtype=torch.uint8), "targets": torch.arange(4)}
    data = {**good, **change}
    with pytest.raises(DataError, match=sentence):
        fb.personalise(run, (data["inputs"], data["targets"]), steps=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps=0 must be a whole number, 1 or more"),
        ({"seed": "x"}, "seed = 'x' must be a whole number"),
        ({"steps": "10"}, "steps='10' must be a whole number"),
        ({"server": "1"}, "server '1' is not in this run"),
        ({"held_out": 1.5}, "held_out=1.5 must be between"),
        ({"server": 9}, "server 9 is not in this run, which has 0 to 3"),
    ],
)
def test_options_out_of_bounds_are_refused(run: fb.Run, options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fb.personalise(run, _digits(1), **options)


def test_a_folder_that_is_no_run_and_a_run_of_another_model_are_refused(
    folder: Path, run: fb.Run, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match="is not the folder of a run"):
        fb.personalise(tmp_path, _digits(1))
    with pytest.raises(RecordError, match="another model than the federation"):
        fb.personalise(folder, _digits(1), federation=federation(MLP))
    with pytest.raises(ConfigError, match="does not know how it was trained"):
        fb.personalise(replace(run, spec=None), _digits(1))
    with pytest.raises(ConfigError, match="None is neither a run nor the folder of one"):
        fb.personalise(None, _digits(1))  # type: ignore[arg-type]
    run.save(tmp_path / "saved")
    with pytest.raises(RecordError, match=r"as Run.save leaves them.*spec="):
        fb.personalise(tmp_path / "saved", _digits(1))


def test_numbers_of_another_width_are_the_same_numbers(run: fb.Run) -> None:
    own = _digits(1, 7)
    wide = own.inputs.numpy().astype("int64"), own.targets.numpy().astype("int32")
    assert torch.equal(fb.personalise(run, wide, steps=5).x, fb.personalise(run, own, steps=5).x)


def test_a_method_that_sends_nothing_has_no_model_for_a_newcomer(run: fb.Run) -> None:
    @dataclass(frozen=True)
    class Silent(fb.Local):
        def method(self, facts: Any) -> Any:
            return replace(super().method(facts), personal="z")

    assert run.spec is not None
    silent = replace(run.spec, algorithm=Silent())
    with pytest.raises(ConfigError, match="keeps and sends no models"):
        fb.personalise(run, _digits(1), spec=silent)


@pytest.mark.parametrize("name", ["missing.npz", "text.npz", "half.npz", "other.npz", "x.pickle"])
def test_a_file_that_holds_no_samples_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """Nothing in it is unpickled."""
    np.savez(tmp_path / "other.npz", pictures=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "half.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:60])
    (tmp_path / "x.pickle").write_bytes(b"\x80\x04K\x01.")
    answer = fedbcd("personalise", folder, "--data", tmp_path / name)
    assert answer.code == 3
    assert "inputs and targets" in answer.err
    assert "unsafely" not in answer.err  # as NumPy proposes


def test_a_model_that_cannot_be_written_is_refused_before_anything_is_computed(
    folder: Path, tmp_path: Path
) -> None:
    answer = fedbcd("personalise", folder, "--data", tmp_path / "none.npz", "--out", tmp_path)
    assert answer.code == 2
    assert "is a folder; name a file, such as --out" in answer.err
