"""The log is the schedule: a replay needs nothing else, ends with the same bits, and says where a
log was touched.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.errors import RecordError, ReplayMismatch
from support.runs import BCD, BCDI, CASES, LOGISTIC, Answer, fedbcd, federation, train, write_job

CHAIN = [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]
CLOUDS: dict[str, dict[str, Any]] = {
    "sync": {"name": "sync"},
    "async": {"name": "async", "first": 2},
    "rigorous": {"name": "rigorous", "first": 2},
    "graph": {"name": "graph", "mixing": CHAIN},
}
JOBS = {
    f"{algorithm}-{cloud}": (algorithm, cloud)
    for algorithm in ("fedbcd", "fedbcd-i")
    for cloud in CLOUDS
}
JOBS |= {f"{algorithm}-sync": (algorithm, "sync") for algorithm in ("fedavg", "fedprox")}


# ------------------------------------------------------------------------------------------------
# the same models
@pytest.mark.parametrize("name", JOBS)
def test_every_algorithm_on_every_cloud_replays_from_the_command_line(
    name: str, tmp_path: Path
) -> None:
    algorithm, cloud = JOBS[name]
    job = write_job(tmp_path / "job.toml", **{"algorithm.name": algorithm, "cloud": CLOUDS[cloud]})
    run = fedbcd("run", job, "--out", tmp_path / "run", "--json")
    assert run.code == 0, run.err
    for log in (tmp_path / "run", tmp_path / "run" / "events.jsonl"):
        again = fedbcd("replay", log, "--json")
        assert again.code == 0, again.err
        assert again.summary == {
            "rounds": 4,
            "clock": run.summary["clock"],
            "digest": run.summary["digest"],
            "complete": True,
        }
        assert "the same models after 4 rounds" in again.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_of_a_gpu_that_is_not_here_replays_on_the_cpu_and_that_is_said(
    tmp_path: Path,
) -> None:
    assert fedbcd("run", write_job(tmp_path / "job.toml"), "--out", tmp_path / "run").code == 0
    log = tmp_path / "run" / "events.jsonl"
    header, *lines = log.read_text().splitlines(keepends=True)
    table = json.loads(header)
    table["job"]["run"]["torch_device"] = "cuda"
    log.write_text(json.dumps(table) + "\n" + "".join(lines))
    again = fedbcd("replay", log)
    assert again.code == 0, again.err
    assert "there is no 'cuda' here" in again.err


def test_of_a_run_planned_ahead_the_schedule_is_compared_and_that_is_said(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", **{"run.ahead": True})
    assert fedbcd("run", job, "--out", tmp_path / "run").code == 0
    again = fedbcd("replay", tmp_path / "run")
    assert again.code == 0, again.err
    assert "the same schedule after 4 rounds" in again.err
    assert "digests were not compared: rounds planned ahead" in " ".join(again.err.split())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options", [{}, {"max_batch": 1, "seed": 5}], ids=["together", "one-by-one"]
)
def test_every_algorithm_on_every_cloud_replays_from_the_api(
    case: str, options: dict[str, int], tmp_path: Path
) -> None:
    run = train(case, rounds=4, model=LOGISTIC, out=tmp_path, **options)
    result = fb.replay(tmp_path / "events.jsonl", federation(LOGISTIC))
    assert result == {
        "rounds": 4,
        "clock": run.summary["clock"],
        "digest": run.digest,
        "complete": True,
    }


@pytest.mark.filterwarnings("ignore:.*never mixes:fedbcd.errors.DivergenceWarning")
@pytest.mark.parametrize("algorithm", [BCD, BCDI], ids=lambda a: a.name)
def test_other_clocks_joins_and_leaves_replay(algorithm: fb.Algorithm, tmp_path: Path) -> None:
    run = fb.train(
        federation(LOGISTIC),
        algorithm,
        cloud=fb.AsyncCloud(first=1),
        rounds=8,
        active=2,
        clock=fb.Clock(fb.Weibull(0.7), fb.Trace((0.5, 1.0, 3.0))),
        joins={5: 2},
        leaves={0: 3, 8: 5},
        out=tmp_path,
    )
    assert fb.replay(tmp_path / "events.jsonl", federation(LOGISTIC))["digest"] == run.digest


# ------------------------------------------------------------------------------------------------
# incomplete logs
def test_the_log_of_a_stopped_run_replays_as_incomplete(tmp_path: Path) -> None:
    run = train("fedbcd-async", rounds=8, model=LOGISTIC, out=tmp_path, should_stop=lambda: True)
    assert not run.finished
    result = fb.replay(tmp_path / "events.jsonl", federation(LOGISTIC))
    assert result == {
        "rounds": 1,
        "clock": run.summary["clock"],
        "digest": run.digest,
        "complete": False,
    }


def test_the_log_of_a_killed_run_replays_as_far_as_it_goes(recorded: Path) -> None:
    """Whole lines, no end: what is there is consistent, and is said to be incomplete."""
    whole = fedbcd("replay", recorded, "--json").summary
    _write(recorded, _lines(recorded)[:-60])
    answer = fedbcd("replay", recorded, "--json")
    assert answer.code == 0
    assert answer.summary["complete"] is False
    assert answer.summary["rounds"] < whole["rounds"]
    assert "the log has no end: the run was stopped or killed" in answer.err


# ------------------------------------------------------------------------------------------------
# logs that were touched
@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("original")
    cloud = {"name": "async", "first": 2}
    job = write_job(place / "job.toml", cloud=cloud, run={"rounds": 4, "evaluate_every": 4})
    assert fedbcd("run", job, "--out", place / "run").code == 0
    return (place / "run" / "events.jsonl").read_bytes()


@pytest.fixture
def recorded(original: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_bytes(original)
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _find(lines: list[str], text: str, which: int = 0) -> int:
    """The position of a line that has `text`, past the beginning."""
    return [k for k, line in enumerate(lines) if text in line][which]


def _change(path: Path, position: int, change: Callable[[dict[str, Any]], None]) -> str:
    """Change one line; returns how messages name it."""
    lines = _lines(path)
    line = json.loads(lines[position])
    change(line)
    lines[position] = json.dumps(line)
    _write(path, lines)
    return f"{path} line {position + 1}"


def _assert_refused(path: Path, code: int, *words: str) -> Answer:
    before = path.read_bytes()
    answer = fedbcd("replay", path, "--json")
    assert answer.code == code, answer
    assert answer.out == ""
    for word in words:
        assert word in answer.err
    assert path.read_bytes() == before
    return answer


def test_a_changed_number_in_an_event_is_named(recorded: Path) -> None:
    def other_device(line: dict[str, Any]) -> None:
        line["event"]["UpdateRequested"]["device"] += 1

    place = _change(
        recorded, _find(_lines(recorded), '"event":{"UpdateRequested"', 6), other_device
    )
    _assert_refused(recorded, 6, place)


def test_a_changed_number_in_a_command_is_named(recorded: Path) -> None:
    def other_activation(line: dict[str, Any]) -> None:
        line["do"][0]["Absorb"]["activation"] += 1

    place = _change(recorded, _find(_lines(recorded), '"do":[{"Absorb"', 3), other_activation)
    _assert_refused(recorded, 6, place, "differently than recorded")


def test_a_changed_time_is_named(recorded: Path) -> None:
    lines = _lines(recorded)
    position = _find(lines, "Trained", 5)

    def earlier(line: dict[str, Any]) -> None:
        line["t"] /= 2

    place = _change(recorded, position, earlier)
    _assert_refused(recorded, 6, place, "time goes back")


def test_an_impossible_number_of_steps_is_named(recorded: Path) -> None:
    def many(line: dict[str, Any]) -> None:
        line["event"]["Trained"]["steps"] = 99

    place = _change(recorded, _find(_lines(recorded), '"event":{"Trained"', 2), many)
    _assert_refused(recorded, 6, place, "took 99 steps, but the run allows 1 to 5")


def test_a_possible_but_other_number_of_steps_ends_with_another_digest(recorded: Path) -> None:
    def other(line: dict[str, Any]) -> None:
        line["event"]["Trained"]["steps"] = line["event"]["Trained"]["steps"] % 5 + 1

    _change(recorded, _find(_lines(recorded), '"event":{"Trained"', 2), other)
    _assert_refused(recorded, 6, f"{recorded} line {len(_lines(recorded))} ends with digest")


def test_a_model_that_never_was_is_named(recorded: Path) -> None:
    """The event and its command agree on the lie; the numbers do not."""
    lines = _lines(recorded)
    position = _find(lines, '"event":{"Activated"')
    lines[position] = lines[position].replace('"model":"z/', '"model":"z/77/')
    _write(recorded, lines)
    _assert_refused(recorded, 6, f"{recorded} line ", "there is no model 'z/77/")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [("digest", "00", 6), ("rounds", 3, 6), ("clock", 1.5, 6), ("transitions", 7, 4)],
)
def test_a_changed_end_is_named(recorded: Path, key: str, value: Any, code: int) -> None:
    def change(line: dict[str, Any]) -> None:
        line["end"][key] = value

    place = _change(recorded, len(_lines(recorded)) - 1, change)
    _assert_refused(recorded, code, place, str(value))


def test_an_end_that_is_no_object_is_named(recorded: Path) -> None:
    place = _change(recorded, len(_lines(recorded)) - 1, lambda line: line.update(end=5))
    _assert_refused(recorded, 4, place, "is damaged")


def test_any_removed_line_is_noticed(original: bytes, recorded: Path) -> None:
    lines = original.decode().splitlines()
    job = json.loads(lines[0])["job"]
    for position in range(1, len(lines) - 1, max(1, len(lines) // 25)):
        _write(recorded, lines[:position] + lines[position + 1 :])
        with pytest.raises((RecordError, ReplayMismatch), match=r"events\.jsonl line \d+"):
            fb.replay(recorded, _federation_of(job))


def test_a_repeated_line_is_noticed(recorded: Path) -> None:
    lines = _lines(recorded)
    position = _find(lines, '"event":{"Uploaded"', 4)
    _write(recorded, lines[: position + 1] + lines[position:])
    _assert_refused(recorded, 6, f"{recorded} line {position + 2}", "differently than recorded")


def test_reordered_lines_are_named(recorded: Path) -> None:
    """An acknowledgement before the work that it acknowledges."""
    lines = _lines(recorded)
    trained = _find(lines, '"event":{"Trained"', 4)
    acknowledged = trained + _find(lines[trained:], '"event":{"Acknowledged"')
    lines.insert(trained, lines.pop(acknowledged))
    _write(recorded, lines)
    _assert_refused(recorded, 6, f"{recorded} line {trained + 1}", "which it has not uploaded")


def test_lines_of_different_times_in_the_wrong_order_are_named(recorded: Path) -> None:
    lines = _lines(recorded)
    first, second = (_find(lines, '"event":{"Woke"', which) for which in (1, 3))
    lines[first], lines[second] = lines[second], lines[first]
    _write(recorded, lines)
    _assert_refused(recorded, 6, f"{recorded} line ")


def test_a_log_that_is_cut_in_the_middle_of_a_line_is_named(
    recorded: Path, original: bytes
) -> None:
    recorded.write_bytes(original[: len(original) // 2])
    last = len(_lines(recorded))
    _assert_refused(
        recorded, 4, f"{recorded} line {last} is damaged or cut short", "resume the run"
    )


def test_a_line_after_the_end_is_named(recorded: Path) -> None:
    lines = _lines(recorded)
    _write(recorded, [*lines, lines[1]])
    _assert_refused(recorded, 4, f"{recorded} line {len(lines) + 1} comes after the end of the run")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "is damaged or cut short (not an object)"),
        ('{"t": 0.0}', "is not a transition that this version knows"),
        (
            '{"t": 0.0, "on": "server/0", "event": {"Exploded": {}}, "do": []}',
            "unknown message or fields: Exploded",
        ),
        (
            '{"t": 0.0, "on": "server/0", "event": {"Isolated": {"phase": "one"}}, "do": []}',
            "'one' is not of type",
        ),
        (
            '{"t": 0.0, "on": "server/0", "event": {"DeviceLeft": {"device": [1]}}, "do": []}',
            "[1] is not of type",
        ),
    ],
)
def test_a_line_of_another_kind_is_named(recorded: Path, line: str, words: str) -> None:
    lines = _lines(recorded)
    _write(recorded, [*lines[:9], line, *lines[10:]])
    _assert_refused(recorded, 4, f"{recorded} line 10 ", words)


def test_an_actor_that_does_not_exist_is_named(recorded: Path) -> None:
    place = _change(recorded, 9, lambda line: line.update(on="device/99"))
    _assert_refused(
        recorded, 6, place, "there is no 'device/99' in this federation of 4 servers and 16 devices"
    )


@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff\x80\x01", b"round,clock\n0,0.0\n", b'{"round": 1}\n']
)
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    _assert_refused(path, 4, str(path), "line")


def test_a_log_of_another_version_is_refused(recorded: Path) -> None:
    _change(recorded, 0, lambda line: line.update(fedbcd_log=99))
    _assert_refused(
        recorded, 4, f"{recorded} is an event log of version 99; this fedbcd reads version 1"
    )


@pytest.mark.parametrize(
    "change",
    [{"seed": "x"}, {"dtype": "int8"}, {"cloud": {"name": "fog"}}, {"joins": 3}, {"active": None}],
)
def test_a_header_that_makes_no_sense_is_refused(recorded: Path, change: dict[str, Any]) -> None:
    _change(recorded, 0, lambda line: line["identity"].update(change))
    _assert_refused(recorded, 4, str(recorded))


def test_a_log_without_its_job_is_for_the_api(tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=1, model=LOGISTIC, out=tmp_path)
    _assert_refused(
        tmp_path / "events.jsonl", 4, "was not made by 'fedbcd run'", "use fedbcd.replay()"
    )


def test_no_log_at_all_is_a_sentence(tmp_path: Path) -> None:
    answer = fedbcd("replay", tmp_path)
    assert answer.code == 4
    assert f"there is no event log at {tmp_path / 'events.jsonl'}" in answer.err


def test_other_data_or_another_model_are_refused(tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=1, out=tmp_path)
    with pytest.raises(RecordError, match="other data, other servers or another model"):
        fb.replay(tmp_path / "events.jsonl", federation(LOGISTIC))


def _federation_of(job: dict[str, Any]) -> fb.Federation:
    from fedbcd.experiments.job import parse
    from fedbcd.experiments.pool import without_none

    return parse(without_none(job))[0].make_federation()
