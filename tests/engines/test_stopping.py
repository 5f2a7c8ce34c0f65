"""Runs that somebody looks on at: models on the way, an end where nothing gets better, the best
models beside the last, checkpoints by time, and Ctrl-C.
"""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import fedbcd as fb
from fedbcd.engines.result import best_file
from fedbcd.errors import ConfigError
from fedbcd.record.history import History, Row
from fedbcd.record.stopping import best_row
from fedbcd.record.tensorfile import read_head
from support.runs import LOGISTIC, fedbcd, federation, job_table, train, write_job

LEVELS = fb.Plateau("global_accuracy", patience=2, least=0.05)
QUIET: dict[str, Any] = {"evaluate_every": 1, "certify_every": 0, "model": LOGISTIC}


def rows(*values: float) -> list[Row]:
    return [*History.of_plain([[n, n, n, v, v, v, 0.0, 0.0] for n, v in enumerate(values)])]


def values_of(module: torch.nn.Module) -> torch.Tensor:
    return parameters_to_vector(module.parameters()).detach()


# ------------------------------------------------------------------------------------------------
# the rule
@pytest.mark.parametrize(
    ("values", "stop", "lower", "over"),
    [
        ((0.1, 0.2, 0.2), fb.Plateau(patience=2), False, False),
        ((0.1, 0.2, 0.2, 0.1), fb.Plateau(patience=2), False, True),
        ((0.3, 0.2, 0.2, 0.1), fb.Plateau(patience=2), True, False),
        ((0.1, 0.14, 0.18, 0.22), fb.Plateau(patience=2, least=0.1), False, False),
        ((0.1, 0.14, 0.18, 0.2), fb.Plateau(patience=3, least=0.1), False, True),
        ((0.2, float("nan"), float("nan"), 0.1), fb.Plateau(patience=2), False, False),
        ((), fb.Plateau(patience=1), False, False),
    ],
)
def test_a_plateau_is_so_many_rows_without_a_better_one(
    values: tuple[float, ...], stop: fb.Plateau, lower: bool, over: bool
) -> None:
    assert stop.is_over(rows(*values), "personal_accuracy", lower=lower) is over


def test_the_best_row_is_the_first_of_the_best() -> None:
    table = rows(0.1, 0.5, float("nan"), 0.5, 0.3)
    found = [best_row(table, "personal_accuracy", lower=lower) for lower in (False, True)]
    assert found == [table[1], table[0]]
    assert best_row([], "gap", lower=True) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": fb.Plateau("acuracy")}, "stop.column='acuracy' is no column that can decide"),
        ({"best": "personal_acuracy"}, r"did you mean 'personal_accuracy'\?"),
        ({"best": "clock"}, "best='clock' is no column that can decide"),
        ({"stop": 5}, "must be a table, not 5; in Python, a Plateau"),
        ({"stop": {"patience": 2.5}}, "stop.patience = 2.5"),
        ({"stop": {"patience": 0}}, "must be 1 or more"),
        ({"stop": {"least": -1}}, "must be a finite number, 0 or more"),
        ({"checkpoint_seconds": -1.0}, "must be 0 or more; 0 makes none by time"),
    ],
)
def test_what_cannot_decide_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train("fedbcd-sync", rounds=1, **options)


def test_scores_decide_only_where_there_are_tests() -> None:
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(2)]
    blind = fb.Federation(lambda: torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), data, 1)
    with pytest.raises(ConfigError, match="is a score on test samples, and there are none"):
        fb.train(blind, fb.FedBCD(batch=2), rounds=1, stop=fb.Plateau())
    run = fb.train(blind, fb.FedBCD(batch=2), rounds=2, best="distance", looks=2)
    assert run.summary["best"]["by"] == "training samples and models"


# ------------------------------------------------------------------------------------------------
# models on the way
@pytest.mark.parametrize("engine", [{}, {"ahead": True}], ids=["events", "ahead"])
@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async"])
def test_on_round_sees_the_models_of_the_round(case: str, engine: dict[str, Any]) -> None:
    seen: list[tuple[fb.Progress, torch.Tensor, list[torch.Tensor]]] = []

    def look(p: fb.Progress) -> None:
        servers = [values_of(p.global_model(n)) for n in range(4)]
        seen.append((p, values_of(p.personal_model(5)), [values_of(p.global_model()), *servers]))

    options = {**QUIET, **engine, "evaluate_every": 2}
    run = train(case, rounds=4, on_round=look, **options)
    assert [p.row is p.latest for p, _, _ in seen] == [False, True, False, True]
    assert [p.row for p, _, _ in seen][0::2] == [None, None]
    last, x, z = seen[-1]
    assert torch.equal(x, values_of(run.personal_model(5)))
    assert torch.equal(z[0], values_of(run.global_model))
    assert all(torch.equal(z[1 + n], values_of(run.server_model(n))) for n in range(4))
    assert not torch.equal(seen[0][2][0], z[0])
    if not engine:
        assert run.digest == train(case, rounds=4, **options).digest
    with pytest.raises(ConfigError, match="the run has gone on since round 2"):
        seen[1][0].global_model()
    with pytest.raises(ConfigError, match="there is no server 4; there are servers 0 to 3"):
        last.global_model(4)
    with pytest.raises(ConfigError, match="there is no device -1"):
        last.personal_model(-1)


