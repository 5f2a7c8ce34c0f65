"""What a personal model is compared with: the best run of the same job that has none, on the same
data from the same start.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedbcd.algorithm.method import Facts
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.record.history import History
from fedbcd.record.names import JOB, LOG, MODELS
from fedbcd.report.runs import head_of, scores_in

SAME = (
    "data",
    "model",
    "seed",
    "measure",
)  # what two runs must share of their identities to be compared device by device
MOST_HEADER_BYTES = 1 << 26


@dataclass(frozen=True)
class Baseline:
    """A finished run without personal models."""

    name: str
    identity: dict[str, Any]
    judged: tuple[str, str]  # the measure, and which of its values are better
    scores: dict[int, float]  # device -> score of the one model on what its own model is tested on

    @property
    def mean(self) -> float:
        return sum(self.scores.values()) / len(self.scores)


def has_personal_models(identity: dict[str, Any]) -> bool:
    if "personal" in identity:  # of an algorithm that only its author can import
        return bool(identity["personal"])
    algorithm = identity.get("algorithm")
    kind = ALGORITHMS.get(str(algorithm.get("name"))) if isinstance(algorithm, dict) else None
    return kind is None or kind().method(Facts(0, ())).has_personal


def job_folders(folder: Path) -> list[Path]:
    """The run folders of the job that a run is part of; several runs of one job lie in its
    folder.
    """
    if not (folder.parent / JOB).is_file():
        return [folder]
    return sorted(log.parent for log in folder.parent.glob(f"*/{LOG}"))


def best_baseline(
    identity: dict[str, Any], folders: Iterable[Path], judged: tuple[str, str]
) -> Baseline | None:
    """The one with the best mean among these folders, for a run with personal models; None where
    there is none to compare with, by the same measure.
    """
    if "data" not in identity or not has_personal_models(identity):
        return None
    wanted = [identity.get(key) for key in SAME]
    read = (_read_baseline(folder, modified(folder / MODELS)) for folder in dict.fromkeys(folders))
    found = [
        one
        for one in read
        if one is not None
        and [one.identity.get(key) for key in SAME] == wanted
        and one.judged == judged
    ]
    sign = -1 if judged[1] == "lower" else 1
    return max(found, key=lambda one: sign * one.mean, default=None)


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@lru_cache(maxsize=256)
def _read_baseline(folder: Path, written: float) -> Baseline | None:
    """From the first line of the log and the head of the models, which are there once a run has
    ended.
    """
    if not written:
        return None
    try:
        with (folder / LOG).open("rb") as file:
            header = json.loads(file.readline(MOST_HEADER_BYTES))
        identity, job = header["identity"], header.get("job") or {}
        notes = head_of(folder / MODELS, [])["__metadata__"]
        if has_personal_models(identity) or notes["finished"] != "true":
            return None
        scores = scores_in(notes, "global_scores") or scores_in(notes, "scores")
        name, measures = str(job.get("title") or folder.name), History().known_by(notes).measures
        return Baseline(name, identity, next(iter(measures.items())), scores) if scores else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
