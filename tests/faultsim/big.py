"""A real deployment with TLS whose model is large: `python -m faultsim.big --megabytes 1000
--rounds 2`.

Prints seconds and bytes, the most memory that each process ever had as a multiple of the model
(which the parent of all holds and shares with them), and whether the log replays to the models on
disk.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedbcd as fb
from fedbcd.engines.deploy.local.finish import merge_stores
from fedbcd.engines.deploy.local.up import Up, free_ports, make_certificates, make_stores
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.replay import replay
from fedbcd.spec import RunSpec

WIDTH = 8
PATIENCE_S = 1800.0


def model(values: int) -> nn.Module:
    """Two linear layers with so many weights, about."""
    hidden = values // (WIDTH + 1)
    return nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, 1, bias=False))


def federation(values: int, servers: int, devices: int) -> fb.Federation:
    """Devices with two samples each."""
    chance = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(2, WIDTH, generator=chance), torch.randn(2, 1, generator=chance))
        for _ in range(servers * devices)
    ]
    return fb.Federation(partial(model, values), nn.functional.mse_loss, data, servers)


def most_memory(pid: int) -> int:
    """The most that a process ever had resident, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def play(
    folder: Path, megabytes: int, servers: int, devices: int, active: int, rounds: int, check: bool
) -> dict[str, Any]:
    """To the last round."""
    whole = federation(megabytes * 250_000, servers, devices)
    ports = free_ports(servers + 1)
    options = Deploy(
        folder=str(folder / "state"),
        certificates=str(folder / "certs"),
        coordinator=f"127.0.0.1:{ports[0]}",
        servers=tuple(f"127.0.0.1:{port}" for port in ports[1:]),
        epoch=time.time(),
    )
    spec = RunSpec(
        fb.FedBCD(device_step=0.001, batch=2, steps=(1, 1)),
        fb.SyncCloud(),
        active=active,
        max_batch=1,
    )
    plan = Deployment.of(whole, spec, options, rounds)
    make_certificates(folder / "certs", plan.blueprint)
    make_stores(options, plan.blueprint)
    size = plan.blueprint.start.nbytes
    up = Up(plan, folder)
    began = time.monotonic()
    up.start()
    try:
        for view in up.watch(lambda: time.monotonic() > began + PATIENCE_S):
            assert not view.crashed, [(child.actor, child.code) for child in view.crashed]
        assert view.finished, f"not finished after {PATIENCE_S:.0f} s: {view}"
        took = time.monotonic() - began
        memory = {
            actor: round(most_memory(child.pid or 0) / size, 2)
            for actor, child in up.supervisor.children.items()
        }
        facts = up.facts()
    finally:
        up.stop()
    found = {
        "model_bytes": size,
        "rounds": rounds,
        "seconds": round(took, 1),
        "most_memory_in_models": memory,
    }
    if check:
        end = merge_stores(folder, whole, spec, options, {})
        found["replayed"] = (
            replay(folder / "events.jsonl", whole, exact=True)["digest"] == end["digest"]
        )
    return {**found, "restarts": facts["restarts"], "bytes_over_least": facts["bytes_over_least"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one object."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.big", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2, help="of each server")
    parser.add_argument("--active", type=int, default=2, help="devices that train in a phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-replay", action="store_true")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as path:
        active = min(asked.active, asked.devices)
        found = play(
            Path(path),
            asked.megabytes,
            asked.servers,
            asked.devices,
            active,
            asked.rounds,
            not asked.no_replay,
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
