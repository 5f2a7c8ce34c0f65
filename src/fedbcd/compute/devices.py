"""Where devices are: their models, their training, and what they add to the servers' sums.

`StackedDevices` holds the models of this process as rows of stacked tensors, or in files;
`engines.cluster` has another `Devices`, whose models are on other machines.

Shapes: V servers, N devices, P parameters, F values of a model, U values of an upload.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.fused.library import Models
from fedbcd.algorithm.method import SENT
from fedbcd.algorithm.plan import one_loop
from fedbcd.algorithm.wire import Wire
from fedbcd.compute.batch import Trainer
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
from fedbcd.protocol.messages import ModelRef, ref
from fedbcd.schedule.work import Count, Session, Sessions

Wait = Callable[[], None]
UPLOAD = "upload:"  # in a checkpoint: one that waits, with device and activation


@dataclass(slots=True)
class ServerSums:
    """Per server the weighted sum of uploads in float64 (U values each), the weight of what is in
    it, and of how many.
    """

    total_VU: Tensor
    weight_V: list[float]
    count_V: list[int]

    @classmethod
    def of(cls, servers: int, width: int, where: torch.device | str = "cpu") -> "ServerSums":
        """Of nobody."""
        total_VU = torch.zeros(servers, width, dtype=torch.float64, device=where)
        return cls(total_VU, [0.0] * servers, [0] * servers)

    def clear(self, servers: Iterable[int]) -> None:
        """Nobody counts."""
        for server in servers:
            self.total_VU[server] = 0.0
            self.weight_V[server] = 0.0
            self.count_V[server] = 0


class Devices(Protocol):
    """Computes what is asked of devices. It knows no clock, no step of a server and no mixing."""

    tables: dict[str, ManyModels]  # what devices keep, by slot: a row for each
    storage: torch.dtype  # of these
    engine: str  # its name, if it adds up sums in an order of its own; otherwise empty
    one_sum: bool  # uploads to all servers are in the first sum, since eq. (5) needs only the total

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: ServerSums
    ) -> Wait | None:
        """Train, and add uploads to sums, in this order. What is returned is called before `into`
        is read; None: it is all done.
        """
        ...

    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        ...

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes at present; an upload that waits is forgotten."""
        ...

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted, unless it is this one."""
        ...

    def start_over(self, device: int, model: Tensor) -> Tensor:
        """Everything that it keeps begins anew, at z = `model`; what it contributes then."""
        ...

    def remember(self, devices: Iterable[int]) -> None:
        """These will be restored: keep what was accepted of them."""
        ...

    def accept(self, device: int) -> None:
        """Its last upload is what it could be restored from."""
        ...

    def restore(self, device: int) -> None:
        """It has lost its memory: what was sent comes back, the rest starts over."""
        ...

    def state(self) -> dict[str, Tensor | SomeRows]:
        """What a checkpoint needs of them."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""
        ...

    def use(self, workers: Workers) -> None:
        """Who computes, from here on."""
        ...

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round."""
        ...

    def why_not_ahead(self) -> str | None:
        """Why rounds of these devices cannot be planned ahead; None: they can."""
        ...

    def saved_in(self, checkpoint: Path | None) -> None:
        """All models are in this file now; None: a checkpoint will be written, so what is lost can
        be brought back.
        """
        ...

    def report(self) -> dict[str, Any]:
        """For the summary of a run: who did how much. Empty where it was one process."""
        ...


@dataclass(slots=True)
class _Upload:
    """What an activation changed: the device's contribution before and after it."""

    activation: int
    before: Tensor | None
    after: Tensor


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
        self._sent_NU = self.tables.get(SENT)
        self._uploads: dict[int, _Upload] = {}
        self._latest: dict[int, Tensor] = {}  # upload of each device to be restored, and ...
        self._accepted: dict[int, Tensor] = {}  # ... the last that was accepted

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: ServerSums
    ) -> None:
        """At once."""
        for part in work:
            if isinstance(part, Sessions):
                self._run(list(part.sessions), models)
            else:
                self._absorb(part.uploads, into)
        for kept in self._in_files():
            kept.release()

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
        plans = [one_loop(plan) for plan in (self.method.plan, self.method.offline) if plan]
        if None in plans or self._slots not in ({"x", "x_prev"}, set()):
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

    @property
    def _slots(self) -> set[str]:
        """What devices keep, beside contributions that layers on uploads need."""
        return {*self.tables} - ({SENT} if self.bound.wire is not None else set())

    def _in_files(self) -> list[Rows]:
        return [table for table in self.tables.values() if isinstance(table, Rows)]

    def state(self) -> dict[str, Tensor | SomeRows]:
        """What a checkpoint needs of them."""
        return state_of_tables(self.tables) | self.waiting()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""
        load_tables(self.tables, state)
        self.wait(state)

    def waiting(self) -> dict[str, Tensor]:
        """Uploads that are not counted yet, each with what it replaces, if that is kept."""
        return {
            f"{UPLOAD}{device}:{upload.activation}": torch.stack(
                [part for part in (upload.after, upload.before) if part is not None]
            )
            for device, upload in self._uploads.items()
        }

    def wait(self, state: Mapping[str, Tensor]) -> None:
        """The inverse."""
        for name in state:
            if name.startswith(UPLOAD):
                device, activation = map(int, name.removeprefix(UPLOAD).split(":"))
                after, *before = state[name].to(self._start.device)
                self._uploads[device] = _Upload(activation, before[0] if before else None, after)

    # ---------------------------------------------------------------------------------------------
    # contributions
    def sum_of(self, devices: Sequence[int]) -> Tensor:
        """The weighted sum of what these devices contribute at present, added up in order."""
        where = self._start.device
        total = torch.zeros(self.bound.upload.size, dtype=torch.float64, device=where)
        for device in devices:
            factor = self.bound.factor(self.bound.weights[device])
            cloud_step.absorb(total, factor, self._counted(device), None)
        return total

    def last_counted(self, device: int) -> Tensor:
        """What this device contributes at present; an upload that waits is forgotten."""
        found = self._counted(device)
        self.forget_upload(device)
        return found

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted, unless it is this one."""
        upload = self._uploads.get(device)
        if upload is not None and unless != ref("x", device, upload.activation):
            del self._uploads[device]

    def _last(self, device: int) -> Tensor:
        """What it contributes by its own word: also what waits to be counted."""
        waits = self._uploads.get(device)
        return self._counted(device) if waits is None else waits.after

    def _counted(self, device: int) -> Tensor:
        if self._sent_NU is not None:
            return self._sent_NU[device]
        upload = self._uploads.get(device)
        before = None if upload is None else upload.before
        return self.tables["x"][device] if before is None else before

    def start_over(self, device: int, model: Tensor) -> Tensor:
        """Everything that it keeps begins anew, at z = `model`; what it contributes then."""
        first = self.bound.first_upload(model.to(self.storage))
        self._begin(device, first)
        known = self.bound.contributed(device, first)
        if self._sent_NU is not None:
            self._sent_NU[device] = known
        if device in self._accepted:
            self._accepted[device] = first
        return known

    def remember(self, devices: Iterable[int]) -> None:
        """These will be restored: keep what was accepted of them."""
        self._accepted = dict.fromkeys(devices, self.bound.first_upload(self._start))

    def accept(self, device: int) -> None:
        """Its last upload is what it could be restored from."""
        self._accepted[device] = self._latest.pop(device, self._accepted[device])

    def restore(self, device: int) -> None:
        """It has lost its memory: what was sent comes back, the rest starts over."""
        self._begin(device, self._accepted[device])

    def _begin(self, device: int, upload: Tensor) -> None:
        for slot in self.method.slots:
            self.tables[slot.name][device] = self.bound.begun(slot, upload, self._start)

    def _absorb(self, uploads: Sequence[tuple[int, int, int]], into: ServerSums) -> None:
        """Add each server's uploads to its sum, in order of upload."""
        by_server: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for server, device, age in uploads:
            by_server[server].append((device, age))

        def absorb(server: int, uploads: list[tuple[int, int]]) -> None:
            for device, age in uploads:
                self._absorb_one(server, device, age, into)

        for _ in self.workers.map(absorb, by_server, by_server.values()):
            pass  # raises what a worker raised

    def _absorb_one(self, server: int, device: int, age: int, into: ServerSums) -> None:
        upload, weight = self._uploads.pop(device), self.bound.weight_of(device, age)
        before = upload.before if self._sent_NU is None else self._sent_NU[device]
        fused = self.trainer.compiled if upload.after.dtype == torch.float32 else None
        add = cloud_step.absorb if fused is None else fused.chain.absorb
        add(into.total_VU[server], self.bound.factor(weight), upload.after, before)
        if self._sent_NU is not None:
            self._sent_NU[device] = upload.after
        if self.method.counts == "active":
            into.weight_V[server] += weight
            into.count_V[server] += 1

    # ---------------------------------------------------------------------------------------------
    # training
    def _run(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> None:
        """Train these devices, each once; parts share nothing, so workers take them as they
        come.
        """

        def run(part: list[Session], workers: Workers | None = None) -> dict[int, _Upload]:
            return self._run_part(part, self._heard(part, models), workers)

        parts = self.trainer.parts(sessions)
        if self.trainer.works_together:
            found = [run(part, self.workers) for part in parts]
        else:
            found = [*self.workers.map(run, parts)]
        for uploads in found:
            self._uploads |= uploads
            for device, upload in uploads.items():
                if device in self._accepted:
                    self._latest[device] = self.bound.sent_by(device, upload.after).to(self.storage)

    def _run_part(
        self, sessions: list[Session], heard_NF: Tensor | None, workers: Workers | None
    ) -> dict[int, _Upload]:
        rows = torch.tensor([s.device for s in sessions], device=self._start.device)
        run = self._run_in_place if self._in_place(workers) else self._run_copies
        before, after = run(sessions, rows, heard_NF, workers)
        if after is None:
            return {}
        if self.bound.wire is not None:
            assert heard_NF is not None
            after = self._through(self.bound.wire, sessions, after, heard_NF)
        return {
            s.device: _Upload(s.activation, None if before is None else before[k], after[k])
            for k, s in enumerate(sessions)
        }

    def _through(
        self, wire: Wire, sessions: list[Session], after_NU: Tensor, heard_NF: Tensor
    ) -> Tensor:
        """Uploads as contributions. Row by row: they do not depend on who trains together."""
        rows = []
        for s, after, z in zip(sessions, after_NU, heard_NF, strict=True):
            last = None if self._sent_NU is None else self._last(s.device)
            base = self.bound.base(s.device, last, z)
            rows.append(base + wire.message(after, base, self.bound.sender(s.device, s.activation)))
        return torch.stack(rows)

    def _in_place(self, workers: Workers | None) -> bool:
        """Whether compiled code can train in the memory of all models, x and x_prev."""
        x_NF = self.with_nobody.get("x")
        return (
            workers is not None
            and x_NF is not None
            and x_NF.dtype == self.dtype
            and self._slots == {"x", "x_prev"}
            and [*self.bound.upload.places] == ["x"]
        )

    def _run_copies(
        self,
        sessions: list[Session],
        rows: Tensor,
        heard_NF: Tensor | None,
        workers: Workers | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is uploaded, and what it replaces in the sum of a server."""
        tables = {slot.name: self.tables[slot.name] for slot in self.method.slots}
        kept = {name: table.index_select(0, rows) for name, table in tables.items()}
        registers = {name: values.to(self.dtype) for name, values in kept.items()}
        if heard_NF is not None:
            registers |= self.bound.heard.views(heard_NF)
        after = self.trainer.run(sessions, registers, workers)
        for name, table in tables.items():
            after[name] = after[name].to(table.dtype)
            table.index_copy_(0, rows, after[name])
        if sessions[0].offline:
            return None, None
        by_x = self.method.counts == "members" and self.bound.sends_x
        return kept["x"] if by_x else None, self.bound.uploaded(after)

    def _run_in_place(
        self,
        sessions: list[Session],
        rows: Tensor,
        heard_NF: Tensor | None,
        workers: Workers | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same by compiled code, which needs no copies but what is uploaded, and what that
        replaces.
        """
        assert workers is not None
        x_NF, prev_NP = self.with_nobody["x"], self.with_nobody["x_prev"]
        after = None if sessions[0].offline else x_NF.new_empty(len(sessions), x_NF.shape[1])
        by_x = self.method.counts == "members" and self.bound.sends_x
        before = torch.empty_like(after) if after is not None and by_x else None
        models = Models(x_NF, prev_NP, x_NF, prev_NP, rows, before, after)
        self.trainer.run_compiled(sessions, models, heard_NF, workers)
        return before, after

    def _heard(self, sessions: list[Session], models: Mapping[ModelRef, Tensor]) -> Tensor | None:
        """What each session's server sends; where it is the same for all, without copies."""
        if sessions[0].offline:
            return None
        heard = self.bound.heard.size
        handles = [session.model for session in sessions if session.model is not None]
        if len(set(handles)) == 1:
            return models[handles[0]][:heard].expand(len(sessions), -1)
        return torch.stack([models[handle][:heard] for handle in handles])
