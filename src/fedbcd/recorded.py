"""What a record says of settings, and what it means where it says nothing. A record wins where a
job file or a program is silent.

A record is what stands at the head of an event log, in the config.toml of a run folder, or in a
deployed role's store. Defaults change from version to version, and what was begun goes on with what
it was begun with. So three things are needed, and all are here:

`Said`        a settings value that knows which of its fields were given; the others have today's
defaults
`completed`   a recorded value with what the version that wrote it took where nothing was said
(`BEFORE`)
`going_on`    a settings value whose fields that were not given are as recorded
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from fedbcd.config import check_given, choose
from fedbcd.describe import describe

ALGORITHMS = ("fedbcd", "fedbcd-i", "fedprox", "fedavg")


@dataclass(frozen=True)
class Before:
    """A default that has changed, or a setting that is new: what was done where nothing was said.

    known   the versions before had this setting, with another default. If not, no record of theirs
    names it; nor does one of today
            where it has this value, so that what is hashed (a deployment's settings, a checkpoint's
            run, a result's key) stays the same.
    """

    setting: str
    was: Any
    kinds: tuple[str, ...]  # of values, by name; "run" is a job's [run], or the identity of a run
    known: bool


# Version 0.1.0. A default that changes later needs one more line; what a version takes for granted
# it must never unlearn.
BEFORE = (
    Before("projection", {"name": "box", "low": -2.0, "high": 2.0}, ALGORITHMS, known=True),
    Before("momentum_after_contact", "pull", ("fedbcd-i",), known=False),
    Before("offline_time", "free", ("fedbcd-i",), known=False),
    Before("pull_steps", None, ("fedbcd-i",), known=False),
    Before("epochs", None, ALGORITHMS, known=False),
    Before("weight", "size", ("fedprox", "fedavg"), known=False),
    Before("measure", "pooled-labels", ("run",), known=False),
    Before("weight_decay", 0.0, (*ALGORITHMS, "fedavg-ft", "local"), known=False),
    Before("schedule", None, (*ALGORITHMS, "fedavg-ft", "local"), known=False),
    Before("optimizer", None, ("fedprox", "fedavg", "fedavg-ft", "local"), known=False),
    Before("dealt", False, ("diversity", "data"), known=False),
    Before("holdout", 0.0, ("data",), known=False),
    Before("validation", 0.0, ("data",), known=False),
    Before("metrics", [], ("model",), known=False),
)


class Said:
    """A settings value, made with keywords only, that knows which were given."""

    name: ClassVar[str]
    said: frozenset[str]

    def __new__(cls, *values: Any, **given: Any) -> Self:
        check_given(cls, cls.name, values, given)
        value = super().__new__(cls)
        object.__setattr__(value, "said", frozenset(given))
        return value


T = TypeVar("T")


def completed(table: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """A recorded value, with what its version took where it names nothing."""
    return {
        before.setting: before.was
        for before in BEFORE
        if (kind or table.get("name")) in before.kinds
    } | dict(table)


def in_record(value: Any) -> dict[str, Any]:
    """How a value is written down, and hashed, as a part of what makes a run this run."""
    table = describe(value)
    return shortened(table, table["name"])


def shortened(table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The same of a table: without what versions that did not know a setting took for granted."""
    unnamed = {
        before.setting: before.was for before in BEFORE if not before.known and kind in before.kinds
    }
    return {
        key: entry for key, entry in table.items() if key not in unnamed or entry != unnamed[key]
    }


def going_on(value: T, record: object) -> T:
    """`value`, with the fields that were not given as recorded; as it is where the record is of
    another kind, or where it does not know what was given.
    """
    if not (isinstance(value, Said) and isinstance(record, Mapping)):
        return value
    if record.get("name") != value.name:
        return value
    silent = {key: entry for key, entry in completed(record).items() if key not in value.said}
    recorded = choose({value.name: type(value)}, silent, "recorded")
    return type(value)(
        **{
            key: getattr(recorded if key in recorded.said else value, key)
            for key in value.said | recorded.said
        }
    )
