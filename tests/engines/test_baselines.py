"""What reviewers ask for first: devices that learn alone, and FedAvg whose devices go on from z by
themselves before they are tested. Compared with loops written out here, with exact gradients in
float64.
"""

import json
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.errors import ConfigError
from support.runs import federation as digits

ETA, ZETA, DEVICES = 0.05, 0.6, 6
Vector = npt.NDArray[np.float64]


@cache
def federation() -> fb.Federation:
    """Six devices under two servers, each with a line of its own to find."""
    chance = torch.Generator().manual_seed(3)
    inputs = torch.randn(DEVICES, 7, 3, generator=chance, dtype=torch.float64)
    lines = torch.randn(DEVICES, 3, 1, generator=chance, dtype=torch.float64)
    devices = [(x, x @ line) for x, line in zip(inputs, lines, strict=True)]
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return fb.Federation(model, nn.functional.mse_loss, devices, servers=2)


def gradient(device: int, x: Vector) -> Vector:
    fed = federation()
    own = fed.positions[fed.starts[device] :][: fed.sizes[device]]
    a, b = fed.pool.inputs[own].numpy(), fed.pool.targets[own].numpy()[:, 0]
    found: Vector = 2 / len(b) * a.T @ (a @ x - b)
    return found


def trained(algorithm: fb.Algorithm, **more: Any) -> fb.Run:
    options = {"rounds": 4, "active": 2, "dtype": torch.float64, "looks": 1} | more
    return fb.train(federation(), algorithm, **options)


@pytest.mark.parametrize("cloud", [fb.SyncCloud(), fb.AsyncCloud(first=2)], ids=["sync", "async"])
@pytest.mark.parametrize("max_batch", [None, 1])
def test_alone_a_device_takes_its_steps_and_nobody_elses(
    cloud: fb.Cloud, max_batch: int | None, tmp_path: Path
) -> None:
    local = fb.Local(device_step=ETA, momentum=ZETA, batch="all", steps=(3, 3))
    run = trained(local, cloud=cloud, max_batch=max_batch, out=tmp_path)
    log = (tmp_path / "events.jsonl").read_text().splitlines()
    done = Counter(
        line["on"] for line in map(json.loads, log) if "Trained" in line.get("event", "")
    )
    assert sum(done.values()) >= 4 * 2
    for device in range(DEVICES):
        x = prev = np.zeros(3)
        for _ in range(3 * done[f"device/{device}"]):
            ex = x + ZETA * (x - prev)
            x, prev = ex - ETA * gradient(device, ex), x
        assert run.personal_NF[device].numpy() == pytest.approx(x, abs=1e-12)
    assert not run.global_VF.any(), "z is x(0)"
    replayed = fb.replay(tmp_path, federation())
    assert replayed["digest"] == run.summary["digest"]


@pytest.mark.parametrize("max_batch", [None, 1])
def test_a_tuned_model_is_z_and_some_steps_of_its_device(max_batch: int | None) -> None:
    tuned = fb.FineTuned(device_step=ETA, batch="all", tuning_steps=4, tuning_step=2 * ETA)
    run = trained(tuned, max_batch=max_batch)
    plain = trained(fb.FedAvg(device_step=ETA, batch="all"))
    assert torch.equal(run.global_VF, plain.global_VF), "tests leave training alone"
    for device in range(DEVICES):
        x = run.global_VF[0].numpy()
        for _ in range(4):
            x = x - 2 * ETA * gradient(device, x)
        assert run.personal_NF[device].numpy() == pytest.approx(x, abs=1e-12)


def test_tuned_models_are_tested_kept_and_the_same_after_a_resume(tmp_path: Path) -> None:
    """With mini-batches of their own, which are the same at each look."""
    tuned = fb.FineTuned(device_step=0.05, batch=8, tuning_steps=3)
    whole, half = tmp_path / "whole", tmp_path / "half"
    train = partial(fb.train, digits(), tuned, active=2)
    run = train(rounds=4, out=whole)
    assert run.history.last.personal_accuracy > run.history.last.global_accuracy
    assert run.history.last.distance == 0.0
    loaded = fb.Run.load(whole, run.federation)
    assert torch.equal(loaded.personal_NF, run.personal_NF)
    train(rounds=2, out=half)
    again = train(rounds=4, out=half, resume=True)
    assert torch.equal(again.personal_NF, run.personal_NF)
    assert again.personal_scores == run.personal_scores


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuning_steps=0 must be 1 or more; FedAvg does without"):
        fb.FineTuned(tuning_steps=0)
    with pytest.raises(ConfigError, match="tuning_step=0"):
        fb.FineTuned(tuning_step=0.0)
