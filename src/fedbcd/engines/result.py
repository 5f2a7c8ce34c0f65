"""What training gives: models, table, and where it ended."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.params import Layout
from fedbcd.data.federation import Federation
from fedbcd.engines.simulate.rows import ManyModels, Rows, SomeRows
from fedbcd.errors import RecordError
from fedbcd.history import History, Row
from fedbcd.runfolder import read_tensors, write_tensors


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
    summary: dict[str, Any] = field(default_factory=dict)  # algorithm, cloud, rounds, clock, accuracies, seconds, digest
    personal_scores: dict[int, float] = field(default_factory=dict)
    finished: bool = True

    @property
    def digest(self) -> str:
        """A hash of all x_i, x_prev and z_n, bit for bit."""
        return str(self.summary["digest"])

    @property
    def global_model(self) -> nn.Module:
        """The mean of the servers' models, as a module (with Sync-cloud they are all the same)."""
        return self._module(self.global_VF.double().mean(0))

    def server_model(self, server: int) -> nn.Module:
        """z_n of one server, as a module."""
        return self._module(self.global_VF[server])

    def personal_model(self, device: int) -> nn.Module:
        """x_i of one device, as a module."""
        return self._module(self.personal_NF[device])

    def _module(self, flat: Tensor) -> nn.Module:
        module = self.federation.make_model(int(self.summary.get("seed", 0)))  # frozen parameters belong to the seed
        return Layout(module).load(module, flat).eval()

    def save(self, folder: str | Path) -> None:
        """Write models and table; `load` reads them."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.history.write_csv(path / "history.csv")
        summary = {
            "summary": json.dumps(self.summary),
            "scores": json.dumps(self.personal_scores),
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
            scores = {int(k): float(v) for k, v in json.loads(metadata["scores"]).items()}
            x, z, finished = tensors["x"], tensors["z"], bool(json.loads(metadata["finished"]))
        except (KeyError, ValueError) as error:
            raise RecordError(f"{path / 'models.safetensors'} does not hold the models of a run ({error})") from None
        size = Layout(federation.make_model(0)).size_F
        if x.shape != (federation.devices, size) or z.shape != (len(federation.servers), size):
            raise RecordError(
                f"{path} holds models of {tuple(x.shape)} (devices, values); this federation has {(federation.devices, size)}"
            )
        return cls(federation, History.read_csv(path / "history.csv"), x, z, summary, scores, finished)
