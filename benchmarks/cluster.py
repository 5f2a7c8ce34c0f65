"""cluster: what the cluster engine costs and what it moves, as ratios to the simulation in the same
run.

usage: python benchmarks/cluster.py [--devices 100,1000,10000] [--json] [--out FILE] [--repeats 5]
FedBCD on Sync-cloud with ten servers, a tenth of the devices active (at least 3 per server), 60
samples of 784 values each. At 100 devices the model is the recipes' MLP, above logistic regression.
Simulation with one worker, one actor, two actors, in turn: a ratio is the median over repeats of
runs that followed one another, with the smallest and the largest beside it. CPU time is that of
this process and of all that it has started, Ray's own included. Takes some five minutes on two free
cores.
"""

import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import finish, options

import fedbcd as fb
from fedbcd.algorithm.params import Layout
from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.data.partition import Partition
from fedbcd.engines.cluster.engine import actors_kept, ray_for
from fedbcd.models import logistic, mlp

SERVERS, SAMPLES, POOL = 10, 60, 20_000
ENGINES: dict[str, str | fb.Cluster] = {
    "simulate": "simulate",
    "1 actor": fb.Cluster(actors=1),
    "2 actors": fb.Cluster(actors=2),
}


def as_fractions(inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return inputs.to(dtype) / 255


def federation(devices: int, model: Callable[[], torch.nn.Module]) -> fb.Federation:
    rng = np.random.default_rng(0)
    pool = fb.Samples(
        torch.from_numpy(rng.integers(0, 256, (POOL, 784), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 10, POOL)),
    )
    owned = (np.arange(devices * SAMPLES) % POOL).reshape(devices, SAMPLES)
    partition = Partition(tuple(owned), ((0, 1, 2),) * devices)
    return fb.Federation.from_partition(
        model, torch.nn.functional.cross_entropy, pool, partition, SERVERS, transform=as_fractions
    )


def cpu_seconds() -> float:
    """CPU time of this process and its descendants so far."""
    ticks, parent = {}, {}
    for folder in Path("/proc").iterdir():
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # not a process, or gone
        parent[folder.name], ticks[folder.name] = (
            after_name[1],
            int(after_name[11]) + int(after_name[12]),
        )
    ours = {str(os.getpid())}
    while more := {child for child, of in parent.items() if of in ours} - ours:
        ours |= more
    return sum(ticks[process] for process in ours) / os.sysconf("SC_CLK_TCK")


def one_run(
    data: fb.Federation, active: int, rounds: int, engine: str | fb.Cluster
) -> dict[str, Any]:
    """Wall-clock and CPU milliseconds of a round, after some rounds of warming up."""
    warm_up = 3 if rounds < 20 else 10
    ticks: list[float] = []
    cpu: list[float] = []

    def tick(_: fb.Progress) -> None:
        ticks.append(time.perf_counter())
        if len(ticks) in (warm_up, warm_up + rounds):
            cpu.append(cpu_seconds())

    run = fb.train(
        data,
        fb.FedBCD(),
        rounds=rounds + warm_up + 1,  # the last round has a look after it
        active=active,
        evaluate_every=10**9,
        certify_every=0,
        engine=engine,
        on_round=tick,
    )
    wall = statistics.median(b - a for a, b in pairwise(ticks[warm_up - 1 : -1]))
    return {
        "ms": wall * 1e3,
        "cpu_ms": (cpu[1] - cpu[0]) / rounds * 1e3,
        "report": run.summary.get("cluster", {}),
        "rounds": len(ticks),
    }


def spread(values: Iterable[float]) -> list[float]:
    """Median, smallest, largest."""
    values = list(values)
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def measure(devices: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    model = mlp if devices <= 100 else partial(logistic, 784, 10)
    data, active = federation(devices, model), max(3, devices // 10 // SERVERS)
    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    loads = []
    for _ in range(repeats):
        for name, engine in ENGINES.items():
            seen[name].append(one_run(data, active, rounds, engine))
            loads.append(os.getloadavg()[0])
    size = Layout(data.make_model(0)).size_F
    labels = {"devices": devices, "parameters": size, "active": active * SERVERS}
    return [
        labels | row_of(name, runs, seen, size) | {"load": spread(loads)}
        for name, runs in seen.items()
    ]


def row_of(
    name: str, runs: list[dict[str, Any]], seen: dict[str, list[dict[str, Any]]], size: int
) -> dict[str, Any]:
    def against(other: str, what: str = "ms") -> list[float]:
        return spread(run[what] / one[what] for run, one in zip(runs, seen[other], strict=True))

    row: dict[str, Any] = {
        "who": name,
        "ms_per_round": spread(run["ms"] for run in runs),
        "against_simulate": against("simulate"),
    }
    row |= {
        "cpu_ms_per_round": spread(run["cpu_ms"] for run in runs),
        "cpu_against_simulate": against("simulate", "cpu_ms"),
    }
    report = runs[-1]["report"]
    if report:
        row["against_1_actor"] = against("1 actor")
        row |= {
            f"{kind}_bytes_per_round": round(report["bytes"][kind] / runs[-1]["rounds"])
            for kind in ("models", "work", "sums")
        }
        row["sums_bound"] = report["actors"] * size * 8
        row["shard_seconds"] = [shard["seconds"] for shard in report["shards"]]
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", default="100,1000,10000")
    parser.add_argument(
        "--rounds", type=int, help="per run; default: 30, with 10,000 devices or more 10"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `fedbcd run` does
    rows: list[dict[str, Any]] = []
    with ray_for(fb.Cluster(actors=3)), actors_kept():
        for devices in map(int, chosen.devices.split(",")):
            rows += measure(
                devices, chosen.rounds or (30 if devices < 10_000 else 10), chosen.repeats
            )
    driver = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    finish("cluster", chosen, rows, driver_peak_mib=driver, repeats=chosen.repeats)


if __name__ == "__main__":
    main()