def test_models_on_the_way_are_those_that_are_tested() -> None:
    tuned = fb.FineTuned(device_step=0.05, batch=8)
    seen: list[torch.Tensor] = []
    options = {"rounds": 2, "active": 2, "looks": 2, "certify_every": 0}
    run = fb.train(
        federation(LOGISTIC),
        tuned,
        on_round=lambda p: seen.append(values_of(p.personal_model(3))),
        **options,
    )
    assert torch.equal(seen[-1], values_of(run.personal_model(3)))
    assert not torch.equal(seen[-1], values_of(run.global_model))


def test_a_progress_without_a_run_says_so() -> None:
    with pytest.raises(ConfigError, match="was not made by a run"):
        fb.Progress(1, 1.0, 0.5, rows(0.1)[0]).global_model()


# ------------------------------------------------------------------------------------------------
# an end where nothing gets better
@pytest.mark.parametrize("engine", [{}, {"ahead": True}], ids=["events", "ahead"])
def test_a_run_that_was_stopped_and_resumed_ends_at_the_same_round(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {**QUIET, **engine, "rounds": 60, "stop": LEVELS}
    whole = train("fedbcd-sync", **options)
    assert 2 < whole.summary["rounds"] < 60
    assert whole.finished
    stopped = whole.summary["stopped"]
    assert (stopped["column"], stopped["by"]) == ("global_accuracy", "test samples")
    shares: list[float] = []
    for _ in range(2):  # the second time it has ended
        stops = itertools.count(1)
        while not (
            run := train(
                "fedbcd-sync",
                out=tmp_path,
                resume=True,
                should_stop=lambda: next(stops) % 2 == 0,  # noqa: B023
                on_round=lambda p: shares.append(p.fraction),
                **options,
            )
        ).finished:
            assert run.interrupted
            assert run.summary["interrupted"]
        assert run.history == whole.history
        assert run.digest == whole.digest
        assert run.summary["best"] == whole.summary["best"]
    assert shares[-1] == 1.0
    assert "interrupted" not in run.summary


def test_a_job_file_says_when_to_stop_and_the_command_line_what_decided(tmp_path: Path) -> None:
    changes = {"run.stop": {"column": "global_accuracy", "patience": 2}, "run.evaluate_every": 1}
    job = write_job(tmp_path / "job.toml", **changes, **{"run.rounds": 60, "run.certify_every": 0})
    answer = fedbcd("run", job, "--out", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    found = answer.summary
    assert found["rounds"] < 60
    best = found["best"]
    assert f"stopped after {found['rounds']} rounds" in answer.err
    assert "global_accuracy (on test samples)" in answer.err
    assert (tmp_path / "out" / best_file(best["round"])).is_file()
    again = fedbcd("run", "--resume", "--out", tmp_path / "out", "--json").summary
    assert (again["rounds"], again["best"]) == (found["rounds"], best)


def test_a_stop_stands_beside_rounds_in_a_job_file() -> None:
    from fedbcd.experiments.job import parse

    (job,) = parse(job_table(**{"run.stop": {"patience": 3}}))
    assert (job.spec.rounds, job.spec.stop) == (4, fb.Plateau(patience=3))
    changed = job.spec.changed({"until_clock": 9.0})
    assert (changed.rounds, changed.until_clock, changed.stop) == (None, 9.0, job.spec.stop)


# ------------------------------------------------------------------------------------------------
# the best models
@pytest.mark.parametrize("stop", [None, fb.Plateau(patience=3)])
def test_validation_samples_decide_where_devices_hold_some(stop: fb.Plateau | None) -> None:
    chance = torch.Generator().manual_seed(0)
    data = [(torch.randn(20, 3, generator=chance), torch.arange(20) % 2) for _ in range(4)]
    share = fb.Holdout(test=0.2, validation=0.2)
    held = fb.Federation(
        lambda: torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), data, 2, holdout=share
    )
    run = fb.train(held, fb.FedBCD(batch=4), rounds=4, evaluate_every=1, stop=stop)
    assert run.best is not None
    assert run.summary["best"]["by"] == "validation samples"
    assert run.best.column.startswith("validation_")
    assert run.summary["best"]["value"] == max(run.history.column(run.best.column))


def best_by_hand(case: str, **options: Any) -> dict[int, torch.Tensor]:
    """All models after each round."""
    found: dict[int, torch.Tensor] = {}

    def keep(p: fb.Progress) -> None:
        assert p.models is not None
        every = [values_of(p.personal_model(i)) for i in range(16)]
        found[p.round] = torch.stack([*every, *p.models.all_global()])

    train(case, on_round=keep, **options)
    return found


@pytest.mark.parametrize("place", ["memory", "folder", "state", "ahead"])
def test_the_models_of_the_best_look_are_kept_with_their_row(place: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "memory": {},
        "folder": {"out": tmp_path / "run"},
        "state": {"state": tmp_path / "state"},
        "ahead": {"ahead": True},
    }[place]
    options = {**QUIET, "rounds": 7, "best": "worst_decile"}
    run = train("fedbcd-async", **options, **more)
    assert run.best is not None
    assert run.best.row.worst_decile == max(run.history.column("worst_decile"))
    assert 0 < run.best.row.round == run.summary["best"]["round"] < 7
    kept = torch.cat([torch.as_tensor(run.best.personal_NF[:]), run.best.global_VF])
    if place != "ahead":
        assert torch.equal(kept, best_by_hand("fedbcd-async", **options)[run.best.row.round])
    assert torch.equal(values_of(run.best.personal_model(2)), kept[2])
    run.save(tmp_path / "copy")
    again = fb.Run.load(tmp_path / "copy", federation(LOGISTIC))
    assert again.best is not None
    assert fb.History([again.best.row]) == fb.History([run.best.row])
    assert torch.equal(again.best.global_VF, run.best.global_VF)


def best_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("best-*"))


