"""The command line. Thin: it reads a job, starts it, and shows what comes back."""

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedbcd import __version__
from fedbcd.algorithm.variants import ALGORITHMS
from fedbcd.config import dump_toml, read_toml
from fedbcd.data.datasets import DATASETS
from fedbcd.engines.run import Progress as RunProgress
from fedbcd.engines.run import Run, replay
from fedbcd.errors import ConfigError, FedBCDError, RecordError
from fedbcd.eventlog import LogReader
from fedbcd.experiments.job import Job, default_table, parse
from fedbcd.experiments.pictures import draw_curves
from fedbcd.models import MODELS
from fedbcd.protocol.clouds import CLOUDS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personal and global models at once, across many devices and several servers (FedBCD, Wu et al., AAAI 2021).",
)
console = Console(stderr=True)
INTERRUPTED = 130


@app.command("run")
def run_command(
    file: Annotated[
        Path | None,
        typer.Argument(help="A job file (TOML). Without one: the default job, on digits that ship with fedbcd."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds, whatever the file says.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed: other splits, delays, batches and initial weights.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for log, checkpoints, models and curves [default: a new one under runs/]."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out; its own config.toml is used if no file is given."),
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Where the files of the data set are, e.g. for MNIST.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one summary object on the last line.")] = False,
) -> None:
    """Train, show progress, and leave a folder with everything that happened."""
    if resume and out is None:
        raise ConfigError("--resume needs --out DIR, the folder of the run to go on with")
    table = _job_table(file, out if resume else None)
    _override(table, rounds=rounds, seed=seed, folder=data)
    jobs = parse(table)
    folder = out if out is not None else _new_folder(file)
    runs = _train_all(jobs, table, folder, resume)
    _show(jobs, runs, folder, as_json)


@app.command("replay")
def replay_command(
    log: Annotated[Path, typer.Argument(help="An event log, or the folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one summary object on the last line.")] = False,
) -> None:
    """Recompute a recorded run from its event log, and check that it ends with the same models, bit for bit."""
    path = log / "events.jsonl" if log.is_dir() else log
    table = LogReader(path).header.get("job")
    if not table:
        raise RecordError(f"{path} was not made by 'fedbcd run', so it does not name its data and model; use fedbcd.replay()")
    with console.status(f"replaying {path}"):
        result = replay(path, parse(_without_none(table))[0].make_federation())
    if not result["complete"]:
        console.print("the log has no end: the run was stopped or killed. What it holds was replayed.")
    else:
        console.print(f"the same models after {result['rounds']} rounds, clock {result['clock']:.1f}: digest {result['digest'][:16]}")
    if as_json:
        print(json.dumps(result))


@app.command("models")
def models_command() -> None:
    """List the networks and data sets that a job file can name."""
    for title, registry in (("model", MODELS), ("data set", DATASETS)):
        table = Table(title, "what it is", box=None, header_style="bold")
        for name, kind in registry.items():
            table.add_row(name, _first_line(kind))
        Console().print(table)
    Console().print('A model of your own: name = "package.module:factory".')


@app.command("algorithms")
def algorithms_command() -> None:
    """List the algorithms and clouds that a job file can name, with their settings."""
    for title, registry in (("algorithm", ALGORITHMS), ("cloud", CLOUDS)):
        table = Table(title, "what it is", "settings", box=None, header_style="bold")
        for name, kind in registry.items():
            table.add_row(name, _first_line(kind), ", ".join(f.name for f in fields(kind) if f.init))
        Console().print(table)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point: our own errors become a sentence and an exit code; anything else is a bug and shows its trace."""
    try:
        app()
    except FedBCDError as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


# ------------------------------------------------------------------------------------------------------------------ running
def _job_table(file: Path | None, resumed: Path | None) -> dict[str, Any]:
    if file is None and resumed is not None and (resumed / "config.toml").is_file():
        return read_toml(resumed / "config.toml")
    if file is None and resumed is not None:
        raise RecordError(f"{resumed} holds no config.toml to resume from; give the job file as well")
    return default_table() if file is None else read_toml(file)


def _override(table: dict[str, Any], rounds: int | None, seed: int | None, folder: Path | None) -> None:
    run = table.setdefault("run", {})
    if rounds is not None:
        for section in (run, *(entry["run"] for entry in table.get("runs", ()) if isinstance(entry.get("run"), dict))):
            section.pop("until_clock", None)
        run["rounds"] = rounds
    if seed is not None:
        run["seed"] = seed
    if folder is not None:
        table.setdefault("data", {})["folder"] = str(folder)


def _new_folder(file: Path | None) -> Path:
    stem = "default" if file is None else file.stem
    number = 1
    while (folder := Path("runs") / f"{stem}-{number:03d}").exists():
        number += 1
    return folder


def _train_all(jobs: list[Job], table: dict[str, Any], folder: Path, resume: bool) -> list[Run]:
    """Train the jobs one after another; stop politely on Ctrl-C."""
    if len(jobs) > 1:
        _claim(folder, table, resume)
    runs: list[Run] = []
    with _stop_on_interrupt() as stopped, _progress() as progress:
        for job in jobs:
            bar = progress.add_task(job.name, total=1.0, note="")
            place = folder if len(jobs) == 1 else folder / _slug(job.name)
            run = job.start(
                place,
                resume=resume,
                on_round=lambda p, bar=bar: progress.update(bar, completed=p.fraction, note=_note(p)),
                on_notice=lambda text: console.print(f"note: {text}"),
                should_stop=stopped,
            )
            (place / "config.toml").write_text(dump_toml(job.to_table()))
            draw_curves({job.name: run.history}, place / "curves.png")
            runs.append(run)
            if not run.finished:
                break
    if stopped() and not all(run.finished for run in runs):
        console.print(f"stopped. Go on with: fedbcd run --resume --out {folder}", soft_wrap=True)
        sys.exit(INTERRUPTED)
    return runs


def _claim(folder: Path, table: dict[str, Any], resume: bool) -> None:
    """Make the folder of several runs, unless something else is there."""
    config = folder / "config.toml"
    if folder.exists() and any(folder.iterdir()) and not (resume and config.is_file()):
        raise RecordError(f"{folder} is not empty; choose a new folder with --out, or go on with --resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(dump_toml(table))
    except OSError as error:
        raise RecordError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Any]:
    """The first Ctrl-C ends the run after its present round, with a checkpoint; a second one ends it at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True
        console.print("stopping after this round ...")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _note(p: RunProgress) -> str:
    latest = p.latest
    return f"round {p.round} clock {p.clock:.0f} global {latest.global_accuracy:.3f} personal {latest.personal_accuracy:.3f}"


# ------------------------------------------------------------------------------------------------------------------ showing
def _show(jobs: list[Job], runs: list[Run], folder: Path, as_json: bool) -> None:
    histories = {job.name: run.history for job, run in zip(jobs, runs, strict=True)}
    picture = folder / "curves.png"
    drawn = draw_curves(histories, picture)
    screen = console if as_json else Console()
    screen.print(_table(jobs, runs))
    if len(runs) > 1:
        screen.print(_lesson(histories), soft_wrap=True)
    screen.print(f"everything is in {folder}" + (f", the curves in {picture}" if drawn else ""), soft_wrap=True, highlight=False)
    if not drawn:
        screen.print("no picture was drawn: pip install 'fedbcd[report]' brings matplotlib")
    if as_json:
        summaries = [{"title": job.name, **run.summary} for job, run in zip(jobs, runs, strict=True)]
        print(json.dumps(summaries[-1] | {"out": str(folder), "runs": summaries}))


def _table(jobs: list[Job], runs: list[Run]) -> Table:
    table = Table(header_style="bold", title="test accuracy at the end", title_justify="left")
    table.add_column("run", no_wrap=True)
    for title in ("rounds", "clock", "global", "personal", "worst 10 %", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for job, run in zip(jobs, runs, strict=True):
        s, last = run.summary, run.history.last
        scores = (f"{v:.3f}" for v in (last.global_accuracy, last.personal_accuracy, last.worst_decile))
        table.add_row(job.name, str(s["rounds"]), f"{s['clock']:.0f}", *scores, f"{s['seconds']:.1f}")
    return table


def _lesson(histories: dict[str, Any]) -> str:
    """When each run reached a global accuracy that all of them reach."""
    goal = min(max(history.column("global_accuracy")) for history in histories.values())
    times = {name: next(row.clock for row in history if row.global_accuracy >= goal) for name, history in histories.items()}
    reached = "; ".join(f"{name}: {clock:.0f}" for name, clock in times.items())
    return f"clock time to a global accuracy of {goal:.3f}: {reached}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def _without_none(table: Any) -> Any:
    if isinstance(table, dict):
        return {k: _without_none(v) for k, v in table.items() if v is not None}
    return table


if __name__ == "__main__":
    main()
