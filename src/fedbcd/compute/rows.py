"""Rows of models that are not one tensor in memory: on disk (`store.py`), or on other machines
(`engines/cluster`).

`Rows` speaks the few words of `Tensor` that the numbers of a run need, so that the same code runs
on either.

Shapes: V servers, F values of a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

VALUES_AT_ONCE = 2**22  # values read at a time where all rows are wanted
MODELS_AT_ONCE = 256  # models compared with their servers' at a time


class Rows(ABC):
    """One model per device. `device` is where rows are handed out and taken, wherever they are
    kept.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Copies of some rows."""

    @abstractmethod
    def index_copy_(self, dim: int, index: Tensor, source: Tensor, /) -> object:
        """Replace some rows."""

    def written(self) -> Tensor:
        """Numbers of the rows that a checkpoint must hold; the others are as they were at the
        start.
        """
        return torch.arange(len(self))

    def will_need(self, devices: Iterable[int]) -> None:  # noqa: B027
        """These rows will be read soon."""

    def release(self) -> None:  # noqa: B027
        """No row will be read very soon."""

    def tested(self, devices: Sequence[int]) -> Any:  # noqa: ARG002
        """How good personal models are (`evaluate.Tested` of each device), if they can be tested
        where they are.
        """
        return None

    def total_distance(self, z_VF: Tensor, members: Sequence[tuple[int, int]]) -> float:
        """The sum of ||x_i - z_n|| over (device, server)."""
        total = 0.0
        for k in range(0, len(members), MODELS_AT_ONCE):
            total += total_distance(self, z_VF, members[k : k + MODELS_AT_ONCE])
            self.release()
        return total

    def kept(self) -> "ManyModels":
        """The rows as they are to be after the run."""
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, device: int) -> Tensor:
        return self.index_select(0, torch.tensor([device]))[0]

    def __setitem__(self, device: int, model: Tensor) -> None:
        self.index_copy_(0, torch.tensor([device]), model[None])

    def blocks(self, chosen: Tensor | None = None) -> Iterator[Tensor]:
        """All rows, or those chosen, in order; a few at a time."""
        chosen = torch.arange(len(self)) if chosen is None else chosen
        for part in torch.split(chosen, max(1, VALUES_AT_ONCE // max(1, self.shape[1]))):
            if len(part):
                yield self.index_select(0, part)
                self.release()

    def in_turn(self) -> Iterator[Tensor]:
        """All rows in order, a few at a time, each few valid until the next."""
        return self.blocks()


ManyModels = Tensor | Rows
# name (x, x_prev), number of rows, model -> that number of rows, each a copy of the model
MakeRows = Callable[[str, int, Tensor], Rows]


def total_distance(models: ManyModels, z_VF: Tensor, members: Sequence[tuple[int, int]]) -> float:
    """The sum of ||x_i - z_n|| over a few (device, server)."""
    device, server = (
        torch.tensor(column, device=z_VF.device) for column in zip(*members, strict=True)
    )
    return float(
        (models.index_select(0, device).to(z_VF.dtype) - z_VF[server]).norm(dim=1).double().sum()
    )


def in_turn(models: ManyModels) -> Iterator[Tensor]:
    """All rows in order, a few at a time where they are not in memory, each few valid until the
    next.
    """
    return models.in_turn() if isinstance(models, Rows) else iter((models,))


class SomeRows:
    """Some of the rows, to be written to a file a few at a time."""

    def __init__(self, rows: Rows, chosen: Tensor) -> None:
        self._rows, self._chosen = rows, chosen
        self.dtype = rows.dtype
        self.shape = (len(chosen), rows.shape[1])

    def blocks(self) -> Iterator[Tensor]:
        """In order."""
        return self._rows.blocks(self._chosen)


def state_of_tables(tables: Mapping[str, ManyModels]) -> dict[str, Tensor | SomeRows]:
    """Rows for a checkpoint: all of them, or those that are no longer as at the start, with their
    numbers.
    """
    state: dict[str, Tensor | SomeRows] = {}
    for name, table in tables.items():
        if isinstance(table, Rows):
            written = table.written()
            state |= {f"{name}:rows": written, name: SomeRows(table, written)}
        else:
            state[name] = table
    return state


def load_tables(tables: Mapping[str, ManyModels], state: Mapping[str, Tensor]) -> None:
    """The inverse."""
    for name, table in tables.items():
        rows = state.get(f"{name}:rows", torch.arange(len(table)))
        table.index_copy_(0, rows.to(table.device), state[name].to(table.device))
