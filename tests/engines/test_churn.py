"""Devices that come and go by a rule: drawn before a run, from the seed alone; then as if each had
been named.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.errors import ConfigError
from fedbcd.experiments.check import check_job
from fedbcd.experiments.job import parse
from fedbcd.record.eventlog import LogReader
from fedbcd.spec import RunSpec
from support.runs import BCD, BCDI, LOGISTIC, federation, job_table

RULE = fb.Churn(joins=0.03, leaves=0.03, rounds=8)


def _train(algorithm: fb.Algorithm = BCD, **options: Any) -> fb.Run:
    settings = {"rounds": 10, "active": 1, "looks": 1, "certify_every": 0, **options}
    return fb.train(federation(LOGISTIC), algorithm, cloud=fb.AsyncCloud(first=2), **settings)


def test_every_device_draws_for_itself_in_every_round() -> None:
    """The first round with a draw below the share; leaving only after joining."""
    joins, leaves = fb.Churn(0.05, 0.1, 30).drawn(3, 200)

    def hits(stream: int, device: int, share: float) -> list[int]:
        drawn = [draws.unit_one(3, stream, device, t) for t in range(1, 31)]
        return [t for t, u in enumerate(drawn, 1) if u < share]

    for device in range(200):
        joined = next(iter(hits(draws.JOINING, device, 0.05)), 0)
        left = next((t for t in hits(draws.LEAVING, device, 0.1) if t > joined), 0)
        assert (joins.get(device, 0), leaves.get(device, 0)) == (joined, left)


def test_shares_are_of_all_devices_in_each_round() -> None:
    joins, leaves = fb.Churn(0.01, 0.02, 10).drawn(0, 20_000)
    for changes, share in ((joins, 0.01), (leaves, 0.02)):
        count = np.bincount(list(changes.values()), minlength=11)
        assert count[0] == 0
        assert count[1] / 20_000 == pytest.approx(share, rel=0.25)
        assert len(changes) / 20_000 == pytest.approx(1 - (1 - share) ** 10, rel=0.1)


def test_a_rule_is_the_same_as_naming_every_device_and_is_replayed_and_resumed(
    tmp_path: Path,
) -> None:
    spec = RunSpec(BCD, churn=RULE)
    joins, leaves = spec.changes(federation(LOGISTIC))
    assert joins
    assert leaves
    named = _train(joins=joins, leaves=leaves)
    by_rule = _train(churn=RULE, out=tmp_path / "once")
    assert by_rule.digest == named.digest
    assert fb.replay(tmp_path / "once" / "events.jsonl", federation(LOGISTIC))["complete"]
    _train(churn=RULE, rounds=4, out=tmp_path / "twice")
    again = _train(churn=RULE, out=tmp_path / "twice", resume=True)
    assert again.digest == by_rule.digest


def test_devices_that_are_named_are_left_to_that() -> None:
    drawn, _ = RunSpec(BCD, churn=RULE).changes(federation(LOGISTIC))
    device = min(drawn)
    joins, leaves = RunSpec(BCD, churn=RULE, leaves={device: 9}).changes(federation(LOGISTIC))
    assert (device in joins, leaves[device]) == (False, 9)


def test_a_job_file_says_it_and_its_schedule_is_planned_with_it(tmp_path: Path) -> None:
    table = job_table(**{"run.churn": {"joins": 0.03, "leaves": 0.03, "rounds": 8}})
    (job,) = parse(table)
    assert job.spec.churn == RULE
    job.run(tmp_path / "run", on_notice=lambda _: None)
    assert LogReader(tmp_path / "run" / "events.jsonl").header["identity"]["churn"] == {
        "joins": 0.03,
        "leaves": 0.03,
        "rounds": 8,
    }
    check_job(job, log=tmp_path / "run" / "events.jsonl")


def test_offline_training_goes_on_with_those_who_are_there() -> None:
    assert _train(BCDI, churn=RULE).history.last.activations > 0


@pytest.mark.parametrize(
    ("churn", "words"),
    [
        ({"joins": 1.0}, r"churn.joins=1.0 must be 0 or more and below 1"),
        ({"leaves": -0.1}, r"churn.leaves=-0.1 must be 0 or more and below 1"),
        ({"leaves": float("nan")}, r"churn.leaves=nan must be"),
        ({"rounds": 0}, r"churn.rounds=0 must be between 1 and"),
        (
            {"leaves": 0.5, "rounds": 50},
            r"server 0 would be left without devices in round \d+; use smaller shares or fewer"
            " rounds of churn, or another seed",
        ),
        ({"joins": 0.9}, "server 0 would be left without devices in round 0; use smaller shares"),
    ],
)
def test_a_rule_that_cannot_be_is_a_sentence(churn: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _train(churn=fb.Churn(**churn))


def test_more_active_devices_than_are_there_at_the_start_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"active=4 must be .* the smallest server at the start"):
        _train(churn=RULE, active=4)


def test_an_unknown_key_of_the_rule_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[run.churn\] has an unknown key 'join'"):
        parse(job_table(**{"run.churn": {"join": 0.1}}))


def test_servers_that_change_hands_need_nobody_who_stays() -> None:
    """Refused is a server that is empty, not one whose devices all come or go."""
    run = _train(joins={1: 2, 2: 2, 3: 3}, leaves={0: 5, 1: 6})
    assert run.summary["rounds"] == 10


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"joins": [1, 2]}, r"joins\[0\] = 1 must be a list; write pairs of device and round"),
        ({"leaves": {"1": 2}}, r"leaves\[0\]\[0\] = '1' must be a whole number; write pairs"),
        ({"churn": 0.1}, r"\[churn\] must be a table, not 0.1; in Python, a Churn"),
        ({"start": 3}, "start = 3 is no path; give the folder of a finished run"),
    ],
)
def test_who_comes_and_goes_in_python_is_a_sentence_too(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _train(**option)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"federation.joins": [[3, 5]]}, r"unknown key 'joins', which belongs in \[run\]; known"),
        ({"leaves": [[3, 5]]}, r"the file has an unknown key 'leaves', which belongs in \[run\]"),
        ({"run.active": 2}, r"unknown key 'active', which belongs in \[federation\]"),
        ({"model.diversity": 2}, r"unknown key 'diversity', which belongs in \[data\]"),
        ({"run.joins": [3, 5]}, r"write pairs of device and round, such as \[\[4, 5\]\]"),
        ({"run.leaves": [[3, 5, 6]]}, "write pairs of device and round"),
        ({"run.joins": [[3, 5], [3, 8]]}, "run.joins names device 3 twice; keep one round of it"),
    ],
)
def test_who_comes_and_goes_is_written_in_one_place_and_one_way(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(job_table(**changes))
