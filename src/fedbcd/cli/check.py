"""The command `fedbcd check`: does the paper's theory cover this job? Thin, like `cli`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedbcd.cli.output import (
    Data,
    Grid,
    Json,
    note,
    print_json,
    say,
    screen_for,
    show,
    table_of,
    waiting,
)
from fedbcd.cli.overrides import read_jobs
from fedbcd.experiments.check import CheckReport, check_job, recorded_jobs
from fedbcd.experiments.job import Federations
from fedbcd.experiments.promise import MEANING, Promise
from fedbcd.record.names import LOG
from fedbcd.theory.assumptions import Verdict

SOMETHING_FAILS = 1
COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.FAILS: "red",
    Verdict.UNKNOWN: "yellow",
    Verdict.LAPSES: "yellow",
}


def check_command(
    file: Annotated[
        Path | None, typer.Argument(help="A job file (TOML). Without one: the default job.")
    ] = None,
    data: Data = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Read the schedule from an event log, or from the folder of a run, instead of"
                " planning it."
            )
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices on which the curvature is measured.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of the schedule to plan at most.")] = 2000,
    as_json: Json = False,
) -> None:
    """Judge Assumptions 1-5 of the paper for a job: each holds, fails, lapses, or cannot be known,
    and what would pass.

    Exit code: 0 if no assumption fails, 1 if one does; a job that cannot run at all is an error, as
    for 'fedbcd run'.
    """
    path = log / LOG if log is not None and log.is_dir() else log
    made, jobs = Federations(), read_jobs(file, data)
    jobs, skipped = (jobs, []) if path is None else recorded_jobs(jobs, path, made)
    for sentence in skipped:
        note(sentence)
    reports = []
    for job in jobs:
        with waiting(f"checking {job.name} ..."):
            how = {"devices": devices, "rounds": rounds}
            reports.append(check_job(job, log=path, federation=made.of(job), **how))
    screen = screen_for(as_json)
    for report in reports:
        show(_table(report), screen)
        say(report.sentence, screen)
        if isinstance(report.promise, str):
            say(report.promise and f"Theorem 1: {report.promise}.", screen)
        else:
            show(_theorem(report.promise), screen)
            constants = report.promise.constants.items()
            say("with " + ", ".join(f"{name} = {value:.4g}" for name, value in constants), screen)
            say(report.promise.sentence, screen)
    print_json(
        as_json,
        {
            "fails": sum(report.fails for report in reports),
            "jobs": [report.to_table() for report in reports],
        },
    )
    if any(report.fails for report in reports):
        raise typer.Exit(SOMETHING_FAILS)


def _table(report: CheckReport) -> Grid:
    names = ("", "assumption", "verdict", "found", "would pass")
    table = table_of(*names, title=report.title, words=names)
    for f in report.findings:
        verdict = Text(f.verdict.value, COLOURS[f.verdict])
        table.add_row(f.assumption, f.says, verdict, f.found, f.remedy)
    return table


def _theorem(promise: Promise) -> Grid:
    title = f"Theorem 1 for T = {promise.rounds}: means over the rounds, at most"
    names = ("", "of", "bound", "any points of X", "says more from T")
    table = table_of(*names, title=title, words=names[:2])
    for name, meaning in MEANING.items():
        needed = promise.telling[name]
        numbers = [f"{getattr(each, name):.3g}" for each in (promise.bounds, promise.trivial)]
        table.add_row(name, meaning, *numbers, "never" if needed is None else f"{needed:.3g}")
    return table
