"""Acknowledged means durable: a run that is killed at any moment goes on as if nothing had
happened.
"""

import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import fedbcd as fb
from fedbcd.errors import RecordError
from support.forked import CLI, Forked
from support.runs import (
    BCD,
    LOGISTIC,
    Answer,
    fedbcd,
    federation,
    hash_folder,
    log_lines,
    train,
    write_job,
)
from support.waiting import ended, wait_for

MODEL = """
import os, time
from pathlib import Path
from safetensors import safe_open
from torch import nn

since = 0

# A few steps after the moment that the test waits for, until it lets go: so that moment cannot be
# missed.
def stand_still():
    global since
    folder = Path(os.environ["STAND_STILL_IN"])
    reached = (folder / "events.jsonl").exists()
    if (round_ := int(os.environ["STAND_STILL_AFTER"])) and reached:
        try:
            with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
                reached = int(file.metadata()["round"]) >= round_
        except FileNotFoundError:
            reached = False
    since += reached
    while since > 10 and not Path("let-go").exists():
        time.sleep(0.02)

class Still(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        if self.training and "STAND_STILL_IN" in os.environ:
            stand_still()
        return self.layer(x.flatten(1)).tanh()
"""
JOBS: dict[str, dict[str, Any]] = {
    "fedbcd-sync": {"algorithm.name": "fedbcd", "cloud": {"name": "sync"}},
    "fedbcd-i-async": {"algorithm.name": "fedbcd-i", "cloud": {"name": "async", "first": 2}},
    "fedbcd-rigorous": {"algorithm.name": "fedbcd", "cloud": {"name": "rigorous", "first": 2}},
}


@dataclass(frozen=True)
class Moment:
    """After the checkpoint of a round, 0: as soon as there is a log. `further`: the log has grown
    since, so it is inside a later round.
    """

    round: int
    further: bool = False

    def has_come(self, folder: Path) -> bool:
        if not self.round:
            return (folder / "events.jsonl").exists()
        found = _checkpoint(folder)
        grown = bool(found) and (folder / "events.jsonl").stat().st_size > int(found["log_bytes"])
        return int(found.get("round", -1)) >= self.round and (grown or not self.further)


