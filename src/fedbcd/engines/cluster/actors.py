"""A shard: some devices' models and data, their training, and their part of the servers' sums. Ray
makes an actor of it.

A shard computes with the same `StackedNumbers` as the simulation, on its own rows; what is asked of
it comes as arrays.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.compute.batch import Job
from fedbcd.compute.evaluate import Evaluator
from fedbcd.compute.rows import MakeRows, Rows
from fedbcd.compute.store import stored_in
from fedbcd.data.federation import Federation
from fedbcd.data.samples import Samples
from fedbcd.engines.cluster.options import import_ray
from fedbcd.engines.settings import Settings, products_in, torch_device

Array = np.ndarray[Any, Any]
MODELS = ("x", "x_prev")


class OwnRows(Rows):
    """The rows of some devices, in memory, under the devices' own numbers."""

    def __init__(self, devices: Sequence[int], rows: int, start: Tensor) -> None:
        self.shape = (rows, len(start))
        self.dtype, self.device = start.dtype, start.device
        self._place = torch.full((rows,), -1, device=start.device)
        self._place[torch.tensor(devices, device=start.device)] = torch.arange(
            len(devices), device=start.device
        )
        self._rows = start.repeat(len(devices), 1)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Copies of some rows."""
        return self._rows.index_select(dim, self._place[index.to(self.device)])

    def index_copy_(self, dim: int, index: Tensor, source: Tensor, /) -> None:
        """Replace some rows."""
        self._rows.index_copy_(
            dim, self._place[index.to(self.device)], source.to(self.device, self.dtype)
        )


@dataclass(frozen=True)
class Done:
    """What a shard answers to a batch of work: its servers, what to add to their sums and weights,
    and how long it took.
    """

    servers: list[int]
    sums: Array  # (servers, F), float64
    weights: list[float]
    seconds: float


def part_of(federation: Federation, devices: Sequence[int]) -> Federation:
    """The federation as one shard needs it: all devices' numbers, but only its own devices'
    data.
    """
    owned = torch.cat([federation.owned(device) for device in devices])
    kept, positions = torch.unique(owned, return_inverse=True)
    part = copy.copy(federation)
    part.pool = Samples(federation.pool.inputs[kept], federation.pool.targets[kept])
    part.positions = torch.cat(
        [positions, positions[:1]]
    )  # one more: a trial gradient takes two samples
    sizes = torch.tensor([federation.sizes[device] for device in devices])
    part.starts = torch.zeros_like(federation.starts)
    part.starts[torch.tensor(devices)] = sizes.cumsum(0) - sizes
    return part


def packed(tensor: Tensor) -> tuple[Array, str]:
    """A tensor as bytes that Ray can share without copies, and its dtype."""
    flat = tensor.detach().cpu().contiguous()
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch.")


def unpacked(data: tuple[Array, str]) -> Tensor:
    """The inverse; a copy, since what Ray shares must not be written."""
    return torch.from_numpy(data[0].copy()).view(getattr(torch, data[1]))


class Shard:
    """The devices of one actor."""

    def hold(
        self,
        part: Federation,
        settings: Settings,
        devices: Sequence[int],
        where: str,
        state: str | None,
    ) -> None:
        """Begin: all models of these devices at x(0)."""
        torch.set_num_threads(1)
        keep_freed_memory()  # this process does nothing else

        def own_rows(_: str, rows: int, start: Tensor) -> Rows:
            return OwnRows(devices, rows, start)

        make_rows: MakeRows = own_rows if state is None else stored_in(Path(state))
        self._precision = settings.precision
        device = torch_device(
            where
        )  # of a GPU: the first of those that Ray has set aside for this actor
        self._numbers = settings.numbers(part, device, make_rows)
        self._numbers.trainer.check_vectorised(self._numbers.global_NF()[0])
        self._evaluator = Evaluator(
            part, self._numbers.trainer.objective, device, measure=settings.measure
        )
        self._models = dict(zip(MODELS, (self._numbers.x_NF, self._numbers.prev_NP), strict=True))

    def node(self) -> str:
        """The node that this actor is on."""
        return str(import_ray().get_runtime_context().get_node_id())

    def work(
        self, jobs_N6: Array, uploads_N2: Array, handles: list[str], *models: tuple[Array, str]
    ) -> Done:
        """Train, and sum up what is uploaded, (server, device) in order.

        A job: device, session, steps, number of its model or -1, offline, activation.
        """
        began = time.perf_counter()
        absorbing = [(server, device) for server, device in uploads_N2.tolist()]
        numbers = self._numbers
        where = numbers.total_VF.device
        numbers.models = {
            handle: unpacked(model).to(where) for handle, model in zip(handles, models, strict=True)
        }
        servers = sorted({server for server, _ in absorbing})
        numbers.clear_sums(servers)
        with products_in(self._precision):
            numbers.compute([_job(row, handles) for row in jobs_N6.tolist()], absorbing)
        sums = (
            numbers.total_VF[torch.tensor(servers, dtype=torch.int64, device=where)].cpu().numpy()
        )
        return Done(
            servers, sums, [numbers.weight_V[n] for n in servers], time.perf_counter() - began
        )

    def rows(self, which: str, devices: list[int]) -> tuple[Array, str]:
        """Models of some devices."""
        return packed(self._rows(which).index_select(0, torch.tensor(devices)))

    def set_rows(self, which: str, devices: list[int], models: tuple[Array, str]) -> None:
        """Replace models of some devices."""
        self._rows(which).index_copy_(0, torch.tensor(devices), unpacked(models))

    def last_counted(self, device: int) -> tuple[Array, str]:
        """What this device contributes to its server's sum at present; an upload that waits is
        forgotten.
        """
        return packed(self._numbers.last_counted(device))

    def sum_counted(self, devices: list[int]) -> tuple[Array, str]:
        """The weighted sum of what these devices contribute at present."""
        return packed(self._numbers.sum_counted(devices))

    def forget_upload(self, device: int) -> None:
        """An upload that waits will not be counted."""
        self._numbers.forget_upload(device)

    def scores(self, devices: list[int]) -> list[float]:
        """Test personal models on their own labels."""
        rows = self._rows("x")
        found: list[float] = []
        for block in rows.blocks(torch.tensor(devices)):
            part = devices[len(found) : len(found) + len(block)]
            models = dict(zip(part, block.to(self._numbers.dtype), strict=True))
            found += self._evaluator.personal_scores(models, self._numbers.workers).values()
        return found

    def distance(self, members: list[tuple[int, int]], z_VF: Array, dtype: str) -> float:
        """The sum of ||x_i - z_n|| over (device, server)."""
        return self._rows("x").total_distance(
            unpacked((z_VF, dtype)).to(self._numbers.total_VF.device), members
        )

    def will_need(self, devices: list[int]) -> None:
        """These devices work next."""
        self._numbers.will_need(devices)

    def _rows(self, which: str) -> Rows:
        rows = self._models[which]
        assert isinstance(rows, Rows)
        return rows


def _job(row: list[int], handles: list[str]) -> Job:
    device, session, steps, model, offline, activation = row
    return Job(
        device, session, steps, None if model < 0 else handles[model], bool(offline), activation
    )
