"""The paper's experiment II for real: 10 servers and 100 devices as 111 processes on this machine,
Sync and Async B = 3, 5, 7.

run: python benchmarks/experiment2.py --data DIR --out docs/results/deployed [--time-scale 0.25]
[--clock 800] Each cloud is one `fedbcd up`; the figure shows accuracy against the wall clock,
results.json holds everything that was measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import environment

from fedbcd.config import dump_toml
from fedbcd.experiments.deployed import one_job
from fedbcd.planner.round_time import rounds_of
from fedbcd.planner.server_time import device_model
from fedbcd.record.history import History

CLOUDS = {
    "Sync": {"name": "sync"},
    **{f"Async B={b}": {"name": "async", "first": b} for b in (7, 5, 3)},
}
SERVERS, DEVICES = 10, 100


def table_of(options: argparse.Namespace, cloud: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": {
            "name": "mnist",
            "folder": str(options.data),
            "diversity": options.diversity,
            "samples": 600,
        },
        "federation": {"servers": SERVERS, "devices": DEVICES // SERVERS, "active": 3},
        "model": {"name": "mlp", "hidden": [128, 64]},
        "algorithm": {
            "name": options.algorithm,
            "projection": {"name": "box", "low": -2, "high": 2},
        },
        "cloud": cloud,
        "run": {"until_clock": options.clock, "measure": "pooled-labels"},
    }


def deploy(
    title: str, table: dict[str, Any], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One deployment, and the planner's prediction for it."""
    folder.mkdir(parents=True)
    job, out = folder / "job.toml", folder / "run"
    job.write_text(dump_toml(table))
    command = [
        sys.executable,
        "-c",
        "from fedbcd.cli import main; main()",
        "up",
        str(job),
        "--json",
    ]
    command += ["--time-scale", str(options.time_scale), "--out", str(out)]
    print(title, flush=True)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    summary.pop("out")
    history = History.read_csv(out / "history.csv")
    planned = predicted(table, options.time_scale)
    found = summary["deployment"]
    print(
        f"  {summary['rounds']} rounds of {found['round_s']:.3f} s, planned {planned:.3f} s;"
        f" overhead {found['round_overhead_s']:.3f} s"
    )
    columns = ("round", "clock", "activations", "global_accuracy", "personal_accuracy")
    return {
        "summary": summary,
        "planned_round_s": planned,
        "history": {name: history.column(name) for name in columns},
    }


def predicted(table: dict[str, Any], scale: float) -> float:
    """The planner's mean time between two mixes, in seconds."""
    job = one_job(table)
    return (
        scale
        * rounds_of(
            job.spec.cloud.name,
            device_model(job),
            SERVERS,
            getattr(job.spec.cloud, "first", SERVERS),
        ).mean
    )


def draw(results: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), sharey=True, layout="constrained"
    )
    for axes, column, name in (
        (left, "global_accuracy", "Global models"),
        (right, "personal_accuracy", "Personal models, each on its own labels"),
    ):
        for (label, found), colour in zip(
            results.items(), ("#7f7f7f", "#2e8b57", "#1f5fa8", "#d1495b"), strict=False
        ):
            axes.plot(
                found["history"]["clock"], found["history"][column], label=label, color=colour
            )
        axes.set_title(name)
        axes.set_xlabel("seconds of the wall clock")
        axes.grid(alpha=0.3)
    left.set_ylabel("test accuracy")
    right.legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="where the files of MNIST are")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--time-scale", type=float, default=0.25, help="seconds per unit of the clock model"
    )
    parser.add_argument(
        "--clock", type=float, default=800.0, help="units of the clock model to run for"
    )
    parser.add_argument("--algorithm", default="fedbcd")
    parser.add_argument("--diversity", type=int, default=6)
    parser.add_argument("--clouds", nargs="*", default=list(CLOUDS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.algorithm}.json"
    settings = {
        key: value for key, value in vars(options).items() if key not in ("data", "out", "clouds")
    }
    machine = environment()
    results = _earlier(path, settings)
    for title in options.clouds:
        with tempfile.TemporaryDirectory() as name:
            load = os.getloadavg()[0]
            results[title] = deploy(
                title, table_of(options, CLOUDS[title]), options, Path(name) / "deployment"
            )
            results[title]["load_before"], results[title]["load_after"] = load, os.getloadavg()[0]
        ordered = {key: results[key] for key in CLOUDS if key in results}
        path.write_text(
            json.dumps({"settings": settings, "machine": machine, "runs": ordered}, indent=1) + "\n"
        )
        sign = (
            f"{options.algorithm}, MNIST, diversity {options.diversity}: 111 processes, 1 unit ="
            f" {options.time_scale:g} s"
        )
        draw(ordered, path.with_suffix(".png"), sign)


def _earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs with the same settings that are there already."""
    found = json.loads(path.read_text()) if path.exists() else {"settings": None}
    return dict(found["runs"]) if found["settings"] == settings else {}


if __name__ == "__main__":
    main()
