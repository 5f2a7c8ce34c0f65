"""A shard: some devices' models and data, their training, and their part of the servers' sums. Ray
makes an actor of it.

A shard computes with the same `StackedDevices` as the simulation, on its own rows; what is asked of
it comes as arrays.

Shapes: V servers, F values of a model, U values of an upload.
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
from fedbcd.compute.contributions import ServerSums
from fedbcd.compute.evaluate import Evaluator, Tested
from fedbcd.compute.rows import MakeRows, Rows
from fedbcd.compute.store import stored_in
from fedbcd.data.federation import Federation
from fedbcd.data.measure import measure_for
from fedbcd.engines.cluster.options import import_ray
from fedbcd.engines.setup import find_torch_device, make_devices, make_trainer, products_in
from fedbcd.schedule.work import Count, Session, Sessions
from fedbcd.spec import RunSpec

Array = np.ndarray[Any, Any]


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
        return self._rows.index_select(dim, self._place[index.to(self.device)])

    def index_copy_(self, dim: int, index: Tensor, source: Tensor, /) -> None:
        self._rows.index_copy_(
            dim, self._place[index.to(self.device)], source.to(self.device, self.dtype)
        )


@dataclass(frozen=True)
class Done:
    """What a shard answers to a batch of work: its servers, what to add to their sums, weights and
    counts, and how long it took.
    """

    servers: list[int]
    sums: Array  # (servers, U), float64
    weights: list[float]
    counts: list[int]
    seconds: float


def part_of(federation: Federation, devices: Sequence[int]) -> Federation:
    """The federation as one shard needs it: all devices' numbers, but only its own devices'
    data.
    """
    owned = torch.cat([federation.owned(device) for device in devices])
    kept, positions = torch.unique(owned, return_inverse=True)
    part = copy.copy(federation)
    part.pool = federation.pool.only(kept)
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
        spec: RunSpec,
        devices: Sequence[int],
        where: str,
        state: str | None,
    ) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # this process does nothing else

        def own_rows(_: str, rows: int, start: Tensor) -> Rows:
            return OwnRows(devices, rows, start)

        make_rows: MakeRows = own_rows if state is None else stored_in(Path(state))
        self._precision = spec.precision
        device = find_torch_device(
            where
        )  # of a GPU: the first of those that Ray has set aside for this actor
        trainer, start = make_trainer(spec, part, device)
        trainer.check_vectorised(start)
        self._devices = make_devices(spec, part, trainer, start, make_rows)
        self._sums = ServerSums.of(len(part.servers), trainer.bound.upload.size, device)
        measure = measure_for(part, spec.measure)
        self._evaluator = Evaluator(part, trainer.objective, device, measure=measure)

    def node(self) -> str:
        return str(import_ray().get_runtime_context().get_node_id())

    def work(
        self, sessions_N6: Array, uploads_N3: Array, handles: list[str], *models: tuple[Array, str]
    ) -> Done:
        """Train, and sum up what is uploaded, (server, device, age) in order.

        A session: number of the batch it is in, device, session, steps, number of its model or -1,
        activation or -1.
        """
        began = time.perf_counter()
        total_VU = self._sums.total_VU
        received = {
            handle: unpacked(model).to(total_VU.device)
            for handle, model in zip(handles, models, strict=True)
        }
        count = Count(tuple((server, device, age) for server, device, age in uploads_N3.tolist()))
        servers = sorted({server for server, _, _ in count.uploads})
        self._sums.clear(servers)
        with products_in(self._precision):
            self._devices.advance([*_batches(sessions_N6, handles), count], received, self._sums)
        chosen = torch.tensor(servers, dtype=torch.int64, device=total_VU.device)
        return Done(
            servers,
            total_VU[chosen].cpu().numpy(),
            [self._sums.weight_V[n] for n in servers],
            [self._sums.count_V[n] for n in servers],
            time.perf_counter() - began,
        )

    def waiting(self) -> dict[str, tuple[Array, str]]:
        """Uploads that are not counted yet, by name in a checkpoint."""
        waiting = self._devices.contributions.state()
        return {name: packed(upload) for name, upload in waiting.items()}

    def wait(self, uploads: dict[str, tuple[Array, str]]) -> None:
        """The inverse."""
        found = {name: unpacked(upload) for name, upload in uploads.items()}
        self._devices.contributions.load_state(found)

    def rows(self, which: str, devices: list[int]) -> tuple[Array, str]:
        return packed(self._rows(which).index_select(0, torch.tensor(devices)))

    def set_rows(self, which: str, devices: list[int], models: tuple[Array, str]) -> None:
        self._rows(which).index_copy_(0, torch.tensor(devices), unpacked(models))

    def last_counted(self, device: int) -> tuple[Array, str]:
        """What this device contributes to its server's sum at present; an upload that waits is
        forgotten.
        """
        return packed(self._devices.contributions.last_counted(device))

    def sum_of(self, devices: list[int]) -> tuple[Array, str]:
        return packed(self._devices.contributions.sum_of(devices))

    def forget_upload(self, device: int) -> None:
        self._devices.contributions.forget_upload(device)

    def start_over(self, device: int, model: tuple[Array, str]) -> tuple[Array, str]:
        """Everything that this device keeps begins anew at this model; what it contributes then."""
        return packed(self._devices.contributions.start_over(device, unpacked(model)))

    def tested(self, which: str, devices: list[int]) -> list[Tested]:
        rows = self._rows(which)
        found: list[Tested] = []
        for block in rows.blocks(torch.tensor(devices)):
            part = devices[len(found) : len(found) + len(block)]
            models = dict(zip(part, block.to(self._devices.dtype), strict=True))
            found += self._evaluator.personal_scores(models, self._devices.workers).values()
        return found

    def distance(
        self, which: str, members: list[tuple[int, int]], z_VF: Array, dtype: str
    ) -> float:
        """The sum of ||x_i - z_n|| over (device, server)."""
        z_VF_ = unpacked((z_VF, dtype)).to(self._sums.total_VU.device)
        return self._rows(which).total_distance(z_VF_, members)

    def will_need(self, devices: list[int]) -> None:
        self._devices.will_need(devices)

    def _rows(self, which: str) -> Rows:
        rows = self._devices.tables[which]
        assert isinstance(rows, Rows)
        return rows


def _batches(sessions_N6: Array, handles: list[str]) -> list[Sessions]:
    """The batches that the rows are of, in order."""
    batches: dict[int, list[Session]] = {}
    for batch, device, session, steps, model, activation in sessions_N6.tolist():
        toward = None if model < 0 else handles[model]
        row = Session(device, session, steps, toward, activation < 0, activation)
        batches.setdefault(batch, []).append(row)
    return [Sessions(tuple(rows)) for rows in batches.values()]
