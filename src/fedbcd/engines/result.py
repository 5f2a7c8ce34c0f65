"""What training gives: models, table, and where it ended."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.params import Layout, names_in
from fedbcd.compute.rows import ManyModels, Rows, SomeRows
from fedbcd.config import called, convert
from fedbcd.data.federation import Federation, check_federation
from fedbcd.data.preview import COLOURS, figure_of, save_figure, tidy
from fedbcd.engines.environment import environment
from fedbcd.engines.replay import recorded_spec, spec_of
from fedbcd.errors import ConfigError, FedBCDError, RecordError
from fedbcd.record.eventlog import LogReader
from fedbcd.record.history import DeviceTable, History, Row
from fedbcd.record.names import DEVICES, HISTORY, LOG, MODELS
from fedbcd.record.runfolder import writing_to
from fedbcd.record.tensorfile import read_tensors, write_tensors
from fedbcd.spec import RunSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Models:
    """The models of a run at some moment, as modules."""

    federation: Federation

    @property
    def seed(self) -> int:
        """That of the run: frozen parameters belong to it."""
        raise NotImplementedError

    def all_global(self) -> Tensor:
        """z_n, one row per server."""
        raise NotImplementedError

    def one_personal(self, device: int) -> Tensor:
        """x_i."""
        raise NotImplementedError

    @property
    def global_model(self) -> nn.Module:
        """The mean of the servers' models, as a module (with Sync-cloud they are all the same)."""
        return self.model_of(self.all_global().double().mean(0))

    def server_model(self, server: int) -> nn.Module:
        return self.model_of(_row(self.all_global(), server, "server"))

    def personal_model(self, device: int) -> nn.Module:
        check_there_is(device, self.federation.devices, "device")
        return self.model_of(self.one_personal(device))

    def model_of(self, flat: Tensor) -> nn.Module:
        module = self.federation.make_model(self.seed)
        return Layout(module).load(module, flat).eval()


class Best(Models):
    """The models of the look that was the best by a column of the history, and its row. Those in a
    file are read when they are asked for.
    """

    def __init__(
        self,
        federation: Federation,
        seed: int,
        column: str,
        row: Row,
        kept: Mapping[str, Any] | Path,
    ) -> None:
        """`kept`: x and z, or the file that holds them."""
        self.federation, self._seed, self._kept = federation, seed, kept
        self.column, self.row = column, row

    def __repr__(self) -> str:
        return f"Best(round {self.row.round}, {self.column} {self.row[self.column]:.4g})"

    @property
    def seed(self) -> int:
        return self._seed

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        return read_tensors(self._kept)[0] if isinstance(self._kept, Path) else self._kept

    @property
    def personal_NF(self) -> ManyModels:
        """x_i, one row per device."""
        return self._tensors["x"]  # type: ignore[no-any-return]

    @property
    def global_VF(self) -> Tensor:
        """z_n, one row per server."""
        return self._tensors["z"]  # type: ignore[no-any-return]

    def all_global(self) -> Tensor:
        return self.global_VF

    def one_personal(self, device: int) -> Tensor:
        return self.personal_NF[device]

    def save(self, folder: Path) -> Path:
        """The file of these models in a folder; written unless it lies there."""
        path = folder / best_file(self.row.round)
        if self._kept != path:
            write_models(
                path, self.personal_NF, self.global_VF, {"row": json.dumps(dict(self.row))}
            )
        return path


def best_file(round_: int) -> str:
    """The name of the file that holds the models of the best look, while it is the best."""
    return f"best-{round_}.safetensors"


def write_models(path: Path, x: ManyModels, z: Tensor, notes: dict[str, str]) -> None:
    """All x_i and z_n as one file."""
    models = SomeRows(x, torch.arange(len(x))) if isinstance(x, Rows) else x
    write_tensors(path, {"x": models, "z": z}, notes)


