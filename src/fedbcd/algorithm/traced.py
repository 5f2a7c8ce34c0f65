"""A function of tensors as the list of operations that it comes down to: the same numbers without the layers of `vmap` and autograd.

For small models these layers cost more than the arithmetic. A trace holds for one set of shapes; it has no state, so threads can share it.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default)
_SHORT: dict[Any, Any] = {  # the same operations by torch's own entry points, at half the cost of a call
    _aten.add.Tensor: torch.add,
    _aten.bmm.default: torch.bmm,
    _aten.div.Tensor: torch.div,
    _aten.expand.default: Tensor.expand,
    _aten.mul.Tensor: torch.mul,
    _aten.ne.Scalar: torch.ne,
    _aten.neg.default: torch.neg,
    _aten.relu.default: torch.relu,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: Tensor.view,
    _aten._unsafe_view.default: Tensor.view,
    _aten.where.self: torch.where,
}

Operations = Callable[..., Sequence[Tensor]]
_one_at_a_time = Lock()  # a tracer puts hooks into torch for a moment, and takes them out again


def trace(function: Callable[..., Sequence[Tensor]], example: tuple[Tensor, ...]) -> Operations:
    """The operations that `function` does on tensors like those of `example`. Raises where it cannot be traced faithfully."""
    with _one_at_a_time, torch.no_grad():
        module = make_fx(lambda *tensors: functionalize(function)(*tensors))(*example)
    _simplify(module)
    operations: Operations = module.forward
    return operations


def _simplify(module: GraphModule) -> None:
    """Take out what repeats or does nothing (half of what `vmap` leaves), make constants once, and call the rest the short way."""
    known: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        same = _does_nothing(node) or known.setdefault(_what(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
    module.graph.eliminate_dead_code()
    for k, node in enumerate(module.graph.nodes):
        if node.op == "call_function":
            if not node.all_input_nodes:
                _make_once(module, node, f"constant_{k}")
            else:
                node.target = _SHORT.get(node.target, node.target)
    module.graph.eliminate_dead_code()
    module.recompile()


def _what(node: Node) -> Any:
    """Equal for operations that give equal results: no operation of a functional graph changes anything."""
    return repr((str(node.target), node.args, node.kwargs))


def _make_once(module: GraphModule, node: Node, name: str) -> None:
    """Put the result of an operation without inputs in its place."""
    assert callable(node.target)
    module.register_buffer(name, node.target(*node.args, **node.kwargs), persistent=False)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name))


def _does_nothing(node: Node) -> Node | None:
    """The earlier result that this operation repeats, if it does."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target in _RESHAPES and _same_layout(node, source):
        return source
    if node.target is _aten.mul.Scalar and node.args[1] == 1 and _same_layout(node, source):
        return source
    if node.target is _aten.transpose.int and source.target is _aten.transpose.int and set(node.args[1:]) == set(source.args[1:]):
        origin = source.args[0]
        return origin if isinstance(origin, Node) else None
    return None


def _same_layout(a: Node, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
