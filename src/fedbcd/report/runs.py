"""Run folders: which there are, and what lies in them beside the event log. Of model files only the
head is read.
"""

import csv
import json
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcd.errors import RecordError
from fedbcd.record.history import ENDS, History, column_of
from fedbcd.record.names import CHECKPOINT, HISTORY, JOB, LOG, MODELS, SERIES
from fedbcd.record.tensorfile import read_head


@dataclass(frozen=True)
class Extras:
    """What a run folder holds beside its log. Whatever is missing, as in a run that goes on, is
    empty.
    """

    history: History = field(default_factory=History)
    summary: dict[str, Any] = field(default_factory=dict)
    personal: dict[int, float] = field(
        default_factory=dict
    )  # device -> score of its own model on its own labels
    home: dict[int, float] = field(
        default_factory=dict
    )  # device -> score of its server's model on those
    partition: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    values: int = 0  # numbers in one model, with buffers
    notices: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[str, str]:
        """The first measure, and which of its values are better."""
        first = self.history.first_measure
        return first, self.history.measures.get(first, "higher")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders at or below these paths, two levels deep, in order; a path without any is
    refused.
    """
    found: list[Path] = []
    for path in paths:
        if path.name == LOG and path.is_file():
            path = path.parent
        inside = [path] if (path / LOG).exists() else _below(path)
        if not inside:
            raise RecordError(
                f"{path} {_instead(path)}: there is no {LOG} in it or in its folders; give a folder"
                f" that 'fedbcd run' has made (fedbcd run --out {shlex.quote(str(path))}-run makes"
                " one)"
            )
        found += [folder for folder in inside if folder not in found]
    return found


def _instead(path: Path) -> str:
    """What a path is that holds no run."""
    if not path.exists():
        return "does not exist, so it holds no run"
    if not path.is_dir():
        return "is a file and no folder of a run, so it holds no run"
    some = sorted(each.name for each in path.iterdir())[:3]
    return f"holds {', '.join(some)}, but it holds no run" if some else "is empty and holds no run"


def _below(path: Path) -> list[Path]:
    found = {log.parent for pattern in (f"*/{LOG}", f"*/*/{LOG}") for log in path.glob(pattern)}
    return sorted(found, key=lambda folder: (_started(folder), folder))


def _started(folder: Path) -> float:
    """The job file is written when a run starts; the log is written until it ends."""
    try:
        return min(file.stat().st_mtime for file in (folder / JOB, folder / LOG) if file.exists())
    except (OSError, ValueError):
        return math.inf


def read_extras(folder: Path) -> Extras:
    """What lies beside the log: of the finished run, or of the last checkpoint where that is
    newer.
    """
    notices: list[str] = []
    models = head_of(folder / MODELS, notices)
    checkpoint = head_of(folder / CHECKPOINT, notices)
    saved = _saved_history(folder / HISTORY, notices)
    going = _checkpoint_history(checkpoint, folder, notices)
    newer = len(going) > 0 and (not saved or going.last.round > saved.last.round)
    head = checkpoint if newer or not models else models
    notes = head.get("__metadata__", {})
    return Extras(
        history=_known(going if newer else saved, notes, notices),
        summary={} if newer else _json(notes, "summary"),
        personal=scores_in(notes, "scores"),
        home=scores_in(notes, "global_scores"),
        partition=_json(notes, "partition"),
        environment=_json(notes, "environment"),
        values=_values(models) or _values(checkpoint),
        notices=tuple(notices),
    )


def head_of(path: Path, notices: list[str]) -> dict[str, Any]:
    """The JSON at the head of a safetensors file: names, shapes and notes."""
    try:
        return read_head(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notices.append(f"{path.name} cannot be read ({error}); what it holds is left out")
        return {}


def series_of(folder: Path, title: str, measure: str) -> dict[str, float]:
    """Means over seeds of a run that was played with several of which this folder is the first:
    scores by `measure`, and how many seeds. Empty where there is no such table beside it.
    """
    for name in SERIES:
        with suppress(OSError, ValueError, KeyError, csv.Error):
            with (folder.parent.parent / name).open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if row["title"] == title]
            if len(rows) == 1 and int(rows[0]["seeds"]) > 1:
                means = {each: float(rows[0][column_of(each, measure)]) for each in ENDS}
                known = {str(each): v for each, v in means.items() if math.isfinite(v)}
                return {"seeds": int(rows[0]["seeds"]), **known}
    return {}


def _saved_history(path: Path, notices: list[str]) -> History:
    try:
        return History.read_csv(path) if path.exists() else History()
    except RecordError as error:
        notices.append(str(error))
        return History()


def _checkpoint_history(head: dict[str, Any], folder: Path, notices: list[str]) -> History:
    try:
        return History.of_plain(json.loads(head.get("__metadata__", {}).get("history", "[]")))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        notices.append(f"the history in the checkpoint of {folder.name} cannot be read ({error})")
        return History()


def _known(history: History, notes: Any, notices: list[str]) -> History:
    try:
        return history.known_by(notes)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        notices.append(f"what its measures are cannot be read ({error})")
        return history


def _json(notes: Any, key: str) -> dict[str, Any]:
    try:
        found = json.loads(notes[key])
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def scores_in(notes: Any, key: str) -> dict[int, float]:
    try:
        scores = {int(device): float(score) for device, score in _json(notes, key).items()}
    except (TypeError, ValueError):
        return {}
    return {device: score for device, score in scores.items() if not math.isnan(score)}


def _values(head: dict[str, Any]) -> int:
    try:
        return next(
            (
                int(entry["shape"][-1])
                for name, entry in head.items()
                if name == "z" or name.startswith("model:")
            ),
            0,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return 0
