"""Optimizers and schedules: against those of torch, in records, and where they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.method import Facts
from fedbcd.algorithm.optimizers import Optimizer
from fedbcd.engines.run import explain_backend
from fedbcd.errors import ConfigError
from fedbcd.experiments.check import _scope
from support.runs import federation as digits


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fb.SGD(), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
        (fb.SGD(0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.2)),
        (fb.Adam(), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2)),
        (
            fb.Adam(0.7, 0.8, 1e-3),
            lambda p: torch.optim.Adam(p, 0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2),
        ),
    ],
)
def test_a_device_takes_the_steps_of_torchs_optimizer(ours: Optimizer, theirs: Any) -> None:
    """One device that trains alone, with exact gradients: the same as a loop of torch."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(9, 3, generator=chance, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    module = nn.Linear(3, 1).double()
    made = fb.Federation(module, nn.functional.mse_loss, [(x, y)], 1)
    local = fb.Local(device_step=0.1, batch="all", steps=6, weight_decay=0.2, optimizer=ours)
    run = fb.train(made, local, rounds=1, active=1, dtype=torch.float64)
    expected = made.make_model(0)
    optimizer = theirs(expected.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(expected(x), y).backward()
        optimizer.step()
    found = run.personal_model(0).state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_factors_are_of_a_devices_sessions() -> None:
    assert [fb.Stairs(2, 0.5).factor(t) for t in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = [fb.Cosine(4, 0.2).factor(t) for t in (0, 2, 4, 99)]
    assert cosine == pytest.approx([1.0, 0.6, 0.2, 0.2])


SCHEDULED = fb.FedAvg(
    device_step=0.01, batch=8, schedule=fb.Stairs(1, 0.8), optimizer=fb.Adam(), weight_decay=0.01
)


def test_records_know_them_and_every_way_to_compute_agrees(tmp_path: Path) -> None:
    """Batched, one by one, resumed and replayed."""
    options: dict[str, Any] = {"active": 2, "dtype": torch.float64, "looks": 1}
    made = digits()
    whole = fb.train(made, SCHEDULED, rounds=4, out=tmp_path / "whole", **options)
    alone = fb.train(made, SCHEDULED, rounds=4, max_batch=1, **options)
    torch.testing.assert_close(whole.global_VF, alone.global_VF, rtol=1e-9, atol=1e-12)
    fb.train(made, SCHEDULED, rounds=2, out=tmp_path / "parts", **options)
    parts = fb.train(made, SCHEDULED, rounds=4, out=tmp_path / "parts", resume=True, **options)
    assert parts.digest == whole.digest
    assert fb.replay(tmp_path / "whole", made)["digest"] == whole.digest
    spec = fb.RunSpec(algorithm=SCHEDULED, active=2)
    reasons = [choice.reason for choice in explain_backend(made, spec)]
    assert any("no weight decay, schedule or optimizer" in reason for reason in reasons)
    plain = fb.FedAvg(device_step=0.01, batch=8)
    identities = [fb.RunSpec(algorithm=a).identity(made)["algorithm"] for a in (plain, SCHEDULED)]
    assert identities[0].keys().isdisjoint({"weight_decay", "schedule", "optimizer"})
    assert identities[1]["schedule"] == {"name": "stairs", "every": 1, "times": 0.8}
    with pytest.raises(ConfigError, match="ahead=True: this run cannot be planned ahead"):
        fb.train(made, SCHEDULED, rounds=1, ahead=True, **options)


@pytest.mark.parametrize(
    ("more", "verdict", "says"),
    [
        ({"schedule": fb.Cosine(9)}, "lapses", "the theorem's eta_x is one number"),
        ({"weight_decay": 0.25}, "cannot be known", "and 0.25 to each L_i"),
    ],
)
def test_the_theorem_is_about_steps_without_them(more: Any, verdict: str, says: str) -> None:
    method = fb.FedBCD(steps=1, **more).method(Facts(2, (3, 3)))
    found = _scope(method, moves=False)
    assert found.verdict.value == verdict
    assert says in found.found


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: fb.SGD(1.0), "momentum=1.0 must be at least 0 and below 1"),
        (lambda: fb.Adam(beta1=-1), "beta1=-1 must be"),
        (lambda: fb.Adam(epsilon=0), "epsilon=0 must be"),
        (lambda: fb.Stairs(0), "every must be 1 or more"),
        (lambda: fb.Cosine(3, 2), "low between 0 and 1"),
        (lambda: fb.FedBCD(weight_decay=-1), "weight_decay=-1 must be"),
        (lambda: fb.FedAvg(optimizer=fb.Adam), "optimizer"),
        (lambda: fb.FedAvg(schedule=3), "schedule"),
        (
            lambda: fb.FedBCD(optimizer=fb.Adam()),
            "is of FedAvg, FedProx and Local; the paper's devices take ASPG steps",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()
