"""cluster: what the cluster engine costs and what it moves, as ratios to the simulation in the same run.

usage: python benchmarks/cluster.py [--devices 100,1000,10000] [--json] [--out FILE] [--repeats 3]
FedBCD on Sync-cloud with ten servers, a tenth of the devices active (at least 3 per server), 60 samples of 784 values each. At 100
devices the model is the paper's MLP; above, logistic regression. Simulation with one worker, one actor, two actors, in turn.
"""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from harness import finish, options

import fedbcd as fb
from fedbcd.algorithm.params import Layout
from fedbcd.data.partition import Partition
from fedbcd.engines.cluster.engine import actors_kept, ray_for
from fedbcd.models import logistic, mlp

SERVERS, SAMPLES, POOL, WARM_UP = 10, 60, 20_000, 3


def as_fractions(inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return inputs.to(dtype) / 255


def federation(devices: int, model: Callable[[], torch.nn.Module]) -> fb.Federation:
    rng = np.random.default_rng(0)
    pool = fb.Samples(torch.from_numpy(rng.integers(0, 256, (POOL, 784), dtype=np.uint8)), torch.from_numpy(rng.integers(0, 10, POOL)))
    owned = (np.arange(devices * SAMPLES) % POOL).reshape(devices, SAMPLES)
    partition = Partition(tuple(owned), ((0, 1, 2),) * devices)
    return fb.Federation.from_partition(model, torch.nn.functional.cross_entropy, pool, partition, SERVERS, transform=as_fractions)


def seconds_per_round(data: fb.Federation, active: int, rounds: int, engine: str | fb.Cluster) -> tuple[float, dict[str, Any]]:
    ticks: list[float] = []
    run = fb.train(
        data,
        fb.FedBCD(),
        rounds=rounds + WARM_UP,
        active=active,
        evaluate_every=10**9,
        certify_every=0,
        engine=engine,
        on_round=lambda _: ticks.append(time.perf_counter()),
    )
    steady = ticks[WARM_UP - 1 : -1]  # the last round has a look after it
    return statistics.median(b - a for a, b in pairwise(steady)), run.summary.get("cluster", {})


def measure(devices: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    model = mlp if devices <= 100 else partial(logistic, 784, 10)
    data, active = federation(devices, model), max(3, devices // 10 // SERVERS)
    engines: dict[str, str | fb.Cluster] = {"simulate": "simulate", "1 actor": fb.Cluster(actors=1), "2 actors": fb.Cluster(actors=2)}
    seen: dict[str, list[float]] = {name: [] for name in engines}
    reports: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for name, engine in engines.items():
            seconds, reports[name] = seconds_per_round(data, active, rounds, engine)
            seen[name].append(seconds)
    best = {name: min(values) for name, values in seen.items()}
    size = Layout(data.make_model(0)).size_F
    rows = []
    for name in engines:
        row: dict[str, Any] = {"devices": devices, "parameters": size, "active": active * SERVERS, "who": name}
        row |= {"ms_per_round": round(best[name] * 1e3, 2), "against_simulate": round(best[name] / best["simulate"], 3)}
        if reports[name]:
            actors, moved = reports[name]["actors"], reports[name]["bytes"]
            row |= {f"{kind}_bytes_per_round": round(moved[kind] / (rounds + WARM_UP)) for kind in ("models", "work", "sums")}
            row["sums_bound"] = (SERVERS + actors - 1) * size * 8
            row["shard_seconds"] = [shard["seconds"] for shard in reports[name]["shards"]]
        rows.append(row)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", default="100,1000,10000")
    parser.add_argument("--rounds", type=int, default=12)
    parser.set_defaults(repeats=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with ray_for(fb.Cluster(actors=3)), actors_kept():
        for devices in map(int, chosen.devices.split(",")):
            rows += measure(devices, chosen.rounds, chosen.repeats)
    driver = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    finish("cluster", chosen, rows, driver_peak_mib=driver, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
