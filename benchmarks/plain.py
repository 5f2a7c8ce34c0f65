"""The plain loop that a good researcher would write: data in memory, one module, `load_state_dict`
per device, autograd for the rest.
"""

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class PlainLoop:
    """FedBCD, FedBCD-I and FedProx, one device after another."""

    def __init__(
        self, module: nn.Module, inputs: Tensor, targets: Tensor, devices: int, personal: bool
    ) -> None:
        self.module = module
        self.inputs, self.targets = inputs, targets
        self.z = {k: v.clone() for k, v in module.state_dict().items()}
        self.x = [
            {k: v.clone() for k, v in self.z.items()} for _ in range(devices if personal else 0)
        ]
        self.prev = [{k: v.clone() for k, v in self.z.items()} for _ in self.x]

    def aspg(
        self, x: State, prev: State, batches: Tensor, gamma: float | None
    ) -> tuple[State, State]:
        """K ASPG steps, eq. (4), with the penalty in the loss."""
        module, anchor = self.module, self.z
        for rows in batches:
            module.load_state_dict({k: x[k] + 0.9 * (x[k] - prev[k]) for k in x})
            loss = nn.functional.cross_entropy(module(self.inputs[rows]), self.targets[rows])
            if gamma is not None:
                loss = loss + gamma / 2 * sum(
                    ((p - anchor[k]) ** 2).sum() for k, p in module.named_parameters()
                )
            module.zero_grad()
            loss.backward()
            with torch.no_grad():
                prev, x = (
                    x,
                    {
                        k: (p - 0.005 * p.grad).clamp(-2, 2)
                        for k, p in module.named_parameters()
                        if p.grad is not None
                    },
                )
        return x, prev

    def fedbcd(self, work: list[tuple[int, Tensor]]) -> None:
        """Algorithm 1; the server averages the last copies of all devices."""
        for i, batches in work:
            self.x[i], self.prev[i] = self.aspg(self.x[i], self.prev[i], batches, 1.0)
        for k in self.z:
            mean = torch.stack([x[k] for x in self.x]).mean(0)
            self.z[k] = self.z[k] - 0.5 * (self.z[k] - mean)

    def fedbcd_i(self, offline: list[tuple[int, Tensor]], active: list[tuple[int, int]]) -> None:
        """Algorithm 2."""
        for i, batches in offline:
            self.x[i], self.prev[i] = self.aspg(self.x[i], self.prev[i], batches, None)
        for i, steps in active:
            for _ in range(steps):
                self.prev[i] = self.x[i]
                self.x[i] = {
                    k: (v - 0.2 * (v - self.z[k])).clamp(-2, 2) for k, v in self.x[i].items()
                }
        for k in self.z:
            mean = torch.stack([self.x[i][k] for i, _ in active]).mean(0)
            self.z[k] = self.z[k] - 0.5 * (self.z[k] - mean)

    def fedprox(self, work: list[tuple[int, Tensor]]) -> None:
        """FedProx with momentum on the devices."""
        models = [self.aspg(self.z, self.z, batches, 5.0)[0] for _, batches in work]
        self.z = {k: torch.stack([model[k] for model in models]).mean(0) for k in self.z}
