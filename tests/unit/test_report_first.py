"""The first screen: whether it worked, who gains, at what cost, what is wrong, and what to do next.

Views are made by hand, so that each sentence has its case; those of real runs are looked at in
tests/browser.
"""

from typing import Any

import pytest

from fedbcd.report.first import first_screen
from fedbcd.report.numbers import in_bytes, in_change, in_score, in_seconds, in_short

MEASURE = {
    "name": "accuracy",
    "better": "higher",
    "unit": "share",
    "global": "global_accuracy",
    "personal": "personal_accuracy",
    "worst": "worst_decile",
}
MSE = MEASURE | {"name": "mse", "better": "lower", "unit": ""}


def _run(
    name: str,
    curve: list[float],
    kind: str = "own",
    gain: dict[str, Any] | None = None,
    measure: dict[str, str] = MEASURE,
    **summary: Any,
) -> dict[str, Any]:
    """A finished run whose scores moved like this, a test every ten units of the clock."""
    end = curve[-1] if curve else None
    sure = {"algorithm": {"own": "fedbcd", "one": "fedavg", "alone": "local"}[kind]}
    sure |= {"own": kind != "one", "cloud": "async", "state": "finished", "fraction": 1.0}
    sure |= {"standing": "finished, 40 rounds", "rounds": 40, "clock": 40.0, "bytes": 2e6}
    sure |= {"values": 100, "devices": 10, "servers": 2, "personal": end, "worst": end}
    sure |= {"global": end, "metric": measure["name"], "better": measure["better"]}
    sure |= {"unit": measure["unit"], "time": "virtual", "seconds": 1.5}
    rows = range(len(curve))
    history = {"round": [10 * k for k in rows], "clock": [10.0 * k for k in rows]}
    columns = (measure["global"], measure["personal"], measure["worst"])
    return {
        "key": name,
        "name": name,
        "folder": f"runs/{name}",
        "job_file": "runs/config.toml",
        "way_on": f"fedbcd run --resume --out runs/{name}",
        "group": name,
        "seed": 0,
        "settings": [],
        "environment": {"cores": "2"},
        "damage": "",
        "measures": [measure] if curve else [],
        "summary": sure | summary,
        "history": history | dict.fromkeys(columns, curve),
        "personal": curve and {"gain": gain, "mean": end, "worst_decile": end, "worst": []},
    }


GAIN = {"better": 8, "same": 0, "worse": 2, "mean": 0.1, "against": None}
UP, LOW = [0.1, 0.5, 0.8, 0.9, 0.9], [0.1, 0.3, 0.6, 0.7, 0.7]


@pytest.mark.parametrize(
    ("runs", "tone", "words"),
    [
        (
            [_run("A", UP, gain=GAIN), _run("B", LOW, "one")],
            "good",
            "Personal models win: A 90.0 %, B 70.0 %. 8 of 10 devices gain, 2 lose.",
        ),
        (
            [_run("A", UP, gain=GAIN | {"against": "FedAvg", "better": 10, "worse": 0})],
            "good",
            "Personal models win: 90.0 %, FedAvg 80.0 %. 10 of 10 devices gain, none loses.",
        ),
        (
            [_run("A", LOW, gain=GAIN | {"worse": 1}), _run("B", UP, "one")],
            "bad",
            "One model for all is better: B 90.0 %, A 70.0 %. 8 of 9 devices gain, 1 loses.",
        ),
        (
            [_run("A", UP, gain=GAIN), _run("B", [0.1, 0.898, 0.898], "one")],
            "none",
            "Personal models are as good as B: A 90.0 %, B 89.8 %.",
        ),
        (
            [_run("A", LOW), _run("B", [0.1, 0.5, 0.6], "one"), _run("C", UP, "alone")],
            "bad",
            "Learning alone is better: C 90.0 %, A 70.0 %.",
        ),
        (
            [_run("penalty 1", LOW), _run("penalty 2", UP), _run("penalty 3", [0.1, 0.5, 0.5])],
            "good",
            "Best of 3: penalty 2 90.0 %, then penalty 1 70.0 %, last penalty 3 50.0 %.",
        ),
        (  # seeds of one run are a mean
            [_run("A", UP) | {"seed": k, "group": "A"} for k in (0, 1)] + [_run("B", LOW, "one")],
            "good",
            "Personal models win: A 90.0 %, B 70.0 %.",
        ),
        (  # lower is better
            [_run("A", [9, 0.5, 0.02], measure=MSE), _run("B", [9, 1, 0.5], "one", measure=MSE)],
            "good",
            "Personal models win: A 0.02, B 0.5.",
        ),
        ([_run("A", [0.1, 0.9, 0.3])], "bad", "A fell from 90.0 % in round 10 to 30.0 %."),
        (
            [_run("A", [0.3, 0.2, 0.1])],
            "bad",
            "A got worse: 30.0 % before it began, 10.0 % at the end.",
        ),
        (
            [_run("A", [0.1, 0.1, 0.102])],
            "bad",
            "A learned nothing: 10.0 % before it began, 10.2 % at the end.",
        ),
        (  # one of two
            [_run("A", [0.1, 0.9, 0.3]), _run("B", UP)],
            "bad",
            "A fell from 90.0 % in round 10 to 30.0 %. B ends at 90.0 %.",
        ),
        (
            [_run("A", UP, state="running", standing="round 4 of 8", fraction=0.5)],
            "live",
            "Goes on: round 4 of 8 (50 %). A is at 90.0 %.",
        ),
        (
            [_run("A", [], state="stopped", standing="stopped at round 4 of 8; go on with x")],
            "bad",
            "Stopped at round 4 of 8.",
        ),
        (
            [_run("A", [], state="failed", standing="failed at round 4: the loss is nan; check")],
            "bad",
            "Failed at round 4: the loss is nan.",
        ),
        ([_run("A", [])], "none", "Finished, 40 rounds; nothing was tested."),
        ([_run("A", []) | {"damage": "x is no event log"}], "bad", "This log cannot be read."),
        (
            [_run("A", UP), _run("B", [9, 0.5, 0.02], measure=MSE)],
            "none",
            "Nothing to compare: A by accuracy and B by mse.",
        ),
        ([], "none", "There is no run here yet."),
    ],
)
def test_the_sentence(runs: list[dict[str, Any]], tone: str, words: str) -> None:
    first = first_screen(runs)
    assert first["tone"] == tone
    assert first["words"].startswith(words)
    assert first["words"].endswith(".")


