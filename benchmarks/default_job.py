"""The step sizes of the default job, chosen on seeds that it does not show: the same number of
settings for each method, the best mean personal accuracy of two validation seeds. Then the job
itself, with its own seeds, for the table of the README (`benchmarks/tables.py` puts it there).

    python benchmarks/default_job.py --out benchmarks/results/default_job.json

What was computed is kept in runs/, so that it can be interrupted. `--only fedbcd` is the settings
of one method, `--only job` the job.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from fedbcd.experiments.compare import comparison_of
from fedbcd.experiments.job import default_table, parse, seeds_in
from fedbcd.experiments.pool import run_jobs, workers_that_fit
from fedbcd.experiments.titles import in_a_word

VALIDATION = (100, 101)  # seeds
JOB = "job"
NEW = ("newcomers.global", "newcomers.own", "newcomers.alone")
SCORES = ("global_accuracy", "personal_accuracy", "worst_decile")
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


def played(workers: int | None) -> list[dict[str, Any]]:
    """The job with its seeds, as `fedbcd run` plays it: a row for each method."""
    table = default_table()
    jobs = [
        job.changed(seed=job.spec.seed + k) for job in parse(table) for k in range(seeds_in(table))
    ]
    fitting = workers or workers_that_fit(jobs[0].make_federation())
    found = comparison_of(run_jobs(jobs, Path("runs/default-job"), fitting), None)
    rows = found.rows(*SCORES, *NEW)
    for row in rows:
        row["clock_to_common"] = found.reached()[row["title"]]["clock"]
        row["common"] = found.common()
    return [
        {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]


def main() -> None:
    """Compute what is missing, and say which settings are best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=[*GRID, JOB])
    parser.add_argument("--workers", type=int)
    asked = parser.parse_args()
    chosen = [name for name in GRID if asked.only in (name, None)]
    known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if chosen:
        known |= settings_of(chosen, asked.workers)
    if asked.only in (JOB, None):
        known[JOB] = played(asked.workers)
    asked.out.write_text(json.dumps(known, indent=1).replace("NaN", "null") + "\n")


def settings_of(chosen: list[str], workers: int | None) -> dict[str, Any]:
    """What was tried of these methods, the best first."""
    jobs = {
        (name, k, seed): parse(table_of(name, settings, seed))[0]
        for name in chosen
        for k, settings in enumerate(tried(name))
        for seed in VALIDATION
    }
    some = next(iter(jobs.values()))
    fitting = workers or workers_that_fit(some.make_federation())
    found = comparison_of(run_jobs([*jobs.values()], Path("runs/default-job"), fitting), ())
    known = {}
    for name in chosen:
        rows = [
            settings
            | {
                column: round(found.mean(f"{name} {in_a_word(settings)}", column), 4)
                for column in (SCORES[1], SCORES[0], SCORES[2])
            }
            for settings in tried(name)
        ]
        known[name] = sorted(rows, key=lambda row: -row["personal_accuracy"])
        print(name, known[name][0])
    return known


if __name__ == "__main__":
    main()
