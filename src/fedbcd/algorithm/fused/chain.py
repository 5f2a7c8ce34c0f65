"""Whether a module with its loss is a chain: linear layers, some followed by ReLU, then the mean
cross-entropy.

What counts is what it computes, not how it is written: it is traced to torch's basic operations,
and these are read in order.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fedbcd.algorithm.params import Slot

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
    loss: LossOf, slots: tuple[Slot, ...], flat: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[LinearLayer, ...] | None:
    """The layers from inputs to outputs, if that is what `loss` computes with all of its
    parameters, each used once; otherwise None.

    flat, inputs, targets: an example, of two samples or more.
    """
    parameters = tuple(flat[slot.start : slot.stop].reshape(slot.shape) for slot in slots)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            graph = make_fx(loss)(parameters, inputs, targets).graph
    except Exception:  # noqa: BLE001 - whatever a user's module does to a tracer, it still works without
        return None
    graph.eliminate_dead_code()
    return _Reader(graph, slots, len(inputs)).layers()


class _Reader:
    """Follows the samples from operation to operation."""

    def __init__(self, graph: Graph, slots: tuple[Slot, ...], samples: int) -> None:
        *parameters, inputs, targets = (node for node in graph.nodes if node.op == "placeholder")
        self._slot_of: dict[Any, Slot] = dict(zip(parameters, slots, strict=True))
        self._operations = [
            node
            for node in graph.nodes
            if node.op != "placeholder" and not self._is_transposed(node)
        ]
        self._targets = targets
        self._at: Node = inputs
        self._samples = samples
        self._layers: list[LinearLayer] = []
        self._used: list[Slot] = []

    def layers(self) -> tuple[LinearLayer, ...] | None:
        *operations, end = self._operations
        for node in operations:
            if node.kwargs or not self._continues(node):
                return None
            self._at = node
        complete = self._at.target is operator.getitem and end.args in ((self._at,), ([self._at],))
        every_parameter_once = sorted(self._used, key=lambda slot: slot.start) == [
            *self._slot_of.values()
        ]
        return tuple(self._layers) if complete and every_parameter_once else None

    def _continues(self, node: Node) -> bool:
        """Whether this operation takes what the last one gave, and is the next of a chain."""
        if node.target is _aten.addmm.default:
            return self._linear(node.args[0], node.args[1:])
        if node.target is _aten.mm.default:
            return self._linear(None, node.args)
        if not node.args or node.args[0] is not self._at:
            return False
        rest = node.args[1:]
        if self._at.target is _aten._log_softmax.default:
            return node.target is _aten.nll_loss_forward.default and rest == (
                self._targets,
                None,
                _MEAN,
                _IGNORED,
            )
        if self._at.target is _aten.nll_loss_forward.default:
            return node.target is operator.getitem and rest == (0,)
        if node.target is _aten.relu.default:
            return self._relu()
        if node.target is _aten._log_softmax.default:
            return (
                self._is_of_last_layer()
                and not self._layers[-1].relu
                and rest in ((1, False), (-1, False))
            )
        return node.target in _SAME_VALUES and _size(node)[:1] == (self._samples,)

    def _is_transposed(self, node: Node) -> bool:
        spelled = (node.target, *map(repr, node.args[1:]))  # x.t(), x.T or x.transpose(0, 1)
        return (
            spelled in _TRANSPOSES
            and node.args[0] in self._slot_of
            and len(self._slot_of[node.args[0]].shape) == 2
        )

    def _is_of_last_layer(self) -> bool:
        return bool(self._layers) and _size(self._at) == (self._samples, self._layers[-1].outputs)

    def _linear(self, bias: Any, factors: tuple[Any, ...]) -> bool:
        if len(factors) != 2 or factors[0] is not self._at or not self._is_transposed(factors[1]):
            return False
        weight = self._slot_of[factors[1].args[0]]
        outputs, inputs = weight.shape
        if _size(self._at) != (self._samples, inputs) or (
            bias is not None and self._slot_of.get(bias) is None
        ):
            return False
        if bias is not None and self._slot_of[bias].shape != (outputs,):
            return False
        self._used += [weight] if bias is None else [weight, self._slot_of[bias]]
        self._layers.append(
            LinearLayer(
                inputs,
                outputs,
                weight.start,
                -1 if bias is None else self._slot_of[bias].start,
                relu=False,
            )
        )
        return True

    def _relu(self) -> bool:
        if not self._is_of_last_layer():
            return False
        self._layers[-1] = self._layers[-1]._replace(relu=True)
        return True


def _size(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
