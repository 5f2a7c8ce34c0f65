"""On a GPU: the same schedule and draws exactly, numbers within the stated rounding bound."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.models import mlp
from support.methods import method_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _federation(dtype: torch.dtype) -> fb.Federation:
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, 20, 3, 40)
    return fb.Federation.from_partition(
        lambda: mlp(64, 10, (32,)),
        nn.functional.cross_entropy,
        data.train,
        split,
        4,
        test=data.test,
        transform=data.transform,
    )


def test_addressed_draws_are_the_same_bits_on_cpu_and_gpu() -> None:
    device, session = torch.arange(1000), torch.arange(1000) * 7 % 13
    size = torch.full((1000,), 600)
    cpu = draws.batch_positions(3, device, session, size, draws.grid(5, 32))
    gpu = draws.batch_positions(
        3, device.cuda(), session.cuda(), size.cuda(), draws.grid(5, 32, "cuda")
    )
    assert torch.equal(cpu, gpu.cpu())


@pytest.mark.parametrize(
    "algorithm",
    [fb.FedBCD(), fb.FedBCDI(offline_time="free"), fb.FedProx(), fb.FedAvg()],
    ids=lambda a: a.name,
)
def test_gpu_and_cpu_agree_within_rounding_and_repeat_bit_for_bit(algorithm: fb.Algorithm) -> None:
    cloud = fb.AsyncCloud(first=2) if method_of(algorithm).has_personal else fb.SyncCloud()
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        cpu, gpu, again = (
            fb.train(
                _federation(dtype),
                algorithm,
                cloud=cloud,
                rounds=25,
                seed=1,
                dtype=dtype,
                torch_device=where,
            )
            for where in ("cpu", "cuda", "cuda")
        )
        assert gpu.digest == again.digest
        assert gpu.summary["clock"] == cpu.summary["clock"]
        assert float((gpu.personal_NF - cpu.personal_NF).abs().max()) < bound
        assert float((gpu.global_VF - cpu.global_VF).abs().max()) < bound


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize("cloud", [fb.SyncCloud(), fb.AsyncCloud(first=2)], ids=lambda c: c.name)
def test_recorded_and_compiled_rounds_agree_with_events(cloud) -> None:
    events, recorded, compiled = (
        fb.train(
            _federation(torch.float64),
            fb.FedBCD(),
            cloud=cloud,
            rounds=25,
            dtype=torch.float64,
            torch_device="cuda",
            **options,
        )
        for options in ({"ahead": False}, {"ahead": True}, {"compile": True})
    )
    again = fb.train(
        _federation(torch.float64),
        fb.FedBCD(),
        cloud=cloud,
        rounds=25,
        dtype=torch.float64,
        torch_device="cuda",
        compile=True,
    )
    assert again.digest == compiled.digest
    for run in (recorded, compiled):
        assert run.summary["clock"] == events.summary["clock"]
        assert float((run.personal_NF - events.personal_NF).abs().max()) < 1e-11
        assert float((run.global_VF - events.global_VF).abs().max()) < 1e-11


@pytest.mark.parametrize("cloud", [fb.SyncCloud(), fb.AsyncCloud(first=2)], ids=lambda c: c.name)
def test_a_logged_run_is_recorded_too_and_goes_on_from_its_checkpoint(
    cloud, tmp_path: Path
) -> None:
    options = {
        "cloud": cloud,
        "rounds": 25,
        "dtype": torch.float64,
        "torch_device": "cuda",
        "evaluate_every": 10,
    }
    federation, rounds = _federation(torch.float64), iter(range(100))
    events = fb.train(federation, fb.FedBCD(), ahead=False, out=tmp_path / "events", **options)
    fb.train(
        federation,
        fb.FedBCD(),
        out=tmp_path / "run",
        should_stop=lambda: next(rounds) == 12,
        **options,
    )
    resumed = fb.train(federation, fb.FedBCD(), out=tmp_path / "run", resume=True, **options)
    assert float((resumed.personal_NF - events.personal_NF).abs().max()) < 1e-11
    logs = [
        (tmp_path / name / "events.jsonl").read_text().splitlines() for name in ("events", "run")
    ]
    assert logs[0][:-1] == logs[1][:-1]
    assert '"engine":"ahead"' in logs[1][-1]
