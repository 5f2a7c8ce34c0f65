"""The commands that fetch data sets and look at them: `fedbcd data fetch` and `fedbcd data show`.
Thin, like `cli`.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedbcd.cli.commands import add_command
from fedbcd.cli.kinds import names_of
from fedbcd.cli.output import (
    Grid,
    Json,
    console,
    print_json,
    say,
    say_where,
    screen_for,
    show,
    table_of,
)
from fedbcd.config import choose
from fedbcd.data.datasets import DATASETS, load_dataset
from fedbcd.data.fetch import fetch
from fedbcd.data.files import VARIABLE
from fedbcd.data.partition import PARTITIONS, Partition, Partitioner
from fedbcd.data.preview import draw_partition, summarise, summarise_partition
from fedbcd.data.samples import LoadedDataset
from fedbcd.errors import ConfigError

data_app = typer.Typer(
    no_args_is_help=True, help="Fetch data sets; look at them and at their splits."
)


def fetch_command(
    name: Annotated[
        str,
        typer.Argument(
            help="mnist, fashion-mnist, kmnist, emnist or cifar10.",
            autocompletion=names_of(DATASETS),
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help=f"Folder to put it into (default: {VARIABLE}, else data).")
    ] = None,
    url_base: Annotated[
        str | None, typer.Option(help="Another mirror: the address up to the file names.")
    ] = None,
) -> None:
    """Download a data set, check it, and lay it out for its reader. After an interruption the same
    command goes on where it was.
    """
    folder = data or Path(os.environ.get(VARIABLE) or "data")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=done, total=total)

        files = fetch(name, folder, base=url_base, progress=show)
    say(
        f"{name} is complete: {len(files)} files in {files[0].parent}. Use it with --data {folder}",
        Console(),
    )


def show_command(
    name: Annotated[
        str,
        typer.Argument(help="A data set; see fedbcd models.", autocompletion=names_of(DATASETS)),
    ],
    data: Annotated[
        Path | None, typer.Option(help=f"Where its files are (default: {VARIABLE}).")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help='How to split it, e.g. "dirichlet alpha=0.3" or "diversity labels=3 samples=60".'
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="Over how many devices.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    manifest: Annotated[
        Path | None, typer.Option(help="A split that was saved, instead of --partition.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for manifest.json and partition.png.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a data set holds and how a split shares it out; save the split and draw it."""
    if partition is not None and manifest is not None:
        raise ConfigError("--partition and --manifest both name a split; give one of them")
    if out is not None and partition is None and manifest is None:
        raise ConfigError('--out saves a split; say which with --partition, e.g. --partition "iid"')
    loaded = load_dataset(name, data)
    summary: dict[str, Any] = {"name": name, **summarise(loaded)}
    split = _split(loaded, partition, devices, seed, manifest)
    if split is not None:
        summary["partition"] = summarise_partition(split)
    screen = screen_for(as_json)
    show(_table(summary), screen)
    if out is not None and split is not None:
        _save(split, loaded, out, f"{name}: {partition or manifest}", screen)
    print_json(as_json, summary)


def _split(
    loaded: LoadedDataset, partition: str | None, devices: int, seed: int, manifest: Path | None
) -> Partition | None:
    if manifest is not None:
        return Partition.load(manifest, loaded.train.targets)
    if partition is None:
        return None
    return _partitioner(partition).split(loaded.train.targets, devices, seed, loaded.columns)


def _partitioner(text: str) -> Partitioner:
    """From "name key=value ...": values as in a job file; what is no TOML value is a text."""
    name, *settings = text.split() or [""]
    table: dict[str, Any] = {"name": name}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            table[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            table[key] = value
    return choose(PARTITIONS, table, "partition")


def _table(summary: dict[str, Any]) -> Grid:
    table = table_of("", "", words=("",), plain=True)
    shape = "x".join(map(str, summary["input"]))
    table.add_row(
        "data set",
        f"{summary['name']}: {summary['train']} for training, {summary['test']} for testing",
    )
    table.add_row("inputs", f"{shape}, {summary['dtype']}")
    table.add_row(
        "classes",
        f"{summary['classes']}; training samples of each: {min(summary['per_class'])} to"
        f" {max(summary['per_class'])}",
    )
    if summary["columns"]:
        table.add_row("columns", ", ".join(summary["columns"]))
    if "partition" in summary:
        part = summary["partition"]
        for key in ("samples", "labels"):
            table.add_row(
                f"{key} per device", "least {:g}, median {:g}, most {:g}".format(*part[key])
            )
        table.add_row(
            "devices",
            f"{part['devices']}; they own {part['used']} different samples, {part['in_all']}"
            " counting shared ones",
        )
        table.add_row("sha256 of the split", part["indices_sha256"][:16])
    return table


def _save(split: Partition, loaded: LoadedDataset, out: Path, title: str, screen: Console) -> None:
    split.save(out / "manifest.json")
    drawn = draw_partition(split, loaded.train.targets, out / "partition.png", title)
    picture = f", its picture in {out / 'partition.png'}" if drawn else ""
    say_where(drawn, screen, f"the split is in {out / 'manifest.json'}{picture}")


for _name, _command in (
    ("fetch", fetch_command),
    ("show", show_command),
):
    add_command(data_app, _name, _command)
