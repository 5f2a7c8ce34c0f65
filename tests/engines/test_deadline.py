"""Phases that end with those that have come, and let in more devices than they need.

That their numbers are right: `test_against_oracle.py`; what the machine does:
`unit/test_protocol_server.py`.
"""

from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import parse
from fedbcd.planner.server_time import device_model
from fedbcd.protocol.messages import DeadlinePassed
from fedbcd.record.eventlog import LogReader
from support.runs import BCD, federation, job_table

SHORT = fb.Deadline(after=2.0, least=1, spare=1)


def train(deadline: fb.Deadline | None, rounds: int = 12, **more: Any) -> fb.Run:
    return fb.train(
        federation(), BCD, active=3, rounds=rounds, deadline=deadline, certify_every=0, **more
    )


def test_rounds_are_shorter_and_the_log_says_why_and_replays(tmp_path: Path) -> None:
    """A deadline is an event in the log, so a replay needs no clock; a run that is resumed is the
    run that was not interrupted.
    """
    run = train(SHORT, out=tmp_path / "run")
    assert run.history.last.clock < train(None).history.last.clock
    passed = [
        step
        for step in LogReader(tmp_path / "run" / "events.jsonl")
        if isinstance(step.event, DeadlinePassed)
    ]
    assert any(step.commands for step in passed)
    assert fb.replay(tmp_path / "run" / "events.jsonl", federation())["digest"] == run.digest
    train(SHORT, rounds=5, out=tmp_path / "twice")
    assert train(SHORT, out=tmp_path / "twice", resume=True).digest == run.digest


def test_a_rule_that_never_matters_changes_no_number() -> None:
    """A deadline that does not come, with nobody to spare: the run without, whose numbers are what
    they were.
    """
    plain = train(None)
    assert train(fb.Deadline(after=1e9)).digest == plain.digest
    assert train(fb.Deadline()).digest == plain.digest


def test_a_plan_plays_phases_with_a_deadline() -> None:
    (job,) = parse(job_table(**{"run.deadline": {"after": 2.0}}))
    source = device_model(job)
    assert source.recorded
    played = source.sample(2, 500, 0)
    (plain,) = parse(job_table())
    assert played.mean() < device_model(plain).sample(2, 500, 0).mean()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"after": 0.0}, r"deadline.after=0.0 must be finite and above 0"),
        ({"after": float("nan")}, r"deadline.after=nan must be finite"),
        ({"least": 0}, r"deadline.least=0 must be 1 or more"),
        ({"spare": -1}, r"deadline.spare=-1 must be 0 or more"),
        ({"least": 4}, r"deadline.least=4 must be at most active=3"),
    ],
)
def test_a_rule_that_cannot_be_is_a_sentence(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(fb.Deadline(**rule))
