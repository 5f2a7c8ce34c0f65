"""Your own module, your own torch Dataset, personal and global models, and what the personal ones
gain.

run: python examples/own_model.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedbcd as fb


class Sensor(Dataset):
    """A device's private readings: every device has its own offset, and only some of the four
    activities.
    """

    def __init__(self, device: int, samples: int = 60) -> None:
        generator = torch.Generator().manual_seed(device)
        activities = torch.tensor([device % 4, (device + 1) % 4])
        self.targets = activities[torch.randint(2, (samples,), generator=generator)]
        centres = 2.0 * torch.eye(4, 8)
        self.inputs = (
            centres[self.targets]
            + 0.7 * torch.randn(samples, 8, generator=generator)
            + 0.5 * (device % 5 - 2)
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.inputs[k], self.targets[k]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.norm(x))


def main() -> None:
    devices = [Sensor(i) for i in range(24)]
    tests = [Sensor(1000 + i) for i in range(24)]
    test = (torch.cat([t.inputs for t in tests]), torch.cat([t.targets for t in tests]))
    federation = fb.Federation(Net, nn.functional.cross_entropy, devices, servers=4, test=test)
    run = fb.train(
        federation, fb.FedBCDI(device_step=0.05), cloud=fb.AsyncCloud(first=2), rounds=30, seed=0
    )
    last = run.history.last
    print(
        f"after {last.round} rounds: global accuracy {last.global_accuracy:.3f}, personal"
        f" {last.personal_accuracy:.3f}"
    )
    with torch.no_grad():
        print(
            "device 3 says",
            run.personal_model(3)(devices[3].inputs[:5]).argmax(1).tolist(),
            "truth",
            devices[3].targets[:5].tolist(),
        )


if __name__ == "__main__":
    main()
