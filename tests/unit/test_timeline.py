"""One fold reads a log: what pages, plans, accounts and checks say of old logs stays as it was, and
a slow reading of each log agrees with it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.engines.deploy.local.account import account
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.participation import participation, recorded_participation
from fedbcd.planner.explain import explain
from fedbcd.planner.record import read_record
from fedbcd.record.eventlog import LogReader, LogWriter
from fedbcd.record.timeline import MOST_VISITS, NEVER, Timeline
from fedbcd.report.view import read_run, run_view
from fedbcd.spec import RunSpec
from support.runs import BCD, CASES, federation, train
from support.timelines import check_timeline

TESTS = Path(__file__).parents[1]
SAID = json.loads((TESTS / "engines/timelines.json").read_text())  # by 0.1.0


@pytest.fixture(params=SAID)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with a log that 0.1.0 wrote, and what it said of it."""
    (tmp_path / "events.jsonl").write_bytes((TESTS / request.param).read_bytes())
    return tmp_path, SAID[request.param]


def _of_these_keys(page: Any, said: Any) -> Any:
    """A page may say more than 0.1.0 did."""
    if isinstance(said, dict):
        return {key: _of_these_keys(page[key], value) for key, value in said.items()}
    return page


def test_pages_plans_accounts_and_checks_of_old_logs_are_as_they_were(
    old: tuple[Path, dict[str, Any]],
) -> None:
    folder, said = old
    record, page = read_record(folder), run_view(read_run(folder), "0")
    phases = [
        [p.server, p.number, p.opened, p.ended, sorted(map(_visit, p.visits.values()))]
        for p in record.phases
    ]
    mixes = [[mix.round, mix.time, list(mix.servers)] for mix in record.mixes]
    assert {"phases": phases, "mixes": mixes, "end": record.end} == said["record"]
    assert explain(folder).sentences == said["sentences"]
    assert _of_these_keys(json.loads(json.dumps(page)), said["page"]) == said["page"]
    spec = RunSpec(fb.FedBCD(), fb.SyncCloud(), active=2)
    log = folder / "events.jsonl"
    assert account(log, spec.times(federation()), Deploy(time_scale=0.25)) == said["account"]
    seen = recorded_participation(log)
    part = [seen.rounds, seen.mixes, sorted(seen.active.items()), sorted(seen.watched.items())]
    assert json.loads(json.dumps([*part, seen.clock, seen.cut])) == said["participation"]
    check_timeline(log)


def _visit(visit: Any) -> list[Any]:
    return [visit.device, visit.asked, visit.admitted, visit.uploaded, visit.steps]


@pytest.mark.parametrize("case", CASES)
def test_every_cloud_is_read_as_a_slow_reader_does(case: str, tmp_path: Path) -> None:
    moves = {"joins": {3: 1, 9: 2}, "leaves": {1: 2, 5: 3}}
    train(case, rounds=6, out=tmp_path, **moves)
    timeline = check_timeline(tmp_path / "events.jsonl")
    assert timeline.moved == {1, 3, 5, 9}
    assert len(timeline.mixes) == 6


def test_a_timeline_is_the_same_while_it_is_played(tmp_path: Path) -> None:
    """It is a log itself, so a schedule that nobody writes down is read all the same."""
    train("fedbcd-i-rigorous", rounds=4, out=tmp_path)
    read, played = check_timeline(tmp_path / "events.jsonl"), Timeline()
    for step in LogReader(tmp_path / "events.jsonl"):
        played.append(step.time, step.actor, step.event, step.commands)
    assert (played.phases, played.visits, played.mixes) == (read.phases, read.visits, read.mixes)
    servers = federation().servers
    assert participation(played, servers, True) == participation(read, servers, True)


def test_only_the_latest_visits_of_a_long_log_are_kept(tmp_path: Path) -> None:
    train("fedbcd-async", rounds=6, out=tmp_path)
    whole, short = Timeline(), Timeline(most_visits=3)
    for line in (tmp_path / "events.jsonl").read_bytes().splitlines()[1:-1]:
        whole.take(line)
        short.take(line)
    assert 3 <= len(short.visits) < 6 < len(whole.visits) < MOST_VISITS
    assert short.visits.dropped + len(short.visits) == len(whole.visits)
    kept = len(short.visits)
    for column in ("phase", "device", "activation", "asked", "steps", "uploaded", "counted"):
        assert getattr(short.visits, column) == getattr(whole.visits, column)[-kept:]
    for column in ("server", "number", "opened", "ended", "mixed", "released"):
        assert getattr(short.phases, column) == getattr(whole.phases, column)


def test_an_account_counts_a_round_once_and_an_upload_once(tmp_path: Path) -> None:
    """With K_z = 2 a round has two mixes of one iteration each; a copy of an upload is no
    activation.
    """
    twice = replace(BCD, cloud_iterations=2)
    fb.train(
        federation(), twice, cloud=fb.AsyncCloud(first=2), rounds=6, active=2, out=tmp_path / "run"
    )
    log = tmp_path / "run" / "events.jsonl"
    spec, lines = RunSpec(twice, fb.AsyncCloud(first=2), active=2), list(LogReader(log))
    times = spec.times(federation())
    found = account(log, times, Deploy())
    assert found["round_s"] == pytest.approx(_last_mix(log) / 6, abs=1e-6)
    writer = LogWriter(tmp_path / "copies.jsonl", {})
    for step in lines:
        writer.append(step.time, step.actor, step.event, list(step.commands))
        if type(step.event).__name__ == "Uploaded":
            writer.append(step.time, step.actor, step.event, [])
    writer.close()
    assert account(tmp_path / "copies.jsonl", times, Deploy()) == found


def _last_mix(log: Path) -> float:
    timeline = check_timeline(log)
    assert NEVER not in timeline.mixes.time
    return timeline.mixes.time[-1]
