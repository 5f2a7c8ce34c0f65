"""Where devices are: their models, their training (`local_training.py`), and what they add to the
servers' sums (`contributions.py`).

`StackedDevices` holds the models of this process as rows of stacked tensors, or in files;
`engines.cluster` has another `Devices`, whose models are on other machines.

Shapes: N devices, F values of a model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm.plan import one_loop
from fedbcd.compute.batch import Trainer
from fedbcd.compute.contributions import Contributions, ServerSums, StackedContributions, Upload
from fedbcd.compute.local_training import LocalTraining
from fedbcd.compute.rows import (
    MakeRows,
    ManyModels,
    Rows,
    SomeRows,
    load_tables,
    state_of_tables,
)
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.own import is_own
from fedbcd.protocol.messages import ModelRef
from fedbcd.schedule.work import Count, Session, Sessions

Wait = Callable[[], None]


class Devices(Protocol):
    """Computes what is asked of devices. It knows no clock, no step of a server and no mixing."""

    tables: dict[str, ManyModels]  # what devices keep, by slot: a row for each
    storage: torch.dtype  # of these
    engine: str  # its name, if it adds up sums in an order of its own; otherwise empty
    one_sum: bool  # uploads to all servers are in the first sum, since eq. (5) needs only the total

    @property
    def contributions(self) -> Contributions:
        """What they add to the servers' sums."""

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: ServerSums
    ) -> Wait | None:
        """Train, and add uploads to sums, in this order. What is returned is called before `into`
        is read; None: it is all done.
        """

    def state(self) -> dict[str, Tensor | SomeRows]:
        """What a checkpoint needs of them."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round."""

    def why_not_ahead(self) -> str | None:
        """Why rounds of these devices cannot be planned ahead; None: they can."""

    def saved_in(self, checkpoint: Path | None) -> None:
        """All models are in this file now; None: a checkpoint will be written, so what is lost can
        be brought back.
        """

    def report(self) -> dict[str, Any]:
        """For the summary of a run: who did how much. Empty where it was one process."""


class StackedDevices:
    """What devices keep as rows of one table for each slot."""

    engine = ""
    one_sum = False

    def __init__(
        self,
        trainer: Trainer,
        start: Tensor,
        devices: int,
        storage: torch.dtype,
        make_rows: MakeRows | None = None,
    ) -> None:
        """`start` is x(0). Slots are kept as `storage`; `make_rows` keeps them elsewhere than in a
        tensor. A device rounds what it keeps at the end of a session, and uploads it so.
        """
        self.workers: Workers = OneWorker()
        self.trainer, self.bound, self.method = trainer, trainer.bound, trainer.method
        self.dtype = start.dtype
        self.storage = storage
        self._start = start.to(storage)
        self.tables: dict[str, ManyModels] = {}
        self.with_nobody: dict[str, Tensor] = {}
        for name, first in self.bound.tables(self._start).items():
            if make_rows is not None:
                self.tables[name] = make_rows(name, devices, first)
                continue
            # one row more, for work of nobody that fills a fixed shape
            self.with_nobody[name] = first.repeat(devices + 1, 1)
            self.tables[name] = self.with_nobody[name][:devices]
        self.contributions = StackedContributions(trainer, self.tables, self._start)
        self._training = LocalTraining(trainer, self.tables, self.with_nobody, start)

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: ServerSums
    ) -> None:
        """At once."""
        for part in work:
            if isinstance(part, Sessions):
                self._train(list(part.sessions), models)
            else:
                self.contributions.absorb(part.uploads, into, self.workers)
        for kept in self._in_files():
            kept.release()

    def _train(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> None:
        """These devices, each once; parts share nothing, so workers take them as they come."""

        def run(part: list[Session], workers: Workers | None = None) -> dict[int, Upload]:
            heard_NF = self._training.heard(part, models)
            before, after = self._training.run(part, heard_NF, workers)
            if after is None or heard_NF is None:
                return {}
            return self.contributions.of(part, before, after, heard_NF)

        parts = self.trainer.parts(sessions)
        if self.trainer.works_together:
            found = [run(part, self.workers) for part in parts]
        else:
            found = [*self.workers.map(run, parts)]
        for uploads in found:
            self.contributions.add(uploads)

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        self.workers = workers

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round."""
        for kept in self._in_files():
            kept.will_need(devices)

    def why_not_ahead(self) -> str | None:
        """Why rounds of these devices cannot be planned ahead."""
        if self._in_files():
            return "personal models are kept in files (`state`) or on a cluster"
        if not self.trainer.divisible or self.trainer.max_batch is not None:
            return "its devices train one after another, or draw random numbers in the forward pass"
        if self.trainer.why_not_tensors:
            return self.trainer.why_not_tensors
        plans = [one_loop(plan) for plan in (self.method.plan, self.method.offline) if plan]
        if None in plans or self._training.slots not in ({"x", "x_prev"}, set()):
            return "its plan is more than a loop of steps on x and x_prev"
        by_mean = self.bound.by_value and not self.bound.needs_counts
        if not by_mean or [*self.bound.upload.places] != ["x"]:
            return "its server step needs more than the mean of x"
        if self.method.discount is not None:
            return "its servers weigh uploads by their age"
        if self.method.batch == "all":
            return "exact gradients need batches of different sizes"
        layers = () if self.bound.wire is None else self.bound.wire.layers
        if layers and self._start.is_cuda:
            return "layers on uploads are no work that a CUDA graph records"
        if any(is_own(type(layer)) for layer in layers):
            return "layers of one's own may ask which activation an upload is of"
        return None

    def saved_in(self, checkpoint: Path | None) -> None:
        """Nothing is lost here but with the process."""

    def report(self) -> dict[str, Any]:
        """One process."""
        return {}

    def _in_files(self) -> list[Rows]:
        return [table for table in self.tables.values() if isinstance(table, Rows)]

    def state(self) -> dict[str, Tensor | SomeRows]:
        """What a checkpoint needs of them."""
        return state_of_tables(self.tables) | self.contributions.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""
        load_tables(self.tables, state)
        self.contributions.load_state(state)
