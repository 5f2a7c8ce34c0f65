"""Defaults change, records do not: what a record says, or its version took for granted, wins where
nothing is said today.
"""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.describe import describe
from fedbcd.recorded import BEFORE, completed, going_on, in_record

BOX = {"name": "box", "low": -2.0, "high": 2.0}
KINDS = (fb.FedBCD, fb.FedBCDI, fb.FedProx, fb.FedAvg)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_wins_where_nothing_is_said(kind: Any) -> None:
    recorded = describe(kind(device_step=0.25, steps=(2, 3), projection=fb.Box(-3, 3), batch=7))
    assert going_on(kind(), recorded) == kind(
        device_step=0.25, steps=(2, 3), projection=fb.Box(-3, 3), batch=7
    )
    said = kind(projection=fb.NoProjection(), batch=32)
    assert going_on(said, recorded) == kind(
        device_step=0.25, steps=(2, 3), projection=fb.NoProjection(), batch=32
    )


def test_what_a_record_does_not_name_is_what_its_version_did() -> None:
    for kind in KINDS:
        assert going_on(kind(), {"name": kind.name}).projection == fb.Box(-2, 2)
    assert going_on(fb.FedBCDI(), {"name": "fedbcd-i"}).momentum_after_contact == "pull"
    assert (
        going_on(
            fb.FedBCDI(momentum_after_contact="restart"), {"name": "fedbcd-i"}
        ).momentum_after_contact
        == "restart"
    )
    assert completed({"name": "fedbcd-i", "projection": {"name": "none"}}) == {
        "name": "fedbcd-i",
        "projection": {"name": "none"},
        "momentum_after_contact": "pull",
        "offline_time": "free",
        "pull_steps": None,
        "epochs": None,
        "weight_decay": 0.0,
        "schedule": None,
    }


def test_a_record_of_another_kind_or_none_says_nothing() -> None:
    for record in ({}, None, "box", {"name": "fedavg", "device_step": 9.0}):
        assert going_on(fb.FedBCD(), record) == fb.FedBCD()


def test_a_setting_that_is_newer_than_a_record_leaves_its_hashes_as_they_were() -> None:
    """A value with which earlier versions took it for granted is not named; any other is."""
    assert "momentum_after_contact" not in in_record(fb.FedBCDI(momentum_after_contact="pull"))
    assert in_record(fb.FedBCDI(momentum_after_contact="kept"))["momentum_after_contact"] == "kept"
    assert in_record(fb.FedBCD(projection=fb.Box()))["projection"] == BOX  # always was named


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_is_read_as_what_was_written(kind: Any) -> None:
    values = [kind(), kind(projection=fb.Box(-1, 1))]
    if kind is fb.FedBCDI:
        values += [kind(momentum_after_contact=choice) for choice in ("kept", "pull", "restart")]
    for value in values:
        assert going_on(kind(), json.loads(json.dumps(in_record(value)))) == value


def test_what_was_taken_before_is_something_that_the_settings_know() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    for before in BEFORE:
        for name in kinds.keys() & {*before.kinds}:
            assert describe(going_on(kinds[name](), {"name": name}))[before.setting] == before.was
            if before.known:
                assert describe(kinds[name]())[before.setting] != before.was, (
                    "a default that has not changed needs no line"
                )


def test_copies_know_what_was_said() -> None:
    said = fb.FedBCD(batch=4)
    for same in (copy.copy(said), copy.deepcopy(said)):
        assert same == said
        assert same.said == {"batch"}
    assert "projection" in replace(said, batch=5).said  # who copies with `replace` names everything
