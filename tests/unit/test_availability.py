"""Who of a server's members can take part in a round: by count, by chance, by a rule."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.schedule.availability import AvailableDevices
from support.methods import method_of
from support.naive import lines

MEMBERS = np.arange(10, 30)


@dataclass(frozen=True)
class Some:
    """A rule that answers what it is told to."""

    answer: Any

    def available(self, members: Any, round_: int, u: Any) -> Any:
        return self.answer


def pool(
    rule: Any = None, active: int = 3, algorithm: fb.Algorithm | None = None
) -> AvailableDevices:
    return AvailableDevices(method_of(algorithm or fb.FedBCD()), active, 0, rule)


def test_everybody_is_there_where_nothing_is_said() -> None:
    assert pool().available(MEMBERS, 5) is MEMBERS
    assert not pool().follows_rounds
    assert pool(algorithm=fb.FedBCDI()).follows_rounds
    assert len(pool(algorithm=fb.FedBCDI()).available(MEMBERS, 5)) == 16


def test_by_chance_each_round_has_others() -> None:
    found = [{*pool(fb.Chance(0.5)).available(MEMBERS, t).tolist()} for t in range(200)]
    assert all({*MEMBERS.tolist()} >= some for some in found)
    assert 1900 < sum(map(len, found)) < 2100
    assert len({frozenset(some) for some in found}) > 190


def test_others_make_up_for_too_few() -> None:
    nobody = pool(Some(np.zeros(20, dtype=bool)))
    made_up = [nobody.available(MEMBERS, t).tolist() for t in range(4)]
    assert [len(some) for some in made_up] == [3] * 4
    assert len({tuple(some) for some in made_up}) == 4
    only = pool(Some(MEMBERS == 17)).available(MEMBERS, 0)
    assert len(only) == 3
    assert only[0] == 17
    assert len(pool(Some(np.zeros(2, dtype=bool))).available(np.array([1, 2]), 0)) == 2


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Some([True]), r"gives bool of shape \(1,\) for 8 devices"),
        (Some(np.ones(8)), "gives float64 of shape"),
        (fb.SyncCloud(), r"has no available\(members, round_, u\); give a value of fb.Chance"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_before_anything_runs(rule: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fb.train(lines(1), fb.FedBCD(), availability=rule, rounds=1)
    with pytest.raises(ConfigError, match="probability=0 must be above 0"):
        fb.Chance(0)
