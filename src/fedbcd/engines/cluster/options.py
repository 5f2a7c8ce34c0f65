"""How a run is spread over a cluster, and how the work is shared out."""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbcd.data.federation import Federation
from fedbcd.engines.settings import Settings
from fedbcd.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Where `train(engine=...)` computes: on the actors of a Ray cluster, each with a shard of the
    devices.

    address  of a running cluster, e.g. "auto" or "head:6379"; without one, Ray is started on this
    machine for the run
    actors   how many shards; by default one per `cpus` that the cluster has (or per `gpus`)
    cpus     of each actor, as Ray counts them
    gpus     of each actor; a fraction shares a GPU, e.g. 0.25 puts four actors on one
    """

    address: str | None = None
    actors: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ConfigError(f"actors={self.actors} must be 1 or more")
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise ConfigError(
                f"cpus={self.cpus:g} and gpus={self.gpus:g} must be 0 or more, and not both 0"
            )


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
    """Ray, which is an extra."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "engine='cluster' needs Ray, which is not installed: pip install 'fedbcd[cluster]'"
        ) from None


def expected_work(
    federation: Federation, settings: Settings
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Samples that each device trains on in a round of its server, on average: chance of being
    active x steps x batch.
    """
    active, batch = settings.active_of(federation), settings.algorithm.batch
    mean_steps = sum(settings.algorithm.steps) / 2
    work = np.zeros(federation.devices)
    for members in federation.servers:
        for device in members:
            samples = federation.sizes[device] if batch == "all" else batch
            work[device] = min(1.0, active / len(members)) * mean_steps * samples
    return work


def shards_of(federation: Federation, settings: Settings, actors: int) -> list[list[int]]:
    """Devices of each actor: server after server, cut where the expected work is even.

    Neighbours share a server, so that the sums of V servers come back from A actors as V + A - 1
    vectors at most.
    """
    order = np.array([device for members in federation.servers for device in members])
    work = expected_work(federation, settings)[order]
    middle = np.cumsum(work) - work / 2
    shard = np.minimum((middle / work.sum() * actors).astype(int), actors - 1)
    return [devices for k in range(actors) if (devices := order[shard == k].tolist())]
