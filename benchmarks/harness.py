"""What every benchmark shares: alternating measurements, peak memory, and a record of where and
with what they were made.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Contestant:
    """One way to do the work: `run()` returns (seconds, units of work done), e.g. device-steps."""

    name: str
    run: Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """Seconds per unit of work: median, best and worst of the repetitions."""

    name: str
    median: float
    best: float
    worst: float
    repeats: int


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Seconds that `work` took, and the units it says it did."""
    began = time.perf_counter()
    units = work()
    return time.perf_counter() - began, units


def alternate(contestants: list[Contestant], repeats: int) -> dict[str, Measured]:
    """Each in turn, `repeats` times, after one round of warming up; so that a noisy minute hits all
    alike.
    """
    for contestant in contestants:
        contestant.run()
    seen: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            seconds, units = contestant.run()
            seen[contestant.name].append(seconds / units)
    return {
        name: Measured(name, statistics.median(s), min(s), max(s), len(s))
        for name, s in seen.items()
    }


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def peak_memory_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@cache
def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device)


@cache
def matrix_rate(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Operations per second of a large matrix product, with the precision that torch is set to
    use.
    """
    n = 8192 if device != "cpu" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / _best(lambda: a @ a, device)


def _best(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(5):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was asked to."""
    if device != "cpu":
        torch.cuda.synchronize()


def options(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that all scripts take."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--out", type=Path, help="also write that object to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="cores to use, for every contestant",
    )
    return parser


def finish(name: str, chosen: argparse.Namespace, rows: list[dict[str, Any]], **more: Any) -> None:
    """Print and write the result."""
    result = {
        "benchmark": name,
        **environment(),
        "threads": chosen.threads,
        "peak_mib": round(peak_memory_mib()),
        **more,
        "rows": rows,
    }
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    if chosen.json:
        print(json.dumps(result))
        return
    for row in rows:
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()))
    print(
        ", ".join(
            f"{key} {value}" for key, value in result.items() if key not in ("rows", "benchmark")
        ),
        file=sys.stderr,
    )


def as_rows(measured: dict[str, Measured], unit_ms: float, **labels: Any) -> list[dict[str, Any]]:
    """One row per contestant, in milliseconds per round, with the factor by which ours is
    faster.
    """
    ours = measured["ours"].median
    rows = []
    for m in measured.values():
        figures = {
            k: round(v * unit_ms, 3)
            for k, v in asdict(m).items()
            if k in ("median", "best", "worst")
        }
        rows.append(
            {**labels, "who": m.name, **figures, "ours_is_faster": round(m.median / ours, 2)}
        )
    return rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
