"""The command line: what a first-time user does, and what is left behind."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.data.datasets import DATASETS
from fedbcd.experiments.job import default_table, seeds_in
from fedbcd.models import MODELS
from fedbcd.protocol.clouds import CLOUDS
from support.runs import fedbcd, hash_folder, write_job

FILES = {"config.toml", "curves.png", "events.jsonl", "history.csv", "models.safetensors"}
SUMMARY = {
    "algorithm",
    "cloud",
    "rounds",
    "clock",
    "global_accuracy",
    "personal_accuracy",
    "seconds",
    "digest",
}


# ------------------------------------------------------------------------------------------------
# words
def test_the_installed_command_and_the_module_are_the_same_program() -> None:
    """A real process: the entry point is installed, and says its version."""
    program = Path(sys.executable).with_name("fedbcd")
    command = [str(program)] if program.exists() else [sys.executable, "-m", "fedbcd"]
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.startswith(f"{fb.__version__} (torch {torch.__version__}, Python 3.")
    assert done.stderr == ""


def test_version_is_one_line() -> None:
    answer = fedbcd("--version")
    assert (answer.code, answer.out.count("\n")) == (0, 1)
    assert answer.out.startswith(fb.__version__)


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str]) -> None:
    answer = fedbcd(*arguments)
    assert answer.code == (0 if arguments else 2)
    for command in ("run", "replay", "models", "algorithms"):
        assert command in answer.out


@pytest.mark.parametrize("command", ["run", "replay"])
def test_every_command_has_its_help(command: str) -> None:
    answer = fedbcd(command, "--help")
    assert answer.code == 0
    assert "--json" in answer.out


def test_models_lists_what_a_job_file_can_name() -> None:
    answer = fedbcd("models")
    assert answer.code == 0
    for name in (*MODELS, *DATASETS):
        assert name in answer.out
    assert "package.module:factory" in answer.out


def test_algorithms_lists_algorithms_and_clouds_with_their_settings() -> None:
    answer = fedbcd("algorithms")
    assert answer.code == 0
    for name in (*ALGORITHMS, *CLOUDS, "penalty", "mixing"):
        assert name in answer.out
    assert "activations " in answer.out, "a sentence ends where its docstring's first line does"


def test_an_unknown_command_or_option_is_a_sentence_with_code_2() -> None:
    for arguments in (["trian"], ["run", "--round", "3"], ["run", "--rounds", "three"]):
        answer = fedbcd(*arguments)
        assert answer.code == 2
        assert "Traceback" not in answer.err


# ------------------------------------------------------------------------------------------------
# the default
@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run of the default job once; with its seeds it is a comparison (`test_compare_cli`)."""
    out = tmp_path_factory.mktemp("default") / "out"
    answer = fedbcd("run", "--rounds", "2", "--seeds", "1", "--out", out)
    assert answer.code == 0, answer.err
    for title in ("FedAvg + tuning", "FedBCD, sync"):
        assert title in answer.out
    assert (
        f"everything is in {out}, the report in {out / 'report.html'}, the curves in"
        f" {out / 'curves.png'}" in answer.out
    )
    assert "clock time to a global accuracy of" in answer.out
    return out


def test_the_default_job_leaves_everything_that_happened(default: Path) -> None:
    runs = {path.name for path in default.iterdir() if path.is_dir()}
    assert runs == {
        *("local", "fedavg", "fedavg-tuning"),
        *("fedbcd-sync", "fedbcd-i-async"),
    }
    for run in runs:
        assert {path.name for path in (default / run).iterdir()} >= FILES
        assert not list((default / run).glob("*.tmp"))
        assert (default / run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in default.iterdir()} == runs | {
        "config.toml",
        "curves.png",
        "report.html",
    }


def test_the_default_job_is_played_with_five_seeds() -> None:
    assert seeds_in(default_table()) == 5


def test_without_out_a_new_folder_is_made_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "my-job.toml", **{"run.rounds": 1})
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        assert fedbcd("run", job).code == 0
        assert {path.name for path in (tmp_path / "runs" / f"my-job-00{number}").iterdir()} >= FILES


