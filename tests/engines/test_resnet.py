"""A ResNet trains in a batch as it does alone."""

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.augment import FlipCrop
from fedbcd.models import resnet20


def _images(devices: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator),
            torch.randint(10, (6,), generator=generator),
        )
        for _ in range(devices)
    ]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_trains_in_a_batch_as_it_does_alone(norm: str) -> None:
    federation = fb.Federation(
        lambda: resnet20(norm=norm),
        nn.functional.cross_entropy,
        _images(4),
        servers=2,
        transform=lambda v, dtype: v.to(dtype) / 255,
        augment=FlipCrop(),
    )
    runs = [
        fb.train(
            federation,
            fb.FedBCD(batch=4, steps=(1, 2)),
            cloud=fb.AsyncCloud(2),
            rounds=2,
            active=1,
            dtype=torch.float64,
            max_batch=m,
            looks=1,
            certify_every=0,
        )
        for m in (None, 1)
    ]
    assert float((runs[0].personal_NF - runs[1].personal_NF).abs().max()) < 1e-9
    assert float((runs[0].global_VF - runs[1].global_VF).abs().max()) < 1e-9
