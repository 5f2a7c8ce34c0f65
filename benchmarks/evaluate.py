"""evaluate: one look at the models of `round` (100 personal MLPs) or of `resnet` (50 ResNet-20s):
each on the test samples of its 3 labels, and the global model on all.

usage: python benchmarks/evaluate.py [--model mlp|resnet20] [--test 10000] [--device cuda] [--json]
[--out FILE] [--repeats 5] [--threads 2] Ours; a plain loop (one module, `load_state_dict` per
device); and a floor: the multiplications of the MLPs' first layers alone, or the ResNets'
operations over the measured matrix rate.
"""

from functools import partial
from itertools import chain

import numpy as np
import torch
from harness import Contestant, alternate, as_rows, finish, matrix_rate, options, synchronise, timed
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.evaluate import Evaluator
from fedbcd.compute.workers import workers
from fedbcd.data.partition import Partition
from fedbcd.models import mlp, resnet20

LABELS = 3
MODELS = {
    "mlp": (mlp, (784,), 100),
    "resnet20": (resnet20, (3, 32, 32), 50),
}  # how to make one, its inputs, how many
RESNET_OPERATIONS = 2 * 40.8e6  # of one image: multiply and add

Owned = tuple[tuple[int, ...], ...]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--test", type=int, default=10_000, help="test samples, in tens")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    make, shape, count = MODELS[chosen.model]
    rng = np.random.default_rng(0)
    owned = tuple(
        tuple(sorted(rng.choice(10, LABELS, replace=False).tolist())) for _ in range(count)
    )
    test = fb.Samples(
        torch.from_numpy(rng.integers(0, 256, (chosen.test, *shape), dtype=np.uint8)),
        torch.arange(chosen.test) % 10,
    )
    partition = Partition(tuple(np.arange(10) for _ in range(count)), owned)
    federation = fb.Federation.from_partition(
        make, nn.functional.cross_entropy, test, partition, 10, test=test, transform=fb.Scale(255.0)
    )
    where = torch.device(chosen.device)
    objective = Objective(make(), nn.functional.cross_entropy).to(where)
    models = torch.stack(
        [objective.layout.flatten(make(), torch.float32) for _ in range(count)]
    ).to(where)
    floor = partial(floor_of_mlps, objective) if chosen.model == "mlp" else floor_of_resnets
    contestants = [
        Contestant(
            "ours",
            lambda: timed(
                lambda: ours(Evaluator(federation, objective, where, where.type != "cpu"), models)
            ),
        ),
        Contestant(
            "plain loop",
            lambda: timed(lambda: plain(make().to(where).eval(), objective, models, test, owned)),
        ),
        Contestant("matrix floor", lambda: floor(models, test, owned)),
    ]
    rows = as_rows(alternate(contestants, chosen.repeats), 1e3)
    finish(
        "evaluate",
        chosen,
        rows,
        unit="milliseconds per look",
        repeats=chosen.repeats,
        model=chosen.model,
        test=chosen.test,
    )


def ours(evaluator: Evaluator, models: torch.Tensor) -> float:
    with workers(torch.get_num_threads() if models.device.type == "cpu" else 1) as pool:
        evaluator.scores(models[:1].expand(10, -1), dict(enumerate(models)), pool)
    synchronise(models.device.type)
    return 1


def plain(
    module: nn.Module, objective: Objective, models: torch.Tensor, test: fb.Samples, owned: Owned
) -> float:
    inputs, targets, p = (
        test.inputs.to(models.device).float() / 255,
        test.targets.to(models.device),
        objective.layout.size_P,
    )
    mine = [torch.isin(targets, torch.tensor(labels, device=models.device)) for labels in owned]
    with torch.no_grad():
        for flat, chosen in zip(models, mine, strict=True):
            state = objective.layout.parameters_of(flat[:p]) | objective.layout.buffers_of(flat[p:])
            module.load_state_dict(state, strict=False)  # counters stay
            (module(inputs[chosen]).argmax(1) == targets[chosen]).float().mean()
        (module(inputs).argmax(1) == targets).float().mean()
    synchronise(models.device.type)
    return 1


def floor_of_mlps(
    objective: Objective, models: torch.Tensor, test: fb.Samples, owned: Owned
) -> tuple[float, float]:
    def products() -> float:
        inputs = test.inputs.to(models.device).float() / 255
        count = len(inputs) // 10
        for flat, labels in zip(models, owned, strict=True):
            weight = objective.layout.parameters_of(flat)["1.weight"]
            for label in labels:
                inputs[label * count : (label + 1) * count] @ weight.T
        inputs @ weight.T
        synchronise(models.device.type)
        return 1

    return timed(products)


def floor_of_resnets(models: torch.Tensor, test: fb.Samples, owned: Owned) -> tuple[float, float]:
    images = len(test) + len([*chain(*owned)]) * len(test) // 10
    return images * RESNET_OPERATIONS / matrix_rate(models.device.type), 1


if __name__ == "__main__":
    main()