# ------------------------------------------------------------------------------------------------
# real processes
@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model whose training stands still when it is told to, in the processes that
    are killed.
    """
    (tmp_path / "still_digits.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _job(workplace: Path, name: str) -> Path:
    changes = {
        "model.name": "still_digits:Still",
        "run": {"rounds": 12, "evaluate_every": 4, "checkpoint_every": 3, "max_batch": 1},
    }
    return write_job(workplace / "job.toml", **changes, **JOBS[name])


def _start(
    workplace: Path, folder: Path, moment: Moment, *arguments: str | Path
) -> subprocess.Popen[str]:
    still = {"STAND_STILL_IN": str(folder), "STAND_STILL_AFTER": str(moment.round)}
    environment = {**os.environ, **still, "PYTHONPATH": str(workplace)}
    words = [CLI, "run", "--out", str(folder), *map(str, arguments)]
    return Forked(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=workplace
    )


def _interrupt(
    process: subprocess.Popen[str], folder: Path, moment: Moment, how: signal.Signals
) -> str:
    """Wait for the moment, send the signal, and return what the process said on stderr."""

    def has_come() -> bool:
        assert process.poll() is None, (
            f"the run ended before the moment came: {process.communicate()}"
        )
        return moment.has_come(folder)

    wait_for(has_come, "the moment")
    process.send_signal(how)
    (folder.parent / "let-go").touch()
    _, err = ended(process)
    return err


def _checkpoint(folder: Path) -> dict[str, str]:
    try:
        with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
            return dict(file.metadata())
    except (FileNotFoundError, SafetensorError):
        return {}


def _assert_same_run(folder: Path, expected: Path) -> None:
    for name in ("history.csv", "events.jsonl"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("fedbcd-sync", [Moment(0), Moment(3)]),
        ("fedbcd-i-async", [Moment(3, further=True), Moment(9)]),
        ("fedbcd-rigorous", [Moment(6, further=True)]),
    ],
    ids=JOBS,
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    workplace: Path, name: str, moments: list[Moment]
) -> None:
    job = _job(workplace, name)
    undisturbed = fedbcd("run", job, "--out", workplace / "undisturbed", "--json")
    folder = workplace / "killed"
    for number, moment in enumerate(moments):
        process = _start(workplace, folder, moment, job, *(["--resume"] if number else []))
        _interrupt(process, folder, moment, signal.SIGKILL)
        (workplace / "let-go").unlink()
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "models.safetensors").exists()
        assert bool(_checkpoint(folder)) is bool(moment.round)
    resumed = fedbcd(
        "run", "--resume", "--trust", "--out", folder, "--json"
    )  # its own config.toml says what it was
    assert resumed.code == 0, resumed.err
    assert resumed.summary["digest"] == undisturbed.summary["digest"]
    _assert_same_run(folder, workplace / "undisturbed")
    assert (folder / "config.toml").read_bytes() == (
        workplace / "undisturbed" / "config.toml"
    ).read_bytes()


def test_control_c_leaves_a_run_that_the_printed_command_finishes(workplace: Path) -> None:
    job = _job(workplace, "fedbcd-i-async")
    undisturbed = fedbcd("run", job, "--out", workplace / "undisturbed", "--json")
    folder = workplace / "a folder [with] odd letters"
    process = _start(workplace, folder, Moment(3), job)
    err = _interrupt(process, folder, Moment(3), signal.SIGINT)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not fb.Run.load(folder, _federation_of(job)).finished
    _, _, command = next(line for line in err.splitlines() if "Go on with: " in line).partition(
        "Go on with: "
    )
    program, *arguments = shlex.split(command)
    assert program == "fedbcd"
    resumed = fedbcd(*arguments, "--json")
    assert resumed.summary["digest"] == undisturbed.summary["digest"]
    _assert_same_run(folder, workplace / "undisturbed")


def _federation_of(job: Path) -> fb.Federation:
    from fedbcd.config import read_toml
    from fedbcd.experiments.job import parse

    return parse(read_toml(job))[0].make_federation()


# ------------------------------------------------------------------------------------------------
# within a process
@pytest.mark.parametrize(
    "case",
    [
        "fedbcd-sync",
        "fedbcd-async",
        "fedbcd-i-async",
        "fedbcd-i-rigorous",
        "fedprox-sync",
        "fedbcd-graph",
    ],
)
def test_a_run_that_is_stopped_after_every_round_equals_one_in_one_go(
    case: str, tmp_path: Path
) -> None:
    whole = train(case, rounds=6, evaluate_every=2, out=tmp_path / "whole")
    stops = 0
    while True:
        run = train(
            case,
            rounds=6,
            evaluate_every=2,
            out=tmp_path / "parts",
            resume=True,
            should_stop=lambda: True,
        )
        if run.finished:
            break
        stops += 1
        assert run.summary["rounds"] == stops
    assert stops == 5
    assert run.digest == whole.digest
    assert run.personal_scores == whole.personal_scores
    _assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_joins_and_leaves_survive_a_resume(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"joins": {3: 2, 9: 4}, "leaves": {0: 3, 6: 5}}
    whole = train("fedbcd-async", rounds=7, out=tmp_path / "whole", **changes)
    for _ in range(7):
        run = train(
            "fedbcd-async",
            rounds=7,
            out=tmp_path / "parts",
            resume=True,
            should_stop=lambda: True,
            **changes,
        )
    assert run.finished
    assert run.digest == whole.digest
    _assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing_and_keeps_its_scores(tmp_path: Path) -> None:
    first = train("fedbcd-i-async", out=tmp_path)
    before = hash_folder(tmp_path)
    for _ in range(2):
        again = train("fedbcd-i-async", out=tmp_path, resume=True)
        after = hash_folder(tmp_path)
        assert again.digest == first.digest
        assert again.history == first.history
        assert again.personal_scores == first.personal_scores
        for name in ("events.jsonl", "history.csv", "checkpoint.safetensors"):
            assert after[name] == before[name]


def test_resuming_with_more_rounds_equals_a_longer_run_in_one_go(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", **{"run.rounds": 4})
    fedbcd("run", job, "--out", tmp_path / "parts")
    longer = fedbcd("run", "--resume", "--rounds", "10", "--out", tmp_path / "parts", "--json")
    whole = fedbcd("run", job, "--rounds", "10", "--out", tmp_path / "whole", "--json")
    assert longer.summary["rounds"] == 10
    assert longer.summary["digest"] == whole.summary["digest"]
    assert log_lines(tmp_path / "parts") == log_lines(tmp_path / "whole")
    for name in ("history.csv", "config.toml"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert fedbcd("replay", tmp_path / "parts").code == 0


def test_resuming_with_fewer_rounds_than_are_done_leaves_the_run_where_it_is(
    tmp_path: Path,
) -> None:
    first = train("fedbcd-sync", rounds=6, out=tmp_path)
    again = train("fedbcd-sync", rounds=3, out=tmp_path, resume=True)
    assert again.summary["rounds"] == 6
    assert again.digest == first.digest


def test_resume_in_a_new_folder_begins(tmp_path: Path) -> None:
    run = train("fedbcd-sync", out=tmp_path / "new", resume=True)
    assert run.digest == train("fedbcd-sync").digest


@pytest.mark.parametrize("left", [None, 0, 200], ids=["no-log", "empty-log", "cut-header"])
def test_a_run_that_was_killed_while_it_wrote_its_first_line_begins_again(
    left: int | None, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.toml")
    whole = fedbcd("run", job, "--out", tmp_path / "whole", "--json")
    folder = tmp_path / "killed"
    folder.mkdir()
    shutil.copy(tmp_path / "whole" / "config.toml", folder)
    if left is not None:
        (folder / "events.jsonl").write_bytes(
            (tmp_path / "whole" / "events.jsonl").read_bytes()[:left]
        )
    resumed = fedbcd("run", "--resume", "--out", folder, "--json")
    assert resumed.summary["digest"] == whole.summary["digest"]
    _assert_same_run(folder, tmp_path / "whole")


def test_several_runs_resume_together(tmp_path: Path) -> None:
    runs = [
        {"title": "One"},
        {"title": "Two", "algorithm": {"name": "fedbcd-i"}, "run": {"rounds": 3}},
    ]
    job = write_job(tmp_path / "job.toml", runs=runs)
    whole = fedbcd("run", job, "--out", tmp_path / "whole", "--json")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "two")  # as if killed between the two
    resumed = fedbcd("run", "--resume", "--out", tmp_path / "parts", "--json")
    digests = [[run["digest"] for run in answer.summary["runs"]] for answer in (whole, resumed)]
    assert digests[0] == digests[1]
    _assert_same_run(tmp_path / "parts" / "two", tmp_path / "whole" / "two")


# ------------------------------------------------------------------------------------------------
# what cannot be resumed
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, its run, and a run with another seed."""
    place = tmp_path_factory.mktemp("finished")
    job = write_job(place / "job.toml")
    assert fedbcd("run", job, "--out", place / "run").code == 0
    assert fedbcd("run", job, "--seed", "1", "--out", place / "other").code == 0
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _assert_refused(place: Path, code: int, *words: str, arguments: tuple[str, ...] = ()) -> Answer:
    """Exit code and sentence are right, and not one byte has changed."""
    before = hash_folder(place)
    answer = fedbcd(
        "run",
        *(arguments or (str(place / "job.toml"),)),
        "--resume",
        "--rounds",
        "8",
        "--out",
        place / "run",
    )
    assert answer.code == code, answer.err
    for word in words:
        assert word in answer.err
    assert hash_folder(place) == before
    return answer


