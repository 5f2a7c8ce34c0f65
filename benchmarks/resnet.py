"""resnet: the paper's CIFAR-10 round, 50 active ResNet-20s with batches of 32 each, on one GPU.

usage: python benchmarks/resnet.py [--device cuda] [--models 50] [--json] [--out FILE] [--repeats 5]
Ours in TF32, float32 and bfloat16 products, and without torch.compile; a plain loop, one model
after another; and a floor from measured bandwidth and matrix rate. Milliseconds per step of all
models; ours includes all of a round of 5 steps (drawing, augmenting, gathering models, sums, the
cloud), divided by 5.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from harness import (
    Contestant,
    alternate,
    as_rows,
    bandwidth,
    finish,
    matrix_rate,
    options,
    synchronise,
    timed,
)
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm.augment import FlipCrop
from fedbcd.compute.ahead import Ahead
from fedbcd.data.partition import Partition
from fedbcd.engines.setup import make_numbers, make_schedule, products_in
from fedbcd.models import resnet20
from fedbcd.schedule.arrays import Outline

BATCH, STEPS, SERVERS, SAMPLES = 32, 5, 10, 250
OPERATIONS = (
    2 * 40.8e6 * 3
)  # of one image: multiply and add, forward, backward for weights and inputs


def federation(models: int) -> fb.Federation:
    rng = np.random.default_rng(0)
    devices = 2 * models
    images = torch.from_numpy(rng.integers(0, 256, (5_000, 3, 32, 32), dtype=np.uint8))
    pool = fb.Samples(images, torch.from_numpy(rng.integers(0, 10, 5_000)))
    owned = tuple(np.arange(i * SAMPLES, (i + 1) * SAMPLES) % 5_000 for i in range(devices))
    partition = Partition(owned, tuple((0, 1, 2) for _ in owned))
    return fb.Federation.from_partition(
        resnet20,
        nn.functional.cross_entropy,
        pool,
        partition,
        SERVERS,
        transform=lambda x, dtype: x.to(dtype) / 255 - 0.5,
        augment=FlipCrop(),
    )


def ours(
    models: int, device: str, precision: str, compile: bool
) -> Callable[[], tuple[float, float]]:
    data, active = federation(models), models // SERVERS
    spec = fb.RunSpec(
        fb.FedBCD(steps=(STEPS, STEPS), projection=fb.Box(-2, 2)),
        active=active,
        precision=precision,
    )
    with products_in(precision):
        numbers = make_numbers(spec, data, torch.device(device))
        numbers.trainer.check_vectorised(numbers.global_VF()[0])
        schedule = make_schedule(spec, data)
        simulation = Ahead(
            numbers, Outline(data.servers, schedule, spec.cloud), compile and device != "cpu"
        )
        began = time.perf_counter()
        simulation.play_round()
        simulation.settle()
        print(
            f"{precision}, compile={compile}: first round {time.perf_counter() - began:.1f} s",
            file=sys.stderr,
        )

    def run() -> tuple[float, float]:
        def one_round() -> float:
            simulation.play_round()
            synchronise(device)
            return STEPS

        with products_in(precision):
            return timed(one_round)

    return run


def plain(models: int, device: str) -> Callable[[], tuple[float, float]]:
    """One model after another, as a good researcher would: data on the device, one module,
    `load_state_dict` per device.
    """
    module, anchor = resnet20().to(device), resnet20().to(device)
    states = [
        {name: value.clone() for name, value in module.state_dict().items()} for _ in range(models)
    ]
    inputs, targets = (
        torch.randn(models, BATCH, 3, 32, 32, device=device),
        torch.randint(10, (models, BATCH), device=device),
    )
    optimiser = torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)

    def one_step() -> float:
        for k, state in enumerate(states):
            module.load_state_dict(state)
            optimiser.zero_grad()
            loss: Tensor = nn.functional.cross_entropy(module(inputs[k]), targets[k])
            pairs = zip(module.parameters(), anchor.parameters(), strict=True)
            (loss + 0.5 * sum(((p - z.detach()) ** 2).sum() for p, z in pairs)).backward()
            optimiser.step()
            states[k] = {name: value.clone() for name, value in module.state_dict().items()}
        synchronise(device)
        return 1

    def run() -> tuple[float, float]:
        with products_in("tf32"):
            return timed(one_step)

    return run


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=int, default=50)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    operations, moved = OPERATIONS * BATCH * chosen.models, 8 * 270_410 * chosen.models * 4
    with products_in("tf32"):
        floor = max(operations / matrix_rate(chosen.device), moved / bandwidth(chosen.device))
    contestants = [
        Contestant("ours", ours(chosen.models, chosen.device, "tf32", True)),
        Contestant("ours, bfloat16", ours(chosen.models, chosen.device, "bfloat16", True)),
        Contestant("ours, float32", ours(chosen.models, chosen.device, "float32", True)),
        Contestant("ours, tf32, not compiled", ours(chosen.models, chosen.device, "tf32", False)),
        Contestant("plain loop", plain(chosen.models, chosen.device)),
        Contestant("floor", lambda: (floor, 1)),
    ]
    rows = as_rows(alternate(contestants, chosen.repeats), 1e3)
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    finish(
        "resnet",
        chosen,
        rows,
        unit="milliseconds per step of all models",
        models=chosen.models,
        device=chosen.device,
        gpu_peak_gib=gpu,
    )


if __name__ == "__main__":
    main()
