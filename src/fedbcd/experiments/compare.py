"""`compare`: several methods on one federation, each with the same seeds, in parallel processes."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedbcd.algorithm.methods import Algorithm
from fedbcd.config import convert, elsewhere, nearest, shown
from fedbcd.data.federation import Federation, check_federation
from fedbcd.data.functions import functions_of
from fedbcd.engines.result import Run
from fedbcd.engines.run import train
from fedbcd.errors import ConfigError
from fedbcd.experiments.comparison import Comparison, usual_baselines
from fedbcd.experiments.pool import BESIDE, Result, Task, run_tasks, workers_that_fit
from fedbcd.experiments.titles import titles_of
from fedbcd.spec import IN_RUN, OPTIONS, RunSpec

Competitor = Algorithm | RunSpec | tuple[Algorithm | RunSpec, Mapping[str, Any]]
AT_ONCE = 0.02  # seconds


def compare(
    federation: Federation | Callable[[int], Federation],
    methods: Mapping[str, Competitor] | Sequence[Competitor],
    seeds: int | Sequence[int] = 5,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    against: Sequence[str] | None = None,
    on_done: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Comparison:
    """Train every method with every seed, as many at a time as there are cores, and compare.

    federation  one for all seeds, which are then of delays, batches and initial weights; or
                seed -> federation, e.g. with another split for each
    methods     title -> method, with options of its own as (method, {"cloud": "async"}) or
                RunSpec(...); without titles they are called by what differs
    seeds       how many, from 0 on; or which
    out         a folder for results: what has been computed is found there again, so that a
                comparison can be interrupted, repeated and extended
    workers     processes at a time; by default what cores and memory allow
    against     titles that the others are compared with, device by device; by default local
                training and the first method without personal models, where they are among them
    on_done     told how many runs are done, and of how many; by default a line on a terminal
    options     of `train`, for all methods: rounds=100, active=3, cloud="async", ...
    """
    if not callable(federation):
        check_federation(federation)
    seeds = convert(seeds, int | Sequence[int], "seeds")
    chosen = list(range(seeds)) if isinstance(seeds, int) else [*seeds]
    if not chosen or len({*chosen}) != len(chosen):
        raise ConfigError(f"seeds={seeds!r} must be 1 or more, or seeds that differ")
    specs = _specs(methods, options)
    if against is not None and (unknown := [title for title in against if title not in specs]):
        raise ConfigError(
            f"against: no method is called {unknown[0]!r}{nearest(unknown[0], specs)}"
        )
    make = cache(federation if not isinstance(federation, Federation) else lambda _: federation)
    tasks = [
        _task(title, spec.changed({"seed": seed}), make(seed))
        for title, spec in specs.items()
        for seed in chosen
    ]
    workers = workers_that_fit(make(chosen[0])) if workers is None else workers
    told = _Counter(len(tasks), on_done or Line())
    if out is not None:
        results = run_tasks(tasks, Path(out), workers, told)
    else:
        with TemporaryDirectory() as folder:
            results = run_tasks(tasks, Path(folder), workers, told)
    return comparison_of(results, against)


def comparison_of(results: Sequence[Result], against: Sequence[str] | None = None) -> Comparison:
    """Of results by name, in their order."""
    found: dict[str, tuple[Result, ...]] = {}
    for result in results:
        found[result.name] = (*found.get(result.name, ()), result)
    return Comparison(found, tuple(usual_baselines(found) if against is None else against))


# ------------------------------------------------------------------------------------------------
# what is to be computed
def _specs(
    methods: Mapping[str, Competitor] | Sequence[Competitor], options: Mapping[str, Any]
) -> dict[str, RunSpec]:
    """Title -> run; what a method says for itself goes before what is said for all."""
    if not (isinstance(methods, Mapping | Sequence) and methods):
        raise ConfigError(
            f"methods={shown(methods)} must be {{title: method, ...}}, or a list of methods"
        )
    titled = isinstance(methods, Mapping)
    given = list(methods.values()) if isinstance(methods, Mapping) else list(methods)
    specs = [_spec(each, options) for each in given]
    titles = list(methods) if titled else titles_of(specs)
    return dict(zip(map(str, titles), specs, strict=True))


def _spec(given: Competitor, options: Mapping[str, Any]) -> RunSpec:
    method, changes = given if isinstance(given, tuple) else (given, {})
    for name in (*options, *changes):
        if name not in ("cloud", *OPTIONS) or name == "seed":
            wanted = "seeds=[...] says which" if name == "seed" else "it is no option of train"
            near = "" if name == "seed" else nearest(name, ("cloud", *OPTIONS)) or elsewhere(name)
            raise ConfigError(f"{name}=... cannot be given to compare: {wanted}{near}")
    spec = method if isinstance(method, RunSpec) else RunSpec(method)
    spec = spec.changed(options).changed(changes)
    spec.check_budget()
    return spec


def _task(title: str, spec: RunSpec, federation: Federation) -> Task:
    if not isinstance(federation, Federation):
        raise ConfigError(f"federation gives {shown(federation)}; it must give a fb.Federation")
    spec.check(federation)
    record = {"title": title, **spec.to_table()}

    def run(place: Path, note: Callable[[str], None]) -> Run:
        return train(
            federation, spec, out=place, resume=True, record={"title": title}, on_notice=note
        )

    return Task(title, spec, _key(spec, federation), run, record)


def _key(spec: RunSpec, federation: Federation) -> str:
    """A hash of everything that changes the result: its identity, how long it runs and how it is
    watched; the test samples; and loss and metric.
    """
    said = spec.to_table()["run"]
    table = {
        "identity": spec.identity(federation),
        "run": {name: said[name] for name in IN_RUN if name not in BESIDE},
        "tests": _tests(federation),
        "functions": functions_of(federation, federation.make_model(spec.seed)),
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tests(federation: Federation) -> str:
    digest = hashlib.sha256(repr(federation.own_tests).encode())
    if federation.test is not None:
        for tensor in federation.test.known_by():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------
# progress
@dataclass
class _Counter:
    """How many runs are done."""

    total: int
    tell: Callable[[int, int], None]
    done: int = 0

    def __call__(self, _: Task) -> None:
        self.done += 1
        self.tell(self.done, self.total)


@dataclass
class Line:
    """A line on a terminal: what is done, and how long the rest will take. What was known before
    comes at once, and does not count.
    """

    began: float = field(default_factory=time.monotonic)
    latest: float = field(default_factory=time.monotonic)
    known: int = 0

    def __call__(self, done: int, total: int) -> None:
        now, before = time.monotonic(), self.latest
        self.latest = now
        if now - before < AT_ONCE and self.known == done - 1:
            self.began, self.known = now, done
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            sys.stderr.write(f"\r{self.text(done, total)}{end}")
            sys.stderr.flush()

    def text(self, done: int, total: int) -> str:
        left = (self.latest - self.began) / max(1, done - self.known) * (total - done)
        minutes, seconds = divmod(round(left), 60)
        still = f", {minutes}:{seconds:02d} left" if self.known < done < total else ""
        return f"{done} of {total} runs{still}".ljust(40)
