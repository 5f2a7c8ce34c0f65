"""resnet: one step of the paper's CIFAR-10 round, 50 active ResNet-20s with batches of 32 each, on one GPU.

usage: python benchmarks/resnet.py [--device cuda] [--models 50] [--json] [--out FILE] [--repeats 5]
Ours (all models in one vectorised step) in float32, TF32 and bfloat16 arithmetic of the matrix units; a plain loop, one model after
another; and a floor from measured bandwidth and matrix rate. Milliseconds per step of all models.
"""

import torch
from harness import Contestant, alternate, as_rows, bandwidth, finish, matrix_rate, options, synchronise, timed
from torch import Tensor, nn

from fedbcd.algorithm.device import aspg_step, extrapolate
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.projection import Box
from fedbcd.models import resnet20

BATCH, STEPS = 32, 5
OPERATIONS = 2 * 40.8e6 * 3  # of one image: multiply and add, forward, backward for weights and inputs


class Stack:
    """Some ResNet-20s and a batch of random images for each."""

    def __init__(self, models: int, device: str) -> None:
        self.objective = Objective(resnet20(), nn.functional.cross_entropy).to(torch.device(device))
        layout = self.objective.layout
        flat = torch.stack([layout.flatten(resnet20(), torch.float32) for _ in range(models)]).to(device)
        self.x, self.buffers = flat[:, : layout.size_P].contiguous(), flat[:, layout.size_P :].contiguous()
        self.prev, self.z = self.x.clone(), self.x[0].clone()
        self.inputs = torch.randn(models, BATCH, 3, 32, 32, device=device)
        self.targets = torch.randint(10, (models, BATCH), device=device)


def ours(stack: Stack, device: str, precision: str) -> float:
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        for _ in range(STEPS):
            ex = extrapolate(stack.x, stack.prev, 0.9)
            found = stack.objective.gradients(ex, stack.buffers, stack.inputs, stack.targets)
            stack.prev, stack.x = stack.x, aspg_step(ex, found.parts, stack.z, 1.0, 0.005, Box())
    synchronise(device)
    return STEPS


def plain(stack: Stack, device: str) -> float:
    module, layout = resnet20().to(device), stack.objective.layout
    optimiser = torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)
    for k, flat in enumerate(stack.x):
        layout.load(module, torch.cat([flat, stack.buffers[k]]))
        anchor = layout.parameters_of(stack.z)
        optimiser.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(module(stack.inputs[k]), stack.targets[k])
        loss = loss + 0.5 * sum(((p - anchor[name]) ** 2).sum() for name, p in module.named_parameters())
        loss.backward()
        optimiser.step()
    synchronise(device)
    return 1


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=int, default=50)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    stack = Stack(chosen.models, chosen.device)
    operations, moved = OPERATIONS * BATCH * chosen.models, 8 * stack.x.numel() * 4
    floor = max(operations / matrix_rate(chosen.device), moved / bandwidth(chosen.device))
    contestants = [
        Contestant(
            "ours" if precision == "tf32" else f"ours, {precision}", lambda p=precision: timed(lambda: ours(stack, chosen.device, p))
        )
        for precision in ("tf32", "float32", "bfloat16")
    ]
    contestants += [
        Contestant("plain loop", lambda: timed(lambda: plain(stack, chosen.device))),
        Contestant("floor", lambda: (floor, 1)),
    ]
    rows = as_rows(alternate(contestants, chosen.repeats), 1e3)
    finish("resnet", chosen, rows, unit="milliseconds per step of all models", models=chosen.models, device=chosen.device)


if __name__ == "__main__":
    main()
