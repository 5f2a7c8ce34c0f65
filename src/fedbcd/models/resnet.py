"""ResNet-20 for 32x32 images (He et al., 2016, section 4.2), with biases in its convolutions:
270,410 parameters.
"""

from typing import Literal

import torch
from torch import Tensor, nn

Norm = Literal["batch", "group"]


def resnet20(classes: int = 10, norm: Norm = "batch") -> nn.Module:
    """ResNet-20 with option-A shortcuts and conv biases; `norm="group"` has no running statistics
    to travel.
    """
    return ResNet(blocks=3, classes=classes, norm=norm)


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels with `blocks` residual blocks each: 6 blocks + 2
    layers.
    """

    def __init__(self, blocks: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _norm(norm, 16), nn.ReLU())
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        self.body = nn.Sequential(
            *(Block(a, b, norm) for a, b in zip([16, *widths], widths, strict=False))
        )
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images (R, 3, 32, 32) to logits (R, classes)."""
        logits: Tensor = self.head(self.body(self.stem(x)).mean((-2, -1)))
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; where the width doubles, the first one halves the
    resolution.
    """

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        self.stride = 2 if after > before else 1
        self.extra = after - before
        self.first = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, padding=1), _norm(norm, after), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1), _norm(norm, after))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU(F(x) + shortcut(x))."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Option A: subsample and pad the new channels with zeros; no parameters."""
        if self.extra == 0:
            return x
        half = self.extra // 2
        return nn.functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, half, self.extra - half))


def _norm(norm: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(8, channels)
