"""The cases, as plain tables that leave nothing to a default: method, cloud, and every word that
`train` knew before.
"""

import copy
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

PENALTIES = [0.5 + 0.125 * device for device in range(12)]
COMMON = {"device_step": 0.05, "batch": 4, "steps": [1, 5], "projection": {"name": "none"}}
PERSONAL = COMMON | {
    "penalty": 1.0,
    "momentum": 0.9,
    "server_step": 0.5,
    "server_step_form": "relative",
    "cloud_iterations": 1,
}
OFFLINE = PERSONAL | {"name": "fedbcd-i", "penalty": 0.2, "available": 3, "offline_limit": 4}
METHODS: dict[str, dict[str, Any]] = {
    "fedbcd": PERSONAL | {"name": "fedbcd"},
    "fedbcd-twice": PERSONAL | {"name": "fedbcd", "cloud_iterations": 2},
    "fedbcd-i-kept": OFFLINE | {"momentum_after_contact": "kept"},
    "fedbcd-i-pull": OFFLINE | {"momentum_after_contact": "pull"},
    "fedbcd-i-restart": OFFLINE | {"momentum_after_contact": "restart"},
    "fedavg": COMMON | {"name": "fedavg"},
    "fedprox": COMMON | {"name": "fedprox", "penalty": 5.0, "momentum": 0.9},
}
LINE = [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]
OTHER = [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
CLOUDS: dict[str, dict[str, Any]] = {
    "sync": {"name": "sync"},
    "async": {"name": "async", "first": 2},
    "rigorous": {"name": "rigorous", "first": 2},
    "graph": {"name": "graph", "mixing": [LINE, OTHER]},
}
PAIRS = [(m, c) for m in METHODS for c in CLOUDS if "server_step" in METHODS[m] or c == "sync"]
TRAIN: dict[str, Any] = {
    "rounds": 7,
    "until_clock": None,
    "active": 2,
    "clock": {
        "arrival": {"name": "exponential", "mean": 2.0},
        "step": {"name": "exponential", "mean": 1.0},
    },
    "seed": 0,
    "joins": {},
    "leaves": {},
    "evaluate_every": 3,
    "looks": None,
    "certify_every": 1,
    "certify_devices": 3,
    "checkpoint_every": 2,
    "engine": "simulate",
    "device": "cpu",
    "dtype": "float64",
    "max_batch": None,
    "storage": None,
    "state": False,
    "precision": "float32",
    "measure": "own-shares",
    "ahead": False,
    "compile": False,
}
PLAIN: Case = {
    "kind": "train",  # or "resume", in two parts; or "replay" of a recorded log
    "group": "torch",  # which processes run it: see `__main__.py`
    "federation": "bent",
    "threads": 1,
    "log": False,
    "exact": False,  # replay one device at a time
    "handover": False,  # the tree goes on with what the wheel has left
}
COMES_AND_GOES: dict[str, Any] = {"joins": {"3": 2, "7": 4}, "leaves": {"1": 3, "10": 5}}
TIES = {
    "arrival": {"name": "constant", "value": 1.0},
    "step": {"name": "trace", "values": [0.5, 1.0, 3.0]},
}
CLOCKS = {
    "ties": TIES,
    "weibull-gamma": {
        "arrival": {"name": "weibull", "shape": 0.7, "scale": 1.0},
        "step": {"name": "gamma", "shape": 0.6, "scale": 2.0},
    },
    "log-uniform": {
        "arrival": {"name": "lognormal", "median": 1.0, "sigma": 0.8},
        "step": {"name": "uniform", "low": 0.5, "high": 2.0},
    },
}
# Name, what differs, and where; "method.x" is for methods that know an x, and the others go without
# the variation.
VARIATIONS: dict[str, dict[str, Any]] = {
    "comes-and-goes": {f"train.{key}": value for key, value in COMES_AND_GOES.items()},
    "penalties": {"method.penalty": PENALTIES},
    "box": {"method.projection": {"name": "box", "low": -0.25, "high": 0.25}},
    "ball": {"method.projection": {"name": "ball", "radius": 2.0}},
    "simplex": {"method.projection": {"name": "simplex", "total": 3.0}},
    "boxes": {
        "method.projection": {
            "name": "tensor-boxes",
            "segments": [[340, -0.2, 0.3], [54, -0.5, 0.5]],
        }
    },
    "exact": {"method.batch": "all"},
    "absolute": {"method.server_step_form": "absolute", "method.server_step": 0.04},
    "all-available": {"method.available": None, "method.offline_limit": 1},
    "three-mixes": {"method.cloud_iterations": 3},
    "no-momentum": {"method.momentum": 0.0, "method.steps": [3, 3]},
    "buffers": {"federation": "normed"},
    "pictures": {"federation": "convolving"},
    "bytes": {"federation": "bytes"},
    "dropout": {
        "federation": "dropping",
        "train.certify_every": 0,
        "train.certify_devices": None,
    },  # its gap is drawn anew each time
    "regression": {"federation": "regressing"},
    "frozen": {"federation": "frozen"},
    "drawn": {"federation": "drawn", "train.seed": 11},
    "module": {"federation": "module"},
    "uneven": {"federation": "uneven"},
    "untested": {"federation": "untested"},
    "pool": {"federation": "pool"},
    "pooled-labels": {"train.measure": "pooled-labels"},
    "half-stored": {"train.storage": "bfloat16", "train.dtype": "float32"},
    "half-products": {"train.precision": "bfloat16", "train.dtype": "float32"},
    "half-all": {"train.dtype": "bfloat16"},
    "by-clock": {
        "train.rounds": None,
        "train.until_clock": 25.0,
        "train.evaluate_every": None,
        "train.looks": 4,
    },
    "three-together": {"train.max_batch": 3},
    "two-threads": {"threads": 2},
    "uncertified": {"train.certify_every": 0, "train.certify_devices": None, "train.active": 1},
    "resumed": {"kind": "resume", "first": 4, "log": True},
    "handed-over": {"kind": "resume", "first": 4, "log": True, "handover": True},
    "resumed-changes": (
        {"kind": "resume", "first": 3, "log": True, "handover": True}
        | {f"train.{k}": v for k, v in COMES_AND_GOES.items()}
    ),
} | {f"clock-{name}": {"train.clock": clock} for name, clock in CLOCKS.items()}
EVERYWHERE = ("comes-and-goes", "handed-over")
SOME = (
    ("fedbcd", "async"),
    ("fedbcd-i-kept", "rigorous"),
    ("fedbcd-twice", "sync"),
    ("fedbcd-i-pull", "graph"),
    ("fedprox", "sync"),
)
SOME += (
    ("fedbcd-i-restart", "sync"),
    ("fedbcd", "graph"),
    ("fedavg", "sync"),
    ("fedbcd-i-kept", "async"),
    ("fedbcd", "rigorous"),
)
ENGINES: dict[str, dict[str, Any]] = {
    "events": {},
    "one-by-one": {"train.max_batch": 1, "exact": True},
    "files": {"train.state": True},
    "ahead": {"train.ahead": True},
    "cluster": {"train.engine": "cluster", "group": "cluster"},
    "chain": {"train.dtype": "float32", "group": "compiled", "federation": "chain"},
    "chain-files": {
        "train.dtype": "float32",
        "group": "compiled",
        "federation": "chain",
        "train.state": True,
    },
    "chain-ahead": {
        "train.dtype": "float32",
        "group": "compiled",
        "federation": "chain",
        "train.ahead": True,
    },
}


def case(name: str, method: str, cloud: str, *changes: dict[str, Any]) -> Case | None:
    """A case with some settings changed; None where a change is about what the method does not
    know.
    """
    made = copy.deepcopy(
        {"name": name, **PLAIN, "method": METHODS[method], "cloud": CLOUDS[cloud], "train": TRAIN}
    )
    for path, value in (item for change in changes for item in change.items()):
        *sections, key = path.split(".")
        place = made
        for section in sections:
            place = place[section]
        if sections == ["method"] and key not in place:
            return None
        place[key] = copy.deepcopy(value)
    return made


def can_be_ahead(method: str, cloud: str) -> bool:
    """Which schedules can be planned ahead."""
    return cloud == "sync" or (cloud == "async" and not method.startswith("fedbcd-i"))


def _matrix() -> Iterator[Case | None]:
    """Every method on every cloud on every engine."""
    for number, (method, cloud) in enumerate(PAIRS):
        for engine, change in ENGINES.items():
            if "ahead" in engine and not can_be_ahead(method, cloud):
                continue
            logged = {
                "log": (
                    engine in ("events", "one-by-one", "chain")
                    or (number % 3 == 0 and engine != "cluster")
                )
            }
            for dtype in ("float32",) if "chain" in engine else ("float64", "float32"):
                name = f"{method}/{cloud}/{engine}/{dtype}"
                yield case(
                    name,
                    method,
                    cloud,
                    {"train.dtype": dtype, "train.seed": number},
                    logged,
                    change,
                )


def _variations() -> Iterator[Case | None]:
    """Everything else that can be said, each on some methods and clouds, and on some engines."""
    for number, (variation, change) in enumerate(VARIATIONS.items()):
        pairs = (
            PAIRS
            if variation in EVERYWHERE
            else [SOME[(3 * number + k) % len(SOME)] for k in range(4)]
        )
        if variation in ("penalties", "buffers", "resumed", "resumed-changes"):
            pairs = list(SOME)
        if variation == "all-available":
            pairs = [pair for pair in PAIRS if pair[0] == "fedbcd-i-kept"]
        for k, (method, cloud) in enumerate(pairs):
            seed = {"train.seed": 100 + k}
            for engine in _engines_of(variation, k, method, cloud):
                name = f"{variation}: {method}/{cloud}/{engine}"
                dtype = {
                    "train.dtype": "float32" if engine in ("one-by-one", "files") else "float64"
                }
                yield case(name, method, cloud, seed, dtype, ENGINES[engine], change)


def _engines_of(variation: str, number: int, method: str, cloud: str) -> list[str]:
    """On which engines a variation is tried; compiled code is left out where it has no part."""
    changed = VARIATIONS[variation]
    found = ["events"]
    if "train.max_batch" not in changed:
        found.append("one-by-one" if number % 2 else "files")
        found += ["cluster"] if number % 8 == 0 else []
        if can_be_ahead(method, cloud) and variation in AHEAD and number % 2 == 0:
            found.append("ahead")
    known = changed.get("federation", "chain") in ("chain", "bytes", "drawn", "frozen")
    fine = known and changed.get("method.projection", {}).get("name", "box") == "box"
    return (
        [*found, "chain"]
        if fine and "train.storage" not in changed and "train.precision" not in changed
        else found
    )


AHEAD = (
    "penalties",
    "box",
    "ball",
    "absolute",
    "three-mixes",
    "no-momentum",
    "buffers",
    "pictures",
    "bytes",
    "regression",
    "pooled-labels",
)
AHEAD += (
    "resumed",
    "handed-over",
    "by-clock",
    "clock-weibull-gamma",
    "clock-log-uniform",
    "two-threads",
    "uncertified",
)


def _builds() -> Iterator[Case | None]:
    """Compiled code as other processors run it."""
    for group in ("compiled avx2", "compiled portable"):
        for method, cloud in SOME:
            yield case(
                f"{method}/{cloud}/{group}", method, cloud, ENGINES["chain"], {"group": group}
            )


def all_cases() -> list[Case]:
    """Every case that is run; the recorded logs come from `recorded.py`."""
    found = [one for one in (*_matrix(), *_variations(), *_builds()) if one is not None]
    for one in found:
        federation, ahead = one["federation"], one["train"]["ahead"]
        if one["group"] == "compiled" and federation == "bent":
            one["federation"] = "chain"
        if federation == "dropping" and ahead:
            raise AssertionError(f"{one['name']} cannot be planned ahead")
    names = [one["name"] for one in found]
    assert len({*names}) == len(names), "two cases have one name"
    return found
