"""Without a set X that was asked for, weights go where the data lead: nothing is clamped, neither
at the start nor later.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.engines.setup import make_numbers
from support.runs import LOGISTIC, fedbcd, federation, write_job

TRUE = torch.tensor([10.0, 5.0, -7.0])


def linear() -> nn.Module:
    return nn.Linear(3, 1, bias=False)


def regression(model: Callable[[], nn.Module] = linear) -> fb.Federation:
    """Two devices whose data follow one plane."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(20, 3, generator=generator) for _ in range(2)]
    return fb.Federation(model, nn.functional.mse_loss, [(x, x @ TRUE[:, None]) for x in inputs], 1)


@pytest.mark.parametrize(
    "kind", [fb.FedBCD, fb.FedBCDI, fb.FedProx, fb.FedAvg], ids=lambda kind: kind.name
)
def test_linear_regression_reaches_weights_of_any_size(kind: type[fb.FedBCD]) -> None:
    """Default settings; 0.1.0 ended at 2, 2, -2."""
    run = fb.train(regression(), kind(), rounds=450, active=1, looks=1, certify_every=0)
    torch.testing.assert_close(run.global_VF, TRUE.expand(1, 3), rtol=0, atol=0.01)
    torch.testing.assert_close(run.personal_NF, TRUE.expand(2, 3), rtol=0, atol=0.01)


def pretrained() -> nn.Module:
    module = linear()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[9.0, -9.0, 0.5]]))
    return module


@pytest.mark.parametrize(
    "kind", [fb.FedBCD, fb.FedBCDI, fb.FedProx, fb.FedAvg], ids=lambda kind: kind.name
)
def test_a_pretrained_weight_is_not_cut(kind: type[fb.FedBCD]) -> None:
    spec = fb.RunSpec(kind(), active=1)
    numbers = make_numbers(spec, regression(pretrained), torch.device("cpu"))
    assert numbers.global_VF().tolist() == [[9.0, -9.0, 0.5]]
    run = fb.train(regression(pretrained), kind(device_step=1e-6), rounds=2, active=1)
    torch.testing.assert_close(run.global_VF, torch.tensor([[9.0, -9.0, 0.5]]), rtol=0, atol=0.01)


def test_a_job_file_that_names_no_projection_has_none(tmp_path: Path) -> None:
    """And the weights of its run are past any box of 0.1.0; the one that names the box stays
    within.
    """
    steep = {"algorithm": {"name": "fedavg", "device_step": 3.0, "batch": 8}, "run.rounds": 6}
    for name, projection in (
        ("free", {}),
        ("boxed", {"projection": {"name": "box", "low": -2, "high": 2}}),
    ):
        path = write_job(
            tmp_path / f"{name}.toml",
            **{**steep, "algorithm": {**steep["algorithm"], **projection}},
        )
        assert fedbcd("run", path, "--out", tmp_path / name).code == 0
    free, boxed = (
        fb.Run.load(tmp_path / name, federation(LOGISTIC)).global_VF.abs().max()
        for name in ("free", "boxed")
    )
    assert float(free) > 2
    assert float(boxed) <= 2
