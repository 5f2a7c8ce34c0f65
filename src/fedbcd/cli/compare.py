"""Runs that are played with several seeds: `fedbcd compare`, and `fedbcd run` of a job with `[run]
seeds`. Thin, like `cli`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedbcd.cli.output import (
    INTERRUPTED,
    Data,
    Json,
    Trust,
    Workers,
    counting,
    note,
    print_json,
    say,
    say_how_to_go_on,
    say_where,
    screen_for,
    show,
    table_of,
)
from fedbcd.cli.overrides import override
from fedbcd.cli.places import check_all, claim, slug
from fedbcd.config import nearest
from fedbcd.data.preview import drawn
from fedbcd.errors import ConfigError
from fedbcd.experiments.compare import comparison_of
from fedbcd.experiments.comparison import Comparison, cells_of, scores_shown
from fedbcd.experiments.job import Federations, Job, parse, read_job_file, seeds_in
from fedbcd.experiments.pictures import draw_curves, draw_personal
from fedbcd.experiments.pool import Result, job_key, run_tasks, task_of, workers_that_fit
from fedbcd.own import imports
from fedbcd.record.history import ENDS
from fedbcd.record.names import JOB, REPORT, SERIES
from fedbcd.report.page import write_report

SEEDS = 5  # of a comparison, where nobody says
NEWCOMERS = {"global": "z as it is", "own": "after steps from z", "alone": "steps alone"}


@dataclass(frozen=True)
class Played:
    """How runs with several seeds are played."""

    workers: int | None = None
    resume: bool = False
    alone: str = ""  # what was asked for that only one run can have
    against: tuple[str, ...] = ()
    tests: bool = False  # say who differs from whom, too


def compare_command(
    file: Annotated[Path, typer.Argument(help="A job file with several [[runs]].")],
    seeds: Annotated[
        int | None, typer.Option(help=f"How many (default: the file's, or {SEEDS}).")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Title of a run that the others are compared with, device by device; may be"
            " repeated (default: local training and the first without personal models)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what is known already (default: runs/compare-NAME)."),
    ] = None,
    data: Data = None,
    rounds: Annotated[
        int | None, typer.Option(help="Stop after this many rounds, whatever the file says.")
    ] = None,
    workers: Workers = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Play the runs of a job with several seeds, in parallel, and say by how much they differ, on
    how many devices, and whether by chance. Interrupt it as you like: it goes on from there.
    """
    table = read_job_file(file)
    override(table, rounds=rounds, folder=data)
    count = seeds or (SEEDS if seeds is None and seeds_in(table) == 1 else seeds_in(table))
    if seeds is not None and seeds < 1:
        raise ConfigError(f"seeds={seeds} must be 1 or more")
    folder = out or Path("runs") / f"compare-{file.stem}"
    how = Played(workers, True, "", tuple(against or ()), tests=True)
    with imports(allowed=trust):
        play_seeds(parse(table), count, folder, how, as_json)


def play_seeds(jobs: Sequence[Job], seeds: int, folder: Path, how: Played, as_json: bool) -> None:
    """Every run with every seed; the run with the first seed is left whole, with models and log."""
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} must be 1 or more")
    if how.alone:
        raise ConfigError(f"{how.alone} is about one run; add --seeds 1")
    for title in how.against:
        names = [job.name for job in jobs]
        if title not in names:
            raise ConfigError(
                f"--against {title!r} is none of the runs{nearest(title, names)}; there are"
                f" {', '.join(map(repr, names))}"
            )
    if how.workers is not None and how.workers < 1:
        raise ConfigError(f"workers={how.workers} must be 1 or more")
    made = Federations()
    federations = [made.of(job) for job in jobs]
    jobs = [job.settled(one) for job, one in zip(jobs, federations, strict=True)]
    series = [[job.changed(seed=job.spec.seed + k) for k in range(seeds)] for job in jobs]
    for k in range(1, seeds):  # the same of other splits
        for of_job in series:
            of_job[k].spec.check(made.of(of_job[k]))
    places = [whole_place(of_job[0], folder) for of_job in series]
    resumed = how.resume and (folder / JOB).is_file()
    check_all(list(jobs), federations, places, folder, resumed)
    claim(folder, {"run": {"seeds": seeds}, "runs": [job.to_table() for job in jobs]})
    tasks = [task_of(job, made) for of_job in series for job in of_job]
    keep = {job_key(of_job[0]): place for of_job, place in zip(series, places, strict=True)}
    workers = workers_that_fit(federations[0]) if how.workers is None else how.workers
    try:
        with counting(len(tasks)) as done:
            results = run_tasks(tasks, folder / "results", workers, done, keep)
    except KeyboardInterrupt:
        if how.tests:
            say("stopped. The same command goes on from there.")
        else:
            say_how_to_go_on("fedbcd run", folder, [job.to_table() for job in jobs])
        sys.exit(INTERRUPTED)
    for text in dict.fromkeys(f"{r.name}: {text}" for r in results for text in r.notices):
        note(text)
    found = comparison_of(results, how.against or None)
    _leave(found, places, folder, how, as_json)


