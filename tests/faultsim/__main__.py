"""Run seeds, or one of them again: `python -m faultsim --seeds 0:2000`, `python -m faultsim --seed
17`.
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context

import torch

from faultsim.run import Outcome, report, run, shrink
from faultsim.schedule import CASES, Schedule

COLLECT_EVERY = 25  # seeds


def main() -> int:
    """0 if every seed held."""
    parser = argparse.ArgumentParser(prog="python -m faultsim", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        help="one seed: prints its schedule, and a shorter one that fails as well",
    )
    parser.add_argument("--seeds", default="0:2000", help="FIRST:LAST, the last left out")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="stop after this time, with what was done by then",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seed is not None:
        return one(arguments.seed)
    first, last = map(int, arguments.seeds.split(":"))
    return many(range(first, last), arguments.processes, arguments.seconds)


def one(seed: int) -> int:
    """Run a seed, tell what happened."""
    schedule = Schedule.of(seed)
    print(
        f"seed {seed}: {CASES[schedule.case][0]}, {schedule.members} devices per server,"
        f" {schedule.active} of them active"
    )
    for planned in schedule.faults:
        print(f"  {planned}")
    outcome = run(schedule)
    print(outcome.sentence or f"holds: {outcome.rounds} rounds, {outcome.letters} letters")
    if outcome.sentence:
        print(report(shrink(schedule)))
    return int(bool(outcome.sentence))


def many(seeds: Sequence[int], processes: int, seconds: float) -> int:
    """Run seeds side by side; the first five failures are shrunk. It can be stopped at any time:
    every 1,000 seeds are told.
    """
    began, failed, total = time.monotonic(), [], Totals()
    with get_context("fork").Pool(processes, prepare) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds, chunksize=20):
            total.add(outcome)
            if outcome.sentence:
                failed.append(outcome.seed)
                print(f"seed {outcome.seed}: {outcome.sentence}", flush=True)
            if total.seeds % 1000 == 0:
                print(total.text(time.monotonic() - began), flush=True)
            if time.monotonic() - began > seconds:
                break
    print(total.text(time.monotonic() - began))
    for seed in sorted(failed)[:5]:
        print(report(shrink(Schedule.of(seed))))
    return int(bool(failed))


def prepare() -> None:
    """For a process that runs seeds: what has been loaded stays; what a seed leaves is collected
    now and then, and not while one runs.
    """
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()


def run_seed(seed: int) -> Outcome:
    """One seed, in a process of its own."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    with torch.inference_mode():  # no gradient is taken: less to note for each operation
        return run(Schedule.of(seed))


class Totals:
    """Counts over many seeds."""

    def __init__(self) -> None:
        self.seeds = self.failed = self.rounds = self.letters = self.refused = 0
        self.faults: Counter[str] = Counter()
        self.slowest = 0.0

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.seeds += 1
        self.failed += bool(outcome.sentence)
        self.rounds += outcome.rounds
        self.letters += outcome.letters
        self.refused += outcome.refused
        self.slowest = max(self.slowest, outcome.recovered_s)
        self.faults.update(outcome.faults)

    def text(self, seconds: float) -> str:
        """In words."""
        faults = "\n".join(f"  {name:14} {count:,}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.seeds:,} seeds in {seconds:.0f} s, {self.failed} failed; {self.rounds:,}"
            f" rounds, {self.letters:,} letters, {self.refused:,} refused; two more rounds took at"
            f" most {self.slowest:.1f} s of the simulated clock after the faults\n{faults}"
        )


if __name__ == "__main__":
    sys.exit(main())
