"""Personal accuracy: which test samples count for a device, and how much each."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from fedbcd.data.federation import Federation
from fedbcd.recorded import completed

Measure = Literal["own-shares", "pooled-labels"]
DEFAULT: Measure = "own-shares"


def sample_weights(
    federation: Federation, device: int, measure: Measure, tested: Mapping[int, int]
) -> dict[int, float]:
    """The weight of one test sample of each label in a device's score; `tested` says how many there
    are of each label.

    own-shares     a label counts by its share of the device's training samples, whatever its share
    of the test set
    pooled-labels  the paper's: every test sample of a label that the device owns counts alike,
    however few it has of it

    Labels of which there is no test sample are left out: the shares of the others are then of the
    rest. No label left: no score.
    """
    if federation.labels is None:
        return {}
    if measure == "pooled-labels":
        return {label: 1.0 for label in federation.labels[device] if label in tested}
    labels, counts = torch.unique(
        federation.pool.targets[federation.owned(device)], return_counts=True
    )
    shares = zip(labels.tolist(), counts.tolist(), strict=True)
    return {label: count / tested[label] for label, count in shares if label in tested}


def untested(federation: Federation) -> str | None:
    """A sentence on the labels that devices own and of which there is no test sample, if there are
    such.
    """
    if federation.test is None or federation.labels is None:
        return None
    tested = set(torch.unique(federation.test.targets).tolist())
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
