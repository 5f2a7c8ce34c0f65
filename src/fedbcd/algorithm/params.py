"""Module state <-> flat vector. The first P entries are parameters, the rest are floating-point
buffers (F = P + buffers).

Buffers such as batch-norm running statistics travel with the model and are averaged like
parameters, but never stepped, penalised or projected. Frozen parameters (`requires_grad=False`) are
not trained and stay in the module. Integer buffers (batch-norm's `num_batches_tracked`) are
counters, not model: they stay as the module had them.

Shapes: P parameters, F values of a model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.errors import DataError


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor of the module and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """Where each tensor of a module lives in its flat vector."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: tuple[Span, ...] = tuple(
            _spans(((n, p.shape) for n, p in module.named_parameters() if p.requires_grad), 0)
        )
        self.size_P = self.parameters[-1].stop if self.parameters else 0
        if self.size_P == 0:
            raise DataError(
                f"{type(module).__name__} has no parameters to train; give it some, or let them"
                " require gradients"
            )
        floating = ((n, b.shape) for n, b in module.named_buffers() if b.is_floating_point())
        self.buffers: tuple[Span, ...] = tuple(_spans(floating, self.size_P))
        self.size_F = self.buffers[-1].stop if self.buffers else self.size_P
        self.counters: dict[str, Tensor] = {
            n: b.detach().clone() for n, b in module.named_buffers() if not b.is_floating_point()
        }

    def flatten(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """The module's parameters and floating-point buffers as one vector (F,)."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        parts = [
            tensors[slot.name].detach().reshape(-1).to(dtype)
            for slot in (*self.parameters, *self.buffers)
        ]
        return torch.cat(parts)

    def parameters_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of the parameters of one model (P,) or a stack (N, P)."""
        pieces = torch.split_with_sizes(flat, [s.stop - s.start for s in self.parameters], dim=-1)
        return {
            s.name: piece.reshape((*flat.shape[:-1], *s.shape))
            for s, piece in zip(self.parameters, pieces, strict=True)
        }

    def buffers_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Named copies of the buffers of one model or a stack; `flat` holds the buffers only."""
        p = self.size_P
        return {
            s.name: (
                flat[..., s.start - p : s.stop - p].reshape((*flat.shape[:-1], *s.shape)).clone()
            )
            for s in self.buffers
        }

    def join(self, tensors: dict[str, Tensor], slots: tuple[Span, ...], like: Tensor) -> Tensor:
        """The inverse of the views: a dictionary of (stacked) tensors as flat vectors."""
        lead = like.shape[:-1]
        if not slots:
            return like.new_empty((*lead, 0))
        return torch.cat([tensors[s.name].reshape(*lead, -1) for s in slots], dim=-1)

    def load(self, module: nn.Module, flat: Tensor) -> nn.Module:
        """Write a flat vector (F,) into `module` and return it."""
        if flat.shape != (self.size_F,):
            raise DataError(
                f"a model of {tuple(flat.shape)} values does not fit a module of {self.size_F}"
            )
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for slot in (*self.parameters, *self.buffers):
                tensors[slot.name].copy_(flat[slot.start : slot.stop].reshape(slot.shape))
        return module


def names_in(module: nn.Module) -> dict[str, Any]:
    """By which a flat vector can be taken apart again without the module: names and shapes of its
    tensors, counters with their values, and names of frozen parameters, whose values are not in it.
    """
    layout, kept = Layout(module), module.state_dict()
    spans = (*layout.parameters, *layout.buffers)
    return {
        "tensors": [[span.name, list(span.shape)] for span in spans],
        "counters": {n: c.tolist() for n, c in layout.counters.items() if n in kept},
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
    }


def taken_apart(flat: Tensor, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a flat vector, by names."""
    spans = [*_spans(((name, torch.Size(shape)) for name, shape in names["tensors"]), 0)]
    found = {s.name: flat[s.start : s.stop].reshape(s.shape).contiguous() for s in spans}
    counters = {name: torch.tensor(value) for name, value in names["counters"].items()}
    return found | counters


def _spans(named_shapes: Iterator[tuple[str, torch.Size]], start: int) -> Iterator[Span]:
    for name, shape in named_shapes:
        stop = start + math.prod(shape)
        yield Span(name, tuple(shape), start, stop)
        start = stop
