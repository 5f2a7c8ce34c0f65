"""Sessions of devices whose models are rows of tables: what is kept is written there.

Shapes: N devices, F values of a model, P parameters of it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbcd.algorithm.fused.library import ModelRows
from fedbcd.algorithm.method import SENT
from fedbcd.compute.batch import Trainer
from fedbcd.compute.rows import ManyModels
from fedbcd.compute.workers import Workers
from fedbcd.protocol.messages import ModelRef
from fedbcd.schedule.work import Session


class LocalTraining:
    """A few sessions at a time, of different devices; those share nothing."""

    def __init__(
        self,
        trainer: Trainer,
        tables: Mapping[str, ManyModels],
        with_nobody: dict[str, Tensor],
        start: Tensor,
    ) -> None:
        """`start` is x(0), as sessions compute with it; `with_nobody` are tables that are tensors,
        with a row of nobody.
        """
        self._trainer, self._bound = trainer, trainer.bound
        self._tables = {name: tables[name] for name in self._bound.slots}
        self._with_nobody = with_nobody
        self._dtype, self._where = start.dtype, start.device
        # beside contributions that layers on uploads need
        self.slots = {*tables} - ({SENT} if self._bound.wire is not None else set())
        x_NF = with_nobody.get("x")
        # whether compiled code can train in the memory of all models, x and x_prev
        self._in_place = (
            x_NF is not None
            and x_NF.dtype == start.dtype
            and self.slots == {"x", "x_prev"}
            and [*self._bound.upload.places] == ["x"]
        )
        self._replaces_x = trainer.method.counts == "members" and self._bound.sends_x

    def run(
        self, sessions: list[Session], heard_NF: Tensor | None, workers: Workers | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What uploads replace in the sum of a server, if that is x, and what is uploaded;
        `workers` are for all rows together.
        """
        rows = torch.tensor([s.device for s in sessions], device=self._where)
        if workers is not None and self._in_place:
            return self._run_in_place(sessions, rows, heard_NF, workers)
        return self._run_copies(sessions, rows, heard_NF, workers)

    def _run_copies(
        self,
        sessions: list[Session],
        rows: Tensor,
        heard_NF: Tensor | None,
        workers: Workers | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        kept = {name: table.index_select(0, rows) for name, table in self._tables.items()}
        registers = {name: values.to(self._dtype) for name, values in kept.items()}
        if heard_NF is not None:
            registers |= self._bound.heard.views(heard_NF)
        after = self._trainer.run(sessions, registers, workers)
        for name, table in self._tables.items():
            after[name] = after[name].to(table.dtype)
            table.index_copy_(0, rows, after[name])
        if sessions[0].offline:
            return None, None
        return kept["x"] if self._replaces_x else None, self._bound.uploaded(after)

    def _run_in_place(
        self,
        sessions: list[Session],
        rows: Tensor,
        heard_NF: Tensor | None,
        workers: Workers,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same by compiled code, which needs no copies but what is uploaded, and what that
        replaces.
        """
        x_NF, prev_NP = self._with_nobody["x"], self._with_nobody["x_prev"]
        after = None if sessions[0].offline else x_NF.new_empty(len(sessions), x_NF.shape[1])
        before = torch.empty_like(after) if after is not None and self._replaces_x else None
        models = ModelRows(x_NF, prev_NP, x_NF, prev_NP, rows, before, after)
        self._trainer.run_compiled(sessions, models, heard_NF, workers)
        return before, after

    def heard(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> Tensor | None:
        """What each session's server sends; where it is the same for all, without copies."""
        if sessions[0].offline:
            return None
        heard = self._bound.heard.size
        handles = [session.model for session in sessions if session.model is not None]
        if len(set(handles)) == 1:
            return models[handles[0]][:heard].expand(len(sessions), -1)
        return torch.stack([models[handle][:heard] for handle in handles])
