"""Keeps the models of the best look of a run beside the last.

Which look that is follows from the history, and the file is named after its round. So a run that is
killed between a look and the next checkpoint needs no other record: the file that its checkpoint's
history asks for is removed only after a checkpoint whose history asks for another.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbcd.compute.rows import ManyModels
from fedbcd.data.federation import Federation
from fedbcd.engines.result import Best, best_file
from fedbcd.record.history import History, Row
from fedbcd.record.stopping import best_row

AllModels = Callable[[], tuple[ManyModels, Tensor]]


class Keeper:
    """Of the best models by one column."""

    def __init__(
        self, federation: Federation, seed: int, column: str, lower: bool, folder: Path | None
    ) -> None:
        """`folder`: for their file; without one they stay in memory."""
        self._federation, self._seed = federation, seed
        self.column, self._lower, self._folder = column, lower, folder
        self._in_memory: dict[str, Any] = {}
        self._from = 0  # the first row whose models could be kept
        self._durable: str | None = None  # the file that the last checkpoint asks for

    def go_on(self, history: History) -> str | None:
        """After a resume; a sentence if the best models so far have not been kept."""
        row = self._best(history)
        if row is None or self._folder is None:
            return None
        if (self._folder / best_file(row.round)).is_file():
            self._durable = best_file(row.round)
            return None
        self._from = len(history)
        return (
            f"the models of round {row.round}, the best so far by {self.column}, are not in"
            f" {self._folder}: the best of the rounds from here on are kept"
        )

    def saw(self, history: History, models: AllModels) -> None:
        """After a look: keep these models if they are the best."""
        row = self._best(history)
        if row is None or row is not history.last:
            return
        x, z = models()
        if self._folder is None:
            self._in_memory = {"x": x, "z": z}
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        Best(self._federation, self._seed, self.column, row, {"x": x, "z": z}).save(self._folder)
        self._keep_only(self._durable, best_file(row.round))

    def saved(self, history: History) -> None:
        """After a checkpoint with this history."""
        row = self._best(history)
        if row is not None and self._folder is not None:
            self._durable = best_file(row.round)
            self._keep_only(self._durable)

    def _keep_only(self, *names: str | None) -> None:
        assert self._folder is not None
        for path in self._folder.glob("best-*"):
            if path.name not in names:
                path.unlink()

    def best(self, history: History) -> Best | None:
        row = self._best(history)
        if row is None:
            return None
        kept: Any = self._folder / best_file(row.round) if self._folder else self._in_memory
        return Best(self._federation, self._seed, self.column, row, kept)

    def _best(self, history: History) -> Row | None:
        return best_row(history[self._from :], self.column, lower=self._lower)
