"""A sweep: every combination of some keys of a job file, and the best of them. "By trial and error"
as a command.

[sweep]
seeds = 2
best = "personal_accuracy"
[sweep.keys]
"algorithm.penalty" = [0.1, 1.0, 5.0]
"cloud.first" = [3, 5]
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

from fedbcd.config import build
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import Job, parse
from fedbcd.experiments.pool import Result

Score = Literal["global_accuracy", "personal_accuracy", "worst_decile"]


@dataclass(frozen=True, kw_only=True)
class SweepPart:
    """What to vary and what to look for."""

    seeds: int = 1
    best: Score = "personal_accuracy"


@dataclass(frozen=True)
class Point:
    """One combination, and the jobs (one per seed) that try it."""

    values: dict[str, Any]
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Tried:
    """A combination with its scores over seeds."""

    values: dict[str, Any]
    global_accuracy: float
    personal_accuracy: float
    worst_decile: float
    spread: float  # standard deviation over seeds of the score that decides


def parse_sweep(table: Mapping[str, Any]) -> tuple[SweepPart, list[Point]]:
    if "sweep" not in table or not isinstance(table["sweep"], Mapping):
        raise ConfigError(
            'the file has no [sweep] section; it needs [sweep.keys] such as "algorithm.penalty" ='
            " [0.1, 1.0]"
        )
    base = {key: value for key, value in table.items() if key != "sweep"}
    settings = dict(table["sweep"])
    keys = settings.pop("keys", {})
    part = build(SweepPart, settings, "sweep")
    if part.seeds < 1:
        raise ConfigError(f"sweep.seeds = {part.seeds} must be 1 or more")
    if not (
        isinstance(keys, Mapping) and keys and all(isinstance(v, list) and v for v in keys.values())
    ):
        raise ConfigError(
            '[sweep.keys] must name keys with lists of values, e.g. "algorithm.penalty" = [0.1,'
            " 1.0]"
        )
    points = [
        _point(base, dict(zip(keys, values, strict=True)), part.seeds)
        for values in itertools.product(*keys.values())
    ]
    return part, points


def _point(base: Mapping[str, Any], values: dict[str, Any], seeds: int) -> Point:
    jobs = []
    for seed in range(seeds):
        table = copy.deepcopy(dict(base))
        for path, value in values.items():
            _set(table, path, value)
        first = int(table.setdefault("run", {}).get("seed", 0))
        table["run"]["seed"] = first + seed
        table["title"] = ", ".join(f"{k} = {v}" for k, v in values.items())
        jobs += parse(table)
    return Point(values, tuple(jobs))


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    if not sections:
        raise ConfigError(f'sweep key "{path}" must name a section too, e.g. "algorithm.{path}"')
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f'sweep key "{path}" goes through {section!r}, which is not a section'
            )
    table[key] = value


def rank(part: SweepPart, points: Sequence[Point], results: Sequence[Result]) -> list[Tried]:
    found = iter(results)
    tried = []
    for point in points:
        rows = [next(found).history.last for _ in point.jobs]
        scores = {
            name: mean(getattr(row, name) for row in rows)
            for name in ("global_accuracy", "personal_accuracy", "worst_decile")
        }
        deciding = [float(getattr(row, part.best)) for row in rows]
        tried.append(
            Tried(point.values, **scores, spread=stdev(deciding) if len(deciding) > 1 else 0.0)
        )
    metric = results[0].summary.get("metric", {}) if results else {}
    return sorted(
        tried,
        key=lambda t: float(getattr(t, part.best)),
        reverse=metric.get("better") != "lower",
    )