@dataclass
class Run(Models):
    """What training gave: models, table, and where it ended."""

    federation: Federation
    history: History
    personal_NF: ManyModels  # x_i, one row per device; the parameters first, then buffers
    global_VF: Tensor  # z_n, one row per server
    summary: dict[str, Any] = field(
        default_factory=dict
    )  # algorithm, cloud, rounds, clock, accuracies, seconds, digest
    personal_scores: dict[int, float] = field(
        default_factory=dict
    )  # each device's own model on its own labels, by the first measure
    finished: bool = True
    global_scores: dict[int, float] = field(
        default_factory=dict
    )  # its server's model on the same labels
    spec: RunSpec | None = None  # how it was trained, where that is known
    best: Best | None = None  # the models of its best look, where they were kept
    devices: DeviceTable = field(default_factory=DeviceTable)  # all measures of each device
    # the same at each look, by round, where they were kept (`device_tables`)
    device_tables: dict[int, DeviceTable] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        return str(self.summary["digest"])

    @property
    def seed(self) -> int:
        return int(self.summary.get("seed", 0))

    @property
    def interrupted(self) -> bool:
        """Whether it ended before it was to end: by Ctrl-C, or by `should_stop`."""
        return not self.finished

    def all_global(self) -> Tensor:
        return self.global_VF

    def one_personal(self, device: int) -> Tensor:
        return _row(self.personal_NF, device, "device")

    def plot(
        self,
        path: str | Path | None = None,
        *,
        columns: Sequence[str] = (),
        axis: str = "clock",
    ) -> "Figure":
        """Columns of the history as a figure, also written where a path is given; by default its
        first measure.
        """
        columns = columns or self.history.ends[:2]
        figure: Figure
        figure, axes = figure_of((6, 3.9))
        for colour, column in zip(COLOURS[1:] * len(columns), columns, strict=False):
            found = self.history.column(axis), self.history.column(column)
            axes.plot(*found, color=colour, linewidth=2, label=column.replace("_", " "))
        axes.set_xlabel(axis.replace("_", " "))
        axes.legend(frameon=False)
        tidy(axes)
        if path is not None:
            save_figure(figure, path)
        return figure

    def _in_words(self) -> str:
        s = self.summary
        done = "" if self.finished else ", stopped"
        return f"{s.get('algorithm')} on the {s.get('cloud')} cloud, seed {s.get('seed')}{done}"

    def __repr__(self) -> str:
        return f"Run({self._in_words()})"

    def __str__(self) -> str:
        return f"{self._in_words()}\n{self.history!r}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._in_words())}</p>{self.history._repr_html_()}"

    def save(self, folder: str | Path) -> None:
        path = Path(convert(folder, str | Path, "folder"))
        with writing_to(path):
            path.mkdir(parents=True, exist_ok=True)
        self.history.write_csv(path / HISTORY)
        self.devices.write_csv(path / DEVICES)
        notes = (self.personal_scores, self.global_scores, self.history.measures)
        summary = {
            **notes_of(self.federation, *notes),
            "summary": json.dumps(self.summary),
            "finished": json.dumps(self.finished),
            "names": json.dumps(names_in(self.federation.make_model(0))),
            "fedbcd_models": "1",
        }
        if self.spec is not None:
            summary["identity"] = json.dumps(self.spec.identity(self.federation))
        write_models(path / MODELS, self.personal_NF, self.global_VF, summary)
        if self.best is not None:
            self.best.save(path)

    @classmethod
    @called("Run.load")
    def load(cls, folder: str | Path, federation: Federation) -> "Run":
        """Read a saved run; the federation supplies the module that the models fit into."""
        check_federation(federation)
        path = Path(convert(folder, str | Path, "folder"))
        if not (path / MODELS).is_file():
            raise RecordError(
                f"{path} holds no models of a run; give the folder that run.save or train(out=...)"
                " has made"
            )
        tensors, metadata = read_tensors(path / MODELS)
        try:
            summary = json.loads(metadata["summary"])
            scores = _scores(metadata["scores"])
            global_scores = _scores(metadata.get("global_scores", "{}"))  # version 0.1.0 had none
            x, z, finished = tensors["x"], tensors["z"], bool(json.loads(metadata["finished"]))
        except (KeyError, ValueError) as error:
            raise RecordError(
                f"{path / MODELS} does not hold the models of a run ({error})"
            ) from None
        size = Layout(federation.make_model(0)).size_F
        if x.shape != (federation.devices, size) or z.shape != (len(federation.servers), size):
            raise RecordError(
                f"{path} holds models of {tuple(x.shape)} (devices, values); this federation has"
                f" {(federation.devices, size)}"
            )
        history = History.read_csv(path / HISTORY).known_by(metadata)
        run = cls(federation, history, x, z, summary, scores, finished, global_scores)
        run.best = _best_in(path, run)
        run.spec = _spec_in(path, metadata, federation)
        if (path / DEVICES).exists():  # earlier versions wrote none
            run.devices = DeviceTable.read_csv(path / DEVICES)
        return run


