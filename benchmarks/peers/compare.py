"""Ours and the peers on the same work in one sitting, one after another; ours first, last and
between peers, so that drift shows.

usage: python benchmarks/peers/compare.py [--workload round] [--peer fedjax] [--envs DIR] [--out
FILE] [--limit 900] Run it with the Python that has fedbcd; `setup.sh NAME` makes the environment of
a peer, and a peer without one is left out. Several ways to run a peer are tried, and the table
shows the fastest; the file has them all. A peer's factor is against ours just before and just after
it, because other work may share the machine: by medians, and by the best, which suffers least from
that.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from harness import environment

Row = dict[str, Any]
ALL = ("round", "epoch", "scale")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Variant:
    """One way to run a contestant: `python [before] script workload [after]`."""

    env: str
    script: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ALL
    at_most_s: float = math.inf

    def command(self, python: str, workload: str) -> list[str]:
        return [python, *self.before, str(HERE / self.script), workload, *self.after]


OURS = Variant("ours", "ours.py", ("--threads", "2"))
# two threads of torch wait for each other at every operation: on a shared machine that can take 20
# times as long
PEERS = [
    Variant("fedjax", "fedjax_peer.py", ("--threads", "1")),
    Variant("fedjax", "fedjax_peer.py", ("--threads", "2")),
    Variant("pfl", "pfl_peer.py"),
    Variant("pfl", "pfl_peer.py", ("--prox", "hand")),
    Variant("pfl", "pfl_peer.py", before=TORCHRUN),
    Variant("pfl", "pfl_peer.py", ("--prox", "hand"), TORCHRUN),
    Variant(
        "pfl",
        "pfl_peer.py",
        ("--prox", "hand", "--threads", "2"),
        workloads=("round",),
        at_most_s=60,
    ),
    Variant("fedlab", "fedlab_peer.py"),
    Variant("fedlab", "fedlab_peer.py", ("--threads", "2"), workloads=("round",), at_most_s=60),
    Variant("flower", "flower_peer.py", ("--actors", "2")),
    Variant("flower", "flower_peer.py", ("--actors", "1"), workloads=("round", "epoch")),
]
ASPECTS = ("personal models", "several servers", "mini-batch draws", "momentum", "server optimiser")
COMPUTES = {
    "fedbcd": (
        "yes; FedProx here keeps none",
        "yes, ten here, with their protocol",
        "exact: a function of (seed, device, session, step)",
        "ASPG, and the projection",
        "a step of chosen length",
    ),
    "FedJAX": (
        "APFL and others, not FedBCD",
        "no",
        "a seed per dataset",
        "any of optax",
        "any of optax",
    ),
    "pfl-research": (
        "Reptile, not FedBCD",
        "no",
        "a seed per user",
        "any torch optimizer",
        "any torch optimizer",
    ),
    "FedLab": (
        "Ditto, not FedBCD",
        "relays in its networked mode, not here",
        "torch's global state",
        "by subclassing",
        "no",
    ),
    "Flower": (
        "by hand, in the client's state",
        "no",
        "up to the client's code",
        "up to the client's code",
        "FedAdam and others",
    ),
}


def run(variant: Variant, python: str, workload: str, limit: float) -> Row | None:
    """The line that a contestant printed, or None with the reason on stderr."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    if variant is OURS:
        env["PYTHONPATH"] = str(HERE.parent.parent / "src")
    command, limit = variant.command(python, workload), min(limit, variant.at_most_s)
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[1:])}: stopped after {limit:g} s", file=sys.stderr)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if not lines:
        print(f"{' '.join(command[1:])}: no result; {done.stderr[-800:]}", file=sys.stderr)
        return None
    row: Row = json.loads(lines[-1])
    print(
        f"{workload:6} {row['peer']:13} {row['variant']:52} {row['ms_per_round']}  load"
        f" {row['load_average']}",
        file=sys.stderr,
        flush=True,
    )
    return row


def sitting(workload: str, pythons: dict[str, str], limit: float) -> list[Row]:
    """Ours, the first peer in all its variants, ours, the second, ... ours."""
    rows = [run(OURS, pythons["ours"], workload, limit)]
    for env in dict.fromkeys(variant.env for variant in PEERS if variant.env in pythons):
        variants = [
            variant for variant in PEERS if variant.env == env and workload in variant.workloads
        ]
        rows += [
            run(variant, pythons[variant.env], workload, limit) for variant in [*variants, OURS]
        ]
    return [row for row in rows if row is not None]


