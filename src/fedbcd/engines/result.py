"""What training gives: models, table, and where it ended."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.params import Layout
from fedbcd.compute.rows import ManyModels, Rows, SomeRows
from fedbcd.data.federation import Federation, accuracy
from fedbcd.data.measure import metric_of
from fedbcd.engines.environment import environment
from fedbcd.errors import ConfigError, RecordError
from fedbcd.record.history import History, Row
from fedbcd.record.tensorfile import read_tensors, write_tensors
from fedbcd.spec import RunSpec


@dataclass(frozen=True)
class Progress:
    """Told after every round."""

    round: int
    clock: float
    fraction: float  # of the run that is done
    latest: Row  # the latest evaluation


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
    )  # each device's own model on its own labels
    finished: bool = True
    global_scores: dict[int, float] = field(
        default_factory=dict
    )  # its server's model on the same labels
    spec: RunSpec | None = None  # how it was trained, where that is known

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
        summary = {
            **notes_of(self.federation, self.personal_scores, self.global_scores),
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
        return cls(
            federation,
            History.read_csv(path / "history.csv"),
            x,
            z,
            summary,
            scores,
            finished,
            global_scores,
        )


def _row(models: ManyModels, number: int, what: str) -> Tensor:
    if number not in range(len(models)):
        raise ConfigError(f"there is no {what} {number}; there are {what}s 0 to {len(models) - 1}")
    return models[number]


MOST_COUNTS = 1_000_000  # entries of a table of devices and labels that is kept in a record


def notes_of(
    federation: Federation, personal: dict[int, float], home: dict[int, float]
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
        **{key: json.dumps(value) for key, value in metric_of(federation).items()},
    }


def _label_counts(federation: Federation) -> dict[str, Any]:
    """How many samples of each label of the data each device has, and the test set where accuracy
    is what is measured.

    Nothing where targets are no labels or not known without reading the data, or the table would be
    huge.
    """
    targets = federation.pool.known_targets
    if targets is None or not _are_labels(targets):
        return {}
    tested = None if federation.test is None else federation.test.known_targets
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
    if len(tested) and federation.metric is accuracy:
        found["tested"] = torch.bincount(place[len(targets) :], minlength=len(labels)).tolist()
    return found


def _are_labels(targets: Tensor) -> bool:
    return not targets.is_floating_point() and targets.ndim == 1


def _scores(text: str) -> dict[int, float]:
    return {int(device): float(score) for device, score in json.loads(text).items()}
