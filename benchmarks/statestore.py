"""statestore: populations of logistic regressions in memory and in files, 1,000 devices active in a round.

usage: python benchmarks/statestore.py [--devices 10000,100000] [--largest 1000000] [--rounds 12] [--json] [--out FILE] [--repeats 2]
Each measurement is a process of its own, so that its peak of resident memory is its own; kinds alternate. `--largest` is run from
files only. Two copies of each model (x and x_prev) in float32 take 100,000 x 2 x 4 x 7,850 bytes = 5.8 GiB.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
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
    pool = fb.Samples(torch.from_numpy(rng.integers(0, 256, (POOL, 784), dtype=np.uint8)), torch.from_numpy(rng.integers(0, 10, POOL)))
    owned = (np.arange(devices * SAMPLES) % POOL).reshape(devices, SAMPLES)
    partition = Partition(tuple(owned), ((0, 1, 2),) * devices)
    model = partial(logistic, 784, 10)
    loss = torch.nn.functional.cross_entropy
    return fb.Federation.from_partition(model, loss, pool, partition, SERVERS, transform=lambda x, dtype: x.to(dtype) / 255)


def measure(devices: int, rounds: int, kind: str) -> dict[str, Any]:
    """One training: milliseconds of a round, the peak of resident memory, and the digest."""
    ticks: list[float] = []
    peaks: list[float] = []

    def tick(_: fb.Progress) -> None:
        ticks.append(time.perf_counter())
        peaks.append(peak_memory_mib())

    with tempfile.TemporaryDirectory() as folder:
        run = fb.train(
            federation(devices),
            fb.FedBCD(batch=10),
            rounds=rounds + WARM_UP,
            active=ACTIVE,
            evaluate_every=10**9,
            certify_every=0,
            state=Path(folder) if kind == "files" else None,
            on_round=tick,
        )
        last = ticks[WARM_UP - 1 : -1]  # the last round has a look after it
        seconds = statistics.median(b - a for a, b in pairwise(last))
        return {"ms": seconds * 1e3, "peak_mib": max(peaks), "peak_mib_whole_run": peak_memory_mib(), "digest": run.digest}


def in_a_process(devices: int, rounds: int, kind: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--devices", str(devices), "--rounds", str(rounds), "--threads", str(threads)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return found


def compare(devices: int, rounds: int, kinds: tuple[str, ...], repeats: int, threads: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            found[kind].append(in_a_process(devices, rounds, kind, threads))
    assert len({one["digest"] for several in found.values() for one in several}) == 1, "not the same bits"
    ms = {kind: min(one["ms"] for one in several) for kind, several in found.items()}
    return [
        {
            "devices": devices,
            "kept_in": kind,
            "ms_per_round": round(ms[kind], 1),
            "against_memory": round(ms[kind] / ms["memory"], 2) if "memory" in ms else None,
            "peak_mib_in_rounds": round(max(one["peak_mib"] for one in several)),
            "peak_mib": round(max(one["peak_mib_whole_run"] for one in several)),
        }
        for kind, several in found.items()
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", default="10000,100000")
    parser.add_argument("--largest", type=int, default=0, help="also this many devices, from files only")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--child", choices=("memory", "files"), help="one measurement, in this process")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        print(json.dumps(measure(int(chosen.devices), chosen.rounds, chosen.child)))
        return
    rows: list[dict[str, Any]] = []
    for devices in map(int, chosen.devices.split(",")):
        rows += compare(devices, chosen.rounds, ("memory", "files"), chosen.repeats, chosen.threads)
    if chosen.largest:
        rows += compare(chosen.largest, chosen.rounds, ("files",), 1, chosen.threads)
    finish("statestore", chosen, rows, active=SERVERS * ACTIVE, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
