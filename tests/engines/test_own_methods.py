"""Methods and rules from outside: SCAFFOLD, FedBuff, and an availability rule with a time-varying
mixing (`examples`), on every engine of this machine, against naive float64 oracles
(`support.naive`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
import oracle
from fedbcd.algorithm.method import Facts, Method, Part, Sent
from fedbcd.algorithm.plan import Steps
from fedbcd.compute.contributions import UPLOAD
from fedbcd.compute.numbers import Numbers
from fedbcd.engines.setup import make_machines, make_numbers, make_reader
from fedbcd.errors import ConfigError
from fedbcd.own import imports
from fedbcd.record.eventlog import LogReader
from fedbcd.schedule.log import LogRounds
from support.naive import CASES, DEVICES, ETA, ORACLES, STEP, Naive, lines, own
from support.runs import largest_difference

every_case = pytest.mark.parametrize("case", CASES)


def trained(case: str, rounds: int = 8, **options: Any) -> fb.Run:
    return fb.train(lines(), own(case), rounds=rounds, **options)


@every_case
def test_it_is_what_its_oracle_says(case: str, tmp_path: Path) -> None:
    one_by_one = trained(case, dtype=torch.float64, max_batch=1, out=tmp_path)
    z = ORACLES[case](Naive(lines(), tmp_path), STEP, ETA)
    assert float((one_by_one.global_VF - torch.from_numpy(z)).abs().max()) < 1e-12
    assert largest_difference(trained(case, dtype=torch.float64), one_by_one) < 1e-12
    assert largest_difference(trained(case), one_by_one) < 1e-5
    assert fb.replay(tmp_path / "events.jsonl", lines(), trust=True)["digest"] == one_by_one.digest


@every_case
def test_a_resumed_run_is_the_whole_one(case: str, tmp_path: Path) -> None:
    """Also where uploads wait for the next phase when it is saved."""
    whole = trained(case, 9, out=tmp_path / "whole")
    for rounds in (3, 4, 6, 9):
        run = trained(case, rounds, out=tmp_path / "parts", resume=rounds > 3)
    assert run.digest == whole.digest


def test_a_rule_says_who_is_there(tmp_path: Path) -> None:
    """All servers wait for all, so a server's phase is the coordinator's round."""
    trained("own_availability", 12, out=tmp_path)
    phase, active = 0, []
    for name, number, says in Naive(lines(), tmp_path).happened():
        if name == "OpenPhase":
            phase = says["phase"]
        elif name == "Trained":
            active.append((number, phase))
    there = {
        (i, t)
        for i in range(DEVICES)
        for t in range(13)
        if i % 2 == t % 2 or oracle.unit(oracle.address(0, oracle.AVAILABLE, i, t)) < 0.1
    }
    assert len(active) >= 48
    assert {*active} <= there
    assert any(i % 2 != t % 2 for i, t in active)


def test_a_phase_ends_whoever_is_lost(tmp_path: Path) -> None:
    """Where those that a rule names are lost on the way, others make up for them."""
    rule = own("own_availability").availability
    clock, cloud = fb.Clock(dropout=0.4), fb.RigorousCloud(first=2)
    run = trained("fedbuff", 12, availability=rule, clock=clock, cloud=cloud, seed=50, out=tmp_path)
    assert run.summary["rounds"] == 12
    assert fb.replay(tmp_path / "events.jsonl", lines(), trust=True)["digest"] == run.digest


def test_uploads_that_wait_for_their_phase_are_saved(tmp_path: Path) -> None:
    """After every batch of sessions, whose uploads are then not counted, everything is saved and
    begins again.
    """
    whole = trained("fedbuff", out=tmp_path)
    spec, federation = whole.spec, lines()
    assert spec is not None

    def fresh() -> Numbers:
        return make_numbers(spec, federation, torch.device("cpu"))

    reader, numbers, waited = make_reader(spec, federation), fresh(), 0
    with imports(allowed=True):
        rounds = LogRounds(
            LogReader(tmp_path / "events.jsonl"),
            make_machines(spec, federation),
            reader,
            numbers.method,
        )
        for round_ in rounds:
            for part in round_.work:
                numbers.play(replace(round_, work=(part,)))
                state, held, before = numbers.state(), numbers.held, numbers
                waited += any(name.startswith(UPLOAD) for name in state)
                numbers = fresh()
                numbers.load_state(state, held, ())
                numbers.tally.sums = numbers.sums = before.sums
    assert waited > 10
    assert numbers.digest() == whole.digest


# ------------------------------------------------------------------------------------------------
# refusals
class NoDataclass:
    def method(self, facts: Facts) -> Method:
        raise NotImplementedError


@dataclass(frozen=True)
class NoMethod:
    step: float = 0.1


@dataclass(frozen=True)
class AnotherThing:
    def method(self, facts: Facts) -> Any:
        return {"plan": facts.devices}


@dataclass(frozen=True)
class Made:
    """A method with this in it."""

    changes: Any

    def method(self, facts: Facts) -> Method:
        return Method(**{"name": "made", "plan": (Steps(0.1),), **self.changes})


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (NoDataclass(), "NoDataclass object.* is no frozen dataclass"),
        (NoMethod(), r"NoMethod\(step=0.1\) has no method\(facts\); give a value of fb.FedBCD"),
        (NoMethod, "NoMethod is a class; give a value of it"),
        ("scaffold:Scaffold", "has no method"),
        (AnotherThing(), "AnotherThing.method returns {'plan': 8}; it must return a"),
        (Made({"plan": (Steps(0.1, of="y"),)}), "plan reads 'y', which is nothing that a device"),
        (Made({"plan": [Steps(0.1)]}), "must be a tuple of operations"),
        (Made({"sends": (Sent("d"),)}), "sends 'd', which its plan does not set"),
        (Made({"personal": "y"}), "personal='y' is no slot; name one of x, or 'z'"),
        (Made({"result": "c"}), "result='c' is none of z"),
        (Made({"model": (Part("c"),)}), "must begin with z"),
        (Made({"hears": 2}), "hears=2 must be between 1 and 1"),
        (Made({"cloud": "graph"}), "cloud = 'graph' must be one of 'any', 'sync', 'async'"),
        (Made({"at_once": 0}), "at_once=0 must be 1 or more"),
        (Made({"discount": lambda age: 2.0 - age}), "above 0 and at most 1"),
        (Made({"discount": lambda _: 0.5, "counts": "members"}), "let only the active ones count"),
    ],
)
def test_what_is_no_method_is_refused_with_the_remedy(algorithm: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fb.train(lines(), algorithm, rounds=1)


@pytest.mark.parametrize(
    ("case", "options", "says"),
    [
        ("scaffold", {"cloud": fb.AsyncCloud(2)}, "for clouds with one z .* the sync cloud"),
        ("fedbuff", {"cloud": fb.SyncCloud()}, "for clouds with a z for each .* the async cloud"),
        ("fedbuff", {"active": 4}, "at_once=3 must be active=4 or more"),
        ("fedbuff", {"ahead": True}, "weigh uploads by their age|more than a loop"),
    ],
)
def test_what_cannot_be_is_refused(
    case: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(case, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
