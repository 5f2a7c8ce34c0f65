"""What training gives: models, table, and where it ended."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.params import Layout
from fedbcd.compute.rows import ManyModels, Rows, SomeRows
from fedbcd.data.federation import Federation
from fedbcd.engines.environment import environment
from fedbcd.errors import ConfigError, RecordError
from fedbcd.record.history import ACCURACY, DeviceTable, History, Row
from fedbcd.record.tensorfile import read_tensors, write_tensors
from fedbcd.spec import RunSpec


@dataclass(frozen=True)
class Progress:
    """Told after every round."""

    round: int
    clock: float
    fraction: float  # of the run that is done
    latest: Row  # the latest evaluation
    measure: str = ACCURACY  # the first, by which a run is judged


@dataclass
class Run:
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
    devices: DeviceTable = field(default_factory=DeviceTable)  # all measures of each device

    @property
    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        return str(self.summary["digest"])

    @property
    def global_model(self) -> nn.Module:
        """The mean of the servers' models, as a module (with Sync-cloud they are all the same)."""
        return self.model_of(self.global_VF.double().mean(0))

    def server_model(self, server: int) -> nn.Module:
        return self.model_of(_row(self.global_VF, server, "server"))

    def personal_model(self, device: int) -> nn.Module:
        return self.model_of(_row(self.personal_NF, device, "device"))

    def model_of(self, flat: Tensor) -> nn.Module:
        module = self.federation.make_model(
            int(self.summary.get("seed", 0))
        )  # frozen parameters belong to the seed
        return Layout(module).load(module, flat).eval()

    def save(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.history.write_csv(path / "history.csv")
        self.devices.write_csv(path / DEVICES)
        notes = (self.personal_scores, self.global_scores, self.history.measures)
        summary = {
            **notes_of(self.federation, *notes),
            "summary": json.dumps(self.summary),
            "finished": json.dumps(self.finished),
            "fedbcd_models": "1",
        }
        x = self.personal_NF
        models = SomeRows(x, torch.arange(len(x))) if isinstance(x, Rows) else x
        write_tensors(path / "models.safetensors", {"x": models, "z": self.global_VF}, summary)

    @classmethod
    def load(cls, folder: str | Path, federation: Federation) -> "Run":
        """Read a saved run; the federation supplies the module that the models fit into."""
        path = Path(folder)
        tensors, metadata = read_tensors(path / "models.safetensors")
        try:
            summary = json.loads(metadata["summary"])
            scores = _scores(metadata["scores"])
            global_scores = _scores(metadata.get("global_scores", "{}"))  # version 0.1.0 had none
            x, z, finished = tensors["x"], tensors["z"], bool(json.loads(metadata["finished"]))
        except (KeyError, ValueError) as error:
            raise RecordError(
                f"{path / 'models.safetensors'} does not hold the models of a run ({error})"
            ) from None
        size = Layout(federation.make_model(0)).size_F
        if x.shape != (federation.devices, size) or z.shape != (len(federation.servers), size):
            raise RecordError(
                f"{path} holds models of {tuple(x.shape)} (devices, values); this federation has"
                f" {(federation.devices, size)}"
            )
        history = History.read_csv(path / "history.csv").known_by(metadata)
        run = cls(federation, history, x, z, summary, scores, finished, global_scores)
        if (path / DEVICES).exists():  # earlier versions wrote none
            run.devices = DeviceTable.read_csv(path / DEVICES)
        return run


def _row(models: ManyModels, number: int, what: str) -> Tensor:
    if number not in range(len(models)):
        raise ConfigError(f"there is no {what} {number}; there are {what}s 0 to {len(models) - 1}")
    return models[number]


DEVICES = "devices.csv"
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

    Nothing where targets are no labels, or the table would be huge.
    """
    targets, span = federation.pool.targets, federation.common_test
    tested = (
        None if federation.test is None or span is None else federation.test.targets[slice(*span)]
    )
    if not _are_labels(targets):
        return {}
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
