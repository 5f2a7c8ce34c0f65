"""fedbcd itself: FedProx under ten servers, in the middle of a simulation, protocol and all.

usage: python benchmarks/peers/ours.py {round,epoch,scale} [--threads 2]
"""

import torch
from workload import (
    LEARNING_RATE,
    MOMENTUM,
    PENALTY,
    WORKLOADS,
    Array,
    Round,
    Task,
    measure,
    parser,
    peak_mib,
    report,
)

import fedbcd as fb
from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.compute.workers import workers
from fedbcd.data.partition import Partition
from fedbcd.engines.setup import make_machines, make_numbers, make_reader, make_schedule
from fedbcd.models import mlp
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation

SERVERS = 10


def federation(task: Task) -> fb.Federation:
    def model() -> torch.nn.Module:
        module = mlp()
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), task.start, strict=True):
                parameter.copy_(torch.from_numpy(value))
        return module

    owned = [range(len(task.targets))[task.owned(i)] for i in range(task.workload.devices)]
    partition = Partition(
        tuple(torch.tensor(rows).numpy() for rows in owned), tuple(tuple(range(10)) for _ in owned)
    )
    pool = fb.Samples(torch.from_numpy(task.bytes), torch.from_numpy(task.targets))
    return fb.Federation.from_partition(
        model,
        torch.nn.functional.cross_entropy,
        pool,
        partition,
        SERVERS,
        transform=fb.Scale(255.0),
    )


def main() -> None:
    chosen = parser(__doc__).parse_args()
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()
    task = Task(WORKLOADS[chosen.workload])
    parties = federation(task)
    constants = {"device_step": LEARNING_RATE, "momentum": MOMENTUM, "penalty": PENALTY}
    algorithm = fb.FedProx(steps=task.workload.steps, projection=fb.Box(-2, 2), **constants)
    spec = fb.RunSpec(algorithm, active=task.workload.active // SERVERS)
    numbers = make_numbers(spec, parties, torch.device("cpu"))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    numbers.trainer.objective.TRACE_AFTER = (
        4  # traces are made while warming up, as the peers' compilations are
    )
    schedule = make_schedule(spec, parties)
    reader = make_reader(spec, parties)
    simulation = Simulation(Driver(make_machines(spec, parties), reader), schedule)

    def play(
        rounds: list[Round],
    ) -> (
        None
    ):  # its own schedule decides who is active; the number and the steps are the same on average
        for _ in rounds:
            numbers.play(next(simulation))

    with workers(chosen.threads) as crew:
        numbers.use(crew)
        seconds = measure(task, play)
    report(
        task,
        "fedbcd",
        fb.__version__,
        seconds,
        unflatten(numbers.global_VF()[0], task),
        peak_mib(),
        f"{chosen.threads} workers",
    )


def unflatten(flat: torch.Tensor, task: Task) -> list[Array]:
    parts = flat.split([value.size for value in task.start])
    return [
        part.reshape(value.shape).numpy() for part, value in zip(parts, task.start, strict=True)
    ]


if __name__ == "__main__":
    main()
