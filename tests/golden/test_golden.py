"""A few of the cases of `make golden`, against what is written down; and that what compares them
would notice.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from golden import everyday, tree
from golden.__main__ import Golden, compared
from golden.cases import ENGINES, PAIRS, all_cases
from golden.meant import MEANT
from golden.outcome import apart, differences, plain
from golden.wheel import WHEEL

RECORDED = everyday.read()
HERE = everyday.machine()


@pytest.mark.parametrize("case", everyday.few(), ids=lambda case: case["name"])
def test_a_case_comes_to_what_is_written_down(case: dict[str, Any]) -> None:
    assert everyday.wrong(case, RECORDED, HERE) == []


def test_on_another_machine_values_are_compared() -> None:
    case = everyday.few()[0]
    assert everyday.wrong(case, RECORDED, "torch 99, ABACUS") == []
    other = copy.deepcopy(RECORDED)
    other["values"][case["name"]]["models"]["x"][3] += 1e-6
    (sentence,) = everyday.wrong(case, other, "torch 99, ABACUS")
    assert sentence.startswith("models.x[3]: ")


def test_another_momentum_is_noticed_by_its_bits_and_by_its_values() -> None:
    """In the last place of a float64, as a wrong order of operations would be; and in one that
    shows elsewhere too.
    """
    case = copy.deepcopy(everyday.few()[0])
    case["method"]["momentum"] = 0.9000000000000001
    assert HERE not in RECORDED["digests"] or everyday.wrong(case, RECORDED, HERE)
    case["method"]["momentum"] = 0.90001
    assert everyday.wrong(case, RECORDED, "torch 99, ABACUS")


def test_one_changed_bit_is_named_with_its_tensor(tmp_path: Path) -> None:
    models = {"x": torch.zeros(4, 6), "z": torch.ones(2, 6)}
    outcome = {
        "digest": "a",
        "models": models,
        "tensors": [("weight", 0, 4), ("bias", 4, 6)],
        "history": [{"gap": float("nan")}],
    }
    changed = copy.deepcopy(outcome) | {"digest": "b"}
    changed["models"]["z"][1, 5] = 1 + 2**-20
    for name, found in (("before", outcome), ("tree", changed)):
        (tmp_path / name).mkdir()
        torch.save(found["models"], tmp_path / name / "models.pt")
    expected, found = (json.loads(json.dumps(plain(each))) for each in (outcome, changed))
    assert list(compared(expected, expected, tmp_path / "before", tmp_path / "before")) == []
    first, *wrong = compared(expected, found, tmp_path / "before", tmp_path / "tree")
    assert first == "models differ: x by up to 0, z by up to 9.5e-07"
    assert [line.partition(":")[0] for line in wrong] == ["digest", "models.z", "models.z bias"]


def test_an_error_of_either_is_a_difference(tmp_path: Path) -> None:
    fine: dict[str, Any] = {"digest": "a", "models": {}}
    failed = {"error": "ValueError: no", "traceback": ""}
    assert list(compared(fine, failed, tmp_path, tmp_path)) == ["tree: ValueError: no"]
    assert list(compared(failed, failed, tmp_path, tmp_path)) == [
        "wheel: ValueError: no",
        "tree: ValueError: no",
    ]


def test_what_only_the_tree_says_is_no_difference_and_what_it_leaves_out_is_one() -> None:
    assert list(differences({"a": 1}, {"a": 1, "b": 2})) == []
    assert list(differences({"a": []}, {"a": [1]})) == []
    assert list(differences({"a": [1]}, {"a": []})) == ["a has 0 entries, not 1"]
    assert list(differences({"a": [1, 2]}, {"a": [1]})) == ["a has 1 entries, not 2"]
    assert list(differences({"a": {"b": 1.0}}, {"a": {}})) == ["a.b is missing"]
    assert list(differences({"a": True}, {"a": 1})) == ["a: True before, 1 now"]
    assert list(apart({"a": [1.0, 2]}, {"a": [1.0 + 1e-10, 2]}, 1e-9)) == []
    assert list(apart({"a": [1.0, 2]}, {"a": [1.0, 3]}, 1e-9)) == [".a[1]: 2 before, 3 now"]


CLOCK = 28.17764896506


def _outcome(clock: float = CLOCK, gap: float = 0.5, **changes: Any) -> dict[str, Any]:
    return {"history": [{"clock": clock, "gap": gap}], "digest": "a", "models": {}, **changes}


@pytest.mark.parametrize(
    ("case", "found", "wrong"),
    [
        ("clock-weibull-gamma: a", _outcome(CLOCK * (1 + 4e-14)), 0),
        ("clock-weibull-gamma: a", _outcome(CLOCK * (1 + 4e-13)), 1),
        ("clock-weibull-gamma: a", _outcome(gap=0.5 + 1e-15), 1),
        ("clock-weibull-gamma: a", _outcome(CLOCK * (1 + 4e-14), digest="b"), 1),
        ("clock-weibull-gamma: a", _outcome(error="ValueError: no"), 1),
        ("clock-pareto: a", _outcome(CLOCK * (1 + 4e-14)), 1),
    ],
)
def test_a_difference_that_is_meant_passes_and_any_other_fails(
    case: str,
    found: dict[str, Any],
    wrong: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    golden = Golden(tmp_path, tmp_path, tmp_path, [])
    golden._judge(case, _outcome(), found, 0.0)
    assert golden.summary(0.0) == wrong
    said = capsys.readouterr().out
    assert ("DIFFERS" in said) == bool(wrong)
    assert ("meant since 2f34877" in said) == (not wrong)


def test_a_case_without_a_difference_is_the_same_even_where_one_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = Golden(tmp_path, tmp_path, tmp_path, [])
    golden._judge("clock-weibull-gamma: a", _outcome(), _outcome(), 0.0)
    assert golden.summary(0.0) == 0
    assert "same" in capsys.readouterr().out


def test_every_difference_that_is_meant_names_cases_that_there_are() -> None:
    names = [case["name"] for case in all_cases()]
    assert all(any(name.startswith(each.cases) for name in names) for each in MEANT)


def test_every_method_is_compared_on_every_cloud_and_engine() -> None:
    named = {case["name"] for case in all_cases()}
    for method, cloud in PAIRS:
        for engine in ENGINES:
            logged = (
                "ahead" not in engine
                or cloud == "sync"
                or (cloud == "async" and "-i" not in method)
            )
            dtypes = ("float32",) if "chain" in engine else ("float64", "float32")
            assert not logged or {f"{method}/{cloud}/{engine}/{dtype}" for dtype in dtypes} <= named


def test_a_case_that_leaves_something_to_a_default_is_refused(tmp_path: Path) -> None:
    case = copy.deepcopy(everyday.few()[0])
    del case["method"]["penalty"]
    with pytest.raises(AssertionError, match=r"leaves \{'penalty'\} to defaults"):
        tree.perform(case, tmp_path, None)


def test_the_wheel_is_small() -> None:
    assert WHEEL.stat().st_size < 700_000
