"""Cases that begin with a job file: the command line, and small deployments of real processes."""

import json
from typing import Any

from golden.cases import CLOUDS, METHODS, PLAIN, Case

RUN: dict[str, Any] = {
    "rounds": 6,
    "seed": 5,
    "evaluate_every": 2,
    "certify_every": 1,
    "certify_devices": 3,
    "checkpoint_every": 2,
    "device": "cpu",
    "dtype": "float64",
    "precision": "float32",
    "measure": "own-shares",
    "ahead": False,
    "threads": 1,
}
JOB: dict[str, Any] = {
    "title": "golden",
    "data": {"name": "digits", "diversity": 3, "samples": 20, "augment": "none"},
    "federation": {"servers": 3, "devices": 4, "active": 2},
    "model": {"name": "mlp", "hidden": [9], "norm": "batch"},
    "clock": {
        "arrival": {"name": "exponential", "mean": 2.0},
        "step": {"name": "exponential", "mean": 1.0},
    },
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "diversity": {"name": "diversity", "labels": 2, "samples": 18},
    "dirichlet": {"name": "dirichlet", "alpha": 0.5, "samples": 20},
    "iid": {"name": "iid", "samples": 15},
    "shards": {"name": "shards", "per_device": 2},
}
COMMANDS: dict[
    str, tuple[str, str, str, dict[str, Any]]
] = {  # method, cloud, split, and what is said of the run
    "async": ("fedbcd", "async", "diversity", {}),
    "rigorous": (
        "fedbcd-i-pull",
        "rigorous",
        "dirichlet",
        {"dtype": "float32", "max_batch": 1},
    ),
    "graph": ("fedbcd-twice", "graph", "iid", {"measure": "pooled-labels"}),
    "prox": ("fedprox", "sync", "shards", {"dtype": "float32", "ahead": True}),
}
DEPLOYMENTS: dict[
    str, tuple[str, str, float | None]
] = {  # method, cloud, seconds per unit of [clock]
    "twice": ("fedbcd-twice", "async", None),
    "offline": ("fedbcd-i-kept", "sync", 0.02),
    "graph": ("fedbcd", "graph", None),
    "prox": ("fedprox", "sync", None),
    "rigorous": ("fedbcd", "rigorous", None),
    "offline-async": ("fedbcd-i-pull", "async", 0.02),
    "offline-rigorous": ("fedbcd-i-kept", "rigorous", 0.02),
}
FIRST = ("async", "rigorous")


def _command(name: str) -> Case:
    method, cloud, split, run = COMMANDS[name]
    data = {"name": "digits", "partition": PARTITIONS[split], "augment": "none"}
    job = {
        **JOB,
        "data": data,
        "algorithm": METHODS[method],
        "cloud": CLOUDS[cloud],
        "run": RUN | run,
    }
    return PLAIN | {"name": f"fedbcd run: {method}/{cloud}/{split}", "kind": "command", "job": job}


def _deployment(name: str) -> Case:
    method, cloud, scale = DEPLOYMENTS[name]
    mixing = {"name": "graph", "mixing": [[0.5, 0.5], [0.5, 0.5]]}
    clouds = CLOUDS | {"graph": mixing} | {c: CLOUDS[c] | {"first": 1} for c in FIRST}
    run = {"rounds": 4, "seed": 3, "evaluate_every": 2, "measure": "own-shares"}
    federation = {"servers": 2, "devices": 3, "active": 2}
    job = {
        **JOB,
        "federation": federation,
        "algorithm": METHODS[method],
        "cloud": clouds[cloud],
        "run": run,
    }
    return PLAIN | {
        "name": f"fedbcd up: {method}/{cloud}",
        "kind": "deployment",
        "group": "processes",
        "job": job,
        "time_scale": scale,
    }


def job_cases() -> list[Case]:
    """All of them."""
    return [*map(_command, COMMANDS), *map(_deployment, DEPLOYMENTS)]


def as_toml(job: dict[str, Any]) -> str:
    """A job file."""
    top = [f"{key} = {_value(value)}" for key, value in job.items() if not isinstance(value, dict)]
    for name, section in job.items():
        if isinstance(section, dict):
            top += [
                f"[{name}]",
                *(
                    f"{key} = {_value(value)}"
                    for key, value in section.items()
                    if value is not None
                ),
            ]
    return "\n".join(top) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    return (
        "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else json.dumps(value)
    )
