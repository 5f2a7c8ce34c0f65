"""A function of tensors as the list of operations that it comes down to: the same numbers without
the layers of `vmap` and autograd.

For small models these layers cost more than the arithmetic. A trace holds for one set of shapes; it
has no state, so threads can share it.

Shapes: B pairs of matrices, each (M, K) times (K, N).
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
_SHORT: dict[
    Any, Any
] = {  # the same operations by torch's own entry points, at half the cost of a call
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

LONG_SUM_TERMS = 512  # terms of a sum from which on a product is worth to be taken in two
SMALL_PRODUCT_ENTRIES = (
    2**18
)  # entries of products, of all models together, that leave most of a GPU idle

Operations = Callable[..., Sequence[Tensor]]
_one_at_a_time = Lock()  # a tracer puts hooks into torch for a moment, and takes them out again


def trace(
    function: Callable[..., Sequence[Tensor]], example: tuple[Tensor, ...], halve: bool = False
) -> Operations:
    """The operations that `function` does on tensors like those of `example`. Raises where it
    cannot be traced faithfully.

    `halve` takes long and small products in two.
    """
    with _one_at_a_time, torch.no_grad():
        module = make_fx(lambda *tensors: functionalize(function)(*tensors))(*example)
    _simplify(module)
    if halve:
        for node in module.graph.nodes:
            node.target = product_in_two if _is_long(node) else node.target
        module.recompile()
    operations: Operations = module.forward
    return operations


def product_in_two(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """a b with sums of half the length: [a1; a2] [b1 b2] has a1 b1 and a2 b2 in it, and no factor
    has to be copied for that.

    Twice the arithmetic. But where a GPU has little to do and waits for memory at every few terms,
    it takes half as long.
    """
    (size, m, k), n = a_BMK.shape, b_BKN.shape[2]
    halves_of_a, halves_of_b = (
        a_BMK.reshape(size, 2 * m, k // 2),
        b_BKN.transpose(1, 2).reshape(size, 2 * n, k // 2),
    )
    both = torch.bmm(halves_of_a, halves_of_b.transpose(1, 2)).view(size, m, 2, n, 2)
    return both[:, :, 0, :, 0] + both[:, :, 1, :, 1]


def _is_long(node: Node) -> bool:
    factor: Any = node.args[0] if node.target is torch.bmm else None
    if factor is None:
        return False
    terms = int(factor.meta["val"].shape[2])
    return (
        terms >= LONG_SUM_TERMS
        and terms % 2 == 0
        and int(node.meta["val"].numel()) <= SMALL_PRODUCT_ENTRIES
    )


def _simplify(module: GraphModule) -> None:
    """Take out what repeats or does nothing (half of what `vmap` leaves), make constants once, and
    call the rest the short way.
    """
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
    """Equal for operations that give equal results: no operation of a functional graph changes
    anything.
    """
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
    if (
        node.target is _aten.transpose.int
        and source.target is _aten.transpose.int
        and set(node.args[1:]) == set(source.args[1:])
    ):
        origin = source.args[0]
        return origin if isinstance(origin, Node) else None
    return None


def _same_layout(a: Node, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    )
