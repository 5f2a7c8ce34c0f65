"""What runs came to, in a sentence: who is best, against what, who gains, and what went wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedbcd.record.history import ENDS
from fedbcd.report.numbers import in_score, listed

View = dict[str, Any]
CLOSE, CLOSE_SHARE = 0.02, 0.005  # scores that count as alike: relative; of shares
LOST = 0.5  # of what a run had gained: it has failed
FEWEST = 3  # tests that show whether a run has fallen
MOST_NAMED = 5
THEIRS = "their servers’ models"


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed only."""

    name: str
    runs: tuple[View, ...]

    @cached_property
    def summary(self) -> View:
        return dict(self.runs[0]["summary"])

    @property
    def unit(self) -> str:
        return str(self.summary.get("unit", ""))

    @property
    def sign(self) -> int:
        return -1 if self.summary.get("better") == "lower" else 1

    @property
    def kind(self) -> str:
        """`alone`, each device by itself; `one` model for all; or `own` models, made together."""
        if self.summary.get("algorithm") == "local":
            return "alone"
        return "own" if self.summary.get("own", True) else "one"

    @property
    def seeds(self) -> int:
        """That are known: of these runs, or of the series of which they are the first."""
        return int(max(run.get("series", {}).get("seeds", len(self.runs)) for run in self.runs))

    def mean(self, name: str) -> float | None:
        """Of the runs' ends, over all seeds that are known."""
        ends = [{**run["summary"], **run.get("series", {})}.get(name) for run in self.runs]
        known = [end for end in ends if end is not None]
        return sum(known) / len(known) if known and len(known) == len(self.runs) else None

    @cached_property
    def score(self) -> float | None:
        personal = self.mean("personal")
        return self.mean("global") if personal is None else personal

    @property
    def rank(self) -> float:
        return self.sign * (self.score if self.score is not None else 0.0)

    @property
    def ends(self) -> dict[str, float | None]:
        return {str(name): self.mean(str(name)) for name in ENDS}

    @cached_property
    def gains(self) -> list[View]:
        found = [(run.get("personal") or {}).get("gain") for run in self.runs]
        return [gain for gain in found if gain]

    def said(self, value: float | None = None) -> str:
        return f"{self.name} {in_score(self.score if value is None else value, self.unit)}"

    def is_near(self, other: float | None) -> bool:
        if self.score is None or other is None:
            return False
        bound = CLOSE_SHARE if self.unit == "share" else CLOSE * abs(other)
        return abs(self.score - other) < bound

    @property
    def who(self) -> str:
        """How many devices gain and lose, as a sentence."""
        if not self.gains:
            return ""
        better, worse, same = (
            sum(gain[name] for gain in self.gains) for name in ("better", "worse", "same")
        )
        losing = "none loses" if not worse else f"{worse:,} {'loses' if worse == 1 else 'lose'}"
        of = f" of seed {self.runs[0]['seed']}" if self.seeds > len(self.runs) else ""
        return f" {better:,} of {better + worse + same:,} devices{of} gain, {losing}."


@dataclass(frozen=True)
class Reference:
    """What the best run is compared with: another group, or what its devices have without it."""

    name: str
    scores: dict[str, float | None]
    group: Group | None = None


@dataclass(frozen=True)
class Verdict:
    """The sentence; `good`, `bad`, `live` or `none`; the group that it is about, and against
    what.
    """

    tone: str
    words: str
    subject: Group | None = None
    reference: Reference | None = None


def groups_of(runs: Sequence[View]) -> list[Group]:
    """In order, called by what differs where they have one name."""
    found: dict[str, list[View]] = {}
    for run in runs:
        found.setdefault(run["group"], []).append(run)
    again = Counter(same[0]["name"] for same in found.values())
    return [Group(_name(same[0], again), tuple(same)) for same in found.values()]


def _name(run: View, again: Counter[str]) -> str:
    alike = again[run["name"]] > 1
    return str((run.get("differs") or run["folder"]) if alike else run["name"])


def verdict_on(groups: Sequence[Group]) -> Verdict:
    scored = [group for group in groups if group.score is not None]
    standing = _standing([run for group in groups for run in group.runs if not run.get("damage")])
    if len({(group.summary.get("metric"), group.sign) for group in scored}) > 1:
        names = [f"{one.name} by {one.summary['metric']}" for one in scored[:MOST_NAMED]]
        return Verdict("none", f"Nothing to compare: {listed(names)}.")
    found = _with_failures(scored) if scored else _untested(groups)
    if standing is None:
        return found
    tone = "bad" if found.tone == "bad" and scored else standing.tone
    so_far = found.words.replace(" ends at ", " is at ")
    words = f"{standing.words} {so_far}" if scored else standing.words
    return replace(found, tone=tone, words=words)


def _untested(groups: Sequence[Group]) -> Verdict:
    if all(run.get("damage") for group in groups for run in group.runs):
        return Verdict("bad", "This log cannot be read.")
    words = str(groups[0].summary["standing"])
    return Verdict("none", f"{words[0].upper()}{words[1:]}; nothing was tested.")


def _standing(runs: Sequence[View]) -> Verdict | None:
    """Where not all runs have finished: which, and where."""
    states = {
        "failed": ("bad", ""),
        "stopped": ("bad", ""),
        "silent": ("bad", "no answer: "),
        "running": ("live", "goes on: "),
    }
    for state, (tone, verb) in states.items():
        found = [run for run in runs if run["summary"].get("state") == state]
        if not found:
            continue
        where = found[0]["summary"]["standing"].partition(";")[0]
        share = found[0]["summary"].get("fraction")
        done = f" ({100 * share:.0f} %)" if share and state == "running" else ""
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        text = f"{verb}{where}{done}{others}."
        who = f"{found[0]['name']}: " if len(runs) > 1 else ""
        return Verdict(tone, who + (text if who else f"{text[0].upper()}{text[1:]}"))
    return None


