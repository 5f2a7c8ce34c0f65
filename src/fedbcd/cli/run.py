"""The command line. Thin: it reads a job, starts it, and shows what comes back."""

import contextlib
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from fedbcd import __version__
from fedbcd.cli.backup import backup_command, restore_command
from fedbcd.cli.certs import certs_app
from fedbcd.cli.check import check_command
from fedbcd.cli.commands import add_command
from fedbcd.cli.compare import Played, compare_command, play_seeds
from fedbcd.cli.dashboard import dashboard_command
from fedbcd.cli.data import data_app
from fedbcd.cli.deploy import (
    admit_command,
    coordinator_command,
    device_command,
    dismiss_command,
    log_command,
    server_command,
    status_command,
    up_command,
)
from fedbcd.cli.experiments import paper_command, sweep_command
from fedbcd.cli.kinds import algorithms_command, models_command
from fedbcd.cli.newcomers import personalise_command
from fedbcd.cli.output import (
    INTERRUPTED,
    VERBOSE,
    Data,
    Grid,
    Json,
    Trust,
    Workers,
    console,
    note,
    print_json,
    say,
    say_how_to_go_on,
    say_where,
    screen_for,
    show,
    table_of,
    talk,
    waiting,
)
from fedbcd.cli.overrides import new_folder, override
from fedbcd.cli.places import check_all, claim, places_of
from fedbcd.cli.plan import explain_command, plan_command
from fedbcd.cli.report import export_command, report_command
from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.config import read_toml
from fedbcd.data.measure import DEFAULT
from fedbcd.engines.environment import environment
from fedbcd.engines.interrupts import stop_on_interrupt
from fedbcd.engines.progress import Progress as RunProgress
from fedbcd.engines.replay import replay
from fedbcd.engines.result import Run, best_file
from fedbcd.engines.run import explain_backend
from fedbcd.engines.setup import find_torch_device
from fedbcd.errors import ConfigError, FedBCDError, RecordError, RenamedWarning
from fedbcd.experiments.job import Federations, Job, default_table, parse, read_job_file, seeds_in
from fedbcd.experiments.pictures import draw_curves, draw_run
from fedbcd.experiments.pool import recorded_job
from fedbcd.own import imports
from fedbcd.record.history import ENDS, History, column_of, in_words
from fedbcd.record.names import JOB, REPORT
from fedbcd.record.runfolder import recorded_in
from fedbcd.report.page import write_report
from fedbcd.spec import Cluster
from fedbcd.trackers import Tracker, tracker

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Personal and global models at once, across many devices and several servers (FedBCD, Wu et"
        " al., AAAI 2021)."
    ),
)


def run_command(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A job file (TOML). Without one: the default job, on digits that ship with fedbcd."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Stop after this many rounds, whatever the file says.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Another seed: other splits, delays, batches and initial weights."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for log, checkpoints, models and curves (default: a new one under runs/)."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --out; its own config.toml is used if no file is given.",
        ),
    ] = False,
    data: Data = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Also write the history to tensorboard[=FOLDER], mlflow[=ADDRESS] or"
                " wandb[=PROJECT]; may be repeated."
            )
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Where torch computes: cpu, cuda, cuda:1, ...")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="'simulate', in this process, or 'cluster': devices spread over a Ray cluster."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a running Ray cluster; without it Ray is started here, for this run."
        ),
    ] = None,
    actors: Annotated[
        int | None, typer.Option(help="Shards on the cluster (default: one per CPU).")
    ] = None,
    gpus: Annotated[float, typer.Option(help="GPUs of each actor; a fraction shares one.")] = 0.0,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Play each run with so many seeds, from its own on, in parallel; 1: once (default:"
            " the file's)."
        ),
    ] = None,
    workers: Workers = None,
    trust: Trust = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain-backend", help="Say which backend would compute, and why not another; stop."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train, show progress, and leave a folder with everything that happened."""
    if resume and out is None:
        raise ConfigError("--resume needs --out DIR, the folder of the run to go on with")
    table = _job_table(file, out if resume else None)
    override(table, rounds=rounds, seed=seed, folder=data)
    folder = out if out is not None else new_folder("default" if file is None else file.stem)
    place = {"torch_device": on, "engine": _engine(engine, address, actors, gpus)}
    with imports(allowed=trust):
        jobs = [job.changed(**place) for job in _jobs(table, folder, resume, recorded=file is None)]
        if explain:
            _explain_backends(jobs)
            return
        count = seeds_in(table) if seeds is None else seeds
        if count != 1:
            alone = "--track" if track else "--engine cluster" if engine == "cluster" else ""
            play_seeds(jobs, count, folder, Played(workers, resume, alone), as_json)
            return
        runs = _train_all(jobs, folder, resume, track or [])
    _show(jobs, runs, folder, as_json)


