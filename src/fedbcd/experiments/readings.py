"""What the paper leaves open, as data: every answer by name, with what it changes in a recipe.

The recipes are one reading; those that change nothing in them are its answers. `fedbcd paper fig3a
--reading dealt` changes one of them. docs/spec.md says why the recipes answer as they do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fedbcd.algorithm.methods import FedBCDI
from fedbcd.config import nearest
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import Job

Change = Callable[[Job], Job]


@dataclass(frozen=True)
class Reading:
    """One answer: to which question, in a sentence, and what becomes of a recipe's job."""

    question: str
    says: str
    change: Change
    default: bool = False  # what the recipes are without it


def _data(**said: Any) -> Change:
    return lambda job: replace(job, data=replace(job.data, **said))


def _algorithm(**said: Any) -> Change:
    """Of the algorithms that have these settings."""

    def change(job: Job) -> Job:
        algorithm: Any = job.spec.algorithm
        if not said.keys() <= {f.name for f in fields(algorithm)}:
            return job
        return job.changed(algorithm=replace(algorithm, **said))

    return change


def _asynchronous_fedbcd_i(change: Change) -> Change:
    """Only there: elsewhere the same setting breaks Assumption 4(ii), and is refused."""

    def where(job: Job) -> Job:
        there = job.method.name == FedBCDI.name and not job.spec.cloud.sync
        return change(job) if there else job

    return where


READINGS: Mapping[str, Reading] = {
    "drawn": Reading(
        "split",
        "each device draws its samples from the whole pool of its labels, so that two may share one"
        " (the authors' code)",
        _data(dealt=False),
        default=True,
    ),
    "dealt": Reading(
        "split",
        "the training set is dealt out: exactly d labels and n samples per device, each sample on"
        " one device at most (the text)",
        _data(dealt=True),
    ),
    "kept": Reading(
        "momentum after contact",
        "FedBCD-I: x_prev moves with x, so a contact leaves the momentum of offline training alone",
        _algorithm(momentum_after_contact="kept"),
        default=True,
    ),
    "pull": Reading(
        "momentum after contact",
        "FedBCD-I: the last penalty step is the momentum, so offline training goes on past z",
        _algorithm(momentum_after_contact="pull"),
    ),
    "restart": Reading(
        "momentum after contact",
        "FedBCD-I: no momentum after a contact",
        _algorithm(momentum_after_contact="restart"),
    ),
    "steps": Reading(
        "local work",
        'an "epoch" is a mini-batch (Algorithm 1 draws one in each step; the authors\' code)',
        _algorithm(steps=(1, 5), epochs=None),
        default=True,
    ),
    "epochs": Reading(
        "local work",
        'an "epoch" is a pass over the device\'s data: 19 mini-batches of 32 where it has 600',
        _algorithm(steps=None, epochs=(1, 5)),
    ),
    "free": Reading(
        "offline rounds",
        "FedBCD-I: once in each round of the coordinator, at no cost of clock time (the authors'"
        " code)",
        _algorithm(offline_time="free"),
        default=True,
    ),
    "timed": Reading(
        "offline rounds",
        "FedBCD-I: by each device's own timer, which is busy as long as its steps take",
        _algorithm(offline_time="timed"),
    ),
    "relative": Reading(
        "eta_z",
        "0.5 in the mean form, z <- w - eta_z (w - m) (the authors' code)",
        _asynchronous_fedbcd_i(_algorithm(server_step_form="relative")),
        default=True,
    ),
    "absolute": Reading(
        "eta_z",
        "FedBCD-I on an asynchronous cloud: 0.5 as printed in eq. (6b), where it meets Assumption"
        " 4(ii) exactly and is a relative step of 0.3 with three active devices",
        _asynchronous_fedbcd_i(_algorithm(server_step_form="absolute")),
    ),
}


def read_as(names: Sequence[str], job: Job) -> Job:
    """A recipe's job under these readings, one to each question."""
    asked: dict[str, str] = {}
    for name in names:
        if name not in READINGS:
            raise ConfigError(
                f"there is no reading {name!r}{nearest(name, READINGS)}; there are"
                f" {', '.join(READINGS)}"
            )
        question = READINGS[name].question
        if asked.setdefault(question, name) != name:
            raise ConfigError(
                f"readings {asked[question]!r} and {name!r} both answer {question!r}; keep one"
            )
        job = READINGS[name].change(job)
    return job
