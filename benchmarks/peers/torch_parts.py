"""What the peers on PyTorch share: the recipes' MLP, the data as tensors, and random mini-batches
of a device.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from workload import BATCH, WIDTHS, Array, Task


def network(task: Task) -> nn.Sequential:
    """The MLP with the starting weights of the task."""
    layers: list[nn.Module] = []
    for a, b in pairwise(WIDTHS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    module = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), task.start, strict=True):
            parameter.copy_(torch.from_numpy(value))
    return module


def arrays(module: nn.Module) -> list[Array]:
    return [parameter.detach().numpy() for parameter in module.parameters()]


class DeviceData:
    """The samples of every device as views of two tensors in memory."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.inputs, self.targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)

    def batches(self, device: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`steps` mini-batches, drawn without replacement within each pass over the device's
        samples.
        """
        owned = self.task.owned(device)
        inputs, targets = self.inputs[owned], self.targets[owned]
        passes = -(-steps * BATCH // len(targets))
        order = torch.cat([torch.randperm(len(targets)) for _ in range(passes)])
        for rows in order[: steps * BATCH].split(BATCH):
            yield inputs[rows], targets[rows]