def replay_command(
    log: Annotated[Path, typer.Argument(help="An event log, or the folder of a run.")],
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help=(
                "One device at a time in one thread, as a deployment computes: the digest is that"
                " of its stores."
            ),
        ),
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Recompute a recorded run from its event log, and check that it ends with the same models, bit
    for bit.

    Of runs on a cluster, or planned ahead (on a GPU), only the schedule is compared: their last
    bits are their own.
    """
    with imports(allowed=trust):
        job = recorded_job(log, "use fedbcd.replay()")
    federation = job.make_federation()
    job.use_threads(federation)
    with waiting("replaying ..."):
        result = replay(
            log,
            federation,
            exact=exact,
            torch_device="cpu" if exact else _place_of(job),
            trust=trust,
        )
    if not result["complete"]:
        say("the log has no end: the run was stopped or killed. What it holds was replayed.")
    else:
        same = "schedule" if "engine" in result else "models"
        say(
            f"the same {same} after {result['rounds']} rounds, clock {result['clock']:.1f}: digest"
            f" {result['digest'][:16]}"
        )
    if "engine" in result:
        order = {"ahead": "rounds planned ahead", "cluster": "a cluster"}[result["engine"]]
        say(
            f"digests were not compared: {order} may add up sums in another order than events do,"
            " so that last bits differ"
        )
    print_json(as_json, result)


def _place_of(job: Job) -> str:
    """Where the job ran, if this machine has that; otherwise a CPU, and that is said."""
    name = str(job.spec.torch_device)
    try:
        find_torch_device(name)
    except ConfigError:
        say(
            f"there is no {name!r} here, so this is computed on the CPU, where last bits may differ"
        )
        return "cpu"
    return name


app.add_typer(data_app, name="data")
app.add_typer(certs_app, name="certs")
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run_command,
    "replay": replay_command,
    "models": models_command,
    "algorithms": algorithms_command,
    "paper": paper_command,
    "sweep": sweep_command,
    "compare": compare_command,
    "check": check_command,
    "coordinator": coordinator_command,
    "server": server_command,
    "device": device_command,
    "up": up_command,
    "status": status_command,
    "admit": admit_command,
    "backup": backup_command,
    "restore": restore_command,
    "dismiss": dismiss_command,
    "log": log_command,
    "plan": plan_command,
    "explain": explain_command,
    "report": report_command,
    "export": export_command,
    "personalise": personalise_command,
    "dashboard": dashboard_command,
}
for name, command in COMMANDS.items():
    add_command(app, name, command)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        about = environment()
        of = f"torch {about['torch']}, Python {about['python']}, {about['system']}"
        print(f"{__version__} ({of})")
        raise typer.Exit


def main() -> None:
    """The entry point: our own errors become a sentence and an exit code; anything else is a bug
    and shows its trace.
    """
    keep_freed_memory()
    warnings.simplefilter("always", RenamedWarning)
    warnings.showwarning = _show_warning
    talk(quiet=False, verbose=False)
    try:
        app(prog_name="fedbcd")
    except FedBCDError as error:
        if VERBOSE:
            traceback.print_exc()
        _complain(str(error), error.exit_code)
    except OSError as error:
        _complain(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}",
            RecordError.exit_code,
        )


_show_others = warnings.showwarning


def _show_warning(
    message: Warning | str, category: type[Warning], *more: Any, **where: Any
) -> None:
    """An old name in a file or a call is a note; other warnings look as Python shows them."""
    if issubclass(category, RenamedWarning):
        note(str(message))
    else:
        _show_others(message, category, *more, **where)


def _complain(sentence: str, code: int) -> NoReturn:
    console.quiet = False
    say("error:", style="bold red", end=" ")
    say(sentence)
    sys.exit(code)


# ------------------------------------------------------------------------------------------------
# running
def _job_table(file: Path | None, resumed: Path | None) -> dict[str, Any]:
    if file is None and resumed is not None and (resumed / JOB).is_file():
        return read_toml(resumed / JOB)
    if file is None and resumed is not None:
        raise RecordError(
            f"{resumed} holds no config.toml to resume from; give the job file as well"
        )
    return default_table() if file is None else read_job_file(file)


def _jobs(table: dict[str, Any], folder: Path, resume: bool, recorded: bool) -> list[Job]:
    """The jobs of a table; where they go on and say nothing, they are as the folder says."""
    if not resume:
        return parse(table)
    jobs, there = parse(table, recorded), recorded_in(folder)
    runs = (
        {job.name: job.to_table() for job in parse(there, recorded=True)} if "runs" in there else {}
    )
    places = zip(jobs, places_of(jobs, folder), strict=True)
    return [
        job.going_on(recorded_in(place)).going_on(runs.get(job.name, {})) for job, place in places
    ]


def _engine(
    engine: str | None, address: str | None, actors: int | None, gpus: float
) -> str | Cluster | None:
    if engine == "cluster":
        return Cluster(address=address, actors=actors, gpus=gpus)
    if address is not None or actors is not None or gpus:
        raise ConfigError(
            "--address, --actors and --gpus are about a cluster; add --engine cluster"
        )
    return engine


def _train_all(jobs: list[Job], folder: Path, resume: bool, track: list[str]) -> list[Run]:
    """Train the jobs one after another; stop politely on Ctrl-C."""
    places = places_of(jobs, folder)
    trackers = [
        [tracker(wish, place, job.name, job.to_table()) for wish in track]
        for job, place in zip(jobs, places, strict=True)
    ]
    made = Federations()
    federations = [made.of(job) for job in jobs]
    jobs = [job.settled(federation) for job, federation in zip(jobs, federations, strict=True)]
    if len(jobs) > 1:
        check_all(jobs, federations, places, folder, resume)
        claim(folder, {"runs": [job.to_table() for job in jobs]})
    runs: list[Run] = []
    with stop_on_interrupt(say, whoever=True) as stopped, _progress() as progress:
        for job, federation, place, told in zip(jobs, federations, places, trackers, strict=True):
            how = {"resume": resume, "federation": federation, "should_stop": stopped}
            runs.append(_train_one(job, place, told, progress, **how))
            draw_run(job.name, runs[-1], place)
            if not runs[-1].finished:
                break
    if stopped() and not all(run.finished for run in runs):
        say_how_to_go_on("fedbcd run", folder, [job.to_table() for job in jobs])
        sys.exit(INTERRUPTED)
    return runs


def _train_one(
    job: Job, place: Path, trackers: list[Tracker], progress: Progress, **how: Any
) -> Run:
    bar = progress.add_task(job.name, total=1.0, note="")

    def on_round(p: RunProgress) -> None:
        progress.update(bar, completed=p.fraction, note=_scores(p))
        if VERBOSE and p.row is not None:
            say(f"{job.name}: {_scores(p)}")
        for each in trackers:
            each(p)

    try:
        with contextlib.ExitStack() as stack:
            for each in trackers:
                stack.enter_context(each)
            return job.run(place, on_round=on_round, on_notice=note, **how)
    except FedBCDError:
        progress.remove_task(bar)  # the sentence is enough
        raise


def _explain_backends(jobs: list[Job]) -> None:
    federations = Federations()
    for job in jobs:
        federation = federations.of(job)
        job.use_threads(federation)
        say(f"{job.name}:")
        for choice in explain_backend(federation, job.spec):
            text = (
                f"  not {choice.backend}\n      {choice.reason}"
                if choice.reason
                else f"  -> {choice.backend}"
            )
            say(text)


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(None),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _scores(p: RunProgress) -> str:
    latest, shown = p.latest, [*ENDS.items()][:2]
    ends = " ".join(f"{title} {latest[column_of(each, p.measure)]:.3f}" for each, title in shown)
    scores = f"round {p.round} clock {p.clock:.0f} {ends}"
    if math.isnan(latest.pull):
        return scores
    apart = (
        f" spread {latest.spread:.2g}" if latest.spread > 0 else ""
    )  # with Sync-cloud there is none
    return f"{scores} gap {latest.gap:.2g} pull {latest.pull:.2g}{apart}"


# ------------------------------------------------------------------------------------------------
# showing
def _show(jobs: list[Job], runs: list[Run], folder: Path, as_json: bool) -> None:
    histories = {job.name: run.history for job, run in zip(jobs, runs, strict=True)}
    picture = folder / "curves.png"
    drawn = draw_curves(histories, picture) if len(runs) > 1 else picture.exists()
    screen = screen_for(as_json)
    show(_table(jobs, runs), screen)
    if len(runs) > 1:
        say(_times_to_common_score(histories), screen)
    for job, run in zip(jobs, runs, strict=True):
        for sentence in _decided(run):
            say(f"{job.name}: {sentence}", screen)
    report = folder / REPORT
    write_report(places_of(jobs, folder), report, plan=False)
    where = f"everything is in {folder}, the report in {report}" + (
        f", the curves in {picture}" if drawn else ""
    )
    say_where(drawn, screen, where)
    summaries = [{"title": job.name, **run.summary} for job, run in zip(jobs, runs, strict=True)]
    print_json(as_json, summaries[-1] | {"out": str(folder), "runs": summaries})


def _decided(run: Run) -> Iterator[str]:
    """What ended a run before its budget, and which models are the best, by which column."""
    if stop := run.summary.get("stopped"):
        yield (
            f"stopped after {run.summary['rounds']} rounds: {stop['column']} (on {stop['by']})"
            f" was no better in {stop['patience']} looks"
        )
    if best := run.summary.get("best"):
        yield (
            f"the best by {best['column']} (on {best['by']}) was round {best['round']} with"
            f" {best['value']:.4g}; its models are in {best_file(best['round'])}"
        )


def _table(jobs: list[Job], runs: list[Run]) -> Grid:
    others = sorted({run.summary["measure"] for run in runs} - {DEFAULT})
    measure = runs[0].history.first_measure
    title = f"test {in_words(measure)} at the end"
    title += f" (personal: {', '.join(others)})" if others else ""
    names = ("run", "rounds", "clock", *ENDS.values(), "seconds")
    table = table_of(*names, title=title, titles=("run",))
    for job, run in zip(jobs, runs, strict=True):
        s = run.summary
        scores = (f"{run.history.scores(each, measure)[-1]:.3f}" for each in ENDS)
        table.add_row(
            job.name, str(s["rounds"]), f"{s['clock']:.0f}", *scores, f"{s['seconds']:.1f}"
        )
    return table


def _times_to_common_score(histories: Mapping[str, History]) -> str:
    """When the global models of each run reached a score that those of all of them reach."""
    first = next(iter(histories.values()))
    measure, lower = first.first_measure, first.measures[first.first_measure] == "lower"
    sign = -1 if lower else 1
    curves = {name: [sign * v for v in h.scores("global")] for name, h in histories.items()}
    goal = min(max(filter(math.isfinite, curve), default=math.nan) for curve in curves.values())
    times = {}
    for name, history in histories.items():
        rows = zip(history, curves[name], strict=True)
        times[name] = next((row.clock for row, score in rows if score >= goal), math.nan)
    reached = "; ".join(f"{name}: {clock:.0f}" for name, clock in times.items())
    return f"clock time to a global {in_words(measure)} of {sign * goal:.3f}: {reached}"
