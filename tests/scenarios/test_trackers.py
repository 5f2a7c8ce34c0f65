"""Trackers, each against the real library, offline: what was trained is what the library reads
back.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.trackers import MLflow, TensorBoard, Tracker, WandB, tracker
from support.runs import fedbcd, train, write_job
from support.waiting import wait_for

SETTINGS = {"title": "small", "algorithm": {"name": "fedbcd", "penalty": 1.0}}


def _expected(run: fb.Run) -> dict[str, dict[int, float]]:
    """Column -> round -> value, of all that is not NaN."""
    columns: dict[str, dict[int, float]] = {}
    for row in run.history:
        for key, value in row.items():
            if key != "round" and not math.isnan(value):
                columns.setdefault(key, {})[row.round] = value
    return columns


def _train(told: Tracker) -> dict[str, dict[int, float]]:
    with told:
        return _expected(
            train("fedbcd-async", rounds=5, evaluate_every=2, certify_every=2, on_round=told)
        )


def _close(
    found: dict[str, dict[int, float]],
    expected: dict[str, dict[int, float]],
    relative: float = 1e-9,
) -> None:
    assert set(found) == set(expected)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=relative), key


# ------------------------------------------------------------------------------------------------
# libraries
@pytest.mark.filterwarnings("ignore")  # of the library, about itself
def test_tensorboard_reads_back_the_history(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs fedbcd[tensorboard]"
    )
    expected = _train(TensorBoard(tmp_path, name="small", settings=SETTINGS))
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    found = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    _close(found, expected, 1e-6)  # float32 on disk
    text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "algorithm.penalty = 1.0" in text


@pytest.mark.filterwarnings("ignore")  # of the library, about itself
def test_mlflow_reads_back_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs fedbcd[mlflow]")
    pytest.importorskip("sqlalchemy", reason="needs fedbcd[mlflow]")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/track.db"
    told = MLflow(uri, experiment="ours", name="small", settings=SETTINGS)
    expected = _train(told)
    client = mlflow.MlflowClient(uri)
    run = client.get_run(told.run_id)
    found = {
        key: {m.step: m.value for m in client.get_metric_history(told.run_id, key)}
        for key in run.data.metrics
    }
    _close(found, expected)
    assert run.data.params["algorithm.penalty"] == "1.0"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "small")
    _train(MLflow(uri, experiment="ours", name="again"))  # the experiment is there already
    assert len(client.search_runs([run.info.experiment_id])) == 2


@pytest.mark.filterwarnings("ignore")  # of the library, about itself
def test_wandb_reads_back_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs fedbcd[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected = _train(
        WandB("ours", folder=tmp_path, mode="offline", name="small", settings=SETTINGS)
    )
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, dict[int, float]] = {}
    wait_for(
        lambda: len(_wandb_rows(log)) == len(expected["clock"])
    )  # the library's service may write a moment after the end
    for step, values in _wandb_rows(log):
        for key, value in values.items():
            found.setdefault(key, {})[step] = value
    _close(found, expected)


def _wandb_rows(log: Path) -> list[tuple[int, dict[str, float]]]:
    """The rows in the file of an offline run, parsed by the library's own messages."""
    from wandb.proto import wandb_internal_pb2

    rows: list[tuple[int, dict[str, float]]] = []
    for data in _leveldb_records(log.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append(
                (
                    int(items["_step"]),
                    {key: value for key, value in items.items() if not key.startswith("_")},
                )
            )
    return rows


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """A head of 7 bytes, then blocks of 32 kB with records of checksum, length and kind (1 whole;
    2, 3, 4 first, middle and last part).
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


# ------------------------------------------------------------------------------------------------
# interface
class Recorder(Tracker):
    """A tracker of one's own: three methods."""

    def __init__(self) -> None:
        super().__init__("mine", SETTINGS)
        self.said: list[Any] = []

    def _begin(self) -> None:
        self.said.append(self.settings)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self.said.append((step, values["activations"]))

    def _end(self) -> None:
        self.said.append("end")


def test_each_row_is_written_once_and_the_end_comes_even_after_an_error() -> None:
    mine = Recorder()
    run = train("fedbcd-sync", rounds=4, evaluate_every=2, on_round=mine)
    with pytest.raises(ZeroDivisionError), mine:
        _ = 1 / 0
    assert mine.said[0] == {
        "title": "small",
        "algorithm.name": "fedbcd",
        "algorithm.penalty": "1.0",
    }
    assert mine.said[1:-1] == [(row.round, row.activations) for row in run.history]
    assert mine.said[-1] == "end"
    mine.close()
    assert mine.said.count("end") == 1


def test_a_tracker_that_was_told_nothing_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs fedbcd[tensorboard]")
    TensorBoard(tmp_path / "logs").close()
    assert not (tmp_path / "logs").exists()


@pytest.mark.filterwarnings("ignore")  # of the library, about itself
def test_the_command_line_tracks_every_run_of_a_job(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs fedbcd[tensorboard]")
    job = write_job(tmp_path / "job.toml", runs=[{"title": "One"}, {"title": "Two"}])
    answer = fedbcd(
        "run", job, "--rounds", "2", "--out", tmp_path / "out", "--track", "tensorboard"
    )
    assert answer.code == 0, answer.err
    for name in ("one", "two"):
        assert list((tmp_path / "out" / name / "tensorboard").glob("events.out.tfevents*"))


def test_an_unknown_tracker_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    answer = fedbcd(
        "run", write_job(tmp_path / "job.toml"), "--out", tmp_path / "out", "--track", "tensorbord"
    )
    assert answer.code == 2
    assert "did you mean 'tensorboard'?" in answer.err
    assert not (tmp_path / "out").exists()


def test_a_library_that_is_missing_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, module in (("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"pip install 'fedbcd\[{name}\]'"):
            tracker(name, tmp_path, "x", {})
