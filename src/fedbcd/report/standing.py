"""How a run stands: it has finished, it goes on, or its log just stops, and then how to go on with
it.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcd.record.names import DEPLOY, FAILURE, JOB
from fedbcd.record.runfolder import is_at_work
from fedbcd.record.timeline import Timeline

MOST = 500  # characters of a failure that are shown


@dataclass(frozen=True)
class RunStanding:
    """A word, `finished`, `running`, `failed` or `stopped`; a sentence; and the command that goes
    on, or tells why not.
    """

    state: str
    words: str
    command: str = ""


def standing(folder: Path, timeline: Timeline | None, job: dict[str, Any]) -> RunStanding:
    if timeline is not None and timeline.end is not None:
        rounds = timeline.end.get("rounds", len(timeline.mixes))
        return RunStanding(
            "finished", f"finished, {rounds:,} {'round' if rounds == 1 else 'rounds'}"
        )
    place = _place(timeline, job)
    if is_at_work(folder):
        return RunStanding("running", place)
    failure = _failure(folder)
    if failure:
        return RunStanding("failed", f"failed at {place}: {failure}", _check(folder))
    command = way_on(folder)
    return RunStanding("stopped", f"stopped at {place}; go on with {command}", command)


def _failure(folder: Path) -> str:
    try:
        return (folder / FAILURE).read_text(encoding="utf-8", errors="replace")[:MOST].strip()
    except OSError:
        return ""


def _check(folder: Path) -> str:
    """The command that tells whether the steps of a run that failed can work at all."""
    job = job_file(folder)
    return "" if job is None else f"fedbcd check {shlex.quote(str(job))}"


def _place(timeline: Timeline | None, job: dict[str, Any]) -> str:
    """How far it is, and of how much where its job says so."""
    run = job.get("run")
    goal, until = (
        (run.get("rounds"), run.get("until_clock")) if isinstance(run, dict) else (None, None)
    )
    rounds, clock = (0, 0.0) if timeline is None else (len(timeline.mixes), timeline.now)
    if not goal and isinstance(until, int | float):
        return f"clock {clock:.4g} of {until:g}"
    whole = f"{goal:,}" if isinstance(goal, int) else goal
    return f"round {rounds:,}" + (f" of {whole}" if goal else "")


def job_file(folder: Path) -> Path | None:
    """Of the run in this folder; several runs of one job lie in its folder."""
    found = (place / JOB for place in (folder.parent, folder))
    return next((path for path in found if path.is_file()), None)


def way_on(folder: Path, rounds: int = 0) -> str:
    """The command that goes on, up to so many rounds where that is said."""
    if (folder / DEPLOY).is_file():
        return f"fedbcd up --resume --out {shlex.quote(str(folder))}"
    job, more = job_file(folder), f" --rounds {rounds}" if rounds else ""
    if job is not None:
        return f"fedbcd run --resume{more} --out {shlex.quote(str(job.parent))}"
    more = f"rounds={rounds}, " if rounds else ""
    return f"train(..., {more}out={str(folder)!r}, resume=True)"
