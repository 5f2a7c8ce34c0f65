"""The timeline alone, no tensors: how long the schedule of many devices takes, from 10^3 to 10^6 of
them.

usage: python benchmarks/timeline.py [--json] [--out FILE] [--sizes 1000,10000,...] [--rounds 100]
Each size runs in a process of its own, so that its memory is its own. Exits 1 if a million devices
take more than 60 s or 4 GiB.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import fedbcd as fb
from fedbcd.algorithm.method import Facts
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation

PER_SERVER = 1000  # devices
SHARE = 0.3  # of the servers are waited for, B / N
ACTIVE = 3
LIMIT_SECONDS, LIMIT_GIB = 60.0, 4.0


def one(devices: int, rounds: int) -> dict[str, float]:
    """Play the rounds of an Async-cloud; what it took."""
    servers = max(1, devices // PER_SERVER)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    homes = [list(range(n * PER_SERVER, (n + 1) * PER_SERVER)) for n in range(servers)]
    method = fb.FedBCD().method(Facts(devices, [1] * devices))
    first = max(1, round(SHARE * servers))
    driver = Driver(Machines(homes, fb.AsyncCloud(first), ACTIVE, 1, None), None)
    simulation = Simulation(driver, Schedule(method, fb.Clock(), seed=0, active=ACTIVE))
    ready = time.perf_counter()
    while simulation.round < rounds:
        simulation.play_round()
    ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "devices": devices,
        "servers": servers,
        "first": first,
        "rounds": simulation.round,
        "events": driver.transitions,
        "setup_s": ready - began,
        "wall_s": ended - began,
        "cpu_s": cpu,
        "cpu_us_per_event": 1e6 * cpu / driver.transitions,
        "peak_gib": after.ru_maxrss / 2**20,
        "clock": simulation.now,
    }


def apart(devices: int, rounds: int) -> dict[str, float]:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", str(devices), "--rounds", str(rounds)]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return found


def machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "fedbcd": fb.__version__,
        "commit": commit.stdout.strip() or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print one object on the last line")
    parser.add_argument("--out", type=Path, help="write that object to a file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(options.one, options.rounds)))
        return
    results = []
    print(
        f"{'devices':>9} {'servers':>7} {'B':>4} {'events':>8} {'wall s':>7} {'cpu s':>7}"
        f" {'cpu us/event':>12} {'GiB':>6}",
        file=sys.stderr,
    )
    for devices in map(int, options.sizes.split(",")):
        results.append(r := apart(devices, options.rounds))
        print(
            f"{r['devices']:>9} {r['servers']:>7} {r['first']:>4} {r['events']:>8}"
            f" {r['wall_s']:>7.2f} {r['cpu_s']:>7.2f} {r['cpu_us_per_event']:>12.1f}"
            f" {r['peak_gib']:>6.2f}",
            file=sys.stderr,
        )
    summary = {"machine": machine(), "results": results}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    if options.json:
        print(json.dumps(summary))
    largest = results[-1]
    sys.exit(0 if largest["wall_s"] < LIMIT_SECONDS and largest["peak_gib"] < LIMIT_GIB else 1)


if __name__ == "__main__":
    main()
