"""Personal models of a population larger than memory: memory-mapped shards on disk, of which only
active rows are resident.

A row that nobody has written is x(0), and takes no room: shards are sparse files. They are scratch
space without a name, which the system frees when the run ends, however it ends; what lasts is the
checkpoint. Who works next is known ahead (time does not depend on numbers), so the rows of the next
round are read from disk while the present one is computed.

Shapes: V servers, N devices, F values of a model.
"""

import mmap
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedbcd.compute.rows import MODELS_AT_ONCE, VALUES_AT_ONCE, MakeRows, Rows
from fedbcd.errors import RecordError
from fedbcd.protocol.clouds import Cloud
from fedbcd.schedule.arrays import Outline, why_not_ahead
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.schedule.work import Reader

SHARD_BYTES = 2**28  # bytes of one file, about


class StoredRows(Rows):
    """Rows in memory-mapped files in `folder`; all begin like `start`, in its dtype."""

    def __init__(self, folder: Path, rows: int, start: Tensor, shard: int = SHARD_BYTES) -> None:
        self.shape = (rows, len(start))
        self.dtype, self.device = start.dtype, start.device
        self._start = start.cpu()
        self._row_bytes = len(start) * start.dtype.itemsize
        self._per_shard = max(1, shard // self._row_bytes)
        self._is_written = torch.zeros(rows, dtype=torch.bool)
        sizes = [min(self._per_shard, rows - first) for first in range(0, rows, self._per_shard)]
        self._maps = [_mapped(folder, size * self._row_bytes) for size in sizes]
        self._shards = [
            torch.frombuffer(m, dtype=start.dtype).view(-1, len(start)) for m in self._maps
        ]
        self._resident: set[int] = (
            set()
        )  # shards that have been read or written since the last release

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Copies of some rows."""
        assert dim == 0
        index = index.cpu()
        found = self._start.repeat(len(index), 1)
        for shard, there, here in self._places(index, self._is_written[index]):
            found[there] = shard.index_select(0, here)
        return found.to(self.device)

    def index_copy_(self, dim: int, index: Tensor, source: Tensor, /) -> None:
        """Replace some rows."""
        assert dim == 0
        index, source = index.cpu(), source.to("cpu", self.dtype)
        for shard, there, here in self._places(index, torch.ones(len(index), dtype=torch.bool)):
            shard.index_copy_(0, here, source[there])
        self._is_written[index] = True

    def _places(self, index: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(shard, places among those asked for, rows in the shard) of the wanted ones."""
        shard_of = torch.where(wanted, index // self._per_shard, -1)
        for number in sorted(set(shard_of.tolist())):
            if number >= 0:
                self._resident.add(number)
                there = (shard_of == number).nonzero()[:, 0]
                yield self._shards[number], there, index[there] - number * self._per_shard

    def written(self) -> Tensor:
        """Rows that are no longer x(0)."""
        return self._is_written.nonzero()[:, 0]

    def will_need(self, devices: Iterable[int]) -> None:
        """Have the system read these rows from disk, without waiting for it."""
        for device in devices:
            if self._is_written[device]:
                shard, row = divmod(device, self._per_shard)
                first = row * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
                self._maps[shard].madvise(
                    mmap.MADV_WILLNEED, first, (row + 1) * self._row_bytes - first
                )

    def release(self) -> None:
        """Give back the memory of all rows; the system writes them out in its own time."""
        for number in self._resident:
            self._maps[number].madvise(mmap.MADV_DONTNEED)
        self._resident.clear()

    def in_turn(self) -> Iterator[Tensor]:
        """All rows in order; in one piece of memory, which is x(0) but for the rows that were
        written.
        """
        size = max(1, VALUES_AT_ONCE // max(1, self.shape[1]))
        buffer = self._start.repeat(min(size, len(self)), 1)
        for first in range(0, len(self), size):
            written = self._is_written[first : first + size].nonzero()[:, 0]
            buffer[written] = self.index_select(0, written + first).cpu()
            yield buffer[: len(self) - first]
            buffer[written] = self._start
            self.release()

    def total_distance(self, z_VF: Tensor, members: Sequence[tuple[int, int]]) -> float:
        """As for any rows, to the bit; but what is x(0) still is compared once for each server."""
        device_N, server_N = torch.tensor(members).T
        start_VF = self._start.to(z_VF).expand(max(2, len(z_VF)), -1)
        norm_N = (start_VF - z_VF[torch.arange(len(start_VF)) % len(z_VF)]).norm(dim=1)[server_N]
        written = self._is_written[device_N].nonzero()[:, 0]
        for part in torch.split(written, MODELS_AT_ONCE):
            pair = part.repeat(2)[
                : max(2, len(part))
            ]  # one row alone would be summed up in another order
            rows = self.index_select(0, device_N[pair]).to(z_VF.dtype)
            norm_N[pair] = (rows - z_VF[server_N[pair]]).norm(dim=1)
            self.release()
        return sum(float(part.double().sum()) for part in torch.split(norm_N, MODELS_AT_ONCE))


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """A sparse file without a name, as memory."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            shared = mmap.mmap(
                file.fileno(), size
            )  # what does not fit into memory goes to the file
            shared.madvise(
                mmap.MADV_RANDOM
            )  # who touches a row wants that row, not megabytes around it
            return shared
    except OSError as error:
        raise RecordError(
            f"cannot keep {size} bytes of models in {folder}: {error.strerror}; choose another"
            " folder for `state`"
        ) from None


def stored_in(folder: Path) -> MakeRows:
    """Makes rows that are kept in this folder."""
    return lambda _, rows, start: StoredRows(folder, rows, start)


def devices_of_rounds(
    servers: Sequence[Sequence[int]],
    machines: Callable[[], Machines],
    schedule: Schedule,
    cloud: Cloud,
) -> Iterator[Collection[int]]:
    """Whose models each round reads, from the first on: as arrays where that can be, else by a
    second event loop.
    """
    if why_not_ahead(servers, schedule, cloud) is None:
        outline = Outline(servers, schedule, cloud)
        while True:
            planned = outline.next_round()
            offline = () if planned.offline is None else planned.offline.device.tolist()
            yield {*planned.jobs.device.tolist(), *offline}
    reader = Reader(cloud, len(servers))
    yield from (round_.devices for round_ in Simulation(Driver(machines(), reader), schedule))
