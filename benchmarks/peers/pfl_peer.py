"""pfl-research: its FedProx on its simulated backend, fused SGD, one process or several under
torchrun.

usage: python benchmarks/peers/pfl_peer.py {round,epoch,scale} [--threads 2] [--prox hand]
       torchrun --standalone --nproc-per-node 2 benchmarks/peers/pfl_peer.py {round,epoch,scale}
       [--prox hand]
`--prox hand` swaps the library's penalty in the loss for gamma (x - z) added to the gradients,
through the library's own hook.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch_parts import DeviceData, arrays, network
from workload import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    PENALTY,
    WORKLOADS,
    Task,
    from_stamps,
    parser,
    report,
    tree_peak_mib,
)


class Module(nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        del x, y
        return {}


class DeviceDataset(Dataset):
    """One activation: so many random mini-batches of one device."""

    def __init__(self, data: DeviceData, device: int, steps: int) -> None:
        super().__init__((), user_id=str(device))
        self.data, self.device, self.steps = data, device, steps

    def __len__(self) -> int:
        return self.data.task.workload.samples

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        del batch_size  # BATCH in training; pfl also looks once at round 0, which is warm-up
        return self.data.batches(self.device, self.steps)


class HandProx(FedProx):
    """FedProx whose penalty never enters autograd."""

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        parameters = list(model.variable_map.values())
        anchor = [initial_model_state[name] for name in model.variable_map]

        def step(module, optimizer, batch, *_):
            module.loss(*batch).backward()
            gradients = [parameter.grad for parameter in parameters]
            with torch.no_grad():
                torch._foreach_add_(
                    gradients, torch._foreach_sub(parameters, anchor), alpha=PENALTY
                )
            optimizer.step()
            optimizer.zero_grad()

        model.do_multiple_epochs_of(user_dataset, central_context.model_train_params, step)
        return model.get_model_difference(initial_model_state), Metrics()


class Stamps(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *, model):
        del model
        self.seconds.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        del aggregate_metrics, model, central_iteration
        self.seconds.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prox", choices=("own", "hand"), default="own")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    task = Task(WORKLOADS[chosen.workload])
    data = DeviceData(task)
    work = iter([item for active in task.schedule() for item in active])
    devices = FederatedDataset(lambda item: DeviceDataset(data, *item), lambda: next(work))
    module = Module(network(task))
    create = partial(torch.optim.SGD, momentum=MOMENTUM, fused=True)
    model = PyTorchModel(module, create, torch.optim.SGD(module.parameters(), lr=1.0))
    params = FedProxParams(
        central_num_iterations=task.workload.all_rounds,
        evaluation_frequency=10**9,
        train_cohort_size=task.workload.active,
        val_cohort_size=None,
        mu=PENALTY,
    )
    train = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
    )
    stamps = Stamps()
    algorithm = HandProx() if chosen.prox == "hand" else FedProx()
    algorithm.run(
        params,
        SimulatedBackend(devices, devices),
        model,
        train,
        callbacks=[stamps],
        send_metrics_to_platform=False,
    )

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        torch.distributed.barrier()
    if os.environ.get("RANK", "0") == "0":
        peak = tree_peak_mib(os.getppid() if processes > 1 else os.getpid())
        variant = (
            f"{processes} processes, {chosen.threads} threads, penalty"
            f" {'by hand' if chosen.prox == 'hand' else 'as it comes'}"
        )
        report(
            task,
            "pfl-research",
            version("pfl"),
            from_stamps(task, stamps.seconds),
            arrays(module),
            peak,
            variant,
        )
    if processes > 1:
        torch.distributed.barrier()  # nobody leaves before the memory has been read
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
