"""Values that are not finite stop a run: the device and the step are named, and nothing is saved as
finished.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.errors import ConfigError, DataError, NumericalError
from support.runs import fedbcd, write_job

pytestmark = pytest.mark.usefixtures("both_ways")

SICK = 5


def _federation(sick: float) -> fb.Federation:
    """Linear regression on eight devices; `sick` is a target of device 5."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(6, 3, generator=generator), torch.rand(6, 1, generator=generator))
        for _ in range(8)
    ]
    data[SICK][1][:] = sick
    return fb.Federation(lambda: nn.Linear(3, 1), _root_loss, data, servers=2)


def _root_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The root of a negative target is not a number."""
    return ((outputs - targets.sqrt()) ** 2).mean()


@pytest.mark.parametrize("max_batch", [None, 1])
@pytest.mark.parametrize(
    "algorithm", [fb.FedBCD(batch=2), fb.FedBCDI(batch=2), fb.FedAvg(batch=2)], ids=lambda a: a.name
)
def test_a_loss_that_is_not_a_number_is_reported_with_device_and_step(
    algorithm: fb.Algorithm, max_batch: int | None, tmp_path: Path
) -> None:
    with pytest.raises(
        NumericalError,
        match=(
            rf"the loss of device {SICK} is nan in step 1 of [1-5] of its session 0; check its data"
        ),
    ):
        fb.train(
            _federation(-1.0), algorithm, rounds=20, active=2, max_batch=max_batch, out=tmp_path
        )
    _assert_not_finished(tmp_path)


def test_the_same_devices_with_sound_data_train() -> None:
    assert fb.train(_federation(0.5), fb.FedBCD(batch=2), rounds=3, active=2).finished


@pytest.mark.parametrize("algorithm", [fb.FedBCD, fb.FedAvg, fb.FedProx], ids=lambda a: a.name)
@pytest.mark.filterwarnings("ignore::fedbcd.errors.DivergenceWarning")
def test_an_exploding_step_is_reported_with_its_size(
    algorithm: type[fb.FedBCD], tmp_path: Path
) -> None:
    exploding = algorithm(batch=2, device_step=1e6, projection=fb.NoProjection())
    with pytest.raises(
        NumericalError, match=r"device \d.* use a smaller device_step \(now 1e\+06\)"
    ):
        fb.train(_federation(0.5), exploding, rounds=50, active=2, out=tmp_path)
    _assert_not_finished(tmp_path)


@pytest.mark.filterwarnings("ignore::fedbcd.errors.DivergenceWarning")
def test_a_model_that_explodes_without_a_loss_is_reported() -> None:
    """The penalty steps of FedBCD-I see no loss: x <- x - 30 (x - z) leaves every bound."""
    exploding = fb.FedBCDI(batch=2, penalty=1e12, steps=(5, 5), projection=fb.NoProjection())
    with pytest.raises(NumericalError, match=r"the (model|loss) of device \d"):
        fb.train(_federation(0.5), exploding, rounds=20, active=2)


def test_large_but_finite_values_are_no_error() -> None:
    """The sum over models overflows float32, no single value does."""
    data = [(0.1 * inputs, targets) for inputs, targets in _samples(_federation(0.5))]
    huge = nn.Linear(3, 1, bias=False)
    nn.init.constant_(huge.weight, 1e38)
    still = fb.FedBCD(
        batch=2, device_step=1e-30, steps=(1, 1), momentum=0.0, projection=fb.NoProjection()
    )
    calm = fb.Federation(
        huge, lambda outputs, targets: outputs.clamp(-1.0, 1.0).mean(), data, servers=2
    )
    assert fb.train(calm, still, rounds=2, active=2).finished


def test_data_that_are_not_finite_are_refused_before_training() -> None:
    with pytest.raises(DataError, match="device 5 has a value that is not finite in target 0"):
        _federation(float("nan"))


def test_a_model_that_does_not_fit_the_data_is_a_sentence(tmp_path: Path) -> None:
    federation = fb.Federation(
        lambda: nn.Linear(7, 1), _root_loss, _samples(_federation(0.5)), servers=2
    )
    for max_batch in (None, 1):
        with pytest.raises(
            ConfigError,
            match=r"fails on inputs of shape \(2, 3\).*use a model and a loss that fit the data",
        ):
            fb.train(
                federation,
                fb.FedBCD(),
                rounds=1,
                active=2,
                max_batch=max_batch,
                out=tmp_path / "run",
            )
    assert not (tmp_path / "run").exists()


def test_the_command_line_ends_with_code_5_and_a_sentence(tmp_path: Path) -> None:
    algorithm = {"name": "fedbcd", "device_step": 1e30, "projection": {"name": "none"}}
    job = write_job(tmp_path / "job.toml", algorithm=algorithm)
    answer = fedbcd("run", job, "--out", tmp_path / "run", "--json")
    assert answer.code == 5
    assert answer.out == ""
    assert "use a smaller device_step (now 1e+30)" in answer.err
    _assert_not_finished(tmp_path / "run")


def _samples(federation: fb.Federation) -> list[tuple[Tensor, Tensor]]:
    pool = federation.pool
    return [
        (pool.inputs[places], pool.targets[places])
        for places in map(federation.owned, range(federation.devices))
    ]


def _assert_not_finished(folder: Path) -> None:
    assert not (folder / "models.safetensors").exists()
    assert not (folder / "history.csv").exists()
    assert "end" not in json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
