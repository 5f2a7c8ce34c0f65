"""statestore: populations of logistic regressions in memory and in files, 1,000 devices active in a
round.

usage: python benchmarks/statestore.py [--devices 10000,100000,1000000] [--rounds 12] [--json]
[--out FILE] [--repeats 2] Each measurement is a process of its own, so that its peak of resident
memory is its own; populations and kinds alternate. Up to --memory devices are also kept in memory.
Two copies of each model (x and x_prev) in float32 take 100,000 x 2 x 4 x 7,850 bytes = 5.8 GiB; the
files of those that have never trained take nothing. CPU time is that of all threads of the process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import finish, options, peak_memory_mib

import fedbcd as fb
from fedbcd.data.partition import Partition
from fedbcd.models import logistic

SERVERS, ACTIVE, SAMPLES, POOL = 10, 100, 20, 20_000
WARM_UP = 4


def federation(devices: int) -> fb.Federation:
    """Twenty samples of 784 values per device, out of one pool."""
    rng = np.random.default_rng(0)
    pool = fb.Samples(
        torch.from_numpy(rng.integers(0, 256, (POOL, 784), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 10, POOL)),
    )
    owned = (np.arange(devices * SAMPLES) % POOL).reshape(devices, SAMPLES)
    partition = Partition(tuple(owned), ((0, 1, 2),) * devices)
    model = partial(logistic, 784, 10)
    loss = torch.nn.functional.cross_entropy
    return fb.Federation.from_partition(
        model, loss, pool, partition, SERVERS, transform=lambda x, dtype: x.to(dtype) / 255
    )


def measure(devices: int, rounds: int, kind: str) -> dict[str, Any]:
    """One training: milliseconds of a round, the peak of resident memory, seconds before and after
    the rounds, and the digest.
    """
    began = time.perf_counter()
    data = federation(devices)
    ticks: list[tuple[float, float]] = []
    peaks: list[float] = []

    def tick(_: fb.Progress) -> None:
        ticks.append((time.perf_counter(), time.process_time()))
        peaks.append(peak_memory_mib())

    with tempfile.TemporaryDirectory() as folder:
        run = fb.train(
            data,
            fb.FedBCD(batch=10),
            rounds=rounds + WARM_UP,
            active=ACTIVE,
            evaluate_every=10**9,
            certify_every=0,
            state=Path(folder) if kind == "files" else None,
            on_round=tick,
        )
    steady = ticks[WARM_UP - 1 : -1]  # the last round has a look after it
    wall, cpu = (statistics.median(b[k] - a[k] for a, b in pairwise(steady)) * 1e3 for k in (0, 1))
    times = {
        "ms": wall,
        "cpu_ms": cpu,
        "before_s": ticks[0][0] - began,
        "after_s": time.perf_counter() - ticks[-2][0],
    }
    return times | {
        "peak_mib": peaks[-2],
        "peak_mib_whole_run": peak_memory_mib(),
        "digest": run.digest,
        "load": os.getloadavg()[0],
    }


def in_a_process(devices: int, rounds: int, kind: str, threads: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--child",
        kind,
        "--devices",
        str(devices),
        "--rounds",
        str(rounds),
        "--threads",
        str(threads),
    ]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    return found


def compare(
    kinds: list[tuple[int, str]], rounds: int, repeats: int, threads: int
) -> list[dict[str, Any]]:
    """Each population in each way, in turn."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(repeats):
        for devices, kind in kinds:
            found[devices, kind].append(in_a_process(devices, rounds, kind, threads))
    for devices, _ in kinds:
        digests = {
            one["digest"]
            for (number, _), runs in found.items()
            if number == devices
            for one in runs
        }
        assert len(digests) == 1, f"not the same bits with {devices} devices"
    return [row_of(devices, kind, found) for devices, kind in kinds]


def row_of(
    devices: int, kind: str, found: dict[tuple[int, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    runs = found[devices, kind]

    def against(other: tuple[int, str], what: str) -> float | None:
        pairs = zip(runs, found.get(other, []), strict=False)
        ratios = [run[what] / one[what] for run, one in pairs]
        return round(statistics.median(ratios), 3) if ratios else None

    fewest = (min(number for number, of in found if of == kind), kind)
    row: dict[str, Any] = {"devices": devices, "kept_in": kind}
    row |= {
        f"{name}_per_round": round(statistics.median(run[name] for run in runs), 1)
        for name in ("ms", "cpu_ms")
    }
    row |= {
        "against_memory": against((devices, "memory"), "ms"),
        "cpu_against_memory": against((devices, "memory"), "cpu_ms"),
    }
    row |= {
        "against_fewest": against(fewest, "ms"),
        "cpu_against_fewest": against(fewest, "cpu_ms"),
    }
    row |= {
        name: round(statistics.median(run[name] for run in runs), 1)
        for name in ("before_s", "after_s", "load")
    }
    peaks = {"peak_mib_in_rounds": "peak_mib", "peak_mib": "peak_mib_whole_run"}
    return row | {name: round(max(run[what] for run in runs)) for name, what in peaks.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", default="10000,100000,1000000")
    parser.add_argument(
        "--memory", type=int, default=100_000, help="up to so many devices also in memory"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--child", choices=("memory", "files"), help="one measurement, in this process"
    )
    parser.set_defaults(repeats=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        print(json.dumps(measure(int(chosen.devices), chosen.rounds, chosen.child)))
        return
    populations = [int(number) for number in chosen.devices.split(",")]
    kinds = [
        (devices, kind)
        for devices in populations
        for kind in ("memory", "files")
        if kind == "files" or devices <= chosen.memory
    ]
    rows = compare(kinds, chosen.rounds, chosen.repeats, chosen.threads)
    finish("statestore", chosen, rows, active=SERVERS * ACTIVE, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