def test_a_truncated_checkpoint_is_refused(place: Path) -> None:
    path = place / "run" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _assert_refused(
        place, 4, "checkpoint.safetensors is missing or damaged", "remove it to start over"
    )


def test_a_checkpoint_that_is_no_checkpoint_is_refused(place: Path) -> None:
    shutil.copy(place / "run" / "models.safetensors", place / "run" / "checkpoint.safetensors")
    _assert_refused(place, 4, "is not a checkpoint of this run")


def test_a_checkpoint_with_one_changed_bit_is_refused(place: Path) -> None:
    path = place / "run" / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    _assert_refused(place, 4, "the checkpoint is damaged", "digest")


def test_the_checkpoint_of_another_run_is_refused(place: Path) -> None:
    shutil.copy(
        place / "other" / "checkpoint.safetensors", place / "run" / "checkpoint.safetensors"
    )
    _assert_refused(place, 4, "is not a checkpoint of this run", "restore the right one")


def test_a_log_that_is_shorter_than_the_checkpoint_says_is_refused(place: Path) -> None:
    path = place / "run" / "events.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _assert_refused(
        place, 4, "events.jsonl is shorter than when the checkpoint was made", "restore it"
    )


def test_the_log_of_another_run_is_refused(place: Path) -> None:
    shutil.copy(place / "other" / "events.jsonl", place / "run" / "events.jsonl")
    _assert_refused(
        place, 4, "holds another run (seed: 1 there, 0 here; other data; another model)"
    )


def test_a_foreign_file_in_place_of_the_log_is_refused(place: Path) -> None:
    (place / "run" / "events.jsonl").write_text('{"something": "else"}\n')
    _assert_refused(place, 4, "events.jsonl is not a fedbcd event log")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("run.seed", 5, "seed: 0 there, 5 here"),
        ("algorithm.penalty", 0.5, "algorithm.penalty: 1.0 there, 0.5 here"),
        ("cloud", {"name": "async", "first": 2}, "cloud.first: None there, 2 here"),
        ("federation.active", 3, "active: 2 there, 3 here"),
        ("data.samples", 21, "(other data)"),
        ("model", {"name": "mlp", "hidden": [8]}, "(another model)"),
        (
            "clock",
            {"step": {"name": "constant", "value": 1.0}},
            "clock.step.name: exponential there, constant here",
        ),
        ("run.dtype", "float64", "dtype: float32 there, float64 here"),
        ("run.max_batch", 1, "max_batch: None there, 1 here"),
    ],
)
def test_other_settings_are_refused_and_named(
    place: Path, key: str, value: Any, words: str
) -> None:
    write_job(place / "job.toml", **{key: value})
    _assert_refused(place, 4, "holds another run (", words, "give the same settings to resume it")


