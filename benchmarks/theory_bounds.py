"""Theorem 1 beside what happens: certificates of FedBCD on problems with known constants, rigorous
Async-cloud, eta_z = d/sqrt(T).

    python benchmarks/theory_bounds.py --out docs/images/theory-bounds.png --table
    benchmarks/results/theory_bounds.json

For each T a run of its own; a point is the mean over rounds 0..T-1, the largest over devices or
servers, averaged over seeds (of mini-batches).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedbcd.theory.bounds import certificate_bounds, trivial_bounds
from support.known_problems import KNOWN, trace

CERTIFICATES = ("gap", "pull", "spread")
THEOREM = {"gap": 0.25, "pull": 0.5, "spread": 0.5}


def measure(name: str, exact: bool, horizons: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """One row per T: measured means, the bounds with this schedule's memory and with the lemma's
    theta and beta, the trivial bound.
    """
    known, rows = KNOWN[name](), []
    for rounds in horizons:
        found: list[dict[str, Any]] = []
        for seed in range(1 if exact else seeds):
            batch = None if exact else rounds
            run = trace(known, rounds, batch, seed=seed)
            lemma, memory = run.mixing()
            means = [float(values[-1]) for values in run.running_means()]
            tight = known.problem(run.server_step, batch, memory, run.period)
            loose = known.problem(run.server_step, batch, lemma, run.period)
            found.append(
                {
                    "measured": dict(zip(CERTIFICATES, means, strict=True)),
                    "schedule": vars(certificate_bounds(tight, rounds)),
                    "lemma": vars(certificate_bounds(loose, rounds)),
                    "trivial": vars(trivial_bounds(tight)),
                    "p": run.period,
                    "q": run.connection,
                    "memory": fmean(memory.memory),
                }
            )
        kinds = ("measured", "schedule", "lemma", "trivial")
        row: dict[str, Any] = {
            kind: {c: fmean(f[kind][c] for f in found) for c in CERTIFICATES} for kind in kinds
        }
        rows.append(
            {
                "rounds": rounds,
                **row,
                **{key: fmean(f[key] for f in found) for key in ("p", "q", "memory")},
            }
        )
        print(name, "exact" if exact else "R = T", rows[-1], flush=True)
    return rows


def rate(rows: Sequence[dict[str, Any]], certificate: str) -> float:
    """The exponent of T that fits best, on a log-log scale."""
    x = [math.log(row["rounds"]) for row in rows]
    y = [math.log(row["measured"][certificate]) for row in rows]
    mx, my = fmean(x), fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(results), 3, figsize=(11, 2.6 * len(results)), sharex=True, layout="constrained"
    )
    for line, (title, rows) in zip(grid, results.items(), strict=True):
        rounds = [row["rounds"] for row in rows]
        for axes, certificate in zip(line, CERTIFICATES, strict=True):
            for kind, style in (
                ("lemma", "k:"),
                ("trivial", "k--"),
                ("schedule", "C1s-"),
                ("measured", "C0o-"),
            ):
                axes.loglog(
                    rounds, [row[kind][certificate] for row in rows], style, ms=4, label=kind
                )
            axes.set_title(
                f"{title}: {certificate}, rate {-rate(rows, certificate):.2f} (theorem"
                f" {THEOREM[certificate]})",
                fontsize=8,
            )
            axes.tick_params(labelsize=7)
    grid[0][0].legend(fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("T, rounds", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images/theory-bounds.png"))
    parser.add_argument("--table", type=Path, default=Path("benchmarks/results/theory_bounds.json"))
    parser.add_argument("--rounds", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    results = {
        f"{name}, {'exact' if exact else 'R = T'}": measure(
            name, exact, chosen.rounds, chosen.seeds
        )
        for name in KNOWN
        for exact in (True, False)
    }
    draw(results, chosen.out)
    rates = {
        title: {c: round(-rate(rows, c), 3) for c in CERTIFICATES}
        for title, rows in results.items()
    }
    chosen.table.parent.mkdir(parents=True, exist_ok=True)
    chosen.table.write_text(json.dumps({"rates": rates, "runs": results}, indent=1) + "\n")
    print(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
