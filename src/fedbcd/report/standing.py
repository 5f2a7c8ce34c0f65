"""How a run stands: it has finished, it goes on, or its log just stops, and then how to go on with
it.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcd.record.names import DEPLOY, JOB
from fedbcd.record.runfolder import is_at_work
from fedbcd.record.timeline import Timeline


@dataclass(frozen=True)
class RunStanding:
    """A word, `finished`, `running` or `stopped`, and a sentence."""

    state: str
    words: str


def standing(folder: Path, timeline: Timeline | None, job: dict[str, Any]) -> RunStanding:
    if timeline is not None and timeline.end is not None:
        rounds = timeline.end.get("rounds", len(timeline.mixes))
        return RunStanding("finished", f"finished, {rounds} {'round' if rounds == 1 else 'rounds'}")
    place = _place(timeline, job)
    if is_at_work(folder):
        return RunStanding("running", place)
    return RunStanding("stopped", f"stopped at {place}; go on with {_way_on(folder)}")


def _place(timeline: Timeline | None, job: dict[str, Any]) -> str:
    """How far it is, and of how much where its job says so."""
    run = job.get("run")
    goal, until = (
        (run.get("rounds"), run.get("until_clock")) if isinstance(run, dict) else (None, None)
    )
    rounds, clock = (0, 0.0) if timeline is None else (len(timeline.mixes), timeline.now)
    if not goal and isinstance(until, int | float):
        return f"clock {clock:.4g} of {until:g}"
    return f"round {rounds}" + (f" of {goal}" if goal else "")


def _way_on(folder: Path) -> str:
    if (folder / DEPLOY).is_file():
        return f"fedbcd up --resume --out {shlex.quote(str(folder))}"
    whole = (
        folder.parent if (folder.parent / JOB).is_file() else folder
    )  # several runs of one job lie in its folder
    if (whole / JOB).is_file():
        return f"fedbcd run --resume --out {shlex.quote(str(whole))}"
    return f"train(..., out={str(folder)!r}, resume=True)"
