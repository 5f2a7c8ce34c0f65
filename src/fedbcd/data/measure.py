"""Personal accuracy: which test samples count for a device, and how much each."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fedbcd.config import nearest
from fedbcd.data.federation import Federation, Metric, accuracy
from fedbcd.errors import ConfigError
from fedbcd.recorded import completed

Measure = Literal["own-shares", "pooled-labels", "own-tests"]
DEFAULT: Measure = "own-shares"
OWN_TESTS: Measure = "own-tests"  # of devices that have brought their own


def is_lower_better(metric: Metric) -> bool:
    """Of its scores; a metric says so by an attribute, better = "lower"."""
    better = getattr(metric, "better", "higher")
    if better not in ("higher", "lower"):
        raise ConfigError(
            f'the metric {name_of(metric)} has better = {better!r}; use "lower" or "higher"'
        )
    return bool(better == "lower")


SCORES = ("global_accuracy", "personal_accuracy", "worst_decile")  # columns of the metric


def is_lower_column(column: str, metric: Metric) -> bool:
    """Whether lower values of a column of the history are better; apart from scores all are."""
    return is_lower_better(metric) if column in SCORES else True


def judged_on(column: str) -> str:
    """By which samples a column is computed."""
    return "test samples" if column in SCORES else "training samples and models"


def check_column(where: str, column: str, columns: Sequence[str], federation: Federation) -> None:
    """Refuse a column that cannot decide anything."""
    if column not in columns:
        raise ConfigError(
            f"{where}={column!r} is no column that can decide{nearest(column, columns)}; there are"
            f" {', '.join(columns)}"
        )
    if column in SCORES and federation.test is None:
        raise ConfigError(
            f"{where}={column!r} is a score on test samples, and there are none; give Federation"
            " test=..., or name another column"
        )


def metric_of(federation: Federation) -> dict[str, Any]:
    """What a record says of the metric; nothing where it is accuracy."""
    metric = federation.metric
    if metric is accuracy:
        return {}
    better = "lower" if is_lower_better(metric) else "higher"
    return {"metric": {"name": name_of(metric), "better": better}}


def name_of(metric: Metric) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))


def measure_for(federation: Federation, chosen: Measure | None) -> Measure:
    """As chosen; own test samples where devices have brought them; else the default."""
    return chosen or (DEFAULT if federation.own_tests is None else OWN_TESTS)


def sample_weights(
    federation: Federation, device: int, measure: Measure, tested: Mapping[int, int]
) -> dict[int, float]:
    """The weight of one test sample of each label in a device's score; `tested` says how many there
    are of each label.

    own-shares     a label counts by its share of the device's training samples, whatever its share
    of the test set
    own-tests      the device's own test samples and no others: `tested` is by device
    pooled-labels  of the recipes: every test sample of a label that the device owns counts alike,
    however few it has of it

    Labels of which there is no test sample are left out: the shares of the others are then of the
    rest. No label left: no score.
    """
    if measure == OWN_TESTS:
        return {device: 1.0} if device in tested else {}
    if federation.labels is None:
        return {}
    if measure == "pooled-labels":
        return {label: 1.0 for label in federation.labels[device] if label in tested}
    labels, counts = torch.unique(
        federation.pool.all_targets[federation.owned(device)], return_counts=True
    )
    shares = zip(labels.tolist(), counts.tolist(), strict=True)
    return {label: count / tested[label] for label, count in shares if label in tested}


def untested(federation: Federation) -> str | None:
    """A sentence on the labels that devices own and of which there is no test sample, if there are
    such.
    """
    if federation.own_tests is not None:
        without = set(range(federation.devices)) - set(federation.own_tests)
        return (
            f"{len(without)} of {federation.devices} devices have no test samples of their own:"
            " personal accuracy is about the others"
            if without
            else None
        )
    known = None if federation.test is None else federation.test.known_targets
    if known is None or federation.labels is None:
        return None
    tested = set(torch.unique(known).tolist())
    missing = sorted({label for owned in federation.labels for label in owned} - tested)
    if not missing:
        return None
    owners = sum(not tested.issuperset(owned) for owned in federation.labels)
    left_out = sum(tested.isdisjoint(owned) for owned in federation.labels)
    labels = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return (
        f"the test set has no samples of labels {labels}, which {owners} of {federation.devices}"
        " devices own: personal accuracy is about their other labels"
        + (f", without those that have no other ({left_out})" if left_out else "")
    )


def measure_in(record: Mapping[str, Any]) -> Any:
    """By which the run of a record was measured: of a job's table, or the identity of a run; None
    where there is no record.
    """
    run = record.get("run", record)
    return completed(run, "run")["measure"] if record and isinstance(run, Mapping) else None


def check_tests(federation: Federation, measure: Measure | None) -> None:
    """Refuse a measure for which there are no tests."""
    if measure is not None and (measure == OWN_TESTS) != (federation.own_tests is not None):
        has = "no test samples" if federation.own_tests is None else "test samples"
        raise ConfigError(
            f"measure={measure!r}, but devices have brought {has} of their own"
            " (devices=[(train, test), ...]); leave measure out"
        )