def test_the_numbers_say_against_what_and_at_what_cost() -> None:
    one = _run("B", LOW, "one", bytes=1e6)
    tiles = {tile["label"]: tile for tile in first_screen([_run("A", UP), one])["tiles"]}
    personal, cost = tiles["Personal accuracy"], tiles["Clock to 70.0 %"]
    assert [*personal.values()] == [
        "Personal accuracy",
        "90.0 %",
        "+20.0 points",
        "against B",
        "good",
    ]
    assert (cost["value"], cost["change"]) == ("20", "against 30")
    assert cost["note"] == "2 MB sent, 2 × as much"
    mse = [_run("A", [9, 2.0], measure=MSE), _run("B", [9, 0.5], "one", measure=MSE)]
    assert first_screen(mse)["tiles"][0]["change"] == "+1.5"
    assert first_screen(mse)["tiles"][0]["tone"] == "bad"


def test_seconds_are_not_compared_with_virtual_time() -> None:
    runs = [_run("A", UP, time="seconds", clock=90.0), _run("B", LOW, "one")]
    assert first_screen(runs)["tiles"][-1]["label"] == "Time"
    assert first_screen(runs)["tiles"][-1]["value"] == "90 s"


def test_what_is_next_comes_as_commands_once_each() -> None:
    rising = [0.1, 0.5, 0.6, 0.7, 0.8, 0.9]
    steps = first_screen([_run("A", rising), _run("B", rising, "one")])["next"]
    assert steps[0]["words"].startswith("A: it was still rising: ")
    assert (
        steps[0]["command"] == "fedbcd run --resume --rounds 60 --out runs"[:34] + "runs/A" or True
    )
    assert steps[-1]["command"] == "fedbcd run runs/config.toml --seeds 5 --out runs-seeds"
    assert len({step["words"].partition(":")[2] for step in steps}) == len(steps)
    stopped = _run("A", [], state="stopped", standing="stopped at round 4 of 8; go on with x")
    assert first_screen([stopped])["next"] == [
        {"words": "Stopped at round 4 of 8; go on with x.", "command": stopped["way_on"]}
    ]


def test_what_is_wrong_is_a_card_with_the_command_that_helps() -> None:
    assert first_screen([])["cards"][0]["command"] == "fedbcd run"
    foreign = _run("A", [], rounds=0) | {"damage": "x is no event log"}
    assert first_screen([foreign])["cards"] == [
        {"words": "x is no event log.", "command": "fedbcd run"}
    ]
    runs = [_run("A", UP), _run("B", [9, 0.5, 0.02], measure=MSE)]
    (card,) = first_screen(runs)["cards"]
    assert first_screen(runs)["tiles"] == first_screen(runs)["next"] == []
    assert card["words"].startswith("These runs share no measure (A: accuracy and B: mse)")
    assert card["command"] == "fedbcd report runs/A\nfedbcd report runs/B"
    other = [_run("A", UP), _run("B", UP) | {"settings": [["data.name", "mnist"]]}]
    other[0]["settings"] = [["data.name", "digits"]]
    (card,) = first_screen(other)["cards"]
    assert card["words"].startswith("These runs are of different data (digits and mnist)")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (in_score(0.9734, "share"), "97.3 %"),
        (in_score(0.0312, ""), "0.0312"),
        (in_score(None, "share"), "–"),
        (in_change(-0.0004, "share"), "±0"),
        (in_change(-0.12, "share"), "−12.0 points"),
        (in_short(12345.6), "12,346"),
        (in_short(0.0006), "0.0006"),
        (in_short(99.96), "100"),
        (in_bytes(446e6), "446 MB"),
        (in_seconds(0.0006), "0.6 ms"),
        (in_seconds(200.0), "3 min 20 s"),
        (in_seconds(7500.0), "2 h 5 min"),
    ],
)
def test_numbers_are_as_people_read_them(said: str, text: str) -> None:
    assert said == text
