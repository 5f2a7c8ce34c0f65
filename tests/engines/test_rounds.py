"""A schedule is an iterator of rounds, as values: events give them, a log gives them again, and
numbers are a fold over them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.setup import make_machines, make_numbers, make_reader
from fedbcd.errors import ReplayMismatch
from fedbcd.record.eventlog import LogReader, LogWriter
from fedbcd.schedule import changes, work
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.schedule.log import LogRounds
from fedbcd.schedule.work import Round
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.runs import LOGISTIC, federation

GRAPH = fb.GraphCloud([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]])
CLOUDS = [fb.SyncCloud(), fb.AsyncCloud(first=2), fb.RigorousCloud(first=2), GRAPH]
BCD = fb.FedBCD(steps=(1, 4), batch=4)
BCDI = fb.FedBCDI(steps=(1, 4), batch=4, available=3, offline_limit=2, offline_time="free")
TIMED = replace(BCDI, offline_time="timed")
CASES = [
    *(RunSpec(BCD, cloud, active=2) for cloud in CLOUDS),
    *(RunSpec(BCDI, cloud, active=2) for cloud in CLOUDS),
    *(RunSpec(BCD, cloud, active=2, joins={3: 2, 7: 4}, leaves={0: 1, 9: 3}) for cloud in CLOUDS),
    RunSpec(BCDI, CLOUDS[1], active=2, joins={3: 2}, leaves={0: 1, 9: 3}),
    RunSpec(TIMED, fb.AsyncCloud(first=2), active=2),
    RunSpec(fb.FedAvg(steps=(1, 4), batch=4), active=2),
    RunSpec(replace(BCD, cloud_iterations=2), active=2),
]
ROUNDS = 6


def events(spec: RunSpec, log: LogWriter | None = None) -> Simulation:
    fed = federation(LOGISTIC)
    driver = Driver(make_machines(spec, fed), make_reader(spec, fed), log)
    schedule = Schedule(
        method_of(spec.algorithm), spec.clock, spec.seed, 2, spec.joins, spec.leaves
    )
    return Simulation(driver, schedule)


def from_log(spec: RunSpec, path: Path) -> Iterator[Round]:
    fed = federation(LOGISTIC)
    machines, reader = make_machines(spec, fed), make_reader(spec, fed)
    return iter(LogRounds(LogReader(path), machines, reader, spec.method_of(fed)))


def _name(spec: RunSpec) -> str:
    return f"{spec.algorithm.name}-{spec.cloud.name}" + ("-moves" * bool(spec.joins))


@pytest.mark.parametrize("spec", CASES, ids=_name)
def test_rounds_read_from_a_log_are_the_rounds_that_were_played(
    spec: RunSpec, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    log = LogWriter(path, {"identity": {}})
    played = [*islice(events(spec, log), ROUNDS)]
    log.close()
    assert [*from_log(spec, path)] == played
    assert [round_.number for round_ in played][-1] >= ROUNDS


@pytest.mark.parametrize("spec", [CASES[k] for k in (0, 1, 3, 4, 5, 7)], ids=_name)
def test_local_work_comes_as_few_batches_in_which_each_device_is_once(spec: RunSpec) -> None:
    for round_ in islice(events(spec), ROUNDS):
        batches = [part.sessions for part in round_.work if isinstance(part, work.Sessions)]
        if spec.algorithm != TIMED:  # of which a device may be in many
            assert len(batches) <= (1 if spec.algorithm == BCD else 4)
        for batch in batches:
            assert len({session.device for session in batch}) == len(batch)
            assert len({session.offline for session in batch}) == 1
        assert round_.devices == {s.device for batch in batches for s in batch}


@pytest.mark.parametrize("spec", CASES, ids=_name)
def test_a_round_names_no_model_that_was_forgotten_and_keeps_none_for_ever(
    spec: RunSpec,
) -> None:
    there = {*events(spec).driver.observer.held}  # type: ignore[union-attr]
    for round_ in islice(events(spec), ROUNDS):
        for part in round_.work:
            match part:
                case work.Sessions(sessions):
                    assert {s.model for s in sessions if s.model is not None} <= there
                case work.Mix(models, results):
                    assert {*models} <= there
                    there |= {*results}
                case work.Step(_, mixed, result):
                    assert mixed in there
                    there.add(result)
                case work.StepGlobal(_, model, result):
                    assert model in there
                    there.add(result)
                case work.Adopt(_, model) | changes.Admit(_, _, model):
                    assert model in there
                case work.Forget(models):
                    assert {*models} <= there
                    there -= {*models}
        assert len(there) <= 3 * 4 + 2


@pytest.mark.parametrize("spec", CASES[:4], ids=_name)
def test_rounds_that_are_thrown_away_leave_those_that_follow_as_they_are(
    spec: RunSpec,
) -> None:
    """What resuming does: nothing in a later round depends on whether earlier ones were played."""
    whole, rest = [*islice(events(spec), ROUNDS)], events(spec)
    for _ in range(3):
        next(rest)
    assert [*islice(rest, ROUNDS - 3)] == whole[3:]


def test_numbers_are_a_fold_over_rounds(tmp_path: Path) -> None:
    """The same rounds give the same bits, wherever they come from."""
    spec = RunSpec(BCD, fb.AsyncCloud(first=2), active=2)
    run = fb.train(federation(LOGISTIC), BCD, cloud=spec.cloud, active=2, rounds=ROUNDS)
    path = tmp_path / "events.jsonl"
    log = LogWriter(path, {"identity": {}})
    played = [*islice(events(spec, log), ROUNDS)]
    log.close()
    for rounds in (played, from_log(spec, path)):
        numbers = make_numbers(spec, federation(LOGISTIC), torch.device("cpu"))
        numbers.trainer.check_vectorised(numbers.global_VF()[0])
        for round_ in rounds:
            numbers.play(round_)
        assert numbers.digest() == run.digest


def test_what_a_log_asks_for_that_is_not_there_is_named_with_its_line(tmp_path: Path) -> None:
    spec, path = CASES[1], tmp_path / "events.jsonl"
    log = LogWriter(path, {"identity": {}})
    [*islice(events(spec, log), 2)]
    log.close()
    lines = path.read_text().splitlines(keepends=True)
    place = next(k for k, line in enumerate(lines) if '"event":{"ServerReady"' in line)
    path.write_text("".join([*lines[:place], *lines[place + 1 :]]))
    with pytest.raises(ReplayMismatch, match=r"line \d+"):
        [*from_log(spec, path)]