def _spec_in(folder: Path, metadata: Mapping[str, str], federation: Federation) -> RunSpec | None:
    """How a run was set up; None where its folder does not say, or says it of other data."""
    with suppress(FedBCDError, ValueError):
        if "identity" in metadata:
            return spec_of(json.loads(metadata["identity"]), folder / MODELS, federation)
        return recorded_spec(LogReader(folder / LOG), federation)
    return None


def _best_in(folder: Path, run: Run) -> Best | None:
    found = run.summary.get("best", {})
    path = folder / best_file(found.get("round", 0))
    rows = [row for row in run.history if row.round == found.get("round")]
    if not (rows and path.is_file()):
        return None
    return Best(run.federation, run.seed, str(found["column"]), rows[0], path)


def _row(models: ManyModels, number: int, what: str) -> Tensor:
    check_there_is(number, len(models), what)
    return models[number]


def check_there_is(number: int, count: int, what: str) -> None:
    """Refuse the number of somebody whom nobody knows."""
    if convert(number, int, what) not in range(count):
        raise ConfigError(f"there is no {what} {number}; there are {what}s 0 to {count - 1}")


MOST_COUNTS = 1_000_000  # entries of a table of devices and labels that is kept in a record


def notes_of(
    federation: Federation,
    personal: dict[int, float],
    home: dict[int, float],
    measures: Mapping[str, str],
) -> dict[str, str]:
    """What a record of a run says about devices and machine, beside its models: scores, the split,
    versions.
    """
    partition = {"sizes": federation.sizes, **_label_counts(federation)}
    return {
        "scores": json.dumps(personal),
        "global_scores": json.dumps(home),
        "partition": json.dumps(partition),
        "environment": json.dumps(environment()),
        "measures": json.dumps(dict(measures)),
    }


def _label_counts(federation: Federation) -> dict[str, Any]:
    """How many samples of each label of the data each device has, and the test set.

    Nothing where targets are no labels or not known without reading the data, or the table would be
    huge.
    """
    targets, span = federation.pool.known_targets, federation.common_test
    if targets is None or not _are_labels(targets):
        return {}
    tested = None if federation.test is None or span is None else federation.test.known_targets
    tested = None if tested is None or span is None else tested[slice(*span)]
    tested = targets[:0] if tested is None or not _are_labels(tested) else tested
    labels, place = torch.unique(
        torch.cat([targets, tested]), return_inverse=True
    )  # also labels that no device owns
    if len(labels) * federation.devices > MOST_COUNTS:
        return {}
    owner = torch.repeat_interleave(
        torch.arange(federation.devices), torch.tensor(federation.sizes)
    )
    owned = place[: len(targets)][federation.positions]
    counts = torch.bincount(owner * len(labels) + owned, minlength=federation.devices * len(labels))
    found = {
        "labels": labels.tolist(),
        "counts": counts.reshape(federation.devices, len(labels)).tolist(),
    }
    if len(tested):
        found["tested"] = torch.bincount(place[len(targets) :], minlength=len(labels)).tolist()
    return found


def _are_labels(targets: Tensor) -> bool:
    return not targets.is_floating_point() and targets.ndim == 1


def _scores(text: str) -> dict[int, float]:
    return {int(device): float(score) for device, score in json.loads(text).items()}
