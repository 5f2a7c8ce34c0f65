"""Augmentation with addressed draws: the same sample of the same step is always flipped and cropped
in the same way.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedbcd.errors import ConfigError


class Augment(Protocol):
    """Changes a batch of raw inputs; everything random in it is a function of `h`, one hash per
    sample.
    """

    name: ClassVar[str]

    def apply(self, inputs: Tensor, h: Tensor) -> Tensor:
        """Inputs (..., C, H, W) and hashes (...) to inputs of the same shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class FlipCrop:
    """Random horizontal flip, and a random crop of the image padded by `padding` black pixels."""

    padding: int = 4
    name: ClassVar[str] = "flip-crop"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"flip-crop padding={self.padding} must be 0 or more")

    def apply(self, inputs: Tensor, h: Tensor) -> Tensor:
        """Bit 0 flips; bits 1-16 and 17-32 choose the corner of the crop."""
        *lead, channels, height, width = inputs.shape
        images, h = inputs.reshape(-1, channels, height, width), h.reshape(-1)
        places = 2 * self.padding + 1
        top, left = (((h >> shift & 0xFFFF) * places) >> 16 for shift in (1, 17))
        rows = top[:, None] + torch.arange(height, device=h.device)
        columns = torch.arange(width, device=h.device)
        columns = left[:, None] + torch.where((h & 1).bool()[:, None], width - 1 - columns, columns)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        image = torch.arange(len(images), device=h.device)[:, None, None, None]
        channel = torch.arange(channels, device=h.device)[None, :, None, None]
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]].reshape(
            *lead, channels, height, width
        )
