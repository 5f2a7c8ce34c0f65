"""Sync-cloud and B = 3, 5, 7 where there is a slowest: by how much fewer servers are faster, and
what that costs the slow ones' own models.

    python benchmarks/slow.py --data DIR --out benchmarks/results/slow.json
    python benchmarks/slow.py --draw benchmarks/results/slow.json docs/images/slow.png

DIR has the four MNIST files; without it the digits of scikit-learn are used. FedBCD as in the
paper's Figure 4 (a): ten servers of ten devices, three active, three labels each. Three worlds:
all alike; two servers whose devices take five times as long for a step; a fifth of all devices that
do.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from harness import environment

import fedbcd as fb
from fedbcd.data.federation import Federation
from fedbcd.engines.participation import planned_participation
from fedbcd.experiments.job import Federations, parse

FACTOR = 5.0
WORLDS: dict[str, tuple[fb.DeviceClass, ...]] = {
    "all alike": (),
    "two slow servers": (fb.DeviceClass(servers=(8, 9), step=FACTOR),),
    "a fifth of the devices slow": (fb.DeviceClass(share=0.2, step=FACTOR),),
}
CLOUDS: dict[str, Any] = {
    "Sync": {"name": "sync"},
    "B = 7": {"name": "async", "first": 7},
    "B = 5": {"name": "async", "first": 5},
    "B = 3": {"name": "async", "first": 3},
}
DATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mnist": ({"name": "mnist", "diversity": 3, "samples": 600}, {"hidden": [128, 64]}),
    "digits": ({"name": "digits", "diversity": 3, "samples": 60}, {"hidden": [64, 32]}),
}
BOX = {"name": "box", "low": -2, "high": 2}


def one(
    made: Federations, data: dict[str, Any], model: dict[str, Any], until: float, **run: Any
) -> dict[str, Any]:
    """One run: its curve, and how the slow and the others fared."""
    (job,) = parse(
        {
            "data": data,
            "model": {"name": "mlp", **model},
            "algorithm": {"name": "fedbcd", "projection": BOX},
            "cloud": CLOUDS[run["cloud"]],
            "run": {"until_clock": until, "seed": run["seed"], "looks": 12, "certify_every": 0},
        }
    )
    job = job.changed(clock=fb.Clock(classes=WORLDS[run["world"]]))
    federation = made.of(job)
    began = time.process_time()
    found = job.run(federation=federation)
    seconds = time.process_time() - began
    seen = planned_participation(job.spec, federation, None, until, most=1_000_000)
    slow = slow_ones(job.spec, federation)
    personal = np.array([found.personal_scores[i] for i in range(federation.devices)])
    uploads = np.array([len(seen.active[i]) for i in range(federation.devices)])
    mixed = Counter(n for mix in seen.mixes for n in mix)
    last = found.history.last
    return run | {
        "rounds": last.round,
        "clock": found.history.column("clock"),
        "global": found.history.column("global_accuracy"),
        "personal": last.personal_accuracy,
        "personal_slow": float(personal[slow].mean()),
        "personal_others": float(personal[~slow].mean()),
        "uploads_slow": float(uploads[slow].mean()),
        "uploads_others": float(uploads[~slow].mean()),
        "mixes_of_server": [mixed[n] for n in range(len(federation.servers))],
        "cpu_seconds": round(seconds, 2),
    }


def slow_ones(spec: fb.RunSpec, federation: Federation) -> np.ndarray:
    """Which devices are; where all are alike, those of servers 8 and 9, to compare with."""
    times = spec.times(federation)
    if times.alike:
        return np.isin(
            np.arange(federation.devices), [*federation.servers[8], *federation.servers[9]]
        )
    return np.array([bool(times.why_slow(i)) for i in range(federation.devices)])


def reached(run: dict[str, Any], level: float) -> float:
    """When global accuracy first was so high, between two looks along a line."""
    clock, accuracy = np.array(run["clock"]), np.maximum.accumulate(run["global"])
    place = int(np.searchsorted(accuracy, level))
    if place == 0 or place == len(clock):
        return float("nan") if place else float(clock[0])
    return float(np.interp(level, accuracy[place - 1 : place + 1], clock[place - 1 : place + 1]))


def rows(runs: Sequence[dict[str, Any]], until: float, level: float) -> list[dict[str, Any]]:
    """One per world and cloud: means over seeds, with the spread of some."""
    table = []
    for world in WORLDS:
        for cloud in CLOUDS:
            mine = [r for r in runs if (r["world"], r["cloud"]) == (world, cloud)]
            at_end = [float(np.interp(until, r["clock"], r["global"])) for r in mine]
            row: dict[str, Any] = {"world": world, "cloud": cloud}
            row |= {"rounds": fmean(r["rounds"] for r in mine)}
            row |= {"global": fmean(at_end), "global_sd": stdev(at_end)}
            row |= {"reached": float(np.mean([reached(r, level) for r in mine]))}
            for key in ("personal_slow", "personal_others", "uploads_slow", "uploads_others"):
                row[key] = fmean(r[key] for r in mine)
            row["personal_slow_sd"] = stdev(r["personal_slow"] for r in mine)
            table.append(row)
    return table


def draw(found: dict[str, Any], path: Path) -> None:
    """Above: global accuracy against the clock; below: personal accuracy at its end."""
    from matplotlib.figure import Figure

    figure = Figure((12.6, 6.6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    colours = dict(zip(CLOUDS, ("#444444", "#1f77b4", "#2ca02c", "#d62728"), strict=True))
    for (above, below), world in zip(axes.T, WORLDS, strict=True):
        for place, (cloud, colour) in enumerate(colours.items()):
            mine = [r for r in found["runs"] if (r["world"], r["cloud"]) == (world, cloud)]
            grid = np.linspace(0, found["until"], 60)
            curve = [np.interp(grid, r["clock"], r["global"]) for r in mine]
            above.plot(grid, np.mean(curve, axis=0), color=colour, label=cloud, linewidth=2)
            for offset, key, shade in ((-0.2, "personal_others", 0.45), (0.2, "personal_slow", 1)):
                values = [r[key] for r in mine]
                spread = stdev(values)
                below.bar(
                    place + offset, fmean(values), 0.38, yerr=spread, color=colour, alpha=shade
                )
        above.set(title=world, xlabel="clock")
        below.set_xticks(range(len(CLOUDS)), CLOUDS)
        below.set_ylim(0.5, 1)
    axes[0, 0].set_ylabel("global accuracy")
    axes[0, 0].legend(frameon=False)
    axes[1, 0].set_ylabel("personal accuracy at the end\npale: the others; full: the slow ones")
    figure.savefig(path, dpi=110)


def show(table: Sequence[dict[str, Any]], level: float) -> None:
    print(f"{'':36}rounds  global (sd)    at {level:g}   personal: slow, others   uploads")
    for row in table:
        print(
            f"{row['world']:28}{row['cloud']:6}{row['rounds']:8.0f}"
            f"   {row['global']:.3f} ({row['global_sd']:.3f}){row['reached']:9.0f}"
            f"        {row['personal_slow']:.3f}  {row['personal_others']:.3f}"
            f"           {row['uploads_slow']:6.1f}  {row['uploads_others']:6.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder of the MNIST files; without it: digits")
    parser.add_argument("--until", type=float, default=800.0, help="clock time")
    parser.add_argument("--level", type=float, default=0.3, help="global accuracy to be reached")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "PNG"))
    given = parser.parse_args()
    if given.draw:
        found = json.loads(given.draw[0].read_text())
        draw(found, given.draw[1])
        show(rows(found["runs"], found["until"], given.level), given.level)
        return
    name = "mnist" if given.data else "digits"
    data, model = DATA[name]
    if given.data:
        data = data | {"folder": given.data}
    before, made, runs = environment(), Federations(), []
    for seed in range(given.seeds):
        for world in WORLDS:
            for cloud in CLOUDS:
                runs.append(
                    one(made, data, model, given.until, world=world, cloud=cloud, seed=seed)
                )
                print(f"seed {seed}, {world}, {cloud}: {runs[-1]['cpu_seconds']} s", flush=True)
    show(rows(runs, given.until, given.level), given.level)
    if given.out:
        found = {
            "environment": before,
            "data": name,
            "factor": FACTOR,
            "until": given.until,
            "runs": runs,
        }
        given.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
