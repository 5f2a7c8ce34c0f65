"""The commands on finished runs: `fedbcd report` and `fedbcd export`. Thin, like `cli`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcd.cli.output import Json, Trust, note, print_json, say, screen_for, waiting
from fedbcd.errors import ConfigError
from fedbcd.own import imports
from fedbcd.record.names import REPORT


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file (default: report.html in the first folder).")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            help="Add the planner's round times for every B, from the runs' own arrivals."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Write one HTML page on one or several runs: curves, devices, the protocol's timeline, where
    the time went, what to try next.
    """
    from fedbcd.report.page import write_report

    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / REPORT
    with waiting("reading ..."):
        count = write_report(runs, target, plan=plan, on_notice=note)
    screen = screen_for(as_json)
    say(f"{count} {'run' if count == 1 else 'runs'} in {target}", screen)
    print_json(as_json, {"report": str(target), "runs": count})


def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    device: Annotated[int | None, typer.Option(help="The personal model of this device.")] = None,
    global_: Annotated[
        bool, typer.Option("--global", help="The global model: the mean of the servers' models.")
    ] = False,
    server: Annotated[
        int | None, typer.Option(help="With --global: the model of this server.")
    ] = None,
    format_: Annotated[
        list[str] | None, typer.Option("--format", help="safetensors, onnx (default: both).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files (default: export in the run's folder)."),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write one model of a run as safetensors and ONNX, checked by loading it again, with a model
    card beside it.
    """
    from fedbcd.export import Choice, export_run

    if (device is None) == (not global_) or (server is not None and not global_):
        raise ConfigError(
            "give --device I for a personal model, or --global (with --server N for one server's)"
        )
    with waiting("exporting ..."), imports(allowed=trust):
        done = export_run(run, Choice(device, server), out, tuple(format_) if format_ else None)
    screen = screen_for(as_json)
    for path in done.files:
        say(
            f"{path}: outputs differ by {done.differences[path.suffix[1:]]:.2g} at most, loaded"
            " again",
            screen,
        )
    say(f"model card: {done.card}", screen)
    print_json(
        as_json,
        {
            "files": list(map(str, done.files)),
            "card": str(done.card),
            "differences": done.differences,
        },
    )