# ------------------------------------------------------------------------------------------------
# results
def test_the_last_line_of_json_is_one_object(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml")
    answer = fedbcd("run", job, "--out", tmp_path / "out", "--json")
    assert answer.code == 0
    assert len(answer.out.splitlines()) == 1  # tables and progress go to stderr
    summary = answer.summary
    assert set(summary) >= SUMMARY
    assert (summary["algorithm"], summary["cloud"], summary["rounds"]) == ("fedbcd", "sync", 4)
    assert 0 < summary["global_accuracy"] < 1
    assert 0 < summary["personal_accuracy"] < 1
    assert len(summary["digest"]) == 64
    assert summary["out"] == str(tmp_path / "out")


def test_json_of_several_runs_has_one_summary_each(tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.toml", runs=[{"title": "One"}, {"title": "Two", "run": {"seed": 1}}]
    )
    summary = fedbcd("run", job, "--rounds", "1", "--out", tmp_path / "out", "--json").summary
    assert [run["title"] for run in summary["runs"]] == ["One", "Two"]
    assert all(set(run) >= SUMMARY and run["rounds"] == 1 for run in summary["runs"])
    assert set(summary) >= SUMMARY


def test_the_config_of_a_run_is_a_job_that_gives_the_same_digest(
    default: Path, tmp_path: Path
) -> None:
    """Also for one run of several, with everything that the file left out spelled out."""
    for run in ("fedavg-tuning", "fedbcd-i-async"):
        again = fedbcd("run", default / run / "config.toml", "--out", tmp_path / run, "--json")
        assert again.code == 0, again.err
        end = (default / run / "events.jsonl").read_text().splitlines()[-1]
        assert again.summary["digest"] in end
        for name in ("config.toml", "history.csv", "events.jsonl"):
            assert (tmp_path / run / name).read_bytes() == (default / run / name).read_bytes()


def test_another_seed_gives_other_splits_delays_and_models(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", **{"run.rounds": 2})
    answers = [
        fedbcd("run", job, "--seed", seed, "--out", tmp_path / f"{k}", "--json")
        for k, seed in enumerate("013")
    ]
    for key in ("digest", "clock"):
        assert len({answer.summary[key] for answer in answers}) == 3


def test_the_command_line_goes_before_the_file_in_every_run(tmp_path: Path) -> None:
    """--rounds: 'Stop after this many rounds, whatever the file says.'"""
    runs = [{"title": "a", "run": {"rounds": 9, "seed": 4}}, {"title": "b", "run": {"seed": 5}}]
    job = write_job(tmp_path / "job.toml", runs=runs, run={"until_clock": 500.0})
    job.write_text(job.read_text().replace("rounds = 9", "until_clock = 900"))
    answer = fedbcd("run", job, "--rounds", "1", "--seed", "2", "--out", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    assert [run["rounds"] for run in answer.summary["runs"]] == [1, 1]
    assert len({run["digest"] for run in answer.summary["runs"]}) == 1


def test_titles_of_any_letters_give_folders_of_their_own(tmp_path: Path) -> None:
    titles = ["Δ", "Λ", "[/bold] :smile:", "a b", "A-B"]
    job = write_job(tmp_path / "job.toml", runs=[{"title": title} for title in titles])
    answer = fedbcd("run", job, "--rounds", "1", "--out", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    folders = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert len(folders) == 5
    found = {
        tomllib.loads((folder / "config.toml").read_text("utf-8"))["title"] for folder in folders
    }
    assert found == set(titles)
    assert "[/bold]" in answer.err


def test_a_model_of_ones_own_is_named_by_module_and_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64,"
        " 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    job = write_job(tmp_path / "job.toml", **{"model.name": "own_models:net"})
    own = fedbcd("run", job, "--out", tmp_path / "own", "--json")
    logistic = fedbcd("run", write_job(job), "--out", tmp_path / "logistic", "--json")
    assert own.summary["digest"] == logistic.summary["digest"]


def test_a_run_leaves_its_input_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    job = write_job(tmp_path / "in" / "job.toml")
    before = hash_folder(tmp_path / "in")
    fedbcd("run", job, "--out", tmp_path / "out")
    fedbcd("replay", tmp_path / "out")
    assert hash_folder(tmp_path / "in") == before


def test_replay_leaves_the_folder_alone(default: Path) -> None:
    before = hash_folder(default)
    assert fedbcd("replay", default / "fedbcd-sync").code == 0
    assert hash_folder(default) == before


def test_a_notice_is_printed_when_a_model_cannot_be_vectorised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n       "
        " super().__init__(64, 10)\n"
    )
    text += (
        "    def forward(self, x):\n        y = super().forward(x.flatten(1))\n        return y if"
        " y.sum().item() > 0 else -y\n"
    )
    (tmp_path / "stubborn_models.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    job = write_job(tmp_path / "job.toml", **{"model.name": "stubborn_models:Net", "run.rounds": 1})
    answer = fedbcd("run", job, "--out", tmp_path / "out")
    assert answer.code == 0
    assert "note: this model cannot be vectorised, so devices train one after another" in answer.err
