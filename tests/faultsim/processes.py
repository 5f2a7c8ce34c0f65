"""Deployments in processes, forked from this one, which has loaded everything and has one
thread.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbcd.engines.deploy.local.finish import merge_stores
from fedbcd.engines.deploy.local.up import Up, free_ports, make_certificates, make_stores
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.base import run_process
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.replay import replay
from fedbcd.experiments.deployed import deployment_of, one_job
from fedbcd.protocol.messages import Actor

PATIENCE_S = 600.0
Before = Callable[[Actor], None]


def tables(servers: int, devices: int, active: int, cloud: Mapping[str, Any]) -> dict[str, Any]:
    """A small job."""
    return {
        "data": {"name": "digits", "samples": 12},
        "federation": {"servers": servers, "devices": devices, "active": active},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "fedbcd", "device_step": 0.02, "steps": [1, 3]},
        "cloud": dict(cloud),
        "run": {"rounds": 1000},
    }


class Here:
    """A job on this machine, to be deployed any number of times."""

    def __init__(self, table: dict[str, Any], plain: bool) -> None:
        self.job = one_job(table)
        self.plain = plain
        self._options: dict[Path, Deploy] = {}

    def options(self, folder: Path) -> Deploy:
        """Ports and timeouts of the deployment in a folder: quick to lose patience."""
        if folder not in self._options:
            ports = free_ports(self.job.federation.servers + 1)
            self._options[folder] = Deploy(
                folder=str(folder / "state"),
                certificates=None if self.plain else str(folder / "certs"),
                plain=self.plain,
                coordinator=f"127.0.0.1:{ports[0]}",
                servers=tuple(f"127.0.0.1:{port}" for port in ports[1:]),
                retry_s=(0.3, 3.0),
                lost_s=(2.0, 20.0),
                peer_s=(2.0, 5.0),
                epoch=time.time(),
            )
        return self._options[folder]

    def set_options(self, folder: Path, **changes: Any) -> None:
        """Change them, before the deployment starts."""
        self._options[folder] = replace(self.options(folder), **changes)

    @cached_property
    def federation(self) -> Any:
        """All data."""
        return self.job.make_federation()

    def deployment(self, folder: Path, rounds: int | None) -> Deployment:
        """What `fedbcd up` would start."""
        return deployment_of(self.job, self.options(folder), rounds)

    def replays(self, folder: Path) -> bool:
        """Merge the logs and replay them: raises where they disagree with the models on disk."""
        end = merge_stores(
            folder, self.federation, self.job.spec, self.options(folder), self.job.to_table()
        )
        return bool(
            replay(folder / "events.jsonl", self.federation, exact=True)["digest"] == end["digest"]
        )


class Hurt(Up):
    """`Up` whose children do something first."""

    def __init__(
        self, deployment: Deployment, out: Path, before: Before, binds: Mapping[Actor, str]
    ) -> None:
        super().__init__(deployment, out)
        self._before = before
        self._binds = binds  # where actors listen whose peers dial something else

    def _play(self, actor: Actor) -> int:
        self._before(actor)
        options = replace(self._deployment.options, listen=self._binds.get(actor, ""))
        return int(run_process(lambda: replace(self._deployment, options=options).process(actor)))


def start(
    here: Here,
    folder: Path,
    rounds: int | None,
    before: Before,
    binds: Mapping[Actor, str] | None = None,
) -> Hurt:
    """Fork everybody."""
    folder.mkdir(parents=True, exist_ok=True)
    deployment = here.deployment(folder, rounds)
    if not here.plain:
        make_certificates(folder / "certs", deployment.blueprint)
    make_stores(deployment.options, deployment.blueprint)
    hurt = Hurt(deployment, folder, before, binds or {})
    hurt.start()
    return hurt


def play_to_the_end(here: Here, folder: Path, rounds: int, before: Before) -> tuple[int, bool]:
    """Until the last round; how often a process had to be started again, and whether the log
    replays to the models on disk.
    """
    hurt = start(here, folder, rounds, before)
    deadline = time.monotonic() + PATIENCE_S
    try:
        for view in hurt.watch(lambda: time.monotonic() > deadline):
            assert not view.crashed, view.crashed
        assert view.finished, f"not finished after {PATIENCE_S} s: {view}"
    finally:
        hurt.stop()
    return hurt.supervisor.restarts, here.replays(folder)
