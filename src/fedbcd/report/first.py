"""The first screen: what runs came to, in a sentence, four numbers, and what to do next.

A pure function of the views of runs, so that it can be read without a page: who is best, against
what, at what cost, and what is wrong.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedbcd.report.next_steps import Step, next_steps
from fedbcd.report.numbers import (
    in_bytes,
    in_change,
    in_score,
    in_seconds,
    in_short,
    in_time,
    listed,
)
from fedbcd.report.verdict import MOST_NAMED, Group, Reference, Verdict, groups_of, verdict_on

View = dict[str, Any]
SMALL = 5e-3  # a difference that is none, relative; of shares it is seen as ±0


@dataclass(frozen=True)
class Tile:
    """A number, how it compares, and what it costs."""

    label: str
    value: str
    change: str = ""
    note: str = ""
    tone: str = ""  # good, bad, or neither


@dataclass(frozen=True)
class Card:
    """What is wrong, and the command that helps."""

    words: str
    command: str = ""


def first_screen(runs: Sequence[View]) -> View:
    """Of these runs, as plain data for a page."""
    cards, steps, tiles = cards_of(runs), list[Step](), list[Tile]()
    found = Verdict("none", "There is no run here yet.")
    compares = len({run["summary"]["metric"] for run in runs if run["measures"]}) < 2
    if runs:
        groups = groups_of(runs)
        found = verdict_on(groups)
        subject = found.subject
    if runs and compares:
        tiles = _progress(groups[0]) if subject is None else _tiles(subject, found.reference)
        steps = next_steps([run for one in _first(groups, subject) for run in one.runs])
    drawn = (
        [run["key"] for run in found.subject.runs if run.get("personal")] if found.subject else []
    )
    return {
        "tone": found.tone,
        "words": found.words,
        "compares": compares,
        "facts": _facts(runs) if runs else "",
        "tiles": [asdict(tile) for tile in tiles],
        "cards": [asdict(card) for card in cards],
        "next": [asdict(step) for step in steps],
        "devices": drawn[0] if drawn else None,
    }


def _first(groups: Sequence[Group], subject: Group | None) -> list[Group]:
    """The group that the page is about goes first."""
    return sorted(groups, key=lambda group: group is not subject)


# ------------------------------------------------------------------------------------------------
# the numbers
TITLES = {"personal": "Personal", "worst": "Worst tenth", "global": "Global"}


def _tiles(subject: Group, reference: Reference | None) -> list[Tile]:
    tiles = []
    for name, title in TITLES.items():
        mine = subject.mean(name)
        if mine is None or (name == "global" and subject.kind == "alone"):
            continue
        other = reference.scores.get(name) if reference else None
        if reference and reference.group and reference.group.kind == "alone" and name == "global":
            other = None
        tiles.append(_tile(f"{title} {subject.summary['metric']}", subject, mine, other, reference))
    return [*tiles[:3], _cost(subject, reference)]


def _tile(label: str, group: Group, mine: float, other: float | None, to: Reference | None) -> Tile:
    value = in_score(mine, group.unit)
    if other is None or to is None:
        return Tile(label, value)
    by = mine - other
    by = by if group.unit == "share" or abs(by) > SMALL * abs(other) else 0.0
    tone = "" if abs(by) < 5e-4 else "good" if group.sign * by > 0 else "bad"
    return Tile(label, value, in_change(by, group.unit), f"against {to.name}", tone)


def _cost(subject: Group, reference: Reference | None) -> Tile:
    """Clock to a score that both reach, and what was sent."""
    run, summary = subject.runs[0], subject.summary
    kind = str(summary.get("time", "virtual"))
    sent = f"{in_bytes(summary['bytes'])} sent" if summary.get("values") else ""
    title = "Time" if kind == "seconds" else "Clock"
    whole = Tile(title, in_time(summary["clock"], kind), f"{summary['rounds']:,} rounds", sent)
    other = reference.group.runs[0] if reference and reference.group else None
    if other is None or not run["measures"] or other["summary"].get("time") != summary.get("time"):
        return whole
    column = run["measures"][0]["personal"]
    both = [_best(one, column, subject.sign) for one in (run, other)]
    if None in both:
        return whole
    goal = subject.sign * min(subject.sign * v for v in both if v is not None)
    mine, theirs = (_reached(one, column, goal, subject.sign) for one in (run, other))
    theirs_sent = other["summary"].get("bytes") or 0
    ratio = summary["bytes"] / theirs_sent if theirs_sent else 1.0
    times = f", {in_short(float(f'{ratio:.2g}'))} × as much" if abs(ratio - 1) > 0.05 else ""
    return Tile(
        f"{title} to {in_score(goal, subject.unit)}",
        in_time(mine, kind),
        f"against {in_time(theirs, kind)}",
        f"{sent}{times}" if sent else "",
    )


def _best(run: View, column: str, sign: int) -> float | None:
    found = [value for value in run["history"].get(column, ()) if value is not None]
    return max(found, key=lambda value: sign * value, default=None)


def _reached(run: View, column: str, goal: float, sign: int) -> float:
    """When it first was as good; at a score that it reaches."""
    return next(
        float(clock)
        for clock, value in zip(run["history"]["clock"], run["history"][column], strict=False)
        if value is not None and sign * value >= sign * goal - 1e-12
    )


def _progress(group: Group) -> list[Tile]:
    """Of runs without scores."""
    summary = group.summary
    if not summary.get("rounds"):
        return []
    kind = str(summary.get("time", "virtual"))
    share = summary.get("fraction")
    tiles = [
        Tile(
            "Rounds",
            f"{summary['rounds']:,}",
            "" if share in (None, 1.0) else f"{100 * share:.0f} %",
        ),
        Tile("Clock", in_time(summary["clock"], kind)),
        Tile("Devices", f"{summary['devices']:,}", f"{summary['servers']:,} servers"),
    ]
    sent = summary.get("values") and summary.get("bytes")
    return [*tiles, *([Tile("Models sent", in_bytes(summary["bytes"]))] if sent else [])]


# ------------------------------------------------------------------------------------------------
# what stands above and beside it
def _facts(runs: Sequence[View]) -> str:
    """The job in a line: data, devices, seeds, how long it took."""
    settings = [dict(run["settings"]) for run in runs]
    data = _one({table.get("data.name", "") for table in settings})
    sizes = {(run["summary"]["devices"], run["summary"]["servers"]) for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    took = [run["summary"].get("seconds") for run in runs]
    cores = _one({run["environment"].get("cores", "") for run in runs})
    parts = [
        runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs",
        data,
        *(
            f"{devices:,} devices, {servers:,} servers"
            for devices, servers in sizes
            if len(sizes) == 1 and devices
        ),
        _seeds(runs, seeds),
        (in_seconds(sum(took)) + (f" on {cores} cores" if cores else "")) if all(took) else "",
    ]
    return " · ".join(part for part in parts if part)


def _seeds(runs: Sequence[View], seeds: Sequence[int]) -> str:
    most = max(run.get("series", {}).get("seeds", 1) for run in runs)
    if most > 1:
        return f"means of {most} seeds; curves and devices of seed {seeds[0]}"
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _one(values: set[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def cards_of(runs: Sequence[View]) -> list[Card]:
    """What keeps the page from being read as it stands."""
    if not runs:
        return [
            Card("A run leaves its folder below runs. This one takes half a minute:", "fedbcd run")
        ]
    cards = [
        Card(f"{run['damage']}.", run["way_on"] if run["summary"]["rounds"] else "fedbcd run")
        for run in runs
        if run.get("damage")
    ]
    tables = [dict(run["settings"]) for run in runs]
    measures = {run["summary"]["metric"] for run in runs if run["measures"]}
    commands = "\n".join(f"fedbcd report {run['folder']}" for run in runs[:MOST_NAMED])
    if len(measures) > 1:
        each = listed([f"{run['name']}: {_metric(run)}" for run in runs[:MOST_NAMED]])
        words = f"These runs share no measure ({each}), so nothing of them compares. Look at each:"
        return [*cards, Card(words, commands)]
    data = {table["data.name"] for table in tables if "data.name" in table}
    if len(data) > 1:
        of = listed(sorted(data))
        words = f"These runs are of different data ({of}): scores do not compare. Look at each:"
        return [*cards, Card(words, commands)]
    return cards


def _metric(run: View) -> str:
    return str(run["summary"]["metric"]).replace("_", " ")