def test_a_job_of_several_runs_does_not_resume_the_folder_of_one(place: Path) -> None:
    write_job(place / "job.toml", runs=[{"title": "One"}, {"title": "Two"}])
    _assert_refused(place, 4, "holds one run, but the job has 2")


def test_one_changed_run_of_several_is_refused_before_the_others_go_on(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"title": "One"}, {"title": "Two"}]
    job = write_job(tmp_path / "job.toml", runs=runs)
    fedbcd("run", job, "--out", tmp_path / "run")
    runs[1]["run"] = {"seed": 9}
    write_job(job, runs=runs)
    _assert_refused(tmp_path, 4, "two holds another run (", "seed: 0 there, 9 here")


def test_resume_needs_a_folder() -> None:
    answer = fedbcd("run", "--resume")
    assert answer.code == 2
    assert "--resume needs --out DIR" in answer.err


def test_resume_of_an_empty_folder_needs_a_job_file(place: Path) -> None:
    shutil.rmtree(place / "run")
    (place / "run").mkdir()
    before = hash_folder(place)
    answer = fedbcd("run", "--resume", "--out", place / "run")
    assert answer.code == 4
    assert "holds no config.toml to resume from; give the job file as well" in answer.err
    assert hash_folder(place) == before


def test_the_api_refuses_another_federation_in_the_folder(tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=2, out=tmp_path)
    half = federation()
    half.servers = [[*range(10)], [*range(10, 16)]]
    before = hash_folder(tmp_path)
    with pytest.raises(fb.errors.RecordError, match="holds another run"):
        fb.train(half, BCD, rounds=2, active=2, out=tmp_path, resume=True)
    assert hash_folder(tmp_path) == before


OTHER_LOSS = partial(nn.functional.cross_entropy, label_smoothing=0.1)
SAME_LOSS = nn.CrossEntropyLoss()


def half_right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return fb.accuracy(outputs, targets) / 2


@pytest.mark.parametrize(
    ("kind", "function", "words"),
    [
        ("loss", OTHER_LOSS, "another loss: cross_entropy 2.3"),
        ("loss", lambda *given: 2 * SAME_LOSS(*given), "another loss: cross_entropy .*<lambda> 4"),
        ("loss", SAME_LOSS, ""),
        ("metric", half_right, r"another metric: accuracy .* half_right 0\.0"),
        ("metric", lambda *given: fb.accuracy(*given), ""),
    ],
    ids=["smoothed", "doubled", "the same loss", "half", "the same metric"],
)
def test_a_changed_loss_or_metric_is_noticed(
    kind: str, function: Any, words: str, tmp_path: Path
) -> None:
    train("fedbcd-sync", rounds=1, out=tmp_path, looks=1, certify_every=0)
    changed = federation()
    setattr(changed, kind, function)
    options: dict[str, Any] = {"rounds": 2, "active": 2, "certify_every": 0}
    if not words:
        assert fb.train(changed, BCD, out=tmp_path, resume=True, **options).finished
        return
    before = hash_folder(tmp_path)
    with pytest.raises(RecordError, match=f"{words}.*; give the same settings to resume it"):
        fb.train(changed, BCD, out=tmp_path, resume=True, **options)
    assert hash_folder(tmp_path) == before


def test_a_changed_model_and_other_data_are_noticed(tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=1, out=tmp_path, looks=1, certify_every=0)
    other = federation()
    other.pool = fb.Samples(other.pool.inputs + 1, other.pool.targets)
    for changed, words in ((federation(LOGISTIC), "another model"), (other, "other data")):
        with pytest.raises(RecordError, match=words):
            fb.train(changed, BCD, rounds=2, active=2, out=tmp_path, resume=True)


def test_a_second_process_in_the_same_folder_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:

    from fedbcd.experiments.job import parse

    job = parse(
        {
            "data": {"samples": 12},
            "federation": {"servers": 2, "devices": 3, "active": 1},
            "run": {"rounds": 4},
        }
    )[0]
    refusals: list[str] = []

    def intrude(_: fb.Progress) -> None:
        try:
            job.run(tmp_path / "run", resume=True)
        except RecordError as error:
            refusals.append(str(error))

    run = job.run(tmp_path / "run", on_round=intrude)
    assert len(refusals) == 4
    assert "another process is at work" in refusals[0]
    assert run.digest == job.run().digest
