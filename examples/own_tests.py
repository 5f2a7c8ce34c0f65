"""Every device brings its own test set: the same pictures, but each device has names of its own for
them, so no one model can be right for all.

run: python examples/own_tests.py
"""

import torch
from torch import Tensor, nn

import fedbcd as fb

CLASSES = 10


def renamed(device: int, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    names = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(device))
    return inputs, names[labels]


def main() -> None:
    digits = fb.load_dataset("digits")
    train, test = (torch.arange(len(part)).chunk(8) for part in (digits.train, digits.test))
    devices = [
        (renamed(i, *digits.train.take(own)), renamed(i, *digits.test.take(tests)))
        for i, (own, tests) in enumerate(zip(train, test, strict=True))
    ]
    federation = fb.Federation(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        nn.functional.cross_entropy,
        devices,
        servers=2,
        transform=digits.transform,
    )
    method = fb.FedBCD(device_step=0.1, penalty=0.01)
    last = fb.train(federation, method, rounds=60, active=3).history.last
    print(f"global {last.global_accuracy:.3f}, personal {last.personal_accuracy:.3f}")


if __name__ == "__main__":
    main()
