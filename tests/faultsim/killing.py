"""Real processes, each killed once (SIGKILL) at a named step, and started again; what is left is
compared with an undisturbed run.

One device per server and Sync-cloud: whatever the timing, the models are the same, bit for bit.
`python -m faultsim.killing --all`.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from faultsim.processes import Here, play_to_the_end, tables
from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.processes.failpoints import Failpoint
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import COORDINATOR, Actor

ROUNDS = 3
ROLES = (COORDINATOR, "server/0", "device/0")
FEW = (
    (COORDINATOR, Failpoint.BEFORE_COMMIT),
    ("server/0", Failpoint.AFTER_COMMIT),
    ("device/0", Failpoint.AFTER_WRITE),
)


@dataclass(frozen=True)
class Killed:
    """One run."""

    role: str
    point: str
    digest: str
    replayed: bool
    restarts: int
    seconds: float


def once(
    here: Here, folder: Path, role: Actor = "", point: Failpoint | None = None, times: int = 2
) -> Killed:
    """A deployment from its start to its last round; `role` dies at the second time it comes to
    `point`.
    """

    def before(actor: Actor) -> None:
        marker = folder / "killed"
        if actor == role and point is not None and not marker.exists():
            failpoints.arm(point, times=times, action=lambda: _die(marker))

    began = time.monotonic()
    here.set_options(
        folder, lost_s=(600.0, 3600.0)
    )  # nobody is given up, however slow the machine is
    restarts, replayed = play_to_the_end(here, folder, ROUNDS, before)
    store = FileStore(here.options(folder).folder_of(COORDINATOR), read_only=True)
    model = store.tensor(f"z/{ROUNDS}")
    store.close()
    digest = hashlib.sha256(model.numpy().tobytes()).hexdigest()
    return Killed(
        role,
        "" if point is None else point.value,
        digest,
        replayed,
        restarts,
        round(time.monotonic() - began, 1),
    )


def _die(marker: Path) -> None:
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every run ends like the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.killing", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="every role at every step; otherwise one step per role"
    )
    chosen = (
        [(role, point) for role in ROLES for point in Failpoint]
        if parser.parse_args(arguments).all
        else [*FEW]
    )
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    here = Here(tables(servers=2, devices=1, active=1, cloud={"name": "sync"}), plain=True)
    bad = 0
    with tempfile.TemporaryDirectory() as path:
        calm = once(here, Path(path) / "calm")
        print(json.dumps(calm.__dict__), flush=True)
        for number, (role, point) in enumerate(chosen):
            found = once(here, Path(path) / str(number), role, point)
            good = found.digest == calm.digest and found.replayed and found.restarts == 1
            bad += not good
            print(json.dumps({**found.__dict__, "good": good}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