def test_the_best_models_survive_a_kill_between_two_looks(tmp_path: Path) -> None:
    """Killed after a better look and before the checkpoint that knows of it."""
    options: dict[str, Any] = {**QUIET, "best": "personal_accuracy", "checkpoint_every": 3}
    whole = train("fedbcd-sync", rounds=9, out=tmp_path / "whole", **options)

    def killed(p: fb.Progress) -> None:
        if p.round == 5:
            raise KeyError("killed")

    with pytest.raises(KeyError):
        train("fedbcd-sync", rounds=9, out=tmp_path / "killed", on_round=killed, **options)
    column = whole.history.column("personal_accuracy")
    known, later = column.index(max(column[:4])), column.index(max(column[:6]))
    assert {best_file(known), best_file(later)} == {*best_files(tmp_path / "killed")}
    less = train("fedbcd-sync", rounds=3, out=tmp_path / "killed", resume=True, **options)
    assert less.best is not None
    assert less.best.row.round == known
    more = train("fedbcd-sync", rounds=9, out=tmp_path / "killed", resume=True, **options)
    assert more.best is not None
    assert whole.best is not None
    assert more.best.row.round == whole.best.row.round
    assert torch.equal(more.best.global_VF, whole.best.global_VF)
    assert best_files(tmp_path / "killed") == best_files(tmp_path / "whole")


def test_best_models_that_were_not_kept_are_not_promised(tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUIET, "out": tmp_path}
    train("fedbcd-sync", rounds=3, **options)
    said: list[str] = []
    run = train("fedbcd-sync", rounds=4, resume=True, best="pull", on_notice=said.append, **options)
    assert run.best is None
    run = train(
        "fedbcd-sync",
        rounds=6,
        resume=True,
        best="personal_accuracy",
        on_notice=said.append,
        **options,
    )
    assert "the best of the rounds from here on are kept" in said[-1]
    assert run.best is not None
    assert run.best.row.round > 4


# ------------------------------------------------------------------------------------------------
# checkpoints by time, and Ctrl-C
@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, [1, 2, 3, 4]), (0.0, [4]), (1e9, [4])])
def test_checkpoints_come_by_time_as_well_as_by_rounds(
    seconds: float, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("fedbcd.engines.saving.MOST_SHARE", 1e9)
    monkeypatch.setattr("fedbcd.engines.saving.monotonic", lambda: float(next(ticks)))
    saved: list[int] = []

    def look(_: fb.Progress) -> None:
        path = tmp_path / "checkpoint.safetensors"
        if path.exists():
            saved.append(int(read_head(path)["__metadata__"]["round"]))

    options = {"checkpoint_every": 4, "checkpoint_seconds": seconds, "on_round": look}
    train("fedbcd-sync", rounds=4, out=tmp_path, **{**QUIET, "evaluate_every": 4}, **options)
    assert saved == rounds


def interrupt_after(round_: int) -> Callable[[fb.Progress], None]:
    def press(p: fb.Progress) -> None:
        if p.round == round_:
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_control_c_in_python_returns_the_partial_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = train("fedbcd-sync", rounds=9, out=tmp_path, on_round=interrupt_after(2), **QUIET)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        twice = (interrupt_after(2), interrupt_after(2))
        with pytest.raises(KeyboardInterrupt):
            train("fedbcd-sync", on_round=lambda p: [press(p) for press in twice], **QUIET)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (run.interrupted, run.summary["rounds"], run.history.last.round) == (True, 3, 3)
    assert "stopping after this round" in capsys.readouterr().err
    assert fb.Run.load(tmp_path, federation(LOGISTIC)).interrupted
    whole = train("fedbcd-sync", rounds=9, out=tmp_path, resume=True, **QUIET)
    assert whole.digest == train("fedbcd-sync", rounds=9, **QUIET).digest
    assert not whole.interrupted


def test_an_answer_of_ones_own_to_control_c_is_left_alone() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        run = train("fedbcd-sync", rounds=2, on_round=interrupt_after(1), **QUIET)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (pressed, run.finished) == ([1], True)
