"""Personal scores: which test samples count for a device, and how much each."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from fedbcd.data.federation import Federation, Key
from fedbcd.errors import ConfigError
from fedbcd.recorded import completed

Measure = Literal["own-shares", "pooled-labels", "own-tests"]
DEFAULT: Measure = "own-shares"
OWN_TESTS: Measure = "own-tests"  # of devices that have brought their own


COMMON: Key = ("common", 0)  # of test samples for all without labels


def measure_for(federation: Federation, chosen: Measure | None) -> Measure:
    """As chosen; own test samples where devices have brought them; else the default."""
    return chosen or (DEFAULT if federation.own_tests is None else OWN_TESTS)


def sample_weights(
    federation: Federation, device: int, measure: Measure, tested: Mapping[Key, int]
) -> dict[Key, float]:
    """The weight of one test sample of each kind in a device's score; `tested` says how many there
    are of each: ("label", k) of those for all, ("test", i) of device i.

    own-shares     a label counts by its share of the device's training samples, whatever its share
    of the test set
    own-tests      the device's own test samples and no others; by "own-shares" where it has none
    pooled-labels  of the recipes: every test sample of a label that the device owns counts alike,
    however few it has of it

    Labels of which there is no test sample are left out: the shares of the others are then of the
    rest. No label left: no score.
    """
    if measure == OWN_TESTS and ("test", device) in tested:
        return {("test", device): 1.0}
    if federation.labels is None:
        return {}
    if measure == "pooled-labels":
        owned = [("label", label) for label in federation.labels[device]]
        return {key: 1.0 for key in owned if key in tested}
    labels, counts = torch.unique(
        federation.pool.all_targets[federation.owned(device)], return_counts=True
    )
    shares = {("label", k): n for k, n in zip(labels.tolist(), counts.tolist(), strict=True)}
    return {key: count / tested[key] for key, count in shares.items() if key in tested}


def untested(federation: Federation) -> str | None:
    """A sentence on devices without a score of their own, or on the labels that they own and of
    which there is no test sample, if there are such.
    """
    own, common = federation.own_tests, federation.common_test
    without = set(range(federation.devices)) - set(own or ())
    if not without or (own is None and common is None):
        return None
    if common is None or federation.labels is None:
        return (
            f"{len(without)} of {federation.devices} devices have no test samples of their own:"
            + (" personal scores are about the others" if own else " there are no personal scores")
            + "; holdout=0.2 keeps a share of their data back for that"
        )
    known = None if federation.test is None else federation.test.known_targets
    if known is None:
        return None
    tested = set(torch.unique(known[slice(*common)]).tolist())
    missing = sorted({label for owned in federation.labels for label in owned} - tested)
    if not missing:
        return None
    owners = sum(not tested.issuperset(owned) for owned in federation.labels)
    left_out = sum(tested.isdisjoint(owned) for owned in federation.labels)
    labels = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return (
        f"the test set has no samples of labels {labels}, which {owners} of {federation.devices}"
        " devices own: personal scores are about their other labels"
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