def whole_place(job: Job, folder: Path) -> Path:
    """Of a run that is left whole: one of other settings has another place, so that a series can be
    changed and repeated.
    """
    return folder / "runs" / f"{slug(job.name) or 'run'}-{job_key(job)[:6]}"


def leave_series(found: Comparison, places: Sequence[Path], folder: Path, table: str) -> bool:
    """Tables, pictures and a report on the runs that are whole; whether there is a picture."""
    for title, place in zip(found.titles, places, strict=False):
        _draw_run(found.results[title][0], place)
    found.to_csv(folder / table)
    if places:
        write_report(places, folder / REPORT, plan=False)
    return _draw(found, folder / "curves.png")


def _leave(
    found: Comparison, places: Sequence[Path], folder: Path, how: Played, as_json: bool
) -> None:
    has_picture = leave_series(found, places, folder, SERIES[0])
    screen = screen_for(as_json)
    _show(found, screen)
    if how.tests:
        _show_tests(found, screen)
    where = f"everything is in {folder}, the report in {folder / REPORT}"
    where += f", the curves in {folder / 'curves.png'}" if has_picture else ""
    say_where(has_picture, screen, where)
    against = [asdict(one) for baseline in found.baselines for one in found.against(baseline)]
    print_json(
        as_json,
        {"out": str(folder), "seeds": found.seeds, "runs": found.rows(), "against": against},
    )


def _draw_run(result: Result, place: Path) -> None:
    draw_curves({result.name: result.history}, place / "curves.png")
    scores = {result.name: list(result.personal.values())}
    draw_personal(scores, result.history.first_measure, place / "personal.png")


@drawn
def _draw(found: Comparison, path: Path) -> None:
    found.plot(path)


# ------------------------------------------------------------------------------------------------
# showing
def _show(found: Comparison, screen: Console) -> None:
    shown = scores_shown(found)
    _, *rows = cells_of(found, shown, "±")
    count = len(found.seeds)
    over = f"mean and deviation over {count} seeds" if count > 1 else "one seed"
    heads = [title for title, _ in zip(ENDS.values(), shown, strict=False)]
    heads += [f"lose to\n{baseline}" for baseline in found.baselines]
    title = f"test scores at the end, {over}"
    table = table_of("run", *heads, title=title, titles=("run",))
    for cells in rows:
        table.add_row(*cells)
    show(table, screen)
    _show_newcomers(found, screen)
    say(_common(found), screen)


def _show_tests(found: Comparison, screen: Console) -> None:
    for number, baseline in enumerate(found.baselines):
        for one in found.against(baseline):
            if one.title not in found.baselines[:number]:
                say(one.sentence, screen)


def _show_newcomers(found: Comparison, screen: Console) -> None:
    if "newcomers.own" not in found.columns:
        return
    first = found.titles[0]
    devices, steps = (found.mean(first, f"newcomers.{name}") for name in ("devices", "steps"))
    title = f"{devices:.0f} devices that were kept out, before and after {steps:.0f} steps"
    table = table_of("run", *NEWCOMERS.values(), title=title, titles=("run",))
    for title in found.titles:
        cells = (in_brief(found, title, f"newcomers.{name}") for name in NEWCOMERS)
        table.add_row(title, *cells)
    show(table, screen)


def in_brief(found: Comparison, title: str, column: str) -> str:
    mean, deviation = found.mean(title, column), found.deviation(title, column)
    return f"{mean:.3f}" if math.isnan(deviation) else f"{mean:.3f}±{deviation:.3f}"


def _common(found: Comparison) -> str:
    """What it took to get where all get."""
    goal, reached = found.common(), found.reached()
    times: dict[str, Any] = {title: cost["clock"] for title, cost in reached.items()}
    said = "; ".join(f"{title}: {clock:.0f}" for title, clock in times.items())
    return f"clock time to a personal score of {goal:.3f}: {said}"
