"""Networks count as the specification says, and train in a batch as they do alone."""

import pytest
import torch
from torch import nn

from fedbcd.algorithm.augment import FlipCrop
from fedbcd.errors import ConfigError
from fedbcd.models import MODELS, mlp, resnet20


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_models_have_the_parameters_that_the_specification_counts() -> None:
    """SPEC, Experiments: MLP 784-128-64-10 has 109,386 parameters, ResNet-20 with conv biases
    270,410.
    """
    assert _parameters(mlp()) == 109_386
    assert _parameters(resnet20()) == 270_410
    assert set(MODELS) == {"logistic", "mlp", "resnet20"}


def test_group_norm_variant_has_no_buffers() -> None:
    assert list(resnet20(norm="group").buffers()) == []
    assert len(list(resnet20().buffers())) == 3 * 19


def test_option_a_shortcut_subsamples_and_pads_with_zeros() -> None:
    """He et al., 4.2: "identity shortcuts in all cases (i.e., option A)"."""
    block = next(m for m in resnet20().modules() if getattr(m, "extra", 0) == 16)
    x = torch.randn(2, 16, 8, 8)
    shortcut = block.shortcut(x)
    assert shortcut.shape == (2, 32, 4, 4)
    assert torch.equal(shortcut[:, 8:24], x[..., ::2, ::2])
    assert not shortcut[:, :8].any()
    assert not shortcut[:, 24:].any()


def test_flip_crop_shows_a_window_of_the_padded_image_flipped_or_not() -> None:
    image = torch.arange(1, 3 * 6 * 6 + 1, dtype=torch.uint8).reshape(1, 3, 6, 6)
    padded = nn.functional.pad(image, (2, 2, 2, 2))
    windows = [padded[0, :, a : a + 6, b : b + 6] for a in range(5) for b in range(5)]
    expected = {
        tuple(w.flatten().tolist()) for window in windows for w in (window, window.flip(-1))
    }
    hashes = torch.from_numpy(
        __import__("numpy").random.default_rng(0).integers(-(2**63), 2**63, 2000)
    )
    seen = {tuple(FlipCrop(2).apply(image, h[None]).flatten().tolist()) for h in hashes}
    assert seen == expected


def test_flip_crop_of_a_sample_does_not_depend_on_its_neighbours() -> None:
    images = torch.randint(0, 256, (2, 5, 3, 8, 8), dtype=torch.uint8)
    hashes = torch.randint(-(2**62), 2**62, (2, 5))
    together = FlipCrop().apply(images, hashes)
    assert together.dtype == torch.uint8
    for i in range(2):
        for r in range(5):
            assert torch.equal(
                together[i, r], FlipCrop().apply(images[i, r][None], hashes[i, r][None])[0]
            )


def test_padding_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding=-1"):
        FlipCrop(-1)
