"""The command `fedbcd personalise`: a model for somebody whom no run knew. Thin, like `cli`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcd.cli.output import Json, Trust, print_json, say, screen_for
from fedbcd.errors import ConfigError
from fedbcd.newcomers import HELD_OUT, STEPS, personalise, samples_in
from fedbcd.record.runfolder import writing_to
from fedbcd.record.tensorfile import write_tensors

FILE = "newcomer.safetensors"


def personalise_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[
        Path, typer.Option(help="The newcomer's inputs and targets: .npz or .safetensors.")
    ],
    steps: Annotated[int, typer.Option(help="Local steps of the device.")] = STEPS,
    test: Annotated[
        Path | None,
        typer.Option(help="Samples to compare on; without them a share of the data is held out."),
    ] = None,
    held_out: Annotated[float, typer.Option(help="This share.")] = HELD_OUT,
    server: Annotated[
        int | None, typer.Option(help="Whose z (default: the mean of the servers' models).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of draws (default: the run's).")] = None,
    out: Annotated[Path, typer.Option(help="Where its model goes.")] = Path(FILE),
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Give a newcomer a personal model from z by the local steps of the run's algorithm, and say
    how it compares with z on samples that it did not train on.
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name a file, such as --out {out / FILE}")
    with writing_to(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    tested = None if test is None else samples_in(test)
    found = personalise(
        run,
        samples_in(data),
        steps=steps,
        test=tested,
        held_out=held_out,
        server=server,
        seed=seed,
        trust=trust,
    )
    with writing_to(out.parent):
        write_tensors(out, found.model.state_dict(), {"format": "pt"})
    screen = screen_for(as_json)
    say(found.sentence, screen)
    say(f"its model is in {out}", screen)
    names = ("steps", "trained_on", "tested_on", "score", "global_score", "error")
    print_json(as_json, {name: getattr(found, name) for name in names} | {"out": str(out)})
