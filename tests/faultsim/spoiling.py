"""A real deployment with one device that uploads 1e30 time and again, and one that meets a loss
that is no number once.

The first is dismissed; once it is repaired it is admitted again, and starts from its server's
model. Prints what the roles said of it, and how large the models of all others are. `python -m
faultsim.spoiling`
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from faultsim.processes import PATIENCE_S, Here, start, tables
from faultsim.world import spoilt
from fedbcd.compute.batch import Trainer
from fedbcd.engines.deploy.links.operator_client import ask_change
from fedbcd.engines.deploy.links.tls import Plain
from fedbcd.engines.deploy.local.status_client import ask_health, ask_status
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.local_work import LocalWork, WorkDone
from fedbcd.errors import NumericalError
from fedbcd.protocol.messages import Actor
from fedbcd.record.eventlog import LogReader

FAR, SICK = 0, 3  # the two devices, one at each server; all are to be active in every phase


def be_bad(actor: Actor, repaired: Path) -> None:
    """In the process of the role, before it begins; the first is bad until there is a file
    `repaired`.
    """
    if actor == f"device/{FAR}":
        whole = LocalWork._computed

        def far(self: LocalWork, task: Any) -> WorkDone:
            done = whole(self, task)
            return done if repaired.exists() else spoilt(done, 1e30)

        LocalWork._computed = far  # type: ignore[method-assign]
    elif actor == f"device/{SICK}":
        run, left = Trainer.run, [1]

        def broken(self: Trainer, *arguments: Any) -> Any:
            if left:
                left.pop()
                raise NumericalError(
                    f"the loss of device {SICK} is nan in step 1 of 3 of its session 0; check its"
                    " data"
                )
            return run(self, *arguments)

        Trainer.run = broken  # type: ignore[method-assign]


def play(here: Here, folder: Path) -> dict[str, Any]:
    """Four rounds with both, then two without the first, then until it is back."""
    repaired, state, deadline = folder / "repaired", folder / "state", time.monotonic() + PATIENCE_S
    hurt = start(here, folder, None, lambda actor: be_bad(actor, repaired))

    def rounds() -> int:
        return int((ask_status(state / "coordinator") or {}).get("round", 0))

    def until(what: Callable[[], bool]) -> None:
        for view in hurt.watch(lambda: what() or time.monotonic() > deadline):
            assert not view.crashed, view.crashed
        assert what(), view

    def play_to(goal: int) -> None:
        until(lambda: rounds() >= goal)

    def change(what: str) -> bool:
        return asyncio.run(
            ask_change("server/0", here.options(folder).servers[0], Plain(), what, FAR)
        )

    def uploads() -> int:
        counted = (ask_health(state / "device-0", "/metrics") or b"").decode()
        return counted.count('fedbcd_letters_total{direction="in",event="Acknowledged"}')

    try:
        play_to(4)
        metrics = {
            actor: (ask_health(state / actor, "/metrics") or b"").decode()
            for actor in ("server-0", "device-0", "device-3")
        }
        status = {
            actor: ask_status(state / actor) for actor in ("device-0", "device-1", "device-3")
        }
        dismissed = change("dismiss")
        play_to(rounds() + 2)
        repaired.touch()
        assert change("admit")
        until(lambda: uploads() > 0)
    finally:
        hurt.stop()
    return {"metrics": metrics, "status": status, "dismissed": dismissed}


def largest(state: Path) -> dict[str, float]:
    """The largest value of every model that the roles hold."""
    found = {}
    for folder in sorted(path for path in state.iterdir() if path.name != "coordinator"):
        store = FileStore(folder, read_only=True)
        names = [name for name in store.names() if name == "x" or name.startswith("z/")]
        found[folder.name] = max(float(store.tensor(name).abs().max()) for name in names)
        store.close()
    return found


def main() -> int:
    """One run."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    table = tables(servers=2, devices=3, active=3, cloud={"name": "sync"})
    table["algorithm"]["projection"] = {"name": "none"}
    here = Here(table, plain=True)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        found = play(here, folder)
        replayed = here.replays(folder)
        events: Counter[str] = Counter()
        for step in LogReader(folder / "events.jsonl"):
            events[f"{step.actor} {type(step.event).__name__}"] += 1
        log = [
            json.loads(line)
            for line in (folder / "logs" / f"device-{FAR}.log").read_text().splitlines()
        ]
        said = [[line["what"], line.get("sentence", "")] for line in log]
        print(
            json.dumps(
                {
                    **found,
                    "replayed": replayed,
                    "events": events,
                    "said": said,
                    "largest": largest(folder / "state"),
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
