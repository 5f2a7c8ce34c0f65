"""What the command line says goes before what a job file says."""

from pathlib import Path
from typing import Any

from fedbcd.experiments.job import Job, default_table, parse, read_job_file


def override(
    table: dict[str, Any],
    *,
    rounds: int | None = None,
    seed: int | None = None,
    folder: Path | None = None,
) -> None:
    """What the command line says goes before what the file says, in every run of it. Checking the
    result is `parse`'s work.
    """
    if rounds is not None:
        _set(table, "run", {"rounds": rounds}, unset=("until_clock",))
    if seed is not None:
        _set(table, "run", {"seed": seed})
    if folder is not None:
        _set(table, "data", {"folder": str(folder)})


def read_jobs(file: Path | None, data: Path | None) -> list[Job]:
    table = default_table() if file is None else read_job_file(file)
    override(table, folder=data)
    return parse(table)


def _set(
    table: dict[str, Any], section: str, values: dict[str, Any], unset: tuple[str, ...] = ()
) -> None:
    entries = table.get("runs", [])
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get(section), dict):
            entry[section] = {k: v for k, v in entry[section].items() if k not in (*values, *unset)}
    old = table.get(section, {})
    if isinstance(old, dict):
        table[section] = {k: v for k, v in old.items() if k not in unset} | values


def new_folder(stem: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{stem}-{number:03d}").exists():
        number += 1
    return folder
