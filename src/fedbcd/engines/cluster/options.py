"""How a run is spread over a cluster, and how the work is shared out."""

import importlib
from typing import Any

import numpy as np

from fedbcd.data.federation import Federation
from fedbcd.errors import ConfigError
from fedbcd.schedule.availability import at_server
from fedbcd.spec import Cluster, RunSpec


def chosen_cluster(engine: str | Cluster) -> Cluster | None:
    """The cluster that `train(engine=...)` asks for; None for the simulation in this process."""
    if isinstance(engine, Cluster):
        return engine
    if engine not in ("simulate", "cluster"):
        raise ConfigError(
            f"engine={engine!r} is unknown; known: 'simulate', 'cluster', or a Cluster(...)"
        )
    return Cluster() if engine == "cluster" else None


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "engine='cluster' needs Ray, which is not installed: pip install 'fedbcd[cluster]'"
        ) from None


def expected_work(federation: Federation, spec: RunSpec) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Samples that each device trains on in a round of its server, on average: chance of being
    active x steps x batch.
    """
    method = spec.method_of(federation)
    active, batch = spec.active_of(federation), method.batch
    drawn = sum(method.steps) / 2
    work = np.zeros(federation.devices)
    for n, members in enumerate(federation.servers):
        share = min(1.0, at_server(active, n) / len(members))
        for device in members:
            samples = federation.sizes[device] if batch == "all" else batch
            steps = drawn * method.pass_of(device, offline=bool(method.offline))
            work[device] = share * steps * samples
    return work


def shards_of(federation: Federation, spec: RunSpec, actors: int) -> list[list[int]]:
    """Devices of each actor: server after server, cut where the expected work is even.

    Neighbours share a server, so that the sums of V servers come back from A actors as V + A - 1
    vectors at most.
    """
    order = np.array([device for members in federation.servers for device in members])
    work = expected_work(federation, spec)[order]
    middle = np.cumsum(work) - work / 2
    shard = np.minimum((middle / work.sum() * actors).astype(int), actors - 1)
    return [devices for k in range(actors) if (devices := order[shard == k].tolist())]
