"""The step sizes of the default job, chosen on seeds that it does not show: the same number of
settings for each method, the best mean personal accuracy of two validation seeds.

    python benchmarks/default_job.py --out benchmarks/results/default_job.json

What was computed is kept beside it, so that it can be interrupted. `--only fedbcd` is one method.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from fedbcd.experiments.compare import comparison_of
from fedbcd.experiments.job import default_table, parse
from fedbcd.experiments.pool import run_jobs, workers_that_fit
from fedbcd.experiments.titles import in_a_word

VALIDATION = (100, 101)  # seeds
GRID: dict[str, dict[str, list[Any]]] = {
    "local": {"device_step": [0.05, 0.1, 0.2], "momentum": [0.5, 0.9]},
    "fedavg": {"device_step": [0.02, 0.05, 0.1, 0.2, 0.4, 0.8]},
    "fedavg-ft": {"device_step": [0.2, 0.4, 0.8], "tuning_steps": [10, 40]},
    "fedbcd": {"device_step": [0.05, 0.1, 0.2], "penalty": [0.3, 1.0]},
    "fedbcd-i": {"device_step": [0.02, 0.05, 0.1], "penalty": [0.2, 0.5]},
}


def tried(name: str) -> list[dict[str, Any]]:
    """The settings of a method."""
    grid = GRID[name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def table_of(name: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """The default job's run of this method, with these settings."""
    table = default_table()
    (run,) = (each for each in table.pop("runs") if each["algorithm"]["name"] == name)
    changed = {key: value for key, value in run["algorithm"].items() if key != "device_step"}
    beside = {key: value for key, value in table["run"].items() if key != "seeds"}
    return {
        **table,
        **run,
        "title": f"{name} {in_a_word(settings)}",
        "algorithm": {**changed, **settings},
        "run": {**beside, "seed": seed, "looks": 1, "certify_every": 0},
    }


def main() -> None:
    """Compute what is missing, and say which settings are best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(GRID))
    parser.add_argument("--workers", type=int)
    asked = parser.parse_args()
    chosen = [asked.only] if asked.only else list(GRID)
    jobs = {
        (name, k, seed): parse(table_of(name, settings, seed))[0]
        for name in chosen
        for k, settings in enumerate(tried(name))
        for seed in VALIDATION
    }
    some = next(iter(jobs.values()))
    workers = asked.workers or workers_that_fit(some.make_federation())
    results = run_jobs([*jobs.values()], Path("runs/default-job"), workers)
    found = comparison_of(results, ())
    known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for name in chosen:
        rows = [
            settings
            | {
                column: round(found.mean(f"{name} {in_a_word(settings)}", column), 4)
                for column in ("personal_accuracy", "global_accuracy", "worst_decile")
            }
            for settings in tried(name)
        ]
        known[name] = sorted(rows, key=lambda row: -row["personal_accuracy"])
        print(name, known[name][0])
    asked.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
