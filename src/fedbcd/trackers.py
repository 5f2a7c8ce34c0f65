"""Trackers that people already use, behind one interface: `train(...,
on_round=TensorBoard("logs"))`, or `fedbcd run --track tensorboard`.

A tracker is told after every round, and writes each new row of the history once, with the round as
its step. It begins at the first row and ends with `close`, or with the `with` block it stands in.
Libraries are loaded when a tracker is made; each is an extra of its own.
"""

import abc
import importlib
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbcd.config import nearest
from fedbcd.describe import flat
from fedbcd.engines.progress import Progress
from fedbcd.errors import ConfigError

__all__ = ["MLflow", "TRACKERS", "TensorBoard", "Tracker", "WandB", "tracker"]


class Tracker(AbstractContextManager["Tracker"]):
    """Writes rows of a history somewhere. Kinds implement `_begin`, `_write` and `_end`.

    name       what the run is called there
    settings   plain data to keep with it, e.g. the job
    """

    def __init__(self, name: str, settings: Mapping[str, Any] | None) -> None:
        self.name = name
        self.settings = {key: str(value) for key, value in flat(settings or {}).items()}
        self._last = -1
        self._begun = False

    def __call__(self, progress: Progress) -> None:
        """Told after a round; writes the latest row of the history if it is new."""
        row = progress.latest
        if row.round <= self._last:
            return
        if not self._begun:
            self._begin()
            self._begun = True
        values = {
            key: float(value)
            for key, value in row.items()
            if key != "round" and not math.isnan(value)
        }
        self._write(row.round, values)
        self._last = row.round

    def close(self) -> None:
        """Make everything durable and end. A tracker that has been told nothing leaves nothing."""
        if self._begun:
            self._begun = False
            self._end()

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _write(self, step: int, values: dict[str, float]) -> None: ...

    @abc.abstractmethod
    def _end(self) -> None: ...


class TensorBoard(Tracker):
    """Event files in a folder, for `tensorboard --logdir FOLDER`."""

    def __init__(
        self, folder: str | Path, *, name: str = "fedbcd", settings: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(name, settings)
        _library("tensorboard", "tensorboard")
        self.folder = Path(folder)

    def _begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))
        rows = "\n".join(f"    {key} = {value}" for key, value in self.settings.items())
        self._writer.add_text("settings", f"{self.name}\n\n{rows}")

    def _write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=step)

    def _end(self) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of an MLflow experiment, at a tracking server or in a database (`sqlite:///FILE`)."""

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str = "fedbcd",
        name: str = "fedbcd",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, settings)
        self._mlflow = _library("mlflow", "mlflow")
        self.uri = uri
        self.experiment = experiment
        self.run_id: str | None = None

    def _begin(self) -> None:
        self._client = self._mlflow.MlflowClient(self.uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(self.experiment)
        )
        self.run_id = self._client.create_run(experiment, run_name=self.name).info.run_id
        for key, value in self.settings.items():
            self._client.log_param(self.run_id, key, value[:500])

    def _write(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(key, value, now, step) for key, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _end(self) -> None:
        self._client.set_terminated(self.run_id)


class WandB(Tracker):
    """A run of Weights & Biases. Where it goes, and whether it is offline, follow its own settings,
    such as WANDB_MODE.
    """

    def __init__(
        self,
        project: str = "fedbcd",
        *,
        folder: str | Path | None = None,
        mode: str | None = None,
        name: str = "fedbcd",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, settings)
        self._wandb = _library("wandb", "wandb")
        self.project, self.folder, self.mode = project, folder, mode

    def _begin(self) -> None:
        folder = None if self.folder is None else str(self.folder)
        self._run = self._wandb.init(
            project=self.project, name=self.name, config=self.settings, dir=folder, mode=self.mode
        )

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _end(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def tracker(wish: str, folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """The tracker that a word of the command line asks for: KIND, or KIND=WHERE (a folder, a
    tracking address, a project).
    """
    kind, _, where = wish.partition("=")
    if kind == "tensorboard":
        return TensorBoard(where or folder / "tensorboard", name=name, settings=settings)
    if kind == "mlflow":
        return MLflow(where or None, name=name, settings=settings)
    if kind == "wandb":
        return WandB(where or "fedbcd", folder=folder, name=name, settings=settings)
    raise ConfigError(
        f"--track {wish!r} is unknown{nearest(kind, TRACKERS)}; known: {', '.join(TRACKERS)}, each"
        " with =WHERE or without"
    )


def _library(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this tracker needs {error.name or module}; pip install 'fedbcd[{extra}]'"
        ) from None
