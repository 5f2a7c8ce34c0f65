"""What the disks of a coordinator, servers and devices hold after so many rounds: `python -m
faultsim.growth --rounds 10000`.

Real roles and real stores, in one process, without links; models are so small that training costs
nothing. Prints one line every tenth of the way.
"""

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbcd as fb
from fedbcd.protocol.messages import Actor, Woke
from fedbcd.spec import RunSpec
from support.deployments import Town

KIB = 1024


def town(folder: Path, servers: int, devices: int) -> Town:
    """Devices with one sample each, all of them active."""
    data = [(torch.zeros(1, 1), torch.zeros(1, 1)) for _ in range(servers * devices)]
    federation = fb.Federation(
        lambda: nn.Linear(1, 1), nn.functional.mse_loss, data, servers=servers
    )
    algorithm = fb.FedBCD(device_step=0.01, steps=(1, 1), batch=1)
    return Town(
        folder, RunSpec(algorithm, fb.AsyncCloud(first=servers), active=devices), federation
    )


def played(there: Town, rounds: int, every: int) -> Iterator[dict[str, Any]]:
    """A line every so many rounds."""
    there.start()
    there.drain()
    began, devices = time.monotonic(), [a for a in there.actors if a.startswith("device/")]
    for goal in range(every, rounds + 1, every):
        while there.rounds < goal:
            for actor in devices:
                there.tell(actor, Woke())
                there.drain()
                there.work(actor)
                there.drain()
        sizes = {actor: size_of(there, actor) for actor in ("coordinator", "server/0", "device/0")}
        yield {"rounds": there.rounds, "seconds": round(time.monotonic() - began), **sizes}


def size_of(there: Town, actor: Actor) -> dict[str, float]:
    """Events; those of them that are rows; KiB of the archive, and of everything."""
    folder = there.folder / actor
    with sqlite3.connect(f"file:{folder / 'store.sqlite'}?mode=ro", uri=True) as database:
        (rows,) = database.execute("SELECT COUNT(*) FROM transition").fetchone()
        query = "SELECT COALESCE(SUM(LENGTH(packed)), 0) FROM archive"
        (packed,) = database.execute(query).fetchone()
    database.close()
    whole = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    events = there.roles[actor].store.length
    return {
        "events": events,
        "rows": rows,
        "archive_kib": round(packed / KIB, 1),
        "all_kib": round(whole / KIB),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="of each server")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        there = town(Path(folder), asked.servers, asked.devices)
        for line in played(there, asked.rounds, max(asked.rounds // 10, 1)):
            print(json.dumps(line), flush=True)
        print(json.dumps({"replayed": there.replayed()["digest"]}))


if __name__ == "__main__":
    main()
