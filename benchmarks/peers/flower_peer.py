"""Flower: its FedProx strategy and its simulation on Ray, usage reporting off, loopback only.

usage: python benchmarks/peers/flower_peer.py {round,epoch,scale} [--threads 1] [--actors 2]
Every actor keeps data, network and optimizer from one message to the next.
"""

import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedProx
from flwr.simulation import run_simulation
from torch_parts import DeviceData, network
from workload import (
    LEARNING_RATE,
    MOMENTUM,
    PENALTY,
    WORKLOADS,
    Round,
    Task,
    from_stamps,
    parser,
    report,
    tree_peak_mib,
)

client = ClientApp()


@cache
def bench(workload: str, threads: int) -> tuple[DeviceData, torch.nn.Module, torch.optim.Optimizer]:
    """What an actor sets up once."""
    torch.set_num_threads(threads)
    task = Task(WORKLOADS[workload])
    module = network(task)
    return (
        DeviceData(task),
        module,
        torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=MOMENTUM, fused=True),
    )


@client.train()
def train(message: Message, context: Context) -> Message:
    """One activation: FedProx steps from the global model, the penalty's gradient added by hand."""
    del context
    config = message.content["config"]
    data, module, optimizer = bench(config["workload"], config["threads"])
    parameters = list(module.parameters())
    anchor = [torch.from_numpy(array.numpy()) for array in message.content["arrays"].values()]
    with torch.no_grad():
        torch._foreach_copy_(parameters, anchor)
    optimizer.state.clear()
    for x, y in data.batches(config["device"], config["steps"]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters]
            torch._foreach_add_(
                gradients, torch._foreach_sub(parameters, anchor), alpha=config["proximal-mu"]
            )
        optimizer.step()
    arrays = ArrayRecord(
        {str(k): Array(parameter.detach().numpy()) for k, parameter in enumerate(parameters)}
    )
    metrics = MetricRecord({"num-examples": data.task.workload.samples})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Scheduled(FedProx):
    """FedProx that tells every sampled node which device to play for how many steps, and notes when
    rounds begin.
    """

    def __init__(self, task: Task, threads: int) -> None:
        workload = task.workload
        super().__init__(
            fraction_train=workload.active / workload.devices,
            fraction_evaluate=0.0,
            min_train_nodes=workload.active,
            min_available_nodes=workload.devices,
            proximal_mu=PENALTY,
        )
        self.schedule: list[Round] = task.schedule()
        self.common = {"workload": workload.name, "threads": threads, "proximal-mu": PENALTY}
        self.stamps: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.stamps.append(time.perf_counter())
        drawn = super().configure_train(server_round, arrays, config, grid)
        return [
            Message(
                content=RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord(self.common | {"device": device, "steps": steps}),
                    }
                ),
                message_type=message.metadata.message_type,
                dst_node_id=message.metadata.dst_node_id,
            )
            for message, (device, steps) in zip(drawn, self.schedule[server_round - 1], strict=True)
        ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--actors", type=int, default=2)
    chosen = options.parse_args()
    task = Task(WORKLOADS[chosen.workload])
    strategy = Scheduled(task, chosen.threads)
    server = ServerApp()

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        del context
        start = ArrayRecord({str(k): Array(value) for k, value in enumerate(task.start)})
        result = strategy.start(grid, start, num_rounds=task.workload.all_rounds)
        strategy.stamps.append(time.perf_counter())
        model = [array.numpy() for array in result.arrays.values()]
        variant = f"{chosen.actors} actors, {chosen.threads} threads"
        seconds, peak = from_stamps(task, strategy.stamps), tree_peak_mib(os.getpid())
        report(
            task,
            "Flower",
            version("flwr"),
            seconds,
            model,
            peak,
            f"{variant}, ray {version('ray')}",
        )

    run_simulation(
        server,
        client,
        num_supernodes=task.workload.devices,
        backend_config={
            "init_args": {
                "num_cpus": chosen.actors,
                "include_dashboard": False,
                "log_to_driver": False,
                "_node_ip_address": "127.0.0.1",
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    # so that actors import `train` and its cache by name instead of receiving a copy with every
    # message
    import flower_peer

    flower_peer.main()
