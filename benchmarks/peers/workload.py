"""The work that all contestants do, needing NumPy alone: sizes, data, schedule, starting weights,
and the line they print.

The sizes are those of `benchmarks/round.py`, `epoch.py` and `scale.py`, with FedProx as the
algorithm that all of them know.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Round = list[tuple[int, int]]  # (device, steps) of every active device
WIDTHS = (784, 128, 64, 10)
BATCH, LEARNING_RATE, MOMENTUM, PENALTY = 32, 0.005, 0.9, 5.0
WARM_UP = 2  # measurements


@dataclass(frozen=True)
class Workload:
    """`rounds` are played in one measurement, and there are `repeats` measurements."""

    name: str
    devices: int
    samples: int
    active: int
    steps: tuple[int, int]
    rounds: int
    repeats: int

    @property
    def all_rounds(self) -> int:
        """Rounds from the first of the warm-up to the last that is measured."""
        return (WARM_UP + self.repeats) * self.rounds


WORKLOADS = {
    "round": Workload(
        "round", devices=100, samples=600, active=30, steps=(1, 5), rounds=10, repeats=7
    ),
    "epoch": Workload(
        "epoch", devices=100, samples=600, active=30, steps=(19, 19), rounds=3, repeats=5
    ),
    "scale": Workload(
        "scale", devices=10_000, samples=60, active=1_000, steps=(1, 5), rounds=1, repeats=3
    ),
}


class Task:
    """The data of every device, the starting weights, and who is active when; all follow from the
    workload.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        rng = np.random.default_rng(0)
        pool = min(workload.devices * workload.samples, 60_000)
        self.targets = rng.integers(0, WIDTHS[-1], pool)
        patterns = rng.integers(
            0, 256, (WIDTHS[-1], WIDTHS[0]), dtype=np.uint8
        )  # one per class, so that there is something to learn
        self.bytes = patterns[self.targets] // 2 + rng.integers(
            0, 128, (pool, WIDTHS[0]), dtype=np.uint8
        )
        self.inputs = self.bytes.astype(np.float32) / np.float32(255)
        self.start = [
            self._uniform(rng, shape) for a, b in pairwise(WIDTHS) for shape in ((b, a, a), (b, a))
        ]
        self._rng = rng

    @staticmethod
    def _uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Weights (outputs, inputs) or biases (outputs), even in +-1/sqrt(inputs); the last entry
        of `shape` is the bound's inputs.
        """
        bound = np.float32(shape[-1] ** -0.5)
        return (2 * rng.random(shape[:-1], dtype=np.float32) - 1) * bound

    def owned(self, device: int) -> slice:
        """The samples of a device; in `scale` ten devices share each of them."""
        first = device * self.workload.samples % len(self.targets)
        return slice(first, first + self.workload.samples)

    def schedule(self) -> list[Round]:
        """Every round of a run, warm-up included."""
        low, high = self.workload.steps
        chosen = [
            self._rng.choice(self.workload.devices, self.workload.active, replace=False)
            for _ in range(self.workload.all_rounds)
        ]
        return [
            [(int(i), int(self._rng.integers(low, high + 1))) for i in devices]
            for devices in chosen
        ]

    def loss(self, model: list[Array]) -> float:
        """Mean cross-entropy over the pool, to see that contestants learn alike."""
        hidden = self.inputs
        for k in range(0, len(model), 2):
            hidden = hidden @ np.asarray(model[k]).T + np.asarray(model[k + 1])
            if k + 2 < len(model):
                hidden = np.maximum(hidden, 0)
        logits = hidden.astype(np.float64)
        top = logits.max(1)
        return float(
            np.mean(
                top
                + np.log(np.exp(logits - top[:, None]).sum(1))
                - logits[np.arange(len(logits)), self.targets]
            )
        )


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What every contestant can be asked."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("workload", choices=WORKLOADS)
    options.add_argument("--threads", type=int, default=1)
    return options


def measure(task: Task, play: Callable[[list[Round]], None]) -> list[float]:
    """Seconds per round of every measurement after the warm-up; `play` plays rounds and returns
    when their result is there.
    """
    workload, schedule = task.workload, task.schedule()
    seconds = []
    for first in range(0, len(schedule), workload.rounds):
        rounds = schedule[first : first + workload.rounds]
        began = time.perf_counter()
        play(rounds)
        seconds.append((time.perf_counter() - began) / workload.rounds)
    return seconds[WARM_UP:]


def from_stamps(task: Task, stamps: list[float]) -> list[float]:
    """The same from a clock read before the first round and after each."""
    ends = stamps[:: task.workload.rounds]
    return [(after - before) / task.workload.rounds for before, after in pairwise(ends)][WARM_UP:]


def report(
    task: Task,
    peer: str,
    version: str,
    seconds: list[float],
    model: list[Array],
    peak_mib: float,
    variant: str,
) -> None:
    """Print the one line that `compare.py` reads."""
    ms = [1e3 * s for s in seconds]
    figures = {"median": statistics.median(ms), "best": min(ms), "worst": max(ms)}
    line = {
        "peer": peer,
        "version": version,
        "workload": task.workload.name,
        "variant": variant,
        "ms_per_round": {k: round(v, 2) for k, v in figures.items()},
        "rounds": task.workload.rounds * len(ms),
        "measurements": len(ms),
        "peak_mib": round(peak_mib),
        "loss_before": round(task.loss(task.start), 4),
        "loss_after": round(task.loss(model), 4),
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(line), flush=True)


def peak_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tree_peak_mib(root: int) -> float:
    """The sum of what `root` and its living descendants have each held at most; pages they share
    count more than once.
    """
    parents, peaks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1)
                for line in (folder / "status").read_text().splitlines()
                if ":\t" in line
            )
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(status["PPid"])
        peaks[int(folder.name)] = int(status.get("VmHWM", "0 kB").split()[0]) / 1024
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(peaks.get(member, 0) for member in family)
