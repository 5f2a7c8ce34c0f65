"""What to do next: the first remarks on runs, each with the command or the setting that does it."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcd.report import advice as rules
from fedbcd.report.standing import way_on

View = dict[str, Any]
MOST = 3
LONGER = 1.5  # times as many rounds, of a run that was still rising
SEEDS = 5
FURTHER = 2.0  # times the penalty


@dataclass(frozen=True)
class Step:
    """A remark, and what to type."""

    words: str
    command: str = ""


def next_steps(runs: Sequence[View]) -> list[Step]:
    """The most useful of these runs' remarks, each kind once; the first run goes first."""
    found: list[Step] = []
    broken = any(run["summary"].get("state") in ("stopped", "failed") for run in runs)
    said: set[rules.Rule] = set()
    for run in runs:
        for rule in (rules.stopped,) if broken else rules.RULES:
            words = next(iter(rules.remarks_by(rule, run)), None)
            if words is None or rule in said:
                continue
            said.add(rule)
            text = f"{run['name']}: {words}." if len(runs) > 1 else _sentence(words)
            found.append(Step(text, COMMANDS.get(rule, _none)(run)))
    return [*found[: MOST - len(_always(runs))], *_always(runs)][:MOST]


def _always(runs: Sequence[View]) -> list[Step]:
    """What holds of every run with one seed."""
    if not runs or len({run["seed"] for run in runs}) > 1 or any(run.get("series") for run in runs):
        return []
    if any(run["summary"]["state"] != "finished" for run in runs):
        return []
    job, words = _job(runs[0]), "one seed only: several tell what is by chance"
    out = Path(runs[0]["folder"]).parent if len(runs) > 1 else Path(runs[0]["folder"])
    command = f"fedbcd run {job} --seeds {SEEDS} --out {shlex.quote(str(out))}-seeds" if job else ""
    return [Step(_sentence(words), command or f"fb.compare(federation, methods, seeds={SEEDS})")]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _job(run: View) -> str:
    return shlex.quote(run["job_file"]) if run.get("job_file") else ""


def _none(_: View) -> str:
    return ""


def _go_on(run: View) -> str:
    return str(run.get("way_on", ""))


def _longer(run: View) -> str:
    rounds = round(LONGER * run["summary"]["rounds"])
    if run["summary"].get("time") == "seconds":  # a deployment that has ended begins anew
        return f"fedbcd up {_job(run)} --rounds {rounds}" if _job(run) else ""
    return way_on(Path(run["folder"]), rounds)


def _plan(run: View) -> str:
    return f"fedbcd plan {_job(run)}" if _job(run) else ""


def _explain(run: View) -> str:
    return f"fedbcd explain {shlex.quote(run['folder'])}"


def _check(run: View) -> str:
    return f"fedbcd check {_job(run)}" if _job(run) else ""


def _penalty(run: View) -> str:
    now = rules.setting(run, "algorithm.penalty")
    return f"penalty = {FURTHER * float(now):g}" if _is_number(now) else ""


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


COMMANDS: dict[rules.Rule, Callable[[View], str]] = {
    rules.stopped: _go_on,
    rules.fallen: _check,
    rules.rising: _longer,
    rules.waiting: _plan,
    rules.slowest: _explain,
    rules.losers: _penalty,
    rules.slow_devices: _explain,
    rules.certificate: _check,
}
