"""A sweep: every combination of some keys of a job file, and the best of them. "By trial and error"
as a command.

[sweep]
seeds = 2
best = "personal_accuracy"    # a column of the history; of the first measure by default
[sweep.keys]
"algorithm.penalty" = [0.1, 1.0, 5.0]
"cloud" = ["sync", { name = "async", first = 3 }, { title = "all", name = "async", first = 10 }]

Whole sections are values too. Where the file has [[runs]], each of them is tried with all.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from fedbcd.config import build
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import SECTIONS, Job, merged, parse
from fedbcd.experiments.pool import Result
from fedbcd.experiments.titles import in_a_word
from fedbcd.record.history import (
    ENDS,
    GLOBAL,
    PERSONAL,
    SCORED,
    TRAIN_LOSS,
    WORST,
    History,
    column_of,
)

RUN = "run"  # the key under which a point says of which run of the file it is


@dataclass(frozen=True, kw_only=True)
class SweepPart:
    """What to vary and what to look for."""

    seeds: int = 1
    best: str = ""  # a column of the history; by default personal models by the first measure


@dataclass(frozen=True)
class Point:
    """One combination, and the jobs (one per seed) that try it."""

    values: dict[str, Any]
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Tried:
    """A combination with its scores over seeds."""

    values: dict[str, Any]
    scores: dict[str, float]  # the mean of the columns of the measure that decides, and of `by`
    by: str  # the column that decides
    spread: float  # its standard deviation over seeds

    @property
    def plain(self) -> dict[str, Any]:
        """For output."""
        return {"values": self.values, **self.scores, "spread": self.spread}


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
    of_measures = (*(column_of(each, "") for each in SCORED), WORST, TRAIN_LOSS)
    if part.best and not part.best.startswith(of_measures):
        raise ConfigError(
            f"sweep.best = {part.best!r} is no score of a history; it must be a column such as"
            f" {GLOBAL!r}, {PERSONAL!r} or {WORST!r}"
        )
    if part.seeds < 1:
        raise ConfigError(f"sweep.seeds = {part.seeds} must be 1 or more")
    if not (
        isinstance(keys, Mapping) and keys and all(isinstance(v, list) and v for v in keys.values())
    ):
        raise ConfigError(
            '[sweep.keys] must name keys with lists of values, e.g. "algorithm.penalty" = [0.1,'
            " 1.0]"
        )
    runs = base.pop("runs", [{}])
    points = [
        _point(_of_run(base, run), _said(run, runs) | dict(zip(keys, values, strict=True)), part)
        for run in runs
        for values in itertools.product(*keys.values())
    ]
    _check_titles(points)
    return part, points


def _said(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which of several runs of the file a point is of."""
    return {RUN: str(run.get("title", runs.index(run) + 1))} if len(runs) > 1 else {}


def _of_run(base: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the changes of one of its runs, so that keys are of what is then there."""
    return {**base, **{key: merged(base.get(key), value) for key, value in run.items()}}


def _point(base: Mapping[str, Any], values: dict[str, Any], part: SweepPart) -> Point:
    table = copy.deepcopy(dict(base))
    for path, value in values.items():
        if path != RUN:
            _set(table, path, value)
    table["title"] = title_of(values)
    (job,) = parse(table)
    seeds = range(job.spec.seed, job.spec.seed + part.seeds)
    return Point(values, tuple(job.changed(seed=seed) for seed in seeds))


def title_of(values: Mapping[str, Any]) -> str:
    """A point in words."""
    words = (in_a_word(v) if k in (RUN, *SECTIONS) else f"{k} = {v}" for k, v in values.items())
    return ", ".join(words)


def _check_titles(points: Sequence[Point]) -> None:
    titles = [point.jobs[0].title for point in points]
    for title in titles:
        if titles.count(title) > 1:
            raise ConfigError(
                f"two points of the sweep are called {title!r}; leave one out, or give each value"
                " a title of its own"
            )


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    if path in SECTIONS:
        said = {"name": value} if isinstance(value, str) else value
        if not isinstance(said, Mapping):
            raise ConfigError(
                f'sweep key "{path}" is a section; its values must be tables, not {value!r:.60}'
            )
        table[path] = merged(table.get(path), {k: v for k, v in said.items() if k != "title"})
        return
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
    """The best first, by a column of the histories."""
    history, found = results[0].history, iter(results)
    measure, better = judged_by(part.best, history)
    by = part.best or column_of("personal", measure)
    columns = dict.fromkeys([*(column_of(each, measure) for each in ENDS), by])
    tried = []
    for point in points:
        rows = [next(found).history.last for _ in point.jobs]
        scores = {name: mean(row[name] for row in rows) for name in columns if name in rows[0]}
        deciding = [row[by] for row in rows]
        spread = stdev(deciding) if len(deciding) > 1 else 0.0
        tried.append(Tried(point.values, scores, by, spread))
    return sorted(tried, key=lambda t: t.scores[by], reverse=better != "lower")


def judged_by(column: str, history: History) -> tuple[str, str]:
    """The measure that a column is of, and which of its values are better; an empty name means the
    first measure.
    """
    of = {column_of(each, name): name for name in history.measures for each in SCORED}
    if column == TRAIN_LOSS:
        return history.first_measure, "lower"
    if column and column not in of:
        raise ConfigError(f"there is no score {column!r} in these runs; there are {', '.join(of)}")
    measure = of.get(column, history.first_measure)
    return measure, history.measures[measure]
