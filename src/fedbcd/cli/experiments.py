"""The commands that run many jobs: `fedbcd paper` and `fedbcd sweep`. Thin, like `cli`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedbcd.cli.compare import leave_series, whole_place
from fedbcd.cli.kinds import names_of
from fedbcd.cli.output import (
    Data,
    Grid,
    Json,
    Workers,
    console,
    counting,
    note,
    print_json,
    say,
    say_where,
    screen_for,
    show,
    table_of,
)
from fedbcd.cli.overrides import override
from fedbcd.cli.places import check_series
from fedbcd.config import follow_renamed
from fedbcd.experiments.claims import ClaimVerdict, judge
from fedbcd.experiments.compare import comparison_of
from fedbcd.experiments.figures import by_run, draw_panel, write_claims, write_table
from fedbcd.experiments.job import Federations, Job, read_job_file
from fedbcd.experiments.paper import PANELS, Setting, panels, without_effect
from fedbcd.experiments.pool import Result, job_key, run_tasks, task_of, workers_that_fit
from fedbcd.experiments.readings import READINGS
from fedbcd.experiments.sweep import Tried, parse_sweep, rank, title_of
from fedbcd.experiments.titles import in_a_word
from fedbcd.record.history import in_words
from fedbcd.record.names import SERIES

MOST_REPORTED = 20  # points of a sweep that a report shows


def paper_command(
    panel: Annotated[
        list[str],
        typer.Argument(help=f"{', '.join(PANELS)} or all", autocompletion=names_of(PANELS)),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Folder with MNIST and CIFAR-10 (default: FEDBCD_DATA).")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Sync rounds (default: 500 for Figure 3, 300 for CIFAR-10, 133 for Figure 4)."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="How many seeds; the band in the figure is their spread.")
    ] = 1,
    on: Annotated[str, typer.Option(help="Where torch computes: cpu or cuda.")] = "cpu",
    device: Annotated[str | None, typer.Option(hidden=True)] = None,
    reading: Annotated[
        list[str] | None,
        typer.Option(
            help="Another reading of what the paper leaves open, one or more: "
            + ", ".join(name for name, each in READINGS.items() if not each.default)
            + ".",
            autocompletion=names_of(READINGS),
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for figures, tables and what is known already.")
    ] = Path("runs/paper"),
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Draw a figure of the paper from raw data, and judge the paper's claims on it. Interrupt it as
    you like: it goes on from there.
    """
    if device is not None:
        on = follow_renamed({"--device": device}, {"--device": "--on"})["--on"]
    folder = None if data is None else str(data)
    chosen = panels(panel, Setting(folder, rounds, on, tuple(reading or ())))
    for where, name in without_effect(panel, reading or ()):
        note(f"the reading {name!r} changes nothing in {where}")
    jobs = [job for p in chosen for job in p.with_seeds(seeds)]
    results = iter(_run(jobs, out / "cache", workers))
    curves = {}
    for p in chosen:
        mine = [next(results) for _ in p.with_seeds(seeds)]
        curves[p.name] = by_run(mine)
        write_table(mine, out / f"{p.name}.csv")
        say_where(draw_panel(p, curves[p.name], out / f"{p.name}.png"), console)
    verdicts = judge(curves)
    write_claims(verdicts, out / "claims.json")
    screen = screen_for(as_json)
    show(_claims_table(verdicts), screen)
    say(f"figures, tables and claims.json are in {out}", screen)
    print_json(
        as_json,
        {
            "panels": [p.name for p in chosen],
            "readings": reading or [],
            "seeds": seeds,
            "out": str(out),
            "claims": [asdict(v) for v in verdicts],
        },
    )


def sweep_command(
    file: Annotated[
        Path, typer.Argument(help="A job file with a [sweep] section; see docs/jobs.md.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what is known already (default: runs/sweep-NAME)."),
    ] = None,
    data: Data = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Try every combination of some settings, in parallel, and say which is best; curves, a table
    and a report are left in the folder.
    """
    table = read_job_file(file)
    override(table, folder=data)
    part, points = parse_sweep(table)
    folder = out or Path("runs") / f"sweep-{file.stem}"
    check_series(folder)
    first = [point.jobs[0] for point in points] if len(points) <= MOST_REPORTED else []
    whole = {job_key(job): whole_place(job, folder) for job in first}
    jobs = [job for point in points for job in point.jobs]
    results = _run(jobs, folder, workers, whole)
    leave_series(comparison_of(results, ()), [*whole.values()], folder, SERIES[1])
    write_table(results, folder / "curves.csv")
    tried = rank(part, points, results)
    screen = screen_for(as_json)
    show(_sweep_table(tried), screen)
    best = tried[0]
    say(f"best: {title_of(best.values)}", screen)
    if not whole:
        say(f"no report: it would be on {len(points)} runs, more than {MOST_REPORTED}", screen)
    say(f"curves, tables and report are in {folder}", screen)
    print_json(as_json, {"best": best.plain, "by": best.by, "tried": [t.plain for t in tried]})


def _run(
    jobs: Sequence[Job],
    folder: Path,
    workers: int | None,
    whole: Mapping[str, Path] | None = None,
) -> list[Result]:
    fit = workers_that_fit(jobs[0].make_federation()) if workers is None else workers
    made = Federations()
    with counting(len(jobs)) as done:
        results = run_tasks([task_of(job, made) for job in jobs], folder, fit, done, whole)
    for text in dict.fromkeys(text for result in results for text in result.notices):
        note(text)
    return results


def _claims_table(verdicts: Sequence[ClaimVerdict]) -> Grid:
    names = ("claim", "on", "holds", "effect", "spread", "seeds")
    table = table_of(*names, title="the paper's claims on these runs", words=("on", "holds"))
    for v in verdicts:
        doubt = "" if v.clear else ", within noise" if v.seeds > 1 else ", one seed"
        holds = ("yes" if v.holds else "no") + doubt
        spread = f"{v.spread:.4f}" if v.seeds > 1 else "-"
        table.add_row(str(v.claim), v.part, holds, f"{v.effect:+.4f}", spread, str(v.seeds))
    return table


def _sweep_table(tried: Sequence[Tried]) -> Grid:
    keys, by = list(tried[0].values), in_words(tried[0].by)
    names = (*keys, *map(in_words, tried[0].scores), "spread")
    table = table_of(*names, title=f"best {by} first")
    for t in tried:
        scores = (f"{v:.4f}" for v in (*t.scores.values(), t.spread))
        table.add_row(*(in_a_word(t.values[key]) for key in keys), *scores)
    return table
