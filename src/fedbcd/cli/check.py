"""The command `fedbcd check`: does the paper's theory cover this job? Thin, like `cli`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbcd.cli.overrides import override
from fedbcd.config import read_toml
from fedbcd.experiments.check import CheckReport, check_job, recorded_jobs
from fedbcd.experiments.job import Federations, default_table, parse
from fedbcd.theory.assumptions import Verdict

SOMETHING_FAILS = 1
COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.FAILS: "red",
    Verdict.UNKNOWN: "yellow",
    Verdict.LAPSES: "yellow",
}
console = Console(stderr=True)


def check_command(
    file: Annotated[
        Path | None, typer.Argument(help="A job file (TOML). Without one: the default job.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the files of the data set are, e.g. for MNIST.")
    ] = None,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object on the last line.")
    ] = False,
) -> None:
    """Judge Assumptions 1-5 of the paper for a job: each holds, fails, lapses, or cannot be known,
    and what would pass.

    Exit code: 0 if no assumption fails, 1 if one does; a job that cannot run at all is an error, as
    for 'fedbcd run'.
    """
    table = default_table() if file is None else read_toml(file)
    override(table, folder=data)
    path = log / "events.jsonl" if log is not None and log.is_dir() else log
    made, jobs = Federations(), parse(table)
    jobs, skipped = (jobs, []) if path is None else recorded_jobs(jobs, path, made)
    for sentence in skipped:
        console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)
    reports = []
    for job in jobs:
        with console.status(f"checking {job.name} ..."):
            how = {"devices": devices, "rounds": rounds}
            reports.append(check_job(job, log=path, federation=made.of(job), **how))
    screen = console if as_json else Console()
    for report in reports:
        screen.print(_table(report))
        screen.print(report.sentence, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(
            json.dumps(
                {
                    "fails": sum(report.fails for report in reports),
                    "jobs": [report.to_table() for report in reports],
                }
            )
        )
    if any(report.fails for report in reports):
        raise typer.Exit(SOMETHING_FAILS)


def _table(report: CheckReport) -> Table:
    table = Table(
        title=escape(report.title),
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for title in ("", "assumption", "verdict", "found", "would pass"):
        table.add_column(title, overflow="fold")
    for f in report.findings:
        verdict = f"[{COLOURS[f.verdict]}]{f.verdict.value}[/]"
        table.add_row(f.assumption, escape(f.says), verdict, escape(f.found), escape(f.remedy))
    return table
