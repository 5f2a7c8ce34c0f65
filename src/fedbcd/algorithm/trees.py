"""What a module takes and returns, where that is not one tensor: inputs may be a mapping (given as
keywords) or a tuple (given one after another), outputs an object or a tuple with the scores in it.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Tree = Any  # a tensor, or a mapping or a tuple of trees


def mapped(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The same tree with `function` of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: mapped(function, part) for name, part in tree.items()}
    return tuple(mapped(function, part) for part in tree)


def leaves(tree: Tree) -> list[Tensor]:
    """Its tensors."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def joined(function: Callable[[list[Tensor]], Tensor], trees: list[Tree]) -> Tree:
    """One tree of trees that are alike: `function` of the tensors in each place (stack, cat)."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(trees)
    if isinstance(first, Mapping):
        return {name: joined(function, [tree[name] for tree in trees]) for name in first}
    return tuple(joined(function, list(parts)) for parts in zip(*trees, strict=True))


def shapes(tree: Tree) -> str:
    """Of samples, for people: the shapes of its tensors without their first axis."""
    if isinstance(tree, Mapping):
        return ", ".join(f"{name} {shapes(part)}" for name, part in tree.items())
    if isinstance(tree, Tensor):
        return str(tuple(tree.shape[1:]))
    return ", ".join(map(shapes, tree))


def called(module: nn.Module, state: Any, inputs: Tree) -> Any:
    """What the module returns with these parameters and buffers."""
    return functional_call(module, state, *arguments(module, inputs))


def outputs_of(module: nn.Module, inputs: Tree) -> Tensor:
    """The scores of a batch, by the module as it is."""
    positional, named = arguments(module, inputs)
    return scores_of(module(*positional, **named))


def arguments(module: nn.Module, inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional ones, and keywords. A module whose `forward` does not take the parts of a mapping
    or of a tuple is given the whole.
    """
    kind: Any = type(module)
    if isinstance(inputs, Mapping) and _takes(kind, 0, tuple(inputs)):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and _takes(kind, len(inputs), ()):
        return inputs, {}
    return (inputs,), {}


@lru_cache
def _takes(kind: type[nn.Module], positional: int, names: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(kind.forward)
        signature.bind(None, *[None] * positional, **dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def scores_of(outputs: Any) -> Tensor:
    """The scores among what a module returns, as losses of torch and metrics want them: `.logits`
    of an object or a mapping; of a tuple the first tensor that is no single number (the loss).
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("logits")
    if found is None and isinstance(outputs, tuple | list):
        tensors = [part for part in outputs if isinstance(part, Tensor)]
        found = next((part for part in tensors if part.ndim), None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the module returns a {type(outputs).__name__} without logits; return a tensor, an"
            " object with .logits, or a tuple that begins with them"
        )
    return found


def with_labels(inputs: Tree, targets: Tensor) -> Tree:
    """The targets beside the inputs, unless they are there."""
    if not isinstance(inputs, Mapping):
        raise TypeError("a loss of the module's own needs inputs by name; give a mapping of them")
    return {"labels": targets, **inputs}


def module_loss(outputs: Any, targets: Tensor) -> Tensor:  # noqa: ARG001
    """The loss that the module computes itself and returns as `.loss`; it is given the targets as
    `labels`, as modules of Hugging Face expect them.
    """
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the module returns a {type(outputs).__name__} without a loss; return an object with"
            " .loss, or give a loss of two arguments"
        )
    return found
