"""Where the runs of a job go, and what is refused before the first begins."""

import re
from pathlib import Path
from typing import Any

from fedbcd.config import dump_toml
from fedbcd.data.federation import Federation
from fedbcd.errors import RecordError
from fedbcd.experiments.job import Job
from fedbcd.record.names import JOB, LOG
from fedbcd.record.runfolder import writing_to
from fedbcd.record.tensorfile import write_whole


def places_of(jobs: list[Job], folder: Path) -> list[Path]:
    """Where each job's files go: one job in the folder itself, several in folders named after
    them.
    """
    if len(jobs) == 1:
        return [folder]
    places: list[Path] = []
    for number, job in enumerate(jobs, start=1):
        place = folder / (slug(job.name) or "run")
        places.append(place if place not in places else folder / f"{place.name}-{number}")
    return places


def check_all(
    jobs: list[Job], federations: list[Federation], places: list[Path], folder: Path, resume: bool
) -> None:
    """Refuse several runs together, before the first begins: the last may be hours away."""
    if resume and (folder / LOG).exists():
        raise RecordError(
            f"{folder} holds one run, but the job has {len(jobs)}; give the job of that run, or"
            " another folder"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (resume and (folder / JOB).is_file()):
        raise RecordError(
            f"{folder} is not empty; choose a new folder with --out, or go on with --resume"
        )
    for job, federation, place in zip(jobs, federations, places, strict=True):
        job.check(federation, place, resume)


def check_series(folder: Path) -> None:
    """Refuse to leave the tables and pictures of many runs where those of another are."""
    if (folder / LOG).exists() or (folder / JOB).exists():
        raise RecordError(f"{folder} holds a run already; choose another folder with --out")


def claim(folder: Path, table: dict[str, Any]) -> None:
    """Make the folder of several runs, with all that they are set to."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / JOB, dump_toml(table).encode())


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
