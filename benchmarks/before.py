"""Rounds with the wheel of version 0.1.0 (tests/golden) and with the tree, in turn on one machine:
how much more processor time the tree takes. One thread; the least of several pieces of a run, since
what else the machine does only ever adds to it.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PIECES, REPEATS = 5, 3
# name: algorithm, cloud, widths of the model, devices, rounds of a piece, compiled code or not
CASES: dict[str, tuple[str, str, tuple[int, ...], int, int, str]] = {
    "FedBCD, compiled": ("FedBCD", "sync", (784, 64, 32, 10), 100, 4, "1"),
    "FedBCD-I, compiled": ("FedBCDI", "sync", (784, 64, 32, 10), 100, 4, "1"),
    "FedAvg, compiled": ("FedAvg", "sync", (784, 64, 32, 10), 100, 4, "1"),
    "FedBCD on Async-cloud, compiled": ("FedBCD", "async", (784, 64, 32, 10), 100, 8, "1"),
    "FedBCD, torch's operations": ("FedBCD", "sync", (784, 64, 32, 10), 100, 2, "0"),
    "FedBCD, tiny models": ("FedBCD", "sync", (4, 2), 1000, 10, "1"),
}


def network(widths: tuple[int, ...]) -> torch.nn.Module:
    """A chain of linear layers."""
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def work(name: str) -> None:
    """Print the processor time of a round, by the fedbcd of this process."""
    import fedbcd as fb

    method, cloud, widths, devices, rounds, _ = CASES[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [(torch.randn(60, widths[0]), torch.randint(widths[-1], (60,))) for _ in range(devices)]
    loss = torch.nn.functional.cross_entropy
    federation = fb.Federation(lambda: network(widths), loss, data, 10)
    kind: Any = getattr(fb, method)
    wanted = {"offline_time": "free", "momentum_after_contact": "pull"}  # as in 0.1.0
    known = {field.name for field in dataclasses.fields(kind)}
    settings = {key: value for key, value in wanted.items() if key in known}
    algorithm = kind(projection=fb.NoProjection(), batch=32, steps=(1, 5), **settings)
    clouds = {"sync": fb.SyncCloud(), "async": fb.AsyncCloud(first=3)}
    seen: list[float] = []
    fb.train(
        federation,
        algorithm,
        cloud=clouds[cloud],
        active=3,
        rounds=rounds * (PIECES + 1),
        evaluate_every=10**6,
        certify_every=0,
        on_round=lambda _: seen.append(time.process_time()),
    )
    marks = seen[rounds - 1 :: rounds]  # the first piece warms up
    pieces = [after - before for before, after in pairwise(marks)]
    print(json.dumps(min(pieces) / rounds))


def measured(name: str, source: Path) -> float:
    """Processor time of a round with the fedbcd in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    environment["FEDBCD_FUSED"] = CASES[name][-1]
    command = [sys.executable, __file__, "--work", name]
    return float(json.loads(subprocess.check_output(command, env=environment, text=True)))


def main() -> None:
    """Compare, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from harness import environment

    from golden.wheel import unpack

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sources = {"before": unpack(Path(folder)), "now": ROOT / "src"}
        for name in CASES:
            if options.only not in name:
                continue
            turns = [{k: measured(name, s) for k, s in sources.items()} for _ in range(REPEATS)]
            least = {key: min(turn[key] for turn in turns) for key in sources}
            ratio = least["now"] / least["before"]
            rows.append({"case": name, "ratio": ratio, **least})
            times = "".join(f"{1e3 * seconds:9.2f} ms" for seconds in least.values())
            print(f"{name:34}{times}{ratio:7.2f}", flush=True)
    if options.out is not None:
        record = {"benchmark": "before", **environment(), "unit": "seconds of CPU per round"}
        options.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
