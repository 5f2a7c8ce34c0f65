"""evaluate: one look at the models of `round`: 100 personal MLPs on the test samples of their 3 labels, and the global model on all 10,000.

usage: python benchmarks/evaluate.py [--json] [--out FILE] [--repeats 5] [--threads 2]
Ours; a plain loop (one module, `load_state_dict` per device); and a floor: the multiplications of the first layers alone.
"""

import numpy as np
import torch
from harness import Contestant, alternate, as_rows, finish, options, timed
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.objective import Objective
from fedbcd.data.partition import Partition
from fedbcd.engines.simulate.evaluate import Evaluator
from fedbcd.engines.simulate.workers import workers
from fedbcd.models import mlp

DEVICES, LABELS, TEST = 100, 3, 10_000


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(chosen.threads)
    rng = np.random.default_rng(0)
    owned = tuple(tuple(sorted(rng.choice(10, LABELS, replace=False).tolist())) for _ in range(DEVICES))
    test = fb.Samples(torch.from_numpy(rng.integers(0, 256, (TEST, 784), dtype=np.uint8)), torch.arange(TEST) % 10)
    partition = Partition(tuple(np.arange(10) for _ in range(DEVICES)), owned)
    federation = fb.Federation.from_partition(mlp, nn.functional.cross_entropy, test, partition, 10, test=test, transform=fb.Scale(255.0))
    objective = Objective(mlp(), nn.functional.cross_entropy)
    models = torch.stack([objective.layout.flatten(mlp(), torch.float32) for _ in range(DEVICES)])
    contestants = [
        Contestant("ours", lambda: timed(lambda: ours(Evaluator(federation, objective, torch.device("cpu")), models))),
        Contestant("plain loop", lambda: timed(lambda: plain(objective, models, test, owned))),
        Contestant("matrix floor", lambda: timed(lambda: floor(objective, models, test, owned))),
    ]
    rows = as_rows(alternate(contestants, chosen.repeats), 1e3)
    finish("evaluate", chosen, rows, unit="milliseconds per look", repeats=chosen.repeats)


def ours(evaluator: Evaluator, models: torch.Tensor) -> float:
    with workers(torch.get_num_threads()) as pool:
        evaluator.scores(models[:1].expand(10, -1), dict(enumerate(models)), pool)
    return 1


def plain(objective: Objective, models: torch.Tensor, test: fb.Samples, owned: tuple[tuple[int, ...], ...]) -> float:
    module, inputs = mlp().eval(), test.inputs.float() / 255
    mine = [torch.isin(test.targets, torch.tensor(labels)) for labels in owned]
    with torch.no_grad():
        for flat, chosen in zip(models, mine, strict=True):
            module.load_state_dict(objective.layout.parameters_of(flat))
            (module(inputs[chosen]).argmax(1) == test.targets[chosen]).float().mean()
        (module(inputs).argmax(1) == test.targets).float().mean()
    return 1


def floor(objective: Objective, models: torch.Tensor, test: fb.Samples, owned: tuple[tuple[int, ...], ...]) -> float:
    inputs = test.inputs.float() / 255
    count = len(inputs) // 10
    for flat, labels in zip(models, owned, strict=True):
        weight = objective.layout.parameters_of(flat)["1.weight"]
        for label in labels:
            inputs[label * count : (label + 1) * count] @ weight.T
    inputs @ weight.T
    return 1


if __name__ == "__main__":
    main()
