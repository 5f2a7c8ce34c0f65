"""FedLab: its FedProx trainer and server handler in its standalone loop; momentum, fused SGD and
in-memory batches by subclassing.

usage: python benchmarks/peers/fedlab_peer.py {round,epoch,scale} [--threads 2]
"""

import sys
import types
from collections.abc import Iterable
from importlib.metadata import version

import torch
from torch import Tensor
from torch_parts import DeviceData, arrays, network
from workload import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    PENALTY,
    WORKLOADS,
    Round,
    Task,
    measure,
    parser,
    peak_mib,
    report,
)

torchvision = types.ModuleType(
    "torchvision"
)  # FedLab imports it for datasets that are not used here
torchvision.transforms = types.ModuleType("torchvision.transforms")
sys.modules["torchvision"] = torchvision

from fedlab.contrib.algorithm.fedprox import FedProxSerialClientTrainer, FedProxServerHandler


class Trainer(FedProxSerialClientTrainer):
    """FedProx with momentum that starts from nothing on every device."""

    def setup_optim(self, epochs: int, batch_size: int, lr: float, mu: float) -> None:
        super().setup_optim(epochs, batch_size, lr, mu)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=MOMENTUM, fused=True)

    def train(
        self, model_parameters: Tensor, train_loader: Iterable[tuple[Tensor, Tensor]], mu: float
    ) -> list[Tensor]:
        self.optimizer.state.clear()
        return super().train(model_parameters, train_loader, mu)


class Loaders:
    """Stands for a dataset: one activation's mini-batches by device."""

    def __init__(self, data: DeviceData) -> None:
        self.data = data
        self.steps: dict[int, int] = {}

    def get_dataloader(self, device: int, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]:
        assert batch_size == BATCH
        return self.data.batches(device, self.steps[device])


def main() -> None:
    chosen = parser(__doc__).parse_args()
    torch.set_num_threads(chosen.threads)
    task = Task(WORKLOADS[chosen.workload])
    module, workload, loaders = network(task), task.workload, Loaders(DeviceData(task))
    handler = FedProxServerHandler(module, workload.all_rounds, workload.active / workload.devices)
    handler.num_clients = workload.devices
    trainer = Trainer(module, workload.devices)
    trainer.setup_dataset(loaders)
    trainer.setup_optim(1, BATCH, LEARNING_RATE, PENALTY)

    def play(rounds: list[Round]) -> None:
        for active in rounds:
            loaders.steps = dict(active)
            trainer.local_process(handler.downlink_package, [device for device, _ in active])
            for upload in trainer.uplink_package:
                handler.load(upload)

    seconds = measure(task, play)
    assert handler.round == workload.all_rounds
    report(
        task,
        "FedLab",
        version("fedlab"),
        seconds,
        arrays(handler.model),
        peak_mib(),
        f"{chosen.threads} threads",
    )


if __name__ == "__main__":
    main()
