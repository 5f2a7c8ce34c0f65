"""Targets that are numbers: each device has a line of its own, tested by its squared error.

run: python examples/regression.py
"""

import torch
from torch import nn

import fedbcd as fb


def line(device: int, samples: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(device)
    x = torch.randn(samples, 3, generator=generator)
    slopes = torch.tensor([1.0, -1.0, 0.25 * (device % 5)])
    return x, x @ slopes + 0.1 * torch.randn(samples, generator=generator)


def main() -> None:
    devices = [(line(i), line(100 + i)) for i in range(20)]  # 100 + i: the same slopes, new samples
    federation = fb.Federation(
        lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
        nn.functional.mse_loss,
        devices,
        servers=4,
    )
    run = fb.train(federation, fb.FedBCD(device_step=0.05, penalty=0.5), rounds=60)
    last = run.history.last
    print(f"squared error: global {last.global_mse:.3f}, personal {last.personal_mse:.3f}")
    print("device 4's slopes:", [round(w, 2) for w in run.personal_model(4)[0].weight[0].tolist()])


if __name__ == "__main__":
    main()