def neighbours(rows: list[Row], peer: str) -> list[dict[str, float]]:
    """Our times just before and just after a peer."""
    places = [k for k, row in enumerate(rows) if row["peer"] == peer]
    before = [row for row in rows[: places[0]] if row["peer"] == "fedbcd"][-1:]
    after = [row for row in rows[places[-1] :] if row["peer"] == "fedbcd"][:1]
    return [row["ms_per_round"] for row in before + after]


def summary(rows: list[Row]) -> list[Row]:
    """Per workload and contestant, the fastest variant, and how many times as long it takes as ours
    beside it.
    """
    out = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        here = [row for row in rows if row["workload"] == workload]
        ours = [row["ms_per_round"] for row in here if row["peer"] == "fedbcd"]
        for peer in dict.fromkeys(row["peer"] for row in here):
            best = min(
                (row for row in here if row["peer"] == peer),
                key=lambda row: row["ms_per_round"]["median"],
            )
            shown = {
                "workload": workload,
                "peer": peer,
                "version": best["version"],
                "variant": best["variant"],
                **best["ms_per_round"],
            }
            if peer == "fedbcd":
                medians = [ms["median"] for ms in ours]
                shown |= {"median": statistics.median(medians), "medians_in_turn": medians}
                shown |= {
                    "best": min(ms["best"] for ms in ours),
                    "worst": max(ms["worst"] for ms in ours),
                }
            else:
                beside = neighbours(here, peer)
                median, fastest = (
                    statistics.mean(ms["median"] for ms in beside),
                    min(ms["best"] for ms in beside),
                )
                quickest = min(row["ms_per_round"]["best"] for row in here if row["peer"] == peer)
                shown |= {
                    "ours_beside_it": round(median, 2),
                    "times_ours": round(best["ms_per_round"]["median"] / median, 2),
                }
                shown |= {"times_ours_by_best": round(quickest / fastest, 2)}
            out.append(shown | {"peak_mib": best["peak_mib"]})
    return out


def table(rows: list[Row]) -> str:
    """The summary, and what each contestant does and does not compute, as Markdown."""
    head = (
        "| workload | | ms per round: median (best-worst) | ours beside it | peer / ours | by the"
        " best | peak MiB | run as |"
    )
    lines = [head, "|---" * 8 + "|"]
    for row in summary(rows):
        ms = f"{row['median']:.0f} ({row['best']:.0f}-{row['worst']:.0f})"
        beside = " | ".join(
            str(row.get(key, "")) for key in ("ours_beside_it", "times_ours", "times_ours_by_best")
        )
        lines.append(
            f"| {row['workload']} | {row['peer']} {row['version']} | {ms} | {beside} |"
            f" {row['peak_mib']} | {row['variant']} |"
        )
    lines += ["", f"| | {' | '.join(ASPECTS)} |", "|---" * (len(ASPECTS) + 1) + "|"]
    seen = {row["peer"] for row in rows}
    return "\n".join(
        lines
        + [f"| {peer} | {' | '.join(what)} |" for peer, what in COMPUTES.items() if peer in seen]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=ALL)
    parser.add_argument(
        "--peer", action="append", choices=sorted({variant.env for variant in PEERS})
    )
    parser.add_argument("--envs", type=Path, default=HERE / ".envs")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "peers.json")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for one run of one contestant"
    )
    chosen = parser.parse_args()
    wanted = chosen.peer or sorted({variant.env for variant in PEERS})
    found = {name: str((chosen.envs / name / "bin" / "python").absolute()) for name in wanted}
    for name in [name for name, python in found.items() if not Path(python).exists()]:
        print(
            f"no environment for {name}; make one with benchmarks/peers/setup.sh {name}",
            file=sys.stderr,
        )
        del found[name]
    machine = environment() | {
        "system": platform.platform(terse=True),
        "load_averages": os.getloadavg(),
    }
    rows: list[Row] = []
    for workload in chosen.workload or ALL:
        rows += sitting(workload, {"ours": sys.executable, **found}, chosen.limit)
        result = {
            "benchmark": "peers",
            **machine,
            "load_averages_after": os.getloadavg(),
            "summary": summary(rows),
            "rows": rows,
        }
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