# ------------------------------------------------------------------------------------------------
# who is best
def _with_failures(groups: Sequence[Group]) -> Verdict:
    failed = {group.name: words for group in groups if (words := _failure(group))}
    sound = [group for group in groups if group.name not in failed]
    if not failed:
        found = _best_of(groups)
        words = _lost_globally(found.subject)
        tone = "none" if words and found.tone == "good" else found.tone
        return replace(found, tone=tone, words=f"{found.words}{words}")
    named = list(failed.values())
    others = f" {len(named) - 1} more did so." if len(named) > 1 else ""
    if not sound:
        return Verdict("bad", f"{named[0]}{others}", groups[0])
    found = _best_of(sound)
    return replace(found, tone="bad", words=f"{named[0]}{others} {found.words}")


def _best_of(groups: Sequence[Group]) -> Verdict:
    ranked = sorted(groups, key=lambda group: -group.rank)
    best: dict[str, Group] = {}
    for group in ranked:
        best.setdefault(group.kind, group)
    own, one, alone = (best.get(kind) for kind in ("own", "one", "alone"))
    if own is None or (len(ranked) > 1 and one is None and alone is None):
        return _ahead(ranked)
    if alone is not None and alone is ranked[0] and not alone.is_near(own.score):
        words = f"Learning alone is better: {alone.said()}, {own.said()}."
        return Verdict("bad", words, own, Reference(alone.name, alone.ends, alone))
    reference = _reference(own, one)
    return _ahead(ranked) if reference is None else _against(own, reference, ranked)


def _against(own: Group, reference: Reference, groups: Sequence[Group]) -> Verdict:
    """Own models against what devices have without them."""
    other = reference.scores["personal"]
    mine = in_score(own.score, own.unit) if len(groups) == 1 else own.said()
    theirs = f"{reference.name} {in_score(other, own.unit)}"
    if own.is_near(other):
        words = f"Personal models are as good as {reference.name}: {mine}, {theirs}.{own.who}"
        return Verdict("none", words, own, reference)
    if own.sign * ((own.score or 0.0) - (other or 0.0)) > 0:
        return Verdict("good", f"Personal models win: {mine}, {theirs}.{own.who}", own, reference)
    what = "Their servers’ models are" if reference.name == THEIRS else "One model for all is"
    return Verdict("bad", f"{what} better: {theirs}, {mine}.{own.who}", own, reference)


def _ahead(ranked: Sequence[Group]) -> Verdict:
    best, *rest = ranked
    if not rest:
        words = f"{best.name} ends at {in_score(best.score, best.unit)}.{best.who}"
        return Verdict("none", words, best)
    second = Reference(rest[0].name, rest[0].ends, rest[0])
    last = f", last {rest[-1].said()}" if len(rest) > 1 else ""
    if best.is_near(rest[0].score):
        words = f"Best of {len(ranked)}: {best.said()}, and as good {rest[0].said()}{last}."
    else:
        words = f"Best of {len(ranked)}: {best.said()}, then {rest[0].said()}{last}."
    return Verdict("good", f"{words}{best.who}", best, second)


def _reference(own: Group, one: Group | None) -> Reference | None:
    """A run with one model for all, of those shown or of the job; else own global models."""
    if one is not None:
        return Reference(one.name, one.ends, one)
    score = own.mean("personal")
    if not own.gains or score is None:
        return None
    gain = sum(each["mean"] for each in own.gains) / len(own.gains)
    scores = {"personal": score - own.sign * gain, "worst": None, "global": None}
    return Reference(own.gains[0]["against"] or THEIRS, scores)


# ------------------------------------------------------------------------------------------------
# who failed
def _failure(group: Group) -> str:
    """A sentence where it ended far below its best, or learned nothing."""
    for run in group.runs:
        rows = _tests(run)
        if len(rows) < FEWEST:
            continue
        (start, _), (last, _) = rows[0], rows[-1]
        best, when = max(rows, key=lambda row: group.sign * row[0])
        gained, lost = group.sign * (best - start), group.sign * (best - last)
        small = CLOSE_SHARE if group.unit == "share" else CLOSE * abs(best)
        if lost > LOST * gained and lost > CLOSE * abs(best):
            before, after = in_score(best, group.unit), in_score(last, group.unit)
            if when == 0:
                return f"{group.name} got worse: {before} before it began, {after} at the end."
            return f"{group.name} fell from {before} in round {when:,} to {after}."
        if abs(gained) <= small:
            at = in_score(start, group.unit), in_score(last, group.unit)
            return f"{group.name} learned nothing: {at[0]} before it began, {at[1]} at the end."
    return ""


def _lost_globally(group: Group | None) -> str:
    """A sentence where devices have learned and the global models have not."""
    if group is None or group.kind != "own":
        return ""
    rows = _tests(group.runs[0], ("global",))
    if len(rows) < FEWEST or group.sign * (rows[-1][0] - rows[0][0]) > 0:
        return ""
    before, after = (in_score(row[0], group.unit) for row in (rows[0], rows[-1]))
    return f" The global models learned nothing: {before} before, {after} at the end."


def _tests(run: View, kinds: Sequence[str] = ("personal", "global")) -> list[tuple[float, int]]:
    """Scores of devices, or of the global models where there are none, with their rounds."""
    for kind in kinds:
        column = run["measures"][0][kind] if run["measures"] else ""
        values = run["history"].get(column, ())
        found = [
            (value, round_)
            for round_, value in zip(run["history"]["round"], values, strict=False)
            if value is not None
        ]
        if found:
            return found
    return []
