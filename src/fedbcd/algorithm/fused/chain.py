"""Whether a module with its loss is a chain: linear layers, some followed by ReLU, then the mean
cross-entropy.

What counts is what it computes, not how it is written: torch's basic operations are taken down as
they are done, and read in order. By a mode of our own, as torch's tracers load half of torch: a
second, which is most of the time to the first round of a small job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedbcd.algorithm.params import Span

_aten = torch.ops.aten
_SAME_VALUES = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
)
_TRANSPOSES = (
    (_aten.t.default,),
    (_aten.permute.default, "[1, 0]"),
    (_aten.transpose.int, "0", "1"),
    (_aten.transpose.int, "1", "0"),
)
_MEAN, _IGNORED = (
    1,
    -100,
)  # how cross_entropy reduces, and the target that it leaves out, unless asked otherwise

LossOf = Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]  # (parameters, inputs, targets)


class LinearLayer(NamedTuple):
    """One layer; `weight` and `bias` are where they begin in the flat parameters, -1 where there is
    no bias.
    """

    inputs: int
    outputs: int
    weight: int
    bias: int
    relu: bool


def chain_of(
    loss: LossOf, slots: tuple[Span, ...], flat: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[LinearLayer, ...] | None:
    """The layers from inputs to outputs, if that is what `loss` computes with all of its
    parameters, each used once; otherwise None.

    flat, inputs, targets: an example, of two samples or more.
    """
    parameters = tuple(flat[slot.start : slot.stop].reshape(slot.shape) for slot in slots)
    taken = _Operations()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), taken:
            result = loss(parameters, inputs, targets)
    except Exception:  # noqa: BLE001 - whatever a user's module does to a tracer, it still works without
        return None
    if taken.unfaithful:
        return None
    return _OperationReader(taken.needed_for(result), slots, parameters, inputs, targets).layers(
        result
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """One of torch's basic operations. All tensors are kept, so that each is known by itself."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]

    @property
    def result(self) -> Tensor:
        """The first result, which is the only one of all but the loss."""
        return self.results[0]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down what is done. `unfaithful`: something was written into, drawn or read as a number,
    so that the operations do not say all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unfaithful = False
        self._done: list[_Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles this; torch, which asks, would load its compiler to leave it out."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do one operation."""
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple) else (found,)
        tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)
        self.unfaithful |= func._schema.is_mutable or any(tag in func.tags for tag in tags)
        self.unfaithful |= not all(isinstance(result, Tensor) for result in results)
        self._done.append(_Operation(func, args, kwargs or {}, results))
        return found

    def needed_for(self, result: Tensor) -> list[_Operation]:
        """Those without which it could not be, in order."""
        needed, chosen = {id(result)}, []
        for operation in reversed(self._done):
            if any(id(made) in needed for made in operation.results):
                chosen.append(operation)
                needed |= {id(each) for each in tree_leaves((operation.args, operation.kwargs))}
        return chosen[::-1]


class _OperationReader:
    """Follows the samples from operation to operation."""

    def __init__(
        self,
        operations: list[_Operation],
        slots: tuple[Span, ...],
        parameters: tuple[Tensor, ...],
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        self._slot_of = {id(tensor): slot for tensor, slot in zip(parameters, slots, strict=True)}
        self._transposed = {
            id(operation.result): slot
            for operation in operations
            if (slot := self._slot_transposed(operation)) is not None
        }
        self._operations = [
            operation for operation in operations if id(operation.result) not in self._transposed
        ]
        self._targets = targets
        self._at = inputs
        self._by: Any = None  # the operation that gave it
        self._samples = len(inputs)
        self._layers: list[LinearLayer] = []
        self._used: list[Span] = []

    def layers(self, result: Tensor) -> tuple[LinearLayer, ...] | None:
        """The layers, if these operations give the result by a chain of them."""
        for operation in self._operations:
            if operation.kwargs or not self._continues(operation):
                return None
            self._at, self._by = operation.result, operation.target
        complete = self._by is _aten.nll_loss_forward.default and result is self._at
        every_parameter_once = sorted(self._used, key=lambda slot: slot.start) == [
            *self._slot_of.values()
        ]
        return tuple(self._layers) if complete and every_parameter_once else None

    def _continues(self, operation: _Operation) -> bool:
        """Whether this operation takes what the last one gave, and is the next of a chain."""
        target = operation.target
        if target is _aten.addmm.default:
            return self._linear(operation.args[0], operation.args[1:])
        if target is _aten.mm.default:
            return self._linear(None, operation.args)
        if not operation.args or operation.args[0] is not self._at:
            return False
        rest = operation.args[1:]
        if self._by is _aten._log_softmax.default:
            return (
                target is _aten.nll_loss_forward.default
                and rest[0] is self._targets
                and rest[1:] == (None, _MEAN, _IGNORED)
            )
        if target is _aten.relu.default:
            return self._relu()
        if target is _aten._log_softmax.default:
            return (
                self._is_of_last_layer()
                and not self._layers[-1].relu
                and rest in ((1, False), (-1, False))
            )
        return target in _SAME_VALUES and operation.result.shape[:1] == (self._samples,)

    def _slot_transposed(self, operation: _Operation) -> Span | None:
        spelled = (
            operation.target,
            *map(repr, operation.args[1:]),
        )  # x.t(), x.T, x.transpose(0, 1)
        slot = self._slot_of.get(id(operation.args[0])) if spelled in _TRANSPOSES else None
        return slot if slot is not None and len(slot.shape) == 2 else None

    def _is_of_last_layer(self) -> bool:
        expected = (self._samples, self._layers[-1].outputs) if self._layers else None
        return self._at.shape == expected

    def _linear(self, bias: Tensor | None, factors: tuple[Any, ...]) -> bool:
        if (
            len(factors) != 2
            or factors[0] is not self._at
            or id(factors[1]) not in self._transposed
        ):
            return False
        weight = self._transposed[id(factors[1])]
        outputs, inputs = weight.shape
        if self._at.shape != (self._samples, inputs):
            return False
        added = None if bias is None else self._slot_of.get(id(bias))
        if bias is not None and (added is None or added.shape != (outputs,)):
            return False
        self._used += [weight] if added is None else [weight, added]
        start = -1 if added is None else added.start
        self._layers.append(LinearLayer(inputs, outputs, weight.start, start, relu=False))
        return True

    def _relu(self) -> bool:
        if not self._is_of_last_layer():
            return False
        self._layers[-1] = self._layers[-1]._replace(relu=True)
        return True
