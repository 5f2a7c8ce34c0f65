"""lazy: memory of a federation of 100,000 pictures of 3 x 32 x 32 that are read when they are
needed.

usage: python benchmarks/lazy.py [--rounds 5] [--out FILE]

The pictures lie in one file of 307 MB (as float32 tensors they would take 1.2 GB), which is made
beforehand, and each is read from there when a device needs it. The peak is that of the whole
process, with the interpreter and torch; what of it torch's libraries take is said beside it.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedbcd as fb

SAMPLES, DEVICES, SERVERS, SHAPE = 100_000, 100, 10, (3, 32, 32)


class Pictures(Dataset[tuple[Tensor, int]]):
    """One device's part of a file."""

    def __init__(self, path: Path, device: int) -> None:
        self.path, self.first = path, device * (SAMPLES // DEVICES)
        self.size = int(np.prod(SHAPE))

    def __len__(self) -> int:
        return SAMPLES // DEVICES

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        number = self.first + k
        found = np.fromfile(self.path, np.uint8, self.size, offset=number * self.size)
        return torch.from_numpy(found.reshape(SHAPE)), number % 10


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10)
    )


def peak() -> float:
    """MiB of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(path: Path, rounds: int) -> dict[str, float]:
    before = peak()
    devices = [Pictures(path, i) for i in range(DEVICES)]
    federation = fb.Federation(
        net, nn.functional.cross_entropy, devices, SERVERS, transform=fb.Scale(255.0, 0.5, 0.5)
    )
    made, started = peak(), time.perf_counter()
    fb.train(federation, fb.FedBCD(steps=(1, 5)), active=3, rounds=rounds)
    return {
        "imported_mib": round(before),
        "federation_made_mib": round(made),
        "trained_mib": round(peak()),
        "rounds": rounds,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures"
        generator = np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(DEVICES):
                block = (SAMPLES // DEVICES, *SHAPE)
                file.write(generator.integers(0, 256, block, dtype=np.uint8).tobytes())
        found = {"torch": torch.__version__, "samples": SAMPLES, **measured(path, given.rounds)}
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
