"""Make the stores and the log of this version for later ones: `python -m faultsim.fixtures
tests/faults/fixtures/v1`.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from faultsim.killing import once
from faultsim.processes import Here, tables

TABLE = tables(servers=2, devices=1, active=1, cloud={"name": "sync"})


def main(to: Path) -> None:
    """A deployment of three rounds: what its roles keep, their merged log, and its job."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    here = Here(TABLE, plain=True)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "run"
        found = once(here, folder)
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(
            folder / "state",
            to / "state",
            ignore=shutil.ignore_patterns("health.json", "*-wal", "*-shm"),
        )
        shutil.copy(folder / "events.jsonl", to / "events.jsonl")
    (to / "about.json").write_text(json.dumps({"job": TABLE, "z": found.digest}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
